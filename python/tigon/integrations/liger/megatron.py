"""``liger_kernel.megatron``: functions and norm slots of Megatron-Core, replaced for the process.

They become those of :mod:`tigon.megatron`. As in Liger, nothing undoes it. :func:`tigon.megatron.apply` does
more (rotary embedding, the loss head), only to the model that it is given.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import nn

import tigon
from tigon import parallel
from tigon.integrations.liger.modules import Loss
from tigon.integrations.liger.paths import check
from tigon.integrations.megatron.activation import bias_swiglu_impl
from tigon.integrations.megatron.cross_entropy import (
    fused_vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy,
)
from tigon.integrations.megatron.norm import RMSNorm
from tigon.ops.glu import swiglu as silu_product

log = logging.getLogger("liger_kernel.megatron.monkey_patch")
FORMULAS, MODES = ("pytorch", "megatron"), ("global", "partition")


@dataclass(eq=False, repr=False)
class LigerMegatronCrossEntropy(Loss):
    """Per-token losses ``[s, b]`` of logits ``[s, b, V / processes]``, for labels of the whole vocabulary."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "none"
    label_smoothing_formula: str = "megatron"
    label_smoothing_mode: str = "partition"

    def __post_init__(self) -> None:
        check(self.reduction == "none", "reduction must be 'none', got {!r}", self.reduction)
        inside = 0.0 <= self.label_smoothing < 1.0
        check(inside, "label_smoothing must be in [0, 1), got {}", self.label_smoothing)
        for name, known in (("label_smoothing_formula", FORMULAS), ("label_smoothing_mode", MODES)):
            value = getattr(self, name)
            check(value in known, "{} must be one of {}, got {!r}", name, known, value)

    def forward(self, vocab_parallel_logits, target, tp_group=None):
        logits, smoothing = vocab_parallel_logits, self.label_smoothing
        dims, size = logits.dim(), 1 if tp_group is None else tp_group.size()
        check(dims == 3, "vocab_parallel_logits must be 3-D ([s, b, V]), got {}-D", dims)
        words = "'global' with label smoothing over several processes (else each has another loss)"
        fits = smoothing == 0.0 or size == 1 or self.label_smoothing_mode == "global"
        check(fits, "label_smoothing_mode must be {}, got {!r}", words, self.label_smoothing_mode)
        vocab = logits.shape[-1] * size
        if self.label_smoothing_formula == "megatron":
            smoothing = smoothing * vocab / (vocab - 1)
        options = {"ignore_index": self.ignore_index, "label_smoothing": smoothing, "reduction": "none"}
        if size == 1:
            return tigon.cross_entropy(logits, target, **options)
        return parallel.cross_entropy(logits, target, tp_group, vocab=vocab, **options)


