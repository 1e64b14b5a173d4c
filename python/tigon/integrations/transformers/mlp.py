"""MLPs: act(gate) * up -> tigon.swiglu and its relatives, relu(up)^2 -> tigon.relu_squared.

The child Linears are called, never read: LoRA, quantisation, tensor parallelism and FSDP live in
them. Only what lies in between is fused.
"""

from __future__ import annotations

import ast
import functools
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from tigon.integrations.transformers.canonical import NoSource, source_tree
from tigon.integrations.transformers.forward import (
    LINEAR,
    Part,
    blocked,
    has_hooks,
    intact,
    plain,
    read,
    stock,
)
from tigon.integrations.transformers.patterns.mlp import MLPS
from tigon.integrations.transformers.recognition import Match, on_cpu, recognise
from tigon.integrations.transformers.recompute import Ledger
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
GELUS = {"none": "gelu", "tanh": "gelu_tanh"}  # by torch's name of the approximation


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


def gated_unit(activation, gate, up, gate_multiplier=1.0, down_multiplier=1.0, limit=None, after=False):
    """Compute act(gate_multiplier * gate) * up * down_multiplier; without `up`, gate holds both as halves.

    With a limit the gate is clamped above, before or after act, and up on both sides.
    """
    fits = plain(gate) if up is None else plain(gate, up) and gate.dtype == up.dtype
    options = {"gate_multiplier": gate_multiplier, "down_multiplier": down_multiplier}
    if limit is not None:
        options = {"limit": limit}
        fits = fits and not after and 0 < limit < math.inf
    elif (gate_multiplier, down_multiplier) == (1.0, 1.0):
        options = {}
    if fits and (activation == "silu" or not options):
        return FUSED[activation][1](gate, up, **options)
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    act = ACTIVATIONS[activation]
    if limit is None:
        return act(gate * gate_multiplier) * up * down_multiplier if options else act(gate) * up
    up = up.clamp(min=-limit, max=limit)
    if after:
        return act(gate).clamp(max=limit) * up
    return gated_unit(activation, gate.clamp(max=limit), up)


def fused_activation(module: nn.Module, name: str) -> tuple[str | None, str | None]:
    """The activation that a module has under this name, or why it cannot be fused."""
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
    if module and (
        blocked(activation) or [*activation.parameters(), *activation.buffers(), *activation.children()]
    ):
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


@dataclass(frozen=True)
class MlpSpec:
    """Names of the child modules and numbers of one MLP, and its activation."""

    activation: str
    down: str | None = None  # the projection of act(gate) * up, if it is in this module
    gate: str | None = None
    up: str | None = None
    gate_up: str | None = None
    gate_multiplier: str | None = None
    down_multiplier: str | None = None
    up_first: bool = False  # of gate_up
    up_called_first: bool = False  # dropout of LoRA draws in the order of the calls
    limit: str | None = None  # gate clamped above, up on both sides
    clamp_after: bool = False  # the activated gate is clamped, not the gate
    before: tuple[str, ...] = ()  # modules or methods that x goes through
    middle: str | None = None  # dropout or norm of act(gate) * up
    dropout: str | None = None  # attribute with the probability for the result
    part: Part | None = None  # the activation, if it is an attribute
    cast: bool = False  # act(gate) * up takes the dtype of down's weight (T5 keeps that one in fp32)
    ledger: Ledger = field(default_factory=Ledger, repr=False, compare=False)  # the model's


def mlp_forward(module: nn.Module, spec: MlpSpec, x, layer=None):
    """Run a recognised MLP; one with weights by layer (Moshi) runs its original forward."""
    if layer is not None:
        return stock(module, x, layer)
    if spec.part is not None and not spec.part.is_in(module):
        return stock(module, x)
    for name in spec.before:
        x = getattr(module, name)(x)
    down = None if spec.down is None else getattr(module, spec.down)
    first, second = spec.gate or spec.gate_up, spec.up
    names = (second, first) if spec.up_called_first else (first, second)
    called = {name: getattr(module, name)(x) for name in names if name is not None}
    gate, up = called.get(first), called.get(second)
    if gate is None:
        return down(relu_squared(up) if plain(up) else ACTIVATIONS["relu_squared"](up))
    if spec.up_first:
        up, gate = gate.chunk(2, dim=-1)
    if spec.gate_multiplier is not None:
        before, after = read(module, spec.gate_multiplier, spec.down_multiplier)
        if intact(down, LINEAR) and down.bias is None:  # linear: the factor may come before it
            return spec.ledger.project(down, gated_unit(spec.activation, gate, up, before, after))
        return spec.ledger.project(down, gated_unit(spec.activation, gate, up, before)) * after
    limit = None if spec.limit is None else getattr(module, spec.limit)
    inner = gated_unit(spec.activation, gate, up, limit=limit, after=spec.clamp_after)
    if spec.middle is not None:
        inner = getattr(module, spec.middle)(inner)
    if spec.cast and isinstance(down.weight, torch.Tensor) and down.weight.dtype != torch.int8:
        inner = inner.to(down.weight.dtype)
    if down is None:
        return inner
    y = spec.ledger.project(down, inner)
    if spec.dropout is not None:
        y = F.dropout(y, p=getattr(module, spec.dropout), training=module.training)
    return y


