"""``liger_kernel``'s losses of a sharded vocabulary and its names for Megatron, among them
``apply_liger_kernel_to_megatron``: functions and norm slots of Megatron-Core, replaced for the process.

It replaces the globals that Liger's patch replaces by classes of Tigon. As in Liger, nothing undoes it.
:func:`tigon.megatron.apply` does more (rotary embedding, the loss head), only to the model that it is given.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch.distributed as dist
from torch import Tensor, nn

import tigon
from tigon import parallel
from tigon.integrations.liger.modules import Loss
from tigon.integrations.liger.paths import check, public
from tigon.integrations.megatron.activation import bias_swiglu_impl
from tigon.integrations.megatron.norm import RMSNorm
from tigon.ops.glu import swiglu as silu_product

log = logging.getLogger("liger_kernel.megatron.monkey_patch")
swiglu_log = logging.getLogger("liger_kernel.megatron.swiglu")
FORMULAS, MODES = ("pytorch", "megatron"), ("global", "partition")


@dataclass(eq=False, repr=False)
class LigerVocabParallelCrossEntropy(Loss):
    """Per-token losses ``[s, b]`` of logits ``[s, b, V / processes]``, for labels of the whole vocabulary."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "none"
    label_smoothing_formula: str = "pytorch"
    label_smoothing_mode: str = "global"

    def __post_init__(self) -> None:
        check(self.reduction == "none", "reduction must be 'none', got {!r}", self.reduction)
        inside = 0.0 <= self.label_smoothing < 1.0
        check(inside, "label_smoothing must be in [0, 1), got {}", self.label_smoothing)
        for name, known in (("label_smoothing_formula", FORMULAS), ("label_smoothing_mode", MODES)):
            value = getattr(self, name)
            check(value in known, "{} must be one of {}, got {!r}", name, known, value)

    def forward(self, vocab_parallel_logits, target, tp_group=None):
        logits, smoothing = vocab_parallel_logits, self.label_smoothing
        dims, vocab = logits.dim(), logits.shape[-1]
        check(dims == 3, "vocab_parallel_logits must be 3-D ([s, b, V]), got {}-D", dims)
        size = 1 if tp_group is None else dist.get_world_size(tp_group)
        words = "'global' with label smoothing over several processes (else each has another loss)"
        fits = smoothing == 0.0 or size == 1 or self.label_smoothing_mode == "global"
        check(fits, "label_smoothing_mode must be {}, got {!r}", words, self.label_smoothing_mode)
        if self.label_smoothing_formula == "megatron":
            smoothing = smoothing * vocab * size / (vocab * size - 1)
        options = {"ignore_index": self.ignore_index, "label_smoothing": smoothing, "reduction": "none"}
        if size == 1:
            return tigon.cross_entropy(logits, target, **options)
        return parallel.cross_entropy(logits, target, tp_group, vocab=vocab * size, **options)


@dataclass(eq=False, repr=False)
class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """The loss with Megatron's definition of smoothing."""

    label_smoothing_formula: str = "megatron"
    label_smoothing_mode: str = "partition"


def liger_fused_linear_scaled_cross_entropy_tp(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Per-token losses of a head sharded over ``tp_group`` (``None``: all processes), and the entropies."""
    group = dist.group.WORLD if tp_group is None else tp_group
    vocab = weight.shape[0] * dist.get_world_size(group)
    options = {"temperature": temperature, "ignore_index": ignore_index, "vocab": vocab}
    if not return_entropy:
        return -parallel.linear_log_prob(_input, weight, target, group, **options)
    log_prob, entropy = parallel.linear_log_prob(_input, weight, target, group, entropy=True, **options)
    return -log_prob, entropy


class LigerMegatronRMSNorm(RMSNorm):
    """Megatron's norm slot: RMSNorm."""

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
        self.zero_centered_gamma, self._offset = self.offset == 1, self.offset


def unsupported(bias, fp8_input_store, cpu_offload_input) -> str | None:
    """The reason why Liger's SwiGLU leaves a call to Megatron's function, or None."""
    if bias is not None:
        return "it adds a bias"
    if fp8_input_store:
        return "its input is kept in FP8"
    return "its input is offloaded to the CPU" if cpu_offload_input else None


class LigerMegatronSwiGLU(nn.Module):
    """Megatron's ``bias_swiglu_impl`` as a module: ``silu(gate) * up`` of ``[..., 2 F]``.

    With ``fallback_impl`` it gets biases, FP8 and offloaded inputs, as in Liger. Else a bias is added here
    and the others go to Megatron's own function. ``in_place`` is accepted and has no effect.
    """

    def __init__(self, fallback_impl: Callable | None = None, in_place: bool = False) -> None:
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place
        self._logged = set()

    def forward(self, input, bias=None, fp8_input_store=False, cpu_offload_input=False):
        """``[..., 2 F] -> [..., F]``, of two or three dimensions."""
        dims = input.dim()
        check(dims in (2, 3), "input must be 2D or 3D, got {}D", dims)
        reason = unsupported(bias, fp8_input_store, cpu_offload_input)
        if reason is None or self.fallback_impl is None:
            return bias_swiglu_impl(input, bias, fp8_input_store, cpu_offload_input)
        if reason not in self._logged:
            self._logged.add(reason)
            swiglu_log.info("[compat.liger] LigerMegatronSwiGLU is falling back to fallback_impl: %s", reason)
        return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)


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
    entries = []
    if cross_entropy:
        entries.append((_replace_fused, *_find("fusions.fused_cross_entropy", _FUSED, "cross_entropy")))
        entries.append((_replace_unfused, *_find("tensor_parallel.cross_entropy", _UNFUSED, "cross_entropy")))
    if rms_norm:
        provider, _ = _find("models.backends", "LocalSpecProvider", "rms_norm")
        entries.append((_replace_norm_of_spec, provider.LocalSpecProvider, "layer_norm"))
        block, name = _find("transformer.transformer_block", "LayerNormImpl", "rms_norm")
        wrapper, _ = _find("transformer.torch_norm", "WrappedTorchNorm", "rms_norm")
        if block.LayerNormImpl is wrapper.WrappedTorchNorm:
            entries.append((_replace_norm_of_block, block, name))
    if swiglu:
        entries.append((_replace_swiglu, *_find("fusions.fused_bias_swiglu", "SwiGLUFunction", "swiglu")))
    for replacement, owner, name in entries:
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
    """Replace the original in modules that have imported it; another function is left."""
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
    """The given group; for ``None``, which older versions pass, Megatron's own group if it has one."""
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
