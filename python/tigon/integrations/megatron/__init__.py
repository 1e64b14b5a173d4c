"""Megatron-Core models, slots and functions with Tigon's kernels. Public path: :mod:`tigon.megatron`."""

from tigon.integrations.megatron.activation import (
    Activation,
    bias_geglu_impl,
    bias_swiglu_impl,
    weighted_bias_swiglu_impl,
)
from tigon.integrations.megatron.apply import apply, undo
from tigon.integrations.megatron.classes import core
from tigon.integrations.megatron.cross_entropy import (
    fused_vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy,
)
from tigon.integrations.megatron.norm import LayerNorm, Norm, NormWithResidual, RMSNorm
from tigon.integrations.megatron.rope import (
    fused_apply_rotary_pos_emb,
    fused_apply_rotary_pos_emb_thd,
    install_rope_fusion,
)
from tigon.integrations.transformers.report import Entry, Report

__all__ = [
    "Activation",
    "Entry",
    "LayerNorm",
    "Norm",
    "NormWithResidual",
    "RMSNorm",
    "Report",
    "TigonSpecProvider",
    "apply",
    "bias_geglu_impl",
    "bias_swiglu_impl",
    "fused_apply_rotary_pos_emb",
    "fused_apply_rotary_pos_emb_thd",
    "fused_vocab_parallel_cross_entropy",
    "gpt_block_spec",
    "gpt_layer_spec",
    "hybrid_stack_spec",
    "install_rope_fusion",
    "undo",
    "vocab_parallel_cross_entropy",
    "weighted_bias_swiglu_impl",
    "with_norms",
]


_SPECS = ("TigonSpecProvider", "gpt_block_spec", "gpt_layer_spec", "hybrid_stack_spec", "with_norms")


def __getattr__(name: str):
    """Import the specs lazily: only they need Megatron at import."""
    if name not in _SPECS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    core("models.gpt.gpt_layer_specs", name)
    from tigon.integrations.megatron import specs

    return getattr(specs, name)
