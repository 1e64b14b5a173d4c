"""Cases of float8 in two processes: weights that are gathered, reduced and stepped are quantised anew."""

from unittest import mock

import torch
from lora_cases import LAYERS, native
from tiny import adapted, make, step
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


def wrapped(model, kind, **options):
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    if kind == "fsdp2 after":
        shard(inner, "root")
    of_any_size(model, **options)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "accelerate":
        return accelerated(model)
    if kind != "fsdp2 after":
        shard(inner, "root", layers=kind != "fsdp2 kept")
    return model


@case(**{kind: (kind,) for kind in ("ddp", "fsdp2", "fsdp2 kept", "fsdp2 after")})
def fp8_steps(kind):
    """Losses and gradients of a few steps are those of one process with all data."""
    alone = of_any_size(make())
    model = wrapped(make(), kind)
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
    alone = of_any_size(adapted(make()))
    losses, want = wanted(alone)
    model = wrapped(adapted(make()), kind, **options)
    packed = sum(type(p) is Fp8Weight for p in model.parameters())
    assert packed == (14 if kind == "ddp" and options else 0)
    fp8_linear._kept.clear()
    with native(2 * LAYERS):
        two_steps(model, losses, want, ulps=512)
    assert len(fp8_linear._kept) == (14 if kind == "ddp" and not options else 0)
