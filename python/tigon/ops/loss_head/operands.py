"""Operands and options of the functions on a linear head: checks, dtypes, and which gradients are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tigon._op import Op
from tigon.error import check, refuse
from tigon.ops.arguments import (
    check_float,
    check_indices,
    check_integers,
    check_numbers,
    check_positive,
    check_range,
    kind_of,
    readable,
)
from tigon.ops.loss_head.labels import check_count, check_shift, known_rows, shifted

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
# Bits of `needs`, as in linear_cross_entropy_torch.cpp: gradients needed, whether weight's may be formed in
# hidden's dtype, whether the forward of per-row losses may form hidden's for an upstream gradient of 1, and
# whether weight's is added to what its owner keeps.
HIDDEN, WEIGHT, BIAS, LORA_A, LORA_B, MAY_ROUND, UNIT, MAIN_GRAD = 1, 2, 4, 8, 16, 32, 64, 128
NEEDS = {"hidden": HIDDEN, "weight": WEIGHT, "bias": BIAS, "lora_a": LORA_A, "lora_b": LORA_B}


class Operands(NamedTuple):
    """Tensors of a call as the native operators take them, in the order of their schemas."""

    hidden: torch.Tensor  # [..., H]
    weight: torch.Tensor  # [V, H], hidden's dtype
    target: torch.Tensor  # [rows] int64
    bias: torch.Tensor | None = None  # [V], float32 or hidden's dtype
    class_weight: torch.Tensor | None = None  # [V] float32
    token_weight: torch.Tensor | None = None  # [rows] float32
    lora_a: torch.Tensor | None = None  # [r, H], hidden's dtype
    lora_b: torch.Tensor | None = None  # [V, r], hidden's dtype


class Options(NamedTuple):
    """Numbers of a call as the native operators take them, in the order of their schemas."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0  # 0: none
    logit_scale: float = 1.0
    temperature: float = 1.0
    z_loss: float = 0.0
    lora_scale: float = 1.0
    wide_logits: bool = False  # float32 from 16-bit operands
    chunk_rows: int = 0  # 0: chosen by the native side
    valid_rows: int = -1  # -1: not known


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


def check_head(
    op, hidden, weight, target, bias, shift, ignore_index, softcap, logit_scale, temperature, chunk_rows,
    position_ids=None,
):  # fmt: skip
    """What every function on a head asks of its operands."""
    check_float(op, "hidden", hidden)
    check_float(op, "weight", weight)
    if bias is not None:
        check_float(op, "bias", bias)
    if hidden.dim() < 1:
        refuse(op, "hidden must have at least one dimension, got 0")
    sizes, rows, columns = weight.shape, hidden.shape[:-1], hidden.shape[-1]
    if len(sizes) != 2:
        refuse(op, "weight must be [V, H], got {}", sizes)
    vocab, size = sizes
    if size != columns:
        refuse(op, "weight must be [V, {}] to fit hidden {}, got {}", columns, hidden.shape, sizes)
    if weight.is_meta != hidden.is_meta:
        refuse(op, "weight must be on {}, got {}", hidden.device, weight.device)
    if vocab == 0 or size == 0:
        refuse(op, "weight must not be empty, got {}", sizes)
    check_indices(op, "target", target)
    if target.is_meta != hidden.is_meta:
        refuse(op, "target must be on {}, got {}", hidden.device, target.device)
    if target.shape != rows:
        refuse(op, "target must be {}, got {}", rows, target.shape)
    if bias is not None and bias.shape != sizes[:1]:
        refuse(op, "bias must be {}, got {}", sizes[:1], bias.shape)
    check_shift(op, shift, position_ids, target)
    check_integers(op, ignore_index=ignore_index)
    check_positive(op, "softcap", softcap, or_none=True)
    check_numbers(op, logit_scale=logit_scale)
    check_positive(op, "temperature", temperature)
    if chunk_rows is not None:
        check_integers(op, chunk_rows=chunk_rows)
        check(op, chunk_rows >= 1, "chunk_rows must be >= 1 (or None), got {}", chunk_rows)


def wide_logits(op, logit_dtype, hidden) -> bool:
    """Whether logits are to be float32 where hidden is not."""
    fits = logit_dtype in (None, torch.float32, hidden.dtype)
    check(op, fits, "logit_dtype must be float32 or hidden's {} (or None), got {}", hidden.dtype, logit_dtype)
    return logit_dtype == torch.float32 and hidden.dtype in (torch.bfloat16, torch.float16)


