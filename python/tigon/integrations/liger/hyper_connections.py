"""``liger_kernel``'s manifold-constrained hyper-connections, by :mod:`tigon.ops.hyper_connection`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tigon
from tigon.integrations.liger.paths import check


def liger_mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
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


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """``sum_i h_pre_i x_i``: the streams ``[..., HC, C]`` as one, ``[..., C]``."""
    return tigon.hyper_connection_post(x, res=h_pre.unsqueeze(-2)).squeeze(-2)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """``sum_i h_res_oi x_i + h_post_o f_out``, by :func:`tigon.hyper_connection_post`."""
    return tigon.hyper_connection_post(x, f_out.to(x.dtype), h_post, h_res)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The streams after a layer; with ``return_x_in`` the layer's input too."""
    x_in = liger_mhc_pre(x, h_pre) if return_x_in else None
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, x_in) if return_x_in else x_out


def liger_mhc_forward(
    x: Tensor,
    layer: nn.Module,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    return_coeffs: bool = False,
    **options,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The streams after a layer, which runs in its parameters' dtype; options of :func:`liger_mhc_coeffs`."""
    coeffs = liger_mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)
    x_in = liger_mhc_pre(x, coeffs[0])
    first = next(layer.parameters(), x_in) if isinstance(layer, nn.Module) else x_in
    x_out = liger_mhc_post_res(x, layer(x_in.to(first.dtype)), *coeffs[1:])
    return (x_out, coeffs) if return_coeffs else x_out


class LigerMHC(nn.Module):
    """A layer ``[..., c] -> [..., c]`` between the streams ``[..., hc, c]``."""

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.hc, self.c = layer, hc, c
        self.options = {"tmax": tmax, "rms_eps": rms_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps}
        self.options |= {"post_mult": post_mult, "allow_fp32": allow_fp32}
        device = next(layer.parameters(), next(layer.buffers(), torch.empty(0))).device
        float32, rows = {"device": device, "dtype": torch.float32}, hc * (hc + 2)
        self.phi = nn.Parameter(0.02 * torch.randn(hc * c, rows, dtype=phi_dtype, device=device))
        self.b = nn.Parameter(torch.zeros(rows, **float32))
        self.alpha_pre = nn.Parameter(torch.ones((), **float32))
        self.alpha_post = nn.Parameter(torch.ones((), **float32))
        self.alpha_res = nn.Parameter(torch.ones((), **float32))

    def forward(self, x: Tensor) -> Tensor:
        fits = x.shape[-2:] == (self.hc, self.c)
        check(fits, "x must be [..., {}, {}], got {}", self.hc, self.c, x.shape)
        alphas = self.alpha_pre, self.alpha_post, self.alpha_res
        return liger_mhc_forward(x, self.layer, self.phi, self.b, *alphas, **self.options)

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.options['tmax']}"
