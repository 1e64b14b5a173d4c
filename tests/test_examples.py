"""The examples that fine-tune, small: each runs to its end and learns; packing keeps samples apart."""

import collections
import importlib.util
import json
import random
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

for package in ("transformers", "accelerate"):
    pytest.importorskip(package)

import continue_training
import distillation
import dpo
import grpo
import lora
import one_card
import run_notebook
import same_bits
import sft_data
import sft_trainer
import sft_trl
from tiny import close, make

from ranks import run_ranks

spec = importlib.util.spec_from_file_location(
    "examples_medusa", EXAMPLES / "medusa.py"
)  # beside bench/medusa.py
medusa = importlib.util.module_from_spec(spec)
spec.loader.exec_module(medusa)

TINY = (
    "hidden_size=64,intermediate_size=96,num_attention_heads=2,num_key_value_heads=1,vocab_size=400,"
    "num_hidden_layers=1"
)


@pytest.fixture
def few_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def options(tmp_path, few_threads):
    """Command line of a tiny run on a few functions."""
    functions = [
        f'def f{i}(x):\n    """Add {i} to x, {i % 7} times."""\n    for _ in range({i % 7}):\n'
        f"        x = x + {i}\n    return x\n"
        for i in range(60)
    ]
    (tmp_path / "text.py").write_text("\n\n".join(functions))
    words = ["--data", tmp_path / "text.py", "--out", tmp_path / "out", "--device", "cpu", "--steps", 4]
    words += ["--batch", 2, "--seq", 96, "--model-config", TINY, "--lr", 1e-2]
    return [str(word) for word in words]


def result(options, name):
    folder = Path(options[options.index("--out") + 1]) / name
    return json.loads((folder / "losses.json").read_text())


def test_sft_trainer(options):
    """Tigon's curve is stock's."""
    assert sft_trainer.main(options) == 0
    ours = result(options, "sft")
    assert ours["tigon"] and ours["after"] < ours["before"]
    assert sft_trainer.main([*options, "--stock"]) == 0
    stock = result(options, "sft")
    assert not stock["tigon"] and ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    out = Path(options[options.index("--out") + 1])
    assert {"model.safetensors", "tokenizer.json"} <= {p.name for p in (out / "sft/model").iterdir()}


def test_sft_trl(options):
    """The same through TRL, with its head by Tigon; undone, it is stock's again."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    from tigon.integrations import trl

    try:
        assert sft_trl.main(options) == 0
    finally:
        trl.uninstall()
    ours = result(options, "sft_trl")["losses"]
    assert sft_trl.main([*options, "--stock"]) == 0
    assert ours == pytest.approx(result(options, "sft_trl")["losses"], rel=1e-4)


def test_lora(options):
    pytest.importorskip("peft")
    assert lora.main([*options, "--rank", "2", "--compare"]) == 0
    got = result(options, "lora")
    assert got["merged"] == pytest.approx(got["adapted"], rel=1e-4)
    assert got["losses"][-1] < got["losses"][0]


def test_one_card(options):
    """Patched it learns what it learns unpatched; the trained model is written."""
    assert one_card.main([*options, "--memory-gb", "1", "--save"]) == 0
    ours = result(options, "one_card")
    assert ours["losses"][-1] < ours["losses"][0]
    assert (Path(options[options.index("--out") + 1]) / "one_card/model/model.safetensors").exists()
    assert one_card.main([*options, "--stock"]) == 0
    assert ours["losses"] == pytest.approx(result(options, "one_card")["losses"], rel=2e-2)


def test_continue_training(options):
    assert continue_training.main(options) == 0
    got = result(options, "continued")
    assert got["losses"] == pytest.approx(got["wanted"], rel=1e-5) and len(got["losses"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "example, words, package",
    [
        ("fsdp2", [], "transformers"),
        ("fsdp2", ["--tensor", "2"], "transformers"),
        ("megatron_gpt", [], "megatron"),
        ("megatron_gpt", ["--sequence-parallel"], "megatron"),
    ],
)
@pytest.mark.xdist_group("two processes")
def test_two_processes(example, words, package, options, tmp_path):
    """Both curves over gloo: Tigon's is stock's."""
    pytest.importorskip(package)
    sizes = TINY.replace("key_value_heads=1", "key_value_heads=2") + ",ffn_hidden_size=96"
    sizes = sizes if example == "megatron_gpt" else sizes.rpartition(",")[0]
    run_ranks(EXAMPLES / f"{example}.py", [*options, "--model-config", sizes, *words], tmp_path)
    (path,) = Path(options[options.index("--out") + 1]).glob(f"{example}*/losses.json")
    got = json.loads(path.read_text())
    assert len(got["losses"]) == 4 and got["losses"][-1] < got["losses"][0]
    assert got["tigon"]["losses"] == pytest.approx(got["stock"]["losses"], rel=2e-5)


# --- data ------------------------------------------------------------------------------------


def test_pairs():
    text = 'def f(x):\n    """Say so."""\n    return x\n\ndef g():\n    return 1\n'
    assert sft_data.pairs_of(text) == [('def f(x):\n    """Say so."""', "\n    return x\n")]
    assert sft_data.pairs_of("A title:\nline one\nline two\n\nalone\n") == [
        ("A title:", "\nline one\nline two")
    ]


def test_packed_rows_fill_and_cut():
    samples = [([1] * 5, [-100] * 2 + [1] * 3), ([2] * 4, [2] * 4), ([3] * 20, [3] * 20), ([4] * 3, [4] * 3)]
    rows = sft_data.packed_rows(samples, 8, 0)
    assert [row["input_ids"] for row in rows] == [[3] * 8, [1] * 5 + [4] * 3, [2] * 4 + [0] * 4]
    assert rows[1]["labels"] == [-100] * 2 + [1] * 3 + [4] * 3
    assert rows[1]["position_ids"] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert rows[2]["labels"][4:] == [-100] * 4


def test_packed_rows_lose_nothing():
    """Every token of samples within a row's length is in one row; each sample goes where it fits best."""
    draw = random.Random(0)
    lengths = [draw.randint(1, 40) for _ in range(500)]
    samples = [([3 + i] * n, [3 + i] * n) for i, n in enumerate(lengths)]
    rows = sft_data.packed_rows(samples, 40, 0)
    tokens = collections.Counter(token for row in rows for token in row["input_ids"] if token)
    assert tokens == {3 + i: n for i, n in enumerate(lengths)}
    assert all(len(row[name]) == 40 for row in rows for name in row)
    # Samples in their own order fill three quarters of such rows.
    assert sum(lengths) / (40 * len(rows)) > 0.97


