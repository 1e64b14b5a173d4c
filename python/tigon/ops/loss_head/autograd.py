"""How losses of a head return their gradients, and the native operators that compute them.

The gradients of a scalar loss are computed with the loss, and the backward scales them (``finish``). Those of
losses of rows are computed in the backward (``rows_gradients``). The gradient of a row's logits is its
upstream gradient times a factor that depends only on the row. So the forward can keep this factor for as many
rows as fit the memory (``kept``), and hidden's gradient for an upstream gradient of 1 (``unscaled``). The
backward scales rows and computes the other gradients from the kept factors. A forward that returns entropies
keeps the logits instead (``LOGITS``), since their gradients depend on both upstream gradients. The backward
computes again what was not kept.

Eager calls use :class:`_Eager`, which takes only the tensors that can need a gradient (to save host time).
Under ``torch.compile`` and the transforms of ``torch.func`` the operator itself is differentiable.
"""

from __future__ import annotations

import torch

from tigon._load import native
from tigon._op import Op, direct_apply, graph_is_kept, is_transformed, may_overwrite_saved, raw, refuse_second
from tigon.ops.loss_head import tied
from tigon.ops.loss_head.operands import (
    BY_CLASSES,
    HEAD_ARGUMENTS,
    HIDDEN,
    LOGITS,
    MAIN_GRAD,
    MAY_ROUND,
    NEEDS,
    UNSCALED,
    WEIGHT,
    HeadCall,
    Operands,
    own_arguments,
)
from tigon.ops.loss_head.plan import AUTOMATIC, Sizes, padded, plan, rows_within, with_head

OP = "linear_cross_entropy"
PLACES = {name: Operands._fields.index(name) for name in NEEDS}
RESULTS = 2 + len(NEEDS)  # loss, scale and the gradients of NEEDS come first among an operator's outputs


def only_hidden(needs):
    """Whether only hidden needs a gradient."""
    return needs & sum(NEEDS.values()) == HIDDEN


# Shapes for fake tensors. A symbolic size is compared, and fixed only if a part of the rows is kept.


def _plan(call: HeadCall, rows, sizes: Sizes):
    train_weight, chunk_rows = call.memory.needs & WEIGHT != 0, call.memory.chunk_rows
    sizes = sizes._replace(train_weight=train_weight, chunk_rows=chunk_rows)
    return plan(with_head(sizes, call.operands.hidden, call.operands.weight.shape[0], rows))


def _dweight_dtype(call: HeadCall, kept):
    """Return the dtype in which the native side computes weight's gradient."""
    hidden, needs, rows = call.operands.hidden, call.memory.needs, call.rows()
    if needs & BY_CLASSES:
        return hidden.dtype
    if not (needs & WEIGHT and needs & MAY_ROUND and hidden.dtype == torch.bfloat16):
        return torch.float32
    if kept is not None and (kept.shape[0] < rows or not (call.memory.chunk_rows or needs & LOGITS)):
        fits = kept.shape[0] >= rows
    else:
        fits = rows <= _plan(call, 0, Sizes()).whole_rows
    return hidden.dtype if fits else torch.float32


def empty_gradients(call: HeadCall, needs, kept=None):
    """Allocate the gradients of NEEDS; those not needed have no elements."""
    hidden, weight, lora_a = call.operands.hidden, call.operands.weight, call.operands.lora_a
    rank = 0 if lora_a is None else lora_a.shape[0]
    vocab, size = weight.shape[0], hidden.shape[-1]
    shapes = (hidden.shape, (vocab, size), (vocab,), (rank, size), (vocab, rank))
    dtypes = (hidden.dtype, _dweight_dtype(call, kept), *(torch.float32,) * 3)
    return tuple(
        hidden.new_empty(shape if needs & bit else (0,), dtype=dtype)
        for bit, shape, dtype in zip(NEEDS.values(), shapes, dtypes, strict=True)
    )


def empty_loss(call: HeadCall, scalar):
    """Allocate loss, scale and gradients."""
    hidden, f32 = call.operands.hidden, {"dtype": torch.float32}
    return (
        hidden.new_empty(() if scalar else (call.operands.target.shape[0],), **f32),
        hidden.new_empty(() if scalar else (0,), **f32),
        *empty_gradients(call, call.memory.needs if scalar else 0),
    )


def empty_numbers(call: HeadCall, bits):
    """Allocate the results of rows that the call asks for by a bit of its own."""
    wanted = sum(bool(call.own.outputs & bit) for bit in bits)
    shape = (wanted, call.operands.target.shape[0]) if wanted else (0,)
    return call.operands.hidden.new_empty(shape, dtype=torch.float32)


