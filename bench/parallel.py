"""The sharded losses of `tigon.parallel` on the GPUs of a host, beside the matmuls of a shard.

    torchrun --standalone --nproc-per-node 2 bench/parallel.py

`limit`: the three bare matmuls of a shard, in turns with the calls; for given logits a copy of 6 bytes an
element. `divided`: those of the whole head on one GPU, divided by the number of GPUs. `alone`: the same call
on this process's shard in a group of itself; the rest is communication, of which `exposed` is what the
profiler sees beside no other kernel. Peers for given logits: PyTorch's `loss_parallel`, and Megatron-Core's
where it is installed.
Times are medians over calls, of the slowest process; peaks are beyond the inputs. Writes JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "python")]  # tigon, unless it is installed

import processes
import store
import timing

from tigon import parallel

CALLS, WARMUP = 20, 4  # the same number in every process: each call is a collective
HEADS = {  # tokens x hidden x vocabulary, options
    "8192x4096x128256": (8192, 4096, 128256, {}),
    "8192x4096x128256_sequence_parallel": (8192, 4096, 128256, {"sequence_parallel": True}),
    "8192x4096x128257": (8192, 4096, 128257, {}),
    "8192x2048x151936": (8192, 2048, 151936, {}),
    "32768x4096x128256": (32768, 4096, 128256, {}),
}


def in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median of each call, of the slowest process. Calls take turns: at the power limit clocks drift."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARMUP):
            call()
    for _ in range(CALLS // 5):
        for name, call in calls.items():
            dist.barrier()
            torch.cuda._sleep(int(timing.CLOCK * 0.01))
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
            marks[0].record()
            for mark in marks[1:]:
                call()
                mark.record()
            torch.cuda.synchronize()
            times[name] += [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
    slowest = torch.tensor([statistics.median(t) for t in times.values()], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def time_ms(call) -> float:
    return in_turns({"": call})[""]


def peak_mb(call) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def uncovered(intervals: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """How much of the intervals, which do not overlap, no other covers."""
    merged: list[list[float]] = []
    for begin, end in sorted(others):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    left = 0.0
    for begin, end in intervals:
        left += end - begin
        left -= sum(max(0.0, min(end, b) - max(begin, a)) for a, b in merged)
    return left


def exposed_ms(call) -> float:
    """Milliseconds of a call in which this GPU communicates and does nothing else, waiting for others too."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        dist.barrier()
        torch.cuda._sleep(int(timing.CLOCK * 0.01))  # the host is ahead from here on
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    device_events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in device_events if "nccl:" not in e.name]
    slept = max((end for name, _, end in spans if "spin_kernel" in name), default=0.0)  # in all processes
    found: dict[bool, list] = {True: [], False: []}
    for name, begin, end in spans:
        if begin >= slept:
            found[name.startswith("nccl")].append((begin, end))
    return uncovered(found[True], found[False]) / 3e3


def matmuls(rows: int, hidden: int, vocab: int) -> Callable[[], None]:
    """The three matmuls of a head on this GPU, V rounded up to 64."""
    vocab = -(-vocab // 64) * 64
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def call() -> None:
        torch.mm(x, w.T, out=logits)
        torch.mm(logits, w, out=dx)
        torch.mm(logits.T, x, out=dw)

    return call


def head(name: str, alone) -> dict:
    tokens, hidden, vocab, options = HEADS[name]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shares = [len(part) for part in torch.arange(vocab).chunk(ranks)]
    sequence_parallel = options.get("sequence_parallel", False)
    rows = tokens // ranks if sequence_parallel else tokens
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(shares[rank], hidden, device="cuda") / hidden**0.5).bfloat16().requires_grad_()
    torch.manual_seed(0)
    target = torch.randint(0, vocab, (tokens,), device="cuda")

    def step(group=dist.group.WORLD, **options):
        labels, classes = (target % len(w), len(w)) if group is alone else (target, vocab)
        loss = parallel.linear_cross_entropy(x, w, labels, group, vocab=classes, **options)
        loss.backward()
        x.grad = w.grad = None

    of_limit = min(tokens, 8192)
    calls = {"limit_ms": matmuls(of_limit, hidden, max(shares)), "ms": lambda: step(**options)}
    if not sequence_parallel:
        calls["alone_ms"] = lambda: step(alone)
        calls["divided_ms"] = matmuls(of_limit, hidden, vocab)
    times = in_turns(calls)
    times["limit_ms"] *= tokens / of_limit
    if "divided_ms" in times:
        times["divided_ms"] *= tokens / of_limit / ranks
    del calls
    torch.cuda.empty_cache()
    record = {"op": "parallel_head", "case": name, **times, "peak_mb": peak_mb(lambda: step(**options))}
    return record | {"exposed_ms": exposed_ms(lambda: step(**options))}


