"""The native operators of the divergences of two heads, their arguments by name, and their fake kernels."""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import torch

from tigon._load import native
from tigon._op import raw
from tigon.ops.loss_head import operators
from tigon.ops.loss_head.autograd import HeadLoss
from tigon.ops.loss_head.operands import REDUCTIONS

OP = "linear_divergence"
NUMBERS = {"soft": 1, "hard": 2, "entropy": 4}  # bits of `outputs`


class Operands(NamedTuple):
    """Tensors of a call as the native operators take them, in the order of their schemas."""

    hidden: torch.Tensor  # [..., H]
    weight: torch.Tensor  # [V_s, H], hidden's dtype
    target: torch.Tensor  # [rows] int64
    teacher: torch.Tensor  # [..., H_t] hidden states, or [..., V_t] logits
    teacher_weight: torch.Tensor | None = None  # [V_t, H_t], teacher's dtype; None: teacher holds logits
    teacher_bias: torch.Tensor | None = None  # [V_t] float32
    bias: torch.Tensor | None = None  # [V_s] float32
    token_weight: torch.Tensor | None = None  # [rows] float32
    lora_a: torch.Tensor | None = None  # [r, H], hidden's dtype
    lora_b: torch.Tensor | None = None  # [V_s, r], hidden's dtype


class Options(NamedTuple):
    """Numbers of a call as the native operators take them, in the order of their schemas."""

    kind: int
    beta: float = 0.5
    soft_weight: float = 1.0
    hard_weight: float = 0.0
    temperature: float = 1.0
    softcap: float = 0.0  # 0: none
    logit_scale: float = 1.0
    teacher_softcap: float = 0.0
    teacher_logit_scale: float = 1.0
    lora_scale: float = 1.0
    ignore_index: int = -100
    chunk_rows: int = 0  # 0: chosen by the native side
    valid_rows: int = -1  # -1: not known


class Call(NamedTuple):
    """A call of ``tigon::linear_divergence``."""

    operands: Operands
    options: Options
    denominator: torch.Tensor | None  # one element on hidden's device
    host_denominator: float | None
    reduction: int  # of REDUCTIONS
    outputs: int  # bits of NUMBERS
    needs: int  # bits of NEEDS, MAY_ROUND

    def is_scalar(self) -> bool:
        """Whether the losses of the rows are reduced to one."""
        return self.reduction != REDUCTIONS["none"]


def flat(call: Call) -> tuple:
    """The arguments of a call, in the order of the schema."""
    operands, options, *others = call
    return (*operands, *options, *others)


_Arguments = namedtuple("_Arguments", [argument.name for argument in native(OP)._schema.arguments])


def _pick(kind, arguments):
    return kind(*(getattr(arguments, name) for name in kind._fields))


def call_of(arguments) -> Call:
    """The inverse of :func:`flat`."""
    a = _Arguments(*arguments)
    others = (getattr(a, name) for name in Call._fields[2:])
    return Call(_pick(Operands, a), _pick(Options, a), *others)


def _empty_gradients(operands, options, needs):
    same = operators.Operands(operands.hidden, operands.weight, operands.target, lora_a=operands.lora_a)
    chunks = operators.Options(chunk_rows=options.chunk_rows, valid_rows=options.valid_rows)
    return operators.empty_gradients(same, chunks, needs)


def _fake(*arguments):
    call = call_of(arguments)
    hidden, rows = call.operands.hidden, call.operands.target.shape[0]
    wanted = sum(bool(call.outputs & bit) for bit in NUMBERS.values())
    return (
        hidden.new_empty(() if call.is_scalar() else (rows,), dtype=torch.float32),
        hidden.new_empty(() if call.is_scalar() else (0,), dtype=torch.float32),
        *_empty_gradients(call.operands, call.options, call.needs if call.is_scalar() else 0),
        hidden.new_empty((wanted, rows) if wanted else (0,), dtype=torch.float32),
    )


def _fake_rows(upstream, *arguments):
    *inputs, needs = arguments
    size = len(Operands._fields)
    return _empty_gradients(Operands(*inputs[:size]), Options(*inputs[size:]), needs)


_rows_backward = raw("linear_divergence_rows_bwd", _fake_rows, OP)
head = HeadLoss(
    OP, call_of=call_of, flat=flat, fake=_fake,
    rows_backward=lambda upstream, operands, options, needs: _rows_backward(
        upstream, *operands, *options, needs
    ),
)  # fmt: skip
