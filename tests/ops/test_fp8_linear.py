"""fp8_linear: its casts, what is kept and reused, and what it refuses."""

import copy
import gc
import math
import weakref

import pytest
import torch

import tigon
from tigon import _fp8_bytes
from tigon.ops import fp8_linear as module
from tigon.ops.fp8_linear import quantize_rows, quantized

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
quantize, transpose = torch.ops.tigon.fp8_quantize, torch.ops.tigon.fp8_transpose


def bits(t):
    return t.contiguous().view(torch.uint8)


def rows(m, k, dtype, device, spread=24):
    x = torch.randn(m, k) * torch.exp2(torch.randint(-spread, spread, (m, 1)).clamp(max=14).float())
    return x.to(device, dtype)


def hard(m, k, dtype, device):
    """Rows of zeros, of one value, with one huge element, with NaN and infinities, tiny ones."""
    x = rows(m, k, dtype, device)
    x[0], x[1], x[2, k // 2] = 0, 3, torch.finfo(dtype).max
    x[3, 0], x[3, 1], x[3, 2] = torch.nan, torch.inf, -torch.inf
    x[4] *= 1e-30
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 1), (15, 48), (17, 64), (33, 130), (9, 4096), (6, 9000), (130, 17)])
@pytest.mark.parametrize("factors", [False, True])
def test_rows(shape, dtype, factors, device):
    """Bytes and scales are those of the formula."""
    x = hard(*shape[:1], max(shape[1], 3), dtype, device)[:, : shape[1]]
    f = torch.exp2(torch.randint(-9, 9, shape[1:]).float()).to(device) if factors else None
    q, s = quantize(x, f)
    expected, scales = quantized(x.float() * (1 if f is None else f))
    assert torch.equal(s[:, None], scales)
    assert torch.equal(q.float().nan_to_num(7), expected.nan_to_num(7))
    assert q.float().nan_to_num().abs().max() <= 448


def test_a_scale_is_the_least_power_of_two(device):
    """That divides a row to at most 448; for zeros a small one."""
    powers = torch.exp2(torch.arange(-40, 100, device=device).float())[:, None]
    for column, top in ((powers, 256.0), (1.75 * powers, 448.0)):
        q, s = quantize_rows(column)
        assert torch.equal(q.float(), torch.full_like(column, top)) and torch.equal(s * top, column[:, 0])
        q, s = quantize_rows(column * (1 + 2.0**-23))
        assert torch.equal(s * top, column[:, 0] * (2 if top == 448 else 1))
    q, s = quantize_rows(torch.zeros(2, 5, device=device))
    assert not q.float().any() and torch.equal(s, torch.full_like(s, 2.0**-60))


