"""Norms: modules with the constructor of Megatron's slots, and forwards for the norms of a built model."""

from __future__ import annotations

import torch
from torch import nn

from tigon import nn as tigon_nn
from tigon._op import has_kernel, once
from tigon.error import check
from tigon.integrations.megatron.classes import class_name, is_one_of
from tigon.integrations.transformers.forward import blocked, plain, stock
from tigon.ops import add_rms_norm as _residual
from tigon.ops import rms_norm as _rms
from tigon.ops.columns import columns_for
from tigon.ops.layer_norm import layer_norm

FUSED_LAYER_NORM = "megatron.core.fusions.fused_layer_norm.FusedLayerNorm"  # Apex
L2_NORM = "megatron.core.transformer.torch_norm.L2Norm"


def centered(weight: torch.Tensor) -> torch.Tensor:
    """1 + weight, in float32 at least."""
    return 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))


def _dtype(config) -> torch.dtype | None:
    """The dtype of parameters; None, PyTorch's default, for configs without it."""
    return getattr(config, "params_dtype", None)


def _mark(module, config) -> None:
    """Mark parameters whose gradients are partial sums under sequence parallelism; Megatron sums them."""
    module.config, module.sequence_parallel = config, config.sequence_parallel
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel


class RMSNorm(tigon_nn.RMSNorm):
    """RMSNorm with the constructor of Megatron's norm slots.

    Args:
        config: Megatron's ``TransformerConfig``: ``layernorm_zero_centered_gamma`` (the weight starts at 0
            and 1 is added to it), ``sequence_parallel`` (marked on the weight), ``params_dtype``.
        hidden_size: size C of the last dimension.
        eps: added to the mean square.
        returns_residual: return ``(y, x)``, and add both gradients in the backward's one pass: Megatron's
            ``fused_residual_rmsnorm``.
        persist_layer_norm, zero_centered_gamma, normalization: not used; the config sets them.

    Shape: ``[..., C] -> [..., C]`` in x's dtype, rounded once.
    """

    def __init__(
        self,
        config,
        hidden_size: int,
        eps: float = 1e-5,
        returns_residual: bool = False,
        persist_layer_norm=False,
        zero_centered_gamma=False,
        normalization="RMSNorm",
    ):
        offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        super().__init__(hidden_size, eps, offset=offset, rounding="gemma", dtype=_dtype(config))
        self.returns_residual = returns_residual
        _mark(self, config)

    def forward(self, x):
        if not self.returns_residual:
            return super().forward(x)
        return rms_norm_with_residual(x, self.weight, self.eps, self.offset)


class LayerNorm(tigon_nn.LayerNorm):
    """LayerNorm with the constructor of Megatron's norm slots. Arguments: as :class:`RMSNorm`."""

    returns_residual = False
    zero_centered_gamma = False

    def __init__(
        self,
        config,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm=False,
        zero_centered_gamma=False,
        normalization="LayerNorm",
    ):
        super().__init__(hidden_size, eps, dtype=_dtype(config))
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.reset_parameters()
        _mark(self, config)

    def reset_parameters(self) -> None:
        """Reset weight and bias; Megatron calls this when modules are built on ``meta``."""
        super().reset_parameters()
        if self.zero_centered_gamma:
            nn.init.zeros_(self.weight)

    def forward(self, x):
        weight = centered(self.weight) if self.zero_centered_gamma else self.weight
        return layer_norm(x, weight, self.bias, self.eps)


class Norm:
    """Builder of a norm slot: ``config.normalization`` chooses :class:`RMSNorm` or :class:`LayerNorm`."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **unused):
        known = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
        name = config.normalization
        words = "config.normalization must be one of {}, got {!r}"
        check("megatron.Norm", name in known, words, (*known,), name)
        return known[name](config, hidden_size, eps)


class NormWithResidual(Norm):
    """Builder of a norm before a residual branch: with ``config.fused_residual_rmsnorm`` it returns both."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **unused):
        if config.normalization == "RMSNorm" and getattr(config, "fused_residual_rmsnorm", False):
            return RMSNorm(config, hidden_size, eps, returns_residual=True)
        return Norm(config, hidden_size, eps)


class _WithResidual(torch.autograd.Function):
    """RMSNorm and its input: the gradients of both in one pass."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset):
        y, rstd = _rms._op.forward(x, weight, eps, offset, _rms.ROUNDINGS["gemma"])
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @once("rms_norm")
    def backward(ctx, dy, dx):
        if dy is None:
            return dx, None, None, None
        x, weight, rstd = ctx.saved_tensors
        code = _rms.ROUNDINGS["gemma"]
        results = _residual._bwd(dy, dx, x, weight, rstd, ctx.offset, code, *ctx.needs_input_grad[:2])
        dx, dweight = (g if need else None for g, need in zip(results, ctx.needs_input_grad, strict=False))
        return dx, dweight, None, None


def rms_norm_with_residual(x, weight, eps, offset):
    """``(rms_norm(x), x)``; if both get gradients, the backward reads and writes x's once."""
    plainly = not torch.is_grad_enabled() or torch.compiler.is_compiling()
    if plainly or not (x.requires_grad and has_kernel("rms_norm", x=x, weight=weight)):
        return _rms.rms_norm(x, weight, eps, offset=offset, rounding="gemma"), x
    _rms.check_options("rms_norm", x, weight, eps, offset, "gemma")
    return _WithResidual.apply(x, *columns_for("rms_norm", ("weight",), x, weight), eps, offset)


# Norms of a built model.


def plan_norm(module: nn.Module):
    """(function, its name) for a norm that Tigon runs, why it is left, or None if it is not a norm."""
    name = class_name(type(module))
    if isinstance(module, RMSNorm | LayerNorm):
        return None, f"tigon.megatron.{type(module).__name__}"
    if type(module) is nn.RMSNorm:
        plan = _torch_rms, "tigon.rms_norm"
    elif type(module) is nn.LayerNorm or is_one_of(module, FUSED_LAYER_NORM):
        plan = _layer, "tigon.layer_norm"
    elif is_one_of(module, L2_NORM):
        plan = _l2, "tigon.rms_norm"
    elif name.startswith(("transformer_engine.", "megatron.core.extensions.transformer_engine")):
        own = "Norm" in type(module).__name__
        return "Transformer Engine's kernel; a spec with tigon.megatron.Norm replaces it" if own else None
    else:
        return None
    if len(getattr(module, "normalized_shape", (0,))) != 1:
        return f"it normalises over {tuple(module.normalized_shape)}, more than one dimension"
    return blocked(module) or plan


def _torch_rms(module, spec, x):
    if not plain(x, *module.parameters()):
        return stock(module, x)
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    return _rms.rms_norm(x, module.weight, eps, rounding="gemma")


def _layer(module, spec, x):
    if not plain(x, *module.parameters()):
        return stock(module, x)
    weight = centered(module.weight) if getattr(module, "zero_centered_gamma", False) else module.weight
    return layer_norm(x, weight, module.bias, module.eps)


def _l2(module, spec, x):
    return _rms.rms_norm(x, None, module.eps) if plain(x) else stock(module, x)
