"""The rows of all processes of a group as one batch, with the gradients of a loss that all compute."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tigon._deterministic import is_deterministic
from tigon.ops.agreement import Facts, agree, code, comparable, gathered, number_of, reduce_scatter, trains


class Gather:
    """The collectives of a group whose processes have the same number of rows x and the same options.

    Each of the tensors `trained` is trained by all processes or by none. Each process's backward computes its
    own part of the gradients.
    """

    @torch._disable_dynamo
    def __init__(self, op: str, group: object, x: torch.Tensor, trained: tuple, options: dict) -> None:
        def describe():
            world = dist.get_world_size(group)
            given = {name: number_of(value) for name, value in options.items()}
            facts = Facts(
                rows=x.shape[0],
                size=x.shape[1],
                dtype=code(x.dtype),
                needs=trains(*trained),
                columns=1,
                vocab=world,
                options=comparable(op=op, **given, deterministic=is_deterministic()),
            )
            return facts, None

        shards, _ = agree(op, group, x.device, describe)
        self.group, self.size = group, shards.size
        self.mine = slice(shards.rank * x.shape[0], (shards.rank + 1) * x.shape[0])

    @torch._disable_dynamo
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all processes in their order; the backward sums the gradients of all."""
        return _Rows.apply(x, self)

    @torch._disable_dynamo
    def log_sum(self, lse: torch.Tensor) -> torch.Tensor:
        """Compute ``log sum exp`` over the processes, element by element."""
        return _LogSum.apply(lse, self)

    @torch._disable_dynamo
    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the processes; each process's backward is that of its own summand."""
        return _Sum.apply(x, self)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        return gathered(x, self.size, self.group)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This process's part of what all rows have."""
        return x[self.mine]

    def labels(self, labels: torch.Tensor, ignored: int) -> torch.Tensor:
        """The labels of this process's rows; those of others are ignored."""
        whole = labels.new_full((self.size * len(labels), *labels.shape[1:]), ignored)
        whole[self.mine] = labels
        return whole


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gather):
        ctx.gather = gather
        return gather.gathered(x)

    @staticmethod
    def backward(ctx, dwhole):
        gather = ctx.gather
        part = dwhole.new_empty(dwhole.shape[0] // gather.size, *dwhole.shape[1:])
        reduce_scatter(part, dwhole.contiguous(), group=gather.group)
        return part, None


class _LogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lse, gather):
        whole = gather.gathered(lse[None]).logsumexp(0)
        ctx.gather = gather
        ctx.save_for_backward(lse, whole)
        return whole

    @staticmethod
    def backward(ctx, dwhole):
        lse, whole = ctx.saved_tensors
        dwhole = dwhole.clone()  # of the process's own queries
        dist.all_reduce(dwhole, group=ctx.gather.group)
        fraction = torch.where(lse == -torch.inf, 0.0, (lse - whole).exp())
        return fraction * dwhole, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gather):
        total = x.clone()
        dist.all_reduce(total, group=gather.group)
        return total

    @staticmethod
    def backward(ctx, dtotal):
        return dtotal, None
