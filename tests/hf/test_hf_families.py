"""Every family: what is replaced, and loss and all gradients against stock and fp64."""

import copy

import pytest
import torch
from tiny import FAMILIES, assert_step_as_good, batch, double, make, step

from tigon.integrations.transformers import apply, undo

# norm, mlp, rope, loss: how many places of a two-layer model are replaced
REPLACED = {
    "llama": (5, 2, 1, 1),
    "llama_bias_tied": (5, 2, 1, 1),
    "mistral": (5, 2, 1, 1),
    "qwen2": (5, 2, 1, 1),
    "qwen3": (9, 2, 1, 1),  # with the norms of q and k
    "gemma": (5, 2, 1, 1),
    "gemma2": (9, 2, 1, 1),
    "phi3": (5, 2, 1, 1),
    "granite": (5, 2, 1, 1),
    "olmo2": (9, 2, 1, 1),
    "mixtral": (5, 0, 1, 1),  # experts
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_replaced_and_what_is_left(family):
    report = apply(make(family))
    slots = ("norm", "mlp", "rope", "loss")
    assert tuple(report.count(slot) for slot in slots) == REPLACED[family]
    assert not report.left, str(report)
    assert report.count("experts") == (2 if family == "mixtral" else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_step_is_as_good_as_stock(family, device):
    stock = make(family, device=device)
    inputs = batch(device)
    wanted, exact = step(stock, inputs), step(double(stock), inputs)
    patched = copy.deepcopy(stock)
    report = apply(patched)
    got = step(patched, inputs)
    assert report.head_calls.fused == 1
    assert report.head_calls.materialised == 0
    assert_step_as_good(got, wanted, exact, len(report.replaced))
    undo(patched)
    again = step(patched, inputs)
    assert torch.equal(again[0], wanted[0])
    assert all(torch.equal(again[1][name], grad) for name, grad in wanted[1].items())


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "olmo2"])
def test_bf16_step_is_as_good_as_stock(family, device):
    stock = make(family, device=device, dtype=torch.bfloat16)
    inputs = batch(device)
    wanted, exact = step(stock, inputs), step(double(stock), inputs)
    places = len(apply(stock).replaced)
    assert_step_as_good(step(stock, inputs), wanted, exact, places, ulp=2.0**-8)
