"""bench/parallel_e2e.py, small, in two processes over gloo; what bench/parallel.py takes for exposed."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ranks import run_ranks

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.append(str(BENCH))
SMALL = "hidden_size=64,intermediate_size=96,num_attention_heads=4,num_key_value_heads=2,vocab_size=256"


@pytest.mark.slow
@pytest.mark.xdist_group("two processes")
def test_models_on_two_processes(tmp_path):
    """Every layout that is installed: the losses of stock and Tigon are one, each case is a record."""
    pytest.importorskip("transformers")
    layouts = ["fsdp2", "megatron_sp", "megatron_ddp"] if find_spec("megatron") else ["fsdp2"]
    words = ["--layouts", ",".join(layouts), "--providers", "stock,tigon", "--layers", 1, "--seq", 32]
    words += ["--steps", 1, "--set", SMALL, "--out", tmp_path / "out.jsonl"]
    said, _ = run_ranks(BENCH / "parallel_e2e.py", words, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(r["layout"], r["provider"]) for r in records] == [
        (layout, provider) for layout in layouts for provider in ("stock", "tigon")
    ]
    for stock, tigon in zip(records[::2], records[1::2], strict=True):
        assert "error" not in tigon and tigon["losses"] == pytest.approx(stock["losses"], rel=2e-5)
        assert tigon["tokens_per_s"] > 0 and tigon["gpus"] == 2 and any("loss" in r for r in tigon["report"])
    assert f"| fsdp2, llama3-8b, 1 layers, {SMALL.replace(',', ', ')} | 2 | 2 x 32 |" in said


def test_uncovered():
    """Time of communication beside no other kernel."""
    pytest.importorskip("torch")
    import parallel

    assert parallel.uncovered([(0, 10), (20, 30)], [(5, 7), (6, 22), (29, 40)]) == 12
    assert parallel.uncovered([(0, 1)], []) == 1 and parallel.uncovered([], [(0, 1)]) == 0
