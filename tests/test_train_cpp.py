"""examples/cpp/train_llama.cpp: its curve is stock's, its checkpoint loads, wrong arguments are named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"

pytest.importorskip("transformers")

import train
import train_data
import train_worker
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.xdist_group("train_cpp")


def call(*command, code=0) -> str:
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def program():
    """The program that the C++ tests build against an installation of the library."""
    made = BUILD / "example/train_llama"
    sources = (BUILD / "libtigon.so", ROOT / "examples/cpp/train_llama.cpp")
    if not made.exists() or made.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        call(Path(sys.executable).parent / "ctest", "--test-dir", BUILD, "-R", "cpp.example")
    return made


@pytest.fixture
def start(program, tmp_path):
    """A checkpoint of random weights, and tokens, which the program wrote."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {k}: {k * k % 97} words\n" for k in range(60)))
    (tmp_path / "binary").write_bytes(b"\0\1")
    call(program, "--data", text, tmp_path / "binary", "--steps", 0, "--out", tmp_path / "start")
    return tmp_path / "start"


def trained(program, start, out, *arguments):
    call(program, "--tokens", start / "tokens.npy", "--model", start / "checkpoint", "--out", out, *arguments)
    return json.loads((out / "train.json").read_text())["losses"]


# The second has two blocks of attention's rows, one of them short, and reads the text more than once.
@pytest.mark.parametrize("steps, batch, seq, seed", [(5, 3, 40, 0), (3, 2, 300, 7)])
def test_curve_is_stocks(program, start, tmp_path, monkeypatch, steps, batch, seq, seed):
    """From the same checkpoint, tokens and batches as examples/train.py, in a process of its own or here."""
    if seed:
        monkeypatch.setattr(train, "work", train_worker.train)
    options = ["--steps", steps, "--batch", batch, "--seq", seq, "--lr", 2e-3, "--seed", seed]
    ours = trained(program, start, tmp_path / "out", *options)
    given = ["--tokens", start / "tokens.npy", "--model", start / "checkpoint", "--device", "cpu"]
    arguments = [*options, *given, "--providers", "stock", "--no-checkpoint", "--out", tmp_path / "stock"]
    assert train.main(list(map(str, arguments))) == 0
    run = json.loads((tmp_path / "stock" / "train.json").read_text())["runs"]["stock"]
    assert len(ours) == steps and ours[-1] < ours[0]
    assert max(abs(a - b) / b for a, b in zip(ours, run["losses"], strict=True)) <= train.BOUND["float32"]


def test_checkpoint_loads_in_transformers(program, start, tmp_path):
    """Its loss there is that of a further step here; untied and bfloat16 too."""
    for tied, dtype in ((True, "float32"), (False, "float32"), (True, "bfloat16")):
        config = json.loads((start / "checkpoint" / "config.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(start / "checkpoint", dtype=torch.float32)
        if not tied:
            config["tie_word_embeddings"] = model.config.tie_word_embeddings = False
            model = AutoModelForCausalLM.from_config(model.config)
        folder = tmp_path / f"{tied}-{dtype}"
        model.save_pretrained(folder / "start")
        options = ["--dtype", dtype, "--steps", 2, "--batch", 2, "--seq", 64]
        (folder / "start" / "tokens.npy").write_bytes((start / "tokens.npy").read_bytes())
        (folder / "start" / "checkpoint").symlink_to(folder / "start")
        trained(program, folder / "start", folder / "out", *options)
        loaded, info = AutoModelForCausalLM.from_pretrained(
            folder / "out" / "checkpoint", dtype=getattr(torch, dtype), output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert loaded.config.tie_word_embeddings == tied
        # One step more from there, whose loss is taken before anything changes.
        (rows,) = train_data.batches(str(start / "tokens.npy"), 2, 64, 1, 5)
        ids = torch.from_numpy(rows)
        with torch.no_grad():
            expected = loaded(input_ids=ids, labels=ids).loss.item()
        (folder / "out" / "tokens.npy").write_bytes((start / "tokens.npy").read_bytes())
        options = ["--dtype", dtype, "--steps", 1, "--batch", 2, "--seq", 64, "--seed", 5]
        (ours,) = trained(program, folder / "out", folder / "more", *options)
        assert abs(ours - expected) <= train.BOUND[dtype] * expected


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give --data FILES or --tokens"),
        (["--stpes", "3"], "unknown option --stpes"),
        (["--data", "no/such"], "no/such"),
        (["--data", "README.md", "--steps", "x"], "--steps must be a number, got x"),
        (["--data", "README.md", "--device", "gpu"], "--device must be cpu or cuda, got gpu"),
        (["--data", "README.md", "--model", "no/such"], "cannot read no/such/config.json"),
        (["--tokens", "README.md"], "README.md is no .npy file"),
        (["--data", "README.md", "--batch"], "--batch must be a number, got --out"),
    ],
)
def test_wrong_arguments_are_named(program, tmp_path, arguments, message):
    assert message in call(program, *arguments, "--out", tmp_path, code=2)


def test_what_it_does_not_compute_is_refused(program, start, tmp_path):
    """A configuration of another model; a checkpoint that is cut off or of another size."""
    config = json.loads((start / "checkpoint" / "config.json").read_text())
    weights = (start / "checkpoint" / "model.safetensors").read_bytes()
    for changed, content, message in (
        ({"model_type": "qwen3"}, weights, "model_type must be llama"),
        ({"rope_parameters": {"rope_type": "llama3"}}, weights, "rope_type must be default, got llama3"),
        ({"attention_bias": True}, weights, "biases are not supported"),
        ({"hidden_size": 128}, weights, "has another size than the model"),
        ({"vocab_size": 64}, weights, "is outside the model's vocabulary"),
        ({"num_hidden_layers": 5}, weights, "the checkpoint has no model.layers.4"),
        ({}, weights[:-8], "is cut off"),
    ):
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config | changed))
        (folder / "model.safetensors").write_bytes(content)
        words = ["--tokens", start / "tokens.npy", "--model", folder, "--out", tmp_path / "out"]
        assert message in call(program, *words, code=2)
