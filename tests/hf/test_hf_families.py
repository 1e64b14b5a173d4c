"""Every family: what is replaced, and loss and all gradients against stock and fp64."""

import copy

import pytest
import torch
from tiny import FAMILIES, assert_step_as_good, batch, double, make, same_bits, step

from tigon.integrations.transformers import apply, undo

SLOTS = ("norm", "mlp", "rope", "loss", "experts")
# How many places of a two-layer model are replaced.
REPLACED = {
    **dict.fromkeys(FAMILIES, (5, 2, 1, 1, 0)),
    **dict.fromkeys(("gemma2", "olmo2"), (9, 2, 1, 1, 0)),
    "qwen3": (9, 2, 1, 1, 0),  # with the norms of q and k
    "mixtral": (5, 0, 1, 1, 2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_step_is_as_good_as_stock(family, device):
    stock = make(family, device=device)
    inputs = batch(device)
    wanted, exact = step(stock, inputs), step(double(stock), inputs)
    patched = copy.deepcopy(stock)
    report = apply(patched)
    assert tuple(report.count(slot) for slot in SLOTS) == REPLACED[family] and not report.left, str(report)
    got = step(patched, inputs)
    assert report.head_calls.fused == 1
    assert report.head_calls.materialised == 0
    assert_step_as_good(got, wanted, exact, len(report.replaced))
    undo(patched)
    same_bits(step(patched, inputs), wanted)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "olmo2"])
def test_bf16_step_is_as_good_as_stock(family, device):
    stock = make(family, device=device, dtype=torch.bfloat16)
    inputs = batch(device)
    wanted, exact = step(stock, inputs), step(double(stock), inputs)
    places = len(apply(stock).replaced)
    assert_step_as_good(step(stock, inputs), wanted, exact, places, ulp=2.0**-8)
