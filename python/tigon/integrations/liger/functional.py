"""``liger_kernel.transformers.functional`` and the losses behind it: that interface, Tigon's arithmetic.

Differences on purpose: nothing is done in place (the ``in_place`` arguments are accepted and have no effect),
weight gradients are summed in float32 whatever ``accum_dtype`` says, and nothing synchronises.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import tigon
from tigon._dtensor import is_dtensor
from tigon.integrations.liger.names import check, public
from tigon.integrations.liger.signatures import by_name, by_position


@dataclass
class CrossEntropyOutput:
    """What the cross-entropies return when asked for more than the loss."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


def _output(loss, z_loss, accuracy, predicted):
    if z_loss is None and accuracy is None and predicted is None:
        return loss
    return CrossEntropyOutput(loss, z_loss, accuracy, predicted)


def _reduced(values, counts, reduction):
    """Per-row numbers, reduced as the loss is."""
    if reduction == "none":
        return values
    return values.sum() / counts.sum() if reduction == "mean" else values.sum()


def _accuracy(correct, counts, reduction):
    """Per row for ``none``; else the fraction of the rows that count, for ``sum`` too."""
    return correct.float() if reduction == "none" else correct.float().sum() / counts.sum()


def _class_weight(weight, target, ignore_index, z_scale, reduction):
    """Class weights for a mean whose z-loss is over the number of rows, not over their weights, as there.

    Scaled so that the weights of the rows that count add up to their number, which then divides both parts.
    """
    if weight is None or not z_scale or reduction != "mean":
        return weight
    weight, kept = weight.detach().float(), target != ignore_index
    total = torch.where(kept, weight[torch.where(kept, target, 0)], 0.0).sum()
    return weight * (kept.sum() / total)


def cross_entropy_parts(
    input,
    target,
    weight=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
):
    """(loss, z_loss, token_accuracy, predicted_tokens), None if not asked for; losses in logits' dtype."""
    weight = _class_weight(weight, target, ignore_index, lse_square_scale, reduction)
    loss = tigon.cross_entropy(
        input,
        target,
        weight=weight,
        ignore_index=ignore_index,
        z_loss=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
    )
    z_loss = accuracy = predicted = None
    counts = target != ignore_index
    with torch.no_grad():
        if return_z_loss:
            logits = input.float() if softcap is None else softcap * torch.tanh(input.float() / softcap)
            rows = lse_square_scale * torch.logsumexp(logits, -1).square()
            z_loss = _reduced(torch.where(counts, rows, 0.0), counts, reduction).to(input.dtype)
        if return_token_accuracy or return_predicted_tokens:
            best = torch.where(counts, input.argmax(-1), -1)
            predicted = best if return_predicted_tokens else None
            if return_token_accuracy:
                accuracy = _accuracy(counts & (best == target), counts, reduction)
    return loss.to(input.dtype), z_loss, accuracy, predicted


def whole(weight):
    """The weight of a head as one tensor; FSDP's shards look like those of a vocabulary: both are refused."""
    if not is_dtensor(weight):
        return weight
    fits = all(p.is_replicate() for p in weight.placements)
    check(
        fits,
        "weight must be whole (under FSDP read it in the forward of the unit that "
        "holds it, or keep the head in the root's unit; shards of a vocabulary: tigon.linear_log_prob), "
        "got a DTensor placed as {}",
        weight.placements,
    )
    return weight.to_local()


def linear_cross_entropy_parts(
    input,
    weight,
    target,
    bias=None,
    ce_weight=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    accum_dtype=None,
    use_token_scaling=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    ce_impl=None,
    ce_mode=None,
    chunk_mem_const=1,
):
    """(loss, z_loss, token_accuracy, predicted_tokens), None where not asked for; the loss is float32."""
    integer = isinstance(chunk_mem_const, int) and not isinstance(chunk_mem_const, bool)
    fits = integer and chunk_mem_const >= 1
    check(fits, "chunk_mem_const must be an int >= 1, got {!r}", chunk_mem_const)
    weight, scaling = whole(weight), None
    if use_token_scaling:
        with torch.no_grad():
            scaling = tigon.linear_log_prob(
                input, weight, target, bias=bias, softcap=softcap, ignore_index=ignore_index
            ).exp()
    ce_weight = _class_weight(ce_weight, target, ignore_index, lse_square_scale, reduction)
    asked = {"z_loss": return_z_loss, "correct": return_token_accuracy, "predicted": return_predicted_tokens}
    names = tuple(name for name, wanted in asked.items() if wanted)
    got = tigon.linear_cross_entropy(
        input,
        weight,
        target,
        bias=bias,
        class_weight=ce_weight,
        ignore_index=ignore_index,
        z_loss=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        token_weight=scaling,
        outputs=("loss", *names) if names else None,
    )
    if not names:
        return got, None, None, None
    counts = target != ignore_index
    return (
        got.loss,
        _reduced(got.z_loss, counts, reduction).to(input.dtype) if return_z_loss else None,
        _accuracy(got.correct, counts, reduction) if return_token_accuracy else None,
        got.predicted if return_predicted_tokens else None,
    )


