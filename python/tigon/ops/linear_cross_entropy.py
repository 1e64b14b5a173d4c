"""Linear layer and cross-entropy in one.

Contract: ``tigon/ops/linear_cross_entropy/linear_cross_entropy.h``.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tigon._op import Op, has_kernel, raw
from tigon.error import check
from tigon.ops import cross_entropy as _cross_entropy
from tigon.ops.head_memory import chunk_that_fits
from tigon.ops.labels import known_rows

_OP = "linear_cross_entropy"
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
# Bits of `needs` and `outputs`, as in linear_cross_entropy_torch.cpp.
HIDDEN, WEIGHT, BIAS, LORA_A, LORA_B = 1, 2, 4, 8, 16
_NUMBERS = {"z_loss": 1, "log_prob": 2, "lse": 4, "entropy": 8}
_PREDICTED = 16
OUTPUTS = ("loss", *_NUMBERS, "predicted", "correct")
_REDUCTION, _NEEDS, _INPUTS = 17, 21, 22  # places in the schema, and its length


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
    temperature=1.0,
    z_loss=0.0,
    token_weight=None,
    reduction="mean",
    denominator=None,
    shift=False,
    outputs=None,
    lora=None,
    **ignored,
):
    """The same formula in plain PyTorch operations: materialises the logits (any float dtype, any device)."""
    del ignored  # what only concerns speed and memory
    if shift:
        target = shifted(target, ignore_index)
    z = plain_logits(hidden, weight, bias, softcap, logit_scale, temperature, lora)
    options = {
        "weight": class_weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
    }
    if token_weight is None:
        loss = _cross_entropy.reference(z, target, **options, reduction=reduction, denominator=denominator)
    else:
        loss = _weighted(z, target, token_weight, reduction, denominator, options)
    return (
        loss if outputs is None else _plain_outputs(loss, z.detach(), target, token_weight, outputs, options)
    )


def plain_logits(hidden, weight, bias, softcap, logit_scale, temperature, lora=None):
    """``z`` in plain PyTorch, float32 or wider."""
    logits = F.linear(hidden, weight, bias)
    if lora is not None:
        logits = logits + lora[2] * F.linear(F.linear(hidden, lora[0]), lora[1])
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def _weighted(z, target, token_weight, reduction, denominator, options):
    rows = _cross_entropy.reference(z, target, **options, reduction="none")
    counts = target != options["ignore_index"]
    rows = torch.where(counts, rows * token_weight.detach(), 0.0)
    if denominator is not None:
        return rows.sum() / denominator
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    weight = options["weight"]
    if weight is not None:
        counts = torch.where(counts, weight[torch.where(counts, target, 0)], 0.0)
    return rows.sum() / counts.sum()


def _plain_outputs(loss, z, target, token_weight, outputs, options):
    counts = target != options["ignore_index"]
    log_p = torch.log_softmax(z, -1)
    lse = torch.logsumexp(z, -1)
    share = options["z_loss"] * lse.square() * (1.0 if token_weight is None else token_weight)
    predicted = torch.where(counts, z.argmax(-1), -1)
    numbers = {
        "z_loss": share,
        "log_prob": log_p.gather(-1, torch.where(counts, target, 0).unsqueeze(-1)).squeeze(-1),
        "lse": lse,
        "entropy": -(log_p.exp() * log_p).nan_to_num(nan=0.0).sum(-1),
    }
    values = {name: torch.where(counts, value, 0.0) for name, value in numbers.items()}
    values |= {"loss": loss, "predicted": predicted, "correct": (predicted == target) & counts}
    return _result_type(outputs)(*(values[name] for name in outputs))


_result_types: dict[tuple[str, ...], type] = {}


def _result_type(outputs):
    made = _result_types.get(outputs)
    if made is None:
        made = namedtuple("LinearCrossEntropy", outputs)
        if not torch.compiler.is_compiling():
            _result_types[outputs] = made
    return made


def shifted(target, ignore_index):
    """Label of position t becomes that of t + 1; the last position has none."""
    return F.pad(target[..., 1:], (0, 1), value=ignore_index)


# Raw operators, in the argument order of the schemas.


def _empty_gradients(like, hidden, weight, lora_a, needs, late=False):
    rank = 0 if lora_a is None else lora_a.shape[0]
    vocab, size = weight.shape
    shapes = ((WEIGHT, (vocab, size)), (BIAS, (vocab,)), (LORA_A, (rank, size)), (LORA_B, (vocab, rank)))
    return (
        like.new_empty(hidden.shape if needs & HIDDEN else (0,)),
        *(like.new_empty(shape if needs & bit else (0,), dtype=torch.float32) for bit, shape in shapes),
    )


def _fake(hidden, weight, target, bias, class_weight, token_weight, lora_a, lora_b, denominator,
          host_denominator, ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss,
          lora_scale, reduction, chunk_rows, valid_rows, outputs, needs):  # fmt: skip
    rows = target.shape[0]
    scalar = reduction != REDUCTIONS["none"]
    wanted = sum(bool(outputs & bit) for bit in _NUMBERS.values())
    return (
        hidden.new_empty(() if scalar else (rows,), dtype=torch.float32),
        hidden.new_empty(() if scalar else (0,), dtype=torch.float32),
        *_empty_gradients(hidden, hidden, weight, lora_a, needs if scalar else 0),
        hidden.new_empty((wanted, rows) if wanted else (0,), dtype=torch.float32),
        hidden.new_empty((rows,) if outputs & _PREDICTED else (0,), dtype=torch.int64),
    )


def _fake_bwd(dloss, scale, dhidden, dweight, dbias, dlora_a, dlora_b, weight_dtype, bias_dtype):
    dtypes = (dhidden.dtype, weight_dtype, bias_dtype, dhidden.dtype, dhidden.dtype)
    kept = (dhidden, dweight, dbias, dlora_a, dlora_b)
    return tuple(g.new_empty(g.shape, dtype=dtype) for g, dtype in zip(kept, dtypes, strict=True))


def _fake_rows_bwd(upstream, entropy_upstream, hidden, weight, target, bias, class_weight, token_weight,
                   lora_a, lora_b, ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss,
                   lora_scale, chunk_rows, valid_rows, needs):  # fmt: skip
    return _empty_gradients(hidden, hidden, weight, lora_a, needs)


def _fake_add_bwd(upstream, entropy_upstream, main_grad, *rest):
    return _fake_rows_bwd(upstream, entropy_upstream, *rest[:-1], rest[-1] & ~WEIGHT)


finish = raw("linear_cross_entropy_bwd", _fake_bwd)
rows_backward = raw("linear_cross_entropy_rows_bwd", _fake_rows_bwd)
_keep = raw("linear_cross_entropy_keep", lambda kept, *inputs: _fake(*inputs))
_kept_bwd = raw(
    "linear_cross_entropy_kept_bwd",
    lambda upstream, kept, hidden, weight, target, token_weight, ignore_index, valid_rows, needs: (
        _empty_gradients(hidden, hidden, weight, None, needs)[:3]
    ),
)
_add_bwd = raw("linear_cross_entropy_add_bwd", _fake_add_bwd)


def _setup_context(ctx, inputs, output):
    hidden, weight, target, bias, *tensors = inputs[:8]
    ctx.dtypes = (
        hidden.dtype,
        weight.dtype,
        weight.dtype if bias is None else bias.dtype,
        hidden.dtype,
        hidden.dtype,
    )
    ctx.scalar = inputs[_REDUCTION] != REDUCTIONS["none"]
    ctx.options = (*inputs[10:17], *inputs[18:20])
    ctx.needs = inputs[_NEEDS]
    if ctx.scalar:
        ctx.save_for_backward(*output[1:7])
    else:
        ctx.save_for_backward(hidden, weight, target, bias, *tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _spread(gradients, dtypes, needs):
    """One entry per input of the operator."""
    wanted = (
        g.to(dtype) if needs & bit else None
        for g, dtype, bit in zip(gradients, dtypes, (HIDDEN, WEIGHT, BIAS, LORA_A, LORA_B), strict=True)
    )
    dhidden, dweight, dbias, dlora_a, dlora_b = wanted
    return dhidden, dweight, None, dbias, None, None, dlora_a, dlora_b, *((None,) * (_INPUTS - 8))


def _backward(ctx, dloss, *_):
    if dloss is None:
        return (None,) * _INPUTS
    compiling = torch.compiler.is_compiling()
    if ctx.scalar:
        call = torch.ops.tigon.linear_cross_entropy_bwd if compiling else finish
        gradients = call(dloss, *ctx.saved_tensors, *ctx.dtypes[1:3])
    else:
        call = torch.ops.tigon.linear_cross_entropy_rows_bwd if compiling else rows_backward
        gradients = call(dloss, None, *ctx.saved_tensors, *ctx.options, ctx.needs)
    return _spread(gradients, ctx.dtypes, ctx.needs)


_op = Op(_OP, fake=_fake, setup_context=_setup_context, backward=_backward)


class _MainGrad(torch.autograd.Function):
    """The loss alone in the forward pass; the backward adds weight's gradient to ``main_grad``."""

    @staticmethod
    def forward(ctx, main_grad, *inputs):
        output = _op.forward(*inputs[:_NEEDS], 0)
        ctx.main_grad = main_grad
        ctx.scalar = inputs[_REDUCTION] != REDUCTIONS["none"]
        ctx.options = (*inputs[10:17], *inputs[18:20])
        ctx.needs = inputs[_NEEDS]
        hidden, weight, _, bias = inputs[:4]
        ctx.dtypes = (
            hidden.dtype,
            None,
            weight.dtype if bias is None else bias.dtype,
            hidden.dtype,
            hidden.dtype,
        )
        ctx.save_for_backward(output[1], *inputs[:8])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * (_INPUTS + 1)
        scale, hidden, *tensors = ctx.saved_tensors
        upstream = (dloss * scale).expand(tensors[1].shape) if ctx.scalar else dloss
        gradients = _add_bwd(
            upstream, None, ctx.main_grad, hidden, *tensors, *ctx.options, ctx.needs & ~WEIGHT
        )
        return (None, *_spread(gradients, ctx.dtypes, ctx.needs & ~WEIGHT))


