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


class _Sizes(NamedTuple):
    """What the workspace depends on."""

    device: str
    dtype: torch.dtype
    rows: int
    hidden_size: int
    vocab: int
    lora_rank: int

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    def per_row(self, listed: bool) -> int:
        """Bytes of a row of a chunk: its logits, its gathered copies, its low-rank products."""
        padded = _ceil(self.vocab, 64) * 64
        words = self.size * (padded + 2 * self.hidden_size * listed + 2 * _ceil(self.lora_rank, 8) * 8)
        if self.device == "cpu":  # the framework's products: a copy of the logits, in float32 for float16
            words += {torch.float32: 4, torch.bfloat16: 0, torch.float16: 8}[self.dtype] * padded
        return words

    def fixed(self) -> int:
        """Bytes of any chunk: index, labels, place, loss, factors of every row; the products' own."""
        product = _GEMM_WORKSPACE
        if self.device == "cpu":
            product = (8 if self.dtype == torch.float16 else self.size) * self.vocab * self.hidden_size
        return 64 * self.rows + product

    def chunk_within(self, max_workspace_mb: float) -> int:
        """Rows that fit; 0: none."""
        fits = max(int(max_workspace_mb * _MIB) - self.fixed(), 0) // self.per_row(True)
        return fits if fits < 256 else fits // 128 * 128

    def chunk(self, worked: int, chunk_rows: int | None, max_workspace_mb: float | None) -> int:
        """Rows per chunk of a call."""
        chunk = min(chunk_rows or default_chunk(self.device, worked), max(worked, 1))
        return chunk if max_workspace_mb is None else min(chunk, max(self.chunk_within(max_workspace_mb), 1))


def chunk_that_fits(op, max_workspace_mb, hidden, vocab, chunk_rows, lora_rank):
    """Rows per chunk within the cap (and no more than asked for)."""
    rows, size = hidden.numel() // hidden.shape[-1], hidden.shape[-1]
    sizes = _Sizes(hidden.device.type, hidden.dtype, rows, size, vocab, lora_rank)
    least = _ceil(sizes.fixed() + sizes.per_row(True), _MIB)
    fits = sizes.chunk_within(max_workspace_mb) > 0
    check(op, fits, "max_workspace_mb must be at least {} for one row, got {}", least, max_workspace_mb)
    return sizes.chunk(rows, chunk_rows, max_workspace_mb)


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

    ``workspace = chunk * V * size`` (and gathered rows, words per row, what the products need),
    ``gradients = rows * H * size + 4 V H`` (of what is trained; float32 for the weight), and at the end of
    the backward the gradients in their parameters' dtypes besides; ``peak`` is the larger of the two moments.

    Args: the sizes and options of the call; ``train_*``: which operands need a gradient; ``main_grad``: the
        weight's is added to its ``main_grad``.
    """
    sizes = _Sizes(device, dtype, rows, hidden_size, vocab, lora_rank)
    weight_dtype = weight_dtype or dtype
    worked = rows if valid_rows is None else valid_rows
    chunk = sizes.chunk(worked, chunk_rows, max_workspace_mb)
    workspace = chunk * sizes.per_row(worked < rows) + sizes.fixed()
    if weight_dtype != dtype:
        workspace += vocab * hidden_size * sizes.size  # the weight in hidden's dtype
    own_weight = train_weight and not main_grad
    head = vocab * (hidden_size * own_weight + train_bias)
    lora = lora_rank * (hidden_size + vocab)
    dhidden = rows * hidden_size * sizes.size * train_hidden
    gradients = dhidden + 4 * (head + lora)
    results = dhidden + head * weight_dtype.itemsize + lora * sizes.size + 4 * rows
    if main_grad or reduction == "none":  # made in the backward, with the logits computed again
        cast = head * weight_dtype.itemsize if weight_dtype != torch.float32 else 0
        return HeadMemory(chunk, workspace, 0, results, gradients + max(workspace, cast))
    return HeadMemory(chunk, workspace, gradients, results, gradients + max(workspace, results))
