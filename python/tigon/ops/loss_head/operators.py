"""The native operators of the loss head, their arguments by name, and their fake kernels."""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import torch

from tigon._load import native
from tigon._op import raw
from tigon.ops.loss_head.memory import padded, rows_kept, whole_rows
from tigon.ops.loss_head.operands import (
    BIAS,
    HIDDEN,
    LORA_A,
    LORA_B,
    MAIN_GRAD,
    MAY_ROUND,
    NEEDS,
    REDUCTIONS,
    UNIT,
    WEIGHT,
    Operands,
    Options,
)

OP = "linear_cross_entropy"
NUMBERS = {"z_loss": 1, "log_prob": 2, "lse": 4, "entropy": 8}  # bits of `outputs`
PREDICTED = 16
ONLY_LABEL = 32  # the classes predicted need only tell which labels are


class Call(NamedTuple):
    """A call of ``tigon::linear_cross_entropy``."""

    operands: Operands
    options: Options
    reduction: int  # of REDUCTIONS
    denominator: torch.Tensor | None  # one element on hidden's device
    host_denominator: float | None
    outputs: int  # bits of NUMBERS, PREDICTED, ONLY_LABEL
    needs: int  # bits of NEEDS, MAY_ROUND, UNIT, MAIN_GRAD
    keep_rows: int = 0  # losses of rows: most rows whose logits' gradients stay, or AUTOMATIC

    def is_scalar(self) -> bool:
        """Whether the losses of the rows are reduced to one."""
        return self.reduction != REDUCTIONS["none"]


def flat(call: Call) -> tuple:
    """The arguments of a call, in the order of the schema."""
    *formula, chunk_rows, valid_rows = call.options
    return (
        *call.operands, call.denominator, call.host_denominator, *formula, call.reduction, chunk_rows,
        valid_rows, call.outputs, call.needs, call.keep_rows,
    )  # fmt: skip


def _arguments(operator):
    """A named tuple of the arguments of a native operator, as its schema names them."""
    return namedtuple("Arguments", [argument.name for argument in native(operator)._schema.arguments])


Arguments = _arguments(OP)
_RowsArguments = _arguments("linear_cross_entropy_rows_bwd")
_InPlaceArguments = _arguments("linear_cross_entropy_rows_bwd_")


def _pick(kind, arguments):
    """Operands or options among named arguments."""
    return kind(*(getattr(arguments, name) for name in kind._fields))


def call_of(arguments) -> Call:
    """The inverse of :func:`flat`."""
    a = Arguments(*arguments)
    others = {name: getattr(a, name) for name in Call._fields if name in Arguments._fields}
    return Call(_pick(Operands, a), _pick(Options, a), **others)


def rows_computed(target, valid_rows):
    """How many rows have their logits computed."""
    return target.shape[0] if valid_rows < 0 else valid_rows


# Fake kernels.


def _dweight_dtype(operands, options, needs, kept):
    """In which dtype the native side forms weight's gradient."""
    hidden, weight, target, *_ = operands
    if not (needs & WEIGHT and needs & MAY_ROUND and hidden.dtype == torch.bfloat16):
        return torch.float32
    rows = rows_computed(target, options.valid_rows)
    if kept is not None and (kept.shape[0] < rows or not options.chunk_rows):
        fits = kept.shape[0] >= rows
    else:
        whole = options.chunk_rows or whole_rows(
            hidden.device.type, hidden.dtype, hidden.shape[-1], weight.shape[0]
        )
        fits = rows <= whole  # a symbolic size is guarded, not fixed
    return hidden.dtype if fits else torch.float32