class _Kept(torch.autograd.Function):
    """Per-row losses; the gradients of the logits stay until the upstream ones arrive."""

    @staticmethod
    def forward(ctx, *inputs):
        hidden, weight, target, bias, _, token_weight = inputs[:6]
        ctx.options, ctx.needs = (inputs[10], inputs[19]), inputs[_NEEDS]
        rows, vocab = target.shape[0] if inputs[19] < 0 else inputs[19], weight.shape[0]
        kept = hidden.new_empty(rows, _padded(vocab))[:, :vocab]
        output = _keep(kept, *inputs)
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        ctx.save_for_backward(kept, hidden, weight, target, token_weight)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * _INPUTS
        gradients = _kept_bwd(dloss, *ctx.saved_tensors, *ctx.options, ctx.needs)
        dtypes = (*ctx.dtypes, None, None)
        return _spread((*gradients, None, None), dtypes, ctx.needs)


def _padded(vocab):
    return (vocab + 63) // 64 * 64


def _keeps(hidden, vocab, rows, keep_mb):
    """Whether the logits' gradients are to be kept: they fit, and nothing traces the call."""
    if keep_mb <= 0.0 or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return rows * _padded(vocab) * hidden.element_size() <= keep_mb * 2**20


def main_grad_of(op, weight):
    """The fp32 tensor that weight's gradient is to be added to, where its owner asked for that."""
    if not getattr(weight, "tigon_main_grad", False):
        return None
    main_grad = getattr(weight, "main_grad", None)
    fits = main_grad is not None and main_grad.dtype == torch.float32 and main_grad.shape == weight.shape
    given = "none" if main_grad is None else f"{main_grad.dtype} {list(main_grad.shape)}"
    check(
        op,
        fits,
        "weight.main_grad must be float32 {} with weight.tigon_main_grad, got {}",
        weight.shape,
        given,
    )
    return main_grad


