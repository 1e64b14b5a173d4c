"""Operands and options of the functions on a linear head: checks, dtypes, and which gradients are needed."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tigon._load import native
from tigon._op import Op, is_transformed
from tigon.error import check, refuse
from tigon.ops import arguments
from tigon.ops.cross_entropy import split_denominator
from tigon.ops.loss_head.labels import check_shift, check_valid_rows, known_rows, shifted
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import (
    LOSS_HEAD,
    HeadPlan,
    Sizes,
    check_cap,
    check_peak,
    check_unbounded,
    chunk_that_fits,
    limit_bytes,
    native_names,
    plan,
    with_head,
)

GRADIENTS = ("hidden", "weight", "bias", "lora_a", "lora_b")  # the tensors that can have one, in this order
_BITS = native_names("tigon_loss_head_needs")
NEEDS = {name: _BITS[name] for name in GRADIENTS}
HIDDEN, WEIGHT, BIAS, LORA_A, LORA_B = NEEDS.values()
MAY_ROUND, UNSCALED, MAIN_GRAD, LOGITS, BY_CLASSES = (
    _BITS[name] for name in ("may_round", "unit", "main_grad", "logits", "by_classes")
)


class Operands(NamedTuple):
    """The tensors that every native operator on a head takes first, in the order of the schemas."""

    hidden: torch.Tensor  # [..., H]
    weight: torch.Tensor  # [V, H], hidden's dtype
    target: torch.Tensor  # [rows] int64
    bias: torch.Tensor | None = None  # [V], float32 or hidden's dtype
    class_weight: torch.Tensor | None = None  # [V] float32
    token_weight: torch.Tensor | None = None  # [rows] float32
    lora_a: torch.Tensor | None = None  # [r, H], hidden's dtype
    lora_b: torch.Tensor | None = None  # [V, r], hidden's dtype


class LabelFormula(NamedTuple):
    """The numbers that follow the tensors in every schema."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0  # 0: none
    logit_scale: float = 1.0
    temperature: float = 1.0
    z_loss: float = 0.0
    lora_scale: float = 1.0
    wide_logits: bool = False  # float32 from 16-bit operands


class Memory(NamedTuple):
    """How a call is divided, which gradients it computes, and which rows it keeps."""

    chunk_rows: int = 0  # 0: the native side chooses
    valid_rows: int = -1  # -1: not known
    needs: int = 0  # bits of NEEDS, MAY_ROUND, UNSCALED, MAIN_GRAD
    keep_rows: int = 0  # losses of rows: most rows whose logits' gradients are kept, or AUTOMATIC


_ENDS = tuple(itertools.accumulate(len(part._fields) for part in (Operands, LabelFormula, Memory)))
HEAD_ARGUMENTS = _ENDS[-1]  # how many of an operator's arguments all heads share


def own_arguments(name: str) -> type:
    """A named tuple of the arguments that an operator takes after the shared ones."""
    return namedtuple(f"_{name}", [a.name for a in native(name)._schema.arguments[HEAD_ARGUMENTS:]])


class HeadCall(NamedTuple):
    """The arguments of a native operator on a head."""

    operands: Operands
    formula: LabelFormula
    memory: Memory
    own: Any = ()  # the operator's other arguments, an `own_arguments` of its name

    @classmethod
    def of(cls, inputs, own=lambda *values: values) -> HeadCall:
        """The inverse of :meth:`flat`."""
        (a, b, c), rest = _ENDS, inputs[HEAD_ARGUMENTS:]
        return cls(Operands(*inputs[:a]), LabelFormula(*inputs[a:b]), Memory(*inputs[b:c]), own(*rest))

    def flat(self) -> tuple:
        """The arguments, in the order of the schema."""
        operands, formula, memory, own = self
        return (*operands, *formula, *memory, *own)

    def with_memory(self, **changes: int) -> HeadCall:
        """The call with other values of :class:`Memory`."""
        return self._replace(memory=self.memory._replace(**changes))

    def divided(self, head_plan: HeadPlan) -> HeadCall:
        """The call as a plan within a peak divides it."""
        if not head_plan.capped:
            return self
        needs = self.memory.needs | BY_CLASSES * head_plan.by_classes
        return self.with_memory(chunk_rows=head_plan.chunk_rows, needs=needs, keep_rows=head_plan.kept_rows)

    def without_tensors(self, numbers: tuple = ()) -> HeadCall:
        """The call without tensors, for a context; `numbers`: the own arguments that the backward takes."""
        return self._replace(operands=None, own=numbers)

    def rows(self) -> int:
        """The number of rows whose logits are computed."""
        valid = self.memory.valid_rows
        return self.operands.target.shape[0] if valid < 0 else valid