def test_models_are_made_without_a_cache(options):
    """transformers looks for packed samples only then."""
    args = sft_data.arguments("").parse_args(options)
    tokenizer, _ = sft_data.load_tokenizer(args)
    model = sft_data.load_model(args, tokenizer)
    assert not model.config.use_cache
    model.save_pretrained(args.out / "checkpoint")
    args.model = str(args.out / "checkpoint")
    assert not sft_data.load_model(args, tokenizer).config.use_cache


@pytest.mark.parametrize("patched", [False, True])
def test_packing_keeps_samples_apart(patched):
    """The loss of a packed row is that of its samples, each by itself."""
    import tigon

    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in (7, 5, 3):
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        samples.append((ids, [-100, -100, *ids[2:]]))
    (row,) = sft_data.packed_rows(samples, 16, 0)
    model = make(attn_implementation="sdpa", use_cache=False)
    singles = [
        model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss for ids, labels in samples
    ]
    counts = torch.tensor([float(len(ids) - 2) for ids, _ in samples])
    wanted = (torch.stack(singles).detach() * counts).sum() / counts.sum()
    if patched:
        tigon.apply(model)
    close(model(**{name: torch.tensor([value]) for name, value in row.items()}).loss.detach(), wanted)
    tigon.undo(model)


@pytest.mark.parametrize("loss", ["lk", "ce"])
def test_drafter(loss, monkeypatch, few_threads):
    """Both drafters are accepted more often at every step than at first."""
    monkeypatch.setattr(sys, "argv", ["drafter.py", "--loss", loss, "--steps", "20"])
    for first, last in runpy.run_path(str(EXAMPLES / "drafter.py"))["main"]():
        assert last[0] < first[0]
        assert all(b > a for a, b in zip(first[1], last[1], strict=True))


def test_medusa(options, capsys):
    """Both stages learn, Tigon's curves are stock's, and decoding with heads changes no token."""
    deeper = TINY.replace("layers=1", "layers=2")
    options = [*options, "--model-config", deeper, "--steps", "8", "--lr", "1e-2", "--decode", "12"]
    assert medusa.main(options) == 0
    got = json.loads((Path(options[options.index("--out") + 1]) / "medusa/medusa.json").read_text())
    for runs in got["stages"].values():
        ours, stock = runs["tigon"], runs["stock"]
        assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
        assert ours["heads"] == pytest.approx(stock["heads"], rel=1e-4)
        assert ours["after"] < ours["before"]
    assert 1.0 <= got["accepted"] <= 4.0
    assert ", the text that the model writes by itself" in capsys.readouterr().out


