"""silu beyond the cases: its module, and that it is the activation of swiglu."""

import pytest
import torch
from checks import same_bits

import tigon


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_module_and_the_activation_of_swiglu(device, dtype):
    x = (4 * torch.randn(7, 130, device=device)).to(dtype).requires_grad_()
    dy, module = torch.randn_like(x), tigon.nn.SiLU()
    assert not list(module.parameters())
    for y in (module(x), tigon.swiglu(x, torch.ones_like(x))):
        want = tigon.silu(x)
        assert same_bits(y, want)
        assert same_bits(*(torch.autograd.grad(out, x, dy)[0] for out in (y, want)))
