"""``liger_kernel``'s manifold-constrained hyper-connections, by :mod:`tigon.ops.hyper_connection`."""

from __future__ import annotations

import torch
from torch import nn

import tigon
from tigon.integrations.liger.signatures import by_name, function_class

_OPTIONS = "tmax=20, rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6, post_mult=2.0"
_OPERANDS = "phi, b, alpha_pre, alpha_post, alpha_res"


def _coeffs(
    x,
    phi,
    b,
    alpha_pre,
    alpha_post,
    alpha_res,
    allow_fp32=False,
    tmax=20,
    rms_eps=1e-6,
    pre_eps=0.0,
    sinkhorn_eps=1e-6,
    post_mult=2.0,
):
    """``(h_pre, h_post, h_res)`` of x ``[..., HC, C]`` in float32, by :func:`tigon.hyper_connection_pre`."""
    if x.dtype not in (torch.bfloat16, torch.float16) and not allow_fp32:
        raise AssertionError(f"x must be bfloat16 or float16 (or allow_fp32=True), got {x.dtype}")
    scale = torch.stack([a.reshape(()).float() for a in (alpha_pre, alpha_post, alpha_res)])
    return tigon.hyper_connection_pre(
        x,
        phi.t(),
        b,
        scale,
        norm_eps=rms_eps,
        pre_eps=pre_eps,
        post_scale=post_mult,
        iterations=tmax,
        sinkhorn_eps=sinkhorn_eps,
        collapse=False,
    )[1:]


liger_mhc_coeffs = by_name(f"liger_mhc_coeffs(x, {_OPERANDS}, *, allow_fp32=False, {_OPTIONS})", _coeffs)


def liger_mhc_pre(x, h_pre):
    """``sum_i h_pre_i x_i``: the streams ``[..., HC, C]`` as one, ``[..., C]``."""
    return tigon.hyper_connection_post(x, res=h_pre.unsqueeze(-2)).squeeze(-2)


def liger_mhc_post_res(x, f_out, h_post, h_res):
    """``sum_i h_res_oi x_i + h_post_o f_out``, by :func:`tigon.hyper_connection_post`."""
    return tigon.hyper_connection_post(x, f_out.to(x.dtype), h_post, h_res)


def liger_mhc_apply(x, f_out, h_pre, h_post, h_res, *, return_x_in=False):
    """The streams after a layer; with ``return_x_in`` the layer's input too."""
    x_in = liger_mhc_pre(x, h_pre) if return_x_in else None
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, x_in) if return_x_in else x_out


def _forward(x, layer, return_coeffs, **options):
    coeffs = liger_mhc_coeffs(x, **options)
    x_in = liger_mhc_pre(x, coeffs[0])
    first = next(layer.parameters(), x_in) if isinstance(layer, nn.Module) else x_in
    x_out = liger_mhc_post_res(x, layer(x_in.to(first.dtype)), *coeffs[1:])
    return (x_out, coeffs) if return_coeffs else x_out


# Coefficients, the layer's input, the layer in the dtype of its parameters, the streams after it.
liger_mhc_forward = by_name(
    f"liger_mhc_forward(x, layer, {_OPERANDS}, *, allow_fp32=False, {_OPTIONS}, return_coeffs=False)",
    _forward,
)
LigerMHCCoeffsFunction = function_class("LigerMHCCoeffsFunction", _coeffs)
LigerMHCPreFunction = function_class("LigerMHCPreFunction", liger_mhc_pre)
LigerMHCPostResFunction = function_class("LigerMHCPostResFunction", liger_mhc_post_res)


class LigerMHC(nn.Module):
    """A layer ``[..., c] -> [..., c]`` between the streams ``[..., hc, c]``."""

    def __init__(
        self,
        layer,
        *,
        hc,
        c,
        tmax=20,
        rms_eps=1e-6,
        pre_eps=0.0,
        sinkhorn_eps=1e-6,
        post_mult=2.0,
        phi_dtype=torch.float16,
        allow_fp32=False,
    ):
        super().__init__()
        self.layer, self.hc, self.c, self.tmax = layer, int(hc), int(c), int(tmax)
        self.rms_eps, self.pre_eps, self.sinkhorn_eps = float(rms_eps), float(pre_eps), float(sinkhorn_eps)
        self.post_mult, self.allow_fp32 = float(post_mult), bool(allow_fp32)
        like = next(layer.parameters(), next(layer.buffers(), torch.empty(0)))
        rows = self.hc * (self.hc + 2)
        self.phi = nn.Parameter(
            0.02 * torch.randn(self.hc * self.c, rows, dtype=phi_dtype, device=like.device)
        )
        self.b = nn.Parameter(torch.zeros(rows, device=like.device, dtype=torch.float32))
        for name in ("alpha_pre", "alpha_post", "alpha_res"):
            setattr(self, name, nn.Parameter(torch.ones((), device=like.device, dtype=torch.float32)))

    def forward(self, x):
        if x.shape[-2:] != (self.hc, self.c):
            raise ValueError(f"x must be [..., {self.hc}, {self.c}], got {list(x.shape)}")
        names = "phi b alpha_pre alpha_post alpha_res allow_fp32 tmax rms_eps pre_eps sinkhorn_eps post_mult"
        return liger_mhc_forward(x, self.layer, **{name: getattr(self, name) for name in names.split()})

    def extra_repr(self):
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"
