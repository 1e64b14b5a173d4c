"""Cases of float8 in two processes: weights that are gathered, reduced and stepped are quantised anew."""

from __future__ import annotations

import copy

import torch
from tiny import make, step
from torch.nn.parallel import DistributedDataParallel
from two_processes import case, data, full, rank, shard, wanted

from tigon.integrations.transformers import apply, fp8

STEPS, LR = 3, 0.5


def of_any_size(model, **options):
    kept, fp8.gains = fp8.gains, lambda rows, columns: True
    try:
        report = apply(model, fp8="rowwise", **options)
    finally:
        fp8.gains = kept
    assert report.count("fp8") == 14
    return model


def wrapped(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(of_any_size(model))
    if kind == "fsdp2 after":
        return of_any_size(shard(model, "root"))
    return shard(of_any_size(model), "root", layers=kind != "fsdp2 kept")


@case(**{kind: (kind,) for kind in ("ddp", "fsdp2", "fsdp2 kept", "fsdp2 after")})
def fp8_steps(kind):
    """Losses and gradients of a few steps are those of one process with all data."""
    alone = of_any_size(make())
    model = wrapped(copy.deepcopy(make()), kind)
    ours = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(STEPS):
        losses, want = wanted(alone)
        loss, _ = step(model, data())
        assert abs(full(loss) - losses[rank()]) < 1e-3, (loss, losses)
        for name, parameter in model.named_parameters():
            exact, got = want[name.removeprefix("module.")], full(parameter.grad)
            assert (got - exact).norm() < 0.05 * exact.norm(), name
        ours.step()
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                parameter -= LR * want[name]
