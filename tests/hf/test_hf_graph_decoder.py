"""Graphs of the decoder below a head, for callers that compute the loss themselves."""

import copy
import pickle
import types

import pytest
import torch
from graph_cases import held, inputs, near, pair, same_steps
from tiny import VOCABULARY, step
from torch import nn

import tigon
from tigon.integrations.transformers import apply
from tigon.integrations.transformers.graphs import GRAPHS

pytestmark = pytest.mark.usefixtures("recorder")


def of_decoder(model):
    return vars(model.model)[GRAPHS]


def of_hidden(model, given):
    """As TRL's trainers: hidden states, then a head of their own."""
    labels = given.pop("labels")
    hidden = model.model(**given).last_hidden_state
    return tigon.linear_cross_entropy(hidden, model.lm_head.weight, labels, shift=True)


def of_logits(model, given):
    logits = model(**given).logits
    return logits.float().logsumexp(-1).mul(given["labels"] != -100).mean()


def of_both(model, given):
    out = model(**given)
    return out.loss + 0.1 * out.logits.float().square().mean()


def fused(model, given):
    labels = given.pop("labels")
    logits = model(**given).logits
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("loss", [of_hidden, of_logits, of_both, fused])
def test_a_loss_of_the_program(loss):
    model, twin = pair()
    for m in (model, twin):
        apply(m, lazy_logits=loss is fused)
    same_steps((model, twin), range(8), loss_of=loss)
    assert held(twin).replays == 0 and of_decoder(twin).replays >= 4
    assert any("Qwen3Model: 1 captured" in line for line in held(twin).lines())


def test_shorter_rows():
    """What is upstream of hidden states ends where they do; masks of padding are left out."""
    model, twin = pair(attn_implementation="sdpa", use_cache=False)
    for seed, tokens in enumerate([36, 40, 33, 39, 37, 34]):
        results = []
        for m in (model, twin):
            given = inputs(seed, tokens)
            mask = torch.ones(2, tokens, dtype=torch.long)
            mask[1, -5:] = 0
            given["labels"] = given["labels"].masked_fill(mask == 0, -100)
            results.append(step(m, given | {"attention_mask": mask}, of_hidden))
        near(*reversed(results))
    assert of_decoder(twin).captures == 1 and of_decoder(twin).replays == 4


def test_a_whole_model_keeps_its_own():
    """The decoder's graphs stay out of calls with labels, and of evaluation."""
    _, twin = pair()
    for seed in range(5):
        twin(**inputs(seed)).loss.backward()
    twin.eval()
    with torch.no_grad():
        twin(**inputs(0))
        twin.model(input_ids=inputs(0)["input_ids"])
    assert held(twin).replays == 3 and of_decoder(twin).captures == 0


def test_changes_and_copies():
    model, twin = pair()
    for seed in range(4):
        step(twin, inputs(seed), of_hidden)
    replays = of_decoder(twin).replays
    assert replays > 0
    for m in (model, twin):
        m.model.layers[0].self_attn.scaling *= 2
    same_steps((model, twin), range(3), loss_of=of_hidden)
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert of_decoder(other).outer is held(other) is not held(twin)
        same_steps((model, other), range(4), loss_of=of_hidden)
        assert of_decoder(other).replays > 0


def test_a_forward_that_somebody_replaces():
    """TRL's: it calls the decoder, and the patched forward for everything else."""
    model, twin = pair("llama")
    for m in (model, twin):
        before = m.forward

        def fused_forward(self, *args, fused_lm_head=False, before=before, **kwargs):
            return of_hidden(self, kwargs) if fused_lm_head else before(*args, **kwargs)

        m.forward = types.MethodType(fused_forward, m)
    same_steps((model, twin), range(6), loss_of=lambda m, given: m(fused_lm_head=True, **given))
    assert of_decoder(twin).replays == 4
