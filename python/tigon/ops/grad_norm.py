"""The norm of all gradients, and clipping by it.

Contracts: ``grad_norm.h`` and ``scale.h`` of ``csrc/tigon/ops/adamw``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from tigon._dtensor import is_dtensor
from tigon._op import has_kernel, raw
from tigon.error import Error, check, refuse
from tigon.ops.agreement import agree_on
from tigon.ops.arguments import check_booleans, check_numbers, kind_of


def _fake(grads, max_norm, grad_scale):
    like = grads[0]
    return like.new_empty((), dtype=torch.float64), *(like.new_empty((), dtype=torch.float32) for _ in "12")


# (grads, max_norm, grad_scale) -> sum of squares float64, norm and factor float32.
_grad_norm = raw("grad_norm", _fake, op="grad_norm")
# (tensors, factor) -> (), in place.
_scale = raw("scale_", lambda tensors, factor: None, op="scale")


def local(t: torch.Tensor) -> torch.Tensor:
    """This process' part of a DTensor, any other tensor itself."""
    return t._local_tensor if is_dtensor(t) else t


def process_groups(t: torch.Tensor) -> tuple:
    """Over which groups the squares of a tensor's parts are to be added."""
    if not is_dtensor(t):
        return ()
    mesh, groups = t.device_mesh, []
    for i, placement in enumerate(t.placements):
        if placement.is_shard():
            groups.append(mesh.get_group(i))
        elif not placement.is_replicate():
            words = "gradients must be sharded or replicated, got a DTensor that is {}"
            refuse("grad_norm", words, placement)
    return tuple(groups)


def alike(op: str, parameters: list[torch.Tensor], call: Callable[[], object] = lambda: None):
    """``call()``, once all processes that share the parameters found that the same ones have gradients.

    A call that raises is an error in all of them. Without DTensors nobody else takes part.
    """
    placed = {(p.device_mesh, p.placements): p for p in parameters if is_dtensor(p)}
    groups = {group: None for p in placed.values() for group in process_groups(p)}
    if not groups:
        return call()

    def describe():
        return {"gradients": [i for i, p in enumerate(parameters) if p.grad is not None]}, call()

    return agree_on(op, groups, parameters[0].device, describe)


def _total(grads: list[torch.Tensor]) -> torch.Tensor:
    if has_kernel("grad_norm", *grads):
        return _grad_norm(grads, 0.0, None)[0]
    return torch.stack([g.detach().double().square().sum() for g in grads]).sum()


@torch.no_grad()
def global_norm(
    grads: list[torch.Tensor], max_norm: float = float("inf"), grad_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm, factor that clips it to `max_norm`) as scalars on the first gradient's device: float32, the
    factor float64 if a gradient is.

    Gradients may lie on several devices and, as DTensors, on several processes, which then all call this.
    """
    if set(map(type, grads)) == {torch.Tensor}:
        try:  # the native call looks at each of them
            return _grad_norm(grads, float(max_norm), grad_scale)[1:]
        except (Error, NotImplementedError):  # of several devices, without a kernel, or refused below
            pass
    for g in grads:
        if g.layout != torch.strided or g.is_complex():
            refuse("grad_norm", "gradients must be dense and real, got {} of {}", g.layout, g.dtype)
        if g.is_meta != grads[0].is_meta:
            refuse("grad_norm", "gradients must be on {} as the first, got {}", grads[0].device, g.device)
    parts: dict[tuple, list] = {}
    for g in grads:
        parts.setdefault((g.device, process_groups(g)), []).append(local(g))
    (device, groups), first = next(iter(parts.items()))
    if len(parts) == 1 and not groups and has_kernel("grad_norm", *first):
        return _grad_norm(first, float(max_norm), grad_scale)[1:]
    totals = []
    for (_, groups), tensors in parts.items():
        total = _total(tensors)
        for group in groups:
            torch.distributed.all_reduce(total, group=group)
        totals.append(total.to(device))
    norm = torch.stack(totals).sum().sqrt()
    if grad_scale is not None:
        norm = norm / grad_scale.to(device)
    wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    return norm.float(), (max_norm / (norm + 1e-6)).clamp(max=1.0).to(wide)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`: ``torch.nn.utils.clip_grad_norm_``.

    Args:
        parameters: one or several; those without a gradient are passed over. DTensors (FSDP2, tensor
            parallel) and several devices may be mixed; with DTensors every process calls this.
        max_norm: of all gradients as one vector.
        norm_type: a number or its name, as "inf". Other than 2 is left to PyTorch.
        error_if_nonfinite: raise if the norm is infinite or NaN. This waits for the device.
        foreach: only for PyTorch's function.

    Returns:
        The norm before: float32, a scalar, on the device of the first gradient. PyTorch's has the gradients'
        dtype: in bfloat16 three digits. Deterministic, read from each gradient once, right to 1e-6 of it.
        Gradients are multiplied by a float32 factor (float64 ones by a float64) and rounded once; a factor of
        1 writes none.

    Raises:
        tigon.Error: parameters that are no tensors; gradients that are sparse or complex; with
            `error_if_nonfinite` a norm that is not finite.

    Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063,
    algorithm 1.
    """
    several = isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor)
    parameters = list(parameters) if several and not hasattr(parameters, "__array__") else [parameters]
    for p in parameters:
        if not isinstance(p, torch.Tensor):
            refuse("clip_grad_norm_", "parameters must be tensors, got {}", kind_of(p))
    check_booleans("clip_grad_norm_", error_if_nonfinite=error_if_nonfinite)
    if foreach is not None:
        check_booleans("clip_grad_norm_", foreach=foreach)
    grads = [p.grad for p in parameters if p.grad is not None]
    if isinstance(norm_type, str):
        with contextlib.suppress(ValueError):  # refused in the next line
            norm_type = float(norm_type)
    numbers = {"max_norm": max_norm, "norm_type": norm_type}
    alike("clip_grad_norm_", parameters, lambda: check_numbers("clip_grad_norm_", **numbers))
    check("clip_grad_norm_", max_norm >= 0, "max_norm must be >= 0, got {}", max_norm)
    if float(norm_type) != 2.0:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    if not grads:
        return torch.tensor(0.0)
    norm, factor = global_norm(grads, max_norm)
    if error_if_nonfinite:
        words = "the norm of all gradients must be finite, got {}"
        check("clip_grad_norm_", bool(norm.isfinite()), words, float(norm))
    _scale_all(grads, factor)
    return norm


def _scale_all(grads: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Every gradient times `factor`, in place, wherever it lies."""
    if set(map(type, grads)) == {torch.Tensor} and _scales_at_once(grads, factor):
        return
    by_kind: dict[tuple, list] = {}
    for g in grads:
        by_kind.setdefault((g.device, g.dtype), []).append(local(g))
    for (device, dtype), tensors in by_kind.items():
        there = factor.to(device, torch.promote_types(dtype, torch.float32))
        if not _scales_at_once(tensors, there):
            torch._foreach_mul_(tensors, there)


def _scales_at_once(grads: list[torch.Tensor], factor: torch.Tensor) -> bool:
    """Whether one native call scaled them all; otherwise nothing was modified."""
    if len(set(map(id, grads))) < len(grads):  # a parameter given twice is scaled twice, one after the other
        return False
    try:
        _scale(grads, factor)
    except (Error, NotImplementedError):  # of several devices, without a kernel, or with gaps
        return False
    torch.autograd.graph.increment_version(grads)
    return True