def _packed(parts):
    """The same function: the loss alone, or with what else was asked for in one object."""

    @functools.wraps(parts)
    def call(**arguments):
        if isinstance(arguments["input"], _Recorder):
            return arguments["input"].update(arguments)
        return _output(*parts(**arguments))

    return call


_WANTED = "return_token_accuracy: bool = False, return_predicted_tokens: bool = False"
liger_cross_entropy = by_name(
    "liger_cross_entropy(input, target, weight=None, size_average=None, ignore_index: int = -100, "
    "reduce=None, reduction: str = 'mean', label_smoothing: float = 0.0, lse_square_scale: float = 0.0, "
    f"softcap: float | None = None, return_z_loss: bool = False, {_WANTED})",
    _packed(cross_entropy_parts),
)
liger_fused_linear_cross_entropy = by_name(
    "liger_fused_linear_cross_entropy(input, weight, target, bias=None, ce_weight=None, "
    "ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, "
    "reduction: str = 'mean', softcap: float | None = None, return_z_loss: bool = False, accum_dtype=None, "
    f"use_token_scaling: bool = False, {_WANTED}, chunk_mem_const: int = 1)",
    _packed(linear_cross_entropy_parts),
)


# The functions of one op: what runs takes the arguments by position.
_NORM = "offset: float = 0.0, casting_mode: str = 'llama', in_place: bool = True"
_FUNCTIONS = {
    "liger_swiglu(a, b)": tigon.swiglu,
    "liger_geglu(a, b)": lambda a, b: tigon.geglu(a, b, approximate="tanh"),
    "liger_relu_squared(x)": tigon.relu_squared,
    "liger_dyt(x, alpha, gamma, beta)": tigon.dyt,
    "liger_softmax(x)": tigon.softmax,
    "liger_sparsemax(input, dim: int = -1)": (
        lambda x, dim: tigon.sparsemax(x.movedim(dim, -1)).movedim(-1, dim)
    ),
    "liger_layer_norm(X, W, B, eps)": tigon.layer_norm,
    "liger_poly_norm(X, W, B, eps=1e-6, in_place=True)": (
        lambda x, weight, bias, eps: tigon.poly_norm(x, weight, bias.reshape(1), eps)
    ),
    "liger_attn_res(V, w_query, w_norm, eps: float = 1e-6)": tigon.attention_residual,
    f"liger_rms_norm(X, W, eps, {_NORM})": (
        lambda x, weight, eps, offset, mode: tigon.rms_norm(x, weight, eps, offset=offset, rounding=mode)
    ),
    f"liger_fused_add_rms_norm(X, R, W, eps, {_NORM})": (
        lambda x, residual, weight, eps, offset, mode: tigon.add_rms_norm(
            x, residual, weight, eps, offset=offset, rounding=mode
        )
    ),
    f"liger_modulated_rms_norm(X, W, scale, shift=None, eps: float = 1e-6, {_NORM})": (
        lambda x, weight, scale, shift, eps, offset, mode: tigon.modulated_rms_norm(
            x, weight, scale, shift, eps, offset=offset, rounding=mode
        )
    ),
}
globals().update(
    (signature.partition("(")[0], by_position(signature, target)) for signature, target in _FUNCTIONS.items()
)


