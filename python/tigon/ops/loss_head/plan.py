"""Memory of the loss head: how much a call takes, and the chunk that keeps a limit.

The native side computes the numbers: ``csrc/tigon/ops/loss_head/plan.h``.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections import namedtuple
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from typing_extensions import TypedDict, Unpack

from tigon._load import library
from tigon.error import Error, check
from tigon.ops import arguments
from tigon.ops.arguments import check_booleans, check_choice, check_dtype, check_integers, check_numbers
from tigon.ops.cross_entropy import REDUCTIONS

_OP = "linear_cross_entropy_memory"
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # DType
MIB = 1 << 20
_MOST = 1 << 62
AUTOMATIC = -1  # of `keep_rows`: all rows if one chunk holds all, else none
MOST_GROUP_LOGITS = 1 << 30  # bytes of a group's logits: loss_head_group_limit of the C++ side


def native_names(function: str) -> dict[str, int]:
    """Ask the native side for its names, in its order, with their values."""
    ask = getattr(library, function)
    ask.restype = ctypes.c_char_p
    words = (word.partition("=") for word in ask().decode().split())
    return {name: int(value) for name, _, value in words}


_DEFAULTS = native_names("tigon_loss_head_size_names")
Sizes = namedtuple("Sizes", _DEFAULTS, defaults=_DEFAULTS.values())  # LossHeadSizes of the C++ side
HeadPlan = namedtuple("HeadPlan", native_names("tigon_loss_head_plan_names"))


class HeadMemory(NamedTuple):
    """Bytes that a call takes, without the inputs."""

    chunk_rows: int
    workspace: int  # while a pass runs: logits of a chunk, gathered rows, words per row
    gradients: int  # kept from forward to backward
    results: int  # gradients in their final dtype, loss and outputs, which exist at the end
    peak: int


class MemoryOptions(TypedDict, total=False):
    """Sizes and options of a call, for every head."""

    device: str | torch.device
    weight_dtype: torch.dtype | None
    train_hidden: bool
    train_weight: bool
    train_bias: bool
    lora_rank: int
    valid_rows: int | None
    chunk_rows: int | None
    max_peak_mb: float | None


class LogProbMemoryOptions(MemoryOptions, total=False):
    """The sizes and options of log-probabilities."""

    main_grad: bool
    logit_dtype: torch.dtype | None


class LossMemoryOptions(LogProbMemoryOptions, total=False):
    """The sizes and options of losses of labels."""

    reduction: str
    max_workspace_mb: float | None
    keep_mb: float | None


def _native_plan(function: str, sizes: tuple[int, ...], others: tuple[int, ...]) -> HeadPlan:
    """Call this function of the native side."""
    results = (ctypes.c_int64 * len(HeadPlan._fields))()
    given = (ctypes.c_int64 * len(Sizes._fields))(*sizes)
    getattr(library, function)(given, *map(ctypes.c_int64, others), results)
    return HeadPlan(*results)


# A constant of a trace, as torch.compiler.assume_constant_result makes it, which imports the compiler.
_native_plan._dynamo_marked_constant = True


class Planner(NamedTuple):
    """A function of the native side that plans a call, and the numbers that it takes after the sizes."""

    function: str
    numbers: tuple[int, ...] = ()


LOSS_HEAD = Planner("tigon_loss_head_plan")


def plan(sizes: Sizes, planner: Planner = LOSS_HEAD) -> HeadPlan:
    """Ask the native side for the plan of a call, which follows only from sizes; symbolic sizes become
    numbers.
    """
    sizes, numbers = (tuple(map(operator.index, given)) for given in (sizes, planner.numbers))
    return _native_plan(planner.function, sizes, numbers)


def with_head(sizes: Sizes, hidden: torch.Tensor, vocab: int, rows: int, weight_dtype=None) -> Sizes:
    """Set the sizes of a head, and that all rows are computed."""
    return sizes._replace(
        cuda=hidden.device.type == "cuda",
        dtype=_CODES[hidden.dtype],
        weight_dtype=_CODES[weight_dtype or hidden.dtype],
        rows=rows,
        worked=rows,
        hidden=hidden.shape[-1],
        vocab=vocab,
    )


def padded(vocab: int) -> int:
    """Return the number of elements between the rows of logits, whole 128-byte lines."""
    return (vocab + 63) // 64 * 64


def rows_within(keep_mb, vocab, itemsize) -> int:
    """Convert ``keep_mb`` to a number of rows, or to AUTOMATIC."""
    if keep_mb is None:
        return AUTOMATIC
    return int(min(keep_mb, 2.0**40) * MIB) // (padded(vocab) * itemsize)


def chunk_that_fits(op, hidden, weight, head, sizes: Sizes) -> int:
    """Rows per chunk within the limit (and at most as many as requested)."""
    cap, rows = head.max_workspace_mb, hidden.numel() // hidden.shape[-1]
    sizes = sizes._replace(chunk_rows=head.chunk_rows or 0, cap=limit_bytes(cap))
    head_plan = plan(with_head(sizes, hidden, weight.shape[0], rows))
    check_fits(op, head_plan, 1, "one row", cap)
    return head_plan.chunk_rows


def check_fits(op, head_plan: HeadPlan, rows: int, what: str, cap) -> None:
    """Check that a chunk of so many rows is within the limit."""
    least = -(-(head_plan.fixed + rows * head_plan.row) // MIB)
    words = "max_workspace_mb must be at least {} for " + what + ", got {}"
    check(op, head_plan.fits >= rows, words, least, cap)


def check_cap(op, **caps: float | None) -> None:
    """Check numbers of MiB; None sets no bound."""
    for name, cap in caps.items():
        if cap is not None:
            check_numbers(op, **{name: cap})
            finite = -math.inf < cap < math.inf
            check(op, finite, name + " must be finite (or None), got {}", cap)


def limit_bytes(limit_mb: float | None, extra_bytes: int = 0) -> int:
    """Convert a limit to bytes, without the `extra_bytes` that the plan does not know; -1: there is none."""
    return -1 if limit_mb is None else min(max(int(limit_mb * MIB) - extra_bytes, 0), _MOST)


def check_peak(op, head_plan: HeadPlan, extra_bytes: int, max_peak_mb) -> None:
    """Check that the peak is large enough for the call."""
    least = -(-(head_plan.least + extra_bytes) // MIB)
    check(
        op, head_plan.least == 0, "max_peak_mb must be at least {} for this call, got {}", least, max_peak_mb
    )


def check_unbounded(op, max_peak_mb, where: str) -> None:
    """Check that no peak is asked for where none is kept."""
    check(op, max_peak_mb is None, "max_peak_mb must be None {}, got {}", where, max_peak_mb)


def check_keep(op, keep_mb) -> None:
    """Check the number of MiB that the gradients of the logits may take, or none."""
    if keep_mb is not None:
        check_numbers(op, keep_mb=keep_mb)
        check(op, keep_mb >= 0, "keep_mb must be >= 0 (or None), got {}", keep_mb)


def _device_type(device: str | torch.device) -> str:
    """``"cpu"`` or ``"cuda"``."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError, ValueError):
        kind = None
    check(_OP, kind in ("cpu", "cuda"), "device must be a CPU or CUDA device, got {!r}", device)
    return kind


