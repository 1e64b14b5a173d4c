"""Megatron's cross-entropy of given logits, with :func:`tigon.cross_entropy`."""

from __future__ import annotations

import sys

import torch

from tigon import parallel
from tigon.error import check
from tigon.ops.cross_entropy import cross_entropy


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group=None
) -> torch.Tensor:
    """Megatron's ``fused_vocab_parallel_cross_entropy``: per-token losses.

    Args:
        vocab_parallel_logits: ``[s, b, V / processes]`` float32, bfloat16 or float16, never written.
        target: ``[s, b]`` integer labels. A label of -100 has loss 0 and gradient 0 (in Megatron: ``lse``
            minus the maximum, and the softmax).
        tp_group: the tensor-parallel group; ``None``: Megatron's own. If it has more than one process,
            :func:`tigon.parallel.cross_entropy` runs.

    Returns:
        ``[s, b]`` float32. The gradient has the logits' dtype (Megatron's is always bfloat16). No softmax is
        kept.

    Raises:
        tigon.Error: :func:`tigon.cross_entropy` or :func:`tigon.parallel.cross_entropy` refuses an argument.
    """
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, 0.0, tp_group)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, tp_group=None
) -> torch.Tensor:
    """Megatron's ``tensor_parallel.vocab_parallel_cross_entropy``: per-token losses.

    Args:
        label_smoothing: in [0, 1), in Megatron's sense: the label keeps ``1 - s`` of the probability and all
            *other* classes share ``s`` (the equal smoothing in PyTorch is ``s * V / (V - 1)``). V is the
            whole vocabulary; Megatron uses that of the process, so its losses differ between processes.

    Other arguments, result and errors are those of :func:`fused_vocab_parallel_cross_entropy`.
    """
    op = "vocab_parallel_cross_entropy"
    size = group_size(tp_group)
    inside = isinstance(label_smoothing, int | float) and 0.0 <= label_smoothing < 1.0
    check(op, inside, "label_smoothing must be in [0, 1), got {}", label_smoothing)
    vocab = vocab_parallel_logits.shape[-1] * size
    smoothing = label_smoothing * vocab / (vocab - 1) if label_smoothing else 0.0
    options = {"label_smoothing": smoothing, "reduction": "none"}
    if size > 1:
        group = tensor_group(tp_group)
        return parallel.cross_entropy(vocab_parallel_logits, target, group, vocab=vocab, **options)
    return cross_entropy(vocab_parallel_logits, target, **options)


def tensor_group(group):
    """The group itself, or Megatron's own for ``None``."""
    if group is not None:
        return group
    return sys.modules["megatron.core.parallel_state"].get_tensor_model_parallel_group()


def group_size(group) -> int:
    """The number of processes in a tensor-parallel group; ``None`` is Megatron's own, if it has one."""
    if group is not None:
        return group.size()
    state = sys.modules.get("megatron.core.parallel_state")
    known = getattr(state, "model_parallel_is_initialized", bool)()
    return state.get_tensor_model_parallel_world_size() if known else 1