def main_grad_of(op, weight):
    """The float32 tensor to which weight's gradient is added, if its owner requested that."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    if not getattr(weight, "tigon_main_grad", False):
        return None
    main_grad = getattr(weight, "main_grad", None)
    fits = main_grad is not None and main_grad.dtype == torch.float32 and main_grad.shape == weight.shape
    given = "none" if main_grad is None else f"{main_grad.dtype} {list(main_grad.shape)}"
    words = "weight.main_grad must be float32 {} with weight.tigon_main_grad, got {}"
    check(op, fits, words, weight.shape, given)
    return main_grad


def float_parts(head: HeadOptions, **others: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """The tensors that a reference reads in addition to hidden states, by name."""
    a, b = (head.lora or (None, None))[:2]
    return {**others, "bias": head.bias, "lora[0]": a, "lora[1]": b}


class TrainedCalls:
    """Counts calls of functions on a head with gradients, in eager mode, except those of patched models."""

    number = 0  # for `Report.check`: a program's own loss may call them

    @classmethod
    def count(cls, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """Count a call if it is one of these."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            cls.number += hidden.requires_grad or weight.requires_grad


def check_head(op, hidden, weight, target, head: HeadOptions):
    """Check the operands of a function on a head."""
    arguments.check_float(op, "hidden", hidden)
    arguments.check_float(op, "weight", weight)
    bias = head.bias
    if bias is not None:
        arguments.check_float(op, "bias", bias)
    if hidden.dim() < 1:
        refuse(op, "hidden must have at least one dimension, got 0")
    sizes, rows, columns = weight.shape, hidden.shape[:-1], hidden.shape[-1]
    if len(sizes) != 2:
        refuse(op, "weight must be [V, H], got {}", sizes)
    if sizes[1] != columns:
        refuse(op, "weight must be [V, {}] to fit hidden {}, got {}", columns, hidden.shape, sizes)
    if sizes[0] == 0 or columns == 0:
        refuse(op, "weight must not be empty, got {}", sizes)
    arguments.check_indices(op, "target", target)
    for name, t in (("weight", weight), ("target", target)):
        if t.is_meta != hidden.is_meta:
            refuse(op, name + " must be on {}, got {}", hidden.device, t.device)
    if target.shape != rows:
        refuse(op, "target must be {}, got {}", rows, target.shape)
    if bias is not None and bias.is_meta != hidden.is_meta:
        refuse(op, "bias must be on {}, got {}", hidden.device, bias.device)
    if bias is not None and bias.shape != sizes[:1]:
        refuse(op, "bias must be {}, got {}", sizes[:1], bias.shape)
    check_shift(op, head.shift, head.position_ids, target)
    arguments.check_integers(op, ignore_index=head.ignore_index)
    arguments.check_positive(op, "softcap", head.softcap, or_none=True)
    arguments.check_numbers(op, logit_scale=head.logit_scale)
    arguments.check_positive(op, "temperature", head.temperature)
    arguments.check_integers(op, least=1, or_none=True, chunk_rows=head.chunk_rows)
    check_lora(op, head.lora, hidden, weight)
    check_cap(op, max_workspace_mb=head.max_workspace_mb, max_peak_mb=head.max_peak_mb)


def wide_logits(op, logit_dtype, hidden) -> bool:
    """Whether logits are float32 although hidden is not."""
    if logit_dtype is None:
        return False
    fits = logit_dtype is torch.float32 or logit_dtype is hidden.dtype
    check(op, fits, "logit_dtype must be float32 or hidden's {} (or None), got {}", hidden.dtype, logit_dtype)
    return logit_dtype == torch.float32 and hidden.dtype in (torch.bfloat16, torch.float16)


def check_lora(op, lora, hidden, weight):
    """Check that ``(A, B, scale)``, or None, fits the head."""
    if lora is None:
        return
    three = isinstance(lora, Sequence) and len(lora) == 3
    given = len(lora) if isinstance(lora, Sequence) else arguments.kind_of(lora)
    check(op, three, "lora must be (A, B, scale), got {}", given)
    a, b, scale = lora
    arguments.check_float(op, "lora A", a)
    arguments.check_float(op, "lora B", b)
    arguments.check_numbers(op, **{"lora scale": scale})
    fits = a.dim() == b.dim() == 2 and a.shape[1] == hidden.shape[-1]
    fits = fits and b.shape == (weight.shape[0], a.shape[0])
    given = f"{list(a.shape)}, {list(b.shape)}"
    wanted = (hidden.shape[-1], weight.shape[0])
    check(op, fits and a.shape[0] > 0, "lora must be (A [r, {}], B [{}, r], scale), got {}", *wanted, given)


