"""bench/convergence.py, short: two families learn what stock learns, and what does not is told apart."""

import json

import pytest
import torch

import tigon

pytest.importorskip("transformers")
import convergence

SHORT = "--steps 12 --batch 2 --seq 16 --runs 3 --patched-runs 2 --families llama,qwen3_moe --dtypes float32"


def test_two_families(tmp_path, capsys):
    """Program, records and table. Twice the band: it is half a unit of the loss in so few steps."""
    code = convergence.main([*SHORT.split(), "--out", str(tmp_path / "c.jsonl")])
    records = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert [r["family"] for r in records] == ["llama", "qwen3_moe"]
    assert code == int(not all(r["inside"] for r in records))
    for r in records:
        assert (len(r["stock"]), len(r["tigon"]), len(r["tigon"][0])) == (3, 2, 12)
        assert r["band"] < 1e-6 and r["distance"] <= 2 * r["band"] and r["left"] == 0 and r["replaced"] >= 9
        assert r["stock"][0] != r["stock"][1], "the order of the sums changes nothing"
        for name in ("logits", "weights"):
            assert 0 < r[f"{name}_band"] < 1e-3 and r[f"{name}_distance"] <= 2 * r[f"{name}_band"]
    assert "of 2 are inside" in capsys.readouterr().out
    convergence.draw(records, tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_verdict():
    """Inside as long as the median of the patched runs' distances is within the widest pair of stock."""
    stock = [[2.0, 1.0], [2.0, 1.1], [2.0, 1.05]]
    assert convergence.verdict(stock, [[2.0, 1.02]])["inside"]
    assert not convergence.verdict(stock, [[2.0, 1.3]])["inside"]
    assert convergence.verdict(stock, [[2.0, 1.3], [2.0, 1.02], [2.0, 1.07]])["inside"], (
        "one odd run of three"
    )
    assert not convergence.verdict([[2.0, 2.0], [2.0, 2.1]], [[2.0, 2.0]])["inside"], "it does not learn"


def test_ends_count():
    """Equal losses do not help where the last weights differ; runs are compared in one order of features."""
    stock = [[2.0, 1.0], [2.0, 1.1]]
    runs = [{"logits": torch.ones(3), "weights": torch.tensor([1.0, w])} for w in (1.0, 1.1, 1.5)]
    assert convergence.verdict(stock, stock[:1], {"stock": runs[:2], "tigon": runs[1:2]})["inside"]
    assert not convergence.verdict(stock, stock[:1], {"stock": runs[:2], "tigon": runs[2:]})["inside"]
    args = convergence.parse(SHORT.split())
    ids = convergence.batches(args)[0]
    model = convergence.build("llama", args, "float32").eval()
    first = convergence.end(model, ids, None)
    convergence.shuffle_features(model, 3)
    again = convergence.end(model, ids, 3)
    assert torch.equal(first["weights"], again["weights"])
    assert convergence.apart(again["logits"], first["logits"]) < 1e-5


def test_distance_from_float32():
    """Of 16-bit records whose family was run in float32 before; the table shows it."""
    exact = {"family": "llama", "dtype": "float32", "stock": [[2.0, 1.0]], "tigon": [[2.0, 1.0]]}
    exact |= {"band": 1e-6, "distance": 1e-7, "inside": True}
    half = exact | {"dtype": "bfloat16", "stock": [[2.0, 1.1]], "tigon": [[2.0, 1.2]], "inside": False}
    assert convergence.from_float32(dict(half), []) == half
    half = convergence.from_float32(half, [exact])
    assert half["stock_from_float32"] == pytest.approx(0.1 / 2**0.5)
    assert half["tigon_from_float32"] == pytest.approx(0.2 / 2**0.5)
    lines = convergence.table([exact, half]).splitlines()
    assert "| 7.1e-02 | 1.4e-01 | **no** |" in lines[3] and lines[-1].startswith("1 of 2")


def test_plain_formulas_are_told_apart():
    """In bfloat16 the formulas without kernels are Tigon to within the band; then the kernels are back."""
    words = SHORT.replace("float32", "bfloat16") + " --plain-runs 2"
    args = convergence.parse(words.split())
    kernels = tigon.ops.glu.has_kernel
    record = convergence.compare("llama", "bfloat16", convergence.batches(args), args)
    assert tigon.ops.glu.has_kernel is kernels
    assert len(record["plain"]) == 2 and record["plain"] != record["tigon"]
    assert record["tigon_from_plain"] <= 2 * record["band"]
    assert "plain" in convergence.table([record])


@pytest.mark.parametrize("wrong", ["eps", "lost gradient"])
def test_a_small_fault_is_outside(wrong, monkeypatch):
    """An eps of 2e-5 instead of 1e-6, or one weight of many without its gradient."""
    apply = tigon.apply

    def faulty(model):
        report = apply(model)
        if wrong == "eps":
            for module in model.modules():
                if hasattr(module, "variance_epsilon"):
                    module.variance_epsilon = 2e-5
        else:
            model.model.layers[1].self_attn.k_proj.weight.requires_grad_(False)
        return report

    monkeypatch.setattr(tigon, "apply", faulty)
    args = convergence.parse(SHORT.split())
    record = convergence.compare("llama", "float32", convergence.batches(args), args)
    assert not record["inside"] and record["distance"] > 10 * record["band"]


@pytest.mark.parametrize("family", convergence.FAMILIES)
def test_permuted_features_are_the_same_function(family):
    """The first loss agrees to rounding: nothing but the order of the sums has changed."""
    args = convergence.parse(SHORT.split())
    ids = convergence.batches(args)[0]
    model = convergence.build(family, args, "float32").eval()
    with torch.no_grad():
        before = model(input_ids=ids, labels=ids).loss.item()
        convergence.shuffle_features(model, 3)
        after = model(input_ids=ids, labels=ids).loss.item()
        model.get_output_embeddings().weight.copy_(model.get_output_embeddings().weight.roll(1, 1))
        other = model(input_ids=ids, labels=ids).loss.item()
    assert before == pytest.approx(after, rel=convergence.FIRST["float32"])
    assert before != pytest.approx(other, rel=convergence.FIRST["float32"])
