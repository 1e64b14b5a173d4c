"""The gated linear units beyond the cases: refusals, binding, layouts, determinism over threads and ISAs."""

import functools

import pytest
import torch
from checks import refusals, refused, same_bits

import tigon


def _pair(*shape, device="cpu", dtype=torch.float32, grad=True):
    gate, up = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    return gate.requires_grad_(grad), up.requires_grad_(grad)


def _gradients(gate, up, dy=None, fn=None):
    y = (fn or tigon.swiglu)(gate, up)
    leaves = [t for t in (gate, up) if t.requires_grad]
    return y, torch.autograd.grad(y, leaves, torch.ones_like(y) if dy is None else dy)


PLAIN = (0, 1.0, 1.0, 1.702, 7.0)  # swiglu, as the operators take it
BAD = """
swiglu(g[:, :5]) -> gate must have an even number of columns, got 5
reglu(g[0, 0]) -> [reglu] gate must have at least one dimension
swiglu(g, u, gate_multiplier=2.0, limit=1.0) -> [swiglu] limit must be None with multipliers
swiglu_oai(g[:, 1:]) -> gate_up must have an even number ... got 7
_raw('glu_fwd', g[0, 0], u[0, 0], *PLAIN) -> [swiglu] gate must have at least one dimension, got 0
_raw('glu_fwd', g[:, :5], None, *PLAIN) -> [swiglu] gate must have an even number of columns without up, got 5
_raw('glu_fwd', g, u, 4, *PLAIN[1:]) -> [swiglu_oai] up must be None
_raw('glu_bwd', g[:2], g, u, *PLAIN, True, True) -> [swiglu_bwd] dy must be [4, 8], got [2, 8]
"""


def _raw(op, *args):
    getattr(torch.ops.tigon, op)(*args)


@pytest.mark.parametrize("call, message", refusals(BAD))
def test_refusals(call, message, device):
    gate, up = _pair(4, 8, device=device, grad=False)
    refused(call, message, g=gate, u=up, _raw=_raw, PLAIN=PLAIN)


OF_TWO = {
    "swiglu": tigon.swiglu,
    "multipliers": functools.partial(tigon.swiglu, gate_multiplier=0.75, down_multiplier=-1.25),
    "geglu": tigon.geglu,
    "geglu_none": functools.partial(tigon.geglu, approximate="none"),
    "reglu": tigon.reglu,
}


@pytest.mark.parametrize("cols", [1, 33, 64])
@pytest.mark.parametrize("name", OF_TWO)
def test_packed_is_two_halves(name, cols, device):
    """The same bits from one tensor; its gradient is one dense tensor that the kernel wrote."""
    fn = OF_TWO[name]
    both = torch.randn(2, 5, 2 * cols, device=device, requires_grad=True)
    dy = torch.randn(2, 5, cols, device=device)
    gate, up = (half.detach().clone().requires_grad_() for half in both.chunk(2, dim=-1))
    want, grads = _gradients(gate, up, dy, fn)
    y = fn(both)
    assert y.grad_fn.saved_tensors[0].data_ptr() == both.data_ptr()
    (got,) = torch.autograd.grad(y, both, dy)
    assert y.is_contiguous() and got.is_contiguous()
    assert same_bits(y, want) and same_bits(got, torch.cat(grads, dim=-1))


def test_small_tails_of_exact_gelu_keep_their_digits(device):
    """Where 1 + erf(x / sqrt 2) has none left."""
    x = torch.linspace(-9, -4, 501, device=device, requires_grad=True)
    y, (slope, _) = _gradients(x, torch.ones_like(x).requires_grad_(), fn=OF_TWO["geglu_none"])
    exact = x.detach().double().requires_grad_()
    want = exact / 2 * torch.erfc(-exact / 2**0.5)
    (want_slope,) = torch.autograd.grad(want.sum(), exact)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(slope.double(), want_slope, rtol=1e-4, atol=0)


def test_inputs_are_kept_by_reference(device):
    gate, up = _pair(6, 40, device=device)
    out = tigon.swiglu(gate, up)
    saved = out.grad_fn.saved_tensors
    assert [t.data_ptr() for t in saved] == [gate.data_ptr(), up.data_ptr()]


@pytest.mark.parametrize("which", [0, 1])
def test_modified_input_is_noticed(which, device):
    pair = [t * 1 for t in _pair(6, 40, device=device)]
    y = tigon.swiglu(*pair)
    pair[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", [1, 7, 16, 33, 64, 333])
def test_halves_of_one_tensor(cols, dtype, device):
    """The same bits as dense copies; on CUDA these widths reach every variant of the pointwise skeleton."""
    both = torch.randn(2, 3, 2 * cols, device=device, dtype=dtype, requires_grad=True)
    dense = [half.detach().clone().requires_grad_() for half in both.chunk(2, dim=-1)]
    dy = torch.randn(2, 3, cols, device=device, dtype=dtype)
    y = tigon.swiglu(*both.chunk(2, dim=-1))
    want, grads = _gradients(*dense, dy)
    assert y.is_contiguous() and same_bits(y, want)
    (got,) = torch.autograd.grad(y, both, dy)
    assert same_bits(got, torch.cat(grads, dim=-1))


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 2047, 2048, 2049, 8191, 8192, 8200, 70001])
def test_flat_sizes_around_tiles(numel, device):
    """Tails after the last pack and tiles that are only begun: each element as if alone in a row."""
    gate, up = _pair(numel, device=device, dtype=torch.bfloat16)
    y, (dgate, dup) = _gradients(gate, up)
    a, b = (t.detach()[:, None].clone().requires_grad_() for t in (gate, up))
    want, grads = _gradients(a, b)
    pairs = zip((y, dgate, dup), (want, *grads), strict=True)
    assert all(same_bits(got, x.squeeze(1)) for got, x in pairs)


