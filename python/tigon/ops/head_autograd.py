"""Gradients of the fused loss head: its native operators, and how a loss hands its gradients on.

Eager calls go through :class:`_Eager`, which takes nothing but the tensors that can need a gradient (host
cost); under ``torch.compile`` and the transforms of ``torch.func`` run other forms of the same formulas.
"""

from __future__ import annotations

import torch

from tigon._op import Op, direct_apply, graph_is_kept, once, raw
from tigon.ops.head import BIAS, HIDDEN, LORA_A, LORA_B, MAY_ROUND, REDUCTIONS, WEIGHT
from tigon.ops.head_memory import padded, whole_rows

NUMBERS = {"z_loss": 1, "log_prob": 2, "lse": 4, "entropy": 8}  # bits of `outputs`
PREDICTED = 16
_BITS = (HIDDEN, WEIGHT, BIAS, LORA_A, LORA_B)
_REDUCTION, _VALID_ROWS, _NEEDS, _INPUTS = 17, 19, 21, 22  # places in the schema, and its length


def _loss_options(inputs):
    """What a backward that computes the logits again is told, from ignore_index to valid_rows."""
    return (*inputs[10:_REDUCTION], *inputs[_REDUCTION + 1 : _VALID_ROWS + 1])


def _rows_worked_on(target, valid_rows):
    return target.shape[0] if valid_rows < 0 else valid_rows


def _dweight_dtype(hidden, weight, target, valid_rows, chunk_rows, needs):
    """In which dtype the native side forms weight's gradient."""
    if not (needs & WEIGHT and needs & MAY_ROUND and hidden.dtype == torch.bfloat16):
        return torch.float32
    rows = _rows_worked_on(target, valid_rows)
    whole = chunk_rows or whole_rows(hidden.device.type, hidden.dtype, weight.shape[1], weight.shape[0])
    return hidden.dtype if rows <= whole else torch.float32  # a symbolic size is guarded, not fixed


def _empty_gradients(hidden, weight, lora_a, needs, of_weight=torch.float32):
    rank = 0 if lora_a is None else lora_a.shape[0]
    vocab, size = weight.shape
    shapes = (hidden.shape, (vocab, size), (vocab,), (rank, size), (vocab, rank))
    dtypes = (hidden.dtype, of_weight, *(torch.float32,) * 3)
    return tuple(
        hidden.new_empty(shape if needs & bit else (0,), dtype=dtype)
        for bit, shape, dtype in zip(_BITS, shapes, dtypes, strict=True)
    )


def _fake(hidden, weight, target, bias, class_weight, token_weight, lora_a, lora_b, denominator,
          host_denominator, ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss,
          lora_scale, reduction, chunk_rows, valid_rows, outputs, needs):  # fmt: skip
    rows = target.shape[0]
    scalar = reduction != REDUCTIONS["none"]
    of_weight = _dweight_dtype(hidden, weight, target, valid_rows, chunk_rows, needs)
    wanted = sum(bool(outputs & bit) for bit in NUMBERS.values())
    return (
        hidden.new_empty(() if scalar else (rows,), dtype=torch.float32),
        hidden.new_empty(() if scalar else (0,), dtype=torch.float32),
        *_empty_gradients(hidden, weight, lora_a, needs if scalar else 0, of_weight),
        hidden.new_empty((wanted, rows) if wanted else (0,), dtype=torch.float32),
        hidden.new_empty((rows,) if outputs & PREDICTED else (0,), dtype=torch.int64),
    )


def _fake_bwd(dloss, scale, dhidden, dweight, dbias, dlora_a, dlora_b, weight_dtype, bias_dtype):
    dtypes = (dhidden.dtype, weight_dtype, bias_dtype, dhidden.dtype, dhidden.dtype)
    kept = (dhidden, dweight, dbias, dlora_a, dlora_b)
    return tuple(g.new_empty(g.shape, dtype=dtype) for g, dtype in zip(kept, dtypes, strict=True))


def _fake_rows_bwd(upstream, entropy_upstream, hidden, weight, target, bias, class_weight, token_weight,
                   lora_a, lora_b, ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss,
                   lora_scale, chunk_rows, valid_rows, needs):  # fmt: skip
    of_weight = _dweight_dtype(hidden, weight, target, valid_rows, chunk_rows, needs)
    return _empty_gradients(hidden, weight, lora_a, needs, of_weight)


