"""Rotary embedding beyond the cases: refusals, binding, layouts, determinism over threads and ISAs."""

import itertools

import pytest
import torch
from checks import refusals, refused, same_bits

import tigon
from cases.case import lay_out
from cases.rope import eager_fn
from tigon.ops.rope import reference
from tigon.ops.rope_tables import Form

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def _inputs(B=2, T=5, Hq=4, Hk=2, D=16, R=None, *, device="cpu", dtype=torch.float32, table=None, grad=True):
    """q and k as Hugging Face passes them, [B, H, T, D] views of [B, T, H, D], and tables of [1, T, R]."""
    q, k = (torch.randn(B, T, H, D, device=device, dtype=dtype) for H in (Hq, Hk))
    cos, sin = (torch.randn(1, T, R or D, device=device, dtype=table or dtype) for _ in range(2))
    return q.transpose(1, 2).requires_grad_(grad), k.transpose(1, 2).requires_grad_(grad), cos, sin


def _gradients(q, k, cos, sin, dy=None, fn=None, **options):
    out = (fn or tigon.rope)(q, k, cos, sin, **options)
    leaves = [x for x in (q, k) if x.requires_grad]
    ends = [y for y in out if y.requires_grad]
    dy = [torch.ones_like(y) for y in ends] if dy is None else dy
    return (*out, *torch.autograd.grad(ends, leaves, dy))


def _all_same(got, want):
    return all(same_bits(a, b) for a, b in zip(got, want, strict=True))


BAD = """
rope(q[0, 0], k, c, s) -> q must have 3 or 4 dimensions, got 2
rope(q, k, c[:, :4], s[:, :4]) -> cos must be [1 or 2, 5, R] or [5, R], got [1, 4, 16]
rope(q, k, c.expand(3, -1, -1), s.expand(3, -1, -1)) -> cos must be [1 or 2, 5, R] or [5, R], got [3, 5, 16]
rope(q, k, c[None], s[None]) -> cos must be [1 or 2, 5, R] or [5, R], got [1, 1, 5, 16]
rope(q, k, c[..., :7], s[..., :7]) -> cos must have an even number of columns, at most 16, got 7
rope(q, k, c.repeat(1, 1, 2), s.repeat(1, 1, 2))
    -> cos must have an even number of columns, at most 16, got 32
rope(q, k) -> cos must be a tensor, got None
rope(q, k, c) -> sin must be a float tensor, got NoneType
rope(q, k, torch.complex(c, s)[..., :8], s, interleaved=True) -> sin must be None with complex cos
rope(q, k, torch.complex(c, s)[..., :8]) -> interleaved must be True with complex cos, got False
rope(q, k, c, s, deinterleave=True) -> interleaved must be True with deinterleave=True
rope(q, k, c, s, rotary_dim=8) -> rotary_dim must be the columns of cos or twice as many, 16, got 8
rope(q, k, c, s, rotary_dim=32) -> cos must have columns, at most 8, got 16
rope(q, k, c, s, mrope_section=4) -> mrope_section must be three ints that add up to 8, got 4
rope(q, k, c, s, mrope_section=(2.0, 3.0, 3.0)) -> mrope_section must be three ints that add up to 8
rope(q, k, c, s, mrope_section=(3, 3, 3)) -> mrope_section must be three ints that add up to 8, got [3, 3, 3]
rope(q, k, c, s, mrope_section=(2, 3, 3)) -> cos must be [3, 1 or 2, 5, R] or [3, 5, R], got [1, 5, 16]
rope(q, k, c, s, position_ids=_ids(q, 5)) -> cos must be [P, R] beside position_ids, got [1, 5, 16]
rope(q.half(), k.half(), c, s, inplace=True) -> inplace must keep torch.float16, got a result of torch.float32
rope(q, k, c, s, interleaved=True, deinterleave=True, inplace=True)
    -> inplace must be False with deinterleave=True
rope(q[..., ::2], k[..., ::2], c[..., :8], s[..., :8], inplace=True)
    -> q must have dense rows to be rotated in place
rope(q[:1].expand(2, -1, -1, -1), k, c, s, inplace=True)
    -> q must hold every element once to be written in place
rope(q, q[:, 1:3], c, s, inplace=True) -> k must share no memory with q to be written in place
rope(q.requires_grad_(), k, c, s, inplace=True) -> q must not be a leaf that requires a gradient
_raw(*a, head_dim=3) -> [rope] head_dim must be 1 or 2, got 3
_raw(*a, pairs=3) -> [rope] pairs must be 0, 1 or 2, got 3
_raw(q, k, c, None) -> [rope] sin must be given
_raw(q, k, c[None].expand(3, -1, -1, -1), s[None].expand(3, -1, -1, -1), time=3)
    -> [rope] sections must add up to 8, got 3 + 0 + 0
_raw(q, k.half(), c, s) -> [rope] k must be float32, got float16
_raw(q, k.repeat(1, 1, 1, 2), c, s) -> [rope] k must be [2, H, 5, 16]
"""


