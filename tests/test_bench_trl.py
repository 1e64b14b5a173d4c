"""bench/trl_trainers.py on a tiny configuration: every trainer steps, and Tigon's gradients are TRL's."""

import json
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")
import trl_trainers as bench

TINY = (
    "hidden_size=32,intermediate_size=48,num_attention_heads=4,num_key_value_heads=2,vocab_size=97,head_dim=8"
)


@pytest.fixture
def words(tmp_path):
    options = f"--device cpu --layers 1 --set {TINY} --steps 1 --batch 4 --seq 16 --prompt 4 --dtype float32"
    return [*options.split(), "--providers", "trl,tigon", "--out", str(tmp_path / "trl.jsonl")]


@pytest.mark.parametrize("trainer", bench.TRAINERS)
def test_providers_agree(trainer, words):
    """Norms of gradients after the same tokens, and that it was Tigon's head."""
    from tigon.integrations import trl

    stock, ours = bench.cases(bench.parse([*words, "--trainers", trainer]))
    theirs = bench.run_case(stock)
    try:
        mine = bench.run_case(ours)
    finally:
        trl.uninstall()
    assert mine["gradient_norms"] == pytest.approx(theirs["gradient_norms"], rel=1e-3)
    assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-4, abs=1e-6)
    assert len(mine["losses"]) == bench.WARMUP + 1 and len(mine["step_ms"]) == 1
    assert min(theirs["gradient_norms"]) > 0 and (mine["heads"] or trainer == "gkd")


def test_drawn_data(words):
    """Rows of exactly the tokens asked for, end included."""
    (case, _) = bench.cases(bench.parse([*words, "--trainers", "dpo"]))
    tokenizer = bench.tokenizer(97)
    rows = bench.Tokens(case, 97).rows()
    assert len(rows["prompt"]) == (bench.WARMUP + 1) * 2
    for prompt, chosen in zip(rows["prompt"], rows["chosen"], strict=True):
        assert len(tokenizer(prompt + chosen)["input_ids"]) == 15
        assert tokenizer.decode(tokenizer(chosen)["input_ids"]).split() == chosen.split()


@pytest.mark.slow
def test_a_run(words, capsys):
    """Processes of their own; a provider that is not there leaves a record."""
    command = [*words, "--trainers", "sft", "--providers", "liger,tigon"]
    assert bench.main(command) == 0
    liger, tigon = (json.loads(line) for line in Path(words[-1]).read_text().splitlines())
    assert liger["provider"] == "liger" and ("error" in liger or "step_ms" in liger)
    assert tigon["tokens_per_s"] > 0 and "| 4 x 16 |" in capsys.readouterr().out
    assert bench.main(["--table", words[-1]]) == 0