def _fake_add_bwd(upstream, entropy_upstream, main_grad, *rest):
    return _fake_rows_bwd(upstream, entropy_upstream, *rest[:-1], rest[-1] & ~WEIGHT)


def _fake_kept_bwd(upstream, kept, hidden, weight, target, token_weight, ignore_index, valid_rows, needs):
    of_weight = _dweight_dtype(hidden, weight, target, valid_rows, target.shape[0], needs)
    return _empty_gradients(hidden, weight, None, needs, of_weight)[:3]


_OP = "linear_cross_entropy"
finish = raw("linear_cross_entropy_bwd", _fake_bwd)
_finish_in_place = raw("linear_cross_entropy_bwd_", _fake_bwd, _OP)
rows_backward = raw("linear_cross_entropy_rows_bwd", _fake_rows_bwd, _OP)
_keep = raw("linear_cross_entropy_keep", lambda kept, *inputs: _fake(*inputs))
_kept_bwd = raw("linear_cross_entropy_kept_bwd", _fake_kept_bwd, _OP)
_add_bwd = raw("linear_cross_entropy_add_bwd", _fake_add_bwd, _OP)


# The registered operator.


def _setup_context(ctx, inputs, output):
    hidden, weight, target, bias, *tensors = inputs[:8]
    ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    ctx.scalar = inputs[_REDUCTION] != REDUCTIONS["none"]
    ctx.options = _loss_options(inputs)
    ctx.needs = inputs[_NEEDS]
    if ctx.scalar:
        ctx.save_for_backward(*output[1:7])
    else:
        ctx.save_for_backward(hidden, weight, target, bias, *tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, *_):
    if dloss is None:
        return (None,) * _INPUTS
    if ctx.scalar:
        gradients = finish(dloss, *ctx.saved_tensors, *ctx.dtypes[1:])
    else:
        gradients = rows_backward(dloss, None, *ctx.saved_tensors, *ctx.options, ctx.needs)
    return _by_place(gradients, ctx.needs, ctx.dtypes)


def _by_place(gradients, needs, dtypes):
    """The gradients that are needed, rounded, at the places of their inputs in the schema."""
    dhidden, dweight, dbias, dlora_a, dlora_b = (
        g.to(dtype) if needs & bit else None
        for g, dtype, bit in zip(gradients, (*dtypes, dtypes[0], dtypes[0]), _BITS, strict=True)
    )
    return dhidden, dweight, None, dbias, None, None, dlora_a, dlora_b, *((None,) * (_INPUTS - 8))


# For the transforms of torch.func: the backward computes the logits again, whatever the reduction. What needs
# a gradient is known there alone: inside vmap a tensor does not tell.


def _setup_transformed(ctx, inputs, output):
    hidden, weight, _, bias = inputs[:4]
    ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    ctx.scalar = inputs[_REDUCTION] != REDUCTIONS["none"]
    ctx.options = _loss_options(inputs)
    ctx.save_for_backward(output[1], *inputs[:8])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_transformed(ctx, dloss, *_):
    if dloss is None:
        return (None,) * _INPUTS
    scale, *inputs = ctx.saved_tensors
    upstream = (dloss * scale).expand(inputs[2].shape) if ctx.scalar else dloss
    needs = sum(bit for bit, place in zip(_BITS, (0, 1, 3, 6, 7), strict=True) if ctx.needs_input_grad[place])
    return _by_place(rows_backward(upstream, None, *inputs, *ctx.options, needs), needs, ctx.dtypes)


_op = Op(_OP, fake=_fake, setup_context=_setup_context, backward=_backward,
         transformed=(_setup_transformed, _backward_transformed))  # fmt: skip


# Eager calls: what is done forward and backward. Each saves what its backward unpacks.


class _Scalar:
    """A scalar loss: the gradients exist when the loss does."""

    def forward(self, ctx, inputs):
        output = _op.forward(*inputs)
        ctx.save_for_backward(*output[1:7])
        return output

    def backward(self, ctx, dloss):
        call = finish if graph_is_kept() else _finish_in_place
        return call(dloss, *ctx.saved_tensors, *ctx.dtypes[1:3])


class _Rows:
    """Losses of rows: the backward computes the logits again."""

    def forward(self, ctx, inputs):
        self.options = _loss_options(inputs)
        ctx.save_for_backward(*inputs[:8])
        return _op.forward(*inputs)

    def backward(self, ctx, dloss):
        return rows_backward(dloss, None, *ctx.saved_tensors, *self.options, ctx.needs)


