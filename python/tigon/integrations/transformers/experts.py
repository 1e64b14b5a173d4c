"""Experts of MoE models -> tigon.experts, or the gate between their matmuls -> tigon.swiglu and relatives.

transformers runs experts through a registry (`experts_implementation`: grouped_mm, batched_mm, and what
others register). `tigon` is one of them: it runs a whole layer whose gate is recognised, under expert
parallelism too (ids of other processes cost nothing). If another implementation was requested, or a layer is
not in the registry, only the module's `_apply_gate` between the matmuls is replaced, on the instance.
Routers are replaced in `routers.py`; transformers computes the auxiliary losses of router logits.
"""

from __future__ import annotations

import inspect
import math
import weakref
from dataclasses import dataclass

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tigon._dtensor import KERNEL_DTYPES
from tigon.integrations.transformers.forward import (
    Part,
    autocast_dtype,
    bind,
    blocked,
    bound,
    follows,
    foreign,
    plain,
    stock,
)
from tigon.integrations.transformers.mlp import FUSED, fused_activation, gated_unit, known_activation
from tigon.integrations.transformers.patterns.mlp import BATCHED_EXPERTS, EXPERT_GATES
from tigon.integrations.transformers.recognition import Match, Structure, recognise
from tigon.ops.experts import KINDS, experts, grouped_mlp
from tigon.ops.glu import swiglu, swiglu_oai
from tigon.ops.relu_squared import relu_squared

EAGER = "experts_implementation='eager' computes the gate inline; set_experts_implementation('grouped_mm')"
GATE = "_apply_gate"
LAYER = "_tigon_experts"  # attribute of an instance with its forward under `tigon`
IMPLEMENTATION = "tigon"


@dataclass(frozen=True)
class ExpertsSpec:
    """The gate between the matmuls of experts; strings that are not its name are names of attributes."""

    activation: str | None = None
    alpha: str | None = None
    limit: str | None = None
    clamp_after: bool = False
    halves: bool = False  # gpt-oss' gate, its columns not alternating
    part: Part | None = None  # the activation, if it is an attribute
    before: str = ""  # what ran a whole layer before
    gate_up: str = ""  # of experts that multiply all of them in one batch (Llama 4)
    down: str = ""
    size: str = ""

    def intact(self, module: nn.Module) -> bool:
        """Whether the activation has no hooks and is the one for which the spec was made."""
        return self.part is None or self.part.is_in(module)


def _fields(module: nn.Module, found: Match) -> tuple[dict, str | None]:
    """The fields of the spec that a row of the table gives, and the reason if its activation is not fused."""
    fields, reason = {**found.structure.options, **found.roles}, None
    if "act" in fields:
        name = fields.pop("act")
        fields["part"] = Part.named(module, name)
        fields["activation"], reason = fused_activation(module, name)
    return fields, reason


def registered_forward(module: nn.Module, hidden_states, top_k_index, top_k_weights):
    """The implementation `tigon` of transformers' registry."""
    run = getattr(module, LAYER, None)
    if run is None and id(module.config) in _switched:  # by another model, of this configuration too
        return stock_layer(module, _switched[id(module.config)], hidden_states, top_k_index, top_k_weights)
    if run is None and not torch.compiler.is_compiling():  # chosen by name, without tigon.apply
        planned = _plan_layer(module)
        function, _, _, spec, _ = planned or (stock_layer, None, None, "grouped_mm", None)
        bind(function, module, spec, LAYER, of=GATE)
        run = getattr(module, LAYER)
    if run is None:
        return stock_layer(module, "grouped_mm", hidden_states, top_k_index, top_k_weights)
    return run(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, registered_forward)


@follows
def stock_layer(module: nn.Module, before: str, *args):
    """Run a layer with another implementation."""
    if before == "eager":
        loop = next((_loops[kind] for kind in type(module).__mro__ if kind in _loops), None)
        return (loop or _note_loop(type(module)))(module, *args)
    return ALL_EXPERTS_FUNCTIONS[before](module, *args)


