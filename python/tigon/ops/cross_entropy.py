"""Softmax cross-entropy of given logits. Contract: ``csrc/tigon/ops/cross_entropy/cross_entropy.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon._dtensor import of_vocabulary
from tigon._op import has_kernel
from tigon.error import check
from tigon.ops import arguments
from tigon.ops.loss_gradient import RowLoss

_OP = "cross_entropy"
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def reference(
    logits,
    target,
    *,
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    softcap=None,
    z_loss=0.0,
    reduction="mean",
    denominator=None,
    inplace=False,
    token_weight=None,
):
    """The same formula in plain PyTorch operations (any float dtype, any device).

    Args:
        token_weight: factor of each row's loss, as :func:`tigon.linear_cross_entropy` has it.
    """
    del inplace
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1])
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    y, factor = arguments.known_labels(target.reshape(-1).long(), ignore_index, z.shape[-1])
    weight = None if weight is None else weight.to(z.dtype)
    rows = F.cross_entropy(
        z, y, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    rows = rows if factor is None else rows * factor
    valid = y != ignore_index
    if z_loss:
        rows = rows + torch.where(valid, z_loss * torch.logsumexp(z, -1).square(), 0.0)
    if token_weight is not None:
        rows = torch.where(valid, rows * token_weight.detach().reshape(-1), 0.0)
    if denominator is not None:
        return divide(rows.sum(), denominator)
    if reduction == "none":
        return rows.view(target.shape)
    if reduction == "sum":
        return rows.sum()
    counted = valid if weight is None else torch.where(valid, weight[torch.where(valid, y, 0)], 0.0)
    return rows.sum() / counted.sum()


def check_denominator(op, denominator, name="denominator"):
    """A number, or a tensor of one, or none."""
    if isinstance(denominator, torch.Tensor):
        arguments.check_layout(op, name, denominator)
        check(op, denominator.numel() == 1, name + " must have one element, got {}", denominator.numel())
        real = not (denominator.is_complex() or arguments.is_narrow(denominator))
        check(op, real, name + " must be real, of at least 16 bits, got {}", denominator.dtype)
        arguments.check_constant(op, name, denominator)
    elif denominator is not None:
        arguments.check_numbers(op, **{name: denominator})


def divide(total, denominator):
    """A sum over its denominator, in plain PyTorch operations and the sum's dtype."""
    if isinstance(denominator, torch.Tensor):
        check(
            _OP,
            denominator.is_meta == total.is_meta,
            "denominator must be on {}, got {}",
            total.device,
            denominator.device,
        )
        denominator = denominator.detach().to(total.device).reshape(())
    return (total / denominator).to(total.dtype)


def split_denominator(denominator, device):
    """A checked denominator as ``(tensor, number)``, one of them or both ``None``.

    A number, or a CPU tensor with CUDA logits, is read here; a tensor on the device is read by the kernel,
    without a synchronisation.
    """
    if not isinstance(denominator, torch.Tensor):
        return None, None if denominator is None else float(denominator)
    denominator = denominator.detach()
    if denominator.device != device and denominator.device.type == "cpu":
        if not torch.compiler.is_compiling():
            return None, float(denominator)
        denominator = denominator.to(device)
    if denominator.dtype not in (torch.float32, torch.float64, torch.int64, torch.int32):
        denominator = denominator.float()
    return denominator, None


def check_loss(op, label_smoothing, z_loss, reduction, denominator):
    """The options of a cross-entropy, apart from those of its logits and labels."""
    check_denominator(op, denominator)
    arguments.check_numbers(op, label_smoothing=label_smoothing, z_loss=z_loss)
    arguments.check_choice(op, "reduction", reduction, REDUCTIONS)
    check(op, 0.0 <= label_smoothing <= 1.0, "label_smoothing must be in [0, 1], got {}", label_smoothing)


def check_logits(op, ignore_index, softcap):
    """The label that does not count, and the softcap of given logits."""
    arguments.check_integers(op, ignore_index=ignore_index)
    arguments.check_positive(op, "softcap", softcap, or_none=True)


def check_target(op, name, target, shape):
    """Dtype and shape; the labels themselves are read when the kernel runs."""
    integer = isinstance(target, torch.Tensor) and not (
        target.is_floating_point() or target.is_complex() or target.dtype == torch.bool
    )
    check(op, integer, "{} must be an integer tensor, got {}", name, arguments.kind_of(target))
    arguments.check_layout(op, name, target)
    check(op, target.shape == shape, "{} must be {}, got {}", name, shape, target.shape)


