"""Rotary functions: every form of the table against stock and fp64, odd calls, near misses, models."""

import contextlib
import copy
import inspect

import pytest
import torch
from test_hf_unpatched import build
from tiny import InDouble, assert_all_as_good, assert_step_as_good, batch, double, step

from tigon.integrations.transformers import apply, undo
from tigon.integrations.transformers.canonical import Unrecognised, canonical
from tigon.integrations.transformers.patterns.rope import ROTARY, one_or_both, rotate_half, to_halves_maybe_k
from tigon.integrations.transformers.recognition import match
from tigon.integrations.transformers.rope import make_rotary

COLUMNS, TOKENS = 16, 5


def _arguments(structure, dtype, device, wide_tables=False):
    """Arguments of a call as models make it: q and k of [B, H, T, D], or what the form takes."""
    names, tables = [*inspect.signature(structure.reference).parameters], structure.options["tables"]
    partial = "partial" in structure.name or "tail" in structure.name
    columns = COLUMNS // 2 if partial else COLUMNS
    columns //= 2 if tables == "pair" or "freqs_cis" in names else 1
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, of=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, of)

    heads_inside = 2 in (structure.options["rope"].get("unsqueeze_dim"), structure.options["at"])
    if "vision" in structure.name:
        q, k, cos, sin = (
            draw(TOKENS, *tail) for tail in ((3, COLUMNS), (3, COLUMNS), (columns,), (columns,))
        )
    else:
        shapes = [(2, TOKENS, n, COLUMNS) if heads_inside else (2, n, TOKENS, COLUMNS) for n in (4, 2)]
        q, k = (draw(*shape) for shape in shapes)
        cos, sin = (draw(2, TOKENS, columns, of=torch.float32 if wide_tables else dtype) for _ in range(2))
    if "freqs_cis" in names:
        return q, k, torch.complex(cos.float(), sin.float())
    if "one tensor" in structure.name or "tail" in structure.name:
        return (q, sin, cos) if names[1] == "sin" else (q, cos, sin)
    return q, k, cos, sin


def _run(function, arguments):
    """Results and the gradients of all tensors that are rotated."""
    count = 1 if arguments[1].ndim < arguments[0].ndim else 2
    leaves = [x.detach().clone().requires_grad_() for x in arguments[:count]]
    out = function(*leaves, *arguments[count:])
    out = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(out, leaves, [torch.cos(y.detach().double()).to(y.dtype) for y in out])
    return [*out, *grads]


