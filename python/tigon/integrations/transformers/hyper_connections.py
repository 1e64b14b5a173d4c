"""Hyper-connections -> tigon.hyper_connection_pre: coefficients and the input of a layer, from streams.

Their source has a loop, which no canonical expression has. A module that holds the parameters of a form below
is the form if a copy on the CPU with a few columns, random parameters and large eps computes its numbers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from tigon.integrations.transformers.forward import blocked, has_hooks, plain, stock
from tigon.integrations.transformers.probe import PROBE_EPS, on_cpu
from tigon.ops.hyper_connection import MAX_STREAMS, hyper_connection_pre

_COLUMNS, _ITERATIONS, _MAGNITUDE = 6, 3, 1.7  # of a probe


@dataclass(frozen=True)
class HyperSpec:
    """A form: the attributes that play its roles, and which results it returns."""

    name: str
    results: str  # of y, post, res, in this order
    weight: str = "fn"
    base: str = "base"
    scale: str = "scale"
    eps: str = "hc_eps"
    iterations: str | None = None
    magnitude: str | None = None  # of post, which has eps added then

    def parameters(self) -> tuple[str, str, str]:
        return self.weight, self.base, self.scale


FORMS = (
    HyperSpec("post, res, input", "post res y", iterations="hc_sinkhorn_iters"),
    HyperSpec("post, input", "post y", magnitude="hc_magnitude"),
    HyperSpec("post, input", "post y", magnitude="hc_post_magnitude"),
    HyperSpec("input", "y", "hc_fn", "hc_base", "hc_scale", "eps"),
)


def hyper_forward(module: nn.Module, spec: HyperSpec, x: torch.Tensor):
    parameters = [getattr(module, name) for name in spec.parameters()]
    if not plain(x, *parameters) or x.dtype == torch.float64 or has_hooks(module.input_norm):
        return stock(module, x)
    eps = getattr(module, spec.eps)
    options = {"norm_eps": module.input_norm.eps, "pre_eps": eps, "sinkhorn_eps": eps, "iterations": 1}
    if spec.magnitude:
        options |= {"post_scale": getattr(module, spec.magnitude), "post_eps": eps}
    if spec.iterations:
        options["iterations"] = getattr(module, spec.iterations)
    y, _, post, res = hyper_connection_pre(x, *parameters, **options)
    results = tuple({"y": y, "post": post, "res": res}[name] for name in spec.results.split())
    return results if len(results) > 1 else y


def plan_hyper(module: nn.Module) -> tuple | str | None:
    spec = next((form for form in FORMS if _has_roles(module, form)), None)
    if spec is None:
        return None
    if not 1 <= module.hc_mult <= MAX_STREAMS:
        return f"has {module.hc_mult} streams, at most {MAX_STREAMS} are there"
    reason = blocked(module) or (
        "hooks on input_norm would not run" if has_hooks(module.input_norm) else None
    )
    if reason is None and not _equals(module, spec):
        reason = "unrecognised forward: other numbers than those of a known form"
    return reason or (spec, f"tigon.hyper_connection_pre ({spec.name})")


def _has_roles(module: nn.Module, spec: HyperSpec) -> bool:
    numbers = [name for name in (spec.eps, spec.iterations, spec.magnitude) if name]
    return (
        all(isinstance(module._parameters.get(name), nn.Parameter) for name in spec.parameters())
        and all(isinstance(vars(module).get(name), (int, float)) for name in (*numbers, "hc_mult"))
        and isinstance(getattr(module._modules.get("input_norm"), "eps", None), float)
    )


@torch.no_grad()
@on_cpu()
def _equals(module: nn.Module, spec: HyperSpec) -> bool:
    """Whether a copy of a few columns computes the numbers of the form."""
    n = module.hc_mult
    generator = torch.Generator().manual_seed(1)
    rows = module._parameters[spec.base].shape[0]
    shapes = {spec.weight: (rows, n * _COLUMNS), spec.base: (rows,)}
    shapes[spec.scale] = tuple(module._parameters[spec.scale].shape)
    norm, twin = copy.copy(module.input_norm), copy.copy(module)
    norm.__dict__ = {**_unpatched(module.input_norm), "eps": PROBE_EPS}
    known = {spec.eps: PROBE_EPS / 2, spec.iterations: _ITERATIONS, spec.magnitude: _MAGNITUDE}
    twin.__dict__ = {**_unpatched(module), **{name: value for name, value in known.items() if name}}
    twin.__dict__["_modules"] = {**module._modules, "input_norm": norm}
    drawn = {name: nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in shapes.items()}
    twin.__dict__["_parameters"] = {**module._parameters, **drawn}
    x = torch.randn(2, 5, n, _COLUMNS, generator=generator)
    try:
        got, wanted = type(module).forward(twin, x), hyper_forward(twin, spec, x)
    except Exception:  # any failure of foreign code on made-up input: it is not this form
        return False
    got, wanted = (value if isinstance(value, tuple) else (value,) for value in (got, wanted))
    return len(got) == len(wanted) and all(
        isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(got, wanted, strict=True)
    )


def _unpatched(module: nn.Module) -> dict:
    return {name: value for name, value in vars(module).items() if name != "forward"}
