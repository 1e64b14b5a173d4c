"""What losses of rows keep from forward to backward.

The gradient of a row's logits is its upstream gradient times what the row alone gives. So the forward can
form, for an upstream gradient of 1, the gradients of the logits (``kept``, of as many rows as there is memory
for) and with them that of hidden (``unit``); the backward scales rows and forms the other gradients from what
is kept. What is not kept, and everything under a gradient of the entropies, is computed again.
"""

from __future__ import annotations

import torch

from tigon._op import graph_is_kept
from tigon.ops.loss_head.memory import rows_within
from tigon.ops.loss_head.operands import HIDDEN, MAIN_GRAD, MAY_ROUND, UNIT, Operands
from tigon.ops.loss_head.operators import (
    only_hidden,
    rows_backward,
    rows_backward_,
    rows_computed,
)


def keep(operands, needs, keep_mb, main_grad=None) -> tuple[int, int]:
    """`needs` and `keep_rows` of the forward, which the native side resolves (``between_fake``)."""
    if keep_mb == 0 or not needs & ~MAY_ROUND or torch._C._are_functorch_transforms_active():
        return needs, 0
    needs |= UNIT * (needs & HIDDEN != 0) | MAIN_GRAD * (main_grad is not None)
    hidden, weight, *_ = operands
    return needs, rows_within(keep_mb, weight.shape[0], hidden.element_size())


def saved(operands, options, needs, unit, kept, recomputed) -> tuple:
    """The tensors to save; `recomputed`: a gradient of entropies may ask for logits.

    Where all rows are kept, or hidden alone needs a gradient, weight is not among them, so that a gathered
    copy of it can be freed.
    """
    hidden, weight, target = operands.hidden, operands.weight, operands.target
    formed, some = unit.shape == hidden.shape, kept.dim() == 2
    whole = some and kept.shape[0] >= rows_computed(target, options.valid_rows)
    alone = formed and only_hidden(needs)
    if not recomputed and (alone or whole):
        operands = Operands(
            hidden=unit if alone else hidden, weight=weight.new_empty(weight.shape[0], 0), target=target,
            token_weight=operands.token_weight, lora_a=operands.lora_a, lora_b=operands.lora_b,
        )  # fmt: skip
    return unit if formed else None, kept if some else None, *operands


def gradients(tensors, upstream, of_entropy, options, needs, *, eager=False, main_grad=None):
    """The gradients from what :func:`saved` gave; that of weight is None where it was added to main_grad.

    An eager backward that frees its graph scales the rows of ``unit`` in place.
    """
    unit, kept, *operands = tensors
    if of_entropy is not None:
        unit = kept = None
    if needs & HIDDEN == 0:
        unit = None
    finish = eager and unit is not None and not graph_is_kept()
    if main_grad is None and not finish:
        return rows_backward(upstream, of_entropy, unit, kept, *operands, *options, needs)
    dhidden, dweight, *others = rows_backward_(
        upstream, of_entropy, main_grad, unit, kept, *operands, *options, needs, finish
    )
    return unit if finish else dhidden, None if main_grad is not None else dweight, *others
