"""The CUDA kernels of every op under compute-sanitizer: cases of tests/cases, forward and backward.

    python tools/sanitize.py                          # memcheck, racecheck, synccheck, initcheck
    python tools/sanitize.py --tools memcheck --cases test

Needs a GPU, PyTorch with CUDA and compute-sanitizer (CUDA toolkit). Ends with status 1 where a tool
found something. PyTorch's caching allocator is off, so that every tensor has memory of its own.
"""

from __future__ import annotations

import argparse
import os
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
    "cross_entropy": [{"N": 3, "V": cols} for cols in (32000, 50304, 128256, 200001)],
    "divergence": [{"shape": shape} for shape in ((2, 32000), (2, 128256))],
}


def run_cases(tag: str, ops: list[str] | None) -> None:
    """Forward and backward of Tigon's kernels, beside copies and PyTorch's own small ones."""
    sys.path[:0] = [str(ROOT / "tests")]
    import torch

    from cases import modules
    from cases.case import Case, select

    count = 0
    for name, module in modules().items():
        if ops and name not in ops:
            continue
        large = [Case(f"large_{i}", params, frozenset()) for i, params in enumerate(LARGE.get(name, ()))]
        for dtype in (torch.float32, torch.bfloat16):
            for case in [*select(module.CASES, tag), *large]:
                inputs = module.make(case, "cuda", dtype, 0)
                args, kwargs = list(inputs.args), dict(inputs.kwargs)
                for i in inputs.grads:
                    args[i] = args[i].detach().requires_grad_()
                for key in inputs.grad_kwargs:
                    kwargs[key] = kwargs[key].detach().requires_grad_()
                leaves = [args[i] for i in inputs.grads] + [kwargs[key] for key in inputs.grad_kwargs]
                outputs = module.tigon_fn(*args, **kwargs)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                outputs = [out for out in outputs if torch.is_tensor(out) and out.requires_grad]
                if leaves and outputs:
                    upstream = [torch.ones_like(out) for out in outputs]
                    torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
                count += 1
    torch.cuda.synchronize()
    print(f"{count} cases ran")


def main() -> int:
    """Each tool in a process of its own."""
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
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    worst = 0
    for tool in args.tools.split(","):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        command += [sys.executable, __file__, "--run", "--cases", args.cases]
        command += ["--ops", args.ops] if args.ops else []
        print(f"== {tool}", flush=True)
        worst = max(worst, subprocess.run(command, env=environment, check=False).returncode)
    return int(worst != 0)


if __name__ == "__main__":
    sys.exit(main())