def empty_kept(call: HeadCall):
    """Allocate unscaled and kept of losses of rows."""
    hidden, weight, *_ = call.operands
    needs, rows, most = call.memory.needs, call.rows(), call.memory.keep_rows
    if only_hidden(needs) or most == 0:
        kept = 0
    elif most == AUTOMATIC:
        whole = _plan(call, 0, Sizes(main_grad=needs & MAIN_GRAD != 0)).whole_rows
        kept = rows if rows <= whole else 0
    else:
        kept = rows if rows <= most else _plan(call, rows, Sizes(train_bias=True, keep_rows=most)).kept
    computed = needs & UNSCALED and needs & HIDDEN and (kept > 0 or only_hidden(needs))
    shape = (kept, padded(weight.shape[0])) if kept > 0 else (0,)
    return hidden.new_empty(hidden.shape if computed else (0,)), hidden.new_empty(shape)


def _fake_finish(dloss, scale, dhidden, dweight, dbias, dlora_a, dlora_b, weight_dtype, bias_dtype):
    dtypes = (dhidden.dtype, weight_dtype, bias_dtype, dhidden.dtype, dhidden.dtype)
    gradients = (dhidden, dweight, dbias, dlora_a, dlora_b)
    return tuple(g.new_empty(g.shape, dtype=dtype) for g, dtype in zip(gradients, dtypes, strict=True))


def _fake_rows(upstream, entropy_upstream, unscaled, kept, *arguments):
    call = HeadCall.of(arguments)
    return empty_gradients(call, call.memory.needs, kept)


def _fake_rows_in_place(upstream, entropy_upstream, unscaled, kept, main_grad, *arguments):
    *arguments, in_place = arguments
    call = HeadCall.of(arguments)
    given = WEIGHT * (main_grad is not None) | HIDDEN * (in_place and unscaled is not None)
    return empty_gradients(call, call.memory.needs & ~given, kept)


# csrc/tigon/ops/linear_cross_entropy/linear_cross_entropy.cpp lists their fields.
finish = raw("linear_cross_entropy_bwd", _fake_finish)
finish_in_place = raw("linear_cross_entropy_bwd_", _fake_finish, OP)
_rows_backward = raw("linear_cross_entropy_rows_bwd", _fake_rows, OP)
_rows_backward_in_place = raw("linear_cross_entropy_rows_bwd_", _fake_rows_in_place, OP)


# Losses of rows.


def with_kept_rows(call: HeadCall, keep_mb, main_grad, entropy=False) -> HeadCall:
    """The call with the rows that its forward keeps; `entropy`: entropies may need a gradient."""
    needs = call.memory.needs
    if keep_mb == 0 or not needs & ~MAY_ROUND or is_transformed():
        return call
    logits = entropy and not only_hidden(needs) and not call.formula.wide_logits
    needs |= LOGITS if logits else UNSCALED * (needs & HIDDEN != 0)
    needs |= MAIN_GRAD * (main_grad is not None)
    hidden, weight, *_ = call.operands
    most = rows_within(keep_mb, weight.shape[0], hidden.element_size())
    return call.with_memory(needs=needs, keep_rows=most)


def tensors_to_save(call: HeadCall, unscaled, kept, recomputed=False) -> tuple:
    """Return the tensors to save; `recomputed`: a gradient of entropies may need the logits again.

    If all rows are kept, or only hidden needs a gradient, weight is not saved, so that a gathered copy of it
    can be freed.
    """
    operands = call.operands
    hidden, weight = operands.hidden, operands.weight
    computed, some = unscaled.shape == hidden.shape, kept.dim() == 2
    alone = computed and only_hidden(call.memory.needs)
    if not recomputed and (alone or (some and kept.shape[0] >= call.rows())):
        operands = operands._replace(
            hidden=unscaled if alone else hidden,
            weight=weight.new_empty(weight.shape[0], 0),
            bias=None,
            class_weight=None,
        )
    return unscaled if computed else None, kept if some else None, *operands


