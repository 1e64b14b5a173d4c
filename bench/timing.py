"""Clocks: how long a call takes on the device and on the host, and how much memory it needs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

BUDGET = 0.3  # seconds for one measurement
LONGEST = 1.0  # seconds, where BUDGET is too little for the fewest repeats
FEWEST, MOST = 20, 200  # repeats
BATCH = 10  # calls queued behind one sleep of the device
CLOCK = 1.8e9  # cycles a second, about: only the length of that sleep depends on it

Call = Callable[[int], object]  # a call is handed its number, so that it can rotate its inputs


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _seconds(call: Call, i: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call(i)
    synchronize(device)
    return time.perf_counter() - start


def _repeats(estimate: float) -> int:
    wanted = max(FEWEST, min(MOST, int(BUDGET / max(estimate, 1e-7))))
    return max(3, min(wanted, int(LONGEST / max(estimate, 1e-7))))


def cuda_ms(call: Call) -> float:
    return statistics.median(cuda_times(call))


def median_ms(call: Call, device: torch.device) -> float:
    """Median time of one call: of the device, or of the wall where that is a CPU."""
    return cuda_ms(call) if device.type == "cuda" else cpu_ms({"": call})[""]


def quantiles(times: list[float]) -> dict[str, float]:
    """The median and the [0.2, 0.8] quantiles."""
    low, *_, high = statistics.quantiles(times, n=5, method="inclusive")
    return {"ms": statistics.median(times), "q20": low, "q80": high}


def cuda_times(call: Call) -> list[float]:
    """Device milliseconds of one call, ten times and more, on a warm card, without the host's launch gaps.

    The device is first put to sleep for as long as the host needs to queue a batch of calls, so
    that each call starts when the one before ends; events stand between them. A peer that waits
    for the device inside a call pays for that wait, as it does in training.
    """
    device = torch.device("cuda")
    for i in range(3):  # run-time compilation, autotuning, caches of the allocator
        call(i)
    estimate = min(_seconds(call, i, device) for i in range(3))
    for i in range(int(min(50, 0.05 / estimate))):
        call(i)
    synchronize(device)
    start = time.perf_counter()
    call(0)
    host = time.perf_counter() - start
    synchronize(device)
    times: list[float] = []
    while len(times) < _repeats(estimate):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(BATCH + 1)]
        torch.cuda._sleep(int(CLOCK * min(0.05, 1.5 * host * BATCH + 1e-4)))
        marks[0].record()
        for i in range(BATCH):
            call(len(times) + i)
            marks[i + 1].record()
        synchronize(device)
        times += [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return times


def cpu_ms(calls: dict[str, Call]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in cpu_times(calls).items()}


def cpu_times(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Wall milliseconds of each call, the calls taking turns so that all see the same machine."""
    cpu = torch.device("cpu")
    estimates = {}
    for name, call in calls.items():
        call(0)
        estimates[name] = _seconds(call, 1, cpu)
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds = {name: _repeats(estimate) for name, estimate in estimates.items()}
    for i in range(max(rounds.values(), default=0)):
        for name, call in calls.items():
            if i < rounds[name]:
                times[name].append(1e3 * _seconds(call, i, cpu))
    return times


def host_us(call: Call, device: torch.device, calls: int = 200) -> float:
    """Wall time a small call keeps the host busy; on a GPU nothing waits for the result."""
    for i in range(10):
        call(i)
    times = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        for i in range(calls // 5):
            call(i)
        times.append((time.perf_counter() - start) / (calls // 5))
    synchronize(device)
    return 1e6 * statistics.median(times)


def peak_mb(call: Call, device: torch.device) -> float | None:
    """Megabytes (2^20) one call needs at its worst moment beyond what was there before it."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(0)
        synchronize(device)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:  # Linux: resident memory and its high-water mark, which writing 5 sets back
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        call(0)
        return max(0.0, (_resident("VmHWM") - before) / 2**20)
    except OSError:
        return None


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def copy_gbps(device: torch.device) -> float:
    """The rate of a large copy, bytes read plus bytes written: the limit of memory-bound ops."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)

    def call(_: int) -> None:
        target.copy_(source)

    return 2 * size / median_ms(call, device) / 1e6
