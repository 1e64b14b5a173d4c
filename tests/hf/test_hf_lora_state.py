"""The state that a LoRA layer keeps from call to call, while all that it was made of is the same."""

import copy
import functools

import pytest
import torch
from tiny import close
from torch import nn

from tigon.integrations.transformers import lora as slot
from tigon.integrations.transformers.fp8 import Fp8Spec

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


def parts_of(layer):
    parts = {"base": layer.base_layer, "down": layer.lora_A["default"], "up": layer.lora_B["default"]}
    parts["dropout"] = layer.lora_dropout["default"]
    if layer.lora_variant:
        parts["magnitude"] = layer.lora_magnitude_vector["default"]
    return parts


def kept_facts_of(layer):
    """What else the cached state is decided by."""
    for name, part in parts_of(layer).items():
        other = type("Other", (type(part),), {"forward": lambda self, *args, **kwargs: args[0]})
        yield f"forward of {name}", lambda part=part: setattr(part, "forward", lambda x: x)
        yield f"class of {name}", lambda part=part, other=other: setattr(part, "__class__", other)
        for sort in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"):
            add = getattr(part, f"register_{sort}")
            yield f"{sort} of {name}", lambda add=add: add(lambda *given: None)
        for weight in part.parameters():
            turn = functools.partial(weight.requires_grad_, not weight.requires_grad)
            yield f"ZeRO-3 has {name}", lambda weight=weight: setattr(weight, "ds_id", 3)
            yield f"{name} is elsewhere", lambda part=part: part.to("meta")
            yield f"{name} is wider", lambda weight=weight: setattr(weight, "data", weight.data.double())
            yield f"{name} trains or not", turn
    base, scaling = layer.base_layer, layer.scaling
    yield "shorter rows", lambda: setattr(base.weight, "data", base.weight.data[:, :24])
    yield "a bias", lambda: setattr(base, "bias", nn.Parameter(torch.zeros(24)))
    yield "scale", lambda: scaling.update(default=7.0)
    yield "a tensor scales", lambda: scaling.update(default=torch.tensor(scaling["default"]))
    yield "biased up", lambda: setattr(layer.lora_B["default"], "bias", nn.Parameter(torch.ones(24)))
    yield "biased down", lambda: setattr(layer.lora_A["default"], "bias", nn.Parameter(torch.ones(4)))
    yield "no active adapter", lambda: setattr(layer, "_active_adapter", [])
    yield "another variant", lambda: layer.lora_variant.update(default=object())
    yield "disabled", lambda: layer.enable_adapters(False)
    yield "merged", layer.merge


def facts_of(state):
    if state is None:
        return None
    bias = None if state.base.bias is None else state.base.bias.shape
    tensors = id(state.base.weight), bias, id(state.magnitude)
    adapters = [(id(one.a), id(one.b), one.scale, one.dropout) for one in state.adapters]
    return state.dtype, tensors, adapters, state.drops, state.scales_weight, state.shareable


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_dropout": 0.1}])
def test_the_state_is_found_anew_when_one_of_its_facts_changes(options):
    names = [name for name, _ in kept_facts_of(adapted_layer("cpu", **options))]
    assert len(names) > 40
    for i, name in enumerate(names):
        layer, spec, x = adapted_layer("cpu", **options), slot.LoraSpec(), torch.randn(3, 32)
        before = facts_of(slot._state(layer, spec, x))
        assert spec.state is not None, name
        assert slot._state(layer, spec, x) is spec.state
        [*kept_facts_of(layer)][i][1]()
        found = facts_of(slot._find_state(layer, x))
        assert facts_of(slot._state(layer, spec, x)) == found, name
        assert found != before or "trains" in name or name == "magnitude is wider", name
    for other in (x.double(), x[:, :24], x.to("meta"), nn.Parameter(x)):
        layer, spec = adapted_layer("cpu", **options), slot.LoraSpec()
        slot._state(layer, spec, x)
        assert facts_of(slot._state(layer, spec, other)) == facts_of(slot._find_state(layer, other))
    with torch.autocast("cpu", torch.bfloat16):
        assert slot._state(layer, spec, x).dtype == torch.bfloat16


def reads(function, *args):
    """What a function reads of modules and tensors: (id, name) of attributes, of parameters and children."""
    found, dicts = set(), ("_parameters", "_modules")
    of_module, of_tensor = nn.Module.__getattribute__, torch.Tensor.__getattribute__

    class Own(dict):
        def __init__(self, own, owner):
            super().__init__(own)
            self.owner = owner

        def note(self, name):
            found.add((self.owner, name))

        def get(self, name, default=None):
            self.note(name)
            return super().get(name, default)

        def __getitem__(self, name):
            self.note(name)
            value = super().__getitem__(name)
            return Own(value, self.owner) if name in dicts else value

        def __contains__(self, name):
            self.note(name)
            return super().__contains__(name)

        def values(self):
            return [self[name] for name in self]

    def module_attribute(self, name):
        value = of_module(self, name)
        if name in ("__dict__", *dicts):
            return Own(value, id(self))
        found.add((id(self), name))
        return value

    def tensor_attribute(self, name):
        found.add((id(self), name))
        return of_tensor(self, name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nn.Module, "__getattribute__", module_attribute, raising=False)
        patched.setattr(torch.Tensor, "__getattribute__", tensor_attribute, raising=False)
        function(*args)
    return found


@pytest.mark.parametrize("fp8", [None, Fp8Spec("fp8")], ids=["plain", "fp8"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}])
def test_what_the_state_is_found_by(options, fp8):
    """`_look` reads each attribute that `_find_state` reads, so that no change of one is missed."""
    layer, x = adapted_layer("cpu", **options), torch.randn(3, 32)
    names = {id(module): name for name, module in layer.named_modules()}
    names |= {id(t): name for name, t in layer.named_parameters()} | {id(x): "x"}
    looked = reads(slot._look, layer, slot.LoraSpec(fp8=fp8), x)
    missed = reads(slot._find_state, layer, x, fp8) - looked
    assert sorted((names[of], name) for of, name in missed if of in names) == []


def test_a_base_that_is_trained_after_the_first_step():
    layer, stock = (adapted_layer("cpu", use_dora=True) for _ in range(2))
    spec, x = slot.LoraSpec(), torch.randn(64, 32)
    slot.lora_forward(layer, spec, x).sum().backward()
    for one in (layer, stock):
        one.base_layer.weight.requires_grad_(True)
    slot.lora_forward(layer, spec, x).sum().backward()
    stock(x).sum().backward()
    close(layer.base_layer.weight.grad, stock.base_layer.weight.grad, ulps=512)


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
