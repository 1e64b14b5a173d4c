"""Measure the ops side by side: eager, torch.compile, Tigon and the peers that are installed.

    python bench/run.py --device cpu --providers eager,tigon
    python bench/run.py --ops rms_norm,glu --providers eager,compile,tigon,liger,quack,aten
    python bench/run.py --cases paper,vocabulary --providers tigon,liger --budget 8

All providers of a case run in one process on the same data, beside the limit of the same run: a
large copy for memory-bound ops, the bare matmuls for the loss head. The cases are those of
tests/cases tagged `bench` (GPU), `bench_cpu` or `smoke`. Prints tables and writes JSON lines.
Every record is written at once. With --budget no case starts later, and cases that --out holds whole are
left out, so the same command goes on where a run ended. docs/benchmarks.md explains the method.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "python")]  # the cases; tigon, unless it is installed

import processes
import store
import timing
from providers import DTYPES, Runner, Unavailable, difference, find

from cases import modules
from cases.case import Case, select

# Peers are compared once with Tigon, only to see that they computed the same thing at all.
LOOSE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = processes.command_line(__doc__)
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--ops", default=",".join(modules()))
    add("--providers", default="eager,tigon", help="eager, compile, tigon, or a peer (or: all)")
    add("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    add("--dtypes", default="bf16" if cuda else "fp32,bf16", help="of fp32, bf16, fp16")
    add(
        "--cases", default="bench", help="tags (bench, smoke, sweep, odd, peak, vocabulary) or names of cases"
    )
    add("--passes", default="fwd,bwd,step")
    add("--threads", type=int, default=0, help="CPU threads (torch's choice)")
    add("--out", type=Path, help="JSON lines (bench/results/<device>/<commit>.jsonl)")
    add("--no-host", action="store_true", help="leave out the host's time")
    add("--seconds", type=float, default=timing.BUDGET, help="of one measurement of 20 repeats and more")
    add("--budget", type=float, default=0.0, metavar="MINUTES", help="start no case after this (see above)")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not cuda:
        raise SystemExit(f"--device cuda: torch {torch.__version__} sees no CUDA device")
    processes.split(args, ops=modules(), dtypes=DTYPES, passes=METHODS)
    if args.budget and not args.out:
        raise SystemExit("--budget: --out must name the file that is continued")
    return args


class Bench:
    """One run: its settings, its limits, its records and the file it writes."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = torch.device(args.device)
        if args.threads:
            torch.set_num_threads(args.threads)
        timing.BUDGET = args.seconds
        self.common = store.facts(args.device)
        self.path = args.out or store.results_file(self.common["gpu"], self.common["commit"])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.end, self.left, self.done = math.inf, 0, set()
        if args.budget:
            self.end = time.perf_counter() + 60 * args.budget
            self.done = {tuple(r[name] for name in store.KEYS["op"]) for r in store.read(self.path)}
        else:
            self.path.write_text("")
        gc.freeze()  # modules are not searched for garbage after each case
        self.copy = timing.copy_gbps(self.device)
        print(
            f"{self.common['gpu']}, torch {torch.__version__}, commit {self.common['commit']}; "
            f"copy {self.copy:.0f} GB/s"
        )

    def write(self, record: dict) -> None:
        store.append(self.path, record)

    def names(self, module) -> list[str]:
        """Providers asked for that can exist for this op."""
        names = self.args.providers.split(",")
        if names == ["all"]:
            names = ["eager", "compile", "tigon", *module.PEERS]
        extra = [f"{name}_{form}" for name in names for form in ("inplace", "fp32", "scaled", "exact")]
        names += [name for name in extra if name in module.PEERS]
        return [n for n in names if n in ("eager", "compile", "tigon") or n in module.PEERS]

    def cases(self, module, dtype: str) -> Iterator[Case]:
        """Cases asked for, by tags or names, that are not measured, until the time is over."""
        wanted = set(self.args.cases.split(","))
        if "bench" in wanted and self.args.device == "cpu":
            wanted = wanted - {"bench"} | {"bench_cpu"}
        pairs = [(kind, name) for kind in self.passes(module) for name in self.names(module)]
        for case in module.CASES:
            key = (module.NAME, case.name, dtype)
            done = (self.done & {(*key, kind, name), (*key, "all", name)} for kind, name in pairs)
            if not (case.name in wanted or case.tags & wanted) or all(done):
                continue
            if time.perf_counter() < self.end:
                yield case
            else:
                self.left += 1

    def passes(self, module) -> list[str]:
        """Passes asked for; a loss has no backward of its own."""
        own = ("fwd", "step") if getattr(module, "LOSS", False) else ("fwd", "bwd", "step")
        return [p for p in self.args.passes if p in getattr(module, "PASSES", own)]

    def limits(self, module, case: Case, inputs, dtype) -> dict[str, dict]:
        """Least bytes, operations and milliseconds of every pass."""
        moved = {"fwd": module.bytes_fwd(case, dtype), "bwd": module.bytes_bwd(case, dtype)}
        both = getattr(module, "bytes_step", lambda *_: sum(moved.values()))
        moved["step"] = both(case, dtype)
        flops = {"fwd": module.flops_fwd(case), "bwd": module.flops_bwd(case)}
        flops["step"] = flops["fwd"] + flops["bwd"]
        limits = {}
        for name in self.passes(module):
            ms = moved[name] / self.copy / 1e6
            if hasattr(module, "gemms"):
                ms = self.matmuls_ms(module, inputs, name != "fwd")
                if even := getattr(module, "even_neighbour", lambda _: None)(inputs):
                    ms = min(ms, even[1] * self.matmuls_ms(module, even[0], name != "fwd"))
            limits[name] = {"bytes": moved[name], "flops": flops[name], "limit_ms": ms}
        return limits

    def matmuls_ms(self, module, inputs, step: bool) -> float:
        return sum(self.time_alone(matmul) for matmul in module.gemms(inputs, step))

    def time_alone(self, call) -> float:
        return timing.median_ms(lambda _: call(), self.device)

    def open(self, module, case: Case, inputs, names: list[str], base: dict) -> dict:
        """Runners of the providers that work on this case; the rest is recorded with a reason."""
        dtype = DTYPES[base["dtype"]]
        runners, reference = {}, None
        order = sorted(names, key=lambda name: name != "tigon")  # Tigon first: the others' measure
        for name in order:
            try:
                runner = Runner(find(module, name, case, inputs), inputs, self.device)
                results = runner.everything()
                if reference is None:
                    reference = results
                error = difference(results, reference)
                if not error <= LOOSE[dtype]:
                    raise ArithmeticError(f"result differs from {next(iter(runners))}: {error:.1e}")
                runners[name] = runner
            except Exception as error:
                self.fail(base | {"provider": name}, error)
        return {name: runners[name] for name in names if name in runners}

    def fail(self, record: dict, error: Exception) -> None:
        """Whatever a provider raises is its result: shown and recorded, not hidden."""
        reason = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
        reason = (reason.splitlines() or [""])[0][:200]
        print(f"  {record['case']} {record['dtype']} {record['provider']}: {reason}", flush=True)
        self.write({"pass": "all"} | record | {"error": reason})
        if isinstance(error, torch.AcceleratorError):
            raise error  # the device is lost to this process

    def times(self, runners: dict[str, Runner], method: str, base: dict) -> dict[str, list[float]]:
        """Milliseconds of every repeat of one pass, by provider."""
        calls = {name: getattr(runner, method) for name, runner in runners.items()}
        if self.device.type == "cpu":
            return timing.cpu_times(calls)
        times = {}
        for name, call in calls.items():
            try:
                times[name] = timing.cuda_times(call)
            except Exception as error:
                self.fail(base | {"provider": name}, error)
        return times

    def host(self, module, names: list[str], dtype) -> dict[tuple[str, str], float]:
        """Host microseconds of every provider and pass, on the op's smallest bench case."""
        costs = {}
        for case in select(module.CASES, "smoke")[:1]:
            inputs = module.make(case, self.device, dtype, 0)
            for name in names:
                try:
                    runner = Runner(find(module, name, case, inputs), inputs, self.device)
                    for kind in self.passes(module):
                        call = getattr(runner, METHODS[kind])
                        costs[name, kind] = timing.host_us(call, self.device)
                except Exception:  # the timed cases record the reason
                    continue
        return costs

    def op(self, module) -> list[dict]:
        records = []
        for name in self.args.dtypes:
            providers = self.names(module)
            host = {} if self.args.no_host else self.host(module, providers, DTYPES[name])
            for case in self.cases(module, name):
                records += self.case(module, case, name, providers, host)
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
        return records

    def case(self, module, case: Case, dtype: str, providers: list[str], host: dict) -> list[dict]:
        records = []
        base = {"op": module.NAME, "case": case.name, "dtype": dtype} | self.common
        inputs = module.make(case, self.device, DTYPES[dtype], 0)
        base["upstream"] = upstream_of(inputs)
        limits = self.limits(module, case, inputs, DTYPES[dtype])
        runners = self.open(module, case, inputs, providers, base)
        for kind, limit in limits.items():
            loss = kind == "fwd" and getattr(module, "LOSS", False)
            method = "inference" if loss else METHODS[kind]
            for name, all_ms in self.times(runners, method, base | {"pass": kind}).items():
                peak = timing.peak_mb(getattr(runners[name], method), self.device)
                record = base | {"pass": kind, "provider": name}
                record |= figures(all_ms, limit) | {"peak_mb": peak}
                record["host_us"] = host.get((name, kind))
                self.write(record)
                records.append(record)
        return records


