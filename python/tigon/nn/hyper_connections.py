"""The module of :func:`tigon.hyper_connection_pre` and :func:`tigon.hyper_connection_post`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tigon.error import check
from tigon.ops.arguments import check_integers, checked_init
from tigon.ops.hyper_connection import MAX_STREAMS, hyper_connection_post, hyper_connection_pre


class HyperConnections(nn.Module):
    """Manifold-constrained hyper-connections around a layer ``[..., C] -> [..., C]``.

    Args:
        hidden_size: C.
        streams: n, 1 to 8.
        norm_eps, pre_eps, post_scale, iterations, sinkhorn_eps: as :func:`tigon.hyper_connection_pre`.

    Parameters, float32 by default, with their initial values: weight ``[2n + n^2, n * C]`` (normal, standard
    deviation 0.02), base ``[2n + n^2]`` (0) and scale ``[3]`` (0.01, as in the paper).
    """

    @checked_init
    def __init__(
        self,
        hidden_size: int,
        streams: int = 4,
        *,
        device=None,
        dtype=torch.float32,
        norm_eps: float = 1e-6,
        pre_eps: float = 0.0,
        post_scale: float = 2.0,
        iterations: int = 20,
        sinkhorn_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check_integers("nn.HyperConnections", streams=streams)
        fits = 1 <= streams <= MAX_STREAMS
        check("nn.HyperConnections", fits, "streams must be in [1, {}], got {}", MAX_STREAMS, streams)
        rows, factory = streams * (streams + 2), {"device": device, "dtype": dtype}
        self.options = {
            "norm_eps": norm_eps,
            "pre_eps": pre_eps,
            "post_scale": post_scale,
            "iterations": iterations,
            "sinkhorn_eps": sinkhorn_eps,
        }
        self.weight = nn.Parameter(torch.empty(rows, streams * hidden_size, **factory))
        self.base = nn.Parameter(torch.empty(rows, **factory))
        self.scale = nn.Parameter(torch.empty(3, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight again; reset base and scale to their initial values."""
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.base)
        nn.init.constant_(self.scale, 0.01)

    def forward(self, x: torch.Tensor, layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """``[..., n, C] -> [..., n, C]``: the streams after `layer`."""
        y, _, post, res = hyper_connection_pre(x, self.weight, self.base, self.scale, **self.options)
        return hyper_connection_post(x, layer(y), post, res)

    def extra_repr(self) -> str:
        return ", ".join((str(tuple(self.weight.shape)), *(f"{k}={v}" for k, v in self.options.items())))
