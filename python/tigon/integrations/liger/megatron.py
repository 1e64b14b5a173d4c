"""``apply_liger_kernel_to_megatron``: functions and norm slots of Megatron-Core, replaced for the process.

It replaces the globals that Liger's replaces, by what its classes are here. There is no way back, as there.
:func:`tigon.megatron.apply` does more (rotary embedding, the loss head), only to the model that it is given.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType

from tigon.integrations.liger.names import public
from tigon.integrations.liger.sharded import LigerMegatronCrossEntropy, LigerMegatronRMSNorm, unsupported
from tigon.ops.glu import swiglu as silu_product

log = logging.getLogger("liger_kernel.megatron.monkey_patch")
_PATCHED = "__liger_patched__"
_FUSED = "fused_vocab_parallel_cross_entropy"
_UNFUSED = "vocab_parallel_cross_entropy"
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
    found = []
    if cross_entropy:
        found.append((_replace_fused, *_find("fusions.fused_cross_entropy", _FUSED, "cross_entropy")))
        found.append((_replace_unfused, *_find("tensor_parallel.cross_entropy", _UNFUSED, "cross_entropy")))
    if rms_norm:
        provider, _ = _find("models.backends", "LocalSpecProvider", "rms_norm")
        found.append((_replace_norm_of_spec, provider.LocalSpecProvider, "layer_norm"))
        block, name = _find("transformer.transformer_block", "LayerNormImpl", "rms_norm")
        wrapper, _ = _find("transformer.torch_norm", "WrappedTorchNorm", "rms_norm")
        if block.LayerNormImpl is wrapper.WrappedTorchNorm:
            found.append((_replace_norm_of_block, block, name))
    if swiglu:
        found.append((_replace_swiglu, *_find("fusions.fused_bias_swiglu", "SwiGLUFunction", "swiglu")))
    for replacement, owner, name in found:
        original = getattr(owner, name)
        if not getattr(original, _PATCHED, False):
            ours = replacement(original)
            ours.__wrapped__ = original
            setattr(ours, _PATCHED, True)
            setattr(owner, name, ours)
            _rebind(name, original, ours)


def _import(path: str) -> ModuleType:
    return importlib.import_module(f"megatron.core.{path}")


def _find(path: str, name: str, switch: str) -> tuple[ModuleType, str]:
    """A module of Megatron-Core that has this name, and the name."""
    asked = f"apply_liger_kernel_to_megatron({switch}=True)"
    try:
        module = _import(path)
    except ImportError as error:
        raise ImportError(
            f"[compat.liger] {asked} requires megatron-core, with a megatron.core.{path}"
        ) from error
    if not hasattr(module, name):
        raise ImportError(
            f"[compat.liger] {asked} looks for megatron.core.{path}.{name}, which is not there: the symbol "
            f"path may have changed in this version of Megatron-Core"
        )
    return module, name


def _rebind(name: str, original, ours) -> None:
    """The same for modules that hold the original by an import of their own; another function is left."""
    reached = name != _FUSED
    for path, bound in _CALLERS.get(name, ()):
        try:
            module = _import(path)
        except ImportError:
            continue
        if getattr(module, bound, None) is original:
            setattr(module, bound, ours)
        reached = reached or getattr(module, bound, None) is ours
    if not reached:
        log.warning("[compat.liger] Could not find where this Megatron version calls %s", name)


def _loss(**options):
    """The loss module by its public path: callers exchange it there, and expect it to count."""
    return public("megatron.cross_entropy", "LigerMegatronCrossEntropy", LigerMegatronCrossEntropy)(**options)


def _group(tp_group):
    """The group itself; for ``None``, which older versions pass, Megatron's own, where it has one."""
    state = sys.modules.get("megatron.core.parallel_state")
    known = tp_group is None and getattr(state, "model_parallel_is_initialized", bool)()
    return state.get_tensor_model_parallel_group() if known else tp_group


def _replace_fused(original):
    loss = _loss()

    def liger_fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=None):
        return loss(vocab_parallel_logits, target, tp_group=_group(tp_group))

    return liger_fused_vocab_parallel_cross_entropy


def _replace_unfused(original):
    plain = _loss()

    def liger_vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, label_smoothing=None, tp_group=None
    ):
        loss = plain if label_smoothing is None else _loss(label_smoothing=label_smoothing)
        return loss(vocab_parallel_logits, target, tp_group=_group(tp_group))

    return liger_vocab_parallel_cross_entropy


def _replace_norm_of_spec(original):
    def patched_layer_norm(self, rms_norm=False, *args, **kwargs):
        return LigerMegatronRMSNorm if rms_norm else original(self, rms_norm, *args, **kwargs)

    return patched_layer_norm


def _replace_norm_of_block(original):
    class _LigerOrTorchNorm:
        def __new__(cls, config, hidden_size, eps=1e-5, **options):
            ours = getattr(config, "normalization", None) == "RMSNorm"
            return (LigerMegatronRMSNorm if ours else original)(config, hidden_size, eps, **options)

    return _LigerOrTorchNorm


def _replace_swiglu(original):
    logged = set()

    class LigerSwiGLUFunction:
        @staticmethod
        def apply(input, fp8_input_store=False, cpu_offload_input=False, *more):
            reason = unsupported(None, fp8_input_store, cpu_offload_input)
            if reason is None and not any(value is not None for value in more):
                return silu_product(input)
            if reason is not None and reason not in logged:
                logged.add(reason)
                log.info("[compat.liger] falling back to Megatron's SwiGLUFunction: %s", reason)
            return original.apply(input, fp8_input_store, cpu_offload_input, *more)

    return LigerSwiGLUFunction
