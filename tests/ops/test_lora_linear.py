"""tigon.lora_linear beyond the cases: zeros, masks, frozen parts, bad calls, the module."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.ops.lora_linear import Adapter, Base, adapted, dora_factors, dropout_factors, scale_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(device, dtype=torch.float32, m=13, k=32, n=24, r=4):
    return {
        "x": torch.randn(m, k, device=device, dtype=dtype).requires_grad_(),
        "weight": torch.randn(n, k, device=device, dtype=dtype),
        "a": torch.randn(r, k, device=device).requires_grad_(),
        "b": torch.randn(n, r, device=device).requires_grad_(),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_give_the_bits_of_the_base(dtype, device):
    given = operands(device, dtype)
    given["b"] = torch.zeros_like(given["b"])
    bias, dy = torch.randn(24, device=device, dtype=dtype), torch.randn(13, 24, device=device, dtype=dtype)
    for of in (None, bias):
        y = tigon.lora_linear(**given, scale=3.0, bias=of)
        (base,) = adapted(given["x"], [Base(given["weight"], of)], [])
        assert torch.equal(y, base)
        got, wanted = (torch.autograd.grad(z, given["x"], dy)[0] for z in (y, base))
        assert torch.equal(got, wanted)
        if device == "cpu" or dtype != torch.float32:  # there PyTorch takes another matmul than cuBLASLt's
            # The CPU's matmul is rounded before a bias is added.
            assert of is not None or torch.equal(y, F.linear(given["x"], given["weight"]))
            assert torch.equal(got, dy @ given["weight"])


def test_rows_that_overlap(device):
    """An x and an upstream gradient that were expanded."""
    given = operands(device)
    row = torch.randn(1, 32, device=device, requires_grad=True)
    y = tigon.lora_linear(row.expand(13, -1), *list(given.values())[1:])
    y.sum().backward()
    wanted = tigon.lora_linear(row.detach().expand(13, -1).clone(), *list(given.values())[1:])
    torch.testing.assert_close(y, wanted)


def test_the_mask_follows_from_seed_row_and_column(device):
    eye, zero = torch.eye(50, device=device), torch.zeros(50, 50, device=device)
    x = torch.ones(37, 50, device=device)
    masks = [tigon.lora_linear(x, zero, eye, eye, dropout=0.3, seed=s) for s in (7, 7, 8)]
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
    wanted = dropout_factors((37, 50), 0.3, torch.tensor(7, device=device), 0)
    torch.testing.assert_close(masks[0].double(), wanted, rtol=1e-6, atol=0)
    many = dropout_factors((1000, 1000), 0.3, torch.tensor(1), 0)
    assert abs((many == 0).double().mean() - 0.3) < 3e-3
    assert abs((many[:, 0] == 0).double().mean() - 0.3) < 0.06
    # As large as it may be, and negative
    for seed in (2**63 - 1, -(2**63)):
        tigon.lora_linear(x, zero, eye, eye, dropout=0.3, seed=seed)


def test_checkpointed_dropout(device):
    given = operands(device)

    def gradients(run):
        torch.manual_seed(3)
        y = run(lambda *args: tigon.lora_linear(*args, dropout=0.5), *given.values())
        return torch.autograd.grad(y.square().sum(), [given[n] for n in ("x", "a", "b")])

    wanted = gradients(lambda f, *args: f(*args))
    got = gradients(lambda f, *args: checkpoint(f, *args, use_reentrant=False))
    assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


def test_a_checkpoint_spares_the_last_matmuls(device, monkeypatch):
    """Run again, the forward ends when x and t are there."""
    from tigon.ops import lora_linear as op

    given, ran = operands(device), []
    matmuls = op._matmuls

    def counting(*args, only_t=False, **options):
        ran.append(only_t)
        return matmuls(*args, only_t=only_t, **options)

    monkeypatch.setattr(op, "_matmuls", counting)
    y = checkpoint(lambda *args: tigon.lora_linear(*args), *given.values(), use_reentrant=False)
    y.sum().backward()
    assert ran == [True, False, True]
    wanted = {n: given[n].grad for n in ("x", "a", "b")}
    given = {n: t.detach().requires_grad_(n != "weight") for n, t in given.items()}
    tigon.lora_linear(**given).sum().backward()
    assert all(torch.equal(given[n].grad, g) for n, g in wanted.items())


def test_a_result_without_a_gradient(device):
    given = operands(device)
    other = operands(device)
    maps = [(given["weight"], given["a"], given["b"]), (other["weight"], other["a"], other["b"])]
    first, _ = tigon.lora_linears(given["x"], maps)
    first.sum().backward()
    assert other["a"].grad is None and other["b"].grad is None
    wanted = given["x"].grad
    given["x"].grad = None
    tigon.lora_linear(**given).sum().backward()
    torch.testing.assert_close(given["x"].grad, wanted)


def test_several_adapters_of_a_map_and_one_without(device):
    """Two of different ranks and dropouts on one map, none on another, a weight made for each direction."""
    given, more = operands(device), operands(device, r=11)
    made = []

    def weight():
        made.append(1)
        return given["weight"]

    seed = torch.tensor([3], device=device)
    adapters = [Adapter(0, given["a"], given["b"], 2.0), Adapter(0, more["a"], more["b"], 0.5, 0.3)]
    y, z = adapted(given["x"], [Base(weight), Base(more["weight"])], adapters, seed)
    (y.square().sum() + z.square().sum()).backward()
    assert len(made) == 2
    x = given["x"].detach().double().requires_grad_()
    factors = dropout_factors((13, 32), 0.3, seed, 1)
    leaves = (given["a"], given["b"], more["a"], more["b"])
    a, b, c, d = (t.detach().double().requires_grad_() for t in leaves)
    wanted = x @ given["weight"].double().t() + 2 * x @ a.t() @ b.t() + 0.5 * (x * factors) @ c.t() @ d.t()
    (wanted.square().sum() + (x @ more["weight"].double().t()).square().sum()).backward()
    pairs = (
        (y, wanted),
        (given["x"].grad, x.grad),
        (given["a"].grad, a.grad),
        (given["b"].grad, b.grad),
        (more["a"].grad, c.grad),
        (more["b"].grad, d.grad),
    )
    for got, exact in pairs:
        # Small elements are differences of large sums: rounding is of the largest.
        atol = 1e-6 * exact.abs().max().item()
        torch.testing.assert_close(got.double(), exact.detach(), rtol=1e-6, atol=atol)


def test_no_adapters(device):
    given = operands(device)
    (y,) = adapted(given["x"], [Base(given["weight"])], [])
    y.sum().backward()
    torch.testing.assert_close(y, F.linear(given["x"], given["weight"]))
    torch.testing.assert_close(given["x"].grad, given["weight"].sum(0).expand(13, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adapters", DTYPES)
@pytest.mark.parametrize(("n", "k", "r"), [(24, 64, 4), (7, 37, 11), (3, 700, 64), (1, 1, 1)])
def test_factors_of_dora(n, k, r, adapters, dtype, device):
    """Squares of lengths are float64's but for roundings of their terms: on the CPU bfloat16 rounds W A^T."""
    weight = torch.randn(n, k, device=device).to(dtype)
    a, b = torch.randn(r, k, device=device).to(adapters), torch.randn(n, r, device=device).to(adapters)
    magnitude = torch.rand(n, device=device) + 0.5
    scaled = torch.empty_like(weight)
    factors, inverses = dora_factors(weight, a, b, magnitude, 0.3, scaled)
    added = 0.3 * b.double() @ a.to(dtype).double()
    wanted, terms = (weight.double() + added).norm(dim=1), weight.double().norm(dim=1) + added.norm(dim=1)
    rounding = 2.0**-9 if device == "cpu" and dtype == torch.bfloat16 else 2e-6
    error = (magnitude / factors.double()).square() - wanted.square()
    assert (error.abs() <= rounding * terms.square()).all()
    magnitude[0] = 0
    factors, inverses = dora_factors(weight, a, b, magnitude, 0.3, scaled)
    assert factors[0] > 0
    torch.testing.assert_close(inverses, 1 / magnitude.clamp(min=2.0**-60))
    assert torch.equal(scaled, (factors[:, None] * weight.float()).to(dtype))
    again = weight.clone()
    assert scale_rows(again, factors, again) is again
    assert torch.equal(again, scaled) and torch.equal(
        scale_rows(weight.t(), scaled.new_ones(k).float()), weight.t()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(4, 31)}, r"a must be \[4, 32\], got \[4, 31\]"),
        ({"b": torch.zeros(24, 5)}, r"b must be \[24, 4\], got \[24, 5\]"),
        ({"b": torch.zeros(24, 4, dtype=torch.bfloat16)}, "b must be float32, got bfloat16"),
        ({"magnitude": torch.zeros(23)}, r"magnitude must be \[24\], got \[23\]"),
        ({"scaled": torch.zeros(24, 33)}, r"y must be \[24, 32\], got \[24, 33\]"),
        ({"scaled": torch.zeros(32, 24).t()}, "y must have dense rows"),
    ],
)
def test_bad_calls_of_dora(change, message, device):
    given = {
        "weight": torch.zeros(24, 32),
        "a": torch.zeros(4, 32),
        "b": torch.zeros(24, 4),
        "magnitude": torch.zeros(24),
        "scale": 1.0,
        "scaled": None,
    } | change
    given = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    with pytest.raises(tigon.Error, match=message):
        dora_factors(**given)


