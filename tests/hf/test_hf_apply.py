"""apply and undo: exactness, repetition, refusals, and models on a bad day."""

import copy
import functools
import inspect
import io
import pickle
import types

import pytest
import torch
from tiny import batch, close, config, make, same, step
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tigon
from tigon.integrations.transformers import apply, undo
from tigon.integrations.transformers.forward import bound

STOCK_ROTARY = modeling_llama.apply_rotary_pos_emb


def dictionaries(model):
    """The instance dictionaries of all modules, shallow."""
    return {path: dict(module.__dict__) for path, module in model.named_modules()}


def test_undo_restores_exactly():
    model = make()
    before = dictionaries(model)
    apply(model)
    assert dictionaries(model) != before
    undo(model)
    after = dictionaries(model)
    assert after.keys() == before.keys()
    for path, dictionary in before.items():
        assert after[path].keys() == dictionary.keys()
        assert all(after[path][key] is value for key, value in dictionary.items())
    undo(model)  # harmless


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
    entries, before = list(report.entries), dictionaries(model)
    assert apply(model) is report
    assert sorted(report.entries, key=str) == sorted(entries, key=str)
    assert dictionaries(model) == before
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


def test_attention_of_another_class_body_after_apply(monkeypatch):
    """The forward that the class has now runs, its rotary function fused where its source is plain."""
    model, inputs = make(), batch()
    apply(model)
    wanted = step(model, inputs)
    stock = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention, "forward", lambda self, *args, **kwargs: stock(self, *args, **kwargs)
    )
    same(step(model, inputs), wanted)
    monkeypatch.setattr(
        modeling_llama.LlamaAttention, "forward", lambda self, hidden_states, **_: (0 * hidden_states, None)
    )
    same(step(model, inputs), step(make(), inputs))


