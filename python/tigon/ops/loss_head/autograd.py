"""How a loss of the head returns its gradients.

Eager calls go through :class:`_Eager`, which takes nothing but the tensors that can need a gradient (host
cost); under ``torch.compile`` and the transforms of ``torch.func`` run other forms of the same formulas.
"""

from __future__ import annotations

import torch

from tigon._load import native
from tigon._op import Op, direct_apply, graph_is_kept, refuse_second
from tigon.ops.loss_head import between, operators
from tigon.ops.loss_head.operands import MAY_ROUND, NEEDS
from tigon.ops.loss_head.operators import OP, Call, call_of, flat

_RESULTS = 7  # loss, scale and the gradients of NEEDS come first among an operator's outputs


class HeadLoss:
    """``tigon::<name>`` as a differentiable loss of a head.

    Its first results are the loss, the reduction's factor and the gradients of NEEDS; a call has operands
    (hidden, weight, target and bias among them, by name), options, ``needs`` and ``is_scalar()``.

    Args:
        name: of the operator, and in messages.
        call_of, flat: a call from the operator's arguments, and back.
        fake: the operator's fake kernel.
        rows_backward: ``(upstream of the rows' losses, saved, options, needs)``: the gradients of NEEDS, by
            computing the logits again where they were not kept.
        saved: ``(call, output)``: the tensors that losses of rows save; the operands alone unless given.
    """

    def __init__(self, name, *, call_of, flat, fake, rows_backward, saved=lambda call, output: call.operands):
        self.name, self.call_of, self.flat, self.rows_backward = name, call_of, flat, rows_backward
        self.saved = saved
        self.inputs = [argument.name for argument in native(name)._schema.arguments]
        self.op = Op(name, fake=fake, setup_context=self._setup_context, backward=self._backward,
                     transformed=(self._setup_transformed, self._backward_transformed))  # fmt: skip

    def run(self, call, parameters, way) -> tuple:
        """Loss, and the results of rows.

        Args:
            parameters: hidden, weight, bias, A, B as the caller gave them, whose gradients are asked for.
            way: makes how the gradients of an eager call arise.
        """
        if torch.compiler.is_compiling():
            output = self.op.registered(*self.flat(call))
        elif torch._C._are_functorch_transforms_active():
            output = self.op.transformed(*self.flat(call._replace(needs=0)))
        elif call.needs & ~MAY_ROUND == 0:
            output = self.op.forward(*self.flat(call))
        else:
            chosen = way()
            return _apply(chosen, call, *parameters), *chosen.results
        return output[0], *output[_RESULTS:]

    # The registered operator.

    def _setup(self, ctx, call, output):
        hidden, weight, bias = call.operands.hidden, call.operands.weight, call.operands.bias
        of_bias = weight.dtype if bias is None else bias.dtype
        ctx.dtypes = (hidden.dtype, weight.dtype, of_bias, hidden.dtype, hidden.dtype)
        ctx.scalar, ctx.options = call.is_scalar(), call.options
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def _setup_context(self, ctx, inputs, output):
        call = self.call_of(inputs)
        self._setup(ctx, call, output)
        ctx.needs = call.needs
        ctx.save_for_backward(*(output[1:_RESULTS] if call.is_scalar() else self.saved(call, output)))

    def _backward(self, ctx, dloss, *_):
        if dloss is None:
            return self._by_input((), 0, ())
        if ctx.scalar:
            _, of_weight, of_bias, *_ = ctx.dtypes
            gradients = operators.finish(dloss, *ctx.saved_tensors, of_weight, of_bias)
        else:
            gradients = self.rows_backward(dloss, ctx.saved_tensors, ctx.options, ctx.needs)
        return self._by_input(gradients, ctx.needs, ctx.dtypes)

    def _by_input(self, gradients, needs, dtypes):
        """For each argument of the operator its gradient, rounded, or None."""
        found = {
            name: g.to(dtype)
            for (name, bit), g, dtype in zip(NEEDS.items(), gradients, dtypes, strict=False)
            if needs & bit
        }
        return tuple(found.get(name) for name in self.inputs)

    # For the transforms of torch.func: the backward computes the logits again, whatever the reduction. What
    # needs a gradient is known there alone: inside vmap a tensor does not tell.

    def _setup_transformed(self, ctx, inputs, output):
        call = self.call_of(inputs)
        self._setup(ctx, call, output)
        ctx.target_shape = call.operands.target.shape
        ctx.save_for_backward(output[1], *self.saved(call, output))

    def _backward_transformed(self, ctx, dloss, *_):
        if dloss is None:
            return self._by_input((), 0, ())
        scale, *saved = ctx.saved_tensors
        wanted = dict(zip(self.inputs, ctx.needs_input_grad, strict=True))
        needs = sum(bit for name, bit in NEEDS.items() if wanted[name])
        upstream = _of_rows(dloss, scale, ctx.target_shape, ctx.scalar)
        gradients = self.rows_backward(upstream, saved, ctx.options, needs)
        return self._by_input(gradients, needs, ctx.dtypes)


