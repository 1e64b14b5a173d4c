"""Which of two loss curves of one of Liger's mini models is nearer to the same training in float64.

    export PYTHONPATH=build/liger_suite:compat/liger_kernel:python
    python tests/liger_suite/curves.py fp32/test_mini_models gpt_oss [learning rate]

Run from the root of the repository, after tools/liger_suite.sh has unpacked the tests. Trains stock in the
module's dtype, patched in it, and stock in float64; prints the relative distances of the losses by step.
"""

import contextlib
import importlib
import io
import os
import sys

import torch
from torch.overrides import TorchFunctionMode

import tigon.compat.liger

STEPS = 32


class Wide(TorchFunctionMode):
    """Where a model asks for float32 it gets float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {n: torch.float64 if v is torch.float32 else v for n, v in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def main(module: str, model: str, learning_rate: float = 1e-5) -> None:
    """The three curves of ``mini_{model}`` of ``test/convergence/{module}``."""
    tigon.compat.liger.install(replace=True)
    os.chdir("build/liger_suite")  # where the tests' data is
    tests = importlib.import_module(f"test.convergence.{module.replace('/', '.')}")
    kind = "_vision" if model == "pixtral" else "_multimodal" if "multimodal" in module else ""
    run = getattr(tests, f"run_mini_model{kind}")
    dtype = torch.bfloat16 if module.startswith("bf16") else torch.float32
    made = tests.create_model

    def curve(of, patched=False):
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))

            def start(*args, **kwargs):  # all three from the same weights
                model = made(*args, **kwargs).to(dtype)
                if of is torch.float64:
                    if hasattr(model, "set_experts_implementation"):
                        model.set_experts_implementation("eager")  # grouped matmuls know no float64
                    stack.enter_context(Wide())
                return model

            tests.create_model = start
            losses = run(f"mini_{model}", STEPS, of, learning_rate, with_liger=patched)["loss"]
        return torch.tensor(losses, dtype=torch.float64)

    exact, stock, ours = curve(torch.float64), curve(dtype), curve(dtype, patched=True)
    print(f"mini_{model} {dtype}: relative distance of the loss from float64, by step")
    for step, loss in enumerate(exact):
        a, b = ((x[step] / loss - 1).abs() for x in (stock, ours))
        print(f"  {step:2}  {loss:.6f}  stock {a:.2e}  tigon {b:.2e}")
    worst = [(x / exact - 1).abs().max().item() for x in (stock, ours)]
    print(f"  worst: stock {worst[0]:.2e}, tigon {worst[1]:.2e}")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(float, sys.argv[3:]))
