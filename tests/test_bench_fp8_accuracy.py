"""bench/fp8_accuracy.py on a tiny configuration: runs are comparable, and the table says which are inside."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
import fp8_accuracy as bench
import numpy as np
import torch

from tigon.integrations.transformers import fp8

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_runs_and_their_table(monkeypatch, tmp_path):
    monkeypatch.setattr(fp8, "gains", fp8.gains)  # which the program replaces
    text = torch.randint(97, (16, 512), generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "tokens.npy", text.flatten().int().numpy())
    monkeypatch.setattr(bench, "tokens", lambda: (tmp_path / "tokens.npy", text[:4]))
    monkeypatch.setattr(bench, "MODELS", {"300m": ("llama3-8b", 2, 26, (0, 1), (0,), TINY)})
    found = bench.cases(bench.parse(["--device", "cpu", "--ways", "bf16,rowwise"]))
    plain, other, quick = records = [case | bench.run_case(case) for case in found]
    assert len({str(r["losses"]) for r in records}) == 3 and len(quick["losses"]) == 26
    first = [r["losses"][0] for r in records]
    assert first[0] == pytest.approx(first[2], rel=1e-2) and first[0] != first[1]
    assert min(quick["noise"]["rowwise"].values()) < 30 < min(quick["noise"]["bf16"].values())
    assert {"output", "x", "self_attn.q_proj.weight", "mlp.down_proj.weight"} < set(quick["noise"]["rowwise"])
    assert bench.compared({**quick, "losses": [9.0] * 26}, [plain, other])[2] == "**no**"
    assert bench.table(records).count("| rowwise | 0 |") == 1