def _ids(q, *shape, start=0):
    return torch.arange(start, start + 5, device=q.device)[: shape[-1]].expand(shape)


def _form(head_dim=1, **options):
    return tuple(Form(head_dim, **options))


def _raw(q, k, cos, sin, head_dim=1, **options):
    torch.ops.tigon.rope_fwd(q, k, cos, sin, None, *_form(head_dim, **options))


@pytest.mark.parametrize("call, message", refusals(BAD))
def test_refusals(call, message, device):
    inputs = _inputs(device=device, grad=False)
    names = dict(zip("qkcs", inputs, strict=True))
    refused(call, message, _ids=_ids, _raw=_raw, a=inputs, **names)


@pytest.mark.parametrize("which", ["cos", "sin"])
def test_tables_that_require_a_gradient_run_the_reference(which, device):
    q, k, cos, sin = _inputs(device=device)
    tables = {"cos": cos, "sin": sin}
    tables[which].requires_grad_()
    got = torch.autograd.grad(tigon.rope(q, k, **tables)[0].sum(), tables[which])
    want = torch.autograd.grad(eager_fn(q, k, **tables)[0].sum(), tables[which])
    assert torch.allclose(got[0], want[0], atol=1e-5)
    with torch.no_grad():  # then the kernel serves
        assert _all_same(tigon.rope(q, k, **tables), tigon.rope(q, k, cos.detach(), sin.detach()))


def test_saves_the_tables_alone(device):
    q, k, cos, sin = _inputs(device=device)
    rotated = tigon.rope(q, k, cos, sin)
    saved = rotated[0].grad_fn.saved_tensors
    assert [t.data_ptr() for t in saved if t is not None] == [cos.data_ptr(), sin.data_ptr()]


def test_results_may_be_modified(device):
    q, k, cos, sin = _inputs(device=device)
    a, b = tigon.rope(q, k, cos, sin)
    a.mul_(2.0), b.add_(1.0)
    dq, dk = torch.autograd.grad(a.sum() + b.sum(), (q, k))
    full = _gradients(q, k, cos, sin)[2:]
    assert torch.equal(dq, 2 * full[0]) and same_bits(dk, full[1])


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("swapped", [False, True])
def test_results_keep_the_order_of_memory(swapped, unsqueeze_dim, device):
    tokens, width = 5, 3 * 16
    fused = torch.randn(2, tokens, 4, width, device=device)  # q is a third of every head's columns
    view = fused[..., :16]  # [B, T, H, D]
    x = view if unsqueeze_dim == 2 else view.transpose(1, 2)
    if not swapped:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    x.requires_grad_()
    cos, sin = torch.randn(1, tokens, 16, device=device), torch.randn(1, tokens, 16, device=device)
    q, k, dq, _ = _gradients(x, x, cos, sin, unsqueeze_dim=unsqueeze_dim)
    inside = x.stride(1) < x.stride(2)
    for y in (q, k, dq):
        assert (y.transpose(1, 2) if inside else y).is_contiguous() and not y._is_view()


