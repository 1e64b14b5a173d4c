"""bench/fp8_accuracy.py on a tiny configuration: runs are comparable, and the table says which are inside."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
import fp8_accuracy as bench
import numpy as np
import torch

from tigon.integrations.transformers import fp8

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


MODELS = {
    "300m": ("llama3-8b", 2, 26, dict(zip(bench.FP8, (2, 1, 1, 1), strict=True)), TINY),
    "moments": ("llama3-8b", 2, 26, dict(zip(bench.MOMENTS, (2, 1, 1, 1), strict=True)), TINY),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    monkeypatch.setattr(fp8, "gains", fp8.gains)  # which the program replaces
    text = torch.randint(97, (16, 512), generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "tokens.npy", text.flatten().int().numpy())
    monkeypatch.setattr(bench, "tokens", lambda: (tmp_path / "tokens.npy", text[:4]))
    monkeypatch.setattr(bench, "MODELS", MODELS)


@pytest.mark.slow
def test_runs_and_their_table():
    words = ["--device", "cpu", "--parts", "300m", "--ways", "bf16,rowwise,rowwise_qk_bf16", "--batch", "1"]
    found = bench.cases(bench.parse(words))
    plain, other, quick, attention = records = [case | bench.run_case(case) for case in found]
    assert len({str(r["losses"]) for r in records}) == 4 and len(quick["losses"]) == 26
    first = [r["losses"][0] for r in records]
    assert first[0] == pytest.approx(first[2], rel=1e-2) and first[0] != first[1]
    assert min(quick["noise"]["rowwise"].values()) < 30 < min(quick["noise"]["bf16"].values())
    assert {"output", "x", "self_attn.q_proj.weight", "mlp.down_proj.weight"} < set(quick["noise"]["rowwise"])
    assert bench.compared({**quick, "losses": [9.0] * 26}, [plain, other])[2] == "**no**"
    assert attention["way"] == "rowwise_qk_bf16" and attention["noise"].keys() == quick["noise"].keys()
    rows = [line for line in bench.table(records).splitlines() if line.startswith("| rowwise")]
    assert [row.split(" | ")[:2] for row in rows[:2]] == [
        ["| rowwise", "0"],
        ["| rowwise, q and k in bf16", "0"],
    ]


def test_moments():
    """Each way to keep moments is a run of its own beside those of float32, without a layer's noise."""
    found = bench.cases(
        bench.parse(["--device", "cpu", "--parts", "moments", "--steps", "3", "--batch", "1"])
    )
    assert [(case["way"], case["seed"]) for case in found[1:]] == [
        ("moments_float32", 1),
        *((way, 0) for way in list(bench.MOMENTS)[1:]),
    ]
    runs = [case | bench.run_case(case) for case in found[1:]]
    assert all("noise" not in run and len(run["losses"]) == 3 for run in runs)
    assert len({str(run["losses"]) for run in runs}) == 4
    assert "moments_int8 | 0" in bench.table(runs) and "signal" not in bench.table(runs)
