"""The rows that count: where their number is known, others are left out of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon.ops.loss_head.labels import check_count, known_rows, shifted
from tigon.ops.loss_head.linear_loss import list_rows


def count(op: str, target: torch.Tensor, ignore_index: int, shift: bool, valid_rows: int | None) -> int:
    """How many labels count, -1 where it is not known: alike in all processes.

    What :func:`tigon.count_labels` finds does not serve here: it may have been called in one process alone.
    """
    if valid_rows is not None:
        known_rows(op, target, ignore_index, shift, valid_rows, target.device)
    given = -1 if valid_rows is None else valid_rows
    if target.device.type != "cpu":
        return given
    return check_count(op, shifted(target, ignore_index, shift), ignore_index, given)


class Counting(NamedTuple):
    """The labels of a call and the list of its rows."""

    labels: torch.Tensor  # int64, of the rows worked on
    rows: int  # of all
    index: torch.Tensor | None = None  # row of each; None: all are worked on
    fault: torch.Tensor | None = None  # 0, or NaN where the promised number is wrong

    def take(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """The rows worked on of a tensor of all rows."""
        return x if x is None or self.index is None else x.index_select(0, self.index)

    def give(self, values: torch.Tensor, ignored: int = 0) -> torch.Tensor:
        """Values of all rows from those worked on."""
        if self.index is None or values.dim() == 0 or values.numel() != self.index.shape[0]:
            return values
        whole = values.new_full((self.rows,), ignored).index_copy(0, self.index, values)
        return whole if values.dtype == torch.int64 else whole + self.fault


def counting(labels: torch.Tensor, ignore_index: int, known: int) -> Counting:
    """The list of ``known`` rows; all rows where it is not known, or every one counts."""
    if not 0 <= known < labels.shape[0]:
        return Counting(labels, labels.shape[0])
    index, listed, fault = list_rows(labels, ignore_index, known)
    return Counting(listed, labels.shape[0], index, fault)
