"""examples/train.py, small: both providers, the table, the picture, the checkpoint, the data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

import train
import train_data
import train_worker

TINY = "hidden_size=64,intermediate_size=96,num_attention_heads=2,num_key_value_heads=1,vocab_size=500"


@pytest.fixture
def text(tmp_path):
    """A few files of text."""
    for i in range(3):
        lines = [f"line {k} of file {i}: {k * k % 97} words\n" for k in range(400)]
        (tmp_path / f"{i}.txt").write_text("".join(lines))
    return sorted(tmp_path.glob("*.txt"))


@pytest.mark.slow
def test_main_job(tmp_path, text):
    """Three steps of stock and Tigon: equal curves, a table, files, a checkpoint stock loads."""
    options = "--steps 3 --batch 2 --seq 32 --device cpu --threads 1 --providers stock,tigon,liger"
    command = [sys.executable, EXAMPLES / "train.py", *options.split(), "--model-config", TINY]
    command += ["--out", tmp_path / "out", "--data", *text]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "liger: left out" in done.stdout
    assert "equal to within rounding: every step" in done.stdout
    summary = json.loads((tmp_path / "out" / "train.json").read_text())
    assert list(summary["runs"]) == ["stock", "tigon"]
    for run in summary["runs"].values():
        assert len(run["losses"]) == 3 and run["tokens_per_s"] > 0 and run["peak_bytes"] >= 0
    assert summary["runs"]["tigon"]["relative_difference"] <= summary["bound"]["value"]
    assert summary["runs"]["tigon"]["report"], "tigon.apply reported nothing"
    assert summary["checkpoint"]["same"]
    assert (tmp_path / "out" / "train.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "checkpoint" / "model.safetensors").exists()


def test_processors_with_bfloat16(tmp_path):
    """A run in float32 says what it leaves unused, and what was gained; other runs say nothing."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : fpu avx512f avx512_bf16 amx_bf16\n")
    plan = {"device": "cpu", "dtype": "float32"}
    said = train.of_bfloat16(plan, cpuinfo)
    assert "AMX and AVX512-BF16" in said and "--dtype bfloat16" in said
    for name in ("train_fp32.json", "train_bf16.json"):  # the figures are those of the records
        runs = json.loads((EXAMPLES.parent / "bench/results/cpu" / name).read_text())["runs"]
        assert f"{runs['tigon']['tokens_per_s'] / runs['stock']['tokens_per_s']:.2f} times" in said
    assert train.of_bfloat16(plan | {"dtype": "bfloat16"}, cpuinfo) == ""
    assert train.of_bfloat16(plan | {"device": "cuda"}, cpuinfo) == ""
    cpuinfo.write_text("flags : fpu avx2\n")
    assert train.of_bfloat16(plan, cpuinfo) == ""


def test_data_is_cached_and_batches_repeat(tmp_path, text, monkeypatch):
    """The second run tokenizes nothing; equal arguments give equal batches."""
    names = list(map(str, text))
    first = train_data.prepare(names, tmp_path / "cache", 300)
    assert first["vocab"] == 300 and first["files"] == 3 and first["largest_token"] < 300
    monkeypatch.setattr(train_data, "train_tokenizer", None)
    assert train_data.prepare(names, tmp_path / "cache", 300) == first
    one, two = (
        [rows.tolist() for rows in train_data.batches(first["tokens_file"], 4, 16, 5, seed)]
        for seed in (3, 3)
    )
    other = [rows.tolist() for rows in train_data.batches(first["tokens_file"], 4, 16, 5, 4)]
    assert one == two != other
    assert len(one) == 5 and len(one[0]) == 4 and len(one[0][0]) == 16


def test_short_text_is_repeated(tmp_path):
    """Fewer tokens than a batch needs are no error."""
    (tmp_path / "short.txt").write_text("only a few words")
    data = train_data.prepare([str(tmp_path / "short.txt")], tmp_path / "cache", 300)
    (rows,) = train_data.batches(data["tokens_file"], 8, 64, 1, 0)
    assert rows.shape == (8, 64)


def test_standard_library_is_enough():
    """The default text exists for the Python that runs this."""
    files = train_data.standard_library()
    assert sum(path.stat().st_size for path in files) > 1_000_000
    assert files == sorted(files)


def test_text_survives_the_tokenizer(tmp_path, text):
    """A byte-level BPE loses nothing."""
    from tokenizers import Tokenizer

    data = train_data.prepare(list(map(str, text)), tmp_path / "cache", 300)
    tokenizer = Tokenizer.from_file(data["tokenizer_file"])
    line = "def f(x):\n\treturn x  # größer, 数\n"
    assert tokenizer.decode(tokenizer.encode(line).ids) == line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--providers", "stcok"], "stcok"),
        (["--data", "no/such/file"], "no/such/file"),
        (["--model", "no/such/model"], "no/such/model"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    """One line says what is wrong."""
    with pytest.raises(SystemExit, match=message):
        train.main([*arguments, "--device", "cpu", "--out", str(tmp_path)])


def test_config_file_as_model(tmp_path):
    """--model takes a configuration, or a folder without weights, too."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(train.SMALL))
    assert train.read_model(str(path), {}) == (train.SMALL, "", None)
    assert train.read_model(str(tmp_path), {}) == (train.SMALL, "", None)
    (tmp_path / "model.safetensors").touch()
    assert train.read_model(str(tmp_path), {})[1] == str(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc of Linux")
def test_peak_memory_sees_a_passing_allocation():
    """A tensor that came and went counts; what was there before does not."""
    numpy = pytest.importorskip("numpy")
    kept = numpy.ones(50_000_000, dtype=numpy.uint8)
    memory = train_worker.PeakMemory("cpu")
    memory.start()
    passing = numpy.ones(80_000_000, dtype=numpy.uint8)
    del passing
    if memory.note:
        pytest.skip(memory.note)
    assert 70e6 < memory.above() < 120e6
    assert kept.all()


def test_learning_rate_warms_up_and_falls():
    """Up over a tenth of the run, down to near a tenth of the peak."""
    rates = [train_worker.learning_rate(step, 50) for step in range(50)]
    assert rates[:5] == sorted(rates[:5]) and max(rates) == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True) and 0.1 <= rates[-1] < 0.12
    assert all(0 < train_worker.learning_rate(step, 1) <= 1 for step in range(1))
