"""Cases of float8 in two processes: weights that are gathered, reduced and stepped are quantised anew."""

import copy
from unittest import mock

import torch
from lora_cases import LAYERS, adapt, native
from tiny import make, step
from torch.nn.parallel import DistributedDataParallel
from two_processes import accelerated, case, data, full, rank, shard, two_steps, wanted

from tigon.integrations.transformers import apply, fp8
from tigon.ops import fp8_linear
from tigon.ops.fp8_weight import Fp8Weight

STEPS, LR = 3, 0.5


def of_any_size(model, recipe="rowwise", **options):
    """The model with every Linear of its layers in float8."""
    with mock.patch.object(fp8, "gains", lambda rows, columns: True):
        report = apply(model, fp8=recipe, **options)
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
    fp8_linear._kept.clear()
    for _ in range(STEPS):
        losses, want = wanted(alone)
        loss, _ = step(model, data())
        assert abs(full(loss) - losses[rank()]) < 1e-3, (loss, losses)
        for name, parameter in model.named_parameters():
            exact, got = want[name.removeprefix("module.")], full(parameter.grad)
            assert (got - exact).norm() < 0.05 * exact.norm(), name
        assert len(fp8_linear._kept) == (28 if kind == "ddp" else 14), "bytes of gathered weights are kept"
        ours.step()
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                parameter -= LR * want[name]


LORA = {
    f"{kind} {name}": (kind, options)
    for kind in ("ddp", "fsdp2", "fsdp2 after", "accelerate")
    for name, options in {"kept": {}, "bytes": {"fp8_base_only": True}}.items()
}


@case(needs="peft", **LORA)
def fp8_lora(kind, options):
    """Adapters' gradients are those of one process. A shard of a weight that was bytes alone is dense."""
    alone = of_any_size(adapt(make()))
    losses, want = wanted(alone)
    model = adapt(make())
    if kind != "fsdp2 after":
        of_any_size(model, **options)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "accelerate":
        model = accelerated(model)
    else:
        shard(model.base_model.model, "root")
    if kind == "fsdp2 after":
        of_any_size(model, **options)
    packed = sum(type(p) is Fp8Weight for p in model.parameters())
    assert packed == (14 if kind == "ddp" and options else 0)
    fp8_linear._kept.clear()
    with native(2 * LAYERS):
        two_steps(model, losses, want, ulps=512)
    assert len(fp8_linear._kept) == (14 if kind == "ddp" and not options else 0)
