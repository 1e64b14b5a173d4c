"""The loss head in PyTorch operations."""

from __future__ import annotations

from collections import namedtuple

import torch
import torch.nn.functional as F

from tigon.ops import arguments
from tigon.ops import cross_entropy as _cross_entropy
from tigon.ops.loss_head.labels import shifted
from tigon.ops.loss_head.options import HeadOptions


def reference(
    hidden,
    weight,
    target,
    class_weight=None,
    token_weight=None,
    label_smoothing=0.0,
    z_loss=0.0,
    *,
    reduction="mean",
    denominator=None,
    outputs=None,
    **options,
):
    """Compute the same formula with PyTorch operations and full logits (any float dtype, any device).

    Args:
        options: options of the head; those that only concern speed and memory are ignored.
    """
    head = HeadOptions.of(options)
    target = shifted(target, head.ignore_index, head.shift, head.position_ids)
    z = plain_logits(hidden, weight, head)
    options = {"weight": class_weight, "ignore_index": head.ignore_index}
    options |= {"label_smoothing": label_smoothing, "z_loss": z_loss}
    loss = _cross_entropy.reference(
        z, target, **options, reduction=reduction, denominator=denominator, token_weight=token_weight
    )
    if outputs is None:
        return loss
    return _plain_outputs(loss, z.detach(), target, token_weight, outputs, options)


def plain_logits(hidden, weight, head):
    """``z`` of a head in PyTorch operations, float32 or wider."""
    weight, lora = weight.to(hidden.dtype), head.lora
    if head.logit_dtype is not None:  # of operands in hidden's dtype
        dtype = torch.promote_types(hidden.dtype, head.logit_dtype)
        lora = lora and (*(t.to(hidden.dtype) for t in lora[:2]), lora[2])
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    logits = F.linear(hidden, weight)
    if lora is not None:
        a, b = (t.to(hidden.dtype) for t in lora[:2])
        logits = logits + lora[2] * F.linear(F.linear(hidden, a), b)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = (z if head.bias is None else z + head.bias) * head.logit_scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z / head.temperature


def _plain_outputs(loss, z, target, token_weight, outputs, options):
    target, factor = arguments.known_labels(target, options["ignore_index"], z.shape[-1])
    counts = target != options["ignore_index"]
    log_p = torch.log_softmax(z, -1)
    lse = torch.logsumexp(z, -1)
    z_term = options["z_loss"] * lse.square() * (1.0 if token_weight is None else token_weight)
    predicted = torch.where(counts, z.argmax(-1), -1)
    picked = log_p.gather(-1, torch.where(counts, target, 0).unsqueeze(-1)).squeeze(-1)
    numbers = {
        "z_loss": z_term,
        "log_prob": picked if factor is None else picked * factor,
        "lse": lse,
        "entropy": -(log_p.exp() * log_p).nan_to_num(nan=0.0).sum(-1),
    }
    values = {name: torch.where(counts, value, 0.0) for name, value in numbers.items()}
    values |= {"loss": loss, "predicted": predicted, "correct": (predicted == target) & counts}
    return result_type(outputs)(*(values[name] for name in outputs))


result_types: dict[tuple[str, tuple[str, ...]], type] = {}


def result_type(outputs, name="LinearCrossEntropy"):
    made = result_types.get((name, outputs))
    if made is None:
        made = namedtuple(name, outputs)
        if not torch.compiler.is_compiling():
            # No module has the class.
            made.__reduce__ = lambda self: (_restored, (name, outputs, tuple(self)))
            result_types[name, outputs] = made
    return made


def _restored(name, outputs, values):
    return result_type(outputs, name)(*values)
