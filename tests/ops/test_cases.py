"""Every case of every op, on every device and dtype, by the rule in checks.py."""

from __future__ import annotations

import math

import pytest
import torch
from checks import check_case, run, same_bits

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


def _runs():
    """Every case on every device and dtype.

    fp64 runs the eager reference, whatever the size: small tensors on the CPU say all there is to say of it.
    """
    return [
        pytest.param(
            *pair.values, device, dtype, id=f"{pair.id}-{device}-{str(dtype).removeprefix('torch.')}"
        )
        for pair in _pairs("test")
        for device in DEVICES
        for dtype in DTYPES
        if dtype != torch.float64
        or (device == "cpu" and math.prod(pair.values[1].params.get("shape", ())) <= 100_000)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("module, case", _pairs("small"))
def test_compiled_is_eager(module, case, device, dtype):
    """torch.compile traces the op whole and gives the same bits."""
    torch._dynamo.reset()
    inputs = module.make(case, device, dtype, 0)
    compiled = torch.compile(module.tigon_fn, fullgraph=True, backend="aot_eager")
    eager, traced = run(module.tigon_fn, inputs), run(compiled, inputs)
    for name, value in eager.tensors.items():
        assert same_bits(value, traced.tensors[name]), name
