"""modulated_rms_norm beyond the cases: refusals, modulations of every shape, its module."""

import pytest
import torch
from checks import refusals, refused, same_bits

import tigon


def _draw(device, dtype=torch.float32, modulation=(2,)):
    x = torch.randn(2, 6, 40).to(device, dtype)
    scale, shift = (0.3 * torch.randn(2, *modulation, 40)).to(device, dtype)
    return x, torch.randn(40).to(device, dtype), scale, shift


BAD = """
modulated_rms_norm(x, w, s[:1].expand(5, 8)) -> divides 12, got 5
modulated_rms_norm(x, w, s[:0]) -> divides 12, got 0
modulated_rms_norm(x, w, x[:1])
    -> scale must have x's leading sizes, then ones, for x [2, 6, 8], got [1, 6, 8]
modulated_rms_norm(x, w, s, w) -> as many rows as scale, [2, 8], got [8]
modulated_rms_norm(x[..., :0], None, s[..., :0]) -> at least one column
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call, message", refusals(BAD))
def test_refusals(call, message, dtype, device):
    x, w, s = (torch.randn(n, device=device, dtype=dtype) for n in ((2, 6, 8), (8,), (2, 8)))
    refused(call, "[modulated_rms_norm] ..." + message, x=x, w=w, s=s)


def test_zero_modulation_is_the_norm(device):
    x, w, scale, _ = _draw(device, torch.bfloat16)
    got = tigon.modulated_rms_norm(x, w, torch.zeros_like(scale), torch.zeros_like(scale))
    assert same_bits(got, tigon.rms_norm(x, w))


def test_scale_and_shift_of_other_shapes(device):
    x, w, scale, shift = _draw(device)
    leaves = [v.requires_grad_() for v in (scale, shift.view(2, 1, 40).clone())]
    y = tigon.modulated_rms_norm(x, w, *leaves)
    for leaf, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("of", range(2))
def test_no_rows(of, bad, device):
    """Sums over no rows are 0, whatever weight and scale hold."""
    x, w, scale, shift = (t[..., :8].clone() for t in _draw(device))
    (w, scale)[of][..., 3] = bad
    leaves = [v.requires_grad_() for v in (x[:, :0], w, scale, shift)]
    y = tigon.modulated_rms_norm(*leaves)
    for leaf, grad in zip(leaves, torch.autograd.grad(y, leaves, torch.ones_like(y)), strict=True):
        assert same_bits(grad, torch.zeros_like(leaf))


def test_chunks_of_a_projection(device):
    """scale, shift and gate of one projection, as DiT has them: views, with the gradients of copies."""
    x, w, _, _ = _draw(device)
    projection = torch.randn(2, 3 * 40, device=device, requires_grad=True)
    shift, scale, _ = projection.chunk(3, -1)
    y = tigon.modulated_rms_norm(x, w, scale, shift)
    copies = scale.detach().clone().requires_grad_(), shift.detach().clone().requires_grad_()
    want = tigon.modulated_rms_norm(x, w, *copies)
    assert same_bits(y.detach(), want.detach())
    dscale, dshift = torch.autograd.grad(want.sum(), copies)
    (got,) = torch.autograd.grad(y.sum(), projection)
    assert same_bits(got[:, :40], dshift) and same_bits(got[:, 40:80], dscale)


def test_module(device):
    x, _, scale, shift = _draw(device)
    norm = tigon.nn.ModulatedRMSNorm(40, 1e-5, offset=1.0, rounding="gemma", device=device)
    want = tigon.modulated_rms_norm(x, norm.weight, scale, shift, 1e-5, offset=1.0, rounding="gemma")
    assert same_bits(norm(x, scale, shift), want) and "gemma" in repr(norm)
    bare = tigon.nn.ModulatedRMSNorm(40, elementwise_affine=False)
    assert same_bits(bare.to(device)(x, scale), tigon.modulated_rms_norm(x, None, scale))
