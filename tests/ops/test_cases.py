"""Every case of every op, on every device and dtype, by the rule in checks.py."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from checks import check_case, run, runs_kernels, same_bits

from cases import modules
from cases.case import select
from conftest import DEVICES

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def _pairs(tag: str):
    return [
        pytest.param(module, case, id=f"{module.NAME}-{case.name}")
        for module in modules().values()
        for case in select(module.CASES, tag)
    ]


def _dtypes(case, device):
    """All; of a large case on a CPU that runs CPU kernels one, which its name draws.

    The CPU has one loop for every length, and fp64 runs the eager reference: small tensors say all there is
    to say of them. Long rows and many are there for the choice among CUDA kernels.
    """
    large = math.prod(case.params.get("shape", ())) > 100_000
    if large and not runs_kernels(device):
        return [DTYPES[zlib.crc32(case.name.encode()) % 3]]
    return DTYPES if device == "cpu" and not large else DTYPES[:3]


def _runs():
    return [
        pytest.param(
            *pair.values, device, dtype, id=f"{pair.id}-{device}-{str(dtype).removeprefix('torch.')}"
        )
        for pair in _pairs("test")
        for device in DEVICES
        for dtype in _dtypes(pair.values[1], device)
    ]


@pytest.mark.parametrize("module, case, device, dtype", _runs())
def test_case(module, case, device, dtype):
    """Error at most twice the plain formulation's; see checks.py for the rest."""
    check_case(module, case, device, dtype)


@pytest.mark.parametrize("module, case", _pairs("small"))
def test_oracle_against_finite_differences(module, case):
    """The gradients all others are measured by are themselves the slopes of the formula."""
    inputs = module.make(case, "cpu", torch.float64, 0)
    leaves = [inputs.args[i].detach().clone() for i in inputs.grads]
    leaves += [inputs.kwargs[name].detach().clone() for name in inputs.grad_kwargs]

    def fn(*values):
        args, kwargs = list(inputs.args), dict(inputs.kwargs)
        for i, value in zip(inputs.grads, values, strict=False):
            args[i] = value
        kwargs |= zip(inputs.grad_kwargs, values[len(inputs.grads) :], strict=True)
        return module.oracle_fn(*args, **kwargs)

    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(fn, leaves, fast_mode=True)


def _traced():
    """bfloat16, and float32 of one case an op: only fakes ask for dtypes, which opcheck tests."""
    ops = set()
    for pair in _pairs("small"):
        first = pair.values[0].NAME not in ops
        ops.add(pair.values[0].NAME)
        for dtype in [torch.bfloat16, torch.float32][: 1 + first]:
            yield pytest.param(*pair.values, dtype, id=f"{pair.id}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize("module, case, dtype", list(_traced()))
def test_compiled_is_eager(module, case, dtype, device):
    """torch.compile traces the op whole and gives the same bits."""
    torch._dynamo.reset()
    inputs = module.make(case, device, dtype, 0)
    compiled = torch.compile(module.tigon_fn, fullgraph=True, backend="aot_eager")
    eager, traced = run(module.tigon_fn, inputs), run(compiled, inputs)
    for name, value in eager.tensors.items():
        assert same_bits(value, traced.tensors[name]), name