class _Kept:
    """Losses of rows; the gradients of the logits stay until the upstream ones arrive."""

    def forward(self, ctx, inputs):
        hidden, weight, target, _, _, token_weight = inputs[:6]
        self.options = (inputs[10], inputs[_VALID_ROWS])
        rows = _rows_worked_on(target, inputs[_VALID_ROWS])
        vocab = weight.shape[0]
        kept = hidden.new_empty(rows, padded(vocab))[:, :vocab]
        output = _keep(kept, *inputs)
        ctx.save_for_backward(kept, hidden, weight, target, token_weight)
        return output

    def backward(self, ctx, dloss):
        gradients = _kept_bwd(dloss, *ctx.saved_tensors, *self.options, ctx.needs)
        return *gradients, None, None


class _MainGrad:
    """The loss alone; the backward adds weight's gradient to the tensor that its owner keeps."""

    def __init__(self, main_grad):
        self.main_grad = main_grad

    def forward(self, ctx, inputs):
        self.scalar = inputs[_REDUCTION] != REDUCTIONS["none"]
        self.options = _loss_options(inputs)
        output = _op.forward(*inputs[:_NEEDS], 0)
        ctx.save_for_backward(output[1], *inputs[:8])
        return output

    def backward(self, ctx, dloss):
        scale, hidden, weight, target, *tensors = ctx.saved_tensors
        upstream = (dloss * scale).expand(target.shape) if self.scalar else dloss
        gradients = _add_bwd(
            upstream, None, self.main_grad, hidden, weight, target, *tensors, *self.options, ctx.needs
        )
        return gradients[0], None, *gradients[2:]


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, hidden, weight, bias, lora_a, lora_b):
        inputs, call.inputs = call.inputs, None
        ctx.call, ctx.needs = call, inputs[_NEEDS]
        ctx.dtypes = tuple(
            hidden.dtype if t is None else t.dtype for t in (hidden, weight, bias, lora_a, lora_b)
        )
        output = call.forward(ctx, inputs)
        call.rows, call.predicted = output[7:]
        return output[0]

    @staticmethod
    @once(_OP)
    def backward(ctx, dloss):
        gradients = ctx.call.backward(ctx, dloss)
        needs = ctx.needs
        wanted = (
            None if g is None or not needs & bit else g if g.dtype == dtype else g.to(dtype)
            for g, dtype, bit in zip(gradients, ctx.dtypes, _BITS, strict=True)
        )
        return None, *wanted


_apply = direct_apply(_Eager)


def _fits(inputs, keep_mb):
    """Whether the logits' gradients are to be kept."""
    hidden, weight, target = inputs[:3]
    rows = _rows_worked_on(target, inputs[_VALID_ROWS])
    return rows * padded(weight.shape[0]) * hidden.element_size() <= keep_mb * 2**20


def run(inputs, parameters, main_grad, keep_mb):
    """Loss, numbers of rows, predicted classes.

    Args:
        inputs: in the order of the schema.
        parameters: hidden, weight, bias, A, B as the caller gave them, whose gradients are asked for.
        main_grad: weight's gradient is added to it; ``None``: it is returned.
        keep_mb: as in :func:`tigon.linear_cross_entropy`.
    """
    needs = inputs[_NEEDS]
    if parameters[1].dtype == inputs[0].dtype:  # else weight's gradient is rounded once, from float32
        needs |= MAY_ROUND
    inputs[_NEEDS] = needs
    if torch.compiler.is_compiling():
        output = _op.registered(*inputs)
        return output[0], output[7], output[8]
    if torch._C._are_functorch_transforms_active():
        output = _op.transformed(*inputs[:_NEEDS], 0)
        return output[0], output[7], output[8]
    if needs & ~MAY_ROUND == 0:
        output = _op.forward(*inputs)
        return output[0], output[7], output[8]
    if main_grad is not None:
        call = _MainGrad(main_grad)
    elif inputs[_REDUCTION] != REDUCTIONS["none"]:
        call = _Scalar()
    elif keep_mb > 0.0 and inputs[6] is None and _fits(inputs, keep_mb):
        call = _Kept()
    else:
        call = _Rows()
    call.inputs = inputs
    loss = _apply(call, *parameters)
    return loss, call.rows, call.predicted
