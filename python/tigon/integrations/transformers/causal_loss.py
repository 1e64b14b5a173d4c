"""transformers' causal-LM loss and its options. It takes the hidden states if logits are lazy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from tigon.error import refuse
from tigon.integrations.transformers.lazy_logits import LazyLogits
from tigon.ops.cross_entropy import cross_entropy

# Liger's words, which its patched models take as keywords of the forward -> ours.
OPTIONS = {
    "label_smoothing": "label_smoothing",
    "lse_square_scale": "z_loss",
    "ce_weight": "weight",
    "use_token_scaling": "token_scaling",
}
# Liger's keywords that ask for what the loss counts on the way -> the field of the output that holds it.
COUNTS = {"return_token_accuracy": "token_accuracy", "return_predicted_tokens": "predicted_tokens"}
_SOFTCAP = "the model's own is used"
REFUSED = {
    "reduction": "the loss is a mean, or divided by num_items_in_batch",
    "softcap": _SOFTCAP,
    "final_logit_softcapping": _SOFTCAP,
    "return_z_loss": "the model's output has no place for it: tigon.linear_cross_entropy returns it",
}


def loss_options(given: dict) -> dict:
    """The options of the loss among a forward's keywords, under Tigon's names; unsupported ones are refused.

    Keywords that choose no other loss (``accum_dtype``, ``chunk_mem_const``) and those of other parts of a
    model are ignored.
    """
    for name, why in REFUSED.items():
        if value := given.get(name):
            refuse("causal_lm_loss", "{} must not be given ({}), got {!r}", name, why, value)
    named = ((ours, given.get(name)) for name, ours in OPTIONS.items())
    return {ours: value for ours, value in named if torch.is_tensor(value) or value}


def causal_lm_loss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs
):
    """transformers' ForCausalLMLoss that computes lazy logits' loss from the hidden states.

    In addition to transformers' arguments it takes `OPTIONS`.
    """
    options = loss_options(kwargs)
    if isinstance(logits, LazyLogits) and logits.shape[-1] == vocab_size:
        common = {"ignore_index": ignore_index, "denominator": num_items_in_batch, **options}
        if shift_labels is not None:
            loss = logits.view(-1, vocab_size).cross_entropy(shift_labels.reshape(-1), **common)
        elif logits.shape[:-1] == labels.shape:
            loss = logits.cross_entropy(labels, shift=True, **common)  # the tensor that was counted
        else:
            target = next_labels(labels, ignore_index)
            loss = logits.view(-1, vocab_size).cross_entropy(target.reshape(-1), **common)
        if loss is not None:
            return loss
    if isinstance(logits, LazyLogits):
        logits = logits.materialise()
    if not options:
        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    target = next_labels(labels, ignore_index) if shift_labels is None else shift_labels
    return loss_of_logits(
        logits.float().view(-1, vocab_size), target, num_items_in_batch, ignore_index, **options
    )


def next_labels(labels, ignore_index):
    """The label of each position: the next token; the last position has none."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def loss_of_logits(logits, target, denominator, ignore_index, token_scaling=False, **options):
    """The loss of computed logits ``[N, V]``, with Tigon's options."""
    target = target.reshape(-1).to(logits.device)
    options["ignore_index"] = ignore_index
    if not token_scaling:
        return cross_entropy(logits, target, denominator=denominator, **options)
    with torch.no_grad():
        scale = cross_entropy(logits, target, ignore_index=ignore_index, reduction="none").neg().exp()
    rows = scale * cross_entropy(logits, target, reduction="none", **options)
    return rows.sum() / ((target != ignore_index).sum() if denominator is None else denominator)
