"""Gated activations of Megatron's MLPs."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tigon.error import check, refuse
from tigon.integrations.megatron.classes import core, derives_from, is_one_of
from tigon.integrations.transformers.forward import blocked
from tigon.ops.glu import geglu, swiglu
from tigon.ops.relu_squared import relu_squared

MLP = "megatron.core.transformer.mlp.MLP"
SHARED_EXPERTS = "megatron.core.transformer.moe.shared_experts.SharedExpertMLP"
GROUPED_EXPERTS = "megatron.core.transformer.moe.experts."
GROUPED_MLP = GROUPED_EXPERTS + "TEGroupedMLP"


def bias_swiglu_impl(input, bias, fp8_input_store=False, cpu_offload_input=False, clamp_value=None):
    """Megatron's function of this name: ``silu(gate) * up`` of ``input + bias``, halves of ``[..., 2F]``.

    Args:
        input: ``[..., 2F]`` float32, bfloat16 or float16, gate first.
        bias: ``[2F]`` or ``None``.
        fp8_input_store, cpu_offload_input: if set, Megatron's own function runs.
        clamp_value: gate at most this, up between minus and plus this (Megatron after 0.19).

    Returns:
        ``[..., F]`` in the input's dtype, rounded once.
    """
    if fp8_input_store or cpu_offload_input:
        return _megatron("bias_swiglu_impl", clamp_value, input, bias, fp8_input_store, cpu_offload_input)
    return _clamped_swiglu(input if bias is None else input + bias, clamp_value)


def weighted_bias_swiglu_impl(input, bias, weights, fp8_input_store=False, clamp_value=None):
    """Megatron's function of this name: SwiGLU of ``input``, times one weight a token (router probability).

    Args:
        input: ``[..., 2F]``, gate first.
        bias: must be ``None``, as in Megatron.
        weights: ``[..., 1]``; its dtype may be wider than input's. Differentiable.
        fp8_input_store: if set, Megatron's own function runs.
        clamp_value: as in :func:`bias_swiglu_impl`.

    Returns:
        ``[..., F]`` in the input's dtype.
    """
    op = "weighted_bias_swiglu"
    check(op, bias is None, "bias must be None (Megatron's function takes none either), got a tensor")
    if fp8_input_store:
        return _megatron("weighted_bias_swiglu_impl", clamp_value, input, bias, weights, True)
    return (_clamped_swiglu(input, clamp_value) * weights).to(input.dtype)


def bias_geglu_impl(input, bias):
    """Megatron's function of this name: ``gelu(gate) * up`` of ``input + bias``, gelu by tanh."""
    return geglu(input if bias is None else input + bias)


def _megatron(name, clamp_value, *args):
    """Call Megatron's own function; before 0.19 it takes no clamp."""
    function = getattr(core("fusions.fused_bias_swiglu", name), name)
    return function(*args, *(() if clamp_value is None else (clamp_value,)))


def _clamped_swiglu(x, limit):
    check("bias_swiglu", limit is None or limit > 0, "clamp_value must be > 0, got {}", limit)
    return swiglu(x, limit=limit)


# Named, so that a model that holds them can be pickled.


def _geglu_exact(x):
    return geglu(x, approximate="none")


def plan_activation(config):
    """(function of fc1's output and bias, its name), or why Megatron's own must run."""
    act = config.activation_func
    if not config.gated_linear_unit:
        known = getattr(act, "__name__", "") == "squared_relu"
        return (relu_squared, "tigon.relu_squared") if known else "not gated"
    if config.activation_func_fp8_input_store:
        return "its input is kept in FP8 (activation_func_fp8_input_store)"
    if getattr(config, "cpu_offloading", False) and config.cpu_offloading_activations:
        return "its input is offloaded to the CPU (cpu_offloading)"
    clamp = getattr(config, "activation_func_clamp_value", None)
    if clamp is not None or getattr(config, "glu_linear_offset", 0.0):
        return "it clamps its input or shifts the linear half"
    if act is F.silu:
        return swiglu, "tigon.swiglu"
    if act is F.gelu:  # Megatron's fused form takes tanh, its other form erf
        fused = config.bias_activation_fusion
        return (geglu, "tigon.geglu") if fused else (_geglu_exact, "tigon.geglu (exact)")
    return f"no kernel for {getattr(act, '__name__', act)}"


class Activation(nn.Module):
    """The activation slot (``use_te_activation_func``): the config's gated activation.

    Args:
        config: Megatron's ``TransformerConfig``.

    Raises:
        tigon.Error: Tigon has no kernel for it.
    """

    def __init__(self, config):
        super().__init__()
        plan = plan_activation(config)
        if isinstance(plan, str):
            refuse("megatron.Activation", "config must name an activation with a kernel, got: {}", plan)
        self.function, self.name = plan

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


def plan_mlp(module: nn.Module):
    """(function, its name) for an MLP that takes an activation, why it is left, or None: no MLP."""
    if is_one_of(module, GROUPED_MLP):
        if getattr(module, "_with_fused_impl", False):
            return "Transformer Engine runs matmuls and activation in one (use_transformer_engine_op_fuser)"
    elif not derives_from(module, MLP):
        grouped = type(module).__module__ + "." == GROUPED_EXPERTS and hasattr(module, "activation_func")
        return "experts in grouped matmuls call their activation themselves" if grouped else None
    elif not is_one_of(module, MLP, SHARED_EXPERTS):
        return "a class of its own, whose forward need not be MLP's"
    if module.config.use_te_activation_func:
        ours = isinstance(module.activation_func, Activation)
        return (None, module.activation_func.name) if ours else "use_te_activation_func is set"
    return blocked(module) or plan_activation(module.config)


def changed(config, configs: dict, **values):
    """A copy of a config with other values, the same one for the same config; no other code reads it."""
    key = (id(config), *values)
    if key not in configs:
        configs[key] = copy.copy(config)
        vars(configs[key]).update(values)
    return configs[key]
