"""Linear layer and cross-entropy in one.

Contract: ``csrc/tigon/ops/linear_cross_entropy/linear_cross_entropy.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tigon._dtensor import of_vocabulary
from tigon._op import has_kernel
from tigon.error import check
from tigon.ops import cross_entropy as _cross_entropy
from tigon.ops.arguments import called, check_float, check_shape
from tigon.ops.loss_head import autograd, operands
from tigon.ops.loss_head.labels import labels_of
from tigon.ops.loss_head.operands import HeadCall, TrainedCalls
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import Sizes, check_keep
from tigon.ops.loss_head.reference import reference, result_type

_OP = autograd.OP
NUMBERS = {"z_loss": 1, "log_prob": 2, "lse": 4, "entropy": 8}  # bits of `outputs`
_PREDICTED = 16
_ONLY_LABEL = 32  # only whether the label is predicted is needed
OUTPUTS = ("loss", *NUMBERS, "predicted", "correct")


def _fake(call: HeadCall):
    scalar, hidden, rows = call.own.reduction != 0, call.operands.hidden, call.operands.target.shape
    loss, scale, dhidden, *others = autograd.empty_loss(call, scalar)
    dhidden, kept = (dhidden, hidden.new_empty(0)) if scalar else autograd.empty_kept(call)
    predicted = hidden.new_empty(rows if call.own.outputs & _PREDICTED else (0,), dtype=torch.int64)
    return loss, scale, dhidden, *others, autograd.empty_numbers(call, NUMBERS.values()), predicted, kept


_loss = autograd.HeadLoss(
    _OP,
    _fake,
    autograd.rows_gradients,
    lambda call, output: autograd.tensors_to_save(call, unscaled=output[2], kept=output[-1]),
)


@of_vocabulary("linear_cross_entropy", 1, "weight")
@called()
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
    shift: int | bool = False,
    position_ids: torch.Tensor | None = None,
    valid_rows: int | None = None,
    outputs: tuple[str, ...] | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_workspace_mb: float | None = None,
    max_peak_mb: float | None = None,
    keep_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
) -> torch.Tensor | NamedTuple:
    """Cross-entropy of ``hidden @ weight.T + bias`` against ``target``, without storing the full logits.

    Computes ``z = softcap * tanh(logit_scale * logit / softcap) / temperature`` (without softcap:
    ``logit_scale * logit / temperature``), then the loss of :func:`tigon.cross_entropy` on ``z``. Only one
    chunk of rows has logits in memory at a time. The gradients of a scalar loss are computed in the same
    pass: three matmuls in all. The gradient of ``weight`` is summed over the chunks in float32.

    Args:
        hidden: ``[..., H]`` float32, bfloat16 or float16, any strides. float64 runs the eager reference,
            which computes the full logits.
        weight: ``[V, H]``. If its float dtype differs from hidden's, it is converted to hidden's, and its
            gradient keeps the dtype of weight. Under autocast both are converted to the autocast dtype. If it
            has the attribute ``tigon_main_grad = True``, the backward pass adds its gradient, multiplied by
            the upstream gradient, to the attribute ``main_grad`` (float32, shape of weight), and
            ``weight.grad`` stays ``None``. This takes one more matmul and no other float32 gradient.
        target: ``[...]`` class indices of any integer dtype, or ``ignore_index``. If the labels are on the
            CPU and the operands on CUDA, the call counts the labels and copies them.
        bias: ``[V]`` or ``None``, added in float32. Its gradient is a float32 sum of the logits' gradients in
            hidden's dtype: in bfloat16 it is accurate to about three digits.
        class_weight: ``[V]`` or ``None``, weight of each class, as in
            :func:`torch.nn.functional.cross_entropy`.
        label_smoothing: in [0, 1].
        softcap, logit_scale, temperature: see above; softcap > 0 or ``None``, temperature > 0.
        z_loss: factor of ``lse^2``, which is added to each row's loss.
        token_weight: ``[...]`` or ``None``: factor of each row's loss and gradient (detached). It does not
            change the divisor of a mean: ``sum(token_weight * loss) / count``.
        reduction: ``"mean"`` (over the rows that count, weighted by class), ``"sum"`` or ``"none"``
            (``[...]`` losses; see :func:`tigon.linear_log_prob` for their cost).
        denominator: number or tensor of one element. If given, the loss is ``sum / denominator`` and
            ``reduction`` is not used. A tensor on the device is read there, without synchronisation (for
            gradient accumulation with ``num_items_in_batch``).
        shift: k >= 0; ``True`` means 1. Position t is compared with the label of position t + k along
            target's last dimension. The last k positions have no label. hidden is not copied. Per-token
            arguments belong to position t.
        position_ids: integers ``[...]`` (target's shape) or ``[T]``, on target's device: the position of each
            token in its own sequence, as Hugging Face models take them. If several sequences are packed into
            one row, the positions restart, and with `shift` the last k positions of each sequence have no
            label. From boundaries:
            ``torch.arange(T) - torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=T)``.
            ``None``: each row is one sequence.
        valid_rows: how many labels (after ``shift``) are not ``ignore_index``. If this number is known,
            ignored rows cost nothing. ``None``: the number is known for labels on the CPU and after
            :func:`tigon.count_labels`; otherwise all rows are computed. A wrong number makes the loss NaN on
            CUDA and raises an error on the CPU.
        outputs: ``None`` returns only the loss. ``("loss", ...)`` with any of ``"z_loss"`` (its share of the
            row's loss), ``"log_prob"`` (of the label), ``"lse"``, ``"entropy"``, ``"predicted"`` (first
            argmax) and ``"correct"`` returns a named tuple with values per token, ``[...]``, detached, from
            the same pass. On ignored rows they are 0, -1 and False.
        lora: ``(A [r, H], B [V, r], scale)``: the head is ``weight + scale * B @ A``, which is never formed.
        chunk_rows: rows per chunk; ``None`` chooses a number (see docs/loss-head.md).
        max_workspace_mb: upper bound of the memory, in MiB, without inputs, results and gradients. Chunks
            shrink to fit it.
        max_peak_mb: upper bound, in MiB, of all that the call and its backward allocate: gradients, results,
            float32 sums and workspace. A call that would take more takes smaller chunks. If the sum of the
            weight's gradient over chunks has no room (bfloat16), the gradient is formed for some classes at a
            time: all rows at once, without a sum, for one more matmul of as many logits as were not kept. The
            least bound is about the gradients and 40 MiB. float64 and transforms of torch.func refuse one.
        keep_mb: with ``"none"``: see :func:`tigon.linear_log_prob`.
        logit_dtype: ``torch.float32``: the logits of 16-bit operands are not rounded to 16 bits. The matmul
            uses the same tensor cores and writes float32, about 1024 rows at a time (at most 512 MiB more, or
            1024 rows). Gradients of the logits have hidden's dtype. ``None``: hidden's dtype.

    Returns:
        float32 scalar, or ``[...]`` for ``"none"``; with ``outputs`` a named tuple. The loss is
        differentiable in hidden, weight, bias, A and B; each gradient is computed only if needed. It is
        bitwise deterministic (on the CPU, where PyTorch computes the matmuls, for a fixed number of threads).
        If every row is ignored, the loss is NaN for ``"mean"``, as in PyTorch, and 0 otherwise; gradients are
        zero.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit; on the CPU also a label outside
            ``[0, V)``. On CUDA such a label makes that row's loss and gradient NaN (no synchronisation).

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (arXiv:2411.09009) for
    the problem; z-loss: Chowdhery et al. 2022, "PaLM", section 5; LoRA: Hu et al. 2021 (arXiv:2106.09685).
    """
    target = labels_of(target, ignore_index)
    logits = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    labels = {"ignore_index": ignore_index, "shift": shift, "position_ids": position_ids}
    limits = {"chunk_rows": chunk_rows, "max_workspace_mb": max_workspace_mb, "max_peak_mb": max_peak_mb}
    head = HeadOptions(
        **logits, **labels, **limits, lora=lora, valid_rows=valid_rows, logit_dtype=logit_dtype
    )
    operands.check_head(_OP, hidden, weight, target, head)
    if outputs is not None:
        named = isinstance(outputs, Sequence) and not isinstance(outputs, str)
        check(_OP, named, "outputs must be a tuple of names (or None), got {!r}", outputs)
        outputs = operands.check_outputs(_OP, outputs, OUTPUTS, " (or None)")
    if class_weight is not None:
        check_float(_OP, "class_weight", class_weight)
        check_shape(_OP, "class_weight", class_weight, weight.shape[:1])
    operands.check_token_weight(_OP, token_weight, target)
    _cross_entropy.check_loss(_OP, label_smoothing, z_loss, reduction, denominator)
    check_keep(_OP, keep_mb)
    TrainedCalls.count(hidden, weight)
    formula = {"class_weight": class_weight, "token_weight": token_weight}
    formula |= {"label_smoothing": label_smoothing, "z_loss": z_loss}
    hidden = operands.autocast(hidden)
    operands.wide_logits(_OP, logit_dtype, hidden)
    parts = operands.float_parts(head, target=target, class_weight=class_weight, token_weight=token_weight)
    if not has_kernel(_OP, hidden=hidden, beside=parts):
        operands.check_plain(_OP, weight.shape[0], target, head)
        weight, reduced = operands.plain_weight(_OP, weight), {"reduction": reduction, "outputs": outputs}
        return reference(
            hidden, weight, target, **formula, denominator=denominator, **reduced, **head._asdict()
        )
    main_grad = operands.main_grad_of(_OP, weight)
    reduction = reduction if denominator is None else "sum"
    code, scalar = _cross_entropy.REDUCTIONS[reduction], reduction != "none"
    divisors = operands.divisors(denominator, hidden.device)
    own = _loss.own(**divisors, reduction=code, outputs=_bits(outputs))
    call, parameters = operands.native_call(
        _OP, hidden, weight, target, head, **formula, main_grad=main_grad, own=own
    )
    if not scalar:
        call = autograd.with_kept_rows(call, keep_mb, main_grad)
    call = operands.within_peak(_OP, call, head, Sizes(per_row=not scalar, classes=True), weight, main_grad)
    loss, numbers, predicted, _ = _loss.run(call, parameters, main_grad, scalar)
    loss = loss if scalar else loss.view(target.shape)
    if outputs is None:
        return loss
    return _named(loss, numbers, predicted, call.operands.target, target.shape, ignore_index, outputs)


def _bits(outputs):
    if outputs is None:
        return 0
    bits = sum(bit for name, bit in NUMBERS.items() if name in outputs)
    if "predicted" in outputs:
        return bits + _PREDICTED
    return bits + (_PREDICTED + _ONLY_LABEL if "correct" in outputs else 0)


def _named(loss, numbers, predicted, target, shape, ignore_index, outputs):
    """Build the named tuple of the requested outputs."""
    names = [name for name in NUMBERS if name in outputs]
    values = {name: numbers[i].view(shape) for i, name in enumerate(names)}
    values["loss"] = loss
    if "predicted" in outputs or "correct" in outputs:
        values["predicted"] = predicted.view(shape)
    if "correct" in outputs:
        correct = predicted == target
        if ignore_index == -1:  # the value of `predicted` on ignored rows
            correct = correct & (target != ignore_index)
        values["correct"] = correct.view(shape)
    return result_type(outputs)(*(values[name] for name in outputs))