METHODS = {"fwd": "forward", "bwd": "backward", "step": "step"}


def upstream_of(inputs) -> float | str:
    """The gradient that reaches the first output: a loss's number, or normal numbers."""
    given = None if inputs.grad_outputs is None else inputs.grad_outputs[0]
    if given is None:
        return 1.0
    return round(given.item(), 6) if given.dim() == 0 else "normal"


def figures(all_ms: list[float], limit: dict) -> dict:
    ms = statistics.median(all_ms)
    return {
        **timing.quantiles(all_ms),
        "bytes": limit["bytes"],
        "gbps": limit["bytes"] / ms / 1e6,
        "tflops": limit["flops"] / ms / 1e9,
        "limit_ms": limit["limit_ms"],
        "of_limit": limit["limit_ms"] / ms,
    }


def show(records: list[dict]) -> None:
    """A table of one op: a line for each case and pass, a column for each provider."""
    if not records:
        return
    providers = list(dict.fromkeys(r["provider"] for r in records))
    lines: dict[tuple, dict[str, str]] = {}
    for r in records:
        key = (r["case"], r["dtype"], r["pass"], f"{r['limit_ms']:.3f}")
        peak = "-" if r["peak_mb"] is None else f"{r['peak_mb']:.0f}"
        host = "-" if r["host_us"] is None or math.isnan(r["host_us"]) else f"{r['host_us']:.0f}"
        cell = f"{r['ms']:.3f} {r['of_limit']:4.0%} {peak} {host}"
        lines.setdefault(key, {})[r["provider"]] = cell
    head = ("case", "dtype", "pass", "limit ms", *providers)
    rows = [head] + [(*key, *(v.get(p, "-") for p in providers)) for key, v in lines.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    print(f"\n{records[0]['op']}: milliseconds, percent of the limit, peak MB, host us")
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        print("  ".join(cells).rstrip())


def keep_freed_memory() -> None:
    """Start anew under a malloc that hands nothing back to the system, as a training process' steady state.

    Elsewhere every large result is fresh pages, whose first touch costs as much as a matmul in a
    virtual machine (128256x2048 bf16: 0.04 to 1.5 s), for the limit and every provider by chance.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ:
        return
    os.environ["GLIBC_TUNABLES"] = f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={1 << 40}"
    os.execv(sys.executable, sys.orig_argv)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.device == "cpu" and arguments is None:
        keep_freed_memory()
    start = time.perf_counter()
    bench = Bench(args)
    for name in args.ops:
        show(bench.op(modules()[name]))
    left = f", out of time: {bench.left} cases not started" if bench.left else ""
    print(f"\n{bench.path} ({time.perf_counter() - start:.0f} s{left})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
