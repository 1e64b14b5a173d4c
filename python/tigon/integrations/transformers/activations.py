"""Activations: known by their numbers, and the fused products of gated units made of them."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from tigon.integrations.transformers.forward import blocked, has_hooks, plain
from tigon.integrations.transformers.probe import on_cpu
from tigon.ops.glu import geglu, reglu, swiglu
from tigon.ops.relu_squared import relu_squared

# Activations are told apart by their values: most hide behind functools.partial or a method.
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def _squared_gate(gate, up):
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return relu_squared(gate) * up


FUSED = {
    "silu": ("tigon.swiglu", swiglu),
    "gelu_tanh": ("tigon.geglu", geglu),
    "gelu": ("tigon.geglu", lambda gate, up: geglu(gate, up, approximate="none")),
    "relu": ("tigon.reglu", reglu),
    "relu_squared": ("tigon.relu_squared", _squared_gate),
}


def clamped_product(activation, gate, up, limit, after):
    """act(gate) * up with the gate clamped above, before or after act, and up on both sides.

    Without `up`, gate holds both as halves.
    """
    fits = plain(gate) if up is None else plain(gate, up) and gate.dtype == up.dtype
    if fits and activation == "silu" and not after and 0 < limit < math.inf:
        return swiglu(gate, up, limit=limit)
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    up = up.clamp(min=-limit, max=limit)
    if after:
        return ACTIVATIONS[activation](gate).clamp(max=limit) * up
    return product(activation, gate.clamp(max=limit), up)


def product(activation, gate, up, gate_multiplier=1.0, down_multiplier=1.0):
    """act(gate_multiplier * gate) * up * down_multiplier; without `up`, gate holds both as halves."""
    fits = plain(gate) if up is None else plain(gate, up) and gate.dtype == up.dtype
    scaled = (gate_multiplier, down_multiplier) != (1.0, 1.0)
    if fits and activation == "silu" and scaled:
        return swiglu(gate, up, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    if fits and not scaled:
        return FUSED[activation][1](gate, up)
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    if not scaled:
        return ACTIVATIONS[activation](gate) * up
    return ACTIVATIONS[activation](gate * gate_multiplier) * up * down_multiplier


def fused_activation(module: nn.Module, name: str) -> tuple[str | None, str | None]:
    """The activation that a module has there, or why it cannot be fused."""
    activation = getattr(module, name)
    if isinstance(activation, nn.Module) and has_hooks(activation):
        return None, f"hooks on {name} would not run"
    known = known_activation(activation)
    if known is not None:
        return known, None
    label = getattr(activation, "__name__", type(activation).__name__)
    return None, f"activation {label} has no fused product"


def known_activation(activation) -> str | None:
    """The name of a parameterless activation by its values in fp64, or None.

    Spellings of one function agree to some units in the last place there (a constant of ten digits:
    to 1e-11), different functions do not; fp32 cannot tell 1e-9.
    """
    module = isinstance(activation, nn.Module)
    if module and (blocked(activation) or [*activation.parameters(), *activation.buffers()]):
        return None
    with on_cpu():
        odd = torch.tensor([-200.0, -0.0, 200.0, float("nan")], dtype=torch.float64)
        x = torch.cat((torch.linspace(-12, 12, 977, dtype=torch.float64), odd))
    try:
        with on_cpu(), torch.no_grad(), torch.random.fork_rng(devices=[]):  # dropout draws
            # Not by a call of the module: hooks see no probes.
            got = (activation.forward if module else activation)(x.clone())
    except Exception:  # no function of any tensor: pooling, reshaping
        return None
    if not torch.is_tensor(got) or got.shape != x.shape or got.dtype != x.dtype:
        return None
    for name, function in ACTIVATIONS.items():
        if torch.allclose(got, function(x), rtol=1e-9, atol=1e-9, equal_nan=True):
            return name
    return None