def rows_gradients(tensors, upstream, call: HeadCall, entropy_upstream=None, *, eager=False, main_grad=None):
    """The gradients from the tensors of :func:`tensors_to_save`; None for weight's if main_grad has it.

    An eager backward that frees its graph scales the rows of ``unscaled`` in place, and overwrites kept
    logits with their gradients.
    """
    unscaled, kept, *operands = tensors
    needs = call.memory.needs
    if entropy_upstream is not None and not needs & LOGITS:
        unscaled = kept = None
    if needs & HIDDEN == 0:
        unscaled = None
    in_place = eager and (unscaled is not None or needs & LOGITS != 0) and not graph_is_kept()
    shared = (*operands, *call.formula, *call.memory)
    if main_grad is None and not in_place:
        return _rows_backward(upstream, entropy_upstream, unscaled, kept, *shared)
    dhidden, dweight, *others = _rows_backward_in_place(
        upstream, entropy_upstream, unscaled, kept, main_grad, *shared, in_place
    )
    return (
        unscaled if in_place and unscaled is not None else dhidden,
        None if main_grad is not None else dweight,
        *others,
    )


def needs_of(needs_input_grad) -> int:
    """Make `needs` of the flags of an operator's arguments."""
    return sum(bit for name, bit in NEEDS.items() if needs_input_grad[PLACES[name]])


def by_argument(gradients, needs, dtypes, number) -> tuple:
    """For each argument of an operator its gradient, rounded, or None."""
    found = [None] * number
    for (name, bit), g, dtype in zip(NEEDS.items(), gradients, dtypes, strict=False):
        if needs & bit and g is not None:
            found[PLACES[name]] = g.to(dtype)
    return tuple(found)


def dtypes_of(hidden, weight, bias) -> tuple:
    """Return the dtypes of the gradients of NEEDS."""
    return hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype, *(hidden.dtype,) * 2


def _row_upstream(dloss, scale, shape):
    """Return the upstream gradient of each row's loss."""
    return (dloss * scale).expand(shape)


class HeadLoss:
    """``tigon::<name>`` as a differentiable loss of a head: scalar, or of rows.

    Its first results are the loss, the reduction's factor and the gradients of NEEDS.

    Args:
        name: of the operator, and in messages.
        fake: ``(call)``: the operator's fake kernel.
        rows_gradients: of losses of rows ``(saved, upstream, call, eager=, main_grad=)``: the gradients of
            NEEDS, computing the logits again if they were not kept.
        saved: ``(call, output)``: the tensors that it takes; by default the operands.
        numbers: ``(call)``: the other arguments that it takes, from ``call.own``.
    """

    def __init__(
        self,
        name,
        fake,
        rows_gradients=None,
        saved=lambda call, output: call.operands,
        numbers=lambda call: (),
    ):
        self.name, self.rows_gradients, self.saved, self.numbers = name, rows_gradients, saved, numbers
        self.arguments, self.own = len(native(name)._schema.arguments), own_arguments(name)
        self.op = Op(
            name,
            fake=lambda *inputs: fake(HeadCall.of(inputs, self.own)),
            setup_context=self._setup_context,
            backward=self._backward,
            transformed=(self._setup_transformed, self._backward_transformed),
        )

    def run(self, call: HeadCall, parameters, main_grad=None, scalar=True) -> tuple:
        """Run the operator and return the loss and the results of rows.

        Args:
            parameters: hidden, weight, bias, A, B as the caller gave them, which get the gradients.
            main_grad: weight's gradient is added to it; ``None``: it is returned.
        """
        if torch.compiler.is_compiling():
            output = self.op.registered(*call.flat())
        elif is_transformed():
            output = self.op.transformed(*call.with_memory(needs=0, keep_rows=0).flat())
        elif call.memory.needs & ~MAY_ROUND == 0:
            output = self.op.forward(*call.flat())
        else:
            return _apply(self, call, scalar, main_grad, *parameters)
        return output[0], *output[RESULTS:]

    # The registered operator.

    def _setup_context(self, ctx, inputs, output):
        call = HeadCall.of(inputs, self.own)
        operands = call.operands
        ctx.dtypes = dtypes_of(operands.hidden, operands.weight, operands.bias)
        ctx.scalar, ctx.call = output[0].dim() == 0, call.without_tensors(self.numbers(call))
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(output[1:RESULTS] if ctx.scalar else self.saved(call, output)))

    def _backward(self, ctx, dloss, *_):
        if dloss is None:
            return (None,) * self.arguments
        if ctx.scalar:
            gradients = scale_gradients(dloss, ctx.saved_tensors, *ctx.dtypes[1:3])
        else:
            gradients = self.rows_gradients(ctx.saved_tensors, dloss, ctx.call)
        return by_argument(gradients, ctx.call.memory.needs, ctx.dtypes, self.arguments)

    # For the transforms of torch.func the backward computes the logits again, whatever the reduction. Only
    # the backward knows which tensors need a gradient: inside vmap a tensor does not say so.

    def _setup_transformed(self, ctx, inputs, output):
        self._setup_context(ctx, inputs, output)
        call = HeadCall.of(inputs, self.own)
        ctx.rows_shape = call.operands.target.shape
        ctx.save_for_backward(output[1], *self.saved(call, output))

    def _backward_transformed(self, ctx, dloss, *_):
        if dloss is None:
            return (None,) * self.arguments
        scale, *tensors = ctx.saved_tensors
        needs = needs_of(ctx.needs_input_grad)
        upstream = _row_upstream(dloss, scale, ctx.rows_shape) if ctx.scalar else dloss
        gradients = self.rows_gradients(tensors, upstream, ctx.call.with_memory(needs=needs, keep_rows=0))
        return by_argument(gradients, needs, ctx.dtypes, self.arguments)


