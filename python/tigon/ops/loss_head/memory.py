"""Memory of the fused loss head: what a call will take, and the chunk that keeps a cap."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch

from tigon._load import library
from tigon.error import check
from tigon.ops.arguments import check_integers, check_numbers
from tigon.ops.loss_head.operands import REDUCTIONS

_OP = "linear_cross_entropy_memory"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MIB = 1 << 20
_GEMM_WORKSPACE = 32 * _MIB  # of cuBLASLt, on CUDA, where one of its kernels asks for it


class HeadMemory(NamedTuple):
    """Bytes besides the inputs."""

    chunk_rows: int
    workspace: int  # while a pass runs: logits of a chunk, gathered rows, words per row
    gradients: int  # kept from forward to backward
    results: int  # gradients in their final dtype, loss and outputs: what is left at the end
    peak: int


def _ceil(a, b):
    return (a + b - 1) // b


def padded(vocab: int) -> int:
    """Elements between the rows of logits: whole 128-byte lines."""
    return _ceil(vocab, 64) * 64


_native_chunk = library.tigon_linear_cross_entropy_chunk
_native_chunk.restype = ctypes.c_int64
_native_chunk.argtypes = [ctypes.c_int] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_int] * 2


def default_chunk(device, dtype, rows, hidden_size, vocab, *, dweight, add_dweight=False) -> int:
    """Rows per chunk: ``linear_head_chunk_rows`` of the C++ side."""
    return _native_chunk(device == "cuda", dtype.itemsize, rows, hidden_size, vocab, dweight, add_dweight)


def whole_rows(device, dtype, hidden_size, vocab, dweight=True, add_dweight=False) -> int:
    """Most rows that one chunk takes whole: ``linear_head_whole_rows``."""
    return _native_chunk(device == "cuda", dtype.itemsize, -1, hidden_size, vocab, dweight, add_dweight)


class _Sizes(NamedTuple):
    """What the workspace depends on."""

    device: str
    dtype: torch.dtype
    rows: int
    hidden_size: int
    vocab: int
    lora_rank: int
    dweight: bool = False
    add_dweight: bool = False

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    def per_row(self, listed: bool) -> int:
        """Bytes of a row of a chunk: its logits, its gathered copies, its low-rank products."""
        logits = padded(self.vocab)
        words = self.size * (logits + 2 * self.hidden_size * listed + 2 * _ceil(self.lora_rank, 8) * 8)
        if self.device == "cpu":  # the framework's products: a copy of the logits, in float32 for float16
            words += {torch.float32: 4, torch.bfloat16: 0, torch.float16: 8}[self.dtype] * logits
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
        if chunk_rows is None:
            chunk_rows = default_chunk(self.device, self.dtype, worked, self.hidden_size, self.vocab,
                                       dweight=self.dweight, add_dweight=self.add_dweight)  # fmt: skip
        chunk = min(chunk_rows, max(worked, 1))
        return chunk if max_workspace_mb is None else min(chunk, max(self.chunk_within(max_workspace_mb), 1))


def chunk_that_fits(op, max_workspace_mb, hidden, vocab, chunk_rows, lora_rank, dweight, add_dweight):
    """Rows per chunk within the cap (and no more than asked for)."""
    rows, size = hidden.numel() // hidden.shape[-1], hidden.shape[-1]
    sizes = _Sizes(
        hidden.device.type, hidden.dtype, rows, size, vocab, lora_rank, dweight, dweight and add_dweight
    )
    least = _ceil(sizes.fixed() + sizes.per_row(True), _MIB)
    fits = sizes.chunk_within(max_workspace_mb) > 0
    check(op, fits, "max_workspace_mb must be at least {} for one row, got {}", least, max_workspace_mb)
    return sizes.chunk(rows, chunk_rows, max_workspace_mb)


def check_cap(op, max_workspace_mb) -> None:
    """A number of MiB, or none."""
    if max_workspace_mb is not None:
        check_numbers(op, max_workspace_mb=max_workspace_mb)
        finite = math.isfinite(max_workspace_mb)
        check(op, finite, "max_workspace_mb must be finite (or None), got {}", max_workspace_mb)


def _check_sizes(rows, hidden_size, vocab, lora_rank, valid_rows, chunk_rows, dtype, weight_dtype):
    sizes = {"rows": (rows, 0), "hidden_size": (hidden_size, 1), "vocab": (vocab, 1)}
    sizes |= {"lora_rank": (lora_rank, 0)}
    sizes |= {} if valid_rows is None else {"valid_rows": (valid_rows, 0)}
    sizes |= {} if chunk_rows is None else {"chunk_rows": (chunk_rows, 1)}
    check_integers(_OP, **{name: size for name, (size, _) in sizes.items()})
    for name, (size, least) in sizes.items():
        check(_OP, size >= least, "{} must be >= {}, got {}", name, least, size)
    fits = valid_rows is None or valid_rows <= rows
    check(_OP, fits, "valid_rows must be in [0, {}] (or None), got {}", rows, valid_rows)
    for name, given in (("dtype", dtype), ("weight_dtype", weight_dtype or dtype)):
        check(_OP, given in _DTYPES, "{} must be one of {}, got {}", name, _DTYPES, given)


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

    ``workspace = chunk * V * size`` (and gathered rows, words per row, what the products may need); of what
    is trained, ``gradients = rows * H * size + V * H * size`` with one chunk, with more ``4 V H`` for the
    weight's; and at the end of the backward those gradients again whose parameter has another dtype. ``peak``
    is the larger of the two moments. What a product of PyTorch's takes and frees inside itself on the CPU is
    not counted. In float64 the eager reference runs: ``workspace`` is the three tensors of the logits' size
    that it has at a time, whatever the options, and what it keeps is among them.

    Args: the sizes and options of the call; ``train_*``: which operands need a gradient; ``main_grad``: the
        weight's is added to its ``main_grad``.

    Raises:
        tigon.Error: a size or an option that :func:`tigon.linear_cross_entropy` would not take.
    """
    _check_sizes(rows, hidden_size, vocab, lora_rank, valid_rows, chunk_rows, dtype, weight_dtype)
    check(_OP, reduction in REDUCTIONS, "reduction must be one of {}, got {!r}", (*REDUCTIONS,), reduction)
    check_cap(_OP, max_workspace_mb)
    if dtype == torch.float64:
        logits = rows * vocab * dtype.itemsize
        trained = rows * hidden_size * train_hidden + vocab * (hidden_size * train_weight + train_bias)
        results = dtype.itemsize * (trained + lora_rank * (hidden_size + vocab) + rows)
        return HeadMemory(rows, 3 * logits, 0, results, max(3 * logits, logits + results))
    summed = train_weight and main_grad
    sizes = _Sizes(device, dtype, rows, hidden_size, vocab, lora_rank, train_weight, summed)
    weight_dtype = weight_dtype or dtype
    worked = rows if valid_rows is None else valid_rows
    chunk = sizes.chunk(worked, chunk_rows, max_workspace_mb)
    workspace = chunk * sizes.per_row(worked < rows) + sizes.fixed()
    if weight_dtype != dtype:
        workspace += vocab * hidden_size * sizes.size  # the weight in hidden's dtype
    f16 = dtype == torch.float16  # scaled late: every gradient is written twice
    rounded = worked <= chunk and weight_dtype == dtype and not f16
    head = vocab * hidden_size * (train_weight and not main_grad)
    bias, lora = vocab * train_bias, lora_rank * (hidden_size + vocab)
    dhidden = rows * hidden_size * sizes.size * train_hidden
    gradients = dhidden + (sizes.size if rounded else 4) * head + 4 * (bias + lora)
    of_weight = weight_dtype.itemsize * (head + bias)
    results = dhidden + of_weight + lora * sizes.size + 4 * rows
    copied = f16 * dhidden
    copied += of_weight if f16 or (weight_dtype != torch.float32 and not rounded) else 0
    if main_grad or reduction == "none":  # made in the backward, with the logits computed again
        return HeadMemory(chunk, workspace, 0, results, gradients + max(workspace, copied))
    return HeadMemory(chunk, workspace, gradients, results, gradients + max(workspace, copied))
