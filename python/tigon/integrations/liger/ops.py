"""``liger_kernel.ops``: the few names of it that programs call.

VeOmni's sequence parallelism has forward and backward passes in autograd functions of its own. Sizes of
Triton's blocks, among results and arguments, choose nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tigon
from tigon.error import Error
from tigon.integrations.liger.functional import liger_rotary_pos_emb, whole
from tigon.integrations.liger.paths import check
from tigon.ops.columns import columns_for
from tigon.ops.rms_norm import ROUNDINGS, _op, check_options, result_dtype

IMPL_REGISTRY: dict = {}  # kernels for other hardware: none here; Axolotl looks through it


class LigerRMSNormFunction:
    """RMSNorm, as the autograd function there is called."""

    @staticmethod
    def apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        return tigon.rms_norm(X, W, eps, offset=offset, rounding=casting_mode)


class LigerSiLUMulFunction:
    """``silu(gate_multiplier * a) * b * down_multiplier``, in one pass."""

    @staticmethod
    def apply(a, b, gate_multiplier=1.0, down_multiplier=1.0):
        return tigon.swiglu(a, b, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)


class LigerFusedLinearScaledCrossEntropyFunction:
    """Per-token loss under a temperature, and the entropy where asked for."""

    @staticmethod
    def apply(
        _input,
        weight,
        target,
        temperature=1.0,
        ignore_index=-100,
        m_tiles_per_cluster=1,
        return_entropy=False,
        selected_token_ids=None,
    ):
        name = "LigerFusedLinearScaledCrossEntropyFunction"
        check(selected_token_ids is None, "selected_token_ids must be None in {}, got a tensor", name)
        weight, options = whole(weight), {"temperature": temperature, "ignore_index": ignore_index}
        if not return_entropy:
            return -tigon.linear_log_prob(_input, weight, target, **options)
        log_prob, entropy = tigon.linear_log_prob(_input, weight, target, entropy=True, **options)
        return -log_prob, entropy


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """``[B, L]`` log-probabilities of the last L of ``input_ids``, 0 at zeros of the mask; no gradient.

    By :func:`tigon.cross_entropy` of logits ``[B, L + 1, V]``. Logits over a temperature exist in float32,
    for they are not rounded to their dtype.
    """
    rows = logits[:, :-1]
    if temperature != 1:
        wide = torch.promote_types(rows.dtype, torch.float32)
        rows = rows.to(wide, copy=True).div_(temperature)
    target = input_ids[:, -rows.shape[1] :] if rows.shape[1] else input_ids[:, :0]
    if mask is not None:
        target = target.masked_fill(mask[:, mask.shape[1] - rows.shape[1] :] == 0, -100)
    return -tigon.cross_entropy(rows, target, reduction="none")


def fused_linear_cross_entropy_forward(*args, **kwargs):
    """Not called by Tigon. Axolotl excludes it from compilation if a model is compiled."""
    raise Error(
        "[compat.liger] liger_fused_linear_cross_entropy must be called, got a call of one of its halves"
    )


fused_linear_cross_entropy_backward = fused_linear_cross_entropy_forward


_CODES = {"llama": 0, "gemma": 1, "none": -1}  # of Liger's casting modes


def _rounding(casting_mode) -> tuple[str, int]:
    mode = next((mode for mode, code in _CODES.items() if casting_mode in (mode, code)), None)
    check(mode, "casting_mode must be one of {}, got {!r}", [*_CODES, *_CODES.values()], casting_mode)
    return mode, ROUNDINGS[mode]


@torch.no_grad()
def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
    """(Y, rows of X, RSTD, 0, 0, number of the casting mode), by the operator of :func:`tigon.rms_norm`."""
    mode, rounding = _rounding(casting_mode)
    check_options("rms_norm", X, W, eps, offset, mode)
    y, rstd = _op.forward(X, *columns_for("rms_norm", ("weight",), X, W), eps, offset, rounding)
    return y.to(X.dtype), X.reshape(-1, X.shape[-1]), rstd, 0, 0, _CODES[mode]


@torch.no_grad()
def rms_norm_backward(
    dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode, needs_dw=None
):
    """(dX, dW) of :func:`rms_norm_forward`; dW is None without a weight and where ``needs_dw`` is False."""
    _, rounding = _rounding(casting_mode)
    need = W is not None and needs_dw is not False
    (weight,) = columns_for("rms_norm", ("weight",), X, W)
    dy = dY.to(result_dtype(X, weight, rounding))
    dx, dw = _op.bwd(dy, X.reshape(dY.shape), weight, RSTD, offset, rounding, True, need)
    return dx, dw.to(W.dtype) if need else None


@torch.no_grad()
def rope_forward(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """(q, k, cos, sin): q and k ``[B, H, T, D]`` rotated by :func:`tigon.rope`; tables ``[B, T, D]``."""
    cos, sin = (_table(t, unsqueeze_dim) for t in (cos, sin))
    return *liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=rotary_dim), cos, sin


@torch.no_grad()
def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """(dq, dk) of :func:`rope_forward`: turned back."""
    cos, sin = (_table(t, unsqueeze_dim) for t in (cos, sin))
    return liger_rotary_pos_emb(dq, dk, cos, -sin, rotary_dim=rotary_dim)


def _table(table, unsqueeze_dim):
    """Remove the axis of heads, which has one entry, and add an axis of batches."""
    if table.dim() == 4:
        table = table.squeeze(unsqueeze_dim if table.shape[unsqueeze_dim] == 1 else 1)
    return table.unsqueeze(0) if table.dim() == 2 else table
