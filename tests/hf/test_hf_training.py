"""Thirty steps of a tiny Llama, stock against patched."""

import copy

import pytest
import torch
from tiny import batch, double, make

from tigon.integrations.transformers import apply

STEPS = 30


def train(model, device):
    """Losses of thirty AdamW steps on thirty batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    losses = []
    for i in range(STEPS):
        loss = model(**batch(device, rows=4, tokens=16, seed=i % 5)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double())
    return torch.stack(losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_thirty_steps_follow_stock(dtype, device):
    """The curve of the patched model is as near to the fp64 curve as stock's own.

    Bound: at every step, the largest distance of stock's losses from the losses of the same run
    in fp64, twice (house rule), and one unit in the last place of the loss for each replaced place.
    """
    stock = make(device=device, dtype=dtype)
    start, exact_model = copy.deepcopy(stock), double(stock)
    wanted, exact = train(stock, device), train(exact_model, device)
    patched = start
    report = apply(patched)
    got = train(patched, device)
    ulp = torch.finfo(dtype).eps
    bound = 2 * (wanted - exact).abs().max() + len(report.replaced) * ulp * exact.max()
    assert (got - exact).abs().max() <= bound
    assert (got - wanted).abs().max() <= 2 * bound
    assert got[-1] < 0.8 * got[0], "the model learns"
    assert report.head_calls.fused == STEPS
    assert report.head_calls.materialised == 0
    report.check()