def plan_mlp(module: nn.Module) -> tuple[MlpSpec, str] | str | None:
    """Plan an MLP: (spec, op), why it is left, or None for a module of another kind."""
    if next(module.children(), None) is None:
        return None
    match = recognise(module, MLPS)
    if not isinstance(match, Match):
        why = match or "not act(gate) * up between two matmuls"
        return f"unrecognised forward: {why}" if _looks_gated(module) else None
    roles, options = dict(match.roles), dict(match.structure.options)
    if "up" in roles and getattr(module, roles["up"]) is None:
        return None
    ungated = not {"gate", "gate_up"} & roles.keys()
    if ungated and known_activation(getattr(module, roles["act"])) != "relu_squared":
        return None  # one pass already, and any three modules in a row have this form
    act = roles.pop("act", None)
    if "config" in roles:
        options["activation"] = GELUS.get(getattr(module, roles.pop("config")).gelu_approximate)
    if act is None:
        activation = options.pop("activation", "silu")
        reason = None if activation else "its gelu is no approximation that torch knows"
    else:
        activation, reason = fused_activation(module, act)
    reason = blocked(module) or reason or _multipliers(module, roles)
    if reason is not None:
        return reason
    op = "tigon.relu_squared" if ungated else FUSED[activation][0]
    before = tuple(roles.pop(f"before{i}") for i in range(3) if f"before{i}" in roles)
    roles.pop("training", None)
    part = None if act is None else Part.named(module, act)
    calls = [name for name in match.calls if name in (roles.get("up"), roles.get("gate"))]
    up_first = len(calls) == 2 and calls[0] == roles["up"]
    return MlpSpec(
        activation, before=before, part=part, up_called_first=up_first, **{**options, **roles}
    ), f"{op} ({match.structure.name})"


def _multipliers(module: nn.Module, roles: dict) -> str | None:
    """Why the factors of an MLP cannot be used, or None."""
    for role in ("gate_multiplier", "down_multiplier"):
        value = getattr(module, roles[role]) if role in roles else 1.0
        if not isinstance(value, int | float):
            return f"{roles[role]} is {value!r}, not a number"
    return None


def _looks_gated(module: nn.Module) -> bool:
    """Whether a module multiplies with its own activation, so that the report should list it if it is left.

    Experts have a slot of their own; mixers with convolutions and layers with attention gate too, but
    that is not all they do.
    """
    if any(p.ndim == 3 for p in module.parameters(recurse=False)):
        return False
    if any("conv" in type(child).__module__ for child in module.children()):
        return False
    if any("attention" in type(part).__name__.lower() for part in module.modules()):
        return False
    activations = {name for name, child in module.named_children() if "activation" in type(child).__module__}
    return bool(activations) and _multiplies(type(module).forward, frozenset(activations))


@functools.cache
def _multiplies(forward, activations: frozenset) -> bool:
    """Whether a factor of a product in the source is, or holds, what an activation returned."""
    try:
        tree = source_tree(forward)
    except NoSource:
        return False

    def activated(node):
        return isinstance(node, ast.Call) and getattr(node.func, "attr", None) in activations

    assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    targets = (t for node in assigned if any(map(activated, ast.walk(node.value))) for t in node.targets)
    held = {target.id for target in targets if isinstance(target, ast.Name)}
    operations = (node for node in ast.walk(tree) if isinstance(node, ast.BinOp))
    products = (node for node in operations if isinstance(node.op, ast.Mult))
    factors = (side for node in products for side in (node.left, node.right))
    return any(activated(side) or (isinstance(side, ast.Name) and side.id in held) for side in factors)
