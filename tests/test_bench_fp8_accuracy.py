"""bench/fp8_accuracy.py on a tiny configuration: runs are comparable, and the table says which are inside."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
import fp8_accuracy as bench
import store

TINY = (
    "hidden_size=32,intermediate_size=48,num_attention_heads=4,num_key_value_heads=2,num_hidden_layers=2,"
    "vocab_size=8192"
)


def test_runs_and_their_table(tmp_path):
    out = tmp_path / "out.jsonl"
    words = f"--device cpu --set {TINY} --steps 26 --batch 2 --seq 16 --held 4 --out {out} --cases"
    cases = "300m:bf16:0,300m:bf16:1,300m:rowwise:0"
    assert bench.main([*words.split(), cases, "--data", str(store.ROOT / "docs/fp8.md")]) == 0
    plain, other, fp8 = store.read(out, bench.key)
    assert plain["linears"] == 0 and fp8["linears"] == 14 and len(fp8["losses"]) == 26
    assert plain["losses"][0] == pytest.approx(fp8["losses"][0], rel=1e-2)
    assert len({str(r["losses"]) for r in (plain, other, fp8)}) == 3
    noise = fp8["noise"]
    assert set(noise["rowwise"]) == {"output", "x"} | {n for n in noise["bf16"] if n.endswith("weight")}
    assert min(noise["rowwise"].values()) < min(noise["bf16"].values())
    found = bench.verdict(fp8 | {"losses": [9.0] * 26}, [plain, other])
    assert not found["inside"] and bench.table(store.read(out)).count("\n| rowwise | 0 |") == 1
