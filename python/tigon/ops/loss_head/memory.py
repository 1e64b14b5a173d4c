"""Memory of the fused loss head: what a call will take, and the chunk that keeps a cap."""

from __future__ import annotations

import ctypes
import math
import operator
from typing import NamedTuple

import torch

from tigon._load import library
from tigon.error import check
from tigon.ops.arguments import check_booleans, check_choice, check_integers, check_numbers
from tigon.ops.loss_head.operands import REDUCTIONS

_OP = "linear_cross_entropy_memory"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MIB = 1 << 20
AUTOMATIC = -1  # of `keep_rows`: all rows where one chunk takes all, else none
MOST_GROUP_LOGITS = 1 << 30  # bytes of a group's logits: linear_head_group_limit of the C++ side
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
    """Rows per chunk: ``linear_head_chunk_rows`` of the C++ side; sizes that are symbols become numbers."""
    sizes = [operator.index(n) for n in (rows, hidden_size, vocab)]
    return _chunk_of(device == "cuda", dtype.itemsize, *sizes, dweight, add_dweight)


def _chunk_of(*arguments) -> int:
    return _native_chunk(*arguments)


# A constant of a trace, as torch.compiler.assume_constant_result makes it, which imports the compiler.
_chunk_of._dynamo_marked_constant = True


def whole_rows(device, dtype, hidden_size, vocab, dweight=True, add_dweight=False) -> int:
    """Most rows that one chunk takes whole: ``linear_head_whole_rows``."""
    return _native_chunk(device == "cuda", dtype.itemsize, -1, hidden_size, vocab, dweight, add_dweight)


def _rows_that_fit(max_workspace_mb: float, fixed: int, row: int) -> int:
    fits = max(int(max_workspace_mb * _MIB) - fixed, 0) // row
    return fits if fits < 256 else fits // 128 * 128


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
    wide: bool = False  # logits in float32

    def itemsize(self) -> int:
        return self.dtype.itemsize

    def per_row(self, listed: bool) -> int:
        """Bytes of a row of a chunk: its logits, its gathered copies, its low-rank products."""
        return self.logits_row() + self.beside_row(2 * listed)

    def beside_row(self, copies: int) -> int:
        """Bytes of a row of a chunk beside its logits: copies of it, its low-rank products."""
        return self.itemsize() * (copies * self.hidden_size + 2 * _ceil(self.lora_rank, 8) * 8)

    def logits_row(self) -> int:
        """Bytes of a row's logits, and of what their product takes."""
        logits = padded(self.vocab)
        words = self.itemsize() * logits
        if self.device == "cpu":  # the framework's products: a copy of the logits, in float32 for float16
            words += {torch.float32: 4, torch.bfloat16: 0, torch.float16: 8}[self.dtype] * logits
        return words

    def fixed(self) -> int:
        """Bytes of any chunk: index, labels, place, loss, factors of every row; the products' own."""
        product = _GEMM_WORKSPACE
        if self.device == "cpu":
            product = (8 if self.dtype == torch.float16 else self.itemsize()) * self.vocab * self.hidden_size
        return 64 * self.rows + product + self.wide_rows() * 4 * padded(self.vocab)

    def wide_rows(self) -> int:
        """Rows of a part with logits in float32."""
        if not self.wide:
            return 0
        most = default_chunk(self.device, torch.float32, 2**62, self.hidden_size, self.vocab, dweight=False)
        return min(self.rows, most)

    def scaled_late(self) -> bool:
        """Whether a scalar loss writes every gradient twice."""
        return self.dtype == torch.float16

    def gradients(self, rounded, weight_dtype, train_hidden, train_bias) -> tuple[int, int, int, int]:
        """Bytes of hidden's gradient, of the others as they are formed, of all results, of their copies."""
        head = self.vocab * self.hidden_size * (self.dweight and not self.add_dweight)
        bias, lora = self.vocab * train_bias, self.lora_rank * (self.hidden_size + self.vocab)
        dhidden = self.rows * self.hidden_size * self.itemsize() * train_hidden
        formed = (self.itemsize() if rounded else 4) * head + 4 * (bias + lora)
        of_weight = weight_dtype.itemsize * (head + bias)
        results = dhidden + of_weight + lora * self.itemsize() + 4 * self.rows
        late = self.scaled_late()
        copied = late * dhidden
        copied += of_weight if late or (weight_dtype != torch.float32 and not rounded) else 0
        return dhidden, formed, results, copied

    def chunk_within(self, max_workspace_mb: float) -> int:
        """Rows that fit; 0: none."""
        return _rows_that_fit(max_workspace_mb, self.fixed(), self.per_row(True))

    def chunk(self, worked: int, chunk_rows: int | None, max_workspace_mb: float | None) -> int:
        """Rows per chunk of a call."""
        if chunk_rows is None:
            chunk_rows = default_chunk(self.device, self.dtype, worked, self.hidden_size, self.vocab,
                                       dweight=self.dweight, add_dweight=self.add_dweight)  # fmt: skip
        chunk = min(chunk_rows, max(worked, 1))
        return chunk if max_workspace_mb is None else min(chunk, max(self.chunk_within(max_workspace_mb), 1))


