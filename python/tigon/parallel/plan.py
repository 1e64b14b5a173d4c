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
from tigon.ops.loss_head.plan import MIB, check_fits, padded, plan_of

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


def choose(
    op,
    hidden,
    head: HeadOptions,
    *,
    sp_size,
    widest,
    keep_mb,
    recomputes,
    statistics,
    listed,
    scaled,
    wide,
    weight_dtype,
    **sizes,
) -> tuple[int, bool]:
    """Choose the rows of a chunk, of all processes, and whether the gradients of all logits are kept.

    Args: the same in all processes.
        hidden: the computed rows of a sequence shard.
        sp_size: the number of sequence shards; 1 without sequence parallelism.
        widest: columns of the widest shard of the vocabulary.
        recomputes: the backward computes the logits again, so none are kept.
        statistics: bytes of a row.
        listed, scaled: the rows are copies; those of a chunk are copied once more.
        wide: their logits are float32 too.
        sizes: others of :func:`plan`.
    """
    itemsize, widest, cap = hidden.dtype.itemsize, max(widest, 1), head.max_workspace_mb
    rows, asked = sp_size * hidden.shape[0], head.chunk_rows or 0
    if hidden.is_cuda and sizes["train_weight"] and not asked and rows > 0:
        # A chunk more reads and writes the weight's gradient once more, and its exchanges are less hidden.
        chunks = -(-rows * padded(widest) * itemsize // _MOST_LOGITS)
        asked = max(-(-rows // chunks // _ALIGNED) * _ALIGNED, _LEAST_PART)
    # Sequence shards take a gathered chunk, the next one, and gradients being reduced. Logits of both
    # precisions are counted.
    sizes |= {"copies": 3 * (sp_size > 1) + scaled, "row": statistics + 4 * padded(widest) * wide}
    sizes |= {"fixed": 2 * rows * hidden.shape[-1] * itemsize * listed, "chunk_rows": asked}
    sizes["lean"] = 0  # fewer rows would be more exchanges
    found = plan_of(hidden, widest, rows, max_workspace_mb=cap, **sizes)
    if cap is not None and rows > 0:
        check_fits(op, found, sp_size, "one row of every share", cap)
    chunk = max(min(found.chunk_rows, rows), 1)
    if head.max_peak_mb is not None and rows > 0:
        layout = {"rows": rows, "sp_size": sp_size, "widest": widest, "weight_dtype": weight_dtype}
        bounds = {"max_peak_mb": head.max_peak_mb, "most_rows": chunk}
        chunk = _within(op, found, hidden, **bounds, **layout, sizes=sizes)
        keep_mb = None
    if recomputes:  # a gradient of the entropies is not a multiple of the kept one
        return chunk, False
    if keep_mb is None:
        return chunk, chunk >= rows
    return chunk, rows * padded(widest) * itemsize <= keep_mb * MIB


def _within(op, found, hidden, *, max_peak_mb, most_rows, rows, sp_size, widest, weight_dtype, sizes) -> int:
    """Find the rows of a chunk, at most `most_rows`, such that no process takes more than ``max_peak_mb``."""
    size, itemsize, rank = hidden.shape[-1], hidden.dtype.itemsize, sizes["lora_rank"]
    weights = widest * size * (sizes["train_weight"] and not sizes["main_grad"])
    others = hidden.numel() * itemsize * sizes["train_hidden"]
    others += 4 * (widest * sizes["train_bias"] + rank * (size + widest))
    others += widest * size * itemsize * (weight_dtype != hidden.dtype)
    narrow = weight_dtype == hidden.dtype == torch.bfloat16  # of one chunk, as ShardPass forms it
    cast = weights * weight_dtype.itemsize * (weight_dtype != torch.float32)

    def peak(of_chunk):
        workspace = found.fixed + of_chunk * found.row
        if narrow and of_chunk >= rows:
            return others + weights * itemsize + workspace
        return others + 4 * weights + max(workspace, cast)

    most = max_peak_mb * MIB
    if peak(most_rows) <= most:
        return most_rows
    least = -(-peak(min(sp_size, rows)) // MIB)
    words = "max_peak_mb must be at least {} for one row of every share, got {}"
    check(op, least <= max_peak_mb, words, least, max_peak_mb)
    fits = int(most - others - 4 * weights - found.fixed) // found.row
    fits = fits // _ALIGNED * _ALIGNED if fits >= 2 * _ALIGNED else fits
    return max(min(fits, most_rows, rows - 1), 1)


def count(op: str, target: torch.Tensor, ignore_index: int, shift: bool, valid_rows: int | None) -> int:
    """Return how many labels count, -1 if it is not known; the same in all processes.

    The number of :func:`tigon.count_labels` is not used: only one process may have called it.
    """
    if valid_rows is not None:
        known_rows(op, target, ignore_index, shift, valid_rows, target.device)
    given = -1 if valid_rows is None else valid_rows
    if target.device.type != "cpu":
        return given
    return check_count(op, shifted(target, ignore_index, shift), ignore_index, given)


class Counting(NamedTuple):
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


def counting(labels: torch.Tensor, ignore_index: int, known: int) -> Counting:
    """List the ``known`` rows that count; all rows if the number is not known or every row counts."""
    if not 0 <= known < labels.shape[0]:
        return Counting(labels, labels.shape[0])
    index, listed, fault = list_rows(labels, ignore_index, known)
    return Counting(listed, labels.shape[0], index, fault)
