"""Modulated RMSNorm, attention residuals, sparsemax and PolyNorm of the liger_kernel interface."""

import pytest
import torch
from test_compat_liger_ops import assert_same, drawn, get, with_gradients
from tiny import close


@pytest.mark.parametrize("mode, offset", [("llama", 0.0), ("gemma", 1.0), ("none", 0.0)])
@pytest.mark.parametrize("affine", [True, False])
def test_modulated_rms_norm(mode, offset, affine):
    """One row of scale and shift for each sample."""
    x, w, scale, shift = drawn(2, 3, 8), drawn(8, seed=1), drawn(2, 8, seed=2), drawn(2, 8, seed=3)
    weight = (w,) if affine else ()

    def formula(x, s, b, *w):
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        h = h * (w[0] + offset) if w else h
        return h * (1 + s[:, None]) + b[:, None]

    wanted = with_gradients(formula, x, scale, shift, *weight)
    function, options = get("liger_modulated_rms_norm"), (1e-6, offset, mode)

    def run(x, s, b, w=None):
        return function(x, w, s, b, *options)

    assert_same(with_gradients(run, x, scale, shift, *weight), wanted)
    module = get("LigerModulatedRMSNorm")(8, offset=offset, casting_mode=mode, elementwise_affine=affine)
    assert module.elementwise_affine is affine and (module.weight is not None) is affine
    if affine:
        with torch.no_grad():
            module.weight.copy_(w)
    close(module(x, scale, shift), wanted[0])
    close(module(x, scale), function(x, module.weight, scale, None, *options))


def test_attn_res():
    """More blocks than 32, as a tensor and as a list."""
    values, query, norm = drawn(40, 2, 3, 8), 0.3 * drawn(8, seed=1), drawn(8, seed=2)

    def formula(v, q, w):
        h = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * w
        return torch.einsum("nbt,nbtd->btd", (h @ q).softmax(0), v)

    wanted = with_gradients(formula, values, query, norm)
    function = get("liger_attn_res")
    assert_same(with_gradients(function, values, query, norm), wanted, 256.0)
    close(function(list(values), query, norm), wanted[0])


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_sparsemax(dim):
    """Over any dimension, by the function and the class."""
    from tigon.ops.sparsemax import reference

    x, grad = drawn(4, 7, 5), drawn(4, 7, 5, seed=1)
    wanted = with_gradients(lambda x: grad * reference(x.movedim(dim, -1)).movedim(-1, dim), x)
    for call in (lambda x: get("liger_sparsemax")(x, dim=dim), get("LigerSparsemax")(dim)):
        assert_same(with_gradients(lambda x, call=call: grad * call(x), x), wanted)
    assert "dim=0" in repr(get("LigerSparsemax")(0))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_poly_norm(shape):
    """A bias of no dimension, as the class has it, or of one; nothing is written in place."""
    from tigon.ops.poly_norm import reference

    x, weight, bias = drawn(4, 7, 16), drawn(3, seed=1), drawn(1, seed=2).reshape(shape)
    wanted = with_gradients(lambda x, w, b: reference(x, w, b.reshape(1), 1e-5), x, weight, bias)
    for in_place in (False, True):
        got = with_gradients(
            lambda *args, i=in_place: get("liger_poly_norm")(*args, 1e-5, i), x, weight, bias
        )
        assert_same(got, wanted)
    module = get("LigerPolyNorm")(eps=1e-5)
    assert module.bias.shape == () and "eps=1e-05" in repr(module)
    close(module(x), reference(x, torch.full((3,), 1 / 3), torch.ones(1), 1e-5))