def _check_count(rows: int, valid_rows: int | None) -> None:
    """Check the number of rows that count."""
    if valid_rows is not None:
        check_integers(_OP, least=0, valid_rows=valid_rows)
        words = "valid_rows must be in [0, {}] (or None), got {}"
        check(_OP, valid_rows <= rows, words, rows, valid_rows)


@dataclass(frozen=True)
class _PlannedCall:
    """A call whose memory is asked for, as the caller describes it."""

    rows: int
    hidden_size: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    _: KW_ONLY
    device: str | torch.device = "cuda"
    weight_dtype: torch.dtype | None = None
    train_hidden: bool = True
    train_weight: bool = True
    train_bias: bool = False
    main_grad: bool = False
    lora_rank: int = 0
    valid_rows: int | None = None
    reduction: str = "mean"
    chunk_rows: int | None = None
    max_workspace_mb: float | None = None
    max_peak_mb: float | None = None
    keep_mb: float | None = None
    logit_dtype: torch.dtype | None = None

    def check(self) -> None:
        """Refuse sizes and options that the function would not take."""
        check_integers(_OP, least=0, rows=self.rows, lora_rank=self.lora_rank)
        check_integers(_OP, least=1, hidden_size=self.hidden_size, vocab=self.vocab)
        if self.chunk_rows is not None:
            check_integers(_OP, least=1, chunk_rows=self.chunk_rows)
        _check_count(self.rows, self.valid_rows)
        check_dtype(_OP, "dtype", self.dtype, (*_CODES,))
        check_dtype(_OP, "weight_dtype", self.weight_dtype, (*_CODES, None))
        check_dtype(_OP, "logit_dtype", self.logit_dtype, (None, torch.float32, self.dtype))
        check_choice(_OP, "reduction", self.reduction, REDUCTIONS)
        check_booleans(_OP, **self._trained(), main_grad=self.main_grad)
        check_cap(_OP, max_workspace_mb=self.max_workspace_mb, max_peak_mb=self.max_peak_mb)
        check_keep(_OP, self.keep_mb)
        if self.dtype == torch.float64:
            check_unbounded(_OP, self.max_peak_mb, "in float64")

    def _trained(self) -> dict[str, bool]:
        names = ("train_hidden", "train_weight", "train_bias")
        return {name: getattr(self, name) for name in names}

    def memory(self, sizes: Sizes, planner: Planner = LOSS_HEAD, extra_bytes: int = 0) -> HeadMemory:
        """Check the call and ask for its memory.

        Args:
            sizes: what the operator sets itself.
            extra_bytes: of the peak, that the plan does not know.
        """
        self.check()
        sizes = sizes._replace(
            cuda=_device_type(self.device) == "cuda",
            dtype=_CODES[self.dtype],
            weight_dtype=_CODES[self.weight_dtype or self.dtype],
            rows=self.rows,
            worked=self.rows if self.valid_rows is None else self.valid_rows,
            hidden=self.hidden_size,
            vocab=self.vocab,
            lora_rank=self.lora_rank,
            **self._trained(),
            main_grad=self.main_grad,
            wide=self.logit_dtype == torch.float32 and self.dtype in (torch.bfloat16, torch.float16),
            chunk_rows=self.chunk_rows or 0,
            cap=limit_bytes(self.max_workspace_mb),
            per_row=self.reduction == "none",
            keep_rows=rows_within(self.keep_mb, self.vocab, self.dtype.itemsize),
            unit=self.keep_mb != 0,
            peak=limit_bytes(self.max_peak_mb, extra_bytes),
        )
        head_plan = plan(sizes, planner)
        check_peak(_OP, head_plan, extra_bytes, self.max_peak_mb)
        return HeadMemory(*(getattr(head_plan, name) for name in HeadMemory._fields))


