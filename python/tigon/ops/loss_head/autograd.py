"""How a loss of the head returns its gradients.

Eager calls go through :class:`_Eager`, which takes nothing but the tensors that can need a gradient (host
cost); under ``torch.compile`` and the transforms of ``torch.func`` run other forms of the same formulas.
"""

from __future__ import annotations

import torch

from tigon._op import Op, direct_apply, graph_is_kept, once
from tigon.ops.loss_head import operators
from tigon.ops.loss_head.memory import padded
from tigon.ops.loss_head.operands import MAY_ROUND, NEEDS
from tigon.ops.loss_head.operators import OP, Arguments, Call, call_of, flat, rows_computed

# The registered operator.


def _setup(ctx, call, output):
    hidden, weight, _, bias, *_ = call.operands
    of_bias = weight.dtype if bias is None else bias.dtype
    ctx.dtypes = (hidden.dtype, weight.dtype, of_bias, hidden.dtype, hidden.dtype)
    ctx.scalar, ctx.options = call.scalar, call.options
    _, *others = output
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)


def _setup_context(ctx, inputs, output):
    call = call_of(inputs)
    _setup(ctx, call, output)
    ctx.needs = call.needs
    _, *scale_and_gradients, _, _ = output
    ctx.save_for_backward(*(scale_and_gradients if call.scalar else call.operands))


def _backward(ctx, dloss, *_):
    if dloss is None:
        return _by_input((), 0, ())
    if ctx.scalar:
        _, of_weight, of_bias, *_ = ctx.dtypes
        gradients = operators.finish(dloss, *ctx.saved_tensors, of_weight, of_bias)
    else:
        gradients = operators.rows_backward(dloss, None, *ctx.saved_tensors, *ctx.options, ctx.needs)
    return _by_input(gradients, ctx.needs, ctx.dtypes)


def _by_input(gradients, needs, dtypes):
    """For each argument of the operator its gradient, rounded, or None."""
    found = {
        name: g.to(dtype)
        for (name, bit), g, dtype in zip(NEEDS.items(), gradients, dtypes, strict=False)
        if needs & bit
    }
    return tuple(found.get(name) for name in Arguments._fields)


# For the transforms of torch.func: the backward computes the logits again, whatever the reduction. What needs
# a gradient is known there alone: inside vmap a tensor does not tell.


def _setup_transformed(ctx, inputs, output):
    call = call_of(inputs)
    _setup(ctx, call, output)
    _, scale, *_ = output
    ctx.save_for_backward(scale, *call.operands)


def _backward_transformed(ctx, dloss, *_):
    if dloss is None:
        return _by_input((), 0, ())
    scale, *operands = ctx.saved_tensors
    wanted = Arguments(*ctx.needs_input_grad)
    needs = sum(bit for name, bit in NEEDS.items() if getattr(wanted, name))
    upstream = _of_rows(dloss, scale, operands, ctx.scalar)
    gradients = operators.rows_backward(upstream, None, *operands, *ctx.options, needs)
    return _by_input(gradients, needs, ctx.dtypes)


def _of_rows(dloss, scale, operands, scalar):
    """The upstream gradient of each row's loss."""
    _, _, target, *_ = operands
    return (dloss * scale).expand(target.shape) if scalar else dloss


_op = Op(OP, fake=operators.fake, setup_context=_setup_context, backward=_backward,
         transformed=(_setup_transformed, _backward_transformed))  # fmt: skip


# Eager calls: what is done forward and backward. Each saves what its backward unpacks.


class _Scalar:
    """A scalar loss: the gradients exist when the loss does."""

    def forward(self, ctx, call):
        output = _op.forward(*flat(call))
        _, *scale_and_gradients, _, _ = output
        ctx.save_for_backward(*scale_and_gradients)
        return output

    def backward(self, ctx, dloss):
        finish = operators.finish if graph_is_kept() else operators.finish_in_place
        _, of_weight, of_bias, *_ = ctx.dtypes
        return finish(dloss, *ctx.saved_tensors, of_weight, of_bias)


