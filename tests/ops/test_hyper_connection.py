"""Hyper-connections: refused calls, the forms of transformers' models, what is absent."""

import pytest
import torch
from checks import refusals, refused

import tigon
from conftest import DEVICES
from tigon.ops.hyper_connection import reference_post, reference_pre

X, WEIGHT, BASE, SCALE = torch.randn(3, 4, 8), torch.randn(24, 32), torch.randn(24), torch.ones(3)
F, POST, RES = torch.randn(3, 8), torch.rand(3, 4), torch.rand(3, 4, 4)


CALLS = """
hyper_connection_pre(x[0, 0], w, b, s) -> x must be [..., n, C] with C >= 1, got
hyper_connection_pre(x[..., :0], w, b, s) -> x must be [..., n, C] with C >= 1, got
hyper_connection_pre(torch.randn(3, 9, 8), w, b, s) -> x must have 1 to 8 streams, got 9
hyper_connection_post(x, f, None, res) -> f and post must be given together, got f alone
hyper_connection_post(x, None, post, res) -> f and post must be given together, got post alone
hyper_connection_post(x, f, post, res[:, 1:], transposed=True) -> res must be [..., 4, outs] with
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call, message", refusals(CALLS))
def test_refused(call, message, dtype):
    names = dict(
        zip(("x", "w", "b", "s", "f", "post", "res"), (X, WEIGHT, BASE, SCALE, F, POST, RES), strict=True)
    )
    names = {name: t.to(dtype) for name, t in names.items()}
    refused(call, message, **names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_absent(dtype):
    x = X.to(dtype)
    y, pre, post, res = tigon.hyper_connection_pre(x, WEIGHT, BASE, SCALE)
    assert (y.shape, pre.shape, post.shape, res.shape) == ((3, 8), (3, 4), (3, 4), (3, 4, 4))
    assert (y.dtype, pre.dtype, post.dtype, res.dtype) == (dtype, *(torch.float32,) * 3)
    alone = tigon.hyper_connection_pre(x, WEIGHT, BASE, SCALE, collapse=False)
    assert alone[0] is None
    assert all(torch.equal(a, b) for a, b in zip(alone[1:], (pre, post, res), strict=True))
    two = tigon.hyper_connection_pre(x, WEIGHT[:8], BASE[:8], SCALE[:2])
    assert two[3] is None and two[2].shape == (3, 4)
    assert tigon.hyper_connection_pre(x, WEIGHT[:4], BASE[:4], SCALE[:1])[2:] == (None, None)
    assert torch.equal(tigon.hyper_connection_post(x), x)


@pytest.mark.parametrize("columns", [8, 5])
@pytest.mark.parametrize("device", DEVICES)
def test_streams_apart_without_res(device, columns):
    """NaN in one stream, or in its gradient, stays there."""
    x, f, post = torch.randn(3, 4, columns), torch.randn(3, columns), torch.rand(3, 4)
    x[1, 2] = torch.nan
    dy = x.clone().to(device)
    x, f, post = (a.to(device).requires_grad_() for a in (x, f, post))
    y = tigon.hyper_connection_post(x, f, post)
    torch.testing.assert_close(y, x + post[..., None] * f[..., None, :], equal_nan=True)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx.isnan(), x.isnan())


def test_float64_parameters_beside_float32():
    """Computed in float64 throughout."""
    got = tigon.hyper_connection_pre(X, WEIGHT.double(), BASE, SCALE)
    want = reference_pre(X, WEIGHT.double(), BASE, SCALE)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(
        tigon.hyper_connection_post(X, F, POST.double(), RES), reference_post(X, F, POST.double(), RES)
    )


def test_module():
    """Both functions around a layer; the state is parameters alone."""
    module, layer = tigon.nn.HyperConnections(8, iterations=5), torch.nn.Linear(8, 8)
    assert {n: p.shape for n, p in module.state_dict().items()} == {
        "weight": (24, 32),
        "base": (24,),
        "scale": (3,),
    }
    y, _, post, res = reference_pre(X, module.weight, module.base, module.scale, iterations=5)
    got = module(X, layer)
    torch.testing.assert_close(got, reference_post(X, layer(y), post, res))
    got.sum().backward()
    assert all(p.grad is not None for p in (*module.parameters(), *layer.parameters()))
    assert "iterations=5" in repr(module)
