"""What the examples of several processes share: the group, the curve beside stock, the clock."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable


def start() -> str:
    """Join the group that torchrun has described; the device of this process: its GPU, or the CPU."""
    import torch
    import torch.distributed as dist

    if "RANK" not in os.environ:
        raise SystemExit("start it by: torchrun --standalone --nproc-per-node 2 examples/<this file>")
    if not torch.cuda.is_available() or torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return "cpu"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return "cuda"


def first() -> bool:
    """Whether this process speaks and writes for all."""
    import torch.distributed as dist

    return dist.get_rank() == 0


def in_turn(prepare: Callable):
    """What ``prepare`` returns: the first process prepares the text, then the others find it."""
    import torch.distributed as dist

    result = prepare() if first() else None
    dist.barrier()
    return result if first() else prepare()


def train(step: Callable[[int], float], steps: int, device: str, name: str) -> dict:
    """The losses of so many steps, the median of their milliseconds, the peak of memory on a GPU."""
    import torch

    losses, times = [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for i in range(steps):
        begin = time.perf_counter()
        losses.append(step(i))  # a number: the device has finished
        times.append(1e3 * (time.perf_counter() - begin))
        if first():
            print(f"{name:6} step {i + 1}: loss {losses[-1]:.5f}", flush=True)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
    return {"losses": losses, "ms": statistics.median(times), "peak_mib": peak}


def compare(args, name: str, stock: dict, tigon: dict) -> int:
    """The two curves side by side, written by the first process; 0 where they are one."""
    import torch.distributed as dist
    from sft_data import finish

    apart = max(abs(a - b) / abs(a) for a, b in zip(stock["losses"], tigon["losses"], strict=True))
    if first():
        finish(args, name, tigon["losses"], stock=stock, tigon=tigon, apart=apart)
        print(
            f"curves apart by {apart:.1e} at most; a step {stock['ms']:.1f} ms stock, {tigon['ms']:.1f} Tigon"
        )
        if tigon["peak_mib"] is not None:
            print(f"peak {stock['peak_mib']:.0f} MiB stock, {tigon['peak_mib']:.0f} MiB Tigon")
    dist.barrier()
    dist.destroy_process_group()
    return int(not apart < (1e-3 if tigon["peak_mib"] is None else 2e-2))