_loops: dict[type, object] = {}  # class -> its loop over experts, before anybody gave it another forward


def _note_loop(kind: type):
    return _loops.setdefault(kind, inspect.unwrap(kind.forward))


@follows
def layer_forward(module: nn.Module, spec: ExpertsSpec, hidden, ids, weights):
    """Run a recognised layer; tensors without a kernel run the implementation used before."""
    y = run_layer(module, spec, hidden, ids, weights, {})
    return stock_layer(module, spec.before, hidden, ids, weights) if y is None else y


def run_layer(module: nn.Module, spec: ExpertsSpec, hidden, ids, weights, adapters: dict[str, tuple]):
    """Run a layer with adapters (a, b, scale) of its parameters; None if tigon.experts cannot."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    first, down, biases = getattr(module, name), module.down_proj, (None, None)
    if module.has_bias:
        biases = getattr(module, f"{name}_bias"), module.down_proj_bias
    tensors = (hidden, ids, weights, first, down, *(b for b in biases if b is not None))
    gate_is_own = GATE not in module.__dict__ and bound(module, LAYER).replaces_own()
    fits = plain(*tensors) and _fit(*tensors) and _adapters_fit(hidden, adapters)
    if not (fits and spec.intact(module) and gate_is_own):
        return None
    options = {"alpha": spec.alpha, "limit": spec.limit}
    options = {name: getattr(module, attribute) for name, attribute in options.items() if attribute}
    y = experts(
        hidden.to(first.dtype),
        first,
        down,
        ids,
        weights,
        activation=spec.activation,
        gated=module.has_gate,
        interleaved="alpha" in options and not spec.halves,
        transposed=module.is_transposed,
        gate_up_bias=biases[0],
        down_bias=biases[1],
        gate_up_lora=adapters.get(name),
        down_lora=adapters.get("down_proj"),
        **options,
    )
    return y.to(hidden.dtype)


def _adapters_fit(hidden, adapters) -> bool:
    """Whether the op takes the tensors of these adapters."""
    tensors = [t for adapter in adapters.values() for t in adapter[:2]]
    return plain(*tensors) and all(t.dtype in KERNEL_DTYPES and t.device == hidden.device for t in tensors)


def _parameters_fit(hidden, first, *rest) -> bool:
    """Whether the op takes these parameters: all have one dtype, and autocast asks for no other."""
    fits = first.dtype in KERNEL_DTYPES and autocast_dtype(hidden.device.type) in (None, first.dtype)
    return fits and all(p.dtype == first.dtype and p.device == hidden.device for p in (first, *rest))


def _fit(hidden, ids, weights, *parameters) -> bool:
    """Whether the op takes these tensors."""
    chosen = weights.dtype in KERNEL_DTYPES and hidden.ndim == ids.ndim == 2 and weights.shape == ids.shape
    return chosen and _parameters_fit(hidden, *parameters)


def gate_forward(module: nn.Module, spec: ExpertsSpec, gate_up):
    """Compute the gate between the matmuls of experts."""
    if not (plain(gate_up) and spec.intact(module)):
        return getattr(type(module), GATE)(module, gate_up)
    limit = None if spec.limit is None else getattr(module, spec.limit)
    if spec.activation is not None:
        return gated_unit(spec.activation, gate_up, None, limit=limit, after=spec.clamp_after)
    alpha = getattr(module, spec.alpha)
    if not spec.halves:
        return swiglu_oai(gate_up, alpha=alpha, limit=limit)
    gate, up = gate_up.chunk(2, dim=-1)  # g * sigmoid(alpha * g) is silu(alpha * g) / alpha
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit) + 1
    return swiglu(gate, up, gate_multiplier=alpha, down_multiplier=1 / alpha)


def batched_forward(module: nn.Module, spec: ExpertsSpec, hidden):
    """Run Llama 4's experts with the gate between their matmuls fused."""
    gate_up_weight, down_weight = getattr(module, spec.gate_up), getattr(module, spec.down)
    if not (plain(hidden, gate_up_weight, down_weight) and spec.intact(module)):
        return stock(module, hidden)
    size = getattr(module, spec.size)
    gate_up = torch.bmm(hidden.view(gate_up_weight.shape[0], -1, size), gate_up_weight)
    return torch.bmm(gated_unit(spec.activation, gate_up, None), down_weight).view(-1, size)


