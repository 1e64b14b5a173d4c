"""The collectives of a sharded loss, which run while its matmuls do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tigon._deterministic import is_deterministic
from tigon.ops.agreement import Shards, all_gather, gathered, reduce_scatter


def _sum_in_order(parts: torch.Tensor, to: torch.Tensor) -> None:
    """Sum all processes' parts in order; in a collective the order depends on an element's place."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    to.copy_(total)


class Work:
    """Running collectives, each with the tensors that it reads and writes."""

    def __init__(self, shards: Shards) -> None:
        self.shards, self.pending = shards, []

    def _start(self, work, *tensors) -> None:
        self.pending.append((work, tensors))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """:func:`gathered` of the group."""
        return part if self.shards.size == 1 else gathered(part, self.shards.size, self.shards.group)

    def start_gather(self, part: torch.Tensor, whole: torch.Tensor | None = None):
        """A function that waits for :meth:`gather`'s result, in ``whole`` if that is given."""
        if self.shards.size == 1:
            return lambda: part
        if whole is None:
            whole = part.new_empty(self.shards.size * part.shape[0], *part.shape[1:])
        part = part.contiguous()
        work = all_gather(whole, part, group=self.shards.group, async_op=True)

        def wait():
            work.wait()
            return whole if part is not None else None  # `part` lives as long as it is read

        return wait

    def start_all_reduce(self, tensor: torch.Tensor) -> None:
        """Start a sum over the processes, in place; ready after :meth:`wait`."""
        if self.shards.size == 1:
            return
        if is_deterministic():
            _sum_in_order(self.gather(tensor[None]), tensor)
        else:
            self._start(dist.all_reduce(tensor, group=self.shards.group, async_op=True), tensor)

    def start_reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """``part`` = this process's rows of the sum of ``whole``; ready after :meth:`wait`."""
        if self.shards.size == 1:
            part.copy_(whole)
            return
        if is_deterministic():
            theirs = torch.empty_like(whole)
            dist.all_to_all_single(theirs, whole, group=self.shards.group)
            _sum_in_order(theirs.view(self.shards.size, *part.shape), part)
            return
        work = reduce_scatter(part, whole, group=self.shards.group, async_op=True)
        self._start(work, whole, part)

    def wait(self, but: int = 0) -> None:
        """Make later work on this stream wait for every result but the last `but` ones."""
        while len(self.pending) > but:
            work, _ = self.pending.pop(0)
            work.wait()
