"""Hyper-connections -> tigon.hyper_connection_pre: coefficients and the input of a layer, from streams;
the streams after attention or MLP -> tigon.hyper_connection_post.

Their source has a loop, which no canonical expression has. A module that holds the parameters of a form below
is the form if a copy on the CPU with a few columns, random parameters and large eps computes its numbers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from dataclasses import dataclass

import torch
from torch import nn

from tigon.integrations.transformers.canonical import function_node
from tigon.integrations.transformers.forward import blocked, intact, plain, stock, written
from tigon.integrations.transformers.recognition import PROBE_EPS, on_cpu, same_results, twin
from tigon.integrations.transformers.rewriting import (
    Rewritten,
    replace_expressions,
    rewrite_innermost,
    same_form,
)
from tigon.ops.hyper_connection import MAX_STREAMS, hyper_connection_post, hyper_connection_pre

_COLUMNS, _ITERATIONS, _MAGNITUDE = 6, 3, 1.7  # of a probe


@dataclass(frozen=True)
class HyperSpec:
    """A recognised form: the attributes that play its roles, and the results that it returns."""

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
    """Run a recognised form of hyper-connections."""
    parameters = [getattr(module, name) for name in spec.parameters()]
    if not plain(x, *parameters) or x.dtype == torch.float64 or not _norm_is_intact(module):
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


def _norm_is_intact(module: nn.Module) -> bool:
    return intact(module.input_norm, written(type(module.input_norm)))


def plan_hyper(module: nn.Module) -> tuple | str | None:
    """Plan a module that computes coefficients of streams: (spec, op), why it is left, or None."""
    spec = next((form for form in FORMS if _has_roles(module, form)), None)
    if spec is None:
        return None
    if not 1 <= module.hc_mult <= MAX_STREAMS:
        return f"has {module.hc_mult} streams, at most {MAX_STREAMS} are there"
    reason = blocked(module) or (None if _norm_is_intact(module) else "a call of input_norm does more")
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
    n, generator = module.hc_mult, torch.Generator().manual_seed(1)
    rows = module._parameters[spec.base].shape[0]
    shapes = {spec.weight: (rows, n * _COLUMNS), spec.base: (rows,)}
    shapes[spec.scale] = tuple(module._parameters[spec.scale].shape)
    drawn = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    known = {spec.eps: PROBE_EPS / 2, spec.iterations: _ITERATIONS, spec.magnitude: _MAGNITUDE}
    known = {name: value for name, value in known.items() if name}
    probed = twin(module, known, drawn, input_norm=twin(module.input_norm, {"eps": PROBE_EPS}, {}))
    x = torch.randn(2, 5, n, _COLUMNS, generator=generator)
    close = functools.partial(torch.allclose, rtol=1e-4, atol=1e-5)
    return same_results((type(module).forward, probed, x), (hyper_forward, probed, spec, x), close)


# After attention or MLP: the forward of a decoder layer is compiled with expressions of its own replaced.


def _fits(x, f, post, dtype) -> bool:
    sized = plain(x, f, post) and x.shape[:-2] == f.shape[:-1] and x.shape[-2] <= MAX_STREAMS
    return sized and x.dtype == f.dtype == dtype != torch.float64


def mixed(x, f, post, comb, dtype):
    """Mix streams by the transposed comb, as DeepSeek-V4 and GLM-5 do."""
    if _fits(x, f, post, dtype) and plain(comb):
        return hyper_connection_post(x, f, post, comb, transposed=True)
    return post.to(dtype).unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(comb.to(dtype).transpose(-1, -2), x)


def kept(x, f, post, dtype):
    """Keep streams as they are, as Hunyuan V4 does."""
    if _fits(x, f, post, dtype):
        return hyper_connection_post(x, f, post)
    return (post.float().unsqueeze(-1) * f.float().unsqueeze(-2) + x.float()).to(dtype)


_STREAMS = {"_tigon_mixed": mixed, "_tigon_kept": kept}  # each replaces the expression that it ends with


@functools.cache
def _expression(function) -> tuple[ast.expr, tuple[str, ...]]:
    """The expression that a function returns at its end, and its parameters."""
    node = function_node(function)
    return node.body[-1].value, tuple(parameter.arg for parameter in node.args.args)


def plan_streams(module: nn.Module) -> tuple[Rewritten, str] | str | None:
    """Plan a decoder layer whose forward mixes streams: (rewritten forward, op), why it is left, or None."""
    rewritten = rewrite(type(module).forward)
    if rewritten is None:
        return None
    by = f"tigon.hyper_connection_post ({rewritten[0]} places)"
    return blocked(module) or (Rewritten(rewrite, type(module)), by)


@functools.cache
def rewrite(forward) -> tuple[int, types.FunctionType] | None:
    """The number of replaced places, and the new forward; None if no place was replaced."""
    inner = inspect.unwrap(forward)
    names = getattr(getattr(inner, "__code__", None), "co_names", ())
    if "unsqueeze" not in names:
        return None
    return rewrite_innermost(forward, _replace, **_STREAMS)


def _replace(node: ast.FunctionDef) -> int:
    def call(part: ast.expr) -> str | None:
        for name, function in _STREAMS.items():
            expression, parameters = _expression(function)
            holes = dict.fromkeys(parameters)
            if same_form(expression, part, holes) and all(map(str.isidentifier, holes.values())):
                return f"{name}({', '.join(f'{parameter}={value}' for parameter, value in holes.items())})"
        return None

    return replace_expressions(node, call)
