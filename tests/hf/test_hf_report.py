"""What `apply` says: its report, what it leaves with a reason, what it refuses, and what is logged."""

import pickle

import pytest
import torch
from test_hf_apply_again import Doubled
from tiny import apply_as_stock, batch, make, step
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tigon
from tigon.integrations.transformers import apply, undo
from tigon.integrations.transformers.forward import bound


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


def test_report_can_be_pickled():
    report = apply(make())
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_patch_that_patched_nothing_does_not_stay_silent():
    model = make()
    report = apply(model)
    with pytest.raises(tigon.Error, match="0 fused losses"):
        report.check()
    step(model, batch())
    report.check()
    assert int(report.head_calls) == report.head_calls.fused == 1


class QuantisedLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.round())


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


class Renamed(LlamaRMSNorm):
    """A subclass that changes nothing."""


def test_subclasses():
    model = make()
    model.model.norm = Doubled(32)
    model.model.layers[0].input_layernorm = Renamed(32)
    report = apply_as_stock(model, batch())
    left = next(entry for entry in report.left if entry.path == "model.norm")
    assert left.kind == "Doubled" and "unrecognised" in left.reason
    assert any(entry.kind == "Renamed" for entry in report.replaced)


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


def test_a_slot_that_finds_nothing():
    """Asked for by name it has an entry, and strict raises; of what is looked for anyway none."""
    model = make("llama")
    report = apply(model, strict=True)
    assert not report.left
    report = apply(model, experts=True, hyper=True)
    left = {entry.slot: entry.reason for entry in report.left}
    assert left == dict.fromkeys(("experts", "hyper"), "nothing of this kind was found")
    assert "experts LlamaForCausalLM left: nothing of this kind" in str(report)
    with pytest.raises(tigon.Error, match=r"LlamaForCausalLM: nothing of this kind was found"):
        apply(model, lora=True, strict=True)
    report = apply(make("qwen3"), qk_norm=True, rope=False)
    assert [(e.slot, e.reason) for e in report.left] == [("qk_norm", "qk_norm needs the slots norm and rope")]


# --- what is logged ---------------------------------------------------------------------------


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == "tigon"]


def by_interface(model):
    from tigon.integrations.liger import patching

    patching._apply_liger_kernel_to_instance(model)


@pytest.mark.parametrize("entrance", [apply, by_interface])
def test_an_unfused_head_says_so_once(entrance, caplog):
    """With the reason and what to do, by every entrance."""
    model, inputs = make(), batch()
    entrance(model)
    for _ in range(3):
        model(inputs["input_ids"]).logits.sum().backward()
    (text,) = said(caplog)
    assert "computes all logits in training" in text and "without labels" in text and "lazy_logits" in text


def test_a_reader_of_logits_is_named_once(caplog):
    model, inputs = make(), batch()
    apply(model)
    for _ in range(3):
        assert (model(**inputs).logits + 0).shape == (2, 11, 97)
    (text,) = said(caplog)
    assert "test_hf_report, line" in text and "reads output.logits" in text


def test_a_head_that_stays_stock_is_named(caplog):
    model = make()
    model.lm_head = nn.Sequential(model.lm_head)
    for _ in range(2):
        apply(model)
    (text,) = said(caplog)
    assert "lm_head stays stock: the head is Sequential" in text


def test_tracing_says_so_too(caplog, monkeypatch):
    from tigon.integrations.transformers import report

    monkeypatch.setattr(report, "_traced", set())
    torch._dynamo.reset()
    model, inputs = make(num_hidden_layers=1), batch()
    apply(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(inputs["input_ids"]).logits.sum().backward()
    (text,) = said(caplog)
    assert "without labels" in text


def test_a_fused_head_says_nothing(caplog):
    model, inputs = make(), batch()
    apply(model)
    step(model, inputs)
    assert not said(caplog)
