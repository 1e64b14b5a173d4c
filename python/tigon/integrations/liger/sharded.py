"""``liger_kernel``'s losses of a sharded vocabulary, and its names for Megatron."""

from __future__ import annotations

import logging

import torch.distributed as dist
from torch import nn

import tigon
from tigon import parallel
from tigon.integrations.liger.names import check
from tigon.integrations.liger.signatures import Loss, function_class
from tigon.integrations.megatron.activation import bias_swiglu_impl
from tigon.integrations.megatron.norm import RMSNorm

log = logging.getLogger("liger_kernel.megatron.swiglu")
FORMULAS, MODES = ("pytorch", "megatron"), ("global", "partition")


def validate_formula_and_mode(label_smoothing_formula: str, label_smoothing_mode: str) -> None:
    """Refuse what is none of the formulas and modes of label smoothing."""
    for name, value, known in (
        ("label_smoothing_formula", label_smoothing_formula, FORMULAS),
        ("label_smoothing_mode", label_smoothing_mode, MODES),
    ):
        check(value in known, "{} must be one of {}, got {!r}", name, known, value)


def _vocab_parallel(
    logits, target, tp_group=None, ignore_index=-100, label_smoothing=0.0,
    label_smoothing_formula="pytorch", label_smoothing_mode="global",
):  # fmt: skip
    validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    smooth = label_smoothing > 0.0 and size > 1
    words = "'global' with label smoothing over several processes (else each has another loss)"
    fits = not smooth or label_smoothing_mode == "global"
    check(fits, "label_smoothing_mode must be {}, got {!r}", words, label_smoothing_mode)
    if label_smoothing_formula == "megatron" and label_smoothing:
        vocab = logits.shape[-1] * size
        label_smoothing = label_smoothing * vocab / (vocab - 1)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    if size == 1:
        return tigon.cross_entropy(logits, target, **options)
    return parallel.cross_entropy(logits, target, tp_group, vocab=logits.shape[-1] * size, **options)


LigerVocabParallelCEFunction = function_class("LigerVocabParallelCEFunction", _vocab_parallel)


def _three_dimensional(vocab_parallel_logits, target, tp_group, **options):
    dims = vocab_parallel_logits.dim()
    check(dims == 3, "vocab_parallel_logits must be 3-D ([s, b, V]), got {}-D", dims)
    del options["reduction"]
    return _vocab_parallel(vocab_parallel_logits, target, tp_group, **options)


class LigerVocabParallelCrossEntropy(
    Loss,
    target=_three_dimensional,
    operands="vocab_parallel_logits, target, tp_group=None",
    first="ignore_index=-100, label_smoothing=0.0, reduction='none', label_smoothing_formula='pytorch', "
    "label_smoothing_mode='global'",
):
    """Per-token losses ``[s, b]`` of logits ``[s, b, V / processes]``, for labels of the whole vocabulary."""

    def validate(self):
        check(self.reduction == "none", "reduction must be 'none', got {!r}", self.reduction)
        inside = 0.0 <= self.label_smoothing < 1.0
        check(inside, "label_smoothing must be in [0, 1), got {}", self.label_smoothing)
        validate_formula_and_mode(self.label_smoothing_formula, self.label_smoothing_mode)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._options)


class LigerMegatronCrossEntropy(
    LigerVocabParallelCrossEntropy,
    target=_three_dimensional,
    operands="vocab_parallel_logits, target, tp_group=None",
    first="ignore_index=-100, label_smoothing=0.0, reduction='none', label_smoothing_formula='megatron', "
    "label_smoothing_mode='partition'",
):
    """The same in Megatron's sense of smoothing."""


def liger_fused_linear_scaled_cross_entropy_tp(
    _input, weight, target, tp_group=None, temperature=1.0, ignore_index=-100, tiles_per_reduce=1,
    return_entropy=False,
):  # fmt: skip
    """Per-token losses of a head sharded over ``tp_group`` (``None``: all processes), and the entropies."""
    del tiles_per_reduce  # how the exchange is cut, there
    group = dist.group.WORLD if tp_group is None else tp_group
    vocab = weight.shape[0] * dist.get_world_size(group)
    options = {"temperature": temperature, "ignore_index": ignore_index, "vocab": vocab}
    if not return_entropy:
        return -parallel.linear_log_prob(_input, weight, target, group, **options)
    log_prob, entropy = parallel.linear_log_prob(_input, weight, target, group, entropy=True, **options)
    return -log_prob, entropy


LigerFusedLinearScaledCrossEntropyTPFunction = function_class(
    "LigerFusedLinearScaledCrossEntropyTPFunction", liger_fused_linear_scaled_cross_entropy_tp
)


class LigerMegatronRMSNorm(RMSNorm):
    """Megatron's norm slot: RMSNorm."""

    def __init__(
        self, config, hidden_size, eps=1e-5, persist_layer_norm=False, zero_centered_gamma=False,
        normalization="RMSNorm",
    ):  # fmt: skip
        asked = getattr(config, "normalization", normalization)
        check(asked == "RMSNorm", "normalization must be 'RMSNorm', got {!r}", asked)
        super().__init__(config, hidden_size, eps)
        self.zero_centered_gamma, self._offset = self.offset == 1, self.offset


def unsupported(bias, fp8_input_store, cpu_offload_input) -> str | None:
    """What Liger's SwiGLU leaves to Megatron's function, or None."""
    if bias is not None:
        return "it adds a bias"
    if fp8_input_store:
        return "its input is kept in FP8"
    return "its input is offloaded to the CPU" if cpu_offload_input else None


class LigerMegatronSwiGLU(nn.Module):
    """Megatron's ``bias_swiglu_impl`` as a module: ``silu(gate) * up`` of ``[..., 2 F]``.

    With ``fallback_impl`` a bias, FP8 and offloaded inputs go there, as there. Without, a bias is added here
    and the others go to Megatron's own function. ``in_place`` is accepted and has no effect.
    """

    def __init__(self, fallback_impl=None, in_place=False):
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
            log.info("[compat.liger] LigerMegatronSwiGLU is falling back to fallback_impl: %s", reason)
        return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
