"""`apply` again, of a model that has changed since, and `undo`; also test_hf_promises.py."""

import copy
import functools
import inspect
import itertools
import types

import pytest
import torch
from tiny import attributes, batch, make, same, step
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tigon
from tigon.integrations.transformers import apply, undo
from tigon.integrations.transformers.forward import bound

STOCK_ROTARY = modeling_llama.apply_rotary_pos_emb


def test_undo_restores_a_loss_function_of_its_own():
    from transformers.loss.loss_utils import ForCausalLMLoss

    model = make()
    model.loss_function = ForCausalLMLoss
    apply(model)
    assert model.loss_function is not ForCausalLMLoss
    undo(model)
    assert model.__dict__["_loss_function"] is ForCausalLMLoss


def test_undo_leaves_a_later_loss_function_alone():
    model = make()
    apply(model)
    model.loss_function = later = lambda *_, **__: None
    undo(model)
    assert model.loss_function is later


def test_apply_twice_is_harmless():
    model = make()
    report = apply(model)
    entries, before = list(report.entries), attributes(model)
    assert apply(model) is report
    assert sorted(report.entries, key=str) == sorted(entries, key=str)
    assert attributes(model) == before
    undo(model)


def test_apply_again_adds_what_was_left_out():
    model = make()
    report = apply(model, norm=False, rope=False, loss=False)
    assert (report.count("norm"), report.count("mlp"), report.count("loss")) == (0, 2, 0)
    apply(model)
    assert (report.count("norm"), report.count("mlp"), report.count("loss")) == (5, 2, 1)


def new_head(model):
    head = nn.Linear(32, 97, bias=False)
    head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.set_output_embeddings(head)


def new_norm(model):
    norm = LlamaRMSNorm(32)
    norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())
    model.model.norm = norm


def new_mlp(model):
    mlp = type(model.model.layers[0].mlp)(model.config)
    mlp.load_state_dict(model.model.layers[0].mlp.state_dict())
    model.model.layers[0].mlp = mlp


@pytest.mark.parametrize("family", ["llama", "llama_bias_tied"])
@pytest.mark.parametrize("size", [90, 104])
def test_resized_embeddings_keep_the_fused_head(family, size):
    """transformers makes a new Linear: the next forward pass patches it, without a second apply."""
    model, stock = make(family), make(family)
    inputs = batch()
    inputs = {name: tensor.clamp(max=size - 1) for name, tensor in inputs.items()}
    report = apply(model)
    for one in (model, stock):
        torch.manual_seed(3)
        one.resize_token_embeddings(size, mean_resizing=False)
    same(step(model, inputs), step(stock, inputs))
    assert report.head_calls.fused == 1 and report.head_calls.computed == 0
    assert apply(model) is report and report.count("loss") == 1 and bound(model.lm_head) is not None
    undo(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("change, slot", [(new_head, "loss"), (new_norm, "norm"), (new_mlp, "mlp")])
def test_replaced_modules_are_bound_by_a_second_apply(change, slot):
    model = make()
    inputs = batch()
    wanted = step(model, inputs)
    report = apply(model)
    entries = sorted(report.entries, key=str)
    change(model)
    assert apply(model) is report and sorted(report.entries, key=str) == entries
    for entry in report.replaced:
        if entry.slot != "rope":
            assert bound(model.get_submodule(entry.path)).module is model.get_submodule(entry.path)
    same(step(model, inputs), wanted)
    assert report.head_calls.fused == 1


class Doubled(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def test_a_second_apply_reports_what_is_there():
    """Modules that went, or became what nobody knows, are not said to be replaced."""
    model = make()
    report = apply(model)
    model.model.norm = Doubled(32)
    del model.model.layers[1]
    model.lm_head = nn.Sequential(model.lm_head)
    apply(model)
    assert (report.count("norm"), report.count("mlp"), report.count("loss")) == (2, 1, 0)
    assert {entry.path for entry in report.left} == {"model.norm", "lm_head"}
    model.lm_head = model.lm_head[0]
    apply(model, norm=False)
    assert report.count("loss") == 1 and report.count("norm") == 2


@pytest.fixture
def other_rotary(monkeypatch):
    """Puts another function in the place of the rotary one."""
    return functools.partial(monkeypatch.setattr, modeling_llama, "apply_rotary_pos_emb")


def test_rotary_replaced_by_somebody_else_is_called(other_rotary):
    """Before and after apply, in a model that was patched before; back again it is fused again."""
    model, inputs = make(), batch()
    apply(model)
    wanted = step(model, inputs)
    other_rotary(lambda q, k, cos, sin, unsqueeze_dim=1: (q, k))
    same(step(model, inputs), step(make(), inputs))
    with pytest.raises(AssertionError):
        same(step(model, inputs), wanted)
    report = apply(make())
    assert report.count("rope") == 0 and [entry for entry in report.left if entry.slot == "rope"]
    other_rotary(STOCK_ROTARY)
    same(step(model, inputs), wanted, ulps=0)


def test_known_rotary_of_somebody_else_is_fused_by_a_second_apply(other_rotary):
    model, stock = make(), copy.deepcopy(STOCK_ROTARY)
    report = apply(model)
    again = types.FunctionType(stock.__code__, stock.__globals__, "again", stock.__defaults__)
    other_rotary(again)
    attention = bound(model.model.layers[0].self_attn).spec
    before = attention.rewritten
    assert apply(model) is report and report.count("rope") == 1
    assert attention.rewritten is not before and again in [
        cell.cell_contents for cell in inspect.unwrap(attention.rewritten).__closure__
    ]
    undo(model)
    assert modeling_llama.apply_rotary_pos_emb is again


def test_failed_apply_changes_nothing():
    model = make("gemma", hidden_act="mish")
    before = attributes(model)
    with pytest.raises(tigon.Error, match=r"strict.*Mish"):
        apply(model, strict=True)
    assert attributes(model) == before
    report = apply(model, mlp=False, strict=True)
    assert not report.left


def test_patched_between_apply_and_undo():
    """Somebody wraps our forward: undo leaves the wrapper alone."""
    model = make()
    apply(model)
    norm = model.model.norm
    ours = norm.forward
    norm.forward = wrapper = lambda x: ours(x)
    undo(model)
    assert norm.forward is wrapper
    step(model, batch())


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_undo_in_any_order(order):
    models = [make(), make(seed=1), make("qwen2", seed=2)]
    inputs = batch()
    wanted = [step(model, inputs) for model in models]
    for model in models:
        apply(model)
    for place in order:
        undo(models[place])
        for model, want in zip(models, wanted, strict=True):
            same(step(model, inputs), want)
    assert modeling_llama.apply_rotary_pos_emb is STOCK_ROTARY
    for model in models:
        assert not model._forward_pre_hooks
        assert not any("forward" in module.__dict__ for module in model.modules())