def liger_group_norm(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
    """By :func:`tigon.group_norm`, ``X`` ``[N, C, ...]``."""
    fits = X.dim() > 1 and X.shape[1] == num_channels
    check(fits, "num_channels must be {}'s second size, got {}", tuple(X.shape), num_channels)
    return tigon.group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
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
    if rotary_dim is not None:
        fits = rotary_dim % 2 == 0 and 0 < rotary_dim <= head and table >= rotary_dim // 2
        check(fits, "rotary_dim must be even, at most {} and twice cos's columns, got {}", head, rotary_dim)
    columns = min(table, head) if rotary_dim is None else rotary_dim
    cos, sin = cos[..., : columns // 2], sin[..., : columns // 2]
    q_out, k_out = tigon.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=columns)
    return q_out.to(q.dtype), k_out.to(k.dtype)


liger_rotary_pos_emb = liger_rope


def liger_rotary_pos_emb_gpt_oss(q, k, cos, sin):
    """gpt-oss: cos and sin hold each angle once and the whole head is rotated."""
    return liger_rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """Vision towers: q and k ``[T, H, D]``, cos and sin ``[T, D]``."""
    q_out, k_out = tigon.rope(q.unsqueeze(0), k.unsqueeze(0), cos, sin, unsqueeze_dim=2)
    return q_out.squeeze(0).to(q.dtype), k_out.squeeze(0).to(k.dtype)


def liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """M-RoPE of Qwen2-VL: cos and sin ``[3, B, T, D]``, numbers of pairs of time, height and width."""
    return tigon.rope(
        q, k, cos, sin, mrope_section=mrope_section, unsqueeze_dim=unsqueeze_dim, keep_dtype=True
    )


liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb


def liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis):
    """Llama 4: neighbours as complex numbers, q and k ``[B, T, H, D]``, one turn a token and pair.

    ``freqs_cis`` is complex ``[B, T, D/2]`` (or ``[T, D/2]``), or its real and imaginary parts by turns.
    """
    if not freqs_cis.is_complex():
        freqs_cis = torch.view_as_complex(
            freqs_cis.float().reshape(*freqs_cis.shape[:-1], -1, 2).contiguous()
        )
    k = xk.to(xq.dtype)
    return tigon.rope(xq, k, freqs_cis, unsqueeze_dim=2, interleaved=True, keep_dtype=True)


def liger_llama4_vision_rotary_pos_emb(query, key, freqs_ci):
    """The same in Llama 4's vision tower, whose turns have an axis of heads, ``[T, 1, D/2]``."""
    return liger_llama4_text_rotary_pos_emb(query, key, freqs_ci.reshape(query.shape[1], -1))


# liger_kernel.transformers.model.loss_utils


def unpack_cross_entropy_result(result):
    """(loss, z_loss, token_accuracy, predicted_tokens) of whatever a cross-entropy returned."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    if isinstance(result, tuple):
        return (*result[:4], *(None,) * (4 - len(result)))
    return result, None, None, None


def fixed_fused_linear_cross_entropy(
    hidden_states,
    lm_head_weight,
    target,
    num_items_in_batch=None,
    ignore_index=-100,
    final_logit_softcapping=None,
    accum_dtype=None,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    **kwargs,
):
    """The loss head, divided by ``num_items_in_batch`` where that is given."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    result = _current_loss()(
        hidden_states,
        lm_head_weight,
        target,
        reduction=reduction,
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
        accum_dtype=accum_dtype,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )
    loss, _, accuracy, predicted = unpack_cross_entropy_result(result)
    if num_items_in_batch is not None:
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss / num_items_in_batch
    return _output(loss, None, accuracy, predicted)


def LigerForCausalLMLoss(
    hidden_states,
    lm_head_weight,
    labels,
    hidden_size,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    final_logit_softcapping=None,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    **kwargs,
):
    """The causal loss from hidden states; keywords the loss head does not know are dropped."""
    known = inspect.signature(_current_loss()).parameters
    kwargs = {name: value for name, value in kwargs.items() if name in known}
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )


def _current_loss():
    """The loss head by its public path: frameworks exchange that attribute."""
    name = "liger_fused_linear_cross_entropy"
    return public("transformers.functional", name, liger_fused_linear_cross_entropy)


class _Recorder(dict):
    """In the place of the loss head's first operand: its arguments are noted, nothing is computed."""


def loss_settings() -> dict:
    """The options that a program adds to every loss, by a function that it put around the loss head.

    Axolotl's ``liger_use_token_scaling`` does. Patched models call no such function: they take the options.
    """
    ours, current, noted = liger_fused_linear_cross_entropy, _current_loss(), _Recorder()
    if current is ours or current.__module__ == "liger_kernel.transformers.functional":
        return {}  # Tigon's, or Liger's where it is installed: nobody wrapped it
    with contextlib.suppress(AttributeError, TypeError):  # it reads the operands
        current(noted, None, None)
    check(
        noted,
        "liger_fused_linear_cross_entropy may be wrapped by a function that calls "
        "it with the operands it was given, got {!r}",
        current,
    )
    defaults = inspect.signature(ours).parameters
    return {
        name: value
        for name, value in noted.items()
        if value is not defaults[name].default and name not in ("input", "weight", "target")
    }
