"""Hyper-connections of transformers' models: recognised by their numbers, as exact as stock, restored."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny import assert_as_good
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.hy_v4 import modeling_hy_v4 as hunyuan

from tigon.integrations.transformers import apply, undo
from tigon.integrations.transformers.forward import bound

CLASSES = {
    "deepseek": deepseek.DeepseekV4HyperConnection,
    "deepseek head": deepseek.DeepseekV4HyperHead,
    "glm": glm.Glm5NextTextHyperConnection,
    "hunyuan": hunyuan.HYV4HyperConnection,
    "hunyuan head": hunyuan.HYV4HyperHead,
}


def make(name, streams=4, cls=None, dtype=torch.float32):
    """One module of a class with random parameters."""
    config = SimpleNamespace(
        hidden_size=24, hc_mult=streams, hc_sinkhorn_iters=8, hc_eps=1e-6, rms_norm_eps=1e-6
    )
    config.hc_magnitude = 1.5
    module = (cls or CLASSES[name])(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        spread = 0.2 if parameter.ndim > 1 else 0.7
        parameter.data = (spread * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return nn.ModuleDict({"hc": module})


DRAWS = 16  # a scale has three numbers: one draw of them says little


def runs(model, dtype):
    """Results and gradients of several calls, each joined."""
    return [torch.stack(of_one) for of_one in zip(*(run(model, dtype, i) for i in range(DRAWS)), strict=True)]


def run(model, dtype, seed=0):
    """Results and gradients of one call."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(seed)
    n = model["hc"].hc_mult
    x = torch.randn(2, 7, n, 24, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    results = model["hc"](x)
    results = results if isinstance(results, tuple) else (results,)
    upstream = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
    torch.autograd.backward(results, upstream)
    return [*(r.detach() for r in results), x.grad, *(p.grad for p in model.parameters())]


def in_double(module):
    """The class's formula in fp64: ``float()`` keeps fp64."""

    def wide(x):
        return x.double()

    kept, torch.Tensor.float = torch.Tensor.float, wide
    try:
        return runs(module.double(), torch.float64)
    finally:
        torch.Tensor.float = kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_as_exact_as_stock(name, dtype):
    stock = make(name, dtype=dtype)
    patched = copy.deepcopy(stock)
    report = apply(patched, norm=False)
    assert report.count("hyper") == 1, str(report)
    got, wanted = runs(patched, dtype), runs(stock, dtype)
    exact = in_double(copy.deepcopy(stock))
    for i, (a, b, c) in enumerate(zip(got, wanted, exact, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert_as_good(a, b, c, torch.finfo(a.dtype).eps, f"{name}, result {i}")


@pytest.mark.parametrize("name", CLASSES)
def test_undone_and_applied_again(name):
    stock = make(name)
    wanted = run(stock, torch.float32)
    apply(stock)
    assert bound(stock["hc"]) is not None
    apply(stock)
    assert apply(stock).count("hyper") == 1
    undo(stock)
    assert all(torch.equal(a, b) for a, b in zip(run(stock, torch.float32), wanted, strict=True))


def test_left():
    """Another formula, too many streams, switched off."""

    class Other(deepseek.DeepseekV4HyperConnection):
        def forward(self, x):
            post, comb, y = super().forward(x)
            return post, comb.mT, y

    entries = [
        apply(model).left for model in (_beside_a_norm(make("", cls=Other)), _beside_a_norm(make("glm", 9)))
    ]
    reasons = [entry.reason for left in entries for entry in left if entry.slot == "hyper"]
    assert reasons == [
        "unrecognised forward: other numbers than those of a known form",
        "has 9 streams, at most 8 are there",
    ]
    assert not apply(_beside_a_norm(make("glm")), hyper=False).count("hyper")


def _beside_a_norm(model):
    model["norm"] = nn.RMSNorm(8)
    return model


def test_float64_stays_stock():
    stock = make("deepseek").double()
    patched = copy.deepcopy(stock)
    apply(patched, norm=False)
    for a, b in zip(run(patched, torch.float64), run(stock, torch.float64), strict=True):
        assert torch.equal(a, b)
