"""bench/small_steps.py on a tiny configuration: the ways of a step agree, and the table has them."""

import argparse
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")
import processes
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


def test_nothing_gets_ready_while_a_case_runs(tmp_path):
    """A case begins when the processes started with it are ready: three at a time."""
    script = tmp_path / "case.py"
    script.write_text(
        f"import sys, time\nsys.path.insert(0, {str(Path(bench.__file__).parent)!r})\nimport processes\n"
        "def prepare(case):\n    time.sleep(0.3 * case['batch'])\n    case['ready'] = time.time()\n"
        "def run_case(case):\n    return {'began': time.time(), 'ready': case['ready']}\n"
        "processes.serve(*sys.argv[2:4], prepare, run_case)\n"
    )
    args = argparse.Namespace(again=True, budget=0, case_timeout=60.0)
    cases = [{"batch": n} for n in range(4)]
    found = list(processes.each(str(script), args, cases, lambda r: r["batch"], [], quiet=True))
    assert [r["batch"] for r in found] == [0, 1, 2, 3] and not processes.ready
    assert found[0]["began"] > max(r["ready"] for r in found[:3]), "not before the last one is ready"
    assert found[3]["ready"] > found[2]["began"]