def check_token_weight(op, token_weight, target) -> None:
    if token_weight is not None:
        arguments.check_float(op, "token_weight", token_weight)
        arguments.check_shape(op, "token_weight", token_weight, target.shape)


def divisors(denominator, device) -> dict[str, Any]:
    """A checked denominator as operators take it: a tensor, or a number that the host knows."""
    tensor, number = split_denominator(denominator, device)
    return {"denominator": tensor, "host_denominator": number}


def check_outputs(op, outputs, known, or_none="") -> tuple[str, ...]:
    """Check the names of results; the loss is first."""
    named = isinstance(outputs, Sequence) and not isinstance(outputs, str)
    outputs = tuple(outputs) if named else outputs
    fits = named and all(isinstance(name, str) and name in known for name in outputs)
    fits = fits and len(set(outputs)) == len(outputs) and outputs[:1] == ("loss",)
    words = "outputs must be 'loss' and then some of {}" + or_none + ", got {!r}"
    check(op, fits, words, known[1:], outputs)
    return outputs


def autocast(hidden):
    """Convert hidden to autocast's dtype."""
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
    """Append zero columns to the operands if CUDA's matmuls need whole 16-byte vectors of a row.

    A 16-bit matmul whose inner dimension or row stride is not a multiple of eight runs at a quarter to an
    eighth of the speed. The appended columns change no logit, and their gradients are removed.
    """
    columns = hidden.shape[-1]
    if columns % 8 == 0 or not hidden.is_cuda or hidden.element_size() != 2:
        return hidden, weight, lora
    columns += -columns % 8
    if lora is not None:
        lora = (_fit_columns(lora[0], columns), *lora[1:])
    return _fit_columns(hidden, columns), _fit_columns(weight, columns), lora


def native_call(
    op,
    hidden,
    weight,
    target,
    head: HeadOptions,
    *,
    class_weight=None,
    token_weight=None,
    label_smoothing=0.0,
    z_loss=0.0,
    main_grad=None,
    own=(),
) -> tuple[HeadCall, tuple]:
    """Make a native call of checked arguments; also return the tensors that get its gradients, which are
    hidden, weight, bias, A and B before their conversion.

    Args:
        main_grad: the tensor to which weight's gradient is added, or None.
        own: the operator's other arguments.
    """
    bias, lora, ignore_index, position_ids = head.bias, head.lora, head.ignore_index, head.position_ids
    wide = wide_logits(op, head.logit_dtype, hidden)
    if main_grad is None:  # main_grad has the columns of weight
        hidden, weight, lora = whole_vectors(hidden, weight, lora)
    a, b, lora_scale = (None, None, 1.0) if lora is None else lora
    if lora is not None:
        a, b, lora_scale = a.to(hidden.dtype), b.to(hidden.dtype), float(lora_scale)
    valid = known_rows(op, target, ignore_index, head.shift, head.valid_rows, hidden.device, position_ids)
    if hidden.is_cuda and target.device.type == "cpu":
        target = target.to(hidden.device, non_blocking=True)
        if position_ids is not None:
            position_ids = position_ids.to(hidden.device, non_blocking=True)
    parameters = (hidden, weight, bias, a, b)
    needs = needs_of_tensors(*parameters)
    if weight.dtype != hidden.dtype:
        weight = weight.to(hidden.dtype)
    else:  # weight's gradient may be rounded by its matmul
        needs |= MAY_ROUND
    if bias is not None and bias.dtype not in ((torch.float32,) if wide else (hidden.dtype, torch.float32)):
        bias = bias.float()
    if target.dtype != torch.int64:
        target = target.long()
    target = shifted(target, ignore_index, head.shift, position_ids)
    if class_weight is not None:
        class_weight = class_weight.detach().float()
    if token_weight is not None:
        token_weight = token_weight.detach().float().reshape(-1)
    chunk_rows = head.chunk_rows or 0
    if head.max_workspace_mb is not None:
        sizes = with_needs(Sizes(wide=wide), needs, a, main_grad)
        chunk_rows = chunk_that_fits(op, hidden, weight, head, sizes)
    operands = Operands(hidden, weight, target.reshape(-1), bias, class_weight, token_weight, a, b)
    logits = head.softcap or 0.0, head.logit_scale, head.temperature
    formula = LabelFormula(ignore_index, label_smoothing, *logits, z_loss, lora_scale, wide)
    return HeadCall(operands, formula, Memory(chunk_rows, valid, needs), own), parameters


