"""Muon's passes over elements, of lists of tensors of one shape. Contract: ``csrc/tigon/ops/muon/muon.h``."""

from __future__ import annotations

import torch

from tigon._op import has_kernel, raw
from tigon.ops.orthogonalize import Start

_CHUNK = 16384  # elements that one sum of squares is of
_momentum = raw("muon_momentum_", lambda *args: None, op="muon")
_update = raw("muon_update_", lambda *args: None, op="muon")


def _has_kernel(*lists: list[torch.Tensor]) -> bool:
    return has_kernel("muon", *(tensors[0] for tensors in lists)) and all(
        t.dtype == tensors[0].dtype and t.is_contiguous() for tensors in lists for t in tensors
    )


def momentum_(
    momenta: list[torch.Tensor],
    grads: list[torch.Tensor],
    momentum: float,
    nesterov: bool,
    start: Start | None = None,
) -> torch.Tensor:
    """Adds gradients to their momenta; the directions of the update, stacked, as `start` says."""
    like = grads[0]
    if not _has_kernel(momenta, grads):
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
        if nesterov:
            momenta = [g.lerp(m, momentum) for g, m in zip(grads, momenta, strict=True)]
        stacked = torch.stack(momenta)
        return stacked if start is None else start.of(stacked)
    size, factors = like.shape[-2:].numel(), None
    matrices = like.numel() // size
    if start is not None:  # two passes: factors follow from norms
        squares = like.new_empty(len(grads) * matrices, -(-size // _CHUNK), dtype=torch.float64)
        _momentum(momenta, grads, momentum, nesterov, True, None, None, squares, matrices)
        factors = start.factors(squares.sum(1).sqrt_().float())
    dtype = like.dtype if start is None else start.dtype
    stacked = like.new_empty(len(grads), *like.shape, dtype=dtype)
    _momentum(momenta, grads, momentum, nesterov, start is None, stacked, factors, None, matrices)
    return stacked


def update_(
    params: list[torch.Tensor], updates: list[torch.Tensor], lr: float | torch.Tensor, ratio: float,
    weight_decay: float,
) -> None:  # fmt: skip
    """Subtracts ``lr * (weight_decay * param + ratio * update)``; `lr` is a number, or on the device."""
    on_device = isinstance(lr, torch.Tensor)
    if _has_kernel(params, updates):
        there = lr.to(params[0].device, torch.float32) if on_device else None
        _update(params, updates, 0.0 if on_device else lr, there, ratio, weight_decay)
        return
    for p, update in zip(params, updates, strict=True):
        p.mul_(1 - lr * weight_decay).sub_(update * (ratio * lr))