@arguments.called()
@arguments.unpacked(_PlannedCall)
def linear_cross_entropy_memory(
    rows: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    **options: Unpack[LossMemoryOptions],
) -> HeadMemory:
    """Bytes that :func:`tigon.linear_cross_entropy` and its backward take, without their inputs.

    ``workspace = chunk * V * size``, plus gathered rows, numbers per row and the workspace of the matmuls.
    With one chunk ``gradients = rows * H * size + V * H * size`` for the operands that are trained; with more
    chunks the weight's gradient takes ``4 V H``. At the end of the backward, gradients whose parameter has
    another dtype exist twice. ``peak`` is the larger of the two moments. Memory that a PyTorch matmul on the
    CPU allocates and frees internally is not counted. In float64 the eager reference runs. Then ``workspace``
    is the three tensors of the logits' size that exist at a time, whatever the options, and includes the
    tensors that it keeps.

    Arguments are the sizes and options of the call. ``train_*`` says which operands need a gradient.
    ``main_grad`` says that the weight's gradient is added to its ``main_grad``. With ``"none"``,
    ``gradients`` is the memory kept from forward to backward (:func:`tigon.linear_log_prob_memory`).

    Raises:
        tigon.Error: a size or an option that :func:`tigon.linear_cross_entropy` would not take.
    """
    return _PlannedCall(rows, hidden_size, vocab, dtype, **options).memory(Sizes(classes=True))


