"""Host time of small calls: what a call costs before a kernel runs, op by op.

    python bench/host.py --device cuda
    OMP_NUM_THREADS=1 python bench/host.py --device cpu

Tigon, PyTorch's own formulation and an autograd function that does nothing but allocate, on tensors of
16 x 256: forward without gradients, forward that records the graph, forward and backward. On a GPU nothing
waits for the device, so this is the time of the host alone; on the CPU the small kernels are in it. The least
of several means, in microseconds. Prints a table and writes JSON lines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "python")]  # the cases; tigon, unless it is installed

import processes
import store
import timing
from providers import DTYPES, Runner

from cases import modules
from cases.case import Case, Inputs

ROWS, COLUMNS = 16, 256
HEADS = {"B": 1, "T": ROWS, "Hq": 4, "Hk": 4, "D": COLUMNS // 4}
SMALL = {
    "cross_entropy": {"N": ROWS, "V": COLUMNS},
    "embedding": {"tokens": (ROWS,), "table": (COLUMNS, COLUMNS)},
    "group_norm": {"shape": (ROWS, COLUMNS)},
    "linear_cross_entropy": {"lead": (ROWS,), "H": COLUMNS, "V": COLUMNS},
    "qk_norm_rope": HEADS,
    "rope": HEADS,
}
PASSES = {"infer": "inference", "forward": "forward", "step": "step"}
ROUNDS = 7


class _Nothing(torch.autograd.Function):
    """What any differentiable call costs: a node, and a result each way."""

    @staticmethod
    def forward(ctx, x):
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        return torch.empty_like(dy)


def measure(runner: Runner, device: torch.device) -> dict[str, float]:
    return {
        name: min(timing.host_us(getattr(runner, method), device) for _ in range(ROUNDS))
        for name, method in PASSES.items()
    }


def parse(words: list[str]) -> argparse.Namespace:
    parser = processes.command_line(__doc__, "")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32")
    parser.add_argument("--ops", default=",".join(modules()))
    args = parser.parse_args(words)
    args.out = args.out or store.results_file(store.device_name(args.device), "host")
    return args


def measured(args: argparse.Namespace) -> Iterator[dict]:
    """What an empty function costs, then a record of each op."""
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    common = store.facts(args.device) | {"dtype": args.dtype}
    x = torch.randn(ROWS, COLUMNS, device=device, dtype=dtype)
    nothing = Runner(_Nothing.apply, Inputs(args=(x,), grads=(0,), grad_outputs=(x,)), device)
    yield common | {"op": "nothing", "empty": measure(nothing, device)}
    for name in args.ops.split(","):
        module = modules()[name]
        inputs = module.make(Case("host", SMALL.get(name, {"shape": (ROWS, COLUMNS)})), device, dtype, 0)
        providers = {"tigon": module.tigon_fn, "pytorch": module.eager_fn}
        times = {who: measure(Runner(fn, inputs, device), device) for who, fn in providers.items()}
        yield common | {"op": name} | times


def table(records: list[dict]) -> str:
    lines = [
        f"{ROWS} x {COLUMNS}: microseconds",
        f"{'':24}" + "".join(f"{kind:>18}" for kind in PASSES),
        f"{'':24}" + f"{'tigon':>9}{'pytorch':>9}" * len(PASSES),
    ]
    for r in records:
        who = ("tigon", "pytorch") if "tigon" in r else ("empty",)
        cells = "".join("".join(f"{r[w][kind]:{18 // len(who)}.1f}" for w in who) for kind in PASSES)
        lines.append(f"{r['op'] if 'tigon' in r else 'empty autograd.Function':24}{cells}")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    key = store.key_of("host")
    return processes.main(words, parse, measured, lambda path: store.read(path, key), table)


if __name__ == "__main__":
    sys.exit(main())
