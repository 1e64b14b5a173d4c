"""Cases of two processes: several heads over one trunk."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from two_processes import case, check_gradients, mesh, rank

import tigon

H, V, T = 16, 40, 12


class Model(nn.Module):
    """A trunk, its head and Medusa's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Embedding(V, H), nn.Linear(H, V, bias=False)
        self.heads = tigon.nn.MedusaHeads(H, V, 2).copy_head(self.head.weight)

    def forward(self, ids):
        return self.heads(self.trunk(ids), ids, head=self.head, scale=0.2).loss


@case(ddp=("ddp",), fsdp=("fsdp",), fsdp_of_heads=("fsdp of heads",))
def medusa(wrap):
    """Gradients of all heads are reduced, whatever holds MedusaHeads."""
    stock, model = Model(), Model()
    ids = torch.randint(0, V, (2, 2, T), generator=torch.Generator(stock.head.weight.device).manual_seed(0))
    ((stock(ids[0]) + stock(ids[1])) / 2).backward()
    if wrap == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        if wrap == "fsdp of heads":
            fully_shard(model.heads, mesh=mesh())
        wrapped = fully_shard(model, mesh=mesh())
    wrapped(ids[rank()]).backward()
    check_gradients(wrapped, {name: p.grad for name, p in stock.named_parameters()}, ulps=64)


class Drafter(nn.Module):
    """A draft of fewer classes that runs two steps ahead; its teacher is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.head = nn.Embedding(V, H), nn.Linear(H, V // 2, bias=False)
        self.step = nn.Linear(H, H)
        self.register_buffer("teacher", torch.randn(V, H))
        self.register_buffer("ids", torch.randperm(V)[: V // 2])

    def forward(self, ids, states, count):
        first = self.trunk(ids)
        hidden = [first, self.step(first)]
        options = {"mask": ids % 3 > 0, "loss": "lk", "shifts": (0, 1), "mask_outside": False}
        options |= {"outside": "renormalize", "denominator": count}
        return tigon.drafter_loss(hidden, self.head.weight, (states, self.teacher), self.ids, **options)


@case(ddp=("ddp",), fsdp=("fsdp",))
def drafter(wrap):
    """Divided by the positions of all processes: the gradients of one process with both batches."""
    stock, model = Drafter(), Drafter()
    generator = torch.Generator(stock.head.weight.device).manual_seed(0)
    ids = torch.randint(0, V, (2, 2, T), generator=generator)
    states = torch.randn(2, 2, T, H, generator=generator)
    count = float((ids % 3 > 0).sum())
    stock(ids.flatten(0, 1), states.flatten(0, 1), count).backward()
    wrapped = nn.parallel.DistributedDataParallel(model) if wrap == "ddp" else fully_shard(model, mesh=mesh())
    wrapped(ids[rank()], states[rank()], count / 2).backward()  # gradients are averaged over two
    check_gradients(wrapped, {name: p.grad for name, p in stock.named_parameters()}, ulps=64)