class Head(NamedTuple):
    """Operands as the native operators take them."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor  # [rows] int64
    valid_rows: int
    needs: int


def check_head(op, hidden, weight, target, bias, shift, softcap, temperature, chunk_rows):
    """What every function on a head asks of its operands."""
    for name, t in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if t is not None:
            check(op, t.is_floating_point(), "{} must be a float tensor, got {}", name, t.dtype)
    check(op, hidden.dim() >= 1, "hidden must have at least one dimension, got 0")
    check(op, weight.dim() == 2, "weight must be [V, H], got {}", weight.shape)
    fits = weight.shape[1] == hidden.shape[-1]
    check(
        op,
        fits,
        "weight must be [V, {}] to fit hidden {}, got {}",
        hidden.shape[-1],
        hidden.shape,
        weight.shape,
    )
    check(op, weight.shape[0] > 0 and weight.shape[1] > 0, "weight must not be empty, got {}", weight.shape)
    integers = (torch.int64, torch.int32)
    check(op, target.dtype in integers, "target must be int64 (or int32), got {}", target.dtype)
    check(op, target.shape == hidden.shape[:-1], "target must be {}, got {}", hidden.shape[:-1], target.shape)
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == weight.shape[0]
        check(op, fits, "bias must be {}, got {}", weight.shape[:1], bias.shape)
    check(
        op, not shift or target.dim() >= 1, "target must have a sequence dimension with shift=True, got none"
    )
    check(op, softcap is None or softcap > 0, "softcap must be > 0 (or None), got {}", softcap)
    check(op, temperature > 0, "temperature must be > 0, got {}", temperature)
    whole = chunk_rows is None or (isinstance(chunk_rows, int) and chunk_rows >= 1)
    check(op, whole, "chunk_rows must be an int >= 1 (or None), got {!r}", chunk_rows)


def autocast(hidden):
    """hidden in the dtype that autocast asks for."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return hidden.to(torch.get_autocast_dtype(device))
    return hidden