def test_nothing_recognised_raises():
    with pytest.raises(tigon.Error, match=r"\[apply\] model must hold .* got Sequential"):
        apply(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(tigon.Error, match="LocalResponseNorm: unrecognised forward"):
        apply(nn.Sequential(nn.LocalResponseNorm(2)))
    with pytest.raises(tigon.Error, match="got dict"):
        apply({})
    with pytest.raises(tigon.Error):
        apply(make(), norm=False, mlp=False, rope=False, loss=False)


class Trainer:
    def __init__(self, model):
        self.model = model


@pytest.mark.parametrize(
    "given, said",
    [
        (lambda: "org/model", r"got the name 'org/model' \(load it first: AutoModelForCausalLM"),
        (lambda: nn.Linear, r"got the class Linear \(give a model of it\)"),
        (lambda: Trainer(nn.Linear(2, 2)), r"got Trainer \(give its .model\)"),
        (lambda: None, "got NoneType$"),
    ],
)
def test_what_is_no_model_is_told_what_to_give(given, said):
    with pytest.raises(tigon.Error, match=said):
        apply(given())


def test_notes_of_a_model_in_evaluation_and_of_a_quantised_one():
    model = make().eval()
    report = apply(model)
    (note,) = report.notes
    assert "model.train()" in note and note in str(report)
    step(model, batch())
    with pytest.raises(tigon.Error, match=r"model.train\(\) first"):
        report.check()
    assert apply(model.train()).notes == []
    model = make(seed=2)
    model.lm_head, model.is_quantized = QuantisedLinear(32, 97, bias=False), True
    assert "llm_int8_skip_modules" in apply(model).notes[0]


def test_failed_apply_changes_nothing():
    model = make("gemma", hidden_act="mish")
    before = dictionaries(model)
    with pytest.raises(tigon.Error, match=r"strict.*Mish"):
        apply(model, strict=True)
    assert dictionaries(model) == before
    report = apply(model, mlp=False, strict=True)
    assert not report.left


def test_report_is_readable_and_structured():
    report = apply(make("gemma", hidden_act="mish"))
    text = str(report)
    assert text == repr(report)
    for part in (
        "GemmaForCausalLM",
        "5 x GemmaRMSNorm",
        "tigon.rms_norm (gemma)",
        "lm_head",
        "2 x GemmaMLP",
        "left: activation",
    ):
        assert part in text
    entry = next(entry for entry in report.left if entry.slot == "mlp")
    assert entry.path == "model.layers.0.mlp" and entry.by is None and not entry.replaced


def test_report_in_a_notebook_and_in_a_terminal():
    report = apply(make())
    page, text = report._repr_html_(), str(report)
    assert page.count("<tr>") == text.count("\n") and "<td" in page and "&gt;" in page
    assert "  rope    modeling_llama.apply_rotary_pos_emb -> tigon.rope (half)" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_patch_that_patched_nothing_does_not_stay_silent():
    model = make()
    report = apply(model)
    with pytest.raises(tigon.Error, match="0 fused losses"):
        report.check()
    step(model, batch())
    report.check()
    assert int(report.head_calls) == report.head_calls.fused == 1


def test_modules_that_are_no_transformers_model():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = LlamaRMSNorm(8)
            self.other = nn.RMSNorm(8, eps=1e-6)

        def forward(self, x):
            return self.other(self.norm(x))

    block, x = Block(), torch.randn(3, 8)
    wanted = block(x)
    assert apply(block).count("norm") == 2
    close(block(x), wanted)
    undo(block)
    assert torch.equal(block(x), wanted)


@pytest.mark.parametrize("method", ["deepcopy", "pickle"])
def test_copies_are_patched_and_independent(method):
    model = make()
    apply(model)
    inputs = batch()
    wanted = step(model, inputs)
    if method == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for path, module in twin.named_modules():
        if "forward" in module.__dict__:
            assert bound(module).module is module, path
    got = step(twin, inputs)
    assert torch.equal(got[0], wanted[0])
    assert all(torch.equal(got[1][name], grad) for name, grad in wanted[1].items())
    undo(model)
    assert "forward" in twin.lm_head.__dict__
    undo(twin)
    assert "forward" not in twin.lm_head.__dict__


def test_report_can_be_pickled():
    report = apply(make())
    assert pickle.loads(pickle.dumps(report)) == report


def test_meta_device_model():
    with torch.device("meta"):
        model = LlamaForCausalLM(config())
    report = apply(model)
    assert report.count("norm") == 5 and report.count("loss") == 1
    stock = make()
    inputs = batch()
    wanted = step(stock, inputs)
    model.load_state_dict(stock.state_dict(), assign=True)
    model.model.rotary_emb = stock.model.rotary_emb
    close(step(model.train(), inputs)[0], wanted[0])


class Doubled(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class Renamed(LlamaRMSNorm):
    """A subclass that changes nothing."""


def test_subclasses():
    model = make()
    inputs = batch()
    model.model.norm = Doubled(32)
    model.model.layers[0].input_layernorm = Renamed(32)
    wanted = step(model, inputs)
    report = apply(model)
    left = next(entry for entry in report.left if entry.path == "model.norm")
    assert left.kind == "Doubled" and "unrecognised" in left.reason
    assert any(entry.kind == "Renamed" for entry in report.replaced)
    close(step(model, inputs)[0], wanted[0])


def test_instance_bound_forward_is_left():
    model = make()
    norm, head = model.model.norm, model.lm_head
    norm.forward = original = lambda x: 3 * x
    head.forward = head_forward = lambda x: nn.functional.linear(x, head.weight) + 1
    report = apply(model)
    reasons = {entry.path: entry.reason for entry in report.left}
    assert "bound to the instance" in reasons["model.norm"]
    assert "bound to the instance" in reasons["lm_head"]
    undo(model)
    assert norm.forward is original and head.forward is head_forward


class QuantisedLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.round())


def test_quantised_heads_are_left():
    model = make()
    model.lm_head.weight = nn.Parameter(torch.zeros(97, 32, dtype=torch.uint8), requires_grad=False)
    assert "uint8" in apply(model).left[0].reason
    assert "_loss_function" not in model.__dict__


def test_odd_modules_are_left_with_a_reason():
    model = make()
    model.model.norm.variance_epsilon = None
    model.model.layers[0].mlp.act_fn = nn.Mish()
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    reasons = {entry.path: entry.reason for entry in apply(model).left}
    assert "not a number" in reasons["model.norm"]
    assert "Mish" in reasons["model.layers.0.mlp"]
    assert "hooks" in reasons["model.layers.1.mlp"]


def test_tensor_subclass_weights_keep_stock_arithmetic():
    class Wrapped(torch.Tensor):
        pass

    model = make()
    inputs = batch()
    wanted = step(model, inputs)
    report = apply(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Wrapped))
    close(torch.Tensor(step(model, inputs)[0]), wanted[0])
    assert report.head_calls.lazy == 0


def test_what_is_no_model_or_no_boolean_is_refused():
    """Nothing is modified."""
    model = make()
    slots = "norm mlp rope loss experts router qkv qk_norm hyper lora"
    for option in (*slots.split(), "strict"):
        with pytest.raises(tigon.Error, match=rf"^\[apply\] {option} must be True or False, got int"):
            apply(model, **{option: 2})
    assert not any(bound(module) for module in model.modules())
    for function in (apply, undo):
        with pytest.raises(
            tigon.Error, match=rf"^\[{function.__name__}\] model must be a torch.nn.Module, got"
        ):
            function(None)
