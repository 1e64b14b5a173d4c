"""Residual addition and norm in one call: where the source has the form, hooks and outputs as before."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
from unittest import mock

import pytest
import torch
from test_hf_slices import nodes
from tiny import FAMILIES, assert_step_as_good, batch, double, make, step
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import tigon
from tigon.integrations.transformers import apply, residual, undo
from tigon.integrations.transformers.forward import bound

table = importlib.import_module("models_table")
NODE = "Tigon_add_rms_normBackward"
OTHERS = ("deepseek_v3", "olmoe", "qwen3_moe", "smollm3", "jamba", "vaultgemma")
SANDWICH = "what is added before {} comes from a norm (sandwich)"
LEFT = {
    "gemma2": SANDWICH.format("pre_feedforward_layernorm"),
    "glm4": SANDWICH.format("post_attention_layernorm"),
    "granite": None,  # scaled before it is added: no form of the slot
    "olmo2": None,  # norm after the sub-layer
}


def build(family, dtype=torch.float32, device=None):
    """A tiny model of `tiny.FAMILIES`, or of transformers' mapping."""
    if family in FAMILIES:
        return make(family, dtype=dtype, device=device)
    name = [cls for kind, cls in table.models() if kind == family]
    if not name:
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(0)
    return table.build(family, name[0], tiny=True).to(device=device, dtype=dtype).train()


def inputs_of(model, device="cpu"):
    inputs = batch(device)
    return inputs if model.config.model_type != "jamba" else {**inputs, "use_cache": False}


def calls_of(model, inputs):
    """How often a step calls the fused operator, its backward included."""
    with mock.patch.object(residual, "add_rms_norm", wraps=residual.add_rms_norm) as op:
        step(model, inputs)
    return op.call_count


def equal(got, wanted):
    """Loss and gradients of two steps, to the bit: in fp32 the one sum of the gradients rounds as two do."""
    assert torch.equal(got[0], wanted[0]) and got[1].keys() == wanted[1].keys()
    assert all(torch.equal(got[1][name], grad) for name, grad in wanted[1].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in LEFT] + [*OTHERS])
def test_step_is_as_good_as_without(family, dtype, device):
    stock = build(family, dtype, device)
    inputs, exact = inputs_of(stock, device), None
    if family in FAMILIES:  # others may keep fp32 inside of fp64
        exact = step(double(stock), inputs)
    plain, fused = copy.deepcopy(stock), copy.deepcopy(stock)
    apply(plain)
    report = apply(fused, residual=True)
    layers = stock.config.num_hidden_layers
    assert report.count("residual") == layers, str(report)
    assert [e for e in report.left if e.slot == "residual"] == []
    with torch.no_grad():
        ids = {"input_ids": inputs["input_ids"], "output_hidden_states": True}
        one, other = plain.eval()(**ids), fused.eval()(**ids)
    on_cpu = one.logits.device.type == "cpu"  # kernels of CUDA may add a row's squares in another order
    same = functools.partial(torch.testing.assert_close, **({"rtol": 0, "atol": 0} if on_cpu else {}))
    same(other.logits, one.logits)
    for a, b in zip(other.hidden_states, one.hidden_states, strict=True):
        same(a, b)
    plain.train(), fused.train()
    assert nodes(fused(**inputs).loss).count(NODE) == layers
    wanted, got = step(plain, inputs), step(fused, inputs)
    if exact is not None:
        ulp = torch.finfo(dtype).eps
        assert_step_as_good(got, step(stock, inputs), exact, len(report.replaced), ulp=ulp)
    if dtype == torch.float32 and on_cpu:
        equal(got, wanted)
    undo(fused)
    equal(step(fused, inputs), step(stock, inputs))


@pytest.mark.parametrize("family", LEFT)
def test_other_forms_of_layers_are_left(family):
    model = build(family)
    inputs = inputs_of(model)
    apply(model)
    wanted = step(model, inputs)
    report = apply(model, residual=True)
    reasons = {entry.reason for entry in report.entries if entry.slot == "residual"}
    assert reasons == ({LEFT[family]} if LEFT[family] else set()), str(report)
    assert nodes(model(**inputs).loss).count(NODE) == 0
    equal(step(model, inputs), wanted)


def test_off_unless_asked_for():
    model = make()
    assert not apply(model).count("residual")
    assert bound(model.model.layers[0]) is None
    report = apply(model, residual=True)
    assert report.count("residual") == 2 and "post_attention_layernorm" in str(report)
    assert apply(model) is report and report.count("residual") == 2
    assert calls_of(model, batch()) == 2
    undo(model)
    assert bound(model.model.layers[0]) is None and calls_of(model, batch()) == 0


