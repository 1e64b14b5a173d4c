"""Megatron-Core's GPTModel."""

import os

import torch
from program import STEPS, case

PROGRAM, DISTRIBUTION = "Megatron-Core", "megatron-core"
PACKAGES, ALONE = "pytest==9.1.1", "megatron-core==0.16.1"
CASES = []


@case(CASES, "GPTModel", "`tigon.megatron.apply(model)`", {})
@case(CASES, "GPTModel, tensor parallel", "the same", {}, processes=2)
@case(CASES, "GPTModel, `--deterministic-mode`", "the same", {"deterministic_mode": True})
@case(
    CASES,
    "GPTModel, `--deterministic-mode`, tensor parallel",
    "the same",
    {"deterministic_mode": True},
    processes=2,
)
def train(with_tigon, folder, changes):
    import megatron_tiny

    one = {} if "RANK" in os.environ else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **one)
    with megatron_tiny.megatron(torch.distributed.get_world_size()):
        if not changes.get("deterministic_mode"):
            return steps(with_tigon, changes)
        megatron_tiny.deterministic_mode()
        said = steps(with_tigon, changes)
        assert said == steps(with_tigon, changes), "the second run has other bits"
        return said


def steps(with_tigon, changes):
    """Losses and norms of gradients of a new model."""
    import megatron_tiny

    made = (megatron_tiny.hybrid if "pattern" in changes else megatron_tiny.gpt)(**changes)
    if with_tigon:
        import tigon.megatron

        report = tigon.megatron.apply(made)
    optimizer, said = torch.optim.AdamW(made.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        loss, gradients = megatron_tiny.step(made)
        norms = torch.stack([g.norm() for g in gradients.values()])
        said += [float(loss.mean()), float(norms.norm())]
        optimizer.step()
    if with_tigon:
        report.check()
    return said
