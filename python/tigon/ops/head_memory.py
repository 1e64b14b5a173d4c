"""Memory of the fused loss head: what a call will take, and the chunk that keeps a cap."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon.error import check

_MIB = 1 << 20
_GEMM_WORKSPACE = 32 * _MIB  # of cuBLASLt, on CUDA


class HeadMemory(NamedTuple):
    """Bytes besides the inputs."""

    chunk_rows: int
    workspace: int  # while a pass runs: logits of a chunk, gathered rows, words per row
    gradients: int  # kept from forward to backward
    results: int  # gradients in their final dtype, loss and outputs
    peak: int


def _ceil(a, b):
    return (a + b - 1) // b


def default_chunk(device: str, rows: int) -> int:
    """Rows per chunk: ``linear_cross_entropy_chunk`` of the C++ side."""
    most = 4096 if device == "cuda" else 1024
    if rows <= most + most // 4:
        return max(rows, 1)
    return _ceil(_ceil(rows, _ceil(rows, most)), 128) * 128


def _row_bytes(size, hidden_size, vocab, listed, lora_rank):
    return size * (_ceil(vocab, 64) * 64 + 2 * hidden_size * listed + 2 * lora_rank)


def _fixed_bytes(device, rows):
    words = 64 * rows  # index, labels, place, loss, factors, statistics
    return words + (_GEMM_WORKSPACE if device == "cuda" else 0)


def chunk_that_fits(op, max_workspace_mb, hidden, vocab, chunk_rows, lora_rank):
    """Rows per chunk within the cap (and no more than asked for)."""
    rows = hidden.numel() // hidden.shape[-1]
    device = hidden.device.type
    row = _row_bytes(hidden.element_size(), hidden.shape[-1], vocab, True, lora_rank)
    left = int(max_workspace_mb * _MIB) - _fixed_bytes(device, rows)
    least = _ceil(_fixed_bytes(device, rows) + row, _MIB)
    check(
        op, left >= row, "max_workspace_mb must be at least {} for one row, got {}", least, max_workspace_mb
    )
    chunk = min(left // row, chunk_rows or default_chunk(device, rows))
    return chunk if chunk < 256 else chunk // 128 * 128


def linear_cross_entropy_memory(
    rows: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: str = "cuda",
    weight_dtype: torch.dtype | None = None,
    train_hidden: bool = True,
    train_weight: bool = True,
    train_bias: bool = False,
    main_grad: bool = False,
    lora_rank: int = 0,
    valid_rows: int | None = None,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    max_workspace_mb: float | None = None,
) -> HeadMemory:
    """Bytes that :func:`tigon.linear_cross_entropy` and its backward take besides their inputs.

    ``workspace = chunk * V * size + (gathered rows, words per row, GEMM workspace)``, ``gradients = rows * H
    * size + 4 V H`` (what is trained; float32 for the weight), and at the end of the backward the gradients
    in their parameters' dtypes besides; ``peak`` is the larger of the two moments.

    Args: the sizes and options of the call; ``train_*``: which operands need a gradient; ``main_grad``: the
        weight's is added to its ``main_grad``.
    """
    size = torch.empty((), dtype=dtype).element_size()
    weight_size = size if weight_dtype is None else torch.empty((), dtype=weight_dtype).element_size()
    listed = valid_rows is not None and valid_rows < rows
    worked = valid_rows if valid_rows is not None else rows
    chunk = min(chunk_rows or default_chunk(device, worked), max(worked, 1))
    if max_workspace_mb is not None:
        row = _row_bytes(size, hidden_size, vocab, True, lora_rank)
        left = max(int(max_workspace_mb * _MIB) - _fixed_bytes(device, rows), row)
        fits = left // row
        chunk = min(chunk, fits if fits < 256 else fits // 128 * 128)
    workspace = chunk * _row_bytes(size, hidden_size, vocab, listed, lora_rank) + _fixed_bytes(device, rows)
    if weight_dtype is not None and weight_dtype != dtype:
        workspace += vocab * hidden_size * size  # the weight in hidden's dtype
    own_weight = train_weight and not main_grad
    lora = lora_rank * (hidden_size + vocab)
    gradients = (
        rows * hidden_size * size * train_hidden
        + 4 * vocab * (hidden_size * own_weight + train_bias)
        + 4 * lora
    )
    results = (
        rows * hidden_size * size * train_hidden
        + vocab * (hidden_size * own_weight + train_bias) * weight_size
    )
    results += lora * size + 4 * rows
    if main_grad or reduction == "none":  # made in the backward, with the logits computed again
        peak = workspace + gradients + (results if own_weight and weight_size != 4 else 4 * rows)
        return HeadMemory(chunk, workspace, 0, results, peak)
    return HeadMemory(chunk, workspace, gradients, results, gradients + max(workspace, results))
