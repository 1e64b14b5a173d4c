"""DoRA in the slot `lora`, beyond the options that it shares with LoRA."""

import copy
import weakref

import pytest
import torch
from test_hf_lora import adapted_model, config
from tiny import batch, close, same, step
from torch import nn

from tigon.integrations.transformers import apply, undo
from tigon.integrations.transformers import lora as slot

peft = pytest.importorskip("peft")


def test_dora_beside_a_gated_unit_that_writes_over_its_inputs(device):
    """The results that magnitudes need are not written over in the backward."""
    stock = adapted_model(device, use_dora=True)
    model = copy.deepcopy(stock)
    apply(model)
    inputs = batch(device, rows=4, tokens=12)  # more rows than columns
    same(step(model, inputs), step(stock, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_of_magnitude_zero(dtype, device):
    """Its gradient is PEFT's: one step leads away from 0."""
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(8, 6, dtype=dtype, device=device)),
        config(target_modules=["0"], use_dora=True),
    )
    layer = model.base_model.model[0]
    magnitude = layer.lora_magnitude_vector["default"].weight
    magnitude.data[2] = 0
    x, grads = torch.randn(64, 8, device=device, dtype=dtype), []
    for call in (layer, lambda x: slot.lora_forward(layer, slot.LoraSpec(), x)):
        magnitude.grad = None
        call(x).sum().backward()
        grads.append(magnitude.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=0.1)


def test_dora_of_a_head_in_float64(device):
    stock = adapted_model(device, use_dora=True, target_modules=["q_proj", "lm_head"]).double()
    model = copy.deepcopy(stock)
    apply(model)
    loss, gradients = step(model, batch(device))
    same((loss.float(), gradients), step(stock, batch(device)))  # transformers' logits are of float32


@pytest.mark.parametrize("rows", [1, 40])
def test_dora_of_a_weight_that_is_made(rows, device):
    """As of a quantised base: made once a direction, one alive at a time, with the bits of a plain weight."""
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(32, 24, bias=False, device=device)),
        config(target_modules=["0"], use_dora=True),
    )
    layer, alive = model.base_model.model[0], []

    def make():
        assert all(one() is None for one in alive)
        weight = layer.base_layer.weight.detach().clone()
        alive.append(weakref.ref(weight))
        return weight

    x, found = torch.randn(rows, 32, device=device, requires_grad=True), []
    state = slot._find_state(layer, x)
    made = state._replace(base=slot.Base(make))
    for one in (state, made._replace(call=slot._prepare(made))):
        y = slot._dora(x, one) if rows == 1 else one.finish(*slot._adapted(x, one.dtype, one.call))
        leaves = (x, *(p for p in layer.parameters() if p.requires_grad))
        found.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert len(alive) == 2
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("bias", ["none", "all"])
def test_siblings_share_a_call(bias, device, monkeypatch):
    """As LoRA's; a changed magnitude is seen."""
    model, counted, original = adapted_model(device, use_dora=True, bias=bias), [], slot.apply
    monkeypatch.setattr(
        slot, "apply", lambda x, layout, *rest: counted.append(layout.count) or original(x, layout, *rest)
    )
    stock = copy.deepcopy(model)
    apply(model)
    inputs = batch(device, rows=4, tokens=12)
    same(step(model, inputs), step(stock, inputs))
    assert counted == [3, 1, 2, 1] * 2
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(40, 32, device=device)
    attention.q_proj(x)
    with torch.no_grad():
        attention.k_proj.lora_magnitude_vector["default"].weight.mul_(2)
    got = attention.k_proj(x)
    undo(model)
    close(got, attention.k_proj(x), ulps=64)
