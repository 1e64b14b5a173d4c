"""Linear layer and cross-entropy in one. Contract: ``tigon/ops/linear_cross_entropy/linear_cross_entropy.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon._op import Op, has_kernel, raw
from tigon.error import check
from tigon.ops import cross_entropy as _cross_entropy

_OP = "linear_cross_entropy"
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def reference(
    hidden,
    weight,
    target,
    *,
    bias=None,
    ignore_index=-100,
    class_weight=None,
    label_smoothing=0.0,
    softcap=None,
    logit_scale=1.0,
    z_loss=0.0,
    reduction="mean",
    denominator=None,
    shift=False,
    chunk_rows=None,
):
    """The same formula in plain PyTorch operations: materialises the logits (any float dtype, any device)."""
    del chunk_rows
    if shift:
        target = _shifted(target, ignore_index)
    logits = F.linear(hidden, weight, bias) * logit_scale
    return _cross_entropy.reference(
        logits,
        target,
        weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        reduction=reduction,
        denominator=denominator,
    )


def _shifted(target, ignore_index):
    """Label of position t becomes that of t + 1; the last position has none."""
    return F.pad(target[..., 1:], (0, 1), value=ignore_index)


# Raw operators, in the argument order of the schemas.


def _fake(hidden, weight, target, bias, class_weight, denominator, host_denominator, ignore_index, label_smoothing,
          softcap, logit_scale, z_loss, reduction, chunk_rows, need_dhidden, need_dweight, need_dbias):  # fmt: skip
    rows = hidden.numel() // hidden.shape[-1]
    vocab = weight.shape[0]
    scalar = reduction != _REDUCTIONS["none"]
    loss = hidden.new_empty(() if scalar else (rows,), dtype=torch.float32)
    scale = hidden.new_empty(() if scalar else (0,), dtype=torch.float32)
    return (
        loss,
        scale,
        hidden.new_empty(hidden.shape if need_dhidden and scalar else (0,)),
        hidden.new_empty((vocab, hidden.shape[-1]) if need_dweight and scalar else (0,), dtype=torch.float32),
        hidden.new_empty((vocab,) if need_dbias and scalar else (0,), dtype=torch.float32),
    )


def _fake_bwd(dloss, scale, dhidden, dweight, dbias, weight_dtype, bias_dtype):
    return (
        dhidden.new_empty(dhidden.shape),
        dweight.new_empty(dweight.shape, dtype=weight_dtype),
        dbias.new_empty(dbias.shape, dtype=bias_dtype),
    )


def _fake_rows_bwd(upstream, hidden, weight, target, bias, class_weight, ignore_index, label_smoothing, softcap,
                   logit_scale, z_loss, chunk_rows, need_dhidden, need_dweight, need_dbias):  # fmt: skip
    vocab = weight.shape[0]
    return (
        hidden.new_empty(hidden.shape if need_dhidden else (0,)),
        hidden.new_empty((vocab, hidden.shape[-1]) if need_dweight else (0,), dtype=torch.float32),
        hidden.new_empty((vocab,) if need_dbias else (0,), dtype=torch.float32),
    )


_bwd = raw("linear_cross_entropy_bwd", _fake_bwd)
_rows_bwd = raw("linear_cross_entropy_rows_bwd", _fake_rows_bwd)


def _setup_context(ctx, inputs, output):
    hidden, weight, target, bias, class_weight = inputs[:5]
    ctx.weight_dtype = weight.dtype
    ctx.bias_dtype = weight.dtype if bias is None else bias.dtype
    ctx.scalar = inputs[12] != _REDUCTIONS["none"]
    ctx.options = (*inputs[7:12], inputs[13])
    ctx.needs = inputs[14:17]
    if ctx.scalar:
        ctx.save_for_backward(*output[1:])
    else:
        ctx.save_for_backward(hidden, weight, target, bias, class_weight)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, *_):
    no_gradients = [None] * 17
    if dloss is None:
        return tuple(no_gradients)
    compiling = torch.compiler.is_compiling()
    if ctx.scalar:
        call = torch.ops.tigon.linear_cross_entropy_bwd if compiling else _bwd
        gradients = call(dloss, *ctx.saved_tensors, ctx.weight_dtype, ctx.bias_dtype)
    else:
        call = torch.ops.tigon.linear_cross_entropy_rows_bwd if compiling else _rows_bwd
        gradients = call(dloss, *ctx.saved_tensors, *ctx.options, *ctx.needs)
    dhidden, dweight, dbias = (
        g.to(dtype) if need else None
        for g, need, dtype in zip(
            gradients, ctx.needs, (gradients[0].dtype, ctx.weight_dtype, ctx.bias_dtype), strict=True
        )
    )
    return dhidden, dweight, None, dbias, *no_gradients[4:]


_op = Op(_OP, fake=_fake, setup_context=_setup_context, backward=_backward)


def _check(hidden, weight, target, bias, class_weight, label_smoothing, softcap, reduction, shift, chunk_rows):
    for name, t in (("hidden", hidden), ("weight", weight), ("bias", bias), ("class_weight", class_weight)):
        if t is not None:
            check(_OP, t.is_floating_point(), "{} must be a float tensor, got {}", name, t.dtype)
    check(_OP, hidden.dim() >= 1, "hidden must have at least one dimension, got 0")
    check(_OP, weight.dim() == 2, "weight must be [V, H], got {}", weight.shape)
    fits = weight.shape[1] == hidden.shape[-1]
    check(_OP, fits, "weight must be [V, {}] to fit hidden {}, got {}", hidden.shape[-1], hidden.shape, weight.shape)
    check(_OP, weight.shape[0] > 0 and weight.shape[1] > 0, "weight must not be empty, got {}", weight.shape)
    integers = (torch.int64, torch.int32)
    check(_OP, target.dtype in integers, "target must be int64 (or int32), got {}", target.dtype)
    check(_OP, target.shape == hidden.shape[:-1], "target must be {}, got {}", hidden.shape[:-1], target.shape)
    for name, t in (("bias", bias), ("class_weight", class_weight)):
        if t is not None:
            fits = t.dim() == 1 and t.shape[0] == weight.shape[0]
            check(_OP, fits, "{} must be {}, got {}", name, weight.shape[:1], t.shape)
    check(_OP, not shift or target.dim() >= 1, "target must have a sequence dimension with shift=True, got none")
    check(_OP, reduction in _REDUCTIONS, "reduction must be one of {}, got {!r}", (*_REDUCTIONS,), reduction)
    check(_OP, 0.0 <= label_smoothing <= 1.0, "label_smoothing must be in [0, 1], got {}", label_smoothing)
    check(_OP, softcap is None or softcap > 0, "softcap must be > 0 (or None), got {}", softcap)
    whole = chunk_rows is None or (isinstance(chunk_rows, int) and chunk_rows >= 1)
    check(_OP, whole, "chunk_rows must be an int >= 1 (or None), got {!r}", chunk_rows)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    class_weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    shift: bool = False,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` against ``target`` without the logits ever existing.

    ``z = softcap * tanh(logit_scale * logit / softcap)`` (or ``logit_scale * logit``), then the loss of
    :func:`tigon.cross_entropy`. Logits live for one chunk of rows; the gradients of a scalar loss are formed in the same
    pass, three matrix products in all, ``weight``'s gradient summed in float32 over the chunks.

    Args:
        hidden: ``[..., H]`` float32, bfloat16 or float16, any strides. float64 runs the eager reference.
        weight: ``[V, H]``; another float dtype than hidden's is converted to hidden's (its gradient keeps its dtype).
            Under autocast both are converted to the autocast dtype.
        target: ``[...]`` int64 class indices, or ``ignore_index``.
        bias: ``[V]`` or ``None``, added in float32.
        class_weight: ``[V]`` or ``None``, weight of each class, as in :func:`torch.nn.functional.cross_entropy`.
        label_smoothing: in [0, 1].
        softcap: > 0 or ``None``.
        logit_scale: factor of the logits before softcap.
        z_loss: factor of ``lse^2``, added to each row's loss.
        reduction: ``"mean"`` (over rows that count, weighted), ``"sum"`` or ``"none"`` (``[...]`` losses; the backward
            computes the logits again).
        denominator: number or tensor of one element: the loss is ``sum / denominator`` instead of ``reduction``; a tensor
            on the device is read there, without synchronisation (gradient accumulation, ``num_items_in_batch``).
        shift: pair position t with the label of t + 1 along target's last dimension (no copy of hidden).
        chunk_rows: rows per chunk; ``None`` chooses (see docs/loss-head.md).

    Returns:
        float32 scalar, or ``[...]`` for ``"none"``. Differentiable in hidden, weight and bias, each only where needed;
        bitwise deterministic. With every row ignored: NaN for ``"mean"`` as in PyTorch, 0 otherwise; gradients are zero.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit; on the CPU also a label outside ``[0, V)``. On CUDA such
            a label makes that row's loss and gradient NaN (no synchronisation to look).

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (arXiv:2411.09009) for the problem;
    z-loss: Chowdhery et al. 2022, "PaLM", section 5.
    """
    _check(hidden, weight, target, bias, class_weight, label_smoothing, softcap, reduction, shift, chunk_rows)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        if hidden.dtype != torch.float64:
            hidden = hidden.to(dtype)
    if not has_kernel(_OP, hidden):
        return reference(
            hidden, weight, target, bias=bias, ignore_index=ignore_index, class_weight=class_weight,
            label_smoothing=label_smoothing, softcap=softcap, logit_scale=logit_scale, z_loss=z_loss,
            reduction=reduction, denominator=denominator, shift=shift,
        )  # fmt: skip
    if weight.dtype != hidden.dtype:
        weight = weight.to(hidden.dtype)
    if bias is not None and bias.dtype not in (hidden.dtype, torch.float32):
        bias = bias.float()
    if class_weight is not None:
        class_weight = class_weight.detach().float()
    if target.dtype != torch.int64:
        target = target.long()
    if shift:
        target = _shifted(target, ignore_index)
    host_denominator, denominator = split_denominator(denominator, hidden.device)
    if host_denominator is not None or denominator is not None:
        reduction = "sum"
    grad = torch.is_grad_enabled()
    loss = _op(
        hidden, weight, target.reshape(-1), bias, class_weight, denominator, host_denominator, ignore_index,
        label_smoothing, softcap or 0.0, logit_scale, z_loss, _REDUCTIONS[reduction], chunk_rows or 0,
        grad and hidden.requires_grad, grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )[0]  # fmt: skip
    return loss.view(target.shape) if reduction == "none" else loss


def split_denominator(denominator, device):
    """``(number, None)``, ``(None, tensor on device)`` or ``(None, None)``; a CPU tensor is read here, a device one is not."""
    if denominator is None:
        return None, None
    if not isinstance(denominator, torch.Tensor):
        return float(denominator), None
    check(_OP, denominator.numel() == 1, "denominator must have one element, got {}", denominator.shape)
    if denominator.device.type == "cpu" and device.type != "cpu":
        return float(denominator), None
    if denominator.dtype not in (torch.float32, torch.float64, torch.int64, torch.int32):
        denominator = denominator.float()
    return None, denominator.detach()