def _up(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


@pytest.mark.parametrize("wide_tables", [False, True], ids=["", "fp32 tables"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("structure", ROTARY, ids=lambda s: s.name)
def test_replacement_is_as_good_as_stock(structure, dtype, wide_tables, device):
    arguments = _arguments(structure, dtype, device, wide_tables)
    stock = structure.reference
    got = _run(make_rotary(None, structure), arguments)  # no stock function to fall back to
    wanted = _run(stock, arguments)
    with InDouble():
        exact = _run(stock, [_up(x) for x in arguments])
    assert_all_as_good(got, wanted, exact, ulps=0.5)


@pytest.mark.parametrize("structure", ROTARY, ids=lambda s: s.name)
def test_every_row_of_the_table_is_distinct(structure):
    assert match(canonical(structure.reference), ROTARY).structure == structure


@pytest.mark.parametrize("structure", ROTARY, ids=lambda s: s.name)
def test_odd_calls_go_to_stock(structure):
    """Tensor subclasses and tables of other ranks: decided per call."""

    class Sub(torch.Tensor):
        pass

    arguments = _arguments(structure, torch.float32, "cpu")
    seen = []
    replacement = make_rotary(lambda *given: seen.append(given) or "stock", structure)
    assert replacement(arguments[0].as_subclass(Sub), *arguments[1:]) == "stock"
    assert replacement(arguments[0][None, None], *arguments[1:]) == "stock"
    assert len(seen) == 2


@pytest.mark.parametrize(
    "structure",
    [
        s
        for s in ROTARY
        if s.options["at"] == 1
        and [*inspect.signature(s.reference).parameters][1:] == ["k", "cos", "sin", "unsqueeze_dim"]
    ],
    ids=lambda s: s.name,
)
def test_one_table_for_all_rows(structure):
    """Tables [T, R] with unsqueeze_dim=0, as Pixtral has them, are Tigon's."""
    q, k, cos, sin = _arguments(structure, torch.float32, "cpu")
    replacement = make_rotary(lambda *given: pytest.fail("went to stock"), structure)
    got, stock = (f(q, k, cos[0], sin[0], unsqueeze_dim=0) for f in (replacement, structure.reference))
    torch.testing.assert_close(got, stock)


def test_a_call_without_k():
    """Where a function allows it: k comes back as None, or not at all."""
    for function in (one_or_both, to_halves_maybe_k):
        (structure,) = [row for row in ROTARY if row.reference is function]
        q, k, cos, sin = _arguments(structure, torch.float32, "cpu")
        replacement = make_rotary(None, structure)
        got = replacement(q, None, cos=cos, sin=sin)
        if function is to_halves_maybe_k:
            got, nothing = got
            assert nothing is None
        assert torch.equal(got, replacement(q, k, cos, sin)[0])


def wrong_sign(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turn(x):
        x1, x2 = x[..., 0::2], x[..., 1::2]
        return torch.stack((x2, -x1), dim=-1).flatten(-2)

    return (q * cos) + (turn(q) * sin), (k * cos) + (turn(k) * sin)


def _every_third(x):
    return torch.stack((-x[..., 1::3], x[..., 0::2]), dim=-1).flatten(-2)


def other_step(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (_every_third(q) * sin), (k * cos) + (_every_third(k) * sin)


def right_half(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos = cos[..., cos.shape[-1] // 2 :].unsqueeze(unsqueeze_dim)
    sin = sin[..., sin.shape[-1] // 2 :].unsqueeze(unsqueeze_dim)
    q1, q2 = q[..., 0::2], q[..., 1::2]
    k1, k2 = k[..., 0::2], k[..., 1::2]
    q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)
    k_embed = torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], dim=-1)
    return q_embed, k_embed


def vision_other_axis(q, k, cos, sin):
    q_dtype, k_dtype = q.dtype, k.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(-3).float(), sin.unsqueeze(-3).float()
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed.to(q_dtype), k_embed.to(k_dtype)


@pytest.mark.parametrize("function", [wrong_sign, other_step, right_half, vision_other_axis])
def test_near_misses_stay_stock(function):
    found = None
    with contextlib.suppress(Unrecognised):
        found = match(canonical(function), ROTARY)
    assert found is None


def test_step_of_gptj(device):
    """q and k are turned one at a time; other models: test_hf_models_table.py."""
    stock = build("GPTJ").to(device)
    inputs = batch(device)
    wanted, exact = step(stock, inputs), step(double(stock), inputs)
    patched = copy.deepcopy(stock)
    report = apply(patched, norm=False, mlp=False, loss=False, experts=False)
    assert report.replaced[-1].by == "tigon.rope (interleaved, one tensor)" and not report.left
    assert_step_as_good(step(patched, inputs), wanted, exact, 8)
    undo(patched)
    assert torch.equal(step(patched, inputs)[0], wanted[0])


def own_words(query, key, c, s, unsqueeze_dim=1):
    c, s = c.unsqueeze(unsqueeze_dim), s.unsqueeze(unsqueeze_dim)
    return (query * c) + (rotate_half(query) * s), (key * c) + (rotate_half(key) * s)


def test_calls_by_the_names_of_stock():
    """Keywords are those of the function that is replaced; a wrong call raises its own error."""
    structure = match(canonical(own_words), ROTARY).structure
    q, k, cos, sin = _arguments(structure, torch.float32, "cpu")
    replacement = make_rotary(own_words, structure)
    torch.testing.assert_close(replacement(q, key=k, s=sin, c=cos), own_words(q, k, cos, sin))
    for wrong in ({"c": cos}, {"c": cos, "s": sin, "query": q}, {"c": cos, "s": sin, "other": 1}):
        with pytest.raises(TypeError, match="own_words"):
            replacement(q, k, **wrong)
