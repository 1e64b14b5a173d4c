"""Outputs of a replayed forward: put together of a graph's tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from transformers.utils import ModelOutput

from tigon.error import Error, check
from tigon.integrations.transformers.lazy_logits import LazyLogits


class Unfit(Exception):
    """Raised if something cannot be captured."""


class Refusing(torch.autograd.Function):
    """A value of a replayed forward, through which no gradient is computed."""

    @staticmethod
    def forward(ctx, value, parameter):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, *_):
        raise Error(
            "[graphs] gradients must come through the loss that the model returns, got a backward through "
            "another of its outputs (a loss of yours needs graphs=False)"
        )


class ReplayedLogits(LazyLogits):
    """Lazy logits of a replayed forward. Their values can be read until the next one."""

    _kept = (*LazyLogits._kept, "_of")
    _of: tuple  # whose forward, and which

    def _call_head(self, request):
        owner, generation = self._of
        since = owner.generation - generation
        words = "logits of a graphed call must be read before the next forward of the model, got {} since"
        check("graphs", since == 0, words, since)
        return super()._call_head(request)


@dataclass(eq=False)
class Parts:
    """The parts of an output in addition to its result."""

    kind: type
    values: list[tuple[str, bool]]  # name, and whether there is a gradient
    logits: tuple[str, dict] | None = None  # name and attributes of lazy logits, without hidden states
    tensors: list[torch.Tensor] = field(default_factory=list)  # of the fields, then the hidden states

    def put_together(self, found: dict) -> ModelOutput:
        """Make the output of these values; values that its class does not name are set last."""
        names = {part.name for part in fields(self.kind)}
        output = self.kind(**{name: value for name, value in found.items() if name in names})
        for name in [name for name in found if name not in names]:
            output[name] = found[name]
        return output

    def of(self, tensors: list[torch.Tensor]) -> Parts:
        return replace(self, tensors=tensors)


def taken_apart(output, result: str) -> tuple[Parts, list[torch.Tensor]]:
    """The parts of an output, and its tensors; the first is the result, which is differentiated."""
    if not isinstance(output, ModelOutput):
        raise Unfit(f"the model returns a {type(output).__name__} (return_dict=True)")
    first = output.get(result)
    if not isinstance(first, torch.Tensor) or (result == "loss" and first.ndim) or not first.requires_grad:
        raise Unfit(f"the model returns no {result} with a gradient")
    parts, tensors, hidden = Parts(type(output), []), [first.detach()], []
    for name, value in output.items():
        if name == result:
            continue
        if isinstance(value, LazyLogits):
            if value._real is not None or value._detached or value._base is not None:
                raise Unfit("the model reads its logits")
            if any(isinstance(argument, torch.Tensor) for link in value._chain for argument in link):
                raise Unfit("a tensor is added to the logits")
            parts.logits = name, {kept: getattr(value, kept) for kept in _OF_LOGITS}
            hidden = [value._hidden.detach()]
        elif isinstance(value, torch.Tensor):
            if name == "logits":
                raise Unfit("the head computes logits")
            parts.values.append((name, value.requires_grad))
            tensors.append(value.detach())
        else:
            raise Unfit(f"the model returns {name}, a {type(value).__name__}")
    return parts, tensors + hidden


_OF_LOGITS = ("_head", "_columns", "dtype", "_calls", "_autocast", "_rows", "_limit", "_chain")


def replayed_logits(parts: Parts, of: tuple, length: int | None, parameter) -> LazyLogits:
    """Lazy logits of a forward's hidden states, of the first `length` positions of each row."""
    made, hidden = parts.logits[1], parts.tensors[-1].data[..., :length, :]  # replays change no version
    hidden = Refusing.apply(hidden, parameter)
    names = ("_columns", "dtype", "_calls", "_autocast", "_rows")
    logits = ReplayedLogits(made["_head"], hidden, *(made[name] for name in names))
    logits._chain, logits._limit = made["_chain"], made["_limit"]
    logits._of = of
    return logits
