"""The forward of a patched model called by itself, kept, wrapped and bound by others."""

import copy
import functools
import inspect
import itertools
import pickle
import types

import pytest
import torch
from tiny import adapted, apply_around, batch, close, make, same, step
from torch import nn

from conftest import allocations
from tigon.integrations.transformers import LazyLogits, apply, undo


class Wrapper(nn.Module):
    """What PEFT's tuners are before 0.21: they call the model's forward, past its hooks."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_base_model(self):
        return self.model

    def forward(self, *args, **kwargs):
        return self.model.forward(*args, **kwargs)


class Keeper(Wrapper):
    """What PEFT's adaption prompts are: the model's forward is theirs."""

    def __init__(self, model):
        super().__init__(model)
        self.forward = model.forward


ADAPTERS = {
    "lora": {},
    "dora": {"use_dora": True},
    "head_saved": {"modules_to_save": ["lm_head"]},
    "head_adapted": {"target_modules": ["q_proj", "lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [3, 5]}},
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ADAPTERS)
def test_a_step_under_peft_takes_less_than_its_logits(what, when):
    """With the PEFT that is installed, be it one that calls the model (0.21) or its forward (0.18, 0.20)."""
    options = {"r": 2, "target_modules": ["q_proj", "down_proj"]} | ADAPTERS[what]
    vocabulary, inputs = 4000, batch(rows=60, tokens=60)  # some chunks of the CPU

    def peak(patched):
        model = make(vocab_size=vocabulary, num_hidden_layers=1)
        report = apply(model) if patched and when == "before" else None
        model = adapted(model, **options)
        if patched:
            report = apply(model)
        results.append(step(model, inputs))
        assert report is None or report.head_calls.fused == report.head_calls.lazy == 1
        taken = itertools.accumulate(allocations(lambda: step(model, inputs)))
        return max(taken)

    results = []
    logits = 4 * vocabulary * inputs["input_ids"].numel()
    stock, ours = peak(False), peak(True)
    assert stock > 2 * logits and ours < logits, (stock / logits, ours / logits)
    close(results[1], results[0], ulps=512)


def copied(model):
    return copy.deepcopy(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    "wrapper", [lambda model: model, copied, pickled], ids=["itself", "copied", "pickled"]
)
@pytest.mark.parametrize("kind", [Wrapper, Keeper])
@pytest.mark.parametrize("when", ["before", "after"])
def test_forward_called_by_itself(kind, when, wrapper):
    model, inputs = make(), batch()
    wanted = step(model, inputs)
    if when == "before":
        apply(model)
    wrapped = kind(model)
    report = apply(wrapped)
    wrapped = wrapper(wrapped)
    same(step(wrapped, inputs), (wanted[0], {f"model.{name}": grad for name, grad in wanted[1].items()}))
    if wrapper is not pickled:  # a pickle has a report of its own
        assert (report.head_calls.fused, report.head_calls.lazy) == (1, 1)
    assert isinstance(wrapped(**inputs).logits, LazyLogits)
    assert wrapped(**inputs, skip_logits=True).logits is None
    undo(wrapped)
    again = step(wrapped, inputs)
    assert torch.equal(again[0], wanted[0]) and not isinstance(wrapped(**inputs).logits, LazyLogits)


def test_signature_is_stocks():
    """Beside it there is no hook; state dicts and files: test_hf_promises.py."""
    model = make()
    wanted = inspect.signature(model.forward)
    apply(model)
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert inspect.signature(model.forward) == wanted
    assert inspect.signature(copied(model).forward) == wanted


def test_wrapped_as_accelerate_does():
    """Autocast around the forward, a second apply, then accelerate's way out of its wrappers."""
    other = pytest.importorskip("accelerate.utils.other")
    model, inputs = make(), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(**inputs).loss
    report = apply(model)
    model._original_forward = model.forward
    assert not hasattr(model.forward, "__func__")  # accelerate would bind that to the model
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    torch.testing.assert_close(model(**inputs).loss, wanted, rtol=1e-2, atol=1e-2)
    assert apply(model) is report and report.head_calls.lazy == 1
    torch.testing.assert_close(model(**inputs).loss, wanted, rtol=1e-2, atol=1e-2)
    assert report.head_calls.lazy == report.head_calls.fused == 2
    stock = make()(**inputs).loss
    other.extract_model_from_parallel(model, keep_fp32_wrapper=False)
    close(model(**inputs).loss, stock)
    assert report.head_calls.fused == 3
    undo(model)
    assert torch.equal(model(**inputs).loss, stock) and report.head_calls.lazy == 3


def test_a_forward_of_the_instance_stays_below():
    """TRL and LLaMA-Factory bind forwards that take more keywords: before or after apply."""
    for when in ("before", "after"):
        model, inputs, seen = make(), batch(), []
        stock = model(**inputs).loss
        report = apply(model) if when == "after" else None
        inner = model.forward

        def forward(self, *args, more=None, inner=inner, seen=seen, **kwargs):
            seen.append(more)
            return inner(*args, **kwargs)

        model.forward = types.MethodType(forward, model)
        report = report or apply(model)
        assert "more" in inspect.signature(model.forward).parameters
        close(model(**inputs, more=3).loss, stock)
        assert seen == [3] and report.head_calls.fused == 1
        undo(model)
        assert torch.equal(model(**inputs).loss, stock) and seen == [3, None]
        report = apply(model)  # below the wrapper is what the first apply left
        close(model(**inputs, more=4).loss, stock)
        assert seen == [3, None, 4] and report.head_calls.fused == 1
        undo(model)
        assert torch.equal(model(**inputs).loss, stock)


def test_compiled_forward():
    """`model.forward = torch.compile(model.forward)`, as people write it."""
    torch._dynamo.reset()
    model, inputs = make(num_hidden_layers=1), batch()
    wanted = step(model, inputs)
    report = apply(model)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    for call in (model, functools.partial(model.forward)):
        close(call(**inputs).loss.detach(), wanted[0])
    assert report.head_calls.traced and not report.head_calls.materialised


def test_an_error_in_a_forward_leaves_nothing_behind():
    model, inputs = make(), batch()
    report = apply(model)
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        model.forward(**{**inputs, "inputs_embeds": torch.zeros(2, 11, 32)})
    assert not model.forward.spec[0].forwards
    model.forward(**inputs).loss.backward()
    assert report.head_calls.fused == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_adaption_prompts(when):
    """Other kinds of PEFT: test_hf_ecosystem.py and test_hf_lora.py."""
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(3)
        config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1)
        return peft.get_peft_model(model, config).train()

    wanted = step(adapted(make()), batch())
    model, report = apply_around(adapted, make(), when)
    same(step(model, batch()), wanted, ulps=512)
    calls = report.head_calls
    assert (calls.fused, calls.lazy, calls.materialised, calls.computed) == (1, 1, 0, 0)
