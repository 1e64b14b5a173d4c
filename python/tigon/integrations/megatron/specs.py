"""Specs of Megatron layers with Tigon's norms in their slots."""

from __future__ import annotations

import dataclasses
import functools
import inspect

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from tigon.error import check
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
        config: ``TransformerConfig``, which gives normalization, qk_layernorm, qk_l2_norm, experts and latent
            attention.
        **options: options of ``get_gpt_layer_local_spec``, which override the config.

    Raises:
        tigon.Error: ``use_kitchen`` or ``use_kitchen_attention``, of the config or an option, is set.
    """
    _check_kitchen("gpt_layer_spec", config, options)
    return with_norms(_call(gpt_layer_specs.get_gpt_layer_local_spec, config, options))


def gpt_block_spec(config, **options):
    """Megatron's local block spec for a config, the final norm included.

    Args:
        config: ``TransformerConfig``.
        **options: options of ``get_gpt_decoder_block_spec`` (``vp_stage``, ``pp_rank``), which override the
            config.

    Raises:
        tigon.Error: as :func:`gpt_layer_spec`.
    """
    _check_kitchen("gpt_block_spec", config, options)
    options = {"use_transformer_engine": False, **options}
    block = _call(gpt_layer_specs.get_gpt_decoder_block_spec, config, options)
    layers = [with_norms(layer) for layer in block.layer_specs]
    return dataclasses.replace(block, layer_specs=layers, layer_norm=Norm)


def hybrid_stack_spec(config, *, norms: bool = True):
    """A spec of ``HybridModel``'s stack (before 0.19 ``MambaModel``'s) of Megatron's local layers.

    Megatron's own ``hybrid_stack_spec`` needs Transformer Engine. This one supports attention (``*`` in the
    pattern), MLP (``-``) and, with ``config.num_moe_experts``, expert layers (``E``).

    Args:
        config: ``TransformerConfig``, as for :func:`gpt_layer_spec`.
        norms: use Tigon's norms in all slots, also the final one. False: those of Megatron's local spec.

    Raises:
        tigon.Error: as :func:`gpt_layer_spec`.
    """
    _check_kitchen("hybrid_stack_spec", config, {})
    stack, submodules = _stack()

    def local(experts):
        layer = _call(gpt_layer_specs.get_gpt_layer_local_spec, config, {"num_experts": experts})
        return (with_norms(layer) if norms else layer).submodules

    def mlp_layer(module, parts):
        norm = parts.pre_mlp_layernorm
        slots = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=parts.mlp, mlp_bda=parts.mlp_bda)
        return ModuleSpec(module, submodules=slots)

    dense = local(None)
    attention = TransformerLayerSubmodules(
        input_layernorm=dense.input_layernorm,
        self_attention=dense.self_attention,
        self_attn_bda=dense.self_attn_bda,
    )
    layers = {
        "attention_layer": ModuleSpec(TransformerLayer, submodules=attention),
        "mlp_layer": mlp_layer(MLPLayer, dense),
    }
    if config.num_moe_experts:
        layers["moe_layer"] = mlp_layer(_expert_layer(), local(config.num_moe_experts))
    final = Norm if norms else dense.input_layernorm
    return ModuleSpec(stack, params={"final_norm": final}, submodules=submodules(**layers))


def _expert_layer():
    try:
        from megatron.core.transformer.transformer_layer import MoETransformerLayer
    except ImportError:
        return TransformerLayer
    return MoETransformerLayer


@functools.cache
def _stack():
    """The class of a hybrid model's stack, with the final norm of its spec, and the class of its slots."""
    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack as Stack
        from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules as Submodules
    except ImportError:
        from megatron.core.ssm.mamba_block import MambaStack as Stack
        from megatron.core.ssm.mamba_block import MambaStackSubmodules as Submodules

    class LocalStack(Stack):
        """A stack with the final norm of the spec; Megatron's own builds Transformer Engine's norm."""

        def __init__(self, config, submodules, *, final_norm, post_layer_norm=True, **options):
            super().__init__(config, submodules, post_layer_norm=False, **options)
            self.post_layer_norm = post_layer_norm
            if self.post_process and post_layer_norm:
                self.final_norm = final_norm(
                    config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
                )

    return LocalStack, Submodules


def _check_kitchen(name, config, options):
    """Refuse Kitchen: its layers come from a separate provider, which these specs would ignore."""
    for field in ("use_kitchen", "use_kitchen_attention"):
        off = not (options.get(field) or getattr(config, field, False))
        check(f"megatron.{name}", off, "{} must be False (Kitchen has specs of its own), got True", field)


_FROM_CONFIG = {"num_experts": "num_moe_experts"} | {
    name: name
    for name in ("moe_grouped_gemm", "qk_layernorm", "multi_latent_attention", "normalization", "qk_l2_norm")
}


def _call(builder, config, options):
    """Call a spec builder with the config's values for its parameters, which differ between versions."""
    target = inspect.unwrap(builder)
    names = inspect.signature(target).parameters
    if target is gpt_layer_specs.get_gpt_layer_local_spec and "normalization" not in names:
        names = inspect.signature(gpt_layer_specs.get_gpt_layer_local_submodules).parameters
    known = {
        name: getattr(config, _FROM_CONFIG[name])
        for name in _FROM_CONFIG
        if name in names and hasattr(config, _FROM_CONFIG[name])
    }
    if "config" in names:
        known["config"] = config
    return builder(**{**known, **options})


def with_norms(spec):
    """A copy of a layer's (or MTP layer's) spec with Tigon's norms; L2 norms and empty slots are kept."""
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
