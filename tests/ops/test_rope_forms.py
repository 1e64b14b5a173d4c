"""Forms of the rotary embedding beyond the cases: in place, positions, M-RoPE, complex, packed."""

import pytest
import torch
from checks import same_bits
from test_rope import _all_same, _form, _gradients, _ids, _inputs

import tigon
from cases.case import lay_out


def test_opcheck_of_other_forms(device):
    q, k, cos, sin = _inputs(D=24, R=16, device=device)
    pairs = _form(pairs=1, shared=True)
    numbers = torch.view_as_real(torch.complex(cos, sin))[..., :8, :]
    ids = torch.randint(0, 5, (2, 5), device=device)
    for sample in ((q, k, numbers, None, None, *pairs), (q, k, cos[0], sin[0], ids, *_form(pairs=2))):
        torch.library.opcheck(torch.ops.tigon.rope.default, sample)
    dense = [x.detach().clone() for x in (q, k)]
    torch.library.opcheck(torch.ops.tigon.rope_in_place.default, (*dense, cos, sin, None, *_form()))


IN_PLACE = [
    {},
    {"interleaved": True},
    {"tail": True},
    {"interleaved": True, "rotary_dim": 16, "narrow": True},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", IN_PLACE, ids=str)
@pytest.mark.parametrize("D", [24, 23])
def test_in_place(options, dtype, D, device):
    """The bits of the call out of place, in the memory of q and k, and nothing else of a fused projection."""
    options = dict(options)
    columns = 8 if options.pop("narrow", False) else 16
    fused = torch.randn(2, 5, 7, D, device=device, dtype=dtype)
    q, k, v = (x.transpose(1, 2) for x in fused.split((4, 2, 1), dim=2))
    cos, sin = (torch.randn(1, 5, columns, device=device, dtype=dtype) for _ in range(2))
    kept, want = v.clone(), tigon.rope(q, k, cos, sin, **options)
    before = [x.data_ptr() for x in (q, k)]
    got = tigon.rope(q, k, cos, sin, inplace=True, **options)
    assert got[0] is q and got[1] is k and [x.data_ptr() for x in got] == before
    assert _all_same(got, want) and same_bits(v, kept)
    one = q.clone()
    rotated = tigon.rope(one, None, cos, sin, **options)
    assert tigon.rope(one, None, cos, sin, inplace=True, **options) is one and same_bits(one, rotated)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_place_gradients(dtype, traced, device):
    """Of a projection whose views are overwritten."""
    x = torch.randn(2, 5, 6 * 16, device=device, dtype=dtype, requires_grad=True)
    cos, sin = (torch.randn(1, 5, 16, device=device, dtype=dtype) for _ in range(2))

    def step(x, inplace):
        fused = (x * 2).view(2, 5, 6, 16)
        q, k = fused[:, :, :4].transpose(1, 2), fused[:, :, 4:].transpose(1, 2)
        q, k = tigon.rope(q, k, cos, sin, inplace=inplace)
        return (q.square().sum() + k.sin().sum()), q

    torch._dynamo.reset()
    fn = torch.compile(step, fullgraph=True, backend="aot_eager") if traced else step
    want, got = step(x, False), fn(x, True)
    assert same_bits(got[1], want[1])
    assert torch.allclose(*(torch.autograd.grad(y, x)[0] for y in (got[0], want[0])), rtol=1e-6)


REFERENCES = {
    "kernels": lambda q, k, cos, sin: (q, k, cos, sin),
    "float64": lambda *tensors: tuple(t.double() for t in tensors),
    "tables with a gradient": lambda q, k, cos, sin: (q, k, cos.requires_grad_(), sin),
}


@pytest.mark.parametrize("route", REFERENCES)
def test_positions_outside_the_table(route, device):
    q, k, cos, sin = _inputs(D=32, R=16, device=device, grad=False)
    q, k, cos, sin = REFERENCES[route](q, k, cos, sin)
    for outside in (5, -1, 2**40):
        ids = _ids(q, 2, 5).clone()
        ids[1, 3] = outside
        if device == "cpu":
            with pytest.raises(tigon.Error, match=rf"\[rope\] position.* must be in \[0, 5\), got {outside}"):
                tigon.rope(q, k, cos[0], sin[0], position_ids=ids)
            with pytest.raises(tigon.Error, match=rf"norm_rope\] position.* in \[0, 5\), got {outside}"):
                tigon.qk_norm_rope(q, k, None, None, cos[0], sin[0], position_ids=ids)
            continue
        inside = ids.clamp(0, 4)
        want = tigon.rope(q, k, cos[0], sin[0], position_ids=inside)
        got = tigon.rope(q, k, cos[0], sin[0], position_ids=ids)
        for y, exact in zip((y.detach() for y in got), want, strict=True):
            assert y[1, :, 3, :16].isnan().all() and same_bits(y[..., 16:], exact[..., 16:])
            y[1, :, 3, :16] = exact[1, :, 3, :16]
            assert same_bits(y, exact)


def test_positions_are_rows_of_the_table(device):
    """Of every integer dtype, layout and number of dimensions."""
    q, k, _, _ = _inputs(D=32, device=device)
    cos, sin = (torch.randn(11, 32, device=device) for _ in range(2))
    ids = torch.randint(0, 11, (2, 5), device=device)
    want = _gradients(q, k, cos[ids], sin[ids])
    for odd in (ids, ids.int(), lay_out(ids, "columns"), lay_out(ids, "transposed")):
        assert _all_same(_gradients(q, k, cos, sin, position_ids=odd), want)
    first = _gradients(q, k, cos[ids[:1]], sin[ids[:1]])
    for row in (ids[0], ids[:1]):
        assert _all_same(_gradients(q, k, cos, sin, position_ids=row), first)


def test_sections_are_the_merged_table(device):
    """M-RoPE in the kernel and the table that Qwen3-VL merges before it are the same bits."""
    q, k, _, _ = _inputs(D=64, device=device, dtype=torch.bfloat16)
    cos, sin = (torch.randn(3, 2, 5, 32, device=device, dtype=torch.bfloat16) for _ in range(2))
    for mixed in (False, True):
        pick = [_axis(i, (12, 10, 10), mixed) for i in range(32)]
        merged = [torch.stack([x[a, ..., i] for i, a in enumerate(pick)], dim=-1) for x in (cos, sin)]
        want = _gradients(q, k, *merged, rotary_dim=64)
        options = {"rotary_dim": 64, "mrope_section": [12, 10, 10], "mrope_interleaved": mixed}
        assert _all_same(_gradients(q, k, cos, sin, **options), want)


def _axis(i, section, mixed):
    """Axis of a pair."""
    if not mixed:
        return sum(i >= sum(section[:n]) for n in (1, 2))
    return i % 3 if i % 3 and i < 3 * section[i % 3] else 0


def test_complex_tables_are_their_parts(device):
    """Strided and batched freqs_cis, read as they lie."""
    q, k, _, _ = _inputs(D=32, device=device)
    freqs = torch.randn(2, 5, 2, 16, device=device, dtype=torch.complex64)
    for numbers in (freqs[:, :, 0], freqs[0, :, 1], freqs[..., ::2].reshape(2, 5, 16), freqs[:, :, 0].conj()):
        want = _gradients(q, k, numbers.real, numbers.imag, interleaved=True, rotary_dim=32)
        got = _gradients(q, k, numbers, None, interleaved=True)
        assert _all_same(got, want)


def test_packed_and_one_tensor_are_the_batched_call(device):
    q, k, cos, sin = _inputs(1, 5, device=device)
    want = _gradients(q, k, cos, sin)
    packed = [x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k)]  # [T, H, D]
    for options in ({}, {"unsqueeze_dim": -2}):
        got = _gradients(*packed, cos[0], sin[0], **options)
        assert _all_same([x.transpose(0, 1)[None] for x in got], want)
    heads_first = _gradients(*(x.transpose(0, 1) for x in packed), cos[0], sin[0], unsqueeze_dim=0)
    assert _all_same([x[None] for x in heads_first], want)
    assert same_bits(tigon.rope(q, None, cos, sin), want[0])