def empty_gradients(operands, options, needs, kept=None):
    """The gradients of NEEDS, those that are not needed without elements."""
    hidden, weight, lora_a = operands.hidden, operands.weight, operands.lora_a
    rank = 0 if lora_a is None else lora_a.shape[0]
    vocab, size = weight.shape[0], hidden.shape[-1]
    shapes = (hidden.shape, (vocab, size), (vocab,), (rank, size), (vocab, rank))
    dtypes = (hidden.dtype, _dweight_dtype(operands, options, needs, kept), *(torch.float32,) * 3)
    return tuple(
        hidden.new_empty(shape if needs & bit else (0,), dtype=dtype)
        for bit, shape, dtype in zip(NEEDS.values(), shapes, dtypes, strict=True)
    )


def only_hidden(needs):
    """Whether hidden alone needs a gradient."""
    return needs & (HIDDEN | WEIGHT | BIAS | LORA_A | LORA_B) == HIDDEN


def between_fake(operands, options, needs, keep_rows):
    """What losses of rows keep, (unit, kept), as ``make_between`` of the native side decides."""
    hidden, weight, target, *_ = operands
    vocab, rows = weight.shape[0], rows_computed(target, options.valid_rows)
    keep_rows = 0 if only_hidden(needs) else rows_kept(
        keep_rows, rows, hidden.device.type, hidden.dtype, hidden.shape[-1], vocab, options.chunk_rows,
        dweight=needs & WEIGHT != 0, add_dweight=needs & MAIN_GRAD != 0,
    )  # fmt: skip
    formed = needs & UNIT and (keep_rows > 0 or only_hidden(needs))
    shape = (keep_rows, padded(vocab)) if keep_rows > 0 else (0,)
    return hidden.new_empty(hidden.shape if formed else (0,)), hidden.new_empty(shape)


def fake(*arguments):
    call = call_of(arguments)
    hidden, rows = call.operands.hidden, call.operands.target.shape[0]
    unit, kept = between_fake(
        call.operands,
        call.options,
        0 if call.is_scalar() else call.needs,
        0 if call.is_scalar() else call.keep_rows,
    )
    dhidden, *others = empty_gradients(call.operands, call.options, call.needs if call.is_scalar() else 0)
    wanted = sum(bool(call.outputs & bit) for bit in NUMBERS.values())
    return (
        hidden.new_empty(() if call.is_scalar() else (rows,), dtype=torch.float32),
        hidden.new_empty(() if call.is_scalar() else (0,), dtype=torch.float32),
        dhidden if call.is_scalar() else unit,
        *others,
        hidden.new_empty((wanted, rows) if wanted else (0,), dtype=torch.float32),
        hidden.new_empty((rows,) if call.outputs & PREDICTED else (0,), dtype=torch.int64),
        kept,
    )


def _fake_finish(dloss, scale, dhidden, dweight, dbias, dlora_a, dlora_b, weight_dtype, bias_dtype):
    dtypes = (dhidden.dtype, weight_dtype, bias_dtype, dhidden.dtype, dhidden.dtype)
    kept = (dhidden, dweight, dbias, dlora_a, dlora_b)
    return tuple(g.new_empty(g.shape, dtype=dtype) for g, dtype in zip(kept, dtypes, strict=True))


def _fake_rows(*arguments):
    a = _RowsArguments(*arguments)
    return empty_gradients(_pick(Operands, a), _pick(Options, a), a.needs, a.kept)


def _fake_in_place(*arguments):
    a = _InPlaceArguments(*arguments)
    given = WEIGHT * (a.main_grad is not None) | HIDDEN * (a.finish and a.unit is not None)
    return empty_gradients(_pick(Operands, a), _pick(Options, a), a.needs & ~given, a.kept)


# The schemas stand in csrc/tigon/ops/linear_cross_entropy/linear_cross_entropy_torch.cpp.
finish = raw("linear_cross_entropy_bwd", _fake_finish)
finish_in_place = raw("linear_cross_entropy_bwd_", _fake_finish, OP)
rows_backward = raw("linear_cross_entropy_rows_bwd", _fake_rows, OP)
rows_backward_ = raw("linear_cross_entropy_rows_bwd_", _fake_in_place, OP)
