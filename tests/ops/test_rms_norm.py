"""RMSNorm beyond the cases: refusals, binding, determinism over threads and instruction sets."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import same_bits

import tigon
from tigon.ops.rms_norm import reference


def _gradients(x, w, dy=None, **options):
    y = tigon.rms_norm(x, w, **options)
    leaves = [t for t in (x, w) if t is not None and t.requires_grad]
    return y, torch.autograd.grad(y, leaves, torch.ones_like(y) if dy is None else dy)


BAD = {
    "weight size": (lambda x, w: tigon.rms_norm(x, w[:5]), r"\[rms_norm\] weight must be \[8\], got \[5\]"),
    "weight rank": (lambda x, w: tigon.rms_norm(x, w[None]), r"weight must have one dimension, got 2"),
    "weight dtype": (
        lambda x, w: tigon.rms_norm(x, w.long()),
        r"weight must be a float tensor, got torch",
    ),
    "x dtype": (lambda x, w: tigon.rms_norm(x.long(), w), r"x must be a float tensor, got torch.int64"),
    "x rank": (lambda x, w: tigon.rms_norm(x[0, 0], w), r"x must have at least one dimension, got 0"),
    "eps": (lambda x, w: tigon.rms_norm(x, w, -1e-6), r"eps must be >= 0, got -1e-06"),
    "rounding": (lambda x, w: tigon.rms_norm(x, w, rounding="b"), r"rounding must be one of .* got 'b'"),
    "columns": (lambda x, w: tigon.rms_norm(x[:, :0], w[:0]), r"x must have at least one column, got 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name, device):
    call, message = BAD[name]
    with pytest.raises(tigon.Error, match=message):
        call(torch.randn(4, 8, device=device), torch.randn(8, device=device))


@pytest.mark.gpu
def test_device_mix():
    with pytest.raises(tigon.Error, match=r"\[rms_norm\] weight must be on cuda:0, got cpu"):
        tigon.rms_norm(torch.randn(4, 8, device="cuda"), torch.randn(8))


def test_error_is_runtime_and_value_error():
    assert issubclass(tigon.Error, RuntimeError) and issubclass(tigon.Error, ValueError)


@pytest.mark.parametrize("need_x, need_w", list(itertools.product([False, True], repeat=2)))
def test_every_requires_grad_combination(need_x, need_w, device):
    x, w = torch.randn(6, 40, device=device), torch.randn(40, device=device)
    _, full = _gradients(x.clone().requires_grad_(), w.clone().requires_grad_())
    a, b = x.clone().requires_grad_(need_x), w.clone().requires_grad_(need_w)
    y = tigon.rms_norm(a, b)
    assert y.requires_grad == (need_x or need_w)
    if y.requires_grad:
        y.sum().backward()
    assert same_bits(a.grad, full[0] if need_x else None)
    assert same_bits(b.grad, full[1] if need_w else None)


def test_backward_twice_and_saved_tensors_untouched(device):
    x = torch.randn(6, 40, device=device, requires_grad=True)
    w = torch.randn(40, device=device, requires_grad=True)
    kept = x.detach().clone()
    y = tigon.rms_norm(x, w)
    first = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, w))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert same_bits(x.detach(), kept)


def test_modified_input_is_noticed(device):
    x = torch.randn(6, 40, device=device, requires_grad=True)
    z = x * 1
    y = tigon.rms_norm(z, None)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced"])
def test_odd_upstream_gradients(layout, device):
    x = torch.randn(6, 40, device=device, requires_grad=True)
    w = torch.randn(40, device=device, requires_grad=True)
    dy = {
        "expanded": torch.randn(1, 1, device=device).expand(6, 40),
        "transposed": torch.randn(40, 6, device=device).t(),
        "sliced": torch.randn(6, 80, device=device)[:, ::2],
    }[layout]
    got, want = _gradients(x, w, dy)[1], _gradients(x, w, dy.contiguous())[1]
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype, device):
    x = torch.randn(2, 3, 24, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(24, device=device, dtype=dtype, requires_grad=True)
    for sample in ((x, w, 1e-6, 0.0, 0), (x.transpose(0, 1), w, 1e-6, 1.0, 1), (x, None, 1e-6, 0.0, 2)):
        torch.library.opcheck(torch.ops.tigon.rms_norm.default, sample)
    rstd = torch.ones(6, device=device)
    y = torch.randn(2, 3, 24, device=device, dtype=dtype)
    for need_dx, need_dw in itertools.product([False, True], repeat=2):
        sample = (y, x.detach(), w.detach(), rstd, 0.0, 0, need_dx, need_dw)
        torch.library.opcheck(torch.ops.tigon.rms_norm_bwd.default, sample)


def test_compile_with_dynamic_shapes(device):
    torch._dynamo.reset()
    compiled = torch.compile(tigon.rms_norm, fullgraph=True, backend="aot_eager", dynamic=True)
    w = torch.randn(40, device=device, requires_grad=True)
    for rows in (3, 7, 12):
        x = torch.randn(rows, 40, device=device)
        assert same_bits(compiled(x, w), tigon.rms_norm(x, w))


def test_float64_runs_the_reference():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.equal(tigon.rms_norm(x, w), reference(x, w))
    assert torch.autograd.gradcheck(lambda a, b: tigon.rms_norm(a, b, offset=0.5), (x, w))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["llama", "gemma", "none"])
def test_mixed_dtypes_promote_as_pytorch_does(weight_dtype, rounding, device):
    x = torch.randn(5, 33, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(33, device=device, dtype=weight_dtype, requires_grad=True)
    y, (dx, dw) = _gradients(x, w, rounding=rounding)
    assert y.dtype == reference(x, w, rounding=rounding).dtype
    assert dx.dtype == x.dtype and dw.dtype == w.dtype


def test_module(device):
    norm = tigon.nn.RMSNorm(24, 1e-5, offset=1.0, rounding="gemma", device=device)
    assert torch.count_nonzero(norm.weight) == 0 and "gemma" in repr(norm)
    x = torch.randn(4, 24, device=device)
    assert same_bits(norm(x), tigon.rms_norm(x, norm.weight, 1e-5, offset=1.0, rounding="gemma"))
    assert tigon.nn.RMSNorm(24, elementwise_affine=False).weight is None