def needs_of_tensors(hidden, weight, bias, lora_a, lora_b) -> int:
    """Bits of the tensors that need a gradient."""
    if not torch.is_grad_enabled():
        return 0
    needs = HIDDEN * hidden.requires_grad + WEIGHT * weight.requires_grad
    if bias is not None:
        needs += BIAS * bias.requires_grad
    if lora_a is not None:
        needs += LORA_A * lora_a.requires_grad + LORA_B * lora_b.requires_grad
    return needs


def with_needs(sizes: Sizes, needs, lora_a, main_grad) -> Sizes:
    """Set which operands are trained, the rank of LoRA, and whether weight has a main_grad."""
    return sizes._replace(
        lora_rank=0 if lora_a is None else lora_a.shape[0],
        train_hidden=needs & HIDDEN != 0,
        train_weight=needs & WEIGHT != 0,
        train_bias=needs & BIAS != 0,
        main_grad=main_grad is not None,
    )


def plan_within(
    op,
    call: HeadCall,
    head: HeadOptions,
    sizes: Sizes,
    weight,
    main_grad=None,
    *,
    planner=LOSS_HEAD,
    extra_bytes=0,
) -> HeadPlan:
    """Plan a call that takes at most ``max_peak_mb``; see :func:`within_peak`."""
    if is_transformed():  # the backward forms other gradients than are planned
        check_unbounded(op, head.max_peak_mb, "under the transforms of torch.func")
    hidden, matrix, lora_a = (getattr(call.operands, name) for name in ("hidden", "weight", "lora_a"))
    needs, memory, worked = call.memory.needs, call.memory, call.rows()
    if memory.valid_rows < 0 and arguments.readable(call.operands.target):  # the call counts them too
        counts = call.operands.target != call.formula.ignore_index
        worked = int((counts if counts.dim() == 1 else counts.any(-1)).sum())
    rows = hidden.numel() // hidden.shape[-1]
    sizes = with_needs(sizes, needs, lora_a if needs & (LORA_A | LORA_B) else None, main_grad)
    sizes = with_head(sizes, hidden, matrix.shape[0], rows, weight.dtype)._replace(
        worked=worked,
        wide=call.formula.wide_logits,
        chunk_rows=memory.chunk_rows,
        keep_rows=memory.keep_rows,
        unit=needs & UNSCALED != 0,
        peak=limit_bytes(head.max_peak_mb, extra_bytes),
    )
    return plan(sizes, planner)


def within_peak(
    op, call: HeadCall, head: HeadOptions, sizes: Sizes, *weights, planner=LOSS_HEAD, extra_bytes=0
) -> HeadCall:
    """The call, divided so that it and its backward take at most ``max_peak_mb``.

    Args:
        sizes: what the operator sets itself.
        weights: weight as the caller gave it, and its main_grad if it has one.
        extra_bytes: that the plan does not know.
    """
    if head.max_peak_mb is None:
        return call
    head_plan = plan_within(op, call, head, sizes, *weights, planner=planner, extra_bytes=extra_bytes)
    check_peak(op, head_plan, extra_bytes, head.max_peak_mb)
    return call.divided(head_plan)


class _ToMainGrad(torch.autograd.Function):
    """Returns weight; its gradient is added to its main_grad and goes no further."""

    @staticmethod
    def forward(ctx, weight, main_grad):
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dweight):
        ctx.main_grad.add_(dweight.detach())
        return None, None


def check_plain(op, classes, target, head: HeadOptions) -> None:
    """Check the labels for the references as the native calls do, and that no peak is asked for."""
    check_unbounded(op, head.max_peak_mb, "in float64")
    ignore_index = head.ignore_index
    target = shifted(target, ignore_index, head.shift, head.position_ids)
    arguments.check_range(op, "target", target, classes, ignore_index)
    check_valid_rows(op, target, ignore_index, head.valid_rows)


def plain_weight(op, weight):
    """weight for the references; if it has a main_grad, its gradient is added there."""
    main_grad = main_grad_of(op, weight)
    return weight if main_grad is None else _ToMainGrad.apply(weight, main_grad)
