"""attention_residual beyond the cases: refusals, lists of values, what it is for one value."""

import pytest
import torch
from checks import refusals, refused, same_bits

import tigon


def _draw(device, dtype=torch.float32, count=3):
    values = torch.randn(count, 2, 5, 40).to(device, dtype)
    query, weight = torch.randn(2, 40).to(device, dtype)
    return values, query * 0.2, weight


BAD = """
attention_residual(None, q, w) -> a float tensor, or a list of them, got None
attention_residual([], q, w) -> or a list of them, got list
attention_residual([v, 1], q, w) -> or a list of them, got list
attention_residual([v[0], v[0, :1]], q, w) -> values must have one shape, [2, 8], got [1, 8]
attention_residual([v[0], v[0].half()], q, w) -> must have one dtype
attention_residual(q, q, w) -> at least two dimensions, got 1
attention_residual(v[:0], q, w) -> values must be 1 to 1024, got 0
attention_residual(v[:1].expand(1025, 2, 8), q, w) -> values must be 1 to 1024, got 1025
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call, message", refusals(BAD))
def test_refusals(call, message, dtype, device):
    v, q, w = (torch.randn(n, device=device, dtype=dtype) for n in ((3, 2, 8), (8,), (8,)))
    refused(call, "[attention_residual] ..." + message, v=v, q=q, w=w)


def test_a_list_of_values(device):
    """The bits and the gradients of their stack."""
    values, query, weight = _draw(device, torch.bfloat16)
    dy = torch.randn(2, 5, 40, device=device).bfloat16()
    stack = values.clone().requires_grad_()
    want = tigon.attention_residual(stack, query, weight)
    (dvalues,) = torch.autograd.grad(want, stack, dy)
    parts = [v.clone().requires_grad_() for v in values]
    for given in (parts, tuple(parts)):
        got = tigon.attention_residual(given, query, weight)
        assert same_bits(got.detach(), want.detach())
        assert all(map(same_bits, torch.autograd.grad(got, parts, dy), dvalues))


def test_one_value_is_itself(device):
    values, query, weight = (v.requires_grad_() for v in _draw(device, torch.bfloat16, 1))
    y = tigon.attention_residual(values, query, weight)
    assert same_bits(y.detach(), values[0].detach())
    dy = torch.randn_like(y)
    dvalues, dquery, dweight = torch.autograd.grad(y, (values, query, weight), dy)
    assert same_bits(dvalues[0], dy) and not dquery.any() and not dweight.any()


def test_scores_that_exp_does_not_hold(device):
    """Scores of hundreds: the largest takes it all, and nothing overflows."""
    values, query, weight = _draw(device)
    leaves = [v.requires_grad_() for v in (values, 1e3 * query, weight)]
    y = tigon.attention_residual(*leaves)
    want = tigon.attention_residual(*(v.detach().double() for v in leaves))
    torch.testing.assert_close(y.detach().double(), want, atol=1e-3, rtol=1e-3)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), leaves))
