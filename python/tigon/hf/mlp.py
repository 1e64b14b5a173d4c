"""Gated MLPs: act(gate) * up -> tigon.swiglu.

The child Linears are called, never read: LoRA, quantisation, tensor parallelism and FSDP live in
them. Only the product in between is fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from tigon.hf.canonical import Unrecognised, canonical_forward
from tigon.hf.forward import blocked, foreign, plain
from tigon.hf.structures import ACTIVATIONS, MLPS, match
from tigon.ops.swiglu import swiglu


@dataclass(frozen=True)
class MlpSpec:
    """Names of the child modules of one gated MLP; `gate_up` where both come from one Linear."""

    down: str
    gate: str | None = None
    up: str | None = None
    gate_up: str | None = None


def mlp_forward(module: nn.Module, spec: MlpSpec, x):
    """Forward of a recognised gated MLP."""
    if spec.gate_up is None:
        gate, up = getattr(module, spec.gate)(x), getattr(module, spec.up)(x)
    else:
        gate, up = getattr(module, spec.gate_up)(x).chunk(2, dim=-1)
    return getattr(module, spec.down)(_silu_mul(gate, up))


def _silu_mul(gate, up):
    if plain(gate, up) and gate.dtype == up.dtype:
        return swiglu(gate, up)
    return F.silu(gate) * up


def plan_mlp(module: nn.Module) -> tuple[MlpSpec, str] | str | None:
    """(spec, what it is), or why a gated MLP is left, or None where there is none."""
    if _has_experts(module):
        return "experts run through transformers' experts registry; not replaced"
    if next(module.children(), None) is None:
        return None
    try:
        found = match(canonical_forward(type(module)), MLPS)
        why = "not act(gate) * up between two products"
    except Unrecognised as error:
        found, why = None, str(error)
    if found is None:
        return f"unrecognised forward: {why}" if _looks_like_mlp(module) else None
    reason = blocked(module) or _activation(module, found.roles.get("act"))
    if reason is not None:
        return reason
    names = {role: name for role, name in found.roles.items() if role != "act"}
    return MlpSpec(**names), f"tigon.swiglu ({found.structure.name})"


def _activation(module: nn.Module, name: str | None) -> str | None:
    """Why the activation cannot be fused, or None."""
    if name is None:  # written inline as silu
        return None
    activation = getattr(module, name)
    if getattr(activation, "_forward_hooks", None) or getattr(activation, "_forward_pre_hooks", 0):
        return f"hooks on {name} would not run"
    if activation is F.silu or isinstance(activation, nn.SiLU):
        return None
    try:
        known = match(canonical_forward(type(activation)), ACTIVATIONS) is not None
    except (Unrecognised, AttributeError):
        known = False
    if known and not foreign(activation):
        return None
    label = getattr(activation, "__name__", type(activation).__name__)
    return f"activation {label} has no fused product, only SiLU has"


def _has_experts(module: nn.Module) -> bool:
    return sum(p.ndim == 3 for p in module.parameters(recurse=False)) >= 2


def _looks_like_mlp(module: nn.Module) -> bool:
    """At least two products and an activation module of its own: worth a line in the report."""
    children = list(module.children())
    products = sum(hasattr(child, "in_features") for child in children)
    flat = all(hasattr(child, "in_features") or not list(child.children()) for child in children)
    activation = any("activation" in type(child).__module__ for child in children)
    return flat and products >= 2 and activation