_loss = RowLoss(_OP, reduction=5)


@of_vocabulary("cross_entropy", 0, "logits")
@arguments.called()
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """Cross-entropy of softmax(logits) against class indices, over the last dimension.

    For each row, with ``z = softcap * tanh(logits / softcap)`` (or the logits), ``lse = logsumexp(z)``, ``y``
    the target, ``s = label_smoothing`` and ``w = weight`` (1 without)::

        loss = (1 - s) w[y] (lse - z[y]) + s / V * sum_c w[c] (lse - z[c]) + z_loss * lse^2

    Args:
        logits: ``[..., V]`` float32, bfloat16 or float16, any leading strides (rows dense, or copied once).
            float64 runs the eager reference.
        target: ``[...]`` integer class indices in ``[0, V)``, or ``ignore_index`` (loss 0, gradient 0).
        weight: ``[V]`` weight of each class or ``None``; converted to float32, not differentiable.
        ignore_index: the label of rows that do not count; may lie in ``[0, V)``.
        label_smoothing: in [0, 1].
        softcap: > 0 or ``None``.
        z_loss: factor of ``lse^2`` (not class-weighted).
        reduction: ``"mean"`` (over the rows that count: divided by the sum of their ``w[y]``), ``"sum"`` or
            ``"none"``.
        denominator: a number or a tensor of one element: the loss is ``sum / denominator`` whatever
            ``reduction`` says. A tensor on the logits' device is read by the kernel, without synchronisation.
        inplace: permission to write the gradient of a scalar loss over the logits instead of into fresh
            memory of their size. The logits are then gone; autograd raises if another operation saved them.
            They must not be a leaf that requires grad. Without effect when no gradient is needed, with
            ``reduction="none"`` and under ``torch.compile``, because the compiler plans memory.

    Returns:
        float32 scalar, or ``[...]`` for ``"none"``. Differentiable in logits; accumulation in float32;
        bitwise deterministic. With every row ignored: NaN for ``"mean"`` as in PyTorch, 0 otherwise;
        gradients are zero.

        A scalar loss forms its gradient in the forward pass (one read and one write of the logits in all) and
        keeps only that gradient, which its backward returns; a backward with ``retain_graph`` returns
        out a copy. ``"none"`` keeps the logits and computes the gradient in backward.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit; on the CPU also a label outside
            ``[0, V)``. On CUDA such a label makes that row's loss and gradient NaN, without synchronisation.

    Source: label smoothing: Szegedy et al. 2016, "Rethinking the Inception Architecture"; softcap: Gemma Team
    2024, "Gemma 2"; z-loss: Chowdhery et al. 2022, "PaLM", section 5.
    """
    arguments.check_float(_OP, "logits", logits)
    check(_OP, logits.dim() >= 1, "logits must have at least one dimension, got 0")
    check(_OP, logits.shape[-1] >= 1, "logits must have at least one column, got {}", logits.shape)
    check_target(_OP, "target", target, logits.shape[:-1])
    check_loss(_OP, label_smoothing, z_loss, reduction, denominator)
    check_logits(_OP, ignore_index, softcap)
    arguments.check_booleans(_OP, inplace=inplace)
    need_grad = torch.is_grad_enabled() and logits.requires_grad
    if weight is not None:
        arguments.check_float(_OP, "weight", weight)
        classes, constant = logits.shape[-1:], not (weight.requires_grad and torch.is_grad_enabled())
        check(_OP, weight.shape == classes, "weight must be {}, got {}", classes, weight.shape)
        words = "weight must not require grad (the loss is not differentiable in it), got a tensor that does"
        check(_OP, constant, words)
        weight = weight.to(torch.float32 if logits.dtype != torch.float64 else torch.float64)
    words = "logits must not be a leaf that requires grad with inplace=True, got a leaf"
    check(_OP, not (inplace and need_grad and logits.is_leaf), words)
    options = (ignore_index, label_smoothing, softcap or 0.0, z_loss)
    if not has_kernel(_OP, logits=logits, beside={"target": target, "weight": weight}):
        arguments.check_range(_OP, "target", target, logits.shape[-1], ignore_index)
        return reference(
            logits,
            target,
            weight=weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            z_loss=z_loss,
            reduction=reduction,
            denominator=denominator,
        )
    reduction = reduction if denominator is None else "sum"
    labels, divisors = target.reshape(-1).long(), split_denominator(denominator, logits.device)
    loss = _loss(logits, labels, weight, *divisors, REDUCTIONS[reduction], *options, inplace=inplace)
    return loss.view(target.shape) if reduction == "none" else loss
