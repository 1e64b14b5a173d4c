"""A weight that is a head and an embedding's table: one gradient of its size.

Autograd sums the gradients of both uses, and each has the size of the weight. The head's backward runs first
and notes the gradient that it returns. The embedding's backward adds its rows to that, while nothing but the
sum of autograd holds it: in the same backward pass, on the same stream, without hooks of the gradient (those
after its accumulation see the sum). In every other case it returns a gradient of its own.
"""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from tigon._load import native

_add_rows = native("embedding_add_")
_known = WeakIdKeyDictionary()  # weights that an embedding has looked up -> _Returned, or None


class _Returned(NamedTuple):
    """A gradient that the backward of a head has returned."""

    task: int  # the backward pass
    stream: int
    gradient: TensorWeakRef


def is_table(weight: torch.Tensor) -> bool:
    """Whether an embedding has looked up rows of the weight."""
    return weight in _known


def returned(weight: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Note the gradient that a head's backward returns."""
    known = None
    if gradient is not None and not torch.is_grad_enabled():
        task = torch._C._current_graph_task_id()
        known = _Returned(task, _stream(gradient), TensorWeakRef(gradient))
    _known[weight] = known


def lookup(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """``F.embedding`` of a leaf, with this backward."""
    _uses_of_a_sum(weight.device.type)  # not first in a backward pass
    _known.setdefault(weight, None)
    return _Lookup.apply(weight, ids, -1 if padding_idx is None else padding_idx)


def _stream(t: torch.Tensor) -> int:
    return torch.cuda.current_stream(t.device).cuda_stream if t.is_cuda else 0


def _sum_of(weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a head that is autograd's sum so far and may be written, or None."""
    known = _known.get(weight)
    if known is None or torch.is_grad_enabled() or weight._backward_hooks:
        return None
    if known.task != torch._C._current_graph_task_id():
        return None
    t = known.gradient()
    if t is None or t.dtype != dy.dtype or not t.is_contiguous() or known.stream != _stream(t):
        return None
    alone = _uses_of_a_sum(weight.device.type)
    return t if alone is not None and _uses(t) == alone else None


def _uses(t: torch.Tensor) -> tuple[int, int] | None:
    """The references of PyTorch and of Python; None: not known, and equal to no others."""
    return (t._use_count(), sys.getrefcount(t)) if hasattr(t, "_use_count") else None


@functools.cache
def _uses_of_a_sum(device: str) -> tuple[int, int] | None:
    """The references to a gradient that only its sum holds, in this PyTorch, on devices of a type."""
    seen, made = [], []

    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x + w

        @staticmethod
        def backward(ctx, dy):
            dw = dy.clone()
            made.append(TensorWeakRef(dw))
            return dy, dw

    class Table(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.clone()

        @staticmethod
        def backward(ctx, dy):
            t = made[0]()
            seen.append(None if t is None else _uses(t))
            return

    with torch.enable_grad():
        w = torch.ones(1, device=device, requires_grad=True)
        Head.apply(Table.apply(w), w).sum().backward()
    return seen[0]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, padding_idx):
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx = weight, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, dy):
        (ids,), weight = ctx.saved_tensors, ctx.weight
        total = _sum_of(weight, dy)
        if total is None:
            rows = weight.shape[0]
            return torch.ops.aten.embedding_dense_backward(dy, ids, rows, ctx.padding_idx, False), None, None
        _add_rows(dy.reshape(-1, dy.shape[-1]), ids.reshape(-1), total, ctx.padding_idx)
        return None, None, None
