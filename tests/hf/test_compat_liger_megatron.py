"""apply_liger_kernel_to_megatron in Megatron-Core's own models, and the classes behind it, on the CPU."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import close

import tigon
from tigon.integrations.liger import megatron as liger_megatron

apply, RMSNorm = liger_megatron.apply_liger_kernel_to_megatron, liger_megatron.LigerMegatronRMSNorm


def reference(x, bias=None):
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    return F.silu(gate) * up


def test_fallback_of_the_gate():
    """A bias, FP8 and offloaded inputs go to what was given for them; without it a bias works."""
    x, bias, calls = torch.randn(5, 16), torch.randn(16), []

    def fallback(*inputs):
        calls.append(inputs)
        return reference(*inputs[:2])

    gate = liger_megatron.LigerMegatronSwiGLU(fallback)
    close(gate(x), reference(x))
    assert not calls
    for inputs in ((x, bias), (x, None, True), (x, None, False, True)):
        assert torch.equal(gate(*inputs), reference(*inputs[:2]))
    assert len(calls) == 3 and calls[0] == (x, bias, False, False)
    close(type(gate)()(x, bias), reference(x, bias))


def test_classes_take_what_megatron_gives():
    config = SimpleNamespace(sequence_parallel=True, layernorm_zero_centered_gamma=True)
    norm = RMSNorm(config, 8)
    assert norm.weight.sequence_parallel and norm.offset == 1 and norm.weight.abs().max() == 0
    assert norm.weight.dtype == torch.float32
    with pytest.raises(tigon.Error, match="normalization"):
        RMSNorm(SimpleNamespace(normalization="LayerNorm"), 8)
    loss = liger_megatron.LigerMegatronCrossEntropy(label_smoothing=0.1)
    assert "label_smoothing=0.1, reduction='none', label_smoothing_formula='megatron'" in repr(loss)
    with pytest.raises(tigon.Error, match="must be 3-D"):
        loss(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))


@pytest.fixture
def megatron():
    """Its groups, and its functions as they were, afterwards."""
    pytest.importorskip("megatron.core")
    import megatron_tiny

    places = megatron_tiny.places_of_liger()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with megatron_tiny.megatron(), megatron_tiny.kept(places):
            yield megatron_tiny, places
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [True, False], ids=["fused loss", "plain loss"])
def test_models(megatron, fused):
    """The same losses and gradients, by Tigon's norms, gates and loss; a second call changes nothing."""
    tiny, places = megatron
    stock = tiny.gpt(cross_entropy_loss_fusion=fused)
    want = tiny.step(stock)
    before = [getattr(*place) for place in places]
    apply(rms_norm=True, cross_entropy=True, swiglu=True)
    patched = [getattr(*place) for place in places]
    assert not any(now is then for now, then in zip(patched, before, strict=True)), patched
    model = tiny.gpt(cross_entropy_loss_fusion=fused)
    norms = [type(m) for m in model.modules() if "Norm" in type(m).__name__]
    assert set(norms) == {RMSNorm} and len(norms) == 5
    calls = []
    gate = patched[-1].apply
    patched[-1].apply = staticmethod(lambda *inputs: calls.append(1) or gate(*inputs))
    got = tiny.step(model)
    assert len(calls) == 2
    patched[-1].apply = staticmethod(gate)
    if fused:  # Megatron's fused loss rounds the gradient of the logits to bfloat16
        close(got[0], want[0], 256)
    else:
        tiny.same(got, want)
    apply(rms_norm=True, cross_entropy=True, swiglu=True)
    assert [getattr(*place) for place in places] == patched


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_replaced_where_a_name_is_not_there(megatron, monkeypatch):
    _, places = megatron
    before = [getattr(*place) for place in places]
    owner, name = places[-1]
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match="symbol path may have changed"):
        apply(rms_norm=True, cross_entropy=True, swiglu=True)
    assert [getattr(*place) for place in places[:-1]] == before[:-1]