def chunk_that_fits(
    op, max_workspace_mb, hidden, vocab, chunk_rows, lora_rank, dweight, add_dweight, wide=False
):
    """Rows per chunk within the cap (and no more than asked for)."""
    rows, size = hidden.numel() // hidden.shape[-1], hidden.shape[-1]
    sizes = _Sizes(
        hidden.device.type, hidden.dtype, rows, size, vocab, lora_rank, dweight, dweight and add_dweight, wide
    )
    least = _ceil(sizes.fixed() + sizes.per_row(True), _MIB)
    fits = sizes.chunk_within(max_workspace_mb) > 0
    check(op, fits, "max_workspace_mb must be at least {} for one row, got {}", least, max_workspace_mb)
    return sizes.chunk(rows, chunk_rows, max_workspace_mb)


class Beside(NamedTuple):
    """What a driver with a workspace of its own takes beside logits and their product, in bytes."""

    copies: int  # of a row of a chunk
    row: int  # more of each row of a chunk
    fixed: int  # more, whatever the chunk


def chunk_beside(max_workspace_mb, device, dtype, rows, size, vocab, lora_rank, beside: Beside, least: int):
    """Rows of a chunk that fit, and the MiB that `least` rows need."""
    sizes = _Sizes(device, dtype, rows, size, vocab, lora_rank)
    fixed = sizes.fixed() + beside.fixed
    row = sizes.logits_row() + sizes.beside_row(beside.copies) + beside.row
    return _rows_that_fit(max_workspace_mb, fixed, row), _ceil(fixed + least * row, _MIB)


def check_cap(op, max_workspace_mb) -> None:
    """A number of MiB, or none."""
    if max_workspace_mb is not None:
        check_numbers(op, max_workspace_mb=max_workspace_mb)
        finite = -math.inf < max_workspace_mb < math.inf
        check(op, finite, "max_workspace_mb must be finite (or None), got {}", max_workspace_mb)


def check_keep(op, keep_mb) -> None:
    """A number of MiB that the gradients of the logits may take, or none."""
    if keep_mb is not None:
        check_numbers(op, keep_mb=keep_mb)
        check(op, keep_mb >= 0, "keep_mb must be >= 0 (or None), got {}", keep_mb)