def test_without_norms_says_so():
    report = apply(make(), norm=False, residual=True)
    reasons = {entry.reason for entry in report.left}
    assert reasons == {"post_attention_layernorm is no norm that Tigon runs"}
    with pytest.raises(tigon.Error, match=r"strict.*post_attention_layernorm"):
        apply(make(), norm=False, residual=True, strict=True)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(how):
    model, inputs = make(), batch()
    apply(model, residual=True)
    wanted = step(model, inputs)
    twin = how(model)
    undo(model)
    assert calls_of(twin, inputs) == 2
    equal(step(twin, inputs), wanted)


HOOKS = ("forward", "forward_pre", "full_backward", "full_backward_pre")


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_the_norm_see_what_they_saw(kind):
    model, inputs, seen = make(), batch(), []

    def hook(module, *args):
        seen.extend(part.detach().clone() for arg in args for part in (arg if type(arg) is tuple else [arg]))

    def hooked(**slots):
        seen.clear()
        apply(model, **slots)
        norm = model.model.layers[1].post_attention_layernorm
        handle = getattr(norm, f"register_{kind}_hook")(hook)
        calls, got = calls_of(model, inputs), step(model, inputs)
        handle.remove()
        undo(model)
        return calls, got, list(seen)

    plain, fused = hooked(), hooked(residual=True)
    assert (plain[0], fused[0]) == (0, 1)
    equal(fused[1], plain[1])
    assert len(plain[2]) == len(fused[2]) > 0 and all(map(torch.equal, plain[2], fused[2]))


