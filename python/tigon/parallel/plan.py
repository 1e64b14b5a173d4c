"""How a call of a sharded head is divided: the rows that count, their chunks and parts, and the rows kept.

All of it depends only on values that the processes agreed on, so all divide alike without communication.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon.error import check
from tigon.ops.loss_head.driver import Chunk, Part
from tigon.ops.loss_head.labels import check_count, known_rows, shifted
from tigon.ops.loss_head.linear_loss import list_rows
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import MIB, HeadPlan, Sizes, check_fits, padded, plan

_LEAST_PART = 1024  # rows that a matmul on CUDA needs for full speed
_ALIGNED = 128
_FRACTIONS = (0.5, 0.5)  # of the rows that are left; the last part takes the rest
_MOST_LOGITS = 1280 * MIB  # of a chunk whose weight is trained, on CUDA


def divide(rows: int, chunk: int, sp_size: int, *, exchanges: bool, on_cuda: bool) -> list[Chunk]:
    """Divide ``rows`` of a sequence shard into chunks of ``chunk`` rows.

    In a call that exchanges, a chunk has up to three parts: the exchange of one overlaps work on the next.
    The last part is smaller, since nothing but a matmul overlaps the reduction of its gradient.
    """
    least = -(-_LEAST_PART // sp_size) if on_cuda else 1
    chunks = []
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        bounds = [begin]
        for fraction in _FRACTIONS if exchanges else ():
            left = end - bounds[-1]
            if left < 2 * least:
                break
            later = max(int(left * (1 - fraction)), least)
            bounds.append(end - (later - later % _ALIGNED if later > _ALIGNED else later))
        bounds.append(end)
        parts = tuple(
            Part(a, b, slice(sp_size * (a - begin), sp_size * (b - begin)), b == end)
            for a, b in zip(bounds, bounds[1:], strict=False)
        )
        chunks.append(Chunk(begin, end, slice(sp_size * begin, sp_size * end), parts, end == rows))
    return chunks


def choose(op, head: HeadOptions, sizes: Sizes, dtypes, sp_size, *, keep_mb, recomputes) -> tuple[int, bool]:
    """Choose the rows of a chunk, of all processes, and whether the gradients of all logits are kept.

    Args (the same in all processes):
        sizes: of all sequence shards and of the widest shard of the vocabulary.
        dtypes: of hidden and weight.
        sp_size: the number of sequence shards; 1 without sequence parallelism.
        recomputes: the backward computes the logits again, so none are kept.
    """
    rows, asked, cap = sizes.rows, sizes.chunk_rows, head.max_workspace_mb
    logits = rows * padded(sizes.vocab) * dtypes[0].itemsize
    if sizes.cuda and sizes.train_weight and not asked and rows > 0:
        # A chunk more reads and writes the weight's gradient once more, and its exchanges are less hidden.
        chunks = -(-logits // _MOST_LOGITS)
        asked = max(-(-rows // chunks // _ALIGNED) * _ALIGNED, _LEAST_PART)
    head_plan = plan(sizes._replace(chunk_rows=asked))
    if cap is not None and rows > 0:
        check_fits(op, head_plan, sp_size, "one row of every shard", cap)
    chunk = max(min(head_plan.chunk_rows, rows), 1)
    if head.max_peak_mb is not None and rows > 0:
        chunk = _within(op, head_plan, chunk, head.max_peak_mb, sizes, dtypes, sp_size)
        keep_mb = None
    if recomputes:  # a gradient of the entropies is not a multiple of the kept one
        return chunk, False
    return chunk, chunk >= rows if keep_mb is None else logits <= keep_mb * MIB


def _within(op, head_plan: HeadPlan, most_rows, max_peak_mb, sizes: Sizes, dtypes, sp_size) -> int:
    """Find the rows of a chunk, at most `most_rows`, such that no process takes more than ``max_peak_mb``."""
    rows, size, widest, (dtype, weight_dtype) = sizes.rows, sizes.hidden, sizes.vocab, dtypes
    itemsize = dtype.itemsize
    weights = widest * size * (sizes.train_weight and not sizes.main_grad)
    others = rows // sp_size * size * itemsize * sizes.train_hidden
    others += 4 * (widest * sizes.train_bias + sizes.lora_rank * (size + widest))
    others += widest * size * itemsize * (weight_dtype != dtype)
    narrow = weight_dtype == dtype == torch.bfloat16  # of one chunk, as ShardPass forms it
    cast = weights * weight_dtype.itemsize * (weight_dtype != torch.float32)

    def peak(of_chunk):
        workspace = head_plan.fixed + of_chunk * head_plan.row
        if narrow and of_chunk >= rows:
            return others + weights * itemsize + workspace
        return others + 4 * weights + max(workspace, cast)

    most = max_peak_mb * MIB
    if peak(most_rows) <= most:
        return most_rows
    least = -(-peak(min(sp_size, rows)) // MIB)
    words = "max_peak_mb must be at least {} for one row of every shard, got {}"
    check(op, least <= max_peak_mb, words, least, max_peak_mb)
    fits = int(most - others - 4 * weights - head_plan.fixed) // head_plan.row
    fits = fits // _ALIGNED * _ALIGNED if fits >= 2 * _ALIGNED else fits
    return max(min(fits, most_rows, rows - 1), 1)


def known_count(op: str, target: torch.Tensor, ignore_index: int, shift: bool, valid_rows: int | None) -> int:
    """Return how many labels count, -1 if it is not known; the same in all processes.

    The number of :func:`tigon.count_labels` is not used: only one process may have called it.
    """
    if valid_rows is not None:
        known_rows(op, target, ignore_index, shift, valid_rows, target.device)
    given = -1 if valid_rows is None else valid_rows
    if target.device.type != "cpu":
        return given
    return check_count(op, shifted(target, ignore_index, shift), ignore_index, given)


class ListedRows(NamedTuple):
    """The labels of a call and the list of its rows."""

    labels: torch.Tensor  # int64, of the computed rows
    rows: int  # of all
    index: torch.Tensor | None = None  # row of each; None: all are computed
    fault: torch.Tensor | None = None  # 0, or NaN if the given number is wrong

    def take(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Select the computed rows of a tensor of all rows."""
        return x if x is None or self.index is None else x.index_select(0, self.index)

    def give(self, values: torch.Tensor, ignored: int = 0) -> torch.Tensor:
        """Make values of all rows from those of the computed rows."""
        if self.index is None or values.dim() == 0 or values.shape[0] != self.index.shape[0]:
            return values
        whole = values.new_full((self.rows, *values.shape[1:]), ignored).index_copy(0, self.index, values)
        return whole if values.dtype == torch.int64 else whole + self.fault


def list_counted_rows(labels: torch.Tensor, ignore_index: int, known: int) -> ListedRows:
    """List the ``known`` rows that count; all rows if the number is not known or every row counts."""
    if not 0 <= known < labels.shape[0]:
        return ListedRows(labels, labels.shape[0])
    index, listed, fault = list_rows(labels, ignore_index, known)
    return ListedRows(listed, labels.shape[0], index, fault)
