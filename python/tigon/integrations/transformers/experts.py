"""Experts of MoE models: the gate between their two grouped products -> tigon.swiglu and relatives.

transformers runs experts through a registry (`experts_implementation`: grouped_mm, batched_mm, and
what others register). Each implementation sorts tokens, multiplies, and calls the module's
`_apply_gate` in between; that is the one thing replaced, on the instance. Routing, expert
parallelism, biases and the auxiliary losses of the router are whatever the implementation does.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from tigon.integrations.transformers.canonical import Unrecognised, canonical_forward, canonical_method
from tigon.integrations.transformers.forward import blocked, bound, plain, stock
from tigon.integrations.transformers.mlp import FUSED, clamped_product, known_activation, product
from tigon.integrations.transformers.patterns.modules import BATCHED_EXPERTS, EXPERT_GATES, match
from tigon.ops.glu import swiglu, swiglu_oai
from tigon.ops.relu_squared import relu_squared

GATE = "_apply_gate"


@dataclass(frozen=True)
class GateSpec:
    """What the gate of an experts module is."""

    activation: str | None = None
    alpha: str | None = None
    limit: str | None = None
    clamp_after: bool = False
    halves: bool = False  # gpt-oss' gate, its columns not by turns


@dataclass(frozen=True)
class BatchedSpec:
    """Attribute names of experts that multiply all of them in one batch (Llama 4)."""

    activation: str
    gate_up: str
    down: str
    size: str


def gate_forward(module: nn.Module, spec: GateSpec, gate_up):
    """`_apply_gate` of a recognised experts module."""
    if not plain(gate_up):
        return getattr(type(module), GATE)(module, gate_up)
    if spec.activation is not None and spec.limit is not None:
        gate, up = gate_up.chunk(2, dim=-1)
        return clamped_product(spec.activation, gate, up, getattr(module, spec.limit), spec.clamp_after)
    if spec.activation is not None:
        return product(spec.activation, gate_up, None)
    alpha, limit = getattr(module, spec.alpha), getattr(module, spec.limit)
    if not spec.halves:
        return swiglu_oai(gate_up, alpha=alpha, limit=limit)
    gate, up = gate_up.chunk(2, dim=-1)  # g * sigmoid(alpha * g) is silu(alpha * g) / alpha
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit) + 1
    return swiglu(gate, up, gate_multiplier=alpha, down_multiplier=1 / alpha)


def batched_forward(module: nn.Module, spec: BatchedSpec, hidden):
    """Forward of experts that see every token."""
    gate_up_weight, down_weight = getattr(module, spec.gate_up), getattr(module, spec.down)
    if not plain(hidden, gate_up_weight, down_weight):
        return stock(module, hidden)
    size = getattr(module, spec.size)
    gate_up = torch.bmm(hidden.view(gate_up_weight.shape[0], -1, size), gate_up_weight)
    return torch.bmm(product(spec.activation, gate_up, None), down_weight).view(-1, size)


def squared_forward(module: nn.Module, spec: None, x):
    """Forward of an activation module that squares ReLU."""
    return relu_squared(x) if plain(x) else stock(module, x)


def plan_experts(module: nn.Module) -> tuple | str | None:
    """(function, module and name it is bound to, spec, what it is), or why experts are left, or None."""
    if hasattr(module, GATE) and (hasattr(module, "has_gate") or _calls_gate(module)):
        return _plan_gate(module)
    stacked = [name for name, p in module.named_parameters(recurse=False) if p.ndim == 3]
    if not any(name.startswith("gate_up") for name in stacked) and not (
        len(stacked) > 1 and _activates(module)
    ):
        return None
    try:
        found = match(canonical_forward(type(module)), BATCHED_EXPERTS)
        why = "no form of experts in the table"
    except Unrecognised as error:
        found, why = None, str(error)
    if found is None:
        return f"unrecognised forward: {why}"
    roles = dict(found.roles)
    activation, reason = _activation(module, roles.pop("act"))
    reason = blocked(module) or reason
    if reason is not None:
        return reason
    label = f"{FUSED[activation][0]} ({found.structure.name})"
    return batched_forward, module, "forward", BatchedSpec(activation, **roles), label


def _activates(module) -> bool:
    """An activation beside stacked weights, and no convolution, which would be a mixer's."""
    kinds = [type(child).__module__ for child in module.children()]
    return any("activation" in kind for kind in kinds) and not any("conv" in kind for kind in kinds)


def _plan_gate(module):
    if GATE in module.__dict__ and bound(module, GATE) is None:
        return "its gate is bound to the instance by another patch"
    if not getattr(module, "has_gate", True):
        return _plan_ungated(module)
    try:
        found = match(canonical_method(type(module), GATE), EXPERT_GATES)
    except Unrecognised as error:
        return f"unrecognised gate: {error}"
    if found is None:
        return "a gate that no op of tigon computes"
    reason = _inline_loop(module)
    if reason is not None:
        return reason
    fields = {**found.structure.options, **found.roles}
    if "act" in fields:
        fields["activation"], reason = _activation(module, fields.pop("act"))
        if reason is not None:
            return reason
    op = "tigon.swiglu_oai" if "alpha" in fields else FUSED[fields["activation"]][0]
    op = "tigon.swiglu" if "halves" in fields else op
    return gate_forward, module, GATE, GateSpec(**fields), f"{op} ({found.structure.name})"


def _plan_ungated(module):
    """Experts with one product before the activation: the square of ReLU is two passes."""
    activation = module.act_fn
    if known_activation(activation) != "relu_squared":
        return None
    reason = blocked(activation)
    if reason is not None:
        return reason
    return squared_forward, activation, "forward", None, "tigon.relu_squared (experts)"


def _activation(module, name) -> tuple[str | None, str | None]:
    known = known_activation(getattr(module, name))
    if known in FUSED:
        return known, None
    return None, f"activation {type(getattr(module, name)).__name__} has no fused product"


def _calls_gate(module) -> bool:
    """Whether the forward that the class was written with calls the gate, registry or not."""
    return GATE in inspect.unwrap(type(module).forward).__code__.co_names


def _inline_loop(module) -> str | None:
    """Why the chosen implementation never calls the gate, or None."""
    if _calls_gate(module):
        return None
    if getattr(module.config, "_experts_implementation", None) not in ("eager", None):
        return None
    return "experts_implementation='eager' computes the gate inline; set_experts_implementation('grouped_mm')"
