"""Specs of Megatron layers with Tigon's norms in their slots."""

from __future__ import annotations

import dataclasses
import inspect

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs

from tigon.integrations.megatron.activation import Activation
from tigon.integrations.megatron.norm import Norm, NormWithResidual

# Slots of norms in the submodules of layers and of attention; the first group is before a residual branch.
BEFORE_RESIDUAL = ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm")
NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm", "enorm", "hnorm", "layer_norm")
NOT_NORMS = ("IdentityOp", "IdentityFuncOp", "L2Norm")


class TigonSpecProvider(LocalSpecProvider):
    """Megatron's backend without Transformer Engine, with Tigon's norms and activation."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False):
        """The norm slot; ``config.normalization`` chooses between RMSNorm and LayerNorm."""
        return NormWithResidual if has_residual else Norm

    def activation_func(self):
        """The slot that ``config.use_te_activation_func`` turns on."""
        return Activation


def gpt_layer_spec(config, **options):
    """Megatron's local layer spec for a config, with Tigon's norms.

    Args:
        config: ``TransformerConfig``: normalization, qk_layernorm, qk_l2_norm, experts and latent attention
            are taken from it.
        **options: of ``get_gpt_layer_local_spec``, over the config's.
    """
    return with_norms(_call(gpt_layer_specs.get_gpt_layer_local_spec, config, options))


def gpt_block_spec(config, **options):
    """Megatron's local block spec for a config, the final norm included.

    Args:
        config: ``TransformerConfig``.
        **options: of ``get_gpt_decoder_block_spec`` (``vp_stage``, ``pp_rank``), over the config's.
    """
    options = {"use_transformer_engine": False, **options}
    block = _call(gpt_layer_specs.get_gpt_decoder_block_spec, config, options)
    layers = [with_norms(layer) for layer in block.layer_specs]
    return dataclasses.replace(block, layer_specs=layers, layer_norm=Norm)


_FROM_CONFIG = {"num_experts": "num_moe_experts"} | {name: name for name in (
    "moe_grouped_gemm", "qk_layernorm", "multi_latent_attention", "normalization", "qk_l2_norm",
)}  # fmt: skip


def _call(builder, config, options):
    """A spec builder with what its parameters ask of the config; they differ between versions."""
    target = inspect.unwrap(builder)
    names = inspect.signature(target).parameters
    if target is gpt_layer_specs.get_gpt_layer_local_spec and "normalization" not in names:
        names = inspect.signature(gpt_layer_specs.get_gpt_layer_local_submodules).parameters
    known = {name: getattr(config, _FROM_CONFIG[name]) for name in _FROM_CONFIG
             if name in names and hasattr(config, _FROM_CONFIG[name])}  # fmt: skip
    if "config" in names:
        known["config"] = config
    return builder(**{**known, **options})


def with_norms(spec):
    """A copy of a layer's (or MTP layer's) spec whose norms are Tigon's; L2 norms and empty slots stay."""
    submodules = getattr(spec, "submodules", None)
    if submodules is None or not dataclasses.is_dataclass(submodules):
        return spec
    values = {}
    for slot in dataclasses.fields(submodules):
        held = getattr(submodules, slot.name)
        module = getattr(held, "module", held)
        if slot.name in (*BEFORE_RESIDUAL, *NORMS):
            if held is not None and getattr(module, "__name__", "") not in NOT_NORMS:
                values[slot.name] = NormWithResidual if slot.name in BEFORE_RESIDUAL else Norm
        elif hasattr(held, "submodules"):
            values[slot.name] = with_norms(held)
    return dataclasses.replace(spec, submodules=dataclasses.replace(submodules, **values))