def device_type(device: str | torch.device) -> str:
    """``"cpu"`` or ``"cuda"``."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError, ValueError):
        kind = None
    check(_OP, kind in ("cpu", "cuda"), "device must be a CPU or CUDA device, got {!r}", device)
    return kind


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
    device: str | torch.device = "cuda",
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
    keep_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
) -> HeadMemory:
    """Bytes that :func:`tigon.linear_cross_entropy` and its backward take besides their inputs.

    ``workspace = chunk * V * size`` (and gathered rows, words per row, what the products may need); of what
    is trained, ``gradients = rows * H * size + V * H * size`` with one chunk, with more ``4 V H`` for the
    weight's; and at the end of the backward those gradients again whose parameter has another dtype. ``peak``
    is the larger of the two moments. What a product of PyTorch's takes and frees inside itself on the CPU is
    not counted. In float64 the eager reference runs: ``workspace`` is the three tensors of the logits' size
    that it has at a time, whatever the options, and what it keeps is among them.

    Args: the sizes and options of the call; ``train_*``: which operands need a gradient; ``main_grad``: the
        weight's is added to its ``main_grad``. With ``"none"``, ``gradients`` is what is kept from forward to
        backward (:func:`tigon.linear_log_prob_memory`).

    Raises:
        tigon.Error: a size or an option that :func:`tigon.linear_cross_entropy` would not take.
    """
    _check_sizes(rows, hidden_size, vocab, lora_rank, valid_rows, chunk_rows, dtype, weight_dtype)
    check_choice(_OP, "reduction", reduction, REDUCTIONS)
    check_booleans(
        _OP, train_hidden=train_hidden, train_weight=train_weight, train_bias=train_bias, main_grad=main_grad
    )
    check_cap(_OP, max_workspace_mb)
    check_keep(_OP, keep_mb)
    device = device_type(device)
    if dtype == torch.float64:
        logits = rows * vocab * dtype.itemsize
        trained = rows * hidden_size * train_hidden + vocab * (hidden_size * train_weight + train_bias)
        results = dtype.itemsize * (trained + lora_rank * (hidden_size + vocab) + rows)
        return HeadMemory(rows, 3 * logits, 0, results, max(3 * logits, logits + results))
    summed = train_weight and main_grad
    wide = logit_dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16)
    sizes = _Sizes(device, dtype, rows, hidden_size, vocab, lora_rank, train_weight, summed, wide)
    weight_dtype = weight_dtype or dtype
    worked = rows if valid_rows is None else valid_rows
    chunk = sizes.chunk(worked, chunk_rows, max_workspace_mb)
    if reduction == "none":
        if max_workspace_mb is not None:
            chunk_rows = chunk
        return _of_rows(sizes, worked, weight_dtype, train_hidden, train_bias, chunk_rows, keep_mb)
    workspace = chunk * sizes.per_row(worked < rows) + sizes.fixed()
    if weight_dtype != dtype:
        workspace += vocab * hidden_size * sizes.itemsize()  # the weight in hidden's dtype
    rounded = worked <= chunk and weight_dtype == dtype and not sizes.scaled_late()
    dhidden, others, results, copied = sizes.gradients(rounded, weight_dtype, train_hidden, train_bias)
    if main_grad:  # made in the backward, with the logits computed again
        return HeadMemory(chunk, workspace, 0, results, dhidden + others + max(workspace, copied))
    gradients = dhidden + others
    return HeadMemory(chunk, workspace, gradients, results, gradients + max(workspace, copied))


def rows_kept(keep_rows, rows, device, dtype, hidden_size, vocab, chunk_rows, *, dweight, add_dweight):
    """How many rows' logits' gradients stay: all or none (AUTOMATIC), or whole chunks of as many as may.

    `rows` may be symbolic: it is compared, and fixed only where a part of the rows is kept.
    """
    if keep_rows == AUTOMATIC:
        whole = chunk_rows or whole_rows(device, dtype, hidden_size, vocab, dweight, add_dweight)
        return rows if rows <= whole else 0
    if keep_rows == 0 or rows <= keep_rows:
        return rows if keep_rows else 0
    chunk = chunk_rows or default_chunk(device, dtype, rows, hidden_size, vocab, dweight=False)
    return keep_rows // chunk * chunk


def rows_within(keep_mb, vocab, itemsize) -> int:
    """``keep_mb`` as a number of rows, or AUTOMATIC."""
    if keep_mb is None:
        return AUTOMATIC
    return int(min(keep_mb, 2.0**40) * _MIB) // (padded(vocab) * itemsize)


def _of_rows(s: _Sizes, worked, weight_dtype, train_hidden, train_bias, chunk_rows, keep_mb):
    """Losses of rows: what is kept, and the larger of the forward and the backward."""
    listed, others = worked < s.rows, s.dweight or train_bias or s.lora_rank > 0
    kept = rows_kept(
        rows_within(keep_mb, s.vocab, s.itemsize()), worked, s.device, s.dtype, s.hidden_size, s.vocab,
        chunk_rows, dweight=s.dweight, add_dweight=s.add_dweight,
    ) if others else 0  # fmt: skip
    unit = train_hidden and keep_mb != 0 and (kept > 0 or not others)
    forward, backward = (
        sizes.chunk(worked, chunk_rows, None) for sizes in (s._replace(dweight=False, add_dweight=False), s)
    )
    if worked == kept:
        backward = 0
    copy = s.vocab * s.hidden_size * s.itemsize() * (weight_dtype != s.dtype)  # the weight in hidden's dtype
    fixed = s.fixed() + copy
    of_kept = kept if chunk_rows is None else min(kept, chunk_rows)  # rows of a chunk of the backward
    logits = s.logits_row() - s.itemsize() * padded(s.vocab) * (
        worked == kept
    )  # their product's own memory at least
    first = forward * (logits + s.beside_row(listed * (1 + unit))) + fixed
    copies = max(listed, kept > 0) + (listed and train_hidden and not unit)
    second = backward * s.logits_row() + max(of_kept, backward) * s.beside_row(copies) + fixed
    rounded = weight_dtype == s.dtype and not s.scaled_late() and max(kept, backward) >= worked
    dhidden, formed, results, copied = s.gradients(rounded, weight_dtype, train_hidden, train_bias)
    if unit and not others:
        second = 0
    between = kept * padded(s.vocab) * s.itemsize() + unit * dhidden
    formed += dhidden * (not unit)
    peak = max(first, formed + max(second, copied)) + between
    return HeadMemory(backward or kept or forward, max(first, second), between, results, peak)


def linear_log_prob_memory(
    rows: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: str | torch.device = "cuda",
    weight_dtype: torch.dtype | None = None,
    train_hidden: bool = True,
    train_weight: bool = True,
    train_bias: bool = False,
    main_grad: bool = False,
    lora_rank: int = 0,
    valid_rows: int | None = None,
    chunk_rows: int | None = None,
    keep_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
    labels: int = 1,
) -> HeadMemory:
    """Bytes that :func:`tigon.linear_log_prob` and its backward take besides their inputs.

    ``gradients`` is what stays from forward to backward: ``rows * H * size`` for hidden's gradient where it
    is formed in the forward, and ``rows * V * size`` (V rounded up to 64) for the gradients of the logits of
    the rows that are kept. The weight's gradient is formed in the backward: ``V * H * size`` of one chunk,
    ``4 V H`` of several. The rest is as in :func:`tigon.linear_cross_entropy_memory`. A gradient of the
    entropies takes what ``keep_mb=0`` takes, besides what is kept. With K ``labels`` of a row nothing
    is kept, and a row has ``4 K`` bytes of results and as many while a pass runs.

    Raises:
        tigon.Error: a size or an option that :func:`tigon.linear_log_prob` would not take.
    """
    check_integers(_OP, labels=labels)
    check(_OP, labels >= 1, "labels must be >= 1, got {}", labels)
    found = linear_cross_entropy_memory(
        rows, hidden_size, vocab, dtype, device=device, weight_dtype=weight_dtype, train_hidden=train_hidden,
        train_weight=train_weight, train_bias=train_bias, main_grad=main_grad, lora_rank=lora_rank,
        valid_rows=valid_rows, reduction="none", chunk_rows=chunk_rows, keep_mb=0 if labels > 1 else keep_mb,
        logit_dtype=logit_dtype,
    )  # fmt: skip
    if labels == 1 or dtype == torch.float64:
        return found
    more = 4 * rows * labels  # scores; and the results
    return found._replace(
        workspace=found.workspace + more, results=found.results + more, peak=found.peak + 2 * more
    )


def linear_preference_memory(
    answers: int,
    tokens: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 2,
    device: str | torch.device = "cuda",
    train_weight: bool = True,
    chunk_rows: int | None = None,
    **options,
) -> HeadMemory:
    """Bytes that :func:`tigon.linear_preference` and its backward take besides their inputs.

    Every row counts here.

    The same of :func:`tigon.linear_kto` (``group=1``) and :func:`tigon.linear_policy` (``group=1`` where the
    loss of a token depends on its answer, 0 otherwise). As :func:`linear_cross_entropy_memory`, with chunks
    that hold groups whole, and a copy of a chunk's hidden states times their factors.

    Args:
        answers, tokens: leading sizes of target.
        group: answers that share a chunk: 2 for pairs, 1, or 0 for tokens.
        device, train_weight, chunk_rows, options: as in :func:`linear_cross_entropy_memory`.

    Raises:
        tigon.Error: a size or an option that is out of range.
    """
    check_integers(_OP, answers=answers, tokens=tokens, group=group)
    for name, size in (("answers", answers), ("tokens", tokens)):
        check(_OP, size >= 0, "{} must be >= 0, got {}", name, size)
    check(_OP, group in (0, 1, 2), "group must be 0, 1 or 2, got {}", group)
    rows, together = answers * tokens, group * tokens
    to_main_grad = options.pop("main_grad", False) and train_weight  # formed as without, and added
    given = {"device": device, "train_weight": train_weight, **options}
    whole = linear_cross_entropy_memory(rows, hidden_size, vocab, dtype, chunk_rows=chunk_rows, **given)
    chunk, several = whole.chunk_rows, whole.chunk_rows < rows
    copies = 1 if train_weight else 0  # of hidden, times the factors
    if group and several:
        bound = chunk_rows is not None or options.get("max_workspace_mb") is not None
        most = chunk if bound else max(chunk, MOST_GROUP_LOGITS // (padded(vocab) * dtype.itemsize))
        if together <= most:
            chunk = max(chunk, together) // max(together, 1) * max(together, 1)
            copies = 2 if group == 2 else copies  # pairs are gathered, and their gradients scattered
        else:
            copies = 0  # forth and back: the factors are in the logits' gradients
    found = linear_cross_entropy_memory(rows, hidden_size, vocab, dtype, chunk_rows=max(chunk, 1), **given)
    extra = copies * chunk * hidden_size * dtype.itemsize + 40 * rows
    if to_main_grad:
        size = (options.get("weight_dtype") or dtype).itemsize
        found = found._replace(results=found.results - vocab * hidden_size * size)
    if dtype == torch.float64:
        return found
    return found._replace(workspace=found.workspace + extra, peak=found.peak + extra)
