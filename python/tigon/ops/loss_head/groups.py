"""Rows whose losses depend on each other: answers and pairs of ``linear_loss``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon.error import check
from tigon.ops.arguments import check_choice
from tigon.ops.loss_head.labels import sequence_counts
from tigon.ops.loss_head.memory import MOST_GROUP_LOGITS, default_chunk, padded

KINDS = ("sequence", "pair")


class Span(NamedTuple):
    """A chunk: rows ``[begin, end)`` of the list, groups ``[first, last)``."""

    begin: int
    end: int
    first: int
    last: int


class Groups:
    """Answers ``[B, T]`` as groups in order: each alone, or answer g with answer B/2 + g."""

    def __init__(self, op, kind, target, ignore_index, shift=False, position_ids=None):
        check_choice(op, "group", kind, KINDS)
        check(op, target.dim() == 2, "target must be [B, T] with group, got {}", target.shape)
        answers, self.tokens = target.shape
        self.sides = 2 if kind == "pair" else 1
        even = answers % self.sides == 0
        check(op, even, "target must have chosen and rejected answers with group='pair', got {}", answers)
        self.number, self.rows = answers // self.sides, self.sides * self.tokens
        counts = sequence_counts(target, ignore_index, shift, position_ids)  # None: not known here
        if counts is None:
            self.sizes = [self.rows] * self.number
        else:
            self.sizes = [sum(counts[g :: self.number]) for g in range(self.number)]

    def spans(self, limit) -> list[Span]:
        """Chunks of whole groups: as many as have no more rows than `limit`, or one."""
        limit, found, begin, end, first = max(limit, *self.sizes, 1), [], 0, 0, 0
        for group, size in enumerate(self.sizes):
            if end + size - begin > limit:
                found.append(Span(begin, end, first, group))
                begin, first = end, group
            end += size
        return [*found, Span(begin, end, first, self.number)] if self.number else []

    def fit(self, op, device, dtype, size, vocab, dweight, chunk_rows) -> bool:
        """Whether the longest group fits a chunk."""
        longest = max(self.sizes, default=0)
        if chunk_rows is not None:
            return longest <= chunk_rows
        limit = default_chunk(device, dtype, sum(self.sizes), size, vocab, dweight=dweight)
        return longest <= max(limit, MOST_GROUP_LOGITS // (padded(vocab) * dtype.itemsize))

    def order(self, device):
        """The rows in the order of groups; None: as they are."""
        if self.sides == 1:
            return None
        rows = torch.arange(self.number * self.rows, device=device)
        return rows.view(self.sides, self.number, self.tokens).transpose(0, 1).reshape(-1)

    def _shape(self, t, each):
        """[B, ...] or [B * T, ...] as [sides, groups, ...]."""
        return t.view(self.sides, self.number, *each)

    def part(self, t, first, last):
        """Of a tensor [B, T, ...] or [B]: that of groups [first, last), as fn sees it; a view."""
        shaped = self._shape(t, t.shape[1:])[:, first:last]
        return shaped if self.sides > 1 else shaped[0]

    def seen(self, values, slots, count):
        """Numbers of rows as fn sees them, 0 where a row was left out: [groups, T] or [2, groups, T]."""
        if slots is not None:
            values = values.new_zeros(count * self.rows).scatter(0, slots, values)
        values = values.view(count, self.sides, self.tokens).transpose(0, 1)
        return values if self.sides > 1 else values[0]
