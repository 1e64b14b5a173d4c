"""``liger_kernel.transformers.functional``: that interface, Tigon's arithmetic.

Differences on purpose: nothing is done in place (the ``in_place`` arguments are accepted and have no effect),
weight gradients are summed in float32 whatever ``accum_dtype`` says, and nothing synchronises.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

import tigon
from tigon._dtensor import is_dtensor
from tigon.integrations.liger.paths import PACKAGE, check
from tigon.integrations.transformers.causal_loss import next_labels


@dataclass
class CrossEntropyOutput:
    """The result of the cross-entropies if more than the loss is requested."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def _output(loss, counts, reduction, dtype, z_loss=None, correct=None, predicted=None):
    """The loss, with what was computed for each row if that is given, reduced as the loss is."""
    if z_loss is correct is predicted is None:
        return loss
    if z_loss is not None:
        rows = counts.sum() if reduction == "mean" else 1
        z_loss = (z_loss if reduction == "none" else z_loss.sum() / rows).to(dtype)
    if correct is not None:  # a fraction for "sum" too
        correct = correct.float() if reduction == "none" else correct.float().sum() / counts.sum()
    return CrossEntropyOutput(loss, z_loss, correct, predicted)


def _class_weight(weight, target, ignore_index, z_scale, reduction):
    """Class weights for Liger's mean, whose z-loss is over the number of rows and not over their weights.

    Scaled so that the weights of the rows that count add up to their number, which then divides both parts.
    """
    if weight is None or not z_scale or reduction != "mean":
        return weight
    weight, kept = weight.detach().float(), target != ignore_index
    total = torch.where(kept, weight[torch.where(kept, target, 0)], 0.0).sum()
    return weight * (kept.sum() / total)


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """The loss of logits by :func:`tigon.cross_entropy`, in their dtype."""
    loss = tigon.cross_entropy(
        input,
        target,
        weight=_class_weight(weight, target, ignore_index, lse_square_scale, reduction),
        ignore_index=ignore_index,
        z_loss=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
    )
    z_loss = correct = predicted = None
    counts = target != ignore_index
    with torch.no_grad():
        if return_z_loss:
            logits = input.float() if softcap is None else softcap * torch.tanh(input.float() / softcap)
            z_loss = torch.where(counts, lse_square_scale * torch.logsumexp(logits, -1).square(), 0.0)
        if return_token_accuracy or return_predicted_tokens:
            best = torch.where(counts, input.argmax(-1), -1)
            correct = counts & (best == target) if return_token_accuracy else None
            predicted = best if return_predicted_tokens else None
    return _output(loss.to(input.dtype), counts, reduction, input.dtype, z_loss, correct, predicted)


def whole(weight):
    """The weight of a head as one tensor; shards are refused: FSDP's look like those of a vocabulary."""
    if not is_dtensor(weight):
        return weight
    words = (
        "weight must be whole (under FSDP read it in the forward of the unit that holds it, or keep the head "
        "in the root's unit; shards of a vocabulary: tigon.linear_log_prob), got a DTensor placed as {}"
    )
    check(all(p.is_replicate() for p in weight.placements), words, weight.placements)
    return weight.to_local()


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """The loss head by :func:`tigon.linear_cross_entropy`: a float32 loss, no logits."""
    if isinstance(input, _Recorder):
        return input.update(locals())
    weight, scaling = whole(weight), None
    if use_token_scaling:
        with torch.no_grad():
            scaling = tigon.linear_log_prob(
                input, weight, target, bias=bias, softcap=softcap, ignore_index=ignore_index
            ).exp()
    asked = {"z_loss": return_z_loss, "correct": return_token_accuracy, "predicted": return_predicted_tokens}
    names = tuple(name for name, wanted in asked.items() if wanted)
    got = tigon.linear_cross_entropy(
        input,
        weight,
        target,
        bias=bias,
        class_weight=_class_weight(ce_weight, target, ignore_index, lse_square_scale, reduction),
        ignore_index=ignore_index,
        z_loss=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        token_weight=scaling,
        outputs=("loss", *names) if names else None,
    )
    if not names:
        return got
    counted = {name: getattr(got, name) for name in names}
    return _output(got.loss, target != ignore_index, reduction, input.dtype, **counted)


def liger_modulated_rms_norm(
    X: Tensor,
    W: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:
    """``rms_norm(X) * (1 + scale) + shift``."""
    return tigon.modulated_rms_norm(X, W, scale, shift, eps, offset=offset, rounding=casting_mode)


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | int | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary embedding of q and k, by :func:`tigon.rope`; never in place.

    Without ``rotary_dim`` as many columns are rotated as cos has (at most the head's); with it, that many.
    Only the first half of them is read from cos and sin. An integer in the place of ``position_ids`` is
    taken as ``unsqueeze_dim``: transformers 5 has no ``position_ids`` there.
    """
    if isinstance(position_ids, int):
        unsqueeze_dim = position_ids
    if cos.dim() == 4:  # a head axis of size one
        cos, sin = cos.squeeze(unsqueeze_dim), sin.squeeze(unsqueeze_dim)
    head, table = q.shape[-1], cos.shape[-1]
    columns = min(table, head) if rotary_dim is None else rotary_dim
    fits = columns % 2 == 0 and 0 < columns <= head and table >= columns // 2
    check(fits, "rotary_dim must be even, at most {} and twice cos's columns, got {}", head, columns)
    cos, sin = cos[..., : columns // 2], sin[..., : columns // 2]
    return tigon.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=columns, keep_dtype=True)


liger_rope = liger_rotary_pos_emb


def LigerForCausalLMLoss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs,
) -> Tensor | CrossEntropyOutput:
    """The causal loss from hidden states, divided by ``num_items_in_batch`` if that is given.

    Keywords that the loss head does not know are dropped.
    """
    loss_head = _current_loss()
    known = inspect.signature(loss_head).parameters
    if shift_labels is None:
        shift_labels = next_labels(labels, ignore_index)
    result = loss_head(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **{name: value for name, value in kwargs.items() if name in known},
    )
    output = result if isinstance(result, CrossEntropyOutput) else CrossEntropyOutput(result)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(output.loss.device)
    if num_items_in_batch is not None:
        output.loss = output.loss / num_items_in_batch
    return output if return_token_accuracy or return_predicted_tokens else output.loss


def _current_loss():
    """The loss head by its public path: frameworks exchange that attribute."""
    module = sys.modules.get(f"{PACKAGE}.transformers.functional")
    return getattr(module, "liger_fused_linear_cross_entropy", liger_fused_linear_cross_entropy)


class _Recorder(dict):
    """In the place of the loss head's first operand: its arguments are noted, nothing is computed."""


def loss_settings() -> dict:
    """The options that a program adds to every loss, by a function that it put around the loss head.

    Axolotl's ``liger_use_token_scaling`` does. Patched models call no such function: they take the options.
    """
    ours, current, noted = liger_fused_linear_cross_entropy, _current_loss(), _Recorder()
    if current is ours or current.__module__ == f"{PACKAGE}.transformers.functional":
        return {}  # Tigon's, or Liger's if it is installed: nobody wrapped it
    with contextlib.suppress(AttributeError, TypeError):  # it reads the operands
        current(noted, None, None)
    words = "may be wrapped by a function that calls it with the operands it was given, got {!r}"
    check(noted, "liger_fused_linear_cross_entropy " + words, current)
    defaults = inspect.signature(ours).parameters
    options = ((n, value) for n, value in noted.items() if n not in ("input", "weight", "target"))
    return {name: value for name, value in options if value is not defaults[name].default}