BAD = {
    "dropout": ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    "rank 0": ({"a": torch.zeros(0, 32), "b": torch.zeros(24, 0)}, "a must have at least one row"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_calls(what, device):
    change, message = BAD[what]
    given = operands(device) | change
    given = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    with pytest.raises(tigon.Error, match=message):
        tigon.lora_linear(**given)


def test_no_maps(device):
    with pytest.raises(tigon.Error, match="at least one"):
        tigon.lora_linears(torch.zeros(3, 4, device=device), [])
    with pytest.raises(tigon.Error, match="must be tuples"):
        tigon.lora_linears(torch.zeros(3, 4, device=device), [torch.zeros(3, 4)])


def test_module(device):
    linear = torch.nn.Linear(32, 24, device=device, dtype=torch.bfloat16)
    layer = tigon.nn.LoRALinear.from_linear(linear, 4, alpha=8, dropout=0.2)
    assert layer.weight is linear.weight and layer.bias is linear.bias
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == ["lora_a", "lora_b"]
    x = torch.randn(3, 32, device=device, dtype=torch.bfloat16)
    wanted = tigon.lora_linear(x, layer.weight, layer.lora_a, layer.lora_b, 2.0, layer.bias)
    assert torch.equal(layer(x), wanted)
    torch.nn.init.normal_(layer.lora_b)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    merged = layer.merged()
    assert merged.shape == (24, 32) and not torch.equal(merged, layer.weight)
    fresh = tigon.nn.LoRALinear(32, 24, 4, device=device)
    fresh(x.float()).sum().backward()
    assert fresh.lora_a.grad is not None and fresh.weight.grad is None


# --- a vector, autocast, frozen maps -----------------------------------------------------------


def _drawn(n=5, k=8, rank=2, dtype=torch.float32):
    return [torch.randn(*size).to(dtype).requires_grad_() for size in ((n, k), (rank, k), (n, rank), (n,))]


@pytest.mark.parametrize("compiled", [False, True])
def test_of_a_vector(compiled):
    """``x [K]``, with all gradients: those of one row."""
    weight, a, b, bias = _drawn()
    function = torch.compile(tigon.lora_linear, backend="aot_eager") if compiled else tigon.lora_linear
    found = []
    for x in (torch.arange(8.0), torch.arange(8.0)[None]):
        y = function(x.requires_grad_(), weight, a, b, 0.5, bias)
        found.append([y.flatten(), *torch.autograd.grad(y.sum(), (x, weight, a, b, bias))])
    assert all(torch.equal(one.flatten(), row.flatten()) for one, row in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype, of):
    """As ``F.linear``: in autocast's dtype, whatever the operands', with gradients in theirs."""
    x, (weight, _, _, bias) = torch.randn(3, 8, requires_grad=True), _drawn(dtype=of)
    _, a, b, _ = _drawn()
    with torch.autocast("cpu", dtype):
        y = tigon.lora_linear(x, weight, a, b, 0.5, bias)
        plain = torch.nn.functional.linear(x, weight, bias)
    want = tigon.lora_linear(*(t.to(dtype) for t in (x, weight)), a, b, 0.5, bias.to(dtype))
    assert y.dtype == plain.dtype == dtype and torch.equal(y, want)
    leaves = (x, weight, a, b, bias)
    for leaf, one, other in zip(
        leaves, *(torch.autograd.grad(z.sum(), leaves) for z in (y, want)), strict=True
    ):
        assert one.dtype == leaf.dtype and torch.equal(one, other)
    module = tigon.nn.LoRALinear(8, 5, 2)
    with torch.autocast("cpu", dtype):
        assert module(x).dtype == dtype
    wide = [t.detach().double() for t in (x, weight, a, b)]
    with torch.autocast("cpu", dtype):
        assert tigon.lora_linear(*wide).dtype == torch.float64


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frozen_results(compiled, dtype):
    """A map with nothing to train has a result that requires no gradient."""
    frozen = [t.detach().to(dtype) for t in _drawn()]
    for trained in range(4):
        other = [t.detach().to(dtype) for t in _drawn()]
        other[trained].requires_grad_()
        linears = [(weight, a, b, 1.0, bias) for weight, a, b, bias in (frozen, other, frozen)]

        def call(x, linears=linears):
            return tigon.lora_linears(x, linears)

        run = torch.compile(call, backend="aot_eager") if compiled else call
        results = run(torch.ones(3, 8, dtype=dtype))
        assert [y.requires_grad for y in results] == [False, True, False], trained
        results[1].sum().backward()
        assert other[trained].grad.isfinite().all()
        assert all(y.requires_grad for y in run(torch.ones(3, 8, dtype=dtype, requires_grad=True)))
