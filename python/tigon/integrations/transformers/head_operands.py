"""The operands of a head that only multiplies: weight, bias and an adapter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from tigon.integrations.transformers.forward import LINEAR, intact, plain, written

LORA_PARTS = ("base_layer", "lora_A", "lora_B", "active_adapters", "scaling")


class HeadOperands(NamedTuple):
    """`hidden @ weight.T + bias`, and `scale * hidden @ A.T @ B.T` of a LoRA (A, B, scale)."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    lora: tuple | None = None


def is_linear(module: nn.Module) -> bool:
    """Whether the class of a module computes what nn.Linear does."""
    return isinstance(module, nn.Linear) and type(module).forward is LINEAR


def is_lora(module: nn.Module) -> bool:
    """Whether it is PEFT's LoRA (or DoRA) around a plain Linear."""
    return all(hasattr(module, part) for part in LORA_PARTS) and is_linear(module.base_layer)


def is_tokens(module: nn.Module) -> bool:
    """Whether it is PEFT's layer of trainable rows around a plain Linear without bias (a tied head)."""
    parts = ("base_layer", "trainable_tokens_delta", "get_merged_weights", "active_adapters")
    if not all(hasattr(module, part) for part in parts):
        return False
    return is_linear(module.base_layer) and module.base_layer.bias is None


def head_operands(module: nn.Module) -> HeadOperands | None:
    """The operands of this call, or None if the head does more than multiply."""
    if is_tokens(module):
        return _tokens(module)
    if not is_lora(module):
        return HeadOperands(module.weight, module.bias) if is_linear(module) else None
    if not intact(module.base_layer, LINEAR):
        return None
    base = HeadOperands(module.base_layer.weight, module.base_layer.bias)
    if module.disable_adapters:
        return None if module.merged else base  # PEFT unmerges on the way
    adapters = [name for name in module.active_adapters if name in module.lora_A]
    if module.merged or not adapters:
        return base
    lora = _adapter(module, adapters[0]) if len(adapters) == 1 else None
    if lora is None or not plain(*lora[:2], base.weight):
        return None
    variant = module.lora_variant.get(adapters[0]) if hasattr(module, "lora_variant") else None
    if variant is None:
        return base._replace(lora=lora)
    magnitude = dora_magnitude(module, adapters[0])
    return None if magnitude is None else _dora(base, lora, magnitude)


def adapter_state(module: nn.Module) -> tuple:
    """The state by which a PEFT layer chooses its adapters; empty for other modules."""
    if not (is_lora(module) or is_tokens(module)):
        return ()
    scaling = tuple(getattr(module, "scaling", {}).items())
    return module.disable_adapters, tuple(module.merged_adapters), tuple(module.active_adapters), scaling


def _tokens(module):
    """The weight with its trainable rows, which PEFT copies at every call."""
    if module.disable_adapters and module.merged:
        return None
    active = [] if module.merged or module.disable_adapters else module.active_adapters
    if not active:  # the base is called
        return HeadOperands(module.base_layer.weight) if intact(module.base_layer, LINEAR) else None
    return HeadOperands(module.get_merged_weights(active)) if len(active) < 2 else None


def _adapter(module, name):
    """(A, B, scale) if the adapter is two matmuls."""
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if not (is_linear(a) and is_linear(b)) or a.bias is not None or b.bias is not None:
        return None
    if dropout_of(dropout) != 0.0:  # only the adapter takes the dropped input
        return None
    return (a.weight, b.weight, module.scaling[name]) if intact(a, LINEAR) and intact(b, LINEAR) else None


def dropout_of(part: nn.Module) -> float | None:
    """The present probability of an adapter's dropout; None if it is another module or has hooks."""
    kind = type(part)
    if kind not in (nn.Dropout, nn.Identity) or not intact(part, written(kind)):
        return None
    return part.p if kind is nn.Dropout and part.training else 0.0


def dora_magnitude(module: nn.Module, name: str) -> torch.Tensor | None:
    """The lengths that DoRA gives to rows; None if the adapter is no DoRA."""
    if type(module.lora_variant[name]).__name__ != "DoraLinearVariant":
        return None
    part = module.lora_magnitude_vector[name]
    return part.weight if intact(part, written(type(part))) else None


def _dora(base, lora, magnitude):
    """DoRA scales the rows of W + scale * B A to given lengths, their own taken as constant."""
    a, b, scale = lora
    weight = base.weight
    factor = (magnitude / row_lengths(weight, a, b, scale)).unsqueeze(-1)
    return HeadOperands((factor * weight).to(weight.dtype), base.bias, (a, factor * b, scale))


def blocks(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Slices of some rows each: PyTorch on the CPU copies tensors that it computes in another dtype."""
    return weight.split(64) if weight.is_cpu and not torch.compiler.is_compiling() else (weight,)


def row_lengths(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Lengths of the rows of ``weight + scale * b @ a``, at least float32. The sum is not formed.

    Autograd treats them as constants, as in DoRA.
    """
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a, b = a.to(dtype), b.to(dtype)
        lengths = [torch.linalg.vector_norm(rows, dim=1, dtype=dtype) for rows in blocks(weight)]
        squares = torch.cat(lengths).square()
        cross = ((weight @ a.to(weight.dtype).t()).to(dtype) * b).sum(1)
        own = ((b @ (a @ a.t())) * b).sum(1)
        return (squares + 2 * scale * cross + scale**2 * own).clamp(min=0).sqrt()