def check_lora(op, lora, hidden, weight):
    """``(A, B, scale)`` that fit the head, or None."""
    if lora is None:
        return
    three = isinstance(lora, Sequence) and len(lora) == 3
    given = len(lora) if isinstance(lora, Sequence) else kind_of(lora)
    check(op, three, "lora must be (A, B, scale), got {}", given)
    a, b, scale = lora
    check_float(op, "lora A", a)
    check_float(op, "lora B", b)
    check_numbers(op, **{"lora scale": scale})
    fits = a.dim() == b.dim() == 2 and a.shape[1] == hidden.shape[-1]
    fits = fits and b.shape == (weight.shape[0], a.shape[0])
    given = f"{list(a.shape)}, {list(b.shape)}"
    wanted = (hidden.shape[-1], weight.shape[0])
    check(op, fits, "lora must be (A [r, {}], B [{}, r], scale), got {}", *wanted, given)


def lora_operands(hidden, lora):
    """A and B in hidden's dtype, and scale."""
    if lora is None:
        return None, None, 1.0
    a, b, scale = lora
    return a.to(hidden.dtype), b.to(hidden.dtype), float(scale)


def autocast(hidden):
    """hidden in the dtype that autocast asks for."""
    if hidden.is_meta:
        return hidden
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return hidden.to(torch.get_autocast_dtype(device))
    return hidden


def _setup_columns(ctx, inputs, output):
    ctx.columns = inputs[0].shape[-1]


_fit_columns = Op(
    "linear_cross_entropy_columns",
    fake=lambda x, columns: x.new_empty(*x.shape[:-1], columns),
    setup_context=_setup_columns,
    backward=lambda ctx, dy: (_fit_columns(dy, ctx.columns), None),
)


def whole_vectors(hidden, weight, lora=None):
    """Operands with zero columns appended where CUDA's products need whole 16-byte vectors of a row.

    A 16-bit product whose inner dimension or row stride is no multiple of eight runs at a quarter to an
    eighth of the speed. The appended columns change no logit, and their gradients are cut off.
    """
    columns = hidden.shape[-1]
    if columns % 8 == 0 or not hidden.is_cuda or hidden.element_size() != 2:
        return hidden, weight, lora
    columns += -columns % 8
    if lora is not None:
        lora = (_fit_columns(lora[0], columns), *lora[1:])
    return _fit_columns(hidden, columns), _fit_columns(weight, columns), lora


def prepare(
    op, hidden, weight, target, bias, ignore_index, shift, valid_rows,
    class_weight=None, token_weight=None, lora_a=None, lora_b=None, wide=False, position_ids=None,
):  # fmt: skip
    """Operands of a native call, the number of rows that count (-1: not known), and the gradients needed."""
    valid = known_rows(op, target, ignore_index, shift, valid_rows, hidden.device, position_ids)
    if hidden.is_cuda and target.device.type == "cpu":
        target = target.to(hidden.device, non_blocking=True)
        if position_ids is not None:
            position_ids = position_ids.to(hidden.device, non_blocking=True)
    if weight.dtype != hidden.dtype:
        weight = weight.to(hidden.dtype)
    if bias is not None and bias.dtype not in ((torch.float32,) if wide else (hidden.dtype, torch.float32)):
        bias = bias.float()
    if target.dtype != torch.int64:
        target = target.long()
    target = shifted(target, ignore_index, shift, position_ids)
    needs = 0
    if torch.is_grad_enabled():
        needs = HIDDEN * hidden.requires_grad + WEIGHT * weight.requires_grad
        if bias is not None:
            needs += BIAS * bias.requires_grad
        if lora_a is not None:
            needs += LORA_A * lora_a.requires_grad + LORA_B * lora_b.requires_grad
    operands = Operands(hidden, weight, target.reshape(-1), bias, class_weight, token_weight, lora_a, lora_b)
    return operands, valid, needs


class _ToMainGrad(torch.autograd.Function):
    """weight, whose gradient is added to its main_grad and goes no further."""

    @staticmethod
    def forward(ctx, weight, main_grad):
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dweight):
        ctx.main_grad.add_(dweight.detach())
        return None, None


def check_plain(op, weight, target, ignore_index, shift, valid_rows, position_ids=None) -> None:
    """What the native calls check of labels, for the references."""
    target = shifted(target, ignore_index, shift, position_ids)
    check_range(op, "target", target, weight.shape[0], ignore_index)
    valid = known_rows(op, target, ignore_index, False, valid_rows, target.device)
    if valid >= 0 and readable(target):
        check_count(op, target, ignore_index, valid)


def plain_weight(op, weight):
    """weight for the references; one with a main_grad gives its gradient there."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    main_grad = main_grad_of(op, weight)
    return weight if main_grad is None else _ToMainGrad.apply(weight, main_grad)
