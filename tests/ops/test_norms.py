"""The norms, softmax and dyt beyond the cases: refusals, dtypes, in place, modules."""

import importlib
import itertools

import pytest
import torch
from checks import outputs_of, refusals, refused, same_bits

import tigon

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# op: its arguments, float tensors all
ARGUMENTS = {
    "rms_norm": ("x", "weight"),
    "layer_norm": ("x", "weight", "bias"),
    "add_rms_norm": ("x", "residual", "weight"),
    "gated_rms_norm": ("x", "gate", "weight"),
    "modulated_rms_norm": ("x", "weight", "scale", "shift"),
    "attention_residual": ("values", "query", "norm_weight"),
    "poly_norm": ("x", "weight", "bias"),
    "dyt": ("x", "alpha", "weight", "bias"),
}
ROWS = ("x", "residual", "gate", "values")
SIZES = {"dyt": {"alpha": 1}, "poly_norm": {"weight": 3, "bias": 1}}  # where it is not one number a column


def _draw(op, device, dtype=torch.float32, rows=6, columns=40):
    def one(name):
        shape = (rows, columns) if name in ROWS else (SIZES.get(op, {}).get(name, columns),)
        return torch.randn(shape).to(device, dtype)

    return [one(name) for name in ARGUMENTS[op]]


BAD = """
rms_norm(x[0, 0], w) -> x must have at least one dimension, got 0
rms_norm(x[:, :0], w[:0]) -> x must have at least one column, got 0
layer_norm(x[:, :0]) -> x must have at least one column, got 0
add_rms_norm(x, x.t().contiguous().t(), w, inplace=True)
    -> residual must have dense rows to be written in place
add_rms_norm(x, w.expand(4, 8), inplace=True)
    -> residual must hold every element once to be written in place, got strides [0, 1]
add_rms_norm(x.double(), w.double().expand(4, 8), inplace=True)
    -> residual must hold every element once to be written in place
add_rms_norm(x[:3], x[1:], w, inplace=True) -> residual must share no memory with x to be written in place
gated_rms_norm(x, x, w, group_size=3) -> group_size must divide 8, got 3
gated_rms_norm(x, x, w, rounding='none') -> rounding must be 'llama'
group_norm(x, 3, w) -> groups must divide 8, got 3
group_norm(w, 4) -> x must have at least two dimensions, got 1
poly_norm(x[:, :0], w[:3], w[:1]) -> x must have at least one column, got 0
dyt(x[:, :0], w[:1]) -> x must have at least one column, got 0
dyt(x, w) -> alpha must have one element, got 8
"""


@pytest.mark.parametrize("call, message", refusals(BAD))
def test_refusals(call, message, device):
    x, w = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    refused(call, message, x=x, w=w)


@pytest.mark.parametrize("parameters", list(itertools.product(FLOATS, repeat=2)), ids=str)
@pytest.mark.parametrize("op", ARGUMENTS)
def test_dtypes_of_parameters(op, parameters, device):
    """Results and gradients in the dtypes of the reference and of their arguments, whatever the mixture."""
    fn, kinds = getattr(tigon, op), itertools.cycle(parameters)
    given = dict(zip(ARGUMENTS[op], _draw(op, device), strict=True))
    given = {name: v.to(torch.bfloat16 if name in ROWS else next(kinds)) for name, v in given.items()}
    leaves = [v.requires_grad_() for v in given.values()]
    (y, *_) = outputs_of(fn(*leaves))
    reference = importlib.import_module(f"tigon.ops.{op}").reference
    assert y.dtype == outputs_of(reference(*leaves))[0].dtype
    assert y.dtype == outputs_of(fn(*(leaf.to("meta") for leaf in leaves)))[0].dtype
    for leaf, grad in zip(leaves, torch.autograd.grad(y, leaves, torch.ones_like(y)), strict=True):
        assert grad.dtype == leaf.dtype and grad.shape == leaf.shape
    if op in ("modulated_rms_norm", "attention_residual"):  # which widen parameters
        wide = [v.detach() if name in ROWS else v.detach().float() for name, v in given.items()]
        assert same_bits(y.detach(), fn(*wide))


