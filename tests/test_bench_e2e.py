"""bench/e2e.py on tiny configurations: records, errors, budget, table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "e2e.py"
pytest.importorskip("transformers")
spec = importlib.util.spec_from_file_location("bench_e2e", SCRIPT)
e2e = importlib.util.module_from_spec(spec)
spec.loader.exec_module(e2e)

TINY = ("hidden_size=32,intermediate_size=48,num_attention_heads=4,num_key_value_heads=2,vocab_size=97,"
        "head_dim=8")  # fmt: skip


@pytest.fixture
def words(tmp_path):
    options = f"--device cpu --layers 1 --set {TINY} --steps 2 --seq 16 --batches 2 --dtype float32"
    return [*options.split(), "--out", str(tmp_path / "e2e.jsonl")]


def records(words):
    return [json.loads(line) for line in Path(words[-1]).read_text().splitlines()]


def test_models_build_and_agree(words, monkeypatch):
    """Every published configuration, tiny: Tigon's losses are stock's."""
    for model in e2e.MODELS:
        args = e2e.parse([*words, "--models", model, "--providers", "stock,tigon"])
        stock, tigon = (e2e.run_case(case) for case in e2e.cases(args))
        assert tigon["losses"] == pytest.approx(stock["losses"], rel=1e-5), model
        assert tigon["tokens_per_s"] > 0 and len(tigon["step_ms"]) == 2
        assert any("loss" in line and "->" in line for line in tigon["report"])


def test_a_run(words, capsys):
    """Processes of their own; a provider that fails leaves a record and the others go on."""
    command = [*words, "--models", "llama3-8b", "--providers", "tigon,liger"]
    assert e2e.main(command) == 0
    one, two = records(words)
    assert one["provider"] == "tigon" and one["tokens_per_s"] > 0 and one["layers"] == 1
    assert "error" in two and two["provider"] == "liger"
    shown = capsys.readouterr().out
    assert "| llama3-8b, 1 layers | 2 x 16 |" in shown and "1 broken" in shown
    assert e2e.main([*command, "--budget", "0.0000001"]) == 0  # what is done is not done again
    assert len(records(words)) == 3 and "out of time" in records(words)[2]["error"]
    assert e2e.main(["--table", words[-1]]) == 0


def test_out_of_memory_ends_the_larger_batches(words, monkeypatch):
    seen = []

    def measure(case, timeout):
        seen.append((case["batch"], case["provider"]))
        failed = {"error": "OutOfMemoryError: ", "out_of_memory": True}
        fine = {"tokens_per_s": 1.0, "tokens_per_s_std": 0.0, "peak_gb": 1.0, "losses": [1.0]}
        return {**case, **(failed if case["provider"] == "stock" and case["batch"] > 4 else fine)}

    monkeypatch.setattr(e2e, "measure", measure)
    assert (
        e2e.main([*words, "--models", "qwen2-7b", "--batches", "4,8,16", "--providers", "stock,tigon"]) == 0
    )
    assert seen == [(4, "stock"), (4, "tigon"), (8, "stock"), (8, "tigon"), (16, "tigon")]
    text = e2e.table(e2e.read(Path(words[-1])))
    assert text.count("out of memory") == 2 and "1.00x, memory 1.00x" in text


def test_a_case_that_hangs_is_a_record(words):
    case = e2e.cases(e2e.parse([*words, "--models", "llama3-8b"]))[0]
    assert e2e.measure(case, 0.01)["error"] == "more than 0 s"


def test_wrong_names():
    with pytest.raises(SystemExit, match="llama5"):
        e2e.parse(["--models", "llama5"])
