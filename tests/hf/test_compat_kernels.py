"""transformers' use_kernels with Tigon behind the tags."""

import copy

import pytest
import torch
from tiny import batch, close, make, step
from transformers.utils import is_kernels_available

import tigon
from tigon.integrations import kernels


@pytest.fixture
def mapped():
    """The mapping is registered for this test; models are made after `kernels` decorated their classes."""
    if not is_kernels_available():
        pytest.skip("needs the package kernels in the version that this transformers takes")
    from kernels import use_kernel_mapping

    kernels.install()
    with use_kernel_mapping(kernels.mapping()):
        yield


def test_without_kernels_it_says_so():
    if is_kernels_available():
        pytest.skip("kernels is installed")
    with pytest.raises(tigon.Error, match=r"\[compat.kernels\] kernels must be installed, >= 0"):
        kernels.install()


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma"])
def test_layer_forward_is_the_models_own(family):
    """Bound as kernels binds it: every rounding by the norm's own source, gradients too."""
    model = make(family, dtype=torch.bfloat16)
    norm = model.model.norm
    other = copy.deepcopy(norm)
    norm.forward = kernels.TaggedRMSNorm.forward.__get__(norm)
    x = torch.randn(7, 32).bfloat16()
    assert torch.equal(norm(x), other(x))
    assert "tigon" in str(norm(x.requires_grad_()).grad_fn).lower()
    report = tigon.apply(model)
    (left,) = [entry for entry in report.left if entry.path == "model.norm"]
    assert left.reason == "runs tigon already, through transformers' kernels"


def test_tags_of_transformers_mapping():
    """Norms and MLPs of every tag that its mapping gives to Liger's kernels or FLA's."""
    assert {"RMSNorm", "RMSNormGated", "SwiGLUMLP", "GeGLUMLP"} <= kernels.LAYERS.keys()


@pytest.mark.parametrize("family, tag", [("llama", "SwiGLUMLP"), ("gemma", "GeGLUMLP")])
def test_mlp_forward_is_the_models_own(family, tag):
    """As kernels binds it; gradients of the projections too."""
    mlp = make(family).model.layers[0].mlp
    other = copy.deepcopy(mlp)
    mlp.forward = kernels.LAYERS[tag].forward.__get__(mlp)
    x = torch.randn(7, 32, requires_grad=True)
    y, wanted = mlp(x), other(x)
    assert "tigon" in str(y.grad_fn.next_functions).lower() or mlp.__dict__[kernels.SPEC] is not None
    close(y, wanted)
    y.square().sum().backward()
    wanted.square().sum().backward()
    close(*([p.grad for p in one.parameters()] for one in (mlp, other)))


def test_gated_norm_is_the_models_own():
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    norm = Qwen3NextRMSNormGated(32)
    x, gate = torch.randn(2, 5, 32)
    wanted = norm(x, gate)
    norm.forward = kernels.TaggedGatedRMSNorm.forward.__get__(norm)
    y = norm(x.requires_grad_(), gate)
    assert "tigon" in str(y.grad_fn).lower()
    close(y, wanted)


def test_unrecognised_norm_keeps_its_own():
    class RMSNorm(torch.nn.Module):
        def forward(self, x):
            return x.sin()

    norm = RMSNorm()
    norm.forward = kernels.TaggedRMSNorm.forward.__get__(norm)
    x = torch.randn(3)
    assert torch.equal(norm(x), x.sin())


def test_apply_looks_through_forwards_that_were_merely_rebound():
    """Where kernels has nothing, it binds the class's own forward to the instance."""
    model = make()
    for module in model.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "SiLUActivation"):
            module.forward = type(module).forward.__get__(module)
    report = tigon.apply(model)
    assert report.count("norm") == 5 and report.count("mlp") == 2
    tigon.undo(model)
    assert model(**batch()).loss.isfinite()


def test_set_use_kernels(mapped):
    stock, model = make(), make()
    inputs = batch()
    wanted = step(stock, inputs)
    model.set_use_kernels(True)
    norms = [m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"]
    assert len(norms) == 5 and all(m.forward.runs_tigon for m in norms)
    report = tigon.apply(model)
    assert report.count("norm") == 0 and report.count("mlp") == 2
    got = step(model, inputs)
    close(got[0], wanted[0])
    model.eval()
    assert all(m.forward.runs_tigon for m in norms)


def test_after_apply_the_norms_stay_tigon(mapped):
    """kernels rebinds the norms that apply has bound: with this mapping they compute the same."""
    model = make()
    inputs = batch()
    wanted = model(**inputs).loss
    tigon.apply(model)
    model.set_use_kernels(True)
    close(model(**inputs).loss, wanted)
    tigon.undo(model)
    close(model(**inputs).loss, wanted)