def test_bias_and_weight_of_two_dtypes(device):
    x = torch.randn(3, 8, device=device).bfloat16()
    weight, bias = torch.randn(8, device=device), torch.randn(8, device=device).bfloat16()
    assert same_bits(tigon.layer_norm(x, weight, bias), tigon.layer_norm(x, weight, bias.float()))


def test_add_in_place(device):
    """The sum takes the residual's place, with the same results and gradients."""
    x, residual, weight = _draw("add_rms_norm", device, torch.bfloat16)
    dy, dh = torch.randn(2, 6, 40, device=device).bfloat16()
    apart = [v.clone().requires_grad_() for v in (x, residual, weight)]
    y, h = tigon.add_rms_norm(*apart)
    want = torch.autograd.grad((y, h), apart, (dy, dh))
    leaves = [v.clone().requires_grad_() for v in (x, residual, weight)]
    stream = leaves[1] * 1
    y_in, h_in = tigon.add_rms_norm(leaves[0], stream, leaves[2], inplace=True)
    assert h_in.data_ptr() == stream.data_ptr()
    assert same_bits(y_in.detach(), y.detach()) and same_bits(h_in.detach(), h.detach())
    assert all(map(same_bits, torch.autograd.grad((y_in, h_in), leaves, (dy, dh)), want))
    kept = residual.clone()
    with torch.no_grad():
        assert tigon.add_rms_norm(x, kept, weight, inplace=True)[1] is kept
    assert same_bits(kept, h.detach())


@pytest.mark.parametrize(
    "shape, x, residual, apart",
    [
        ((5, 8), "[:4]", "[1:]", False),
        ((4, 16), "[:, :8]", "[:, 8:]", True),
        ((4, 16), "[:, :8]", "[:, 7:15]", False),
        ((4, 16), "[::2, :8]", "[1::2, 3:11]", True),
        ((4, 16), "[:2, :8]", "[1:3, 8:]", True),
        ((4, 16), "[:3, 4:12]", "[1:, 2:10]", False),
        ((6, 8), "[::2]", "[1::2]", True),
        ((6, 8), "[::2]", "[:3]", False),
        ((2, 3, 16), "[..., :8]", "[..., 8:]", True),
        ((1, 16), "[:, :8]", "[:, 8:]", True),
        ((4, 8), "", "", True),
        ((4, 8), "[:1].expand(4, 8)", "", False),
    ],
)
def test_add_in_place_where_the_two_lie_in_one_tensor(shape, x, residual, apart, device):
    """Refused, or right; nothing is modified by a refusal."""
    memory = torch.randn(shape, device=device)
    kept = memory.clone()
    pair = [eval("memory" + view, {"memory": m}) for m in (memory, kept) for view in (x, residual)]
    want = pair[2] + pair[3]
    if not apart:
        with pytest.raises(tigon.Error, match="residual must share no memory with x"):
            tigon.add_rms_norm(*pair[:2], inplace=True)
        assert same_bits(memory, kept)
        return
    y, h = tigon.add_rms_norm(*pair[:2], inplace=True)
    assert same_bits(h, want)
    torch.testing.assert_close(y, tigon.rms_norm(want))  # on CUDA a row's bits depend on its alignment


def test_add_in_place_compiled(device):
    torch._dynamo.reset()
    x, residual, weight = _draw("add_rms_norm", device)
    want = tigon.add_rms_norm(x, residual, weight)
    compiled = torch.compile(tigon.add_rms_norm, fullgraph=True, backend="aot_eager")
    got = compiled(x, residual, weight, inplace=True)
    assert all(map(same_bits, got, want)) and same_bits(residual, want[1])


def test_add_is_the_norm_of_the_sum(device):
    x, residual, weight = _draw("add_rms_norm", device, torch.bfloat16)
    y, h = tigon.add_rms_norm(x, residual, weight)
    assert same_bits(h, x + residual) and same_bits(y, tigon.rms_norm(h, weight))


