"""The CUDA kernels of every op under compute-sanitizer: cases of tests/cases, forward and backward.

    python tools/sanitize.py                          # memcheck, racecheck, synccheck, initcheck
    python tools/sanitize.py --tools memcheck --cases test

Needs a GPU, PyTorch with CUDA and compute-sanitizer (CUDA toolkit). Ends with status 1 where a tool
found something in a kernel of Tigon or a run broke off. Kernels of others are listed: a matmul of
cuBLAS reads the columns that pad the logits' rows (initcheck) and lets what comes of them go.
PyTorch's caching allocator is off, so that every tensor has memory of its own.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Shapes that take the kernels which small cases do not reach: rows of several blocks, of clusters, of parts.
LARGE = {
    "rms_norm": [{"shape": shape} for shape in ((3, 16384), (2, 40001), (70, 128))],
    "layer_norm": [{"shape": shape} for shape in ((3, 16384), (2, 40001))],
    "softmax": [{"shape": shape} for shape in ((3, 16384), (2, 40001))],
    "sparsemax": [{"shape": shape} for shape in ((3, 16384), (2, 40001), (2, 600001))],
    "poly_norm": [{"shape": shape} for shape in ((3, 16384), (2, 40001), (2, 600001), (2500, 130))],
    "cross_entropy": [{"N": 3, "V": cols} for cols in (32000, 50304, 128256, 200001)],
    "divergence": [
        {"shape": shape, "op": op} for shape in ((2, 32000), (2, 128256)) for op in ("kl_div", "jsd", "tvd")
    ],
}


def run_cases(tag: str, ops: list[str] | None) -> None:
    """Forward and backward of Tigon's kernels, beside copies and PyTorch's own small ones."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "ops")]
    import torch
    from checks import run

    from cases import modules
    from cases.case import select, test_case

    count = 0
    for name, module in modules().items():
        if ops and name not in ops:
            continue
        large = [test_case(f"large_{i}", **params) for i, params in enumerate(LARGE.get(name, ()))]
        for dtype in (torch.float32, torch.bfloat16):
            for case in [*select(module.CASES, tag), *large]:
                run(module.tigon_fn, module.make(case, "cuda", dtype, 0), grad="grad" in case.tags)
                count += 1
    torch.cuda.synchronize()
    print(f"{count} cases ran")


def main() -> int:
    """The tools, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--cases", default="small", help="tag of tests/cases: small or test")
    parser.add_argument("--ops", help="some ops only")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_cases(args.cases, args.ops.split(",") if args.ops else None)
        return 0
    rest = ["--run", "--cases", args.cases, *(["--ops", args.ops] if args.ops else [])]
    found = [broken(tool, rest) for tool in args.tools.split(",")]
    return int(any(found))


def broken(tool: str, arguments: list[str]) -> bool:
    """One tool in a process of its own: whether a kernel of Tigon is at fault, or the run broke off."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "10000", sys.executable, __file__]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
    kernels = collections.Counter(re.findall(r"^=+ +at (.+?)(?:\+0x\w+)?$", run.stdout, re.MULTILINE))
    done = re.search(r"^(\d+) cases ran$", run.stdout, re.MULTILINE)
    print(f"{tool}: {done.group(0) if done else 'broken off'}, {kernels.total()} findings")
    for kernel, count in kernels.most_common():
        print(f"  {count} x {kernel[:200]}")
    if not done:
        print("\n".join((run.stdout + run.stderr).splitlines()[-40:]))
    return not done or any("tigon::" in kernel for kernel in kernels)


if __name__ == "__main__":
    sys.exit(main())