def _of_rows(dloss, scale, shape, scalar):
    """The upstream gradient of each row's loss."""
    return (dloss * scale).expand(shape) if scalar else dloss


def _saved(call, output):
    """What losses of rows save."""
    _, _, unit, *_, kept = output
    return between.saved(call.operands, call.options, call.needs, unit, kept, False)


_head = HeadLoss(
    OP, call_of=call_of, flat=flat, fake=operators.fake, saved=_saved,
    rows_backward=lambda upstream, saved, options, needs: between.gradients(
        saved, upstream, None, options, needs
    ),
)  # fmt: skip


# Eager calls: what is done forward and backward. Each saves what its backward unpacks.


class Scalar:
    """A scalar loss: the gradients exist when the loss does."""

    def __init__(self, head):
        self.head = head

    def forward(self, ctx, call):
        output = self.head.op.forward(*self.head.flat(call))
        ctx.save_for_backward(*output[1:_RESULTS])
        return output

    def backward(self, ctx, dloss):
        finish = operators.finish if graph_is_kept() else operators.finish_in_place
        _, of_weight, of_bias, *_ = ctx.dtypes
        return finish(dloss, *ctx.saved_tensors, of_weight, of_bias)


class Rows:
    """Losses of rows: the backward starts from what was saved."""

    def __init__(self, head):
        self.head = head

    def forward(self, ctx, call):
        self.options = call.options
        output = self.head.op.forward(*self.head.flat(call))
        ctx.save_for_backward(*self.head.saved(call, output))
        return output

    def backward(self, ctx, dloss):
        return self.head.rows_backward(dloss, ctx.saved_tensors, self.options, ctx.needs)


class _HeadRows(Rows):
    """The same; an eager backward may use up what was kept, and add weight's gradient to its owner's."""

    def __init__(self, main_grad):
        super().__init__(_head)
        self.main_grad = main_grad

    def backward(self, ctx, dloss):
        return between.gradients(
            ctx.saved_tensors, dloss, None, self.options, ctx.needs, eager=True, main_grad=self.main_grad
        )


class _MainGrad:
    """A scalar loss alone; the backward adds weight's gradient to the tensor that its owner keeps."""

    head = _head

    def __init__(self, main_grad):
        self.main_grad = main_grad

    def forward(self, ctx, call):
        self.options = call.options
        output = _head.op.forward(*flat(call._replace(needs=0)))
        ctx.save_for_backward(output[1], *call.operands)
        return output

    def backward(self, ctx, dloss):
        scale, *operands = ctx.saved_tensors
        upstream = _of_rows(dloss, scale, operands[2].shape, True)
        return between.gradients(
            (None, None, *operands), upstream, None, self.options, ctx.needs, main_grad=self.main_grad
        )


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, call, hidden, weight, bias, lora_a, lora_b):
        ctx.way, ctx.needs = way, call.needs
        ctx.dtypes = tuple(
            hidden.dtype if t is None else t.dtype for t in (hidden, weight, bias, lora_a, lora_b)
        )
        loss, *others = way.forward(ctx, call)
        way.results = others[_RESULTS - 1 :]
        return loss

    @staticmethod
    def backward(ctx, dloss):
        if torch.is_grad_enabled():
            refuse_second(ctx.way.head.name)
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
    if not call.is_scalar():
        needs, keep_rows = between.keep(call.operands, call.needs, keep_mb, main_grad)
        call = call._replace(needs=needs, keep_rows=keep_rows)
    loss, numbers, predicted, _ = _head.run(call, parameters, lambda: _way(call, main_grad))
    return loss, numbers, predicted


def _way(call, main_grad):
    """How the gradients of an eager call are made."""
    if not call.is_scalar():
        return _HeadRows(main_grad)
    return Scalar(_head) if main_grad is None else _MainGrad(main_grad)