def test_modules(device):
    x, gate = torch.randn(2, 4, 24, device=device)
    weight, bias = torch.randn(2, 24, device=device)
    rms = tigon.nn.RMSNorm(24, 1e-5, offset=1.0, rounding="gemma", device=device)
    assert torch.count_nonzero(rms.weight) == 0 and "gemma" in repr(rms)
    assert same_bits(rms(x), tigon.rms_norm(x, rms.weight, 1e-5, offset=1.0, rounding="gemma"))
    assert tigon.nn.RMSNorm(24, elementwise_affine=False).weight is None
    norm = tigon.nn.LayerNorm(24, device=device)
    norm.load_state_dict({"weight": weight, "bias": bias})
    assert same_bits(norm(x), tigon.layer_norm(x, weight, bias)) and "24" in repr(norm)
    assert tigon.nn.LayerNorm(24, bias=False).bias is None
    add = tigon.nn.AddRMSNorm(24, 1e-5, device=device)
    assert same_bits(add(x, gate)[0], tigon.add_rms_norm(x, gate, add.weight, 1e-5)[0])
    gated = tigon.nn.GatedRMSNorm(24, norm_before_gate=False, group_size=8, device=device)
    want = tigon.gated_rms_norm(x, gate, gated.weight, norm_before_gate=False, group_size=8)
    assert same_bits(gated(x, gate), want) and "group_size=8" in repr(gated)
    group = tigon.nn.GroupNorm(6, 24, device=device)
    assert same_bits(group(x), tigon.group_norm(x, 6, group.weight, group.bias)) and "6, 24" in repr(group)
    dyt = tigon.nn.DyT(24, device=device)
    assert same_bits(dyt(x), tigon.dyt(x, dyt.alpha, dyt.weight, dyt.bias)) and "0.5" in repr(dyt)
    poly = tigon.nn.PolyNorm(1e-5, device=device)
    assert same_bits(poly(x), tigon.poly_norm(x, poly.weight, poly.bias, 1e-5)) and "1e-05" in repr(poly)
    assert poly.bias.tolist() == [1.0] and poly.weight.tolist() == torch.full((3,), 1 / 3).tolist()
    assert same_bits(tigon.nn.Sparsemax()(x), tigon.sparsemax(x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_sparsemax_is_a_distribution(dtype, device):
    """Entries of at least 0 that sum to 1, most of them exactly 0; one of float16 is never rounded away."""
    for scale in (1e-5, 1e-3, 1.0, 30.0):
        x = (scale * torch.randn(9, 5000)).to(device, dtype)
        y = tigon.sparsemax(x).double()
        exact = tigon.sparsemax(x.double())
        assert ((y > 0) == (exact > 0)).all(), scale
        total = y.sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=4 * torch.finfo(dtype).eps, atol=1e-3)
    assert (y > 0).sum(-1).max() < 10


def test_poly_norm_adds_many_rows(device):
    """More rows than partial sums are added at once."""
    rows = 2**16 + 1
    x, dy = torch.randn(2, rows, 3, device=device)
    leaves = [torch.full((n,), 0.5, device=device, requires_grad=True) for n in (3, 1)]
    tigon.poly_norm(x, *leaves).backward(dy)
    exact = [v.detach().double().requires_grad_() for v in leaves]
    tigon.poly_norm(x.double(), *exact).backward(dy.double())
    for got, want in zip(leaves, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_sum_of_constants_is_one(inplace):
    """Of a trained weight alone the sum requires no gradient, as ``x + residual`` does not."""
    x, weight = torch.randn(2, 3, 8), torch.ones(8, requires_grad=True)
    y, h = tigon.add_rms_norm(x[0].clone(), x[1].clone(), weight, inplace=inplace)
    assert y.requires_grad and not h.requires_grad
    y.sum().backward()
    assert weight.grad.isfinite().all()