@pytest.mark.parametrize("heads", [1, 3])
def test_decoding_with_right_guesses(heads):
    """A model that counts and heads that know it: as many tokens a pass as there are heads, and one."""

    class Counting(torch.nn.Module):
        def model(self, input_ids):
            return SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(input_ids, 40).float())

        def lm_head(self, hidden):
            return hidden.roll(1, -1)

    knowing = [lambda hidden, k=k: hidden.roll(2 + k, -1) for k in range(heads)]
    text, accepted = medusa.decode(Counting(), knowing, torch.tensor([[3, 4]]), 9)
    assert text == list(range(5, 14))
    passes = 1 + -(-8 // (heads + 1))
    assert accepted == (1 + (passes - 1) * (heads + 1)) / passes
    wrong = [lambda hidden: hidden]
    assert medusa.decode(Counting(), wrong, torch.tensor([[3, 4]]), 9) == (text, 1.0)


@pytest.mark.parametrize("example", [dpo, grpo, distillation])
def test_post_training(example, options, caplog):
    """TRL's trainers: with Tigon the curve is stock's, and every loss came from Tigon."""
    pytest.importorskip("trl")
    from tigon.integrations import trl

    deeper = TINY.replace("layers=1", "layers=4")  # a student is half of its teacher
    options = [*options, "--batch", "4", "--model-config", deeper]
    try:
        with caplog.at_level("WARNING", "tigon"):
            assert example.main(options) == 0
        assert not caplog.records
    finally:
        trl.uninstall()
    ours = result(options, example.__name__)
    assert example.main([*options, "--stock"]) == 0
    stock = result(options, example.__name__)
    assert len(ours["losses"]) == 4 and ours["losses"] == pytest.approx(stock["losses"], rel=2e-4, abs=2e-6)


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("notebooks/*.py")), ids=lambda path: path.stem)
def test_notebook(notebook, tmp_path, few_threads, monkeypatch):
    """Every cell runs; each notebook comes to what it promises, and draws it."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    matplotlib.use("Agg")
    text = re.sub("(?m)^STEPS, BATCH, LENGTH = .*", "STEPS, BATCH, LENGTH = 90, 8, 64", notebook.read_text())
    (tmp_path / "shorter.py").write_text(text)
    got = runpy.run_path(str(tmp_path / "shorter.py"))
    assert (tmp_path / f"{notebook.stem}.png").stat().st_size > 5000
    if notebook.stem == "fine_tune":
        assert got["right"] > 50 and got["callback"].report.head_calls.fused >= got["STEPS"]
        assert got["with_tigon"][:5] == pytest.approx(got["without"][:5], rel=1e-3)
    elif notebook.stem == "distil":
        assert got["curve"][-1] < min(got["curve"][0], got["plain"][-1])
    else:
        assert got["difference"] < 1e-5 and all(curve[-1] > curve[0] for curve in got["curves"].values())


def test_notebook_of_a_gpu(tmp_path, few_threads, monkeypatch, capsys):
    """The cells of the notebook for a GPU, with a tiny model in float32: both losses and rewards agree."""
    for needed in ("trl", "peft", "datasets", "matplotlib"):
        pytest.importorskip(needed)
    from tigon.compat import trl

    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = (EXAMPLES / "notebooks/gpu/qlora_grpo.py").read_text()
    for pattern, value in (
        ("NF4", "False"),
        ("SIZES", "dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=700)"),
        ("HEADS", "dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)"),
        ("TOKENIZER", "600"),
        ("FIRST, STEPS, GRPO_STEPS", "10, 3, 2"),
        ("ROWS, ANSWERS, TOKENS", "2, 2, 8"),
        ("files", "[Path(ast.__file__), Path(tempfile.__file__)]"),
    ):
        text, count = re.subn(f"(?m)^{pattern} = .*$", f"{pattern} = {value}", text)
        assert count == 1, pattern
    (tmp_path / "shorter.py").write_text(text)
    try:
        found = runpy.run_path(str(tmp_path / "shorter.py"))["found"]
    finally:
        trl.uninstall()
    for kind in ("SFT", "GRPO"):
        for curve in ("loss", "reward"):
            ours, stock = found[f"{kind} with Tigon"][curve], found[kind][curve]
            assert ours == pytest.approx(stock, rel=1e-3, abs=1e-5)
    assert len(found["GRPO"]["reward"]) == 2 and "GRPO with Tigon" in capsys.readouterr().out


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("notebooks/**/*.py")), ids=lambda path: path.stem)
def test_notebook_is_saved_as_it_is(notebook):
    """The .ipynb has the cells of the .py, all run: else run `make notebooks`."""
    saved = notebook.with_suffix(".ipynb")
    if not saved.exists():
        pytest.skip("not run on a GPU yet")
    cells = json.loads(saved.read_text())["cells"]
    wanted = [cell["source"] for cell in run_notebook.cells_of(notebook.read_text())]
    assert [cell["source"] for cell in cells] == wanted
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")


def test_cells_are_run_and_shown(tmp_path, monkeypatch):
    """Text and the value of a last line, in the order of the cells."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # with figures of other tests
    (tmp_path / "n.py").write_text(
        '# ---\n# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 2\nprint("p")\n\n# %%\nx + 1\n'
    )
    cells = run_notebook.run(tmp_path / "n.py")["cells"]
    assert cells[0]["source"] == ["# A\n", "\n", "b"] and [c["execution_count"] for c in cells[1:]] == [1, 2]
    assert cells[1]["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["p\n"]}]
    assert cells[2]["outputs"][0]["data"] == {"text/plain": ["3"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits(dtype, capsys):
    """No log-probability of the trainer differs from the sampler's."""
    assert same_bits.main(["--tokens", "32", "--dtype", dtype]) == 0
    assert "differ: 0; largest ratio 1.000000000" in capsys.readouterr().out