@contextlib.contextmanager
def megatron(ranks: int):
    try:
        from megatron.core import parallel_state
    except ImportError:
        yield None
        return
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    yield parallel_state.get_tensor_model_parallel_group()
    parallel_state.destroy_model_parallel()


def given_logits(rows: int, columns: int) -> Iterator[dict]:
    """The loss of logits that are there, and their gradient."""
    ranks = dist.get_world_size()
    logits = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(0)
    target = torch.randint(0, columns * ranks, (rows,), device="cuda")
    rate = timing.copy_gbps(torch.device("cuda"))

    def backward(loss):
        loss.backward()
        logits.grad = None

    def torch_parallel():
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor.parallel import loss_parallel

        place = dist.device_mesh.init_device_mesh("cuda", (ranks,))
        whole = DTensor.from_local(logits, place, [Shard(1)])
        with loss_parallel():
            backward(F.cross_entropy(whole, target))

    def megatron_call(module: str, function: str, group):
        import importlib

        call = getattr(importlib.import_module(f"megatron.core.{module}"), function)
        arguments = (logits.view(rows, 1, columns), target.view(rows, 1))
        return lambda: backward(call(*arguments, *([group] if "fused" in module else [])).mean())

    with megatron(ranks) as group:
        providers = {
            "tigon": lambda: backward(
                parallel.cross_entropy(logits, target, dist.group.WORLD, vocab=columns * ranks)
            ),
            "torch": torch_parallel,
        }
        if group is not None:
            providers["megatron"] = megatron_call(
                "tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy", group
            )
            providers["megatron_fused"] = megatron_call(
                "fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy", group
            )
        for provider, call in providers.items():
            record = {"op": "parallel_cross_entropy", "case": f"{rows}x{columns}", "provider": provider}
            record["limit_ms"] = 6 * rows * columns / rate / 1e6
            try:
                record |= {"ms": time_ms(call), "peak_mb": peak_mb(call)}
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            yield record


def parse(words: list[str]) -> argparse.Namespace:
    parser = processes.command_line(__doc__, "out/parallel.jsonl")
    parser.add_argument("--cases", default=",".join(HEADS))
    return parser.parse_args(words)


def measured(args: argparse.Namespace) -> Iterator[dict]:
    """Every record, on every rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    common = store.facts("cuda") | {"gpus": dist.get_world_size(), "dtype": "bf16", "pass": "step"}
    for name in args.cases.split(","):
        yield common | {"provider": "tigon"} | head(name, groups[dist.get_rank()])
        torch.cuda.empty_cache()
    for record in given_logits(8192, 32064):
        yield common | record
    dist.destroy_process_group()


def table(records: list[dict]) -> str:
    figures = [{k: round(v, 3) if isinstance(v, float) else v for k, v in r.items()} for r in records]
    return "\n".join(map(str, figures))


def main(words: list[str] | None = None) -> int:
    key = store.key_of("parallel")
    return processes.main(words, parse, measured, lambda path: store.read(path, key), table)


if __name__ == "__main__":
    sys.exit(main())
