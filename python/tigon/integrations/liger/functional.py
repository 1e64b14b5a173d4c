"""``liger_kernel.transformers.functional``: that interface, Tigon's arithmetic.

Differences on purpose: nothing is done in place (the ``in_place`` arguments are accepted and have no effect),
weight gradients are summed in float32 whatever ``accum_dtype`` says, and nothing synchronises.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon._dtensor import is_dtensor
from tigon.integrations.liger.paths import check, public


@dataclass
class CrossEntropyOutput:
    """The result of the cross-entropies if more than the loss is requested."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


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
    return _output(loss.to(input.dtype), z_loss, accuracy, predicted)


def whole(weight):
    """The weight of a head as one tensor; shards are refused: FSDP's look like those of a vocabulary."""
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
    integer = isinstance(chunk_mem_const, int) and not isinstance(chunk_mem_const, bool)
    fits = integer and chunk_mem_const >= 1
    check(fits, "chunk_mem_const must be an int >= 1, got {!r}", chunk_mem_const)
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
    counts = target != ignore_index
    return CrossEntropyOutput(
        got.loss,
        _reduced(got.z_loss, counts, reduction).to(input.dtype) if return_z_loss else None,
        _accuracy(got.correct, counts, reduction) if return_token_accuracy else None,
        got.predicted if return_predicted_tokens else None,
    )


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b``."""
    return tigon.swiglu(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """``gelu(a) * b``, GELU by tanh."""
    return tigon.geglu(a, b, approximate="tanh")


def liger_relu_squared(x: Tensor) -> Tensor:
    """``relu(x)^2``."""
    return tigon.relu_squared(x)


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """``gamma * tanh(alpha * x) + beta``."""
    return tigon.dyt(x, alpha, gamma, beta)


def liger_softmax(x: Tensor) -> Tensor:
    """Over the last dimension."""
    return tigon.softmax(x)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Sparsemax over any dimension."""
    return tigon.sparsemax(input.movedim(dim, -1)).movedim(-1, dim)


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension."""
    return tigon.layer_norm(X, W, B, eps)


def liger_poly_norm(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """``W[0] n(X^3) + W[1] n(X^2) + W[2] n(X) + B``; B has one element and any shape."""
    return tigon.poly_norm(X, W, B.reshape(1), eps)


def liger_attn_res(
    V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6
) -> Tensor:
    """Attention over the residual blocks ``V``, by :func:`tigon.attention_residual`."""
    return tigon.attention_residual(V, w_query, w_norm, eps)


def liger_rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:
    """RMSNorm; the casting mode is :func:`tigon.rms_norm`'s rounding."""
    return tigon.rms_norm(X, W, eps, offset=offset, rounding=casting_mode)


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of X + R, X + R)."""
    return tigon.add_rms_norm(X, R, W, eps, offset=offset, rounding=casting_mode)


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


def liger_group_norm(
    X: Tensor,
    affine_scaling_weight: Tensor,
    affine_shifting_bias: Tensor,
    num_channels: int,
    num_groups: int,
    eps: float,
) -> Tensor:
    """By :func:`tigon.group_norm`, ``X`` ``[N, C, ...]``."""
    fits = X.dim() > 1 and X.shape[1] == num_channels
    check(fits, "num_channels must be {}'s second size, got {}", tuple(X.shape), num_channels)
    return tigon.group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


def liger_rope(
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
    if rotary_dim is not None:
        fits = rotary_dim % 2 == 0 and 0 < rotary_dim <= head and table >= rotary_dim // 2
        check(fits, "rotary_dim must be even, at most {} and twice cos's columns, got {}", head, rotary_dim)
    columns = min(table, head) if rotary_dim is None else rotary_dim
    cos, sin = cos[..., : columns // 2], sin[..., : columns // 2]
    q_out, k_out = tigon.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=columns)
    return q_out.to(q.dtype), k_out.to(k.dtype)


liger_rotary_pos_emb = liger_rope


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """M-RoPE of Qwen2-VL: cos and sin ``[3, B, T, D]``, numbers of pairs of time, height and width."""
    return tigon.rope(
        q, k, cos, sin, mrope_section=mrope_section, unsqueeze_dim=unsqueeze_dim, keep_dtype=True
    )


liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4: neighbours as complex numbers, q and k ``[B, T, H, D]``, one turn a token and pair.

    ``freqs_cis`` is complex ``[B, T, D/2]`` (or ``[T, D/2]``), or its real and imaginary parts alternate.
    """
    if not freqs_cis.is_complex():
        freqs_cis = torch.view_as_complex(
            freqs_cis.float().reshape(*freqs_cis.shape[:-1], -1, 2).contiguous()
        )
    k = xk.to(xq.dtype)
    return tigon.rope(xq, k, freqs_cis, unsqueeze_dim=2, interleaved=True, keep_dtype=True)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of Llama 4's vision tower; its frequencies have an axis of heads, ``[T, 1, D/2]``."""
    return liger_llama4_text_rotary_pos_emb(query, key, freqs_ci.reshape(query.shape[1], -1))


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
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
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
    loss = output.loss
    if isinstance(num_items_in_batch, Tensor):
        loss = loss / num_items_in_batch.to(loss.device)
    elif num_items_in_batch is not None:
        loss = loss / num_items_in_batch
    return _output(loss, None, output.token_accuracy, output.predicted_tokens)


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
        return {}  # Tigon's, or Liger's if it is installed: nobody wrapped it
    with contextlib.suppress(AttributeError, TypeError):  # it reads the operands
        current(noted, None, None)
    check(
        noted,
        "liger_fused_linear_cross_entropy may be wrapped by a function that calls "
        "it with the operands it was given, got {!r}",
        current,
    )
    defaults = inspect.signature(ours).parameters
    options = ((n, value) for n, value in noted.items() if n not in ("input", "weight", "target"))
    return {name: value for name, value in options if value is not defaults[name].default}
