"""Operations on lazy logits: which wait in a chain, what a chain is to a loss, how an index splits."""

from __future__ import annotations

import math
import operator

import numpy as np
import torch

# Functions and methods whose results share no memory with what they are given.
_NAMES = """
    argmax argmin amax amin max min aminmax maximum minimum topk sort argsort kthvalue median softmax softmin
    log_softmax logsumexp sigmoid logsigmoid exp log log1p expm1 tanh sum nansum mean std var norm prod cumsum
    any all isnan isinf isfinite nan_to_num add sub mul div true_divide pow neg abs square sqrt clamp where
    eq ne lt le gt ge isclose allclose equal gather index_select take_along_dim masked_select masked_fill
    scatter cat stack matmul mm bmm cross_entropy nll_loss kl_div mse_loss clone item tolist
"""
FRESH = frozenset(_NAMES.split())


def is_float(dtype) -> bool:
    """Whether a dtype is a float dtype."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def is_scalar(value) -> bool:
    """Whether a value is a real number, or a float tensor without dimensions and gradient."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.is_floating_point() and not value.requires_grad
    return isinstance(value, int | float | np.number) and not isinstance(value, bool | np.complexfloating)


def as_it_is(scalar):
    """Copy a number that could change in place later."""
    return scalar.clone() if isinstance(scalar, torch.Tensor) else scalar


def replay(value, link):
    """Apply an operation of a chain to a tensor."""
    name, *operands = link
    return _REPLAYED[name](value, *operands)


_REPLAYED = {
    "mul": operator.mul,
    "div": operator.truediv,
    "to": torch.Tensor.to,
    "tanh": torch.Tensor.tanh,
    "add": lambda value, row: value + row[: value.shape[-1]],
}


def fold(links) -> tuple[float, float | None, torch.Tensor | None] | None:
    """(logit_scale, softcap, row) of a chain cap * tanh(scale * (z + row) / cap), or None if it is another.

    Casts are dropped: the loss is computed in fp32 from the start.
    """
    sides, added = [[1.0, 1.0]], None  # products and divisors, before the tanh and after
    for name, *operands in links:
        if name == "tanh":
            sides.append([1.0, 1.0])
        elif name == "add":
            added = operands[0] if added is None else added + operands[0]
        elif name != "to":
            (scalar,) = operands
            if isinstance(scalar, torch.Tensor):
                if scalar.device.type != "cpu":  # reading it would make the host wait
                    return None
                scalar = scalar.item()
            sides[-1][1 if name == "div" else 0] *= float(scalar)
    if len(sides) > 2 or any(divisor == 0 for _, divisor in sides):
        return None
    scale, *caps = (product / divisor for product, divisor in sides)
    if not caps:
        return scale, None, added
    (cap,) = caps
    return (sides[0][0] * cap / sides[0][1], cap, added) if 0 < cap < math.inf else None


def split_index(keys, ndim):
    """Split an index at the vocabulary axis: (row part, last part); (None, None) if a part covers both."""
    used = sum(_axes(key) for key in keys)
    dots = [i for i, key in enumerate(keys) if key is Ellipsis]
    if len(dots) > 1 or used > ndim or any(_axes(key) < 0 for key in keys):
        return None, None
    fill = (slice(None),) * (ndim - used)
    at = dots[0] if dots else len(keys)
    keys = (*keys[:at], *fill, *keys[at + 1 :])
    last, rows = keys[-1], keys[:-1]
    if last is None or _axes(last) != 1:
        return None, None
    if not isinstance(last, slice) and not all(isinstance(key, slice | int) for key in rows):
        return None, None  # indices on both sides broadcast together
    if all(isinstance(key, slice) and key == slice(None) for key in rows):
        rows = ()
    return rows, last


def _axes(key) -> int:
    """The number of axes that one part of an index takes; -1 if it is unknown."""
    if key is None or key is Ellipsis:
        return 0
    if isinstance(key, bool):
        return -1
    if isinstance(key, torch.Tensor):
        return key.ndim if key.dtype == torch.bool else 1
    return 1 if isinstance(key, slice | int | list) else -1


def prefix(last, columns) -> int | None:
    """n if the slice of the vocabulary is [:n], or None."""
    if not isinstance(last, slice) or last.step not in (None, 1) or last.start not in (None, 0):
        return None
    stop = columns if last.stop is None else last.stop
    return min(stop, columns) if isinstance(stop, int) and stop > 0 else None
