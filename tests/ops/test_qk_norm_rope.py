"""qk_norm_rope beyond the cases: it is the two ops in turn, refusals, gradients wanted."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import check_close, same_bits

import tigon
from cases.case import lay_out
from tigon.ops.qk_norm_rope import reference
from tigon.ops.rope_tables import Form

FORMS = [
    {},
    {"rounding": "gemma", "offset": 1.0},
    {"rounding": "none", "interleaved": True},
    {"tail": True},
    {"interleaved": True, "rotary_dim": 16},
]


def _inputs(B=2, T=5, Hq=4, Hk=2, D=64, R=None, *, device="cpu", dtype=torch.float32, weight=None, grad=True):
    """q, k, their weights, cos and sin: heads as Hugging Face has them."""
    q, k = (torch.randn(B, T, H, D, device=device, dtype=dtype) for H in (Hq, Hk))
    weights = [torch.randn(D, device=device, dtype=weight or dtype).requires_grad_(grad) for _ in range(2)]
    tables = [torch.randn(1, T, R or D, device=device, dtype=dtype) for _ in range(2)]
    return [x.transpose(1, 2).requires_grad_(grad) for x in (q, k)] + weights + tables


def _gradients(inputs, dy=None, fn=None, **options):
    out = (fn or tigon.qk_norm_rope)(*inputs, **options)
    out = out if isinstance(out, tuple) else (out,)
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    ends = [y for y in out if y.requires_grad]
    dy = [torch.cos(y.detach()) for y in ends] if dy is None else dy
    return (*out, *torch.autograd.grad(ends, leaves, dy))


def _in_turn(q, k, q_weight, k_weight, cos, sin, *, offset=0.0, rounding="llama", **options):
    norm = {"offset": offset, "rounding": rounding}
    q, k = tigon.rms_norm(q, q_weight, **norm), tigon.rms_norm(k, k_weight, **norm)
    return tigon.rope(q, k, cos, sin, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("D, R", [(64, None), (40, 20), (23, 16), (128, 32)])
def test_forward_is_the_two_ops_in_turn(options, dtype, D, R):
    """The same roundings at the same places: bit for bit on the CPU, where both sum a row by one tree."""
    options = dict(options)
    columns = options.get("rotary_dim", 2 * (R or D)) // 2 if "rotary_dim" in options else R
    inputs = _inputs(D=D, R=columns, dtype=dtype, grad=False)
    got, want = tigon.qk_norm_rope(*inputs, **options), _in_turn(*inputs, **options)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_as_good_as_the_two_ops_in_turn(options, dtype, device):
    columns = 8 if "rotary_dim" in options else 32
    inputs = _inputs(T=33, R=columns, device=device, dtype=dtype)
    dy = [torch.randn_like(y) for y in _in_turn(*inputs, **options)]
    got, plain = _gradients(inputs, dy, **options), _gradients(inputs, dy, fn=_in_turn, **options)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    exact = _gradients(wide, [d.double() for d in dy], fn=reference, **options)
    for name, a, b, c in zip(("q", "k", "dq", "dk", "dqw", "dkw"), got, plain, exact, strict=True):
        check_close(name, a, b, c)


BAD = {
    "rounding": (lambda *a: tigon.qk_norm_rope(*a, rounding="late"), r"rounding must be one of"),
    "eps": (lambda *a: tigon.qk_norm_rope(*a, -1.0), r"eps must be >= 0, got -1"),
    "weight size": (
        lambda q, k, u, v, c, s: tigon.qk_norm_rope(q, k, u[:8], v, c, s),
        r"q_weight must be \[64\], got \[8\]",
    ),
    "weight alone": (
        lambda q, k, u, v, c, s: tigon.qk_norm_rope(q, k, u, None, c, s),
        r"k_weight must be given exactly when q_weight is",
    ),
    "weight without k": (
        lambda q, k, u, v, c, s: tigon.qk_norm_rope(q, None, u, v, c, s),
        r"k_weight must be None without its tensor",
    ),
    "weight dtypes": (
        lambda q, k, u, v, c, s: tigon.qk_norm_rope(q, k, u, v.half(), c, s),
        r"k_weight must be torch.float32, got torch.float16",
    ),
    "k columns": (
        lambda q, k, u, v, c, s: tigon.qk_norm_rope(q, k[..., :8], u, v, c, s),
        r"k must be \[2, H, 5, 64\], got \[2, 2, 5, 8\]",
    ),
    "cos": (
        lambda q, k, u, v, c, s: tigon.qk_norm_rope(q, k, u, v, c[:, :4], s[:, :4]),
        r"cos must be \[1 or 2, 5, R\]",
    ),
    "weight, raw": (
        lambda q, k, u, v, c, s: _raw(q, k, u[:8], v, c, s),
        r"q_weight must be \[64\], got \[8\]",
    ),
    "weight dtype, raw": (
        lambda q, k, u, v, c, s: _raw(q, k, u, v.half(), c, s),
        r"k_weight must be float32",
    ),
    "pairs, raw": (lambda *a: _raw(*a, pairs=2), r"results must have the pairs of q"),
    "k tokens, raw": (lambda q, k, *r: _raw(q, k[:, :, :4], *r), r"k must be \[2, H, 5, 64\]"),
    "k dtype, raw": (lambda q, k, *r: _raw(q, k.half(), *r), r"k must be float32, got float16"),
    "eps, raw": (lambda *a: _raw(*a, eps=-1.0), r"eps must be >= 0"),
}


def _raw(q, k, q_weight, k_weight, cos, sin, eps=1e-6, **options):
    try:
        torch.ops.tigon.qk_norm_rope_fwd(
            q, k, q_weight, k_weight, cos, sin, None, eps, 0.0, 0, *Form(1, **options)
        )
    except RuntimeError as exc:
        raise tigon.Error(str(exc)) from exc


@pytest.mark.parametrize("name", BAD)
def test_refusals(name, device):
    call, message = BAD[name]
    inputs = _inputs(device=device, grad=False)
    with pytest.raises(tigon.Error, match=message):
        call(*inputs)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)))
def test_every_requires_grad_combination(needs, device):
    inputs = _inputs(device=device)
    full = _gradients(inputs)
    some = [x.detach().clone() for x in inputs]
    for x, needed in zip(some, needs, strict=False):
        x.requires_grad_(needed)
    out = tigon.qk_norm_rope(*some)
    assert all(same_bits(a, b) for a, b in zip(out, full[:2], strict=True))
    if any(needs):
        ends = [y for y in out if y.requires_grad]
        torch.autograd.backward(ends, [torch.cos(y.detach()) for y in ends])
    for x, want, needed in zip(some, full[2:], needs, strict=False):
        assert same_bits(x.grad, want if needed else None)


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_used(used, device):
    inputs = _inputs(device=device)
    full = _gradients(inputs)
    y = tigon.qk_norm_rope(*inputs)[used]
    got = torch.autograd.grad(y, inputs[:4], torch.cos(y.detach()), allow_unused=True)
    assert same_bits(got[used], full[2 + used]) and same_bits(got[2 + used], full[4 + used])
    assert got[1 - used] is None and (got[3 - used] is None or not got[3 - used].any())


@pytest.mark.parametrize("layout", ["offset1", "rows", "columns", "transposed", "heads"])
@pytest.mark.parametrize("which", [0, 1, 2, 4])
def test_layout_does_not_matter(which, layout, device):
    if layout in ("heads", "transposed", "rows") and which == 2:
        pytest.skip("a weight has one dimension")
    if layout == "heads" and which == 4:
        pytest.skip("tables have no heads")
    inputs = _inputs(device=device, grad=False)
    odd = list(inputs)
    odd[which] = lay_out(inputs[which], layout)
    got, want = tigon.qk_norm_rope(*odd), tigon.qk_norm_rope(*inputs)
    close = [torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(got, want, strict=True)]
    assert all(close)  # not the bits: another kernel sums the row by another tree


@pytest.mark.parametrize("heads", [(1, 0), (1, 1), (7, 2), (5, 11)])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_head_counts(heads, tokens, device):
    """Every head as if alone, however many share a thread."""
    q, k, u, v, cos, sin = _inputs(1, tokens, *heads, D=32, R=16, device=device, dtype=torch.bfloat16)
    out = _gradients((q, k, u, v, cos, sin))
    for h in range(heads[0]):
        one = q.detach()[:, h : h + 1].clone().requires_grad_()
        alone = _gradients((one, None, u.detach(), None, cos, sin))
        assert same_bits(out[0][:, h : h + 1], alone[0]) and same_bits(out[2][:, h : h + 1], alone[1])


def test_backward_twice_and_inputs_untouched(device):
    inputs = _inputs(T=300, device=device)
    kept = [x.detach().clone() for x in inputs]
    out = tigon.qk_norm_rope(*inputs)
    dy = [torch.randn_like(y) for y in out]
    first = torch.autograd.grad(out, inputs[:4], dy, retain_graph=True)
    second = torch.autograd.grad(out, inputs[:4], dy)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert all(same_bits(x.detach(), y) for x, y in zip(inputs, kept, strict=True))


def test_more_than_1024_columns_run_the_reference(device):
    inputs = _inputs(D=1040, R=16, device=device, grad=False)
    got, want = tigon.qk_norm_rope(*inputs), reference(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_opcheck(device):
    q, k, u, v, cos, sin = _inputs(D=24, R=16, device=device)
    tail = (1e-6, 0.0, 0, *Form(1))
    for a, w in ((k, v), (None, None)):
        torch.library.opcheck(torch.ops.tigon.qk_norm_rope.default, (q, a, u, w, cos, sin, None, *tail))
    dy = [torch.randn_like(x) for x in (q, k)]
    for need in (False, True):
        sample = (*dy, q.detach(), k.detach(), u.detach(), v.detach(), cos, sin, None, *tail, need)
        torch.library.opcheck(torch.ops.tigon.qk_norm_rope_bwd.default, sample)