def prepare(op, hidden, weight, target, bias, ignore_index, shift, valid_rows) -> Head:
    """Dtypes that the operators take, one label a row, the number of rows that count where known."""
    valid = known_rows(op, target, ignore_index, shift, valid_rows, hidden.device)
    if hidden.is_cuda and target.device.type == "cpu":
        target = target.to(hidden.device, non_blocking=True)
    if weight.dtype != hidden.dtype:
        weight = weight.to(hidden.dtype)
    if bias is not None and bias.dtype not in (hidden.dtype, torch.float32):
        bias = bias.float()
    if target.dtype != torch.int64:
        target = target.long()
    if shift:
        target = shifted(target, ignore_index)
    needs = 0
    if torch.is_grad_enabled():
        needs = HIDDEN * hidden.requires_grad + WEIGHT * weight.requires_grad
        needs += BIAS * (bias is not None and bias.requires_grad)
    return Head(hidden, weight, bias, target.reshape(-1), valid, needs)


def _check(hidden, weight, target, class_weight, token_weight, label_smoothing, reduction, outputs, lora):
    for name, t in (("class_weight", class_weight), ("token_weight", token_weight)):
        if t is not None:
            check(_OP, t.is_floating_point(), "{} must be a float tensor, got {}", name, t.dtype)
    if class_weight is not None:
        fits = class_weight.dim() == 1 and class_weight.shape[0] == weight.shape[0]
        check(_OP, fits, "class_weight must be {}, got {}", weight.shape[:1], class_weight.shape)
    if token_weight is not None:
        fits = token_weight.shape == target.shape
        check(_OP, fits, "token_weight must be {}, got {}", target.shape, token_weight.shape)
    check(_OP, reduction in REDUCTIONS, "reduction must be one of {}, got {!r}", (*REDUCTIONS,), reduction)
    check(_OP, 0.0 <= label_smoothing <= 1.0, "label_smoothing must be in [0, 1], got {}", label_smoothing)
    if outputs is not None:
        fits = outputs[:1] == ("loss",) and len(set(outputs)) == len(outputs) and set(outputs) <= set(OUTPUTS)
        check(
            _OP, fits, "outputs must be 'loss' and then some of {} (or None), got {!r}", OUTPUTS[1:], outputs
        )
    if lora is not None:
        a, b = lora[:2]
        fits = (
            a.dim() == b.dim() == 2
            and a.shape[1] == hidden.shape[-1]
            and b.shape == (weight.shape[0], a.shape[0])
        )
        given = f"{list(a.shape)}, {list(b.shape)}"
        check(
            _OP,
            fits,
            "lora must be (A [r, {}], B [{}, r], scale), got {}",
            hidden.shape[-1],
            weight.shape[0],
            given,
        )


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
    temperature: float = 1.0,
    z_loss: float = 0.0,
    token_weight: torch.Tensor | None = None,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    shift: bool = False,
    valid_rows: int | None = None,
    outputs: tuple[str, ...] | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_workspace_mb: float | None = None,
    keep_mb: float = 0.0,
) -> torch.Tensor | NamedTuple:
    """Cross-entropy of ``hidden @ weight.T + bias`` against ``target`` without the logits ever existing.

    ``z = softcap * tanh(logit_scale * logit / softcap) / temperature`` (or ``logit_scale * logit /
    temperature``), then the loss of :func:`tigon.cross_entropy`. Logits live for one chunk of rows; the
    gradients of a scalar loss are formed in the same pass, three matrix products in all, ``weight``'s
    gradient summed in float32 over the chunks.

    Args:
        hidden: ``[..., H]`` float32, bfloat16 or float16, any strides. float64 runs the eager reference.
        weight: ``[V, H]``; another float dtype than hidden's is converted to hidden's (its gradient keeps its
            dtype). Under autocast both are converted to the autocast dtype. With an attribute
            ``tigon_main_grad = True`` its gradient is added to its attribute ``main_grad`` (float32, its
            shape) in the backward pass, upstream gradient and all, and ``weight.grad`` stays ``None``: one
            more matrix product, no float32 gradient besides.
        target: ``[...]`` int64 class indices, or ``ignore_index``. Labels on the CPU beside CUDA operands are
            counted here and copied.
        bias: ``[V]`` or ``None``, added in float32.
        class_weight: ``[V]`` or ``None``, weight of each class, as in
            :func:`torch.nn.functional.cross_entropy`.
        label_smoothing: in [0, 1].
        softcap: > 0 or ``None``.
        logit_scale: factor of the logits before softcap.
        temperature: > 0, divides after softcap.
        z_loss: factor of ``lse^2``, added to each row's loss.
        token_weight: ``[...]`` or ``None``: factor of each row's loss and gradient (detached). A mean is
            still over the rows
            that count: ``sum(token_weight * loss) / count``.
        reduction: ``"mean"`` (over rows that count, weighted by class), ``"sum"`` or ``"none"`` (``[...]``
            losses; the backward computes the logits again).
        denominator: number or tensor of one element: the loss is ``sum / denominator`` instead of
            ``reduction``; a tensor on the device is read there, without synchronisation (gradient
            accumulation, ``num_items_in_batch``).
        shift: pair position t with the label of t + 1 along target's last dimension (no copy of hidden).
        valid_rows: how many labels (after ``shift``) are not ``ignore_index``. Where it is known, ignored
            rows cost nothing. ``None``: known for labels on the CPU, and after :func:`tigon.count_labels`;
            else all rows are computed. A wrong number makes the loss NaN on CUDA and is an error on the CPU.
        outputs: ``None`` for the loss alone, or ``("loss", ...)`` with any of ``"z_loss"`` (its share of the
            row's loss), ``"log_prob"`` (of the label), ``"lse"``, ``"entropy"``, ``"predicted"`` (first
            argmax) and ``"correct"``: a named tuple, per token ``[...]``, detached, from the same pass. On
            ignored rows 0, -1 and False.
        lora: ``(A [r, H], B [V, r], scale)``: ``weight + scale * B @ A`` as the head without ever forming it.
        chunk_rows: rows per chunk; ``None`` chooses (see docs/loss-head.md).
        max_workspace_mb: upper bound of the memory besides inputs, results and gradients, in MiB; chunks
            shrink to fit it.
        keep_mb: with ``"none"``, keep the gradients of the logits from forward to backward if they take no
            more than this many MiB (rows that count times V): three matrix products instead of four.

    Returns:
        float32 scalar, or ``[...]`` for ``"none"``; with ``outputs`` a named tuple. The loss is
        differentiable in hidden, weight, bias, A and B, each only where needed; bitwise deterministic. With
        every row ignored: NaN for ``"mean"`` as in PyTorch, 0 otherwise; gradients are zero.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit; on the CPU also a label outside ``[0,
        V)``. On CUDA such
            a label makes that row's loss and gradient NaN (no synchronisation to look).

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (arXiv:2411.09009) for
    the problem; z-loss: Chowdhery et al. 2022, "PaLM", section 5; LoRA: Hu et al. 2021 (arXiv:2106.09685).
    """
    check_head(_OP, hidden, weight, target, bias, shift, softcap, temperature, chunk_rows)
    if outputs is not None:
        outputs = tuple(outputs)
    _check(hidden, weight, target, class_weight, token_weight, label_smoothing, reduction, outputs, lora)
    hidden = autocast(hidden)
    if not has_kernel(_OP, hidden):
        return reference(
            hidden, weight, target, bias=bias, ignore_index=ignore_index, class_weight=class_weight,
            label_smoothing=label_smoothing, softcap=softcap, logit_scale=logit_scale,
            temperature=temperature, z_loss=z_loss, token_weight=token_weight, reduction=reduction,
            denominator=denominator, shift=shift, outputs=outputs, lora=lora,
        )  # fmt: skip
    main_grad = main_grad_of(_OP, weight) if torch.is_grad_enabled() and weight.requires_grad else None
    head = prepare(_OP, hidden, weight, target, bias, ignore_index, shift, valid_rows)
    needs, (lora_a, lora_b, lora_scale) = _lora(hidden, lora, head.needs)
    if class_weight is not None:
        class_weight = class_weight.detach().float()
    if token_weight is not None:
        token_weight = token_weight.detach().float().reshape(-1)
    denominator, host_denominator = _cross_entropy.split_denominator(_OP, denominator, hidden.device)
    if host_denominator is not None or denominator is not None:
        reduction = "sum"
    if max_workspace_mb is not None:
        chunk_rows = chunk_that_fits(
            _OP,
            max_workspace_mb,
            hidden,
            weight.shape[0],
            chunk_rows,
            0 if lora_a is None else lora_a.shape[0],
        )
    call = _op if main_grad is None else functools.partial(_MainGrad.apply, main_grad)
    if reduction == "none" and needs and main_grad is None and lora is None:
        rows = head.target.shape[0] if head.valid_rows < 0 else head.valid_rows
        call = _Kept.apply if _keeps(hidden, weight.shape[0], rows, keep_mb) else call
    results = call(
        hidden, head.weight, head.target, head.bias, class_weight, token_weight, lora_a, lora_b, denominator,
        host_denominator, ignore_index, label_smoothing, softcap or 0.0, logit_scale, temperature, z_loss,
        lora_scale, REDUCTIONS[reduction], chunk_rows or 0, head.valid_rows, _bits(outputs), needs,
    )  # fmt: skip
    loss = results[0].view(target.shape) if reduction == "none" else results[0]
    return (
        loss if outputs is None else _named(loss, results, head.target, target.shape, ignore_index, outputs)
    )


def _lora(hidden, lora, needs):
    if lora is None:
        return needs, (None, None, 1.0)
    a, b = (t.to(hidden.dtype) for t in lora[:2])
    if torch.is_grad_enabled():
        needs += LORA_A * a.requires_grad + LORA_B * b.requires_grad
    return needs, (a, b, float(lora[2]))


def _bits(outputs):
    if outputs is None:
        return 0
    bits = sum(bit for name, bit in _NUMBERS.items() if name in outputs)
    return bits + (_PREDICTED if "predicted" in outputs or "correct" in outputs else 0)


def _named(loss, results, target, shape, ignore_index, outputs):
    """The named tuple of what was asked for."""
    names = [name for name in _NUMBERS if name in outputs]
    values = {name: results[7][i].view(shape) for i, name in enumerate(names)}
    values["loss"] = loss
    if "predicted" in outputs or "correct" in outputs:
        values["predicted"] = results[8].view(shape)
    if "correct" in outputs:
        correct = results[8] == target
        if ignore_index == -1:  # what `predicted` is on ignored rows
            correct = correct & (target != ignore_index)
        values["correct"] = correct.view(shape)
    return _result_type(outputs)(*(values[name] for name in outputs))