def test_global_hooks_and_hooks_of_layers():
    model, inputs, seen = make(), batch(), []
    apply(model)
    wanted = step(model, inputs)
    apply(model, residual=True)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    assert calls_of(model, inputs) == 0
    handle.remove()
    assert all(layer.post_attention_layernorm in seen for layer in model.model.layers)
    for layer in model.model.layers:  # they may replace what goes on
        layer.register_forward_hook(lambda module, args, out: out.clone())
    assert calls_of(model, inputs) == 2
    equal(step(model, inputs), wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    model, inputs = make(), batch()
    apply(model)
    wanted = step(model, inputs)
    apply(model, residual=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert calls_of(model, inputs) == 4, "once more in the backward"
    equal(step(model, inputs), wanted)


@pytest.mark.parametrize("layers", [False, True])
def test_compiled(layers, device):
    model, inputs = make(device=device, use_cache=False), batch(device)
    apply(model, residual=True)
    wanted = step(model, inputs)
    graphs = []

    def backend(graph, example):
        graphs.extend(node for node in graph.graph.nodes if "tigon.add_rms_norm" in str(node.target))
        return graph

    if layers:
        for layer in model.model.layers:
            layer.compile(backend=backend, fullgraph=True)
        got = step(model, inputs)
    else:
        got = step(torch.compile(model, backend=backend, fullgraph=True), inputs)
        got[1].update({name.removeprefix("_orig_mod."): got[1].pop(name) for name in [*got[1]]})
    assert len(graphs) == (1 if layers else 2), "layers share what is compiled"
    torch.testing.assert_close(got[0], wanted[0])
    for name, grad in wanted[1].items():
        torch.testing.assert_close(got[1][name], grad)


def test_autocast_and_other_dtypes():
    """Under autocast a residual in fp32 is added to a result in bf16: as without."""
    model, inputs = make(), batch()
    steps = []
    for slots in ({}, {"residual": True}):
        apply(model, **slots)
        with torch.autocast("cpu", torch.bfloat16):
            steps.append(step(model, inputs))
    equal(*steps)
    model.double()
    fused = step(model, inputs)
    undo(model)
    apply(model)
    equal(fused, step(model, inputs))


def test_adapters_and_replaced_norms():
    peft = pytest.importorskip("peft")
    inputs, steps = batch(), []
    for slots in ({}, {"residual": True}):
        model = make()
        apply(model, **slots)
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=2,
            init_lora_weights=False,
            target_modules=["q_proj"],
            modules_to_save=["post_attention_layernorm"],
        )
        model = peft.get_peft_model(model, config).train()
        assert calls_of(model, inputs) == 0, "a norm inside a wrapper is called"
        steps.append(step(model, inputs))
    equal(*steps)
    apply(model, residual=True)
    model = model.unload()
    assert calls_of(model, inputs) == 2
    model.model.layers[0].post_attention_layernorm = nn.Identity()
    assert calls_of(model, inputs) == 1
    model.model.layers[0].post_attention_layernorm = T5LayerNorm(32)
    wanted = step(model, inputs)
    assert apply(model, residual=True).count("norm") == 5
    assert calls_of(model, inputs) == 1, "another arithmetic"
    torch.testing.assert_close(step(model, inputs)[0], wanted[0])


def test_offloaded_norms_are_called():
    """accelerate's hooks wrap a forward: they move its tensors."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, inputs = make(), batch()
    apply(model)
    wanted = step(model, inputs)
    apply(model, residual=True)
    hooks.add_hook_to_module(model.model.layers[0].post_attention_layernorm, hooks.ModelHook())
    assert calls_of(model, inputs) == 1
    equal(step(model, inputs), wanted)


# --- forms -----------------------------------------------------------------------------------


class Layer(nn.Module):
    """Base of layers that differ in their forward."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = LlamaRMSNorm(16), LlamaRMSNorm(16)
        self.linear, self.dropout, self.scale = nn.Linear(16, 16), nn.Dropout(0.5), 0.7


class Usual(Layer):
    def forward(self, x):
        residual = x
        x = self.linear(self.other(x))
        x = residual + x
        residual = x
        x = self.norm(x)
        return residual + self.linear(x)


class NormOfItsOwnName(Layer):
    def forward(self, x, *, flag=True):
        if flag:
            x = self.linear(x) + x
            total = x + self.dropout(x)
            y = self.norm(total)
            return total + self.linear(y)
        return x


class ThreeNames(Layer):
    def forward(self, x):
        h = self.linear(x)
        h = self.dropout(h) + x
        residual = h
        y = self.norm(h)
        return residual * 2 + y + h


class Scaled(Layer):
    def forward(self, x):
        h = x + self.linear(x) * self.scale
        residual = h
        h = self.norm(h)
        return residual + h


class PostNorm(Layer):
    def forward(self, x):
        x = x + x
        x = self.norm(x)
        return x * 2


class Between(Layer):
    def forward(self, x):
        h = x + x
        residual = h
        h = h * 2
        h = self.norm(h)
        return residual + h


class OfAnother(Layer):
    def forward(self, x):
        h = x + x
        residual = x
        h = self.norm(h)
        return residual + h


class Subtracted(Layer):
    def forward(self, x):
        h = x - x
        residual = h
        h = self.norm(h)
        return residual + h


class Sandwich(Layer):
    def forward(self, x):
        h = self.linear(x)
        h = self.other(h)
        h = x + h
        residual = h
        h = self.norm(h)
        return residual + h


def run(layer, options):
    torch.manual_seed(1)
    x = torch.randn(3, 5, 16, requires_grad=True)
    layer.zero_grad(set_to_none=True)
    y = layer(x, **options)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("options", [{}, {"flag": False}])
@pytest.mark.parametrize("cls", [Usual, NormOfItsOwnName, ThreeNames])
def test_forms(cls, options):
    if options and cls is not NormOfItsOwnName:
        pytest.skip("takes no options")
    layer = nn.Sequential(cls())
    apply(layer)
    wanted = run(layer[0], options)
    report = apply(layer, residual=True)
    assert [e.by for e in report.replaced if e.slot == "residual"] == ["tigon.add_rms_norm (norm)"]
    with mock.patch.object(residual, "add_rms_norm", wraps=residual.add_rms_norm) as op:
        got = run(layer[0], options)
    assert op.call_count == (not options)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-21, atol=2.0**-21)
    line = residual.rewrite(cls.forward)[1].__code__.co_firstlineno
    assert line == cls.forward.__code__.co_firstlineno


@pytest.mark.parametrize("cls", [Scaled, PostNorm, Between, OfAnother, Subtracted])
def test_other_forms_stay(cls):
    layer = nn.Sequential(cls())
    assert residual.rewrite(cls.forward) is None
    assert not [e for e in apply(layer, residual=True).entries if e.slot == "residual"]


def test_reasons():
    sandwich = apply(nn.Sequential(Sandwich()), residual=True).left
    assert [entry.reason for entry in sandwich] == [SANDWICH.format("norm")]
    layer = Usual()
    layer.norm = nn.LayerNorm(16)
    other = apply(nn.Sequential(layer), residual=True).left
    assert [entry.reason for entry in other] == ["norm has not the arithmetic of add_rms_norm"]
    layer = Usual()
    layer.forward = lambda x: x
    own = apply(nn.Sequential(layer), residual=True).left
    assert own[0].reason.startswith("its forward is bound to the instance")
