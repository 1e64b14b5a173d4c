"""Rotary embedding: the functions that Megatron calls if ``apply_rope_fusion`` is set."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from tigon.error import check
from tigon.integrations.megatron.classes import core, derives_from
from tigon.ops.rope import rope

ATTENTION = "megatron.core.transformer.attention.SelfAttention"
LATENT = "megatron.core.transformer.multi_latent_attention.MultiLatentAttention"

_latest = [None, -1, None]  # the last angles (weak), their version, (cos, sin)


def _tables(freqs):
    """cos and sin of angles, ``[..., R]`` float32; those of the last tensor are cached.

    All layers of a forward get the same tensor of angles, for q and for k.
    """
    if (
        torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or freqs.is_inference()
        or (freqs.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return freqs.cos(), freqs.sin()
    held, version, tables = _latest
    if held is None or held() is not freqs or version != freqs._version:
        with torch.no_grad():
            tables = freqs.cos(), freqs.sin()
        _latest[:] = weakref.ref(freqs), freqs._version, tables
    return tables


def fused_apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    transpose_output_memory: bool = False,
    interleaved: bool = False,
    start_positions=None,
) -> torch.Tensor:
    """Rotary embedding of ``t`` in Megatron's layout.

    Args:
        t: ``[s, b, h, d]``.
        freqs: angles ``[S, 1 or b, 1, R]`` float32 with S >= s and R <= d. The first s rows are used, and
            columns of a head past R are copied.
        transpose_output_memory: the result has the memory layout ``[b, s, h, d]``.
        interleaved: pairs are columns 2i and 2i + 1.
        start_positions: must be ``None``.

    Returns:
        ``[s, b, h, d]`` in t's dtype. Tables and arithmetic are float32, and the result is rounded once
        (Megatron's unfused form rounds tables and multiplications to t's dtype).

    Raises:
        tigon.Error: shapes do not fit.
    """
    op = "fused_apply_rotary_pos_emb"
    check(op, start_positions is None, "start_positions must be None, got {}", type(start_positions))
    check(op, t.dim() == 4, "t must be [s, b, h, d], got {}", t.shape)
    rows, batch, heads, columns = t.shape
    fits = freqs.dim() == 4 and freqs.shape[0] >= rows
    fits = fits and freqs.shape[1] in (1, batch) and freqs.shape[2] == 1
    check(op, fits, "freqs must be [{} or more, 1 or {}, 1, R], got {}", rows, batch, freqs.shape)
    cos, sin = (table[:rows] for table in _tables(freqs))
    options = {"interleaved": interleaved, "keep_dtype": True}
    if freqs.shape[1] == 1 and not transpose_output_memory:
        flat = t.reshape(rows, batch * heads, columns)
        return rope(flat, None, cos[:, 0, 0], sin[:, 0, 0], **options).view(t.shape)
    cos, sin = (table[:, :, 0].transpose(0, 1) for table in (cos, sin))
    y = rope(t.transpose(0, 1), None, cos, sin, unsqueeze_dim=2, **options).transpose(0, 1)
    return y if transpose_output_memory else y.contiguous()


def fused_apply_rotary_pos_emb_thd(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
    start_positions=None,
) -> torch.Tensor:
    """Rotary embedding of packed sequences.

    Args:
        t: ``[T, h, d]``, this rank's tokens of all sequences, concatenated.
        cu_seqlens: ``[sequences + 1]`` integers, the boundaries of the whole sequences; never read on the
            host.
        freqs: angles ``[S, 1, 1, R]`` float32: positions of the longest sequence, or of all sequences if S is
            the last of cu_seqlens, as in Megatron.
        cp_size, cp_rank: context parallelism: each sequence has ``2 * cp_size`` chunks, and the rank holds
            the ``cp_rank``-th from the front and the ``cp_rank``-th from the end.
        interleaved: as in :func:`fused_apply_rotary_pos_emb`.

    Returns:
        ``[T, h, d]`` in t's dtype.

    Raises:
        tigon.Error: shapes do not fit.
    """
    op = "fused_apply_rotary_pos_emb_thd"
    check(op, start_positions is None, "start_positions must be None, got {}", type(start_positions))
    check(op, t.dim() == 3, "t must be [T, h, d], got {}", t.shape)
    fits = freqs.dim() == 4 and freqs.shape[1] == freqs.shape[2] == 1
    check(op, fits, "freqs must be [S, 1, 1, R], got {}", freqs.shape)
    whole = cp_size >= 1 and 0 <= cp_rank < cp_size
    check(op, whole, "cp_rank must be in [0, cp_size), got {} of {}", cp_rank, cp_size)
    positions = thd_positions(t.shape[0], cu_seqlens, freqs.shape[0], cp_size, cp_rank)
    cos, sin = (table[:, 0, 0] for table in _tables(freqs))
    return rope(t, None, cos, sin, position_ids=positions, interleaved=interleaved, keep_dtype=True)


def thd_positions(tokens: int, cu_seqlens, rows: int, cp_size: int, cp_rank: int):
    """The row of the angles for each of this rank's tokens, ``[tokens]`` int64."""
    ends = cu_seqlens.long()
    token = torch.arange(tokens, device=ends.device)
    local = ends // cp_size
    sequence = torch.searchsorted(local[1:].contiguous(), token, right=True).clamp_(max=len(ends) - 2)
    at = token - local[sequence]
    if cp_size > 1:
        length = local[sequence + 1] - local[sequence]
        half = length // 2
        front = cp_rank * half + at
        back = cp_size * length - (cp_rank + 1) * half + at - half
        at = torch.where(at < half, front, back)
    at = at + torch.where(ends[-1] == rows, ends[sequence], 0)
    return at.clamp_(max=rows - 1)  # tokens after the last sequence are padding


def install_rope_fusion() -> bool:
    """Install the two functions in Megatron's slots for fused ones, unless the slots are filled.

    Then ``TransformerConfig(apply_rope_fusion=True)`` needs no Transformer Engine; call this function before
    it. Returns whether Tigon's functions are installed.
    """
    rope_utils = core("models.common.embeddings.rope_utils", "install_rope_fusion")
    ours = {f.__name__: f for f in (fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd)}
    if all(getattr(rope_utils, name, None) is None for name in ours):
        for name, function in ours.items():
            setattr(rope_utils, name, function)
    return all(getattr(rope_utils, name, None) is function for name, function in ours.items())


def plan_rope(module: nn.Module, kind: str):
    """(config values, name of the function) for an attention, why it is left, or None if it has no rotation.

    `kind` is the model's ``position_embedding_type``.
    """
    if derives_from(module, LATENT):
        return "multi-latent attention rotates by functions of its own"
    if not derives_from(module, ATTENTION) or kind not in ("rope", "mrope", "yarn"):
        return None
    if kind == "yarn":
        return "YaRN scales cos and sin, which Megatron's fused form leaves out"
    if getattr(module.config, "fused_single_qkv_rope", False):
        return "fused_single_qkv_rope rotates the joint projection"
    if not install_rope_fusion():
        return "Transformer Engine's fused form is installed; apply_rope_fusion turns it on"
    return {"apply_rope_fusion": True}, "tigon.rope"
