"""Muon's passes over elements, of lists of tensors of one size. Contract: ``csrc/tigon/ops/muon/muon.h``."""

from __future__ import annotations

import torch

from tigon._op import has_kernel, raw


def _fake(momenta, grads, momentum, nesterov):
    like = grads[0]
    matrices, size = like.shape[:-2].numel(), like.shape[-2:].numel()
    sums = like.new_empty(len(grads) * matrices, -(-size // 16384), dtype=torch.float64)
    return like.new_empty(len(grads), *like.shape), sums


_momentum = raw("muon_momentum_", _fake, op="muon")
_update = raw("muon_update_", lambda *args: None, op="muon")


def _has_kernel(*lists: list[torch.Tensor]) -> bool:
    return has_kernel("muon", *(tensors[0] for tensors in lists)) and all(
        t.dtype == tensors[0].dtype and t.is_contiguous() for tensors in lists for t in tensors
    )


def momentum_(
    momenta: list[torch.Tensor], grads: list[torch.Tensor], momentum: float, nesterov: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Adds gradients of equal shape to their momenta.

    Returns:
        The directions, stacked, and the norm of each of their matrices where it was to be had.
    """
    if _has_kernel(momenta, grads):
        updates, squares = _momentum(momenta, grads, momentum, nesterov)
        return updates, squares.sum(1).sqrt_()
    torch._foreach_lerp_(momenta, grads, 1 - momentum)
    if not nesterov:
        return torch.stack(momenta), None
    return torch.stack([g.lerp(m, momentum) for g, m in zip(grads, momenta, strict=True)]), None


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