class _Rows:
    """Losses of rows: the backward computes the logits again."""

    def forward(self, ctx, call):
        self.options = call.options
        ctx.save_for_backward(*call.operands)
        return _op.forward(*flat(call))

    def backward(self, ctx, dloss):
        return operators.rows_backward(dloss, None, *ctx.saved_tensors, *self.options, ctx.needs)


class _Kept:
    """Losses of rows; the gradients of the logits stay until the upstream ones arrive."""

    def forward(self, ctx, call):
        hidden, weight, target, _, _, token_weight, *_ = call.operands
        self.ignore_index, self.valid_rows = call.options.ignore_index, call.options.valid_rows
        vocab = weight.shape[0]
        kept = hidden.new_empty(rows_computed(target, self.valid_rows), padded(vocab))[:, :vocab]
        ctx.save_for_backward(kept, hidden, weight, target, token_weight)
        return operators.keep(kept, *flat(call))

    def backward(self, ctx, dloss):
        gradients = operators.kept_backward(
            dloss, *ctx.saved_tensors, self.ignore_index, self.valid_rows, ctx.needs
        )
        return *gradients, None, None


class _MainGrad:
    """The loss alone; the backward adds weight's gradient to the tensor that its owner keeps."""

    def __init__(self, main_grad):
        self.main_grad = main_grad

    def forward(self, ctx, call):
        self.scalar, self.options = call.scalar, call.options
        output = _op.forward(*flat(call._replace(needs=0)))
        _, scale, *_ = output
        ctx.save_for_backward(scale, *call.operands)
        return output

    def backward(self, ctx, dloss):
        scale, *operands = ctx.saved_tensors
        upstream = _of_rows(dloss, scale, operands, self.scalar)
        dhidden, _, *others = operators.add_backward(
            upstream, None, self.main_grad, *operands, *self.options, ctx.needs
        )
        return dhidden, None, *others


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, call, hidden, weight, bias, lora_a, lora_b):
        ctx.way, ctx.needs = way, call.needs
        ctx.dtypes = tuple(
            hidden.dtype if t is None else t.dtype for t in (hidden, weight, bias, lora_a, lora_b)
        )
        loss, *_, way.rows, way.predicted = way.forward(ctx, call)
        return loss

    @staticmethod
    @once(OP)
    def backward(ctx, dloss):
        gradients = ctx.way.backward(ctx, dloss)
        needs = ctx.needs
        wanted = (
            None if g is None or not needs & bit else g if g.dtype == dtype else g.to(dtype)
            for g, dtype, bit in zip(gradients, ctx.dtypes, NEEDS.values(), strict=True)
        )
        return None, None, *wanted


_apply = direct_apply(_Eager)


def run(call: Call, parameters, main_grad, keep_mb):
    """Loss, numbers of rows, predicted classes.

    Args:
        parameters: hidden, weight, bias, A, B as the caller gave them, whose gradients are asked for.
        main_grad: weight's gradient is added to it; ``None``: it is returned.
        keep_mb: as in :func:`tigon.linear_cross_entropy`.
    """
    if torch.compiler.is_compiling():
        loss, *_, rows, predicted = _op.registered(*flat(call))
    elif torch._C._are_functorch_transforms_active():
        loss, *_, rows, predicted = _op.transformed(*flat(call._replace(needs=0)))
    elif call.needs & ~MAY_ROUND == 0:
        loss, *_, rows, predicted = _op.forward(*flat(call))
    else:
        way = _way(call, main_grad, keep_mb)
        loss = _apply(way, call, *parameters)
        rows, predicted = way.rows, way.predicted
    return loss, rows, predicted


def _way(call, main_grad, keep_mb):
    """How the gradients of an eager call are made."""
    if main_grad is not None:
        return _MainGrad(main_grad)
    if call.scalar:
        return _Scalar()
    if keep_mb > 0.0 and call.operands.lora_a is None and _fits(call, keep_mb):
        return _Kept()
    return _Rows()


def _fits(call, keep_mb):
    """Whether the logits' gradients are to be kept."""
    hidden, weight, target, *_ = call.operands
    rows = rows_computed(target, call.options.valid_rows)
    return rows * padded(weight.shape[0]) * hidden.element_size() <= keep_mb * 2**20
