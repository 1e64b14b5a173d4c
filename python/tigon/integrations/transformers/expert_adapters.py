"""PEFT's adapters of stacks of experts (`target_parameters`) -> adapters of tigon.experts.

PEFT nests a ParamWrapper for each parameter around a layer of experts. Its forward adds ``scale * B @ A`` to
the whole stack. Here the outermost wrapper hands A and B to the op. PEFT keeps parameters, names and methods.
Every call looks at the state of all wrappers. PEFT's forward runs what the op does not compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from tigon.error import refuse
from tigon.integrations.transformers.experts import (
    IMPLEMENTATION,
    LAYER,
    batched_forward,
    implementation,
    layer_forward,
    run_batched,
    run_layer,
)
from tigon.integrations.transformers.forward import (
    LINEAR,
    bound,
    calls_forward,
    foreign,
    has_hooks,
    intact,
    stock,
)
from tigon.integrations.transformers.head_operands import is_linear


class AdapterSpec(NamedTuple):
    """Holds the forward that the class of the experts had before."""

    forward: Callable


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper around the stacked parameters of another one."""
    return type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft.")


def _unwrapped(module: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The wrappers of a layer of experts, the outermost first, and the layer."""
    wrappers = []
    while is_wrapper(module):
        wrappers.append(module)
        module = module.base_layer
    return wrappers, module


def _run_of(base: nn.Module, planned: dict[int, Callable]) -> Callable | None:
    """The replacement that runs a layer of experts: bound to it, or about to be."""
    run = planned.get(id(base)) or next((b.function for b in (bound(base, LAYER), bound(base)) if b), None)
    return run if run in (layer_forward, batched_forward) else None


def _refuse_codes(wrapper) -> None:
    """PEFT adds what the adapter computes to the codes of a quantised parameter, and clamps the sum."""
    dtype, name = wrapper.get_param().dtype, wrapper.parameter_name
    if dtype.itemsize < 2:
        refuse(
            "apply",
            "target_parameters must name parameters that are not quantised, got {} of {}: PEFT would add the "
            "adapter to its codes, without their scales (load the model with dequantize=True)",
            name,
            dtype,
        )


def plan_wrapper(module: nn.Module, planned: dict[int, Callable]) -> tuple[AdapterSpec, str] | str:
    """Plan the outermost wrapper of a layer of experts; `planned`: what is about to be bound, by identity."""
    wrappers, base = _unwrapped(module)
    for wrapper in wrappers:
        _refuse_codes(wrapper)
    names = [wrapper.parameter_name for wrapper in reversed(wrappers)]
    run = _run_of(base, planned)
    if run is None:
        return f"tigon.experts does not run {type(base).__name__}"
    others = [name for name in names if name not in ("gate_up_proj", "up_proj", "down_proj")]
    if others or foreign(base):
        return (
            f"tigon.experts has no adapter of {others[0]}" if others else "the experts have another forward"
        )
    adapters = _adapters(wrappers, base, run)
    now = f"; PEFT's forward now: {adapters}" if isinstance(adapters, str) else ""
    return AdapterSpec(type(base).forward), f"tigon.experts (adapters of {', '.join(names)}{now})"


def _adapters(wrappers, base, run) -> dict[str, tuple] | str:
    """(a, b, scale) by parameter, or why PEFT computes this call."""
    transposed, adapters = run is batched_forward or base.is_transposed, {}
    inside = (*wrappers[1:], base)
    if any(has_hooks(module) or foreign(module) or not calls_forward(module) for module in inside):
        return "a hook or another forward inside"
    for wrapper in wrappers:
        if wrapper.disable_adapters or wrapper.merged:
            return "adapters are merged" if wrapper.merged else "adapters are disabled"
        active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        if len(active) > 1:
            return "several adapters are active"
        for name in active:
            parts = wrapper.lora_A[name], wrapper.lora_B[name]
            if not all(is_linear(p) and intact(p, LINEAR) and p.bias is None for p in parts):
                return "a part of an adapter is not a plain Linear"
            if type(wrapper.scaling[name]) not in (int, float):
                return "a scale is no number"
            first, second = (part.weight for part in parts)
            if hasattr(first, "ds_id") or not first.numel():
                return "the parameters are sharded"
            # PEFT stores rows of A by expert, and columns of B with the expert as the fastest index.
            a = torch.unflatten(first, 0, (wrapper.num_experts, -1))
            b = torch.unflatten(second, 1, (-1, wrapper.num_experts)).permute(2, 0, 1)
            # A belongs to the last dimension if PEFT has swapped them, else to the one after the experts.
            if bool(getattr(wrapper, "_did_swap_in_out_features", False)) == transposed:
                a, b = b.mT, a.mT
            adapters[wrapper.parameter_name] = a, b, wrapper.scaling[name]
    return adapters


def wrapper_forward(module: nn.Module, spec: AdapterSpec, *args, **kwargs):
    """Run the experts inside PEFT's wrappers with their adapters, or the wrapper as PEFT does."""
    wrappers, base = _unwrapped(module)
    run, y = _run_of(base, {}), None
    if run is not None and not kwargs and type(base).forward is spec.forward:
        adapters = _adapters(wrappers, base, run)
        if isinstance(adapters, dict) and run is batched_forward:
            y = run_batched(base, bound(base).spec, *args, adapters=adapters)
        elif isinstance(adapters, dict) and implementation(base) == IMPLEMENTATION:
            y = run_layer(base, bound(base, LAYER).spec, *args, adapters=adapters)
    return stock(module, *args, **kwargs) if y is None else y