def scale_gradients(dloss, tensors, *dtypes):
    """Multiply the gradients of a scalar loss by its upstream gradient; in place if the backward runs once.

    Args:
        tensors: the reduction's factor, and gradients as the forward computed them.
        dtypes: of weight's and bias' gradients.
    """
    run = finish_in_place if may_overwrite_saved(tensors) else finish
    return run(dloss, *tensors, *map(finishable, dtypes))


def finishable(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ``finish`` writes a gradient of this dtype: float64 is converted from float32."""
    return torch.float32 if dtype == torch.float64 else dtype


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, call, scalar, main_grad, hidden, weight, bias, lora_a, lora_b):
        late = scalar and main_grad is not None  # the backward computes all gradients, times the upstream
        output = loss.op.forward(*(call.with_memory(needs=0, keep_rows=0) if late else call).flat())
        ctx.loss, ctx.main_grad, ctx.scalar = loss, main_grad, scalar
        ctx.table = weight if tied.is_table(weight) else None
        ctx.needs, ctx.dtypes = call.memory.needs, dtypes_of(hidden, weight, bias)
        if scalar and not late:
            ctx.save_for_backward(*output[1:RESULTS])
        else:
            ctx.call, ctx.rows_shape = call.without_tensors(loss.numbers(call)), call.operands.target.shape
            tensors = loss.saved(call, output)
            ctx.save_for_backward(*((output[1], *tensors) if late else tensors))
        others = output[RESULTS:]
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        return output[0], *others

    @staticmethod
    def backward(ctx, dloss, *_):
        loss, needs, tensors = ctx.loss, ctx.needs, ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second(loss.name)
        if ctx.scalar and ctx.main_grad is None:
            gradients = scale_gradients(dloss, tensors, *ctx.dtypes[1:3])
        else:
            if ctx.scalar:
                scale, *tensors = tensors
                dloss = _row_upstream(dloss, scale, ctx.rows_shape)
            gradients = loss.rows_gradients(tensors, dloss, ctx.call, eager=True, main_grad=ctx.main_grad)
        asked = [
            None if g is None or not needs & bit else g if g.dtype == dtype else g.to(dtype)
            for g, dtype, bit in zip(gradients, ctx.dtypes, NEEDS.values(), strict=True)
        ]
        if ctx.table is not None:
            tied.returned(ctx.table, asked[1])
        return None, None, None, None, *asked


_apply = direct_apply(_Eager)


def teacher_head_loss(name: str, fake) -> HeadLoss:
    """The loss of a head against a teacher's, with ``tigon::<name>_rows_bwd`` for losses of rows.

    That operator takes the teacher's tensors and then numbers, by the names that the loss has for them.
    """

    def fake_rows(upstream, *arguments):
        call = HeadCall.of(arguments)
        return empty_gradients(call, call.memory.needs)

    rows_backward = raw(f"{name}_rows_bwd", fake_rows, name)
    taken = native(f"{name}_rows_bwd")._schema.arguments[1 + HEAD_ARGUMENTS :]
    tensors, numbers = (
        [a.name for a in taken if ("Tensor" in str(a.type)) is kind] for kind in (True, False)
    )

    def rows_gradients(saved, upstream, call, **ignored):
        operands, teacher = saved[: len(Operands._fields)], saved[len(Operands._fields) :]
        return rows_backward(upstream, *operands, *call.formula, *call.memory, *teacher, *call.own)

    return HeadLoss(
        name,
        fake,
        rows_gradients,
        lambda call, output: (*call.operands, *(getattr(call.own, key) for key in tensors)),
        lambda call: tuple(getattr(call.own, key) for key in numbers),
    )