def test_a_packed_gradient_is_one_tensor_of_fakes_too():
    dy, both = (torch.empty(2, n, device="meta") for n in (24, 48))
    assert [g.shape for g in torch.ops.tigon.glu_bwd(dy, both, None, *PLAIN, True, True)] == [(2, 48), (0,)]


def test_refused_under_compile_too(device):
    torch._dynamo.reset()
    compiled = torch.compile(tigon.swiglu, backend="aot_eager")
    with pytest.raises(tigon.Error, match=r"up must be \[4, 8\], got \[4, 5\]"):
        compiled(torch.randn(4, 8, device=device), torch.randn(4, 5, device=device))


@pytest.mark.parametrize("gate", [-1e4, -200.0, -88.5, -20.0, 0.0, 20.0, 88.5, 200.0, 1e4])
def test_far_from_zero(gate, device):
    """No overflow of the exponential shows."""
    g = torch.full((17,), gate, device=device, requires_grad=True)
    up = torch.full((17,), 2.0, device=device, requires_grad=True)
    y, (dgate, dup) = _gradients(g, up)
    slope = 2.0 if gate > 0 else 1.0 if gate == 0 else 0.0
    assert torch.allclose(y, torch.full_like(y, 2 * max(gate, 0.0)), atol=1e-6)
    assert torch.allclose(dup, torch.full_like(y, max(gate, 0.0)), atol=1e-6)
    assert torch.allclose(dgate, torch.full_like(y, slope), atol=1e-6)


def test_more_accurate_than_rounding_twice(device):
    gate, up = _pair(64, 512, device=device, dtype=torch.bfloat16, grad=False)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    ours = (tigon.swiglu(gate, up).double() - exact).square().mean()
    twice = ((torch.nn.functional.silu(gate) * up).double() - exact).square().mean()
    assert ours < twice


def test_modules(device):
    gate, up = _pair(4, 24, device=device, grad=False)
    nn = tigon.nn
    for module, want in (
        (nn.SwiGLU(), tigon.swiglu(gate, up)),
        (nn.SwiGLU(limit=0.5), tigon.swiglu(gate, up, limit=0.5)),
        (nn.SwiGLU(0.75, -1.25), OF_TWO["multipliers"](gate, up)),
        (nn.GeGLU(), tigon.geglu(gate, up)),
        (nn.GeGLU("none"), OF_TWO["geglu_none"](gate, up)),
        (nn.ReGLU(), tigon.reglu(gate, up)),
    ):
        assert not list(module.parameters()) and same_bits(module(gate, up), want)
        assert same_bits(module(torch.cat((gate, up), dim=-1)), want)
    assert same_bits(nn.SwiGLUOAI(1.5, 3.0)(gate), tigon.swiglu_oai(gate, alpha=1.5, limit=3.0))


def _in_place_run(device, hold=lambda gate: None, other=None, retain=False, packed=False):
    """Whether the backward wrote over gate; the gradients of what made gate and up; what `hold` held."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = (
        torch.randn(n, 40, generator=generator).to(device).requires_grad_()
        for n in (6, 80 if packed else 40, 40)
    )
    gate, up = x @ a.t(), None if packed else x @ b.t()
    address, seen = gate.data_ptr(), []
    gate.register_hook(lambda g: seen.append(g.data_ptr()))
    held = hold(gate)
    before = None if held is None else held.clone()
    more = 0.0 if other is None else other(gate)  # its backward comes after that of swiglu
    y = tigon.swiglu(gate, up).square() + more
    del gate, up
    y.sum().backward(retain_graph=retain)
    assert held is None or same_bits(held, before)
    return seen == [address], [t.grad for t in (x, a, b) if t.grad is not None]


HELD = {
    "by a name": {"hold": lambda gate: gate},
    "by a view": {"hold": lambda gate: gate.detach()[1:]},
    "by another op": {"other": lambda gate: gate.sin()},
    "by a graph kept for another backward": {"retain": True},
}


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_take_the_place_of_what_nobody_holds(packed, device):
    in_place, found = _in_place_run(device, packed=packed)
    assert in_place
    apart, expected = _in_place_run(device, packed=packed, retain=True)
    assert not apart
    assert all(same_bits(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", HELD)
def test_what_others_hold_is_never_written(case, device):
    in_place, found = _in_place_run(device, **HELD[case])
    assert not in_place
    _, expected = _in_place_run(device, **HELD[case] | {"retain": True})
    assert all(same_bits(f, e) for f, e in zip(found, expected, strict=True))


def test_leaves_and_one_tensor_for_both_are_never_written(device):
    gate, up = _pair(6, 40, device=device)
    kept = gate.detach().clone(), up.detach().clone()
    tigon.swiglu(gate, up).sum().backward()
    assert same_bits(gate, kept[0]) and same_bits(up, kept[1])
    both = gate * 1.0
    y = tigon.swiglu(both, both).sum()
    del both
    gate.grad = None
    y.backward()
    again = gate.detach().clone().requires_grad_()
    (torch.nn.functional.silu(again.double()) * again.double()).sum().backward()
    torch.testing.assert_close(gate.grad, again.grad, rtol=1e-5, atol=1e-6)
