"""The pass of a loss over the rows of a head: the one loop over its chunks.

A loss is three hooks (:class:`RowPass`): ``memory`` for chunks of a given size, ``rows`` for a part of a
chunk, and ``finish``. Between the matmuls ``linear_loss`` runs a Python function, and ``tigon.parallel``
exchanges data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tigon.ops.loss_head.operands import BIAS, HIDDEN, LORA_A, LORA_B, WEIGHT
from tigon.ops.loss_head.plan import padded


class Part(NamedTuple):
    """Rows of a chunk between two exchanges."""

    begin: int  # rows [begin, end) of a sequence shard
    end: int
    at: slice  # its rows of all sequence shards among the chunk's
    last: bool  # of the chunk


class Chunk(NamedTuple):
    """Rows whose logits exist at a time: those of its parts, one after another, of all sequence shards."""

    begin: int  # rows [begin, end) of a sequence shard
    end: int
    at: slice  # its rows of all sequence shards among those of the call
    parts: tuple[Part, ...]
    last: bool
    groups: slice = slice(0)  # whole groups of rows, where a loss has some

    @classmethod
    def whole(cls, begin: int, end: int, groups: slice = slice(0)) -> Chunk:
        """A chunk of one part, without sequence shards."""
        part = Part(begin, end, slice(end - begin), True)
        return cls(begin, end, slice(begin, end), (part,), False, groups)


class RowPass:
    """One pass of a loss over rows [rows, H] of hidden states, of one dtype."""

    def __init__(self, hidden: torch.Tensor, vocab: int, chunks: list[Chunk]) -> None:
        self.hidden, self.vocab, self.chunks = hidden, vocab, chunks

    def space(self, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for the logits of so many rows; on the CPU zeros follow each of them."""
        memory = self.hidden.new_empty(rows, padded(self.vocab), dtype=dtype or self.hidden.dtype)
        if memory.device.type == "cpu":
            memory[:, self.vocab :] = 0.0
        return memory[:, : self.vocab]

    def states(self) -> Iterator[tuple[Chunk, Part, torch.Tensor | None]]:
        """Every part with its chunk and the chunk's hidden states; those of the part are ready."""
        for chunk in self.chunks:
            for part in chunk.parts:
                yield chunk, part, self.hidden[chunk.begin : chunk.end]

    def memory(self, rows: int) -> None:
        """Allocate the memory for chunks of at most so many rows."""
        raise NotImplementedError

    def rows(self, chunk: Chunk, part: Part, hidden: torch.Tensor | None) -> None:
        """Process the rows of a part."""
        raise NotImplementedError

    def finish(self) -> Any:
        """Return the results after the last chunk."""
        raise NotImplementedError

    def run(self) -> Any:
        """Process all chunks and return the results."""
        self.memory(max((chunk.at.stop - chunk.at.start for chunk in self.chunks), default=0))
        for chunk, part, hidden in self.states():
            self.rows(chunk, part, hidden)
            del hidden  # before the next one is gathered
        return self.finish()


class Gradients:
    """The needed gradients, summed over chunks, for `width` classes; those past vocab are padding."""

    def __init__(self, rows: RowPass, needs: int, width: int, dtype=torch.float32, lora_a=None) -> None:
        hidden, f32, dense = rows.hidden, torch.float32, torch.contiguous_format
        # Columns of padding get zeros; the first chunk writes the others.
        self.written = rows.vocab if rows.chunks and rows.chunks[-1].end > 0 else 0
        rank = 0 if lora_a is None else lora_a.shape[0]
        self.dhidden = torch.empty_like(hidden, memory_format=dense) if needs & HIDDEN else None
        self.dweight = self._empty(hidden, needs & WEIGHT, width, hidden.shape[1], dtype=dtype)
        self.dbias = self._empty(hidden, needs & BIAS, width, dtype=f32)
        self.dlora_a = torch.empty_like(lora_a, dtype=f32) if needs & LORA_A else None
        self.dlora_b = self._empty(hidden, needs & LORA_B, width, rank, dtype=f32)
        if self.dlora_a is not None and self.written == 0:
            self.dlora_a.zero_()

    def _empty(self, like, needed, *shape, dtype):
        if not needed:
            return None
        gradient = like.new_empty(shape, dtype=dtype)
        gradient[self.written :] = 0.0
        return gradient

    def as_tuple(self) -> tuple:
        """The gradients in the order of the parameters, hidden's first."""
        return self.dhidden, self.dweight, self.dbias, self.dlora_a, self.dlora_b
