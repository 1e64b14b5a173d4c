"""bench/medusa.py on a tiny configuration: providers agree, errors are records, the table has every case."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import medusa as bench  # before examples/medusa.py on pytest's path

TINY = (
    "hidden_size=32,intermediate_size=48,num_attention_heads=4,num_key_value_heads=2,vocab_size=97,head_dim=8"
)


@pytest.fixture
def words(tmp_path):
    options = f"--device cpu --layers 1 --set {TINY} --steps 2 --lengths 16 --heads 2 --dtype float32"
    return [*options.split(), "--out", str(tmp_path / "medusa.jsonl")]


@pytest.mark.parametrize("stage", ["1", "2"])
def test_providers_agree(words, stage):
    """Tigon's losses are stock's."""
    args = bench.parse([*words, "--stages", stage, "--providers", "stock,tigon"])
    stock, tigon = (bench.run_case(case) for case in bench.cases(args))
    assert tigon["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert len(tigon["losses"]) == bench.WARMUP + 2 and tigon["tokens_per_s"] > 0


def test_flops(words):
    """Counted by hand: a frozen model has one pass and no head, a block on it no gradient of its input."""
    config = bench.e2e.MODELS["llama3-8b"] | {"vocab_size": 97, "hidden_size": 32}
    record = {"heads": 2, "stage": 1}
    assert bench.work(record, config) == {"passes": (1, 1), "head": 0.0, "others": 2 * (4 * 32 + 6 * 97) * 32}
    assert bench.work(record | {"stage": 2}, config) == {"others": 2 * 6 * (32 + 97) * 32}


@pytest.mark.slow
def test_a_run(words, capsys):
    command = [*words, "--stages", "1", "--providers", "liger,tigon"]
    assert bench.main(command) == 0
    path = Path(words[-1])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["provider"] for r in records] == ["liger", "tigon"]
    assert "tokens_per_s" in records[1] and len(records[1]["losses"]) == bench.WARMUP + 2
    shown = capsys.readouterr().out
    assert "stage 1, 2 heads | 1 x 16 |" in shown and "tokens/s" in shown
    before = path.read_text()
    assert bench.main([*command, "--providers", "tigon"]) == 0 and path.read_text() == before
    assert bench.main(["--table", str(path)]) == 0
