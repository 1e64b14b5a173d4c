"""docs/results, docs/paper.md and the table of README are what their programs write from the data."""

import graphlib
import importlib
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
import age
import cards
import commands
import e2e
import figures as paper
import readme
import results
import store
import tables

RECORD = {"op": "new_op", "dtype": "bf16", "gpu": "none", "torch": "2", "commit": "abc1234", "limit_ms": 0.5}


@pytest.fixture(scope="module")
def data():
    """Every file of results."""
    return results.runs(results.DATA)


def test_pages_are_current(data):
    """The committed pages and README's table are those of the committed data: else run `make results`."""
    assert results.outdated(data) == []


def test_commands_of_records(data, monkeypatch):
    """Every command line that the records name is one that its program takes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(store, "device_name", str)
    for run in data:
        for command in commands.command_lines(run):
            words = shlex.split(command)
            script = next((Path(word).stem for word in words if word.startswith("bench/")), None)
            assert script or words[:2] == ["make", "train"], command
            if script:
                importlib.import_module(script).parse(words[words.index(f"bench/{script}.py") + 1 :])


def test_marks(data, monkeypatch):
    """Records name commits that exist; what is older than its code is listed, also without history."""
    assert age.errors(data) == []
    (run,) = (run for run in data if run.name == "bench/results/h200/rows.jsonl")
    assert "f17203a (2026-11-22), older than its code" in age.mark(run, "softmax")
    known = age.history([run])
    monkeypatch.setattr(age, "FILE", SimpleNamespace(read_text=lambda: age.text({})))
    assert age.whole_history() is False or age.errors([run]) == [
        "make results writes bench/commits.json anew"
    ]
    monkeypatch.setattr(age, "measured", lambda run: {("softmax", "0000001", False)})
    assert age.whole_history() is False or age.errors([run]) == ["no commit 0000001, which records name"]
    monkeypatch.setattr(age, "git", lambda *words: None)
    assert age.errors([run]) == [] and known


def test_no_circle_of_imports():
    """The modules of bench have an order in which each imports earlier ones only."""
    graph = {}
    for path in (ROOT / "bench").glob("*.py"):
        imported = re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
        graph[path.stem] = {name for name in imported if (ROOT / f"bench/{name}.py").exists()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(graph)


def test_paper_is_current():
    """docs/paper.md is that of the committed data: else run `make figures`."""
    assert paper.PAGE.read_text() == paper.page()


def test_images_are_shown(data):
    """Every picture that a page shows exists, and docs/img holds no other."""
    drawn = {name for file_images in results.images(data).values() for name in file_images}
    drawn |= paper.pictures().keys() | readme.PICTURES.keys()
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    shown = {Path(target).name for text in texts for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)}
    shown -= {
        path.name for folder in ("drawings", "notebooks") for path in (ROOT / "docs" / folder).iterdir()
    }
    assert {path.name for path in results.IMAGES.iterdir()} == drawn == shown


def test_new_files_are_taken_up(tmp_path):
    """Files of a new op and of bench/host.py get pages; a case behind a peer is listed and marked."""
    times = {("quick", "tigon"): 1.0, ("quick", "peer"): 1.02, ("slow", "tigon"): 1.2, ("slow", "peer"): 1.0}
    records = [
        RECORD
        | {"case": case, "provider": who, "pass": "fwd", "ms": ms, "of_limit": 0.5 / ms, "peak_mb": 7.0}
        for (case, who), ms in times.items()
    ]
    alone = RECORD | {"case": "alone", "provider": "tigon", "pass": "fwd", "ms": 1.0, "of_limit": 0.5}
    records += [alone | {"peak_mb": 1.0, "upstream": 0.125, "q20": 0.9, "q80": 1.1}]
    failed = [
        RECORD | {"case": f"n{n}", "pass": "all", "provider": "peer", "error": f"{n} rows"} for n in (3, 4)
    ]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/mine.jsonl").write_text("\n".join(map(json.dumps, records + failed)))
    common = {name: RECORD[name] for name in ("gpu", "torch", "commit", "dtype")}
    empty = {"infer": 1.0, "forward": 2.0, "step": 3.0}
    host = [common | {"op": "nothing", "empty": empty}]
    host.append(common | {"op": "new_op", "tigon": empty, "pytorch": empty | {"step": 2.0}})
    (tmp_path / "gpu/host.jsonl").write_text("\n".join(map(json.dumps, host)))
    pages = results.pages(results.runs(tmp_path))
    assert pages.keys() == {"index.md", "new_op.md", "host.md"}
    new = pages["new_op.md"]
    assert "## Where a peer is more than 3 % faster: 1 of 2 cases\n" in new
    assert "1 more cases have no peer in the same run" in new
    assert "| alone, upstream 0.125 | fwd |" in new
    assert "| new_op slow, fwd | 1.200 ms | peer | 1.000 ms | 20.0 % |" in new
    assert "| **1.000** | 1.020 | 50 % | 1.02x | 7 | 7 |" in new
    assert "| 1.200 | **1.000** | 42 % | 0.83x behind | 7 | 7 |" in new
    assert "- peer, n3, n4: 3 rows" in new and "none, torch 2, commit abc1234" in new
    assert "(../img/gpu_mine_new_op.png)" in new
    assert "| new_op, step | 3.0 us | pytorch | 2.0 us | 50.0 % |" in pages["host.md"]
    assert "| [new op](new_op.md) | 2 | 0.92x | 1 | 47% | 1 |" in pages["index.md"]


def test_a_comparison_holds_records_of_one_run():
    """The newest run with Tigon's record; a peer of another run is shown with its commit and not compared."""
    mine = {"gpu": "H200", "torch": "2", "op": "rope", "case": "c", "pass": "fwd"}

    def record(provider, commit, ms):
        return mine | {"provider": provider, "commit": commit, "ms": ms}

    records = [record("liger", "old", 1.0), record("tigon", "old", 2.0), record("eager", "new", 4.0)]
    newest = record("tigon", "new", 3.0)
    (row,) = tables.by_provider([*records, newest], lambda r: r["case"]).values()
    assert row == {"eager": records[2], "tigon": newest} and row.elsewhere == {"liger": records[0]}
    assert results.fastest_peer(row)[1]["provider"] == "eager"
    text = [row.shown(name, lambda r: f"{r['ms']} ms" if r else "-") for name in ("liger", "eager", "x")]
    assert text == ["1.0 ms †", "4.0 ms", "-"]
    assert tables.notes([row]) == "\n\n† Of another run, not compared: liger old."
    for field, other in (("gpu", "H100"), ("torch", "3"), ("commit", "later"), ("recorded", "abc")):
        (row,) = tables.by_provider(
            [newest, record("liger", "new", 1.0) | {field: other}], lambda r: r["case"]
        ).values()
        assert row == {"tigon": newest} and results.fastest_peer(row) is None
        assert row.shown("liger", lambda r: "cell") == "cell †" and other in tables.notes([row])
    failed = {"provider": "liger", "case": "c", "error": "out of memory"}  # it names no device
    (row,) = tables.by_provider([newest, failed], lambda r: r["case"]).values()
    assert row["liger"] is failed and not row.elsewhere


