"""Muon's passes over elements, of lists of tensors of one shape. Contract: ``csrc/tigon/ops/muon/muon.h``."""

from __future__ import annotations

import torch

from tigon._op import has_kernel, raw

_CHUNK = 16384  # elements that one sum of squares is of
_momentum = raw("muon_momentum_", lambda *args: None, op="muon")
_update = raw("muon_update_", lambda *args: None, op="muon")


def _has_kernel(*lists: list[torch.Tensor]) -> bool:
    return has_kernel("muon", *(tensors[0] for tensors in lists)) and all(
        t.dtype == tensors[0].dtype and t.is_contiguous() for tensors in lists for t in tensors
    )


def x_scale(x: torch.Tensor) -> float:
    """The norm of what iterations work on. Elements are then about 1 in size: fp16 has neither small nor
    large ones."""
    return min(float(x.shape[-2] * x.shape[-1]) ** 0.5, 2.0**14)


class Start:
    """How iterations begin: with matrices over their norm, times a scale, in a dtype.

    Args:
        like: [..., rows, columns].
        eps: least norm.
        dtype: of the matmuls; ``None``: float64 for float64, float16 on CUDA, else float32.
    """

    def __init__(self, like: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> None:
        wide = torch.promote_types(like.dtype, torch.float32)
        self.dtype = dtype or (torch.float16 if like.is_cuda and wide == torch.float32 else wide)
        self.eps, self.scale = eps, x_scale(like)

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """The factors of matrices of these norms, which are overwritten."""
        return self.scale / norms.clamp_(min=self.eps)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """`x` times its factors; its memory is used for the result if it may be."""
        fits = self.dtype.itemsize == x.dtype.itemsize
        out = x.view(self.dtype) if fits else torch.empty_like(x, dtype=self.dtype)
        if _has_kernel([x]):
            return _form([x], [x], 0.0, False, False, self, out)
        wide = torch.promote_types(x.dtype, torch.float32)
        norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
        return torch.mul(x, self.factors(norms), out=out)


def _form(momenta, grads, momentum, nesterov, adds, start, out) -> torch.Tensor:
    """The native calls: with a `start` two, since factors follow from norms."""
    shape, factors = grads[0].shape, None
    matrices = shape[:-2].numel()
    if start is not None:
        chunks = -(-shape[-2:].numel() // _CHUNK)
        squares = out.new_empty(len(grads) * matrices, chunks, dtype=torch.float64)
        _momentum(momenta, grads, momentum, nesterov, adds, None, None, squares, matrices)
        factors, adds = start.factors(squares.sum(1).sqrt_()).float(), False
    _momentum(momenta, grads, momentum, nesterov, adds, out, factors, None, matrices)
    return out


def momentum_(
    momenta: list[torch.Tensor],
    grads: list[torch.Tensor],
    momentum: float,
    nesterov: bool,
    start: Start | None = None,
) -> torch.Tensor:
    """Adds gradients to their momenta; the directions of the update, stacked, or what iterations `start`
    with."""
    if _has_kernel(momenta, grads):
        dtype = grads[0].dtype if start is None else start.dtype
        out = grads[0].new_empty(len(grads), *grads[0].shape, dtype=dtype)
        return _form(momenta, grads, momentum, nesterov, True, start, out)
    torch._foreach_lerp_(momenta, grads, 1 - momentum)
    if nesterov:
        momenta = [g.lerp(m, momentum) for g, m in zip(grads, momenta, strict=True)]
    stacked = torch.stack(momenta)
    return stacked if start is None else start.of(stacked)


def update_(
    params: list[torch.Tensor],
    updates: list[torch.Tensor],
    lr: float | torch.Tensor,
    ratio: float,
    weight_decay: float,
) -> None:
    """Subtracts ``lr * (weight_decay * param + ratio * update)``; `lr` is a number, or on the device."""
    on_device = isinstance(lr, torch.Tensor)
    if _has_kernel(params, updates):
        there = lr.to(params[0].device, torch.float32) if on_device else None
        _update(params, updates, 0.0 if on_device else lr, there, ratio, weight_decay)
        return
    for p, update in zip(params, updates, strict=True):
        p.mul_(1 - lr * weight_decay).sub_(update * (ratio * lr))
