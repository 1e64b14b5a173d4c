"""Forward and backward passes of ``liger_kernel.ops`` that programs call in autograd functions of their own.

VeOmni's sequence parallelism does. Sizes of Triton's blocks, among results and arguments, choose nothing.
"""

from __future__ import annotations

import torch

from tigon.integrations.liger.functional import liger_rope
from tigon.integrations.liger.names import check
from tigon.ops.columns import columns_for
from tigon.ops.rms_norm import ROUNDINGS, _op, check_options, result_dtype

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
    return *liger_rope(q, k, cos, sin, rotary_dim=rotary_dim), cos, sin


@torch.no_grad()
def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """(dq, dk) of :func:`rope_forward`: turned back."""
    cos, sin = (_table(t, unsqueeze_dim) for t in (cos, sin))
    return liger_rope(dq, dk, cos, -sin, rotary_dim=rotary_dim)


def _table(table, unsqueeze_dim):
    """Without the axis of heads, which has one entry; with that of the batch."""
    if table.dim() == 4:
        table = table.squeeze(unsqueeze_dim if table.shape[unsqueeze_dim] == 1 else 1)
    return table.unsqueeze(0) if table.dim() == 2 else table
