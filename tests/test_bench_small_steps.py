"""bench/small_steps.py on a tiny configuration: the ways of a step agree, and the table has them."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")
import small_steps as bench

TINY = (
    "hidden_size=32,intermediate_size=48,num_attention_heads=4,num_key_value_heads=2,vocab_size=300,"
    "head_dim=8,num_hidden_layers=1"
)


@pytest.mark.parametrize("under", ["loop", "trainer", pytest.param("trl", marks=pytest.mark.slow)])
def test_ways_agree(under, monkeypatch):
    """Losses of Tigon, with and without graphs, are those of stock."""
    monkeypatch.setattr(bench, "CASES", {"lora": ("llama3-8b", None, 4, 2, 16)})
    monkeypatch.setattr(bench, "SFT", ("qwen3-0.6b", None, 4, 2, 32))
    monkeypatch.setattr(bench, "WARMUP", dict.fromkeys(bench.WAYS, 2))
    words = f"--device cpu --dtype float32 --set {TINY} --steps 2 --under {under} --cases lora --ways"
    cases = bench.cases(bench.parse([*words.split(), "tigon,tigon_graphs,stock"]))
    records = [case | bench.run_case(case) for case in cases]
    ours, graphs, stock = (r["losses"] for r in records)
    assert ours == pytest.approx(stock, rel=1e-4) and graphs == pytest.approx(ours, rel=1e-6)
    assert len(ours) > 1 and min(bench.median(r) for r in records) > 0
    assert f"LoRA of rank 4{'' if under == 'loop' else ', T'}" in bench.table(records)
    assert all(" ms, 0.00 GB" in bench._line(r) for r in records)
