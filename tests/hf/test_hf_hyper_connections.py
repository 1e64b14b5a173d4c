"""Hyper-connections of transformers' models: recognised by their numbers, as exact as stock, restored."""

import contextlib
import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from test_hf_changed_modules import CHANGES, changed, differs
from tiny import InDouble, assert_all_as_good, close
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.hy_v4 import modeling_hy_v4 as hunyuan

import tigon
from tigon.integrations.transformers import apply, undo

table = importlib.import_module("models_table")
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
    return [torch.stack(values) for values in zip(*(run(model, dtype, i) for i in range(DRAWS)), strict=True)]


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


def in_double(module, step=runs):
    """The class's formula in fp64."""
    with InDouble():
        return step(copy.deepcopy(module).double(), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_as_exact_as_stock(name, dtype):
    stock = make(name, dtype=dtype)
    patched = copy.deepcopy(stock)
    report = apply(patched, norm=False)
    assert report.count("hyper") == 1, str(report)
    assert_all_as_good(runs(patched, dtype), runs(stock, dtype), in_double(stock), ulps=1)


@pytest.mark.parametrize("name", CLASSES)
def test_the_norm_inside_hyper_connections(name):
    """No slot calls it: whatever is done to it is done once."""
    model = make(name)

    def found():
        result, *others = run(model, torch.float32)
        return result, dict(enumerate(others))

    plain = found()
    for change in CHANGES:
        for first in (True, False):
            with changed(model, "hc.input_norm", change):
                wanted = found()
            if not first:
                apply(model)
                assert differs(found(), plain) is None
            with changed(model, "hc.input_norm", change):
                with contextlib.suppress(tigon.Error):  # nothing is left to be replaced
                    apply(model)
                assert differs(found(), wanted) is None, (change, first)
            apply(model)
            assert differs(found(), plain) is None
            undo(model)


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
    close(run(patched, torch.float64), run(stock, torch.float64), ulps=0)


class Layer(nn.Module):
    """The streams after a layer, as DeepSeek-V4 and GLM-5 write them, and as Hunyuan V4 does."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = nn.Linear(24, 24), kind

    def forward(self, x, post, comb):
        dtype = x.dtype
        out = self.inner(x[..., 0, :])
        if self.kind == "mixed":
            return post.to(dtype).unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(
                comb.to(dtype).transpose(-1, -2), x
            )
        return (post.float().unsqueeze(-1) * out.float().unsqueeze(-2) + x.float()).to(dtype)


def _step_of_layer(layer, dtype, seed=0):
    layer.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 7, 4, 24), (2, 7, 4), (2, 7, 4, 4))
    x, post, comb = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
    narrow = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [x.to(dtype), post.to(narrow), comb.to(narrow)][: 3 if layer.kind == "mixed" else 2]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = layer(*leaves, *([] if layer.kind == "mixed" else [comb]))
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mixed", "kept"])
def test_streams_after_a_layer(kind, dtype):
    torch.manual_seed(0)
    stock = Layer(kind).to(dtype)
    patched = copy.deepcopy(stock)
    report = apply(patched)
    assert [e.by for e in report.replaced] == ["tigon.hyper_connection_post (2 places)"], str(report)
    twin = copy.deepcopy(patched)
    exact = in_double(stock, _step_of_layer)
    for layer in (patched, twin):
        assert_all_as_good(_step_of_layer(layer, dtype), _step_of_layer(stock, dtype), exact, ulps=1)
    undo(patched)
    close(_step_of_layer(patched, dtype), _step_of_layer(stock, dtype), ulps=0)


@pytest.mark.parametrize("kind", ["mixed", "kept"])
def test_streams_compiled(kind):
    torch.manual_seed(0)
    stock = Layer(kind)
    patched = copy.deepcopy(stock)
    apply(patched)
    patched.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(*(_step_of_layer(m, torch.float32) for m in (patched, stock)))


@pytest.mark.parametrize("kind", ["mixed", "kept"])
def test_streams_that_no_kernel_takes(kind):
    """float64: stock's expression to the same bits."""
    stock = Layer(kind).double()
    patched = copy.deepcopy(stock)
    apply(patched)
    close(*(_step_of_layer(m, torch.float64) for m in (patched, stock)), ulps=0)


@pytest.mark.parametrize("family", ["deepseek_v4", "glm5_next", "hy_v4"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_step_of_a_model(family, checkpoints):
    """Every hyper-connection and both places of each layer; loss and gradients are stock within rounding."""
    torch.manual_seed(0)
    name = [cls for kind, cls in table.models() if kind == family][-1]
    model = table.build(family, name, tiny=True).train()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert table.compare(model) == table.EQUAL
    report = apply(model)
    layers = [e for e in report.replaced if e.by == "tigon.hyper_connection_post (2 places)"]
    assert len(layers) == 3
    assert not [e for e in report.left if e.slot == "hyper"]
    heads = family != "glm5_next"  # which has a mean before its head
    assert report.count("hyper") == 3 * len(layers) + heads
