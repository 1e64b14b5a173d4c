"""The state that a LoRA layer keeps from call to call, while all that it was made of is the same."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import close
from torch import nn

from tigon.integrations.transformers import lora as slot

peft = pytest.importorskip("peft")


def changes_of(layer):
    """What may change between two calls of a layer."""
    down, up, drop = (part["default"] for part in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    base = layer.base_layer
    yield "scaling", lambda: layer.scaling.update(default=0.25)
    yield "weight", lambda: setattr(base, "weight", nn.Parameter(base.weight.detach() * 2))
    yield "in place", lambda: base.weight.data.mul_(2)
    yield "bias", lambda: setattr(base, "bias", nn.Parameter(base.weight.detach()[:, 0].clone()))
    yield "a", lambda: setattr(down, "weight", nn.Parameter(down.weight.detach() * 3))
    yield "b", lambda: setattr(up, "weight", nn.Parameter(up.weight.detach() * 3))
    yield "down", lambda: layer.lora_A.update({"default": copy.deepcopy(down).requires_grad_(False)})
    yield "wider adapters", lambda: [part.double() for part in (down, up)]
    yield "wider", layer.double
    yield "dropout", lambda: layer.lora_dropout.update({"default": nn.Dropout(1.0)})
    yield "hook", lambda: up.register_forward_hook(lambda *args: args[-1] * 5)
    yield "of the base", lambda: base.register_forward_hook(lambda *args: args[-1] * 5)
    yield ("forward", lambda: setattr(base, "forward", lambda x: x[:, :1] * base.weight[:, 0]))
    yield "disabled", lambda: layer.enable_adapters(False)
    yield "merged", lambda: layer.merge()
    yield "training", lambda: (setattr(drop, "p", 1.0), layer.train())


def adapted_layer(device, **options):
    torch.manual_seed(3)
    base = nn.Sequential(nn.Linear(32, 24, bias=False, device=device))
    made = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False, **options)
    return peft.get_peft_model(base, made).base_model.model[0]


def test_a_changed_layer_computes_what_it_is_now(device):
    for i in range(len(list(changes_of(adapted_layer(device))))):
        layer, stock, spec = adapted_layer(device), adapted_layer(device), slot.LoraSpec()
        x = torch.randn(3, 32, device=device)
        close(slot.lora_forward(layer, spec, x), stock(x))
        assert spec.state is not None
        for one in (layer, stock):
            name, change = list(changes_of(one))[i]
            change()
        x = x.to(layer.base_layer.weight.dtype)
        close(slot.lora_forward(layer, spec, x), stock(x), ulps=512)
        again = copy.deepcopy(spec)
        assert again.seen is None and again.state is None, name


def test_a_changed_magnitude(device):
    layer, spec = adapted_layer(device, use_dora=True), slot.LoraSpec()
    x = torch.randn(3, 32, device=device)
    for _ in range(2):
        close(slot.lora_forward(layer, spec, x), layer(x), ulps=64)
        assert spec.state is not None
        vector = layer.lora_magnitude_vector["default"]
        vector.weight = nn.Parameter(vector.weight.detach() * 2)


def test_two_adapters_keep_their_state(device):
    layer, spec = adapted_layer(device), slot.LoraSpec()
    layer.update_layer("other", r=3, lora_alpha=1, config=peft.LoraConfig(r=3, init_lora_weights=False))
    layer.set_adapter(["default", "other"])
    x = torch.randn(3, 32, device=device)
    close(slot.lora_forward(layer, spec, x), layer(x), ulps=64)
    assert len(spec.state.adapters) == 2
    layer.set_adapter("other")
    close(slot.lora_forward(layer, spec, x), layer(x), ulps=64)
    assert len(spec.state.adapters) == 1
