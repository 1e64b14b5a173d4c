"""PEFT's LoRA layers: base and low-rank products of all active adapters in one call each way.

The layer's class, parameters, names and methods stay PEFT's. Every call looks at the layer's state, so that
merged, disabled and switched adapters do what they did; what the native call does not compute is PEFT's
forward as before.
"""

from __future__ import annotations

import torch
from torch import nn

from tigon.integrations.transformers.forward import autocast_dtype, blocked, foreign, has_hooks, plain, stock
from tigon.integrations.transformers.head_operands import is_linear
from tigon.ops.lora_linear import Adapter, Base, adapted, draw_seed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PARTS = ("base_layer", "lora_A", "lora_B", "active_adapters", "scaling")


def plan_lora(module: nn.Module) -> tuple[None, str] | str | None:
    """(no options, what it is), why a LoRA layer is left, or None where there is none."""
    if not type(module).__module__.startswith("peft.") or not all(hasattr(module, p) for p in _PARTS):
        return None
    name = type(module).__name__
    if name not in ("Linear", "Linear4bit"):
        return f"lora.{name} is not an adapter of a plain or 4-bit Linear"
    base = module.base_layer
    if not (is_linear(base) or _is_4bit(base)):
        return f"the base is {type(base).__name__}, not nn.Linear"
    if foreign(base):
        return "the base's forward is bound to the instance (tensor parallel, kernels or another patch)"
    variants = {type(v).__name__ for v in getattr(module, "lora_variant", {}).values()}
    others = variants - {"DoraLinearVariant"}
    if others:
        return f"{', '.join(sorted(others))} changes what the adapter computes"
    return blocked(module) or (None, "tigon.lora_linear")


def lora_forward(module: nn.Module, spec: None, x, *args, **kwargs):
    """Forward of a LoRA layer."""
    del spec
    state = None if args or kwargs else _state(module, x)
    if state is None:
        return stock(module, x, *args, **kwargs)
    dtype, base, adapters, magnitude = state
    x = x.to(dtype)
    drops = any(adapter.dropout for adapter in adapters)
    bias = None if magnitude is None else base.bias
    if magnitude is not None:
        base = base._replace(bias=None)
    (y,) = adapted(x, [base], adapters, draw_seed(x) if drops else None)
    if magnitude is None:
        return y
    y = y * (magnitude / _row_lengths(_dense(base), *adapters))
    return (y if bias is None else y + bias).to(dtype)


def _dense(base: Base) -> torch.Tensor:
    return base.weight if isinstance(base.weight, torch.Tensor) else base.weight()


def _state(module, x) -> tuple[torch.dtype, Base, list[Adapter], torch.Tensor | None] | None:
    """What this call multiplies with, in which dtype, and DoRA's lengths; None: PEFT computes it."""
    base = module.base_layer
    quantised = _is_4bit(base)
    if module.disable_adapters or module.merged or has_hooks(base) or foreign(base):
        return None
    if not (quantised and not torch.compiler.is_compiling()) and not is_linear(base):
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    autocast = autocast_dtype(x.device.type)
    dtype, bias = autocast or x.dtype, base.bias
    if not active or dtype not in _DTYPES or not plain(x, base.weight if not quantised else x):
        return None
    weight = _quantised(base, dtype) if quantised else base.weight
    if not quantised:
        if hasattr(weight, "ds_id") or weight.device != x.device or x.shape[-1] != weight.shape[1]:
            return None  # ZeRO-3 gathers in the parts' hooks
        if autocast is None and weight.dtype != x.dtype:
            return None  # an error in stock, which shall come
        weight = weight.to(dtype)
    variants = getattr(module, "lora_variant", {})
    adapters, magnitude = [], None
    for name in active:
        a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        if not (is_linear(a) and is_linear(b)) or has_hooks(a) or has_hooks(b) or has_hooks(dropout):
            return None
        if not plain(a.weight, b.weight) or a.weight.device != x.device or hasattr(a.weight, "ds_id"):
            return None
        if a.weight.dtype not in _DTYPES or b.weight.dtype != a.weight.dtype:
            return None
        if adapters and a.weight.dtype != adapters[0].a.dtype:
            return None
        scale = module.scaling[name]
        p = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        if type(dropout) not in (nn.Dropout, nn.Identity) or not 0 <= p < 1 or not isinstance(scale, int | float):
            return None
        if name in variants:
            if type(variants[name]).__name__ != "DoraLinearVariant" or len(active) > 1 or p > 0:
                return None  # several adapters add up in another way, and dropout is of the base product too
            magnitude = module.lora_magnitude_vector[name].weight
            if magnitude.device != x.device or b.bias is not None:
                return None
        if b.bias is not None:
            part = b.bias * scale
            bias = part if bias is None else bias + part
        adapters.append(Adapter(0, a.weight, b.weight, float(scale), float(p)))
    return dtype, Base(weight, None if bias is None else bias.to(dtype)), adapters, magnitude


def _row_lengths(weight, adapter: Adapter) -> torch.Tensor:
    """Lengths of the rows of ``weight + scale * b @ a``, which is not formed; constants to autograd."""
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        a, b = adapter.a.float(), adapter.b.float()
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        cross = ((weight @ a.to(weight.dtype).t()).float() * b).sum(1)
        own = ((b @ (a @ a.t())) * b).sum(1)
        return (squares + 2 * adapter.scale * cross + adapter.scale**2 * own).clamp(min=0).sqrt()


def _is_4bit(base: nn.Module) -> bool:
    """Whether it is bitsandbytes' Linear of 4-bit weights."""
    return type(base).__name__ == "Linear4bit" and type(base).__module__.startswith("bitsandbytes.")


def _quantised(base: nn.Module, dtype: torch.dtype):
    """What makes the weight in `dtype`, for one direction at a time."""
    from peft.utils.integrations import dequantize_module_weight

    def dequantise():
        with torch.no_grad():
            return dequantize_module_weight(base).detach().to(dtype)

    return dequantise