@arguments.called()
@arguments.unpacked(_PlannedCall)
def linear_log_prob_memory(
    rows: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    keep_mb: float | None = None,
    labels: int = 1,
    **options: Unpack[LogProbMemoryOptions],
) -> HeadMemory:
    """Bytes that :func:`tigon.linear_log_prob` and its backward take, without their inputs.

    ``gradients`` is the memory kept from forward to backward: ``rows * H * size`` for hidden's gradient if
    the forward computes it, and ``rows * V * size`` (V rounded up to 64) for the gradients of the logits of
    the rows that are kept. The backward computes the weight's gradient: ``V * H * size`` with one chunk,
    ``4 V H`` with several. The rest is as in :func:`tigon.linear_cross_entropy_memory`. With entropies logits
    are kept instead of their gradients, and the backward computes hidden's gradient. With K ``labels`` a row
    nothing is kept, and each row takes ``4 K`` bytes of results and as many while a pass runs.

    Raises:
        tigon.Error: a size or an option that :func:`tigon.linear_log_prob` would not take.
    """
    check_integers(_OP, least=1, labels=labels)
    keep_mb = 0 if labels > 1 else keep_mb
    extra = 4 * rows * labels if labels > 1 and dtype != torch.float64 else 0  # scores; and the results
    call = _PlannedCall(rows, hidden_size, vocab, dtype, reduction="none", keep_mb=keep_mb, **options)
    memory = call.memory(Sizes(classes=labels == 1), extra_bytes=2 * extra)
    return memory._replace(
        workspace=memory.workspace + extra, results=memory.results + extra, peak=memory.peak + 2 * extra
    )


@arguments.called()
@arguments.unpacked(_PlannedCall)
def linear_preference_memory(
    answers: int,
    tokens: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 2,
    **options: Unpack[LossMemoryOptions],
) -> HeadMemory:
    """Bytes that :func:`tigon.linear_preference` and its backward take, without their inputs.

    It also serves :func:`tigon.linear_kto` (``group=1``) and :func:`tigon.linear_policy` (``group=1`` if the
    loss of a token depends on its answer, 0 otherwise). The result is that of
    :func:`linear_cross_entropy_memory` with chunks of whole groups, plus a copy of a chunk's hidden states
    times their factors. Every row counts here.

    Args:
        answers, tokens: leading sizes of target.
        group: answers that share a chunk: 2 for pairs, 1, or 0 for tokens.
        Others: as in :func:`linear_cross_entropy_memory`.

    Raises:
        tigon.Error: a size or an option that is out of range.
    """
    check_integers(_OP, group=group)
    check_integers(_OP, least=0, answers=answers, tokens=tokens)
    check(_OP, group in (0, 1, 2), "group must be 0, 1 or 2, got {}", group)
    call = _PlannedCall(answers * tokens, hidden_size, vocab, dtype, **options)
    return call.memory(Sizes(classes=True), Planner("tigon_linear_preference_plan", (group, tokens)))


