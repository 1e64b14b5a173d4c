"""Tells what may be overwritten: memory that holds every element once, and nothing else that is read.

Traced calls pass: they compute the results apart and copy them.
"""

from __future__ import annotations

import torch

from tigon._op import is_traced_or_transformed
from tigon.error import refuse


def check_written(op: str, name: str, x: torch.Tensor) -> None:
    """x, which is to be overwritten, must hold every element once."""
    if not is_traced_or_transformed() and not _nested(_dimensions(x, x)):
        refuse(op, name + " must hold every element once to be written in place, got strides {}", x.stride())


def check_apart(op, name, x: torch.Tensor, other_name, other: torch.Tensor, *, or_same: bool = False) -> None:
    """x and other, of one dtype, must share no element; `or_same`: or all of them.

    Layouts of different strides whose elements lie between each other's are taken for overlapping.
    """
    if is_traced_or_transformed() or x.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return
    distance = other.storage_offset() - x.storage_offset()
    dimensions = _dimensions(x, other)
    same = or_same and distance == 0 and x.shape == other.shape and dimensions is not None
    if not same and _meet(distance, x, other, dimensions):
        refuse(op, name + " must share no memory with {} to be written in place, got some", other_name)


def _dimensions(x, other):
    """(stride, size in x, size in other), widest first, without sizes of one; None: their strides differ."""
    dimensions = []
    for n, m, step, other_step in zip(x.shape, other.shape, x.stride(), other.stride(), strict=True):
        if n > 1 and m > 1 and step != other_step:
            return None
        if n > 1 or m > 1:
            dimensions.append((step if n > 1 else other_step, n, m))
    return sorted(dimensions, reverse=True)


def _nested(dimensions) -> bool:
    """Whether every stride passes over all that the narrower ones reach."""
    reach = 0
    for step, n, m in reversed(dimensions):
        if step <= reach:
            return False
        reach += (max(n, m) - 1) * step
    return True


def _meet(distance, x, other, dimensions) -> bool:
    """Whether an element of x is one of other, which begins `distance` behind it."""
    if x.numel() == 0 or other.numel() == 0:
        return False
    if dimensions is None or not _nested(dimensions):
        return -_reach(other) <= distance <= _reach(x)
    return _reached(distance, dimensions)


def _reach(x) -> int:
    return sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def _reached(distance, dimensions) -> bool:
    """Whether distance = sum of (i - j) * stride for places i < n and j < m of each dimension."""
    if not dimensions:
        return distance == 0
    (step, n, m), *narrower = dimensions
    steps = distance // step
    return any(-m < k < n and _reached(distance - k * step, narrower) for k in (steps, steps + 1))
