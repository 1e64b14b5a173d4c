"""bench/fp8.py on a tiny configuration: the layer, its bare matmuls, microbatches; tables name them."""

import pytest

pytest.importorskip("transformers")
import fp8 as bench
import timing
import torch
from files import MARKS
from tables import ms

from tigon.integrations.transformers import fp8
from tigon.ops import fp8_linear

TINY = "hidden_size=64,intermediate_size=96,num_attention_heads=4,num_key_value_heads=2,vocab_size=97"


@pytest.fixture
def words(monkeypatch):
    monkeypatch.setattr(fp8, "gains", lambda rows, columns: True)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "LEAST_DECIBELS", 10)
    return ["--device", "cpu", "--batch", "2", "--seq", "16", "--layers", "1", "--set", TINY]


def test_a_layer_and_microbatches(words, monkeypatch):
    """Every record has its own key, and the tables divide by the matmuls and by four times one."""
    monkeypatch.setattr(timing, "median_ms", lambda call, device: call(0) or 2.0)
    records = list(bench.measured(bench.parse(words)))
    ways = [r["way"] for r in records]
    assert ways[:4] == ["fp8 matmuls", "fp8", "bf16 matmuls", "bf16"]
    assert ways[4:] == ["bf16", "bf16", "rowwise", "rowwise"]
    assert len({bench.key(r) for r in records}) == 8 and {r["fp8"] for r in records} == set(bench.PARTS)
    assert all(next(kind for mark, kind in MARKS.items() if mark in r) == "fp8" for r in records)
    lines = bench.parts(records).splitlines()
    assert f"| fp8 | {ms(2.0)} | {ms(2.0)} | 1.000 |" in lines
    assert f"| rowwise | {ms(2.0)} | {ms(2.0)} | 0.250 |" in lines


def test_matmuls_are_those_of_the_op(words):
    """The bytes given to the bare matmuls make the op's result and gradients."""
    torch.manual_seed(0)
    x, weight = torch.randn(32, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    dy, made = torch.randn(32, 48).bfloat16(), []
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = fp8_linear.fp8_linear(*leaves)
    y.backward(dy)
    call = bench.matmuls_fp8([(x, weight, dy)], library=False)
    originals = fp8_linear._fwd, fp8_linear._bwd

    def noted(original, first):
        def run(*given):
            found = original(*given)
            made.append(found[0] if first else found)
            return found

        return run

    try:
        fp8_linear._fwd, fp8_linear._bwd = (noted(of, i == 1) for i, of in enumerate(originals))
        call(0)
    finally:
        fp8_linear._fwd, fp8_linear._bwd = originals
    for got, want in zip(made, (y, leaves[0].grad, leaves[1].grad), strict=True):
        assert torch.equal(got, want)