def test_every_number_of_a_format(device):
    """Rounded to nearest even, as PyTorch does, to the smallest denormals."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(device)
    x = torch.cat([every[every.abs() <= 448], torch.full((1,), 448.0, dtype=torch.bfloat16, device=device)])
    q, s = quantize_rows(x[None])
    assert s.item() == 1 and torch.equal(bits(q[0]), bits(x.float().to(torch.float8_e4m3fn)))
    # Between any two neighbours: their mean, and what is just beside it.
    values = torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    means = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(means, of) for of in (values[1:], values[:-1])]
    x = torch.cat([means, *beside, values[-1:]])
    x = torch.cat([x, -x])
    q, s = quantize_rows(x[None])
    assert s.item() == 1 and torch.equal(bits(q[0]), bits(x.to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_has_the_same_bytes(dtype, device):
    x = rows(33, 112, dtype, device)
    q, s = quantize_rows(x)
    for i in (0, 7, 32):
        alone, scale = quantize_rows(x[i].clone())
        assert torch.equal(bits(alone[0]), bits(q[i])) and scale[0] == s[i]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_has_the_same_bits(dtype, device):
    """Of y and of the gradient of x, in the deterministic mode."""
    w, dy = (torch.randn(48, 64) / 8).to(device, dtype), rows(40, 48, dtype, device, spread=4)
    x = rows(40, 64, dtype, device, spread=4).requires_grad_()
    with tigon.deterministic():
        y = tigon.fp8_linear(x, w)
        (dx,) = torch.autograd.grad(y, x, dy)
        for first, count in ((0, 1), (5, 17), (39, 1)):
            part = x.detach()[first : first + count].clone().requires_grad_()
            z = tigon.fp8_linear(part, w)
            (dz,) = torch.autograd.grad(z, part, dy[first : first + count])
            assert torch.equal(z, y[first : first + count]) and torch.equal(dz, dx[first : first + count])


@pytest.mark.parametrize(
    "shape", [(1, 16), (15, 48), (17, 64), (130, 33), (257, 144), (2600, 48), (9000, 16)]
)
@pytest.mark.parametrize("spread", [3, 9, 24])
def test_transposed(shape, spread, device):
    """The same bytes, zeros behind them; with factors, those of columns divided by scales of their own.

    Kernels multiply pairs of f16 where the factors of rows and columns are near each other.
    """
    f = torch.exp2(torch.randint(-9, 9, shape[:1]).float()).to(device)
    if spread < 24:
        x = rows(*shape, torch.float32, device, spread)
        x[1::7], x[3::50, 2:3] = 0, torch.nan
        # Two columns whose largest elements are in rows with small factors.
        x[:, 0] = x[:, -2] = 0
        x[5::64, 0] = x[6::64, -2] = x[7::64, -2] = 1
        f[5::64], f[6::64], f[7::64] = 2.0**-44, 1, 2.0**-15
    else:
        x = hard(max(shape[0], 5), shape[1], torch.float32, device)[: shape[0]]
    q, s = quantize_rows(x)
    qt, none = transpose(q, None, None, None)
    assert none.numel() == 0 and qt.shape == (shape[1], math.ceil(shape[0] / 16) * 16)
    assert torch.equal(bits(qt[:, : shape[0]]), bits(q.T)) and not bits(qt[:, shape[0] :]).any()
    d = torch.exp2(torch.randint(-9, 9, shape[1:]).float()).to(device)
    qt, c = transpose(q, f, s, d)
    expected, scales = quantized(q.float() * (f * s)[:, None], 0)
    assert torch.equal(c[None] * d, scales) and not bits(qt[:, shape[0] :]).any()
    assert torch.equal(qt[:, : shape[0]].float().nan_to_num(7), expected.T.nan_to_num(7))


def ratio(exact, got):
    """Signal to noise in decibels."""
    exact, got = exact.double(), got.double()
    return 10 * math.log10(exact.square().sum() / (exact - got).square().sum())


def parameters(n=48, k=64, dtype=torch.bfloat16, device="cpu"):
    weight = torch.nn.Parameter((torch.randn(n, k) / k**0.5).to(device, dtype))
    return weight, torch.randn(40, k).to(device, dtype).requires_grad_()


@pytest.mark.parametrize("spread", [0, 8])
@pytest.mark.parametrize("dw", ["fp8", "bf16"])
def test_signal_to_noise(dw, spread, device):
    """Of one linear at least 25 dB, also where tokens differ by powers of two."""
    w, x = parameters(256, 512, device=device)
    x = (x.detach() * torch.exp2(torch.randint(-spread, 1, (40, 1)).to(x))).requires_grad_()
    dy = torch.randn(40, 256).to(x)
    y = tigon.fp8_linear(x, w, dw=dw)
    got = (y, *torch.autograd.grad(y, (x, w), dy))
    exact = x.float() @ w.float().T, dy.float() @ w.float(), dy.float().T @ x.float()
    assert min(ratio(e.detach(), g.detach()) for e, g in zip(exact, got, strict=True)) > 25


def count_casts(monkeypatch):
    """The tensors that are quantised from here on."""
    seen, original = [], module._quantize
    monkeypatch.setattr(module, "_quantize", lambda x, f: (seen.append(x.shape), original(x, f))[1])
    return seen


def test_microbatches_share_a_weight(monkeypatch, device):
    """From the second on: its bytes are dropped after the first matmul, until one more reads them."""
    seen = count_casts(monkeypatch)
    w, x = parameters(device=device)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for step in range(2):
        for _ in range(4):
            tigon.fp8_linear(x, w).sum().backward()
        assert seen.count(w.shape) == step + 2
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        w.mul_(2)
    tigon.fp8_linear(x, w)
    assert seen.count(w.shape) == 4


def test_one_forward_keeps_no_weight(device):
    """The backward makes its bytes of the weight, transposed, with the bits of those that are kept."""
    w, x = parameters(device=device)
    results = []
    for kept in (False, True):
        results.append(tigon.fp8_linear(x, w))
        assert (module._kept[id(w)].quantized.bytes is not None) == kept
    gradients = [torch.autograd.grad(y.square().sum(), (x, w)) for y in results]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    module.forget_weights([w])
    y = tigon.fp8_linear(x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 16), (130, 48), (33, 17), (128, 272)])
def test_quantised_and_transposed(shape, dtype, device):
    """In one pass, of rows whose scales are known."""
    x = hard(*shape, dtype, device)
    q, scales = quantize_rows(x)
    got = torch.ops.tigon.fp8_quantize_transposed(x, scales)
    assert torch.equal(bits(got), bits(transpose(q, None, None, None)[0]))


class _Unseen(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(p.data - group["lr"] * p.grad.data)


CHANGES = {
    "in place": lambda w: w.detach().mul_(3),
    "another memory": lambda w: setattr(w, "data", w.data * 3),
    "optimizer that writes to data": lambda w: _Unseen([w], lr=0.5).step(),
    "data by hand, gradient zeroed": lambda w: (w.data.mul_(3), w.grad.zero_()),
    "data by hand, gradient scaled": lambda w: (w.grad.mul_(0.5), w.data.mul_(3)),
    "data by hand, gradient taken away": lambda w: (w.data.mul_(3), setattr(w, "grad", None)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backwards", [1, 2, 3])
def test_a_changed_weight_is_quantised_anew(change, backwards, device):
    w, x = parameters(device=device)
    for _ in range(backwards):
        tigon.fp8_linear(x, w).sum().backward()
    CHANGES[change](w)
    with torch.no_grad():
        expected = tigon.fp8_linear(x, w.clone())
    assert torch.equal(tigon.fp8_linear(x, w), expected)


@pytest.mark.filterwarnings("error")
def test_frozen_and_computed_weights(device):
    """Nothing tells of a merge into the data of a frozen one; a computed one is another every time."""
    w, x = parameters(device=device)
    frozen = w.detach().clone()
    y = tigon.fp8_linear(x, frozen)
    frozen.data.mul_(2)
    assert torch.equal(tigon.fp8_linear(x, frozen), 2 * y)
    assert torch.equal(tigon.fp8_linear(x, 2 * w), 2 * y)
    torch.autograd.grad(tigon.fp8_linear(x, 2 * w).sum(), w)


def test_bytes_die_with_their_weight(device):
    w, x = parameters(device=device)
    for _ in range(2):
        tigon.fp8_linear(x, w).sum().backward()
    key, kept = id(w), weakref.ref(module._kept[id(w)].quantized.bytes)
    del w
    gc.collect()
    assert key not in module._kept and kept() is None


def test_one_x_is_quantised_once(monkeypatch, device):
    """Where it is an intermediate result: a leaf may be filled anew."""
    seen = count_casts(monkeypatch)
    (w, leaf), (v, _) = parameters(device=device), parameters(80, device=device)
    x = 2 * leaf
    a, b = tigon.fp8_linear(x, w), tigon.fp8_linear(x, v)
    assert seen.count(x.shape) == 1
    with torch.no_grad():
        x.mul_(2)
    assert not torch.equal(tigon.fp8_linear(x, w), a)
    assert seen.count(x.shape) == 2
    del x, a, b
    gc.collect()
    assert not _fp8_bytes._with
    before = tigon.fp8_linear(leaf, w)
    leaf.data.mul_(2)
    assert torch.equal(tigon.fp8_linear(leaf, w), 2 * before)


@pytest.mark.parametrize("dw", ["fp8", "bf16"])
def test_what_is_kept(dw, device):
    """x in a byte an element; or x itself, where its matmul is not of bytes."""
    w, x = parameters(device=device)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        tigon.fp8_linear(x, w, dw=dw)
    kinds = {t.dtype for t in packed}
    assert kinds == ({torch.float8_e4m3fn, torch.float32} if dw == "fp8" else {torch.bfloat16})
    assert sum(t.nbytes for t in packed) == (x.numel() + 4 * len(x) if dw == "fp8" else x.nbytes)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dw", ["fp8", "bf16"])
def test_compiled(dw, bias, device):
    """One graph, with the bits of eager calls."""
    w, x = parameters(device=device)
    b = torch.randn(48).to(x).requires_grad_() if bias else None
    leaves = [t for t in (x, w, b) if t is not None]
    compiled = torch.compile(tigon.fp8_linear, backend="aot_eager", fullgraph=True)
    y, z = tigon.fp8_linear(x, w, b, dw=dw), compiled(x, w, b, dw=dw)
    assert torch.equal(y, z)
    dy = torch.randn_like(y)
    for g, h in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(z, leaves, dy), strict=True):
        assert torch.equal(g, h)


def test_transforms(device):
    w, x = parameters(dtype=torch.float32, device=device)
    loss = lambda x, w: tigon.fp8_linear(x, w).square().sum()  # noqa: E731
    expected = torch.autograd.grad(loss(x, w), (x, w))
    for g, e in zip(torch.func.grad(loss, (0, 1))(x.detach(), w.detach()), expected, strict=True):
        assert torch.equal(g, e)
    with pytest.raises(tigon.Error, match="second derivatives"):
        torch.autograd.grad(loss(x, w), x, create_graph=True)


def test_kept_bytes_are_not_copied(device):
    """A copied weight has bytes of its own."""
    w, x = parameters(device=device)
    y = tigon.fp8_linear(x, w)
    v = copy.deepcopy(w)
    with torch.no_grad():
        v.mul_(2)
    assert torch.equal(tigon.fp8_linear(x, v), 2 * y) and torch.equal(tigon.fp8_linear(x, w), y)


REFUSED = {
    "weight must have columns by the multiple of 16, got 24": lambda x, w: (x[:, :24], w[:, :24]),
    "weight must have rows by the multiple of 16, got 40": lambda x, w: (x, w[:40]),
    "weight must be torch.bfloat16 or float32, got torch.float16": lambda x, w: (x, w.half()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message, device):
    w, x = parameters(device=device)
    with pytest.raises(tigon.Error, match=r"^\[fp8_linear\] " + message):
        tigon.fp8_linear(*REFUSED[message](x.detach(), w.detach()))


def test_unknown_dw(device):
    w, x = parameters(device=device)
    with pytest.raises(tigon.Error, match=r"^\[fp8_linear\] dw must be one of \['fp8', 'bf16'\], got 'fp32'"):
        tigon.fp8_linear(x, w, dw="fp32")
