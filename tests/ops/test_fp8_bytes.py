"""Bytes of float8 that an op writes with its result: those of the cast, found as long as they are right."""

import pytest
import torch
from test_fp8_linear import bits, count_casts, hard
from torch.utils.checkpoint import checkpoint

import tigon
from tigon import _fp8_bytes

ops, quantize = torch.ops.tigon, torch.ops.tigon.fp8_quantize
SHAPES = [(5, 16), (6, 40), (7, 1040), (5, 4096), (9, 8200), (5, 14336), (5, 17)]
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
OPTIONS = (1.0, 1.0, 1.702, 7.0)  # of gated units


def same(got, x, factors=None):
    """These bytes and scales are those of x."""
    q, scales = quantize(x, factors)
    assert torch.equal(bits(got[0]), bits(q)) and torch.equal(got[1], scales)


def identical(one, other):
    """Bit for bit; NaN may have any."""
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rounding", [0, 1])
def test_norms(shape, dtype, rounding, device):
    x, residual = (hard(*shape, dtype, device) for _ in range(2))
    for weight in (None, torch.randn(shape[1]).to(x)):
        y, rstd, *made = ops.rms_norm_fp8(x, weight, 1e-6, 0.0, rounding)
        assert identical((y, rstd), ops.rms_norm_fwd(x, weight, 1e-6, 0.0, rounding))
        same(made, y)
        *results, q, scales = ops.add_rms_norm_fp8(x, residual, weight, 1e-6, 0.0, rounding)
        assert identical(results, ops.add_rms_norm_fwd(x, residual, weight, 1e-6, 0.0, rounding))
        same((q, scales), results[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [0, 2, 3])
def test_gated_units(shape, dtype, kind, device):
    gate, up, dy = (hard(*shape, dtype, device) for _ in range(3))
    y, *made = ops.glu_fp8(gate, up, kind, *OPTIONS)
    assert identical([y], [ops.glu_fwd(gate, up, kind, *OPTIONS)])
    same(made, y)
    if shape[1] % 2 == 0:
        y, *made = ops.glu_fp8(gate, None, kind, *OPTIONS)
        same(made, y)
    factors = [torch.exp2(torch.randint(-9, 9, shape[1:]).float()).to(device) for _ in range(2)]
    expected = ops.glu_bwd(dy, gate, up, kind, *OPTIONS, True, True)
    dgate, dup, *made = ops.glu_bwd_fp8(dy, gate, up, kind, *OPTIONS, True, True, *factors)
    assert identical((dgate, dup), expected)
    same(made[:2], dgate, factors[0])
    same(made[2:], dup, factors[1])
    again = ops.glu_bwd_fp8_in_place(dy, gate, up, kind, *OPTIONS, *factors)
    assert identical((gate, up), expected)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(again, made, strict=True))


class Block:
    """A norm, a gated unit and their linears."""

    def __init__(self, device, residual=False):
        x, self.residual = torch.randn(2, 2, 10, 64).to(device, torch.bfloat16)
        self.x = x.clone().requires_grad_()
        sizes = {"norm": (64,), "gate": (96, 64), "up": (96, 64), "down": (64, 96)}
        for name, size in sizes.items():
            p = torch.randn(size) / 8 if len(size) == 2 else torch.ones(size)
            setattr(self, name, torch.nn.Parameter(p.to(device, torch.bfloat16)))
        self.adds = residual
        self.between = lambda y: y  # of the norm and its linears
        self.hook = None  # of the gradient of gate

    def forward(self, x, residual):
        y = tigon.add_rms_norm(x, residual, self.norm)[0] if self.adds else tigon.rms_norm(x, self.norm)
        y = self.between(y)
        gate, up = tigon.fp8_linear(y, self.gate), tigon.fp8_linear(y, self.up)
        if self.hook is not None:
            gate.register_hook(self.hook)
        return tigon.fp8_linear(tigon.swiglu(gate, up), self.down)

    def step(self, run=lambda f, *x: f(*x)):
        leaves = self.x, self.norm, self.gate, self.up, self.down
        y = run(self.forward, self.x, self.residual)
        return y, *torch.autograd.grad(y.float().square().sum(), leaves)


def apart(monkeypatch, block, *run):
    """The step with casts of their own."""
    with monkeypatch.context() as patched:
        patched.setattr(_fp8_bytes, "wanted", lambda parameter: False)
        patched.setattr(_fp8_bytes, "take", lambda x, factors: (None, None))
        return block.step(*run)


@pytest.fixture(params=[False, True], ids=["norm", "add_norm"])
def block(request, device):
    """One that knows after two steps what is wanted."""
    made = Block(device, request.param)
    made.step(), made.step()
    return made


def test_producers_write_what_linears_read(block, monkeypatch):
    """No cast is left but those of what comes from elsewhere, and no bit changes."""
    expected = apart(monkeypatch, block)
    seen, taken, take = count_casts(monkeypatch), [], _fp8_bytes.take
    monkeypatch.setattr(_fp8_bytes, "take", lambda *a: (taken.append(take(*a)), taken[-1])[1])
    assert identical(block.step(), expected)
    assert all(len(shape) == 2 for shape in seen)  # weights
    assert sum(q is not None for q, _ in taken) == 2 and len(taken) == 3
    assert not _fp8_bytes._with


CHANGES = {
    "in place": lambda y: y.mul_(2),
    "in place, by a view": lambda y: (y[0].mul_(2), y)[1],
    "another": lambda y: y * 2,
    "a view": lambda y: y.view(20, 64),
    "a part": lambda y: y[:, 2:],
    "transposed": lambda y: y.transpose(0, 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between(change, block, monkeypatch):
    block.between = CHANGES[change]
    assert identical(block.step(), apart(monkeypatch, block))


@pytest.mark.parametrize("hook", [lambda g: g * 2, lambda g: g.mul_(2), lambda g: None], ids="abc")
def test_what_changes_in_the_backward(hook, block, monkeypatch):
    block.hook = hook
    assert identical(block.step(), apart(monkeypatch, block))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant, block, monkeypatch):
    """What is computed again has the same bytes."""
    expected = apart(monkeypatch, block)

    def run(f, *x):
        return checkpoint(f, *x, use_reentrant=reentrant)

    leaves = block.x, block.norm, block.gate, block.up, block.down
    y = run(block.forward, block.x, block.residual)
    for p in leaves:
        p.grad = None
    y.float().square().sum().backward()
    assert identical((y, *(p.grad for p in leaves)), expected)


def test_kept_graph(block, monkeypatch):
    """A second backward of one graph finds what belongs to it."""
    y = block.forward(block.x, block.residual)
    loss, leaves = y.float().square().sum(), (block.x, block.gate, block.up)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert identical(first, torch.autograd.grad(loss, leaves))
    del y, loss
    assert not _fp8_bytes._with


def test_few_are_kept(device):
    """Bytes of what no linear reads do not pile up."""
    held = [torch.randn(4, 16, device=device) for _ in range(9)]
    for x in held:
        _fp8_bytes.put(x, *quantize(x, None))
    assert len(_fp8_bytes._with) <= 4 and _fp8_bytes.get(held[0]) is None
    same(_fp8_bytes.get(held[-1].view(2, 2, 16)), held[-1])
    assert _fp8_bytes.get(held[-1].view(8, 8)) is None
    held.clear(), locals().pop("x", None)