def run_batched(module: nn.Module, spec: ExpertsSpec, hidden, adapters: dict[str, tuple]):
    """Run Llama 4's experts and adapters; None if tigon.grouped_mlp does not take these tensors."""
    first, down = getattr(module, spec.gate_up), getattr(module, spec.down)
    fits = plain(hidden, first, down) and _parameters_fit(hidden, first, down)
    if not (fits and _adapters_fit(hidden, adapters) and spec.activation in KINDS and spec.intact(module)):
        return None
    rows = hidden.reshape(-1, first.shape[1]).to(first.dtype)
    ends = torch.arange(1, first.shape[0] + 1, device=rows.device) * (rows.shape[0] // first.shape[0])
    loras = {f"{name}_lora": adapters.get(getattr(spec, name)) for name in ("gate_up", "down")}
    return grouped_mlp(rows, first, down, ends, activation=spec.activation, transposed=True, **loras)


def squared_forward(module: nn.Module, spec: None, x):
    """Compute relu(x)^2 of an activation module."""
    return relu_squared(x) if plain(x) else stock(module, x)


def plan_experts(module: nn.Module) -> tuple | str | None:
    """(function, module and name it is bound to, spec, what it is), or why experts are left, or None."""
    if hasattr(module, GATE) and (hasattr(module, "has_gate") or _calls_gate(module)):
        layer = _plan_layer(module)
        return layer if isinstance(layer, tuple) else _plan_gate(module)
    stacked = [name for name, p in module.named_parameters(recurse=False) if p.ndim == 3]
    if not any(name.startswith("gate_up") for name in stacked) and not (
        len(stacked) > 1 and _activates(module)
    ):
        return None
    match = recognise(module, BATCHED_EXPERTS)
    if not isinstance(match, Match):
        return f"unrecognised forward: {match or 'no form of experts in the table'}"
    fields, reason = _fields(module, match)
    reason = blocked(module) or reason
    if reason is not None:
        return reason
    op = f"{FUSED[fields['activation']][0]} ({match.structure.name})"
    return batched_forward, module, "forward", ExpertsSpec(**fields), op


def uses_registry(module: nn.Module) -> bool:
    """Whether transformers' registry decides how these experts run."""
    return hasattr(module, "is_transposed") and hasattr(module, "config")


def implementation(module: nn.Module) -> str:
    """The name of the implementation that runs the experts of this configuration."""
    return getattr(module.config, "_experts_implementation", None) or "grouped_mm"


def _previous(module: nn.Module) -> str:
    """The name of the implementation that ran these experts before `tigon`, in copies too."""
    layer = bound(module, LAYER)
    known = None if layer is None else getattr(layer.spec, "before", layer.spec)
    return known or _switched.get(id(module.config), "grouped_mm")


def _plan_layer(module) -> tuple | None:
    """Plan the whole layer if the registry would run it by its default or by the loop of the class."""
    if not uses_registry(module) or implementation(module) not in ("eager", "grouped_mm", IMPLEMENTATION):
        return None
    if foreign(module) and not getattr(module, "_is_expert_parallel", False):
        return None  # expert parallelism calls the class's own forward inside
    if GATE in module.__dict__ or getattr(module, "has_post_expert_norm", False):
        return None
    before = implementation(module)
    before = _previous(module) if before == IMPLEMENTATION else before
    if before == "eager" and "float" in _note_loop(type(module)).__code__.co_names:
        return None  # its loop multiplies in float32
    match = Match(Structure("no gate", None, {}), {"act": "act_fn"})
    if module.has_gate:
        match = recognise(module, EXPERT_GATES, GATE)
    if not isinstance(match, Match):
        return None
    fields, _ = _fields(module, match)
    if "alpha" in fields:
        fields["activation"] = "swiglu_oai"
    elif "limit" in fields:
        clamped = "clamp_after" not in fields and 0 < getattr(module, fields["limit"]) < math.inf
        fields["activation"] = "swiglu_clamped" if fields["activation"] == "silu" and clamped else None
    if fields["activation"] not in KINDS:
        return None
    spec = ExpertsSpec(**fields, before=before)
    return layer_forward, module, LAYER, spec, f"tigon.experts ({match.structure.name})"


_switched: dict[int, str] = {}  # id of a configuration -> what ran the experts before `switch`


def switch(model: nn.Module, previous: dict[str, str | None]) -> None:
    """Make the registry choose `tigon` for the layers of `model` that it runs; fills `previous` by path."""
    modules = [(path, m) for path, m in model.named_modules() if uses_registry(m)]
    for path, module in modules:
        before = getattr(module.config, "_experts_implementation_internal", None)
        if bound(module, LAYER) is None:
            continue
        if before == IMPLEMENTATION:  # through another layer of this configuration; a copy has its own
            previous.setdefault(path, _previous(module))
        else:
            previous[path] = before
            module.config._experts_implementation_internal = IMPLEMENTATION
            if id(module.config) not in _switched:
                weakref.finalize(module.config, _switched.pop, id(module.config), None).atexit = False
            _switched[id(module.config)] = before or "grouped_mm"
            for _, other in modules:  # of one configuration, not recognised
                if other.config is module.config and bound(other, LAYER) is None:
                    bind(stock_layer, other, before or "grouped_mm", LAYER)


def switch_back(model: nn.Module, previous: dict[str, str | None]) -> None:
    """Undo `switch`, unless the program has chosen another implementation since."""
    modules = dict(model.named_modules())
    for path, before in previous.items():
        module = modules.get(path)
        while hasattr(module, "base_layer"):  # PEFT has wrapped it since
            module = module.base_layer
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation_internal", None) == IMPLEMENTATION:
            config._experts_implementation_internal = before
            _switched.pop(id(config), None)


def _activates(module) -> bool:
    """Whether a module has an activation and stacked weights, and no convolution, as mixers have."""
    kinds = [type(child).__module__ for child in module.children()]
    return any("activation" in kind for kind in kinds) and not any("conv" in kind for kind in kinds)


def _plan_gate(module):
    if GATE in module.__dict__ and bound(module, GATE) is None:
        return "its gate is bound to the instance by another patch"
    if not getattr(module, "has_gate", True):
        if known_activation(module.act_fn) != "relu_squared":  # whose square is two passes
            return None
        by = "tigon.relu_squared (experts)"
        return blocked(module.act_fn) or (squared_forward, module.act_fn, "forward", None, by)
    match = recognise(module, EXPERT_GATES, GATE)
    if isinstance(match, str):
        return f"unrecognised gate: {match}"
    if match is None:
        return "a gate that no op of tigon computes"
    if not _calls_gate(module) and getattr(module.config, "_experts_implementation", None) in ("eager", None):
        return EAGER
    fields, reason = _fields(module, match)
    if reason is not None:
        return reason
    op = "tigon.swiglu_oai" if "alpha" in fields else FUSED[fields["activation"]][0]
    op = "tigon.swiglu" if "halves" in fields else op
    return gate_forward, module, GATE, ExpertsSpec(**fields), f"{op} ({match.structure.name})"


def _calls_gate(module) -> bool:
    """Whether the forward that the class was written with calls the gate, registry or not."""
    return GATE in inspect.unwrap(type(module).forward).__code__.co_names
