"""Losses whose weight or logits are a DTensor: local if replicated, else over the mesh's group."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tigon import parallel
from tigon.error import check


class _Place(NamedTuple):
    """The argument and mesh dimension of the vocabulary."""

    name: str  # of the argument that holds the vocabulary
    like: torch.Tensor
    dim: int | None  # the mesh dimension that shards it; None: every process has all of it

    def placements(self, placement) -> tuple:
        """``placement`` in the mesh dimension of the vocabulary, replicated in others."""
        return tuple(placement if i == self.dim else Replicate() for i in range(self.like.device_mesh.ndim))


def _place(op: str, name: str, t: torch.Tensor) -> _Place:
    """Find the mesh dimension that shards the vocabulary; refuse other placements, as nothing is gathered."""
    wanted = Shard(t.dim() - 1 if name == "logits" else 0)
    dims = [i for i, p in enumerate(t.placements) if not p.is_replicate()]
    fits = all(type(t.placements[i]) is Shard and t.placements[i].dim % t.dim() == wanted.dim for i in dims)
    words = "{} must be replicated, or {} in one mesh dimension, got {}"
    check(op, fits and len(dims) <= 1, words, name, wanted, t.placements)
    check(op, not getattr(t, "tigon_main_grad", False), "{}.tigon_main_grad is not for DTensors", name)
    return _Place(name, t, dims[0] if dims else None)


def _check_placed(op: str, name: str, t: torch.Tensor, place: _Place, *allowed: tuple) -> tuple:
    """The placements of ``t``, which must be some of the allowed ones."""
    check(op, t.device_mesh == place.like.device_mesh, "{} must be on the mesh of {}", name, place.name)
    has = tuple(Shard(p.dim % t.dim()) if type(p) is Shard else p for p in t.placements)
    words = "{} must be placed as {}, got {} (redistribute it: nothing is gathered here)"
    wanted = " or ".join(str(list(placements)) for placements in allowed)
    check(op, has in allowed, words, name, wanted, has)
    return has


def _lora(op: str, lora: tuple, place: _Place) -> tuple:
    """Return ``(A, B, scale)`` of this process: A is replicated, or plain; B is placed as the weight."""
    if not (isinstance(lora, Sequence) and len(lora) == 3):
        return lora  # the function reports the error
    a, b, scale = lora
    if isinstance(a, DTensor):
        replicated = place.placements(Replicate())
        _check_placed(op, "lora A", a, place, replicated)
        a = a.to_local(grad_placements=replicated)  # already summed over the group
    fits = isinstance(b, DTensor) or place.dim is None
    check(op, fits, "lora B must be a DTensor placed as weight, got another tensor")
    if isinstance(b, DTensor):
        _check_placed(op, "lora B", b, place, place.like.placements)
        b = b.to_local(grad_placements=b.placements)
    return a, b, scale


def loss(op: str, function, args: tuple, options: dict, vocab: int | None = None):
    """``function(*args, **options)`` of a weight or of logits that are a DTensor.

    The result is a plain tensor and the same in all processes of the group. The gradient of a sharded weight
    is sharded in the same way; that of a replicated weight is this process's, as for a plain weight.
    Replicated hidden states get a partial gradient, which their own operations reduce; plain hidden states
    get the sum. Rows of a sharded weight past ``vocab`` are padding.
    """
    signature = inspect.signature(function)
    given = signature.bind(*args, **options).arguments
    name = "logits" if "logits" in signature.parameters else "weight"
    place = _place(op, name, given[name])
    replicated, extra = place.placements(Replicate()), {}
    for key, t in given.items():
        if key == "lora" and t is not None:
            given[key] = _lora(op, t, place)
            continue
        if not isinstance(t, DTensor):
            fits = key != "bias" or t is None or place.dim is None
            check(op, fits, "bias must be a DTensor placed as weight, got a plain tensor")
            continue
        if key in (name, "bias"):
            if key == "bias":
                _check_placed(op, key, t, place, place.like.placements)
            given[key] = t.to_local(grad_placements=place.like.placements)
        elif key == "hidden" and place.dim is not None:
            by_rows = place.placements(Shard(0))
            if _check_placed(op, key, t, place, replicated, by_rows) == by_rows:
                given[key], extra["sequence_parallel"] = t.to_local(grad_placements=by_rows), True
            else:
                given[key] = t.to_local(grad_placements=place.placements(Partial()))
                extra["partial_hidden_grad"] = True
        else:
            _check_placed(op, key, t, place, replicated)
            given[key] = t.to_local(grad_placements=replicated)
    if place.dim is None:
        return function(**given)
    sharded = getattr(parallel, op)
    known = inspect.signature(sharded).parameters
    given.pop("inplace", None)  # only permits reuse of memory
    for key in [key for key in given if key not in known]:
        check(op, given.pop(key) is None, "{} is not supported with a sharded {}", key, name)
    mesh, columns = place.like.device_mesh, place.like.shape[-1 if name == "logits" else 0]
    most = -(-columns // mesh.size(place.dim))  # columns of a process, as torch.chunk gives them
    return sharded(
        **given,
        **extra,
        group=mesh.get_group(place.dim),
        vocab=columns if vocab is None else vocab,
        first_class=min(most * mesh.get_local_rank(place.dim), columns),
    )