class LigerMegatronRMSNorm(RMSNorm):
    """Megatron's norm slot: RMSNorm, of configurations that ask for it."""

    def __init__(
        self,
        config,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        asked = getattr(config, "normalization", normalization)
        check(asked == "RMSNorm", "normalization must be 'RMSNorm', got {!r}", asked)
        super().__init__(config, hidden_size, eps)


class LigerMegatronSwiGLU(nn.Module):
    """:func:`tigon.megatron.bias_swiglu_impl` as a module: ``silu(gate) * up`` of ``[..., 2 F]``.

    A ``fallback_impl`` gets biases, FP8 and offloaded inputs. ``in_place`` has no effect.
    """

    def __init__(self, fallback_impl: Callable | None = None, in_place: bool = False) -> None:
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place

    def forward(self, input, bias=None, fp8_input_store=False, cpu_offload_input=False):
        """``[..., 2 F] -> [..., F]``."""
        plain = bias is None and not (fp8_input_store or cpu_offload_input)
        function = bias_swiglu_impl if plain or self.fallback_impl is None else self.fallback_impl
        return function(input, bias, fp8_input_store, cpu_offload_input)


_FUSED, _UNFUSED = "fused_vocab_parallel_cross_entropy", "vocab_parallel_cross_entropy"
# Modules that bind a function to a name of their own when they are imported.
_CALLERS = {
    _FUSED: (("models.common.language_module.language_module", _FUSED), ("models.backends", "_fused_ce")),
    _UNFUSED: (("tensor_parallel", _UNFUSED),),
}


def apply_liger_kernel_to_megatron(
    rms_norm: bool = True, cross_entropy: bool = False, swiglu: bool = False
) -> None:
    """Replace functions of Megatron-Core by Tigon's; a second call changes nothing.

    Args:
        rms_norm: the RMSNorm of ``LocalSpecProvider.layer_norm`` and of ``transformer_block.LayerNormImpl``,
            unless the latter is Transformer Engine's or Apex's.
        cross_entropy: both ``vocab_parallel_cross_entropy``, fused and not, also where already bound.
        swiglu: ``fused_bias_swiglu.SwiGLUFunction``: MLPs and shared experts without bias. With FP8 or
            offloaded inputs Megatron's own runs.

    Raises:
        ImportError: Megatron-Core, or one of the names, is not there. Nothing is modified.
    """
    replacements: list[tuple[object, str, object]] = []
    if cross_entropy:
        fused = _find("fusions.fused_cross_entropy", _FUSED, "cross_entropy")
        replacements.append((fused, _FUSED, fused_vocab_parallel_cross_entropy))
        unfused = _find("tensor_parallel.cross_entropy", _UNFUSED, "cross_entropy")
        replacements.append((unfused, _UNFUSED, vocab_parallel_cross_entropy))
    if rms_norm:
        provider = _find("models.backends", "LocalSpecProvider", "rms_norm").LocalSpecProvider
        replacements.append((provider, "layer_norm", _norm_of_spec(provider.layer_norm)))
        block = _find("transformer.transformer_block", "LayerNormImpl", "rms_norm")
        wrapper = _find("transformer.torch_norm", "WrappedTorchNorm", "rms_norm").WrappedTorchNorm
        if block.LayerNormImpl is wrapper:
            replacements.append((block, "LayerNormImpl", _norm_of_block(wrapper)))
    if swiglu:
        gates = _find("fusions.fused_bias_swiglu", "SwiGLUFunction", "swiglu")
        replacements.append((gates, "SwiGLUFunction", _gate(gates.SwiGLUFunction)))
    for owner, name, ours in replacements:
        original = getattr(owner, name)
        if original is not ours and not getattr(original, "__liger_patched__", False):
            setattr(owner, name, ours)
            _rebind(name, original, ours)


def _find(path: str, name: str, switch: str) -> ModuleType:
    """A module of Megatron-Core that has this name."""
    asked = f"apply_liger_kernel_to_megatron({switch}=True)"
    try:
        module = importlib.import_module(f"megatron.core.{path}")
    except ImportError as error:
        raise ImportError(
            f"[compat.liger] {asked} requires megatron-core, with a megatron.core.{path}"
        ) from error
    if not hasattr(module, name):
        raise ImportError(
            f"[compat.liger] {asked} looks for megatron.core.{path}.{name}, which is not there: the symbol "
            f"path may have changed in this version of Megatron-Core"
        )
    return module


def _rebind(name: str, original, ours) -> None:
    """Replace the original in modules that have imported it; another function is left."""
    reached = name != _FUSED
    for path, bound in _CALLERS.get(name, ()):
        try:
            module = importlib.import_module(f"megatron.core.{path}")
        except ImportError:
            continue
        if getattr(module, bound, None) is original:
            setattr(module, bound, ours)
        reached = reached or getattr(module, bound, None) is ours
    if not reached:
        log.warning("[compat.liger] Could not find where this Megatron version calls %s", name)


def _norm_of_spec(original):
    def patched_layer_norm(self, rms_norm=False, *args, **kwargs):
        return LigerMegatronRMSNorm if rms_norm else original(self, rms_norm, *args, **kwargs)

    patched_layer_norm.__liger_patched__, patched_layer_norm.__wrapped__ = True, original
    return patched_layer_norm


def _norm_of_block(original):
    class _LigerOrTorchNorm:
        __liger_patched__, __wrapped__ = True, original

        def __new__(cls, config, hidden_size, eps=1e-5, **options):
            ours = getattr(config, "normalization", None) == "RMSNorm"
            return (LigerMegatronRMSNorm if ours else original)(config, hidden_size, eps, **options)

    return _LigerOrTorchNorm


def _gate(original):
    class LigerSwiGLUFunction:
        __liger_patched__, __wrapped__ = True, original

        @staticmethod
        def apply(input, fp8_input_store=False, cpu_offload_input=False, *more):
            if fp8_input_store or cpu_offload_input or any(value is not None for value in more):
                return original.apply(input, fp8_input_store, cpu_offload_input, *more)
            return silu_product(input)

    return LigerSwiGLUFunction