def test_both_in_place():
    """A peer that overwrites what it is given is beside Tigon that does, too."""
    by = {name: {"op": "rope", "provider": name, "ms": 1.0} for name in ("tigon", "tigon_inplace", "liger")}
    assert results.fastest_peer(by)[0]["provider"] == "tigon_inplace"
    assert results.fastest_peer({n: r | {"op": "glu"} for n, r in by.items()})[0]["provider"] == "tigon"


def test_records_of_every_program(tmp_path):
    """Files of the programs that measure no single op, and ops of post-training, are on the pages named."""
    common = {name: RECORD[name] for name in ("gpu", "torch", "commit")}
    step = {"parameters": "small", "kind": "bf16", "elements": 10, "tensors": 2, "copy_ms": 1.0}
    step |= {"tigon_ms": 2.0, "of_copy": 0.5, "tigon_host_us": 7.0, "fused_ms": 1.0, "fused_host_us": 9.0}
    step |= {"foreach_error": "out of memory. Tried"}
    head = {"op": "parallel_head", "case": "8x4x2", "provider": "tigon", "gpus": 2, "pass": "step", "ms": 2.0}
    head |= {"limit_ms": 1.0, "alone_ms": 1.5, "peak_mb": 3.0}
    given = head | {"op": "parallel_cross_entropy", "alone_ms": None}
    medusa = {"model": "llama3-8b", "layers": 2, "changes": {}, "dtype": "bfloat16", "stage": 1, "heads": 3}
    medusa |= {"batch": 1, "seq": 64, "device": "cuda", "steps": 5, "peak_gb": 1.0}
    model = {"layout": "fsdp2", "model": "llama3-8b", "layers": 4, "changes": {"vocab_size": 64}, "batch": 2}
    model |= {"seq": 4096, "steps": 10, "gpus": 2, "ms": 1.0, "peak_gb": 2.0, "losses": [1.0]}
    trainer = {"trainer": "dpo", "model": "llama3.2-1b", "layers": 4, "changes": {}, "batch": 8, "seq": 1024}
    trainer |= {"prompt": 128, "checkpointing": 0, "dtype": "bfloat16", "device": "cuda", "steps": 2}
    trainer |= {"peak_gb": 2.0, "losses": [0.7], "gradient_norms": [1.0]}
    small = {"model": "qwen3-0.6b", "layers": None, "rank": 0, "batch": 2, "seq": 512, "under": "loop"}
    small |= {"changes": {}, "dtype": "bfloat16", "reserved_gb": 2.0, "passes_ms": [9.0], "by_hand_ms": [8.0]}
    op = RECORD | {"case": "c", "pass": "step", "provider": "tigon", "ms": 1.0, "of_limit": 0.5}
    files = {
        "optimizer": [common | {"kind": "agreement", "bf16": 1e-4}, common | step],
        "parallel": [
            common | head,
            common | given,
            common | given | {"provider": "torch", "ms": 1.0},
            common | given | {"provider": "megatron", "ms": 9.0},
            common | given | {"provider": "other", "ms": 4.0},
        ],
        "medusa": [
            common | medusa | {"provider": who, "tokens_per_s": rate}
            for who, rate in (("stock", 50.0), ("tigon", 100.0))
        ],
        "several": [
            common | model | {"provider": who, "tokens_per_s": rate}
            for who, rate in (("stock", 50.0), ("tigon", 100.0))
        ],
        "small": [
            common | small | {"provider": way, "way": way, "step_ms": [ms]}
            for way, ms in (("tigon", 30.0), ("tigon_graphs", 10.0), ("stock", 40.0))
        ],
        "trainers": [
            common | trainer | {"provider": who, "step_ms": [ms], "tokens_per_s": 8192e3 / ms}
            for who, ms in (("trl", 30.0), ("tigon", 20.0))
        ],
        "ops": [
            op | {"op": name}
            for name in ("linear_policy", "linear_log_prob", "experts", "sparsemax", "poly_norm")
        ],
    }
    failed = {key: value for key, value in (common | given).items() if key != "ms"}
    whole = {"model": "llama3-8b", "batch": 1, "changes": {}, "seq": 64, "layers": 1, "masked": 0, "steps": 2}
    whole |= {"checkpointing": True, "compile": "", "dtype": "float32", "autocast": True, "device": "cuda"}
    whole |= {"peak_gb": 1.0, "tokens_per_s": 1.0, "tokens_per_s_std": 0.0, "losses": [1.0]}
    files["whole"] = [common | whole | {"provider": who} for who in ("stock", "tigon")]
    files["parallel"].append(failed | {"provider": "broken", "error": "no such group"})
    for name, records in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    pages = results.pages(results.runs(tmp_path))
    names = "index optimizer parallel models post_training experts softmax norms"
    assert pages.keys() == {f"{name}.md" for name in names.split()}
    assert "| small bf16 | 2.000 ms | fused | 1.000 ms | 100.0 % |" in pages["optimizer.md"]
    assert "| 2.000 | 50 % | 1.000 | out of memory | 0.50x behind | 7 | 9 | - |" in pages["optimizer.md"]
    assert "| 8x4x2 | 2 | tigon | 2.000 | 1.000 | 50 % | - | 1.500 | 3 |" in pages["parallel.md"]
    assert "| parallel_cross_entropy 8x4x2 | 2.000 ms | torch | 1.000 ms | 100.0 % |" in pages["parallel.md"]
    assert "| broken | no such group |" in pages["parallel.md"]
    assert "--nproc-per-node 2 bench/parallel.py" in pages["parallel.md"]
    row = "| fsdp2, llama3-8b, 4 layers, vocab_size=64 | 2 | 2 x 4096 | 50 | 100 | "
    assert row + "2.0 | 2.0 | - | 2.00x | 0.0e+00 |" in pages["parallel.md"]
    assert "bench/parallel_e2e.py --layouts fsdp2 --model llama3-8b --layers 4" in pages["parallel.md"]
    assert "| llama3-8b, 1 layers, checkpointing, autocast, float32 | 1 x 64 |" in pages["models.md"]
    assert "--dtype float32 --checkpointing --autocast" in pages["models.md"] and "MFU" in pages["models.md"]
    assert (
        "| 50 | 100 | 1.0 | 1.0 |" in pages["models.md"] and "--stages 1 --lengths 64" in pages["models.md"]
    )
    row = "| 30.0 | 10.0 | 40.0 | 9.0 | 9.0 | 9.0 | 2.00 | 2.00 | 2.00 | 8.0 | 8.0 | - | 1.00 |"
    assert row in pages["models.md"] and "--under loop --cases qwen3-0.6b:2x512" in pages["models.md"]
    post = pages["post_training.md"]
    row = "| dpo, llama3.2-1b, 4 layers, without checkpointing | 8 x 1024 | 30.0 | 20.0 | 2.00 | 2.00 |"
    assert f"{row} - | 1.50x | - | 0.0e+00 |" in post
    assert "bench/trl_trainers.py --trainers dpo --providers trl,tigon --model llama3.2-1b --layers 4" in post
    assert post.index("## Log-probabilities from") < post.index("## Policy losses from")


def test_cards(tmp_path, monkeypatch):
    """A row for each model that was measured, with the smallest card; a card that none is, in words."""
    cases = e2e.cases(e2e.parse(["--suite", "card", "--models", "qwen3-0.6b", "--providers", "tigon,stock"]))
    figures = {"peak_gb": 3.21, "card_gb": 4.0, "step_ms": [100.0, 50.0, 200.0], "memory_gb": "24"}
    full, stock, _ = cases
    records = [full | figures, stock | {"error": "80 GB are too little", "out_of_memory": True}]
    monkeypatch.setattr(cards, "FILE", tmp_path / "cards.jsonl")
    assert cards.tables() == "Not measured yet."
    cards.FILE.write_text("\n".join(map(json.dumps, records)))
    row = "| Qwen3 0.6B | **24 GB**: 3.2 GB, 20,480 tokens/s | - | none of these |"
    assert row in cards.tables() and "| Qwen3 1.7B" not in cards.tables()