@arguments.called()
@arguments.unpacked(_PlannedCall)
def linear_divergence_memory(
    rows: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    teacher_hidden_size: int | None = None,
    reduction: str = "batchmean",
    **options: Unpack[MemoryOptions],
) -> HeadMemory:
    """Bytes that :func:`tigon.linear_kl_div`, ``linear_jsd`` or ``linear_tvd`` and its backward take, without
    the inputs.

    The result is that of :func:`tigon.linear_cross_entropy_memory` for the student's head, whose chunk holds
    the logits' gradient here, plus the float32 logits of both sides for some rows. These rows take up to
    1 GiB and are at least 512.

    Args:
        teacher_hidden_size: size of the teacher's hidden states; ``None``: its logits are given.
        Others: as :func:`tigon.linear_cross_entropy_memory`.

    Raises:
        tigon.Error: a size or an option that the functions would not take.
    """
    known = {"none": "none", "sum": "sum", "batchmean": "mean", "mean": "mean"}
    check_choice("linear_divergence_memory", "reduction", reduction, known)
    if teacher_hidden_size is not None:
        check_integers("linear_divergence_memory", least=1, teacher_hidden_size=teacher_hidden_size)
    call = _PlannedCall(rows, hidden_size, vocab, dtype, reduction=known[reduction], keep_mb=0, **options)
    return call.memory(Sizes(), Planner("tigon_linear_divergence_plan", (teacher_hidden_size or 0,)))


@arguments.called()
@arguments.unpacked(_PlannedCall)
def drafter_loss_memory(
    rows: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    teacher_hidden_size: int,
    teacher_vocab: int,
    steps: int = 1,
    draft_ids: bool = True,
    reduction: str = "mean",
    **options: Unpack[MemoryOptions],
) -> HeadMemory:
    """Bytes that :func:`tigon.drafter_loss` and its backward take, without their inputs.

    The result is that of :func:`tigon.linear_cross_entropy_memory` for the draft's head, plus the teacher's
    logits for some rows, and those of the draft's classes among them. Copies of the operands are not counted:
    of hidden states that are a list or shifted, and of a teacher that is converted or truncated.

    Args:
        rows: positions of the teacher; the draft has ``rows * steps``.
        hidden_size, vocab: of the draft.
        steps: of the draft for each position.
        draft_ids: the draft has fewer classes than the teacher.
        valid_rows: of ``rows``.
        Others: as :func:`tigon.linear_cross_entropy_memory`.

    Raises:
        tigon.Error: a size or an option that the function would not take.
    """
    teacher = {"teacher_hidden_size": teacher_hidden_size, "teacher_vocab": teacher_vocab}
    check_integers(_OP, least=1, steps=steps, **teacher)
    check_integers(_OP, least=0, rows=rows)
    check_booleans(_OP, draft_ids=draft_ids)
    _check_count(rows, options["valid_rows"])
    if options["valid_rows"] is not None:
        options["valid_rows"] *= steps
    call = _PlannedCall(rows * steps, hidden_size, vocab, dtype, reduction=reduction, keep_mb=0, **options)
    sides = steps, teacher_hidden_size, teacher_vocab, draft_ids
    return call.memory(Sizes(), Planner("tigon_drafter_loss_plan", sides))


@arguments.called()
@arguments.unpacked(_PlannedCall)
def linear_loss_memory(
    rows: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    **options: Unpack[MemoryOptions],
) -> HeadMemory:
    """Bytes that :func:`tigon.linear_loss` and its backward take, without their inputs and without what the
    function allocates for the rows of a chunk.

    The result is that of :func:`tigon.linear_cross_entropy_memory` with a gradient of the weight in float32,
    or where ``max_peak_mb`` has no room for that, of :func:`tigon.linear_log_prob_memory`. Losses of rows
    take the latter.

    Raises:
        tigon.Error: a size or an option that the function would not take.
    """
    try:
        return _PlannedCall(rows, hidden_size, vocab, dtype, **options).memory(Sizes(sums=True))
    except Error:  # of a bound, or of both
        return linear_log_prob_memory(rows, hidden_size, vocab, dtype, **options)