@pytest.mark.parametrize("batched", [False, True])
def test_two_dimensional_tables(batched, device):
    q, k, cos, sin = _inputs(device=device)
    want = _gradients(q, k, cos, sin)
    if batched:
        assert _all_same(_gradients(q, k, cos.expand(2, -1, -1), sin.expand(2, -1, -1)), want)
    else:
        assert _all_same(_gradients(q, k, cos[0], sin[0]), want)
        assert _all_same(reference(q, k, cos[0], sin[0]), reference(q, k, cos, sin))


@pytest.mark.parametrize("layout", ["offset1", "rows", "columns", "transposed", "heads", "expanded"])
@pytest.mark.parametrize("which", ["q", "k", "cos", "sin", "dq", "dk"])
def test_layout_does_not_matter(which, layout, device):
    if layout == "heads" and which in ("cos", "sin"):
        pytest.skip("tables have no heads")
    q, k, _, _ = _inputs(D=64, device=device, grad=False)
    cos, sin = torch.randn(2, 2, 5, 64, device=device).unbind(0)
    tensors = {"q": q, "k": k, "cos": cos, "sin": sin, "dq": torch.randn_like(q), "dk": torch.randn_like(k)}
    odd = {**tensors, which: lay_out(tensors[which], layout)}
    results = []
    for t in (odd, {name: x.contiguous().clone() for name, x in odd.items()}):
        q, k = t["q"].requires_grad_(), t["k"].requires_grad_()
        results.append(_gradients(q, k, t["cos"], t["sin"], (t["dq"], t["dk"])))
    assert _all_same(*results)


@pytest.mark.parametrize("heads", [(1, 0), (0, 3), (0, 0), (1, 1), (3, 1), (7, 2), (32, 8), (5, 11)])
@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize("contiguous", [False, True])
def test_head_counts(heads, tokens, contiguous, device):
    """Every head as if rotated alone, however many share a thread."""
    q, k, cos, sin = _inputs(1, tokens, *heads, D=32, R=16, device=device, dtype=torch.bfloat16)
    if contiguous:
        q, k = (x.detach().contiguous().requires_grad_() for x in (q, k))
    got = _gradients(q, k, cos, sin)
    for y, dx, x in zip(got[:2], got[2:], (q, k), strict=True):
        assert y.shape == x.shape and dx.shape == x.shape
        for h in range(x.shape[1]):
            one = x.detach()[:, h : h + 1].clone().requires_grad_()
            alone = _gradients(one, one.detach()[:, :0], cos, sin)
            assert same_bits(y[:, h : h + 1], alone[0]) and same_bits(dx[:, h : h + 1], alone[2])


@pytest.mark.parametrize(
    "D, R", [(2, 2), (8, 0), (16, 16), (16, 2), (96, 96), (128, 32), (48, 16), (64, 8), (1056, 1024)]
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_widths(D, R, dtype, device):
    """Rotated and copied columns, packs and single elements, against the plain formulation in fp64."""
    q, k, _, _ = _inputs(D=D, device=device, dtype=dtype, grad=False)
    cos, sin = (torch.randn(1, 5, R, device=device, dtype=dtype) for _ in range(2))
    exact = eager_fn(*(x.double() for x in (q, k, cos, sin)))
    for y, want, x in zip(tigon.rope(q, k, cos, sin), exact, (q, k), strict=True):
        assert torch.allclose(y.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert same_bits(y[..., R:], x[..., R:])


@pytest.mark.parametrize("table, sin_table", [*itertools.product(FLOATS, FLOATS)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_mixed_dtypes_promote_as_pytorch_does(dtype, table, sin_table, device):
    q, k, cos, sin = _inputs(D=24, R=16, device=device, dtype=dtype)
    cos, sin = cos.to(table), sin.to(sin_table)
    got = _gradients(q, k, cos, sin)
    want = [x.dtype for x in eager_fn(q, k, cos, sin)] + [dtype, dtype]
    assert [x.dtype for x in got] == want
    exact = eager_fn(*(x.double() for x in (q, k, cos, sin)))
    eps = torch.finfo(got[0].dtype).eps
    assert all(
        torch.allclose(a.double(), b, rtol=eps, atol=1e-6) for a, b in zip(got[:2], exact, strict=True)
    )
