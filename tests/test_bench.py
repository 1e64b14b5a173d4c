"""bench/run.py and bench/plot.py on the smallest cases, and what the programs of bench refuse."""

import dataclasses
import importlib
import json

import plot
import pytest
import run
import torch

from cases import modules

FIELDS = {
    *("op", "case", "pass", "provider", "dtype", "ms", "bytes", "gbps", "tflops"),
    *("limit_ms", "of_limit", "peak_mb", "host_us", "gpu", "torch", "commit", "q20", "q80", "upstream"),
}


@pytest.fixture
def quick(monkeypatch):
    """bench/run.py with a budget of milliseconds."""
    monkeypatch.setattr(run.timing, "BUDGET", 0.002)
    monkeypatch.setattr(run.timing, "FEWEST", 3)
    monkeypatch.setattr(run.timing, "copy_gbps", lambda device: 10.0)
    monkeypatch.setenv("TIGON_COMMIT", "abc1234")
    return run


def words(options, path):
    """A command line of bench/run.py on the CPU that writes to a file."""
    return [*f"--device cpu --cases smoke --dtypes fp32 {options}".split(), "--out", str(path)]


@pytest.mark.slow
def test_every_op_every_field(quick, tmp_path, capsys):
    """All ops on the CPU: complete records, a table, and pictures of them."""
    path = tmp_path / "results" / "r.jsonl"
    quick.main(words("--providers eager,tigon", path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert not [record for record in records if "error" in record]
    shown = capsys.readouterr().out
    for name, module in modules().items():
        assert f"\n{name}: milliseconds" in shown
        mine = [record for record in records if record["op"] == name]
        passes = ("fwd", "step") if getattr(module, "LOSS", False) else ("fwd", "bwd", "step")
        passes = getattr(module, "PASSES", passes)
        expected = {(kind, provider) for kind in passes for provider in ("eager", "tigon")}
        assert {(r["pass"], r["provider"]) for r in mine} >= expected
    for record in records:
        assert set(record) == FIELDS
        assert record["ms"] > 0 and record["bytes"] > 0 and record["commit"] == "abc1234"
        assert record["of_limit"] == pytest.approx(record["limit_ms"] / record["ms"])
        assert record["q20"] <= record["ms"] <= record["q80"] and record["upstream"] in (1.0, "normal")
    plot.main([str(path), "--out", str(tmp_path / "img")])
    assert {p.name for p in (tmp_path / "img").iterdir()} == {f"results_r_{n}.png" for n in modules()}


def test_upstream_gradients(quick):
    """Benchmarks of a loss have 1 unless their name says otherwise; the record has what is given."""
    for module in modules().values():
        for case in module.CASES:
            if "test" not in case.tags and getattr(module, "LOSS", False):
                assert ("scaled" in case.name) == ("upstream" in case.params), case
    module = modules()["cross_entropy"]
    named = {case.name: case for case in module.CASES}
    small = {"N": 3, "V": 7}
    for name, expected in (
        ("8192x128256_scaled", 0.125),
        ("vocabulary_32000", 1.0),
        ("256x1024", 1.0),
        ("paper_8192x40960", 1.0),
        ("1024x32000", 1.0),
        ("sum", 0.7),
    ):
        case = dataclasses.replace(named[name], params=named[name].params | small)
        assert quick.upstream_of(module.make(case, "cpu", torch.float32)) == expected, name
    assert quick.upstream_of(module.make(named["none"], "cpu", torch.float32)) == "normal"


def test_quantiles(quick):
    assert quick.timing.quantiles([float(n) for n in range(11)]) == {"ms": 5.0, "q20": 2.0, "q80": 8.0}


def test_limit_of_odd_sizes(quick, monkeypatch, tmp_path):
    """The matmuls of the sizes themselves, or those of the even neighbour by operations: the less."""
    module = modules()["linear_cross_entropy"]
    (case,) = (case for case in module.CASES if case.name == "odd_7x33x51")
    inputs = module.make(case, "cpu", torch.float32)
    even, share = module.even_neighbour(inputs)
    assert [x.shape for x in even.args[:2]] == [(7, 64), (64, 64)] and share == 33 * 51 / 64**2
    assert torch.equal(even.args[1][:51, :33], inputs.args[1])
    bench = quick.Bench(quick.parse(["--device", "cpu", "--out", str(tmp_path / "r.jsonl")]))
    for own, neighbour, least in ((3.0, 5.0, share * 5.0), (1.0, 5.0, 1.0)):
        times = {True: own, False: neighbour}
        monkeypatch.setattr(bench, "matmuls_ms", lambda _, given, step, times=times: times[given is inputs])
        assert bench.limits(module, case, inputs, torch.float32)["step"]["limit_ms"] == least
    (round_case,) = (case for case in module.CASES if case.name == "256x128x1024")
    assert module.even_neighbour(module.make(round_case, "cpu", torch.float32)) is None


def test_budget(quick, tmp_path, capsys):
    """No case starts late; what is measured is not measured again; a new provider joins the others."""
    path = tmp_path / "r.jsonl"
    start = words("--ops silu,glu --no-host", path)

    def providers():
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(set(r) == FIELDS and r["host_us"] is None for r in records)
        return [(r["op"], r["provider"]) for r in records if r["pass"] == "step"]

    quick.main([*start, "--budget", "1e-9"])
    assert "2 cases not started" in capsys.readouterr().out and not path.exists()
    quick.main([*start, "--budget", "9", "--providers", "tigon"])
    assert providers() == [("silu", "tigon"), ("glu", "tigon")]
    assert "silu: milliseconds" in capsys.readouterr().out
    quick.main([*start, "--budget", "9", "--providers", "tigon"])
    assert providers() == [("silu", "tigon"), ("glu", "tigon")]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # glu without its last pass
    quick.main([*start, "--budget", "9", "--providers", "tigon"])
    assert providers() == [("silu", "tigon"), ("glu", "tigon")]
    quick.main([*start, "--budget", "9"])
    assert providers()[2:] == [(op, name) for op in ("silu", "glu") for name in ("eager", "tigon")]


def test_sweeps_are_drawn(tmp_path):
    """Time and memory over tokens where four sizes differ in them alone; cases with options stay out."""
    cases = [f"{rows}x64x1000" for rows in (8, 16, 32, 64)] + ["64x64x2000", "128x64x1000_masked50"]
    record = {"op": "linear_cross_entropy", "dtype": "bf16", "pass": "step", "gpu": "none", "torch": "2"}
    numbers = {"ms": 1.0, "limit_ms": 0.5, "peak_mb": 3.0, "of_limit": 0.5}
    records = [record | numbers | {"case": c, "provider": p} for c in cases for p in ("tigon", "eager")]
    assert list(plot.sweeps(records)) == [(0, "bf16", 64, 1000)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    plot.main([str(tmp_path / "r.jsonl"), "--out", str(tmp_path)])
    assert (tmp_path / f"{tmp_path.name}_r_over_tokens_64x1000.png").stat().st_size > 1000


def test_failures_are_recorded(quick, tmp_path, monkeypatch):
    """A peer that is wrong, raises, refuses or is absent is named in the results."""

    def absent(case, inputs):
        raise ImportError("No module named 'absent'")

    def raising(case, inputs):
        def fn(*args, **kwargs):
            raise RuntimeError("out of order")

        return fn

    peers = {
        "wrong": lambda case, inputs: lambda gate, up: gate + up,
        "nan": lambda case, inputs: lambda gate, up: gate * up * float("nan"),
        "raising": raising,
        "refusing": lambda case, inputs: None,
        "absent": absent,
    }
    monkeypatch.setattr(modules()["glu"], "PEERS", peers)
    path = tmp_path / "r.jsonl"
    quick.main(words(f"--providers {','.join(('eager', *peers))} --ops glu", path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    errors = {r["provider"]: r["error"] for r in records if "error" in r}
    assert errors.keys() == peers.keys()
    assert "differs" in errors["wrong"] and "differs" in errors["nan"]
    assert errors["raising"] == "RuntimeError: out of order"
    assert errors["refusing"] == "does not support this case"
    assert errors["absent"].startswith("not installed")
    assert {r["provider"] for r in records if "ms" in r} == {"eager"}


def test_a_lost_device_ends_the_run(quick, tmp_path, monkeypatch):
    """What follows would be recorded as failed, too."""

    def lost(case, inputs):
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(modules()["glu"], "PEERS", {"lost": lost})
    path = tmp_path / "r.jsonl"
    with pytest.raises(torch.AcceleratorError):
        quick.main(words("--providers lost,eager --no-host --ops glu", path))
    assert [json.loads(line)["provider"] for line in path.read_text().splitlines()] == ["lost"]


def test_destructive_peers_harm_nobody(quick):
    """Every provider works on its own copies."""
    module = modules()["glu"]
    case = next(case for case in module.CASES if "smoke" in case.tags)
    inputs = module.make(case, "cpu", torch.float32, 0)
    before = [value.clone() for value in (*inputs.args, *inputs.grad_outputs)]
    runner = quick.Runner(module.eager_fn, inputs, torch.device("cpu"))
    with torch.no_grad():
        for value in (*runner.args[0], *runner.upstream):
            value.zero_()
    for value, kept in zip((*inputs.args, *inputs.grad_outputs), before, strict=True):
        assert torch.equal(value, kept)


WRONG = {
    "run": ("--ops no_op", "--dtypes fp8", "--passes x", "--budget 1"),
    "e2e": ("--models llama5", "--padding 0.7", "--optimizer backward --clip 1"),
    "convergence": ("--families llama5", "--runs 1"),
    "trl_trainers": ("--trainers ppo", "--batch 3"),
}


@pytest.mark.parametrize("program, words", [(name, words) for name in WRONG for words in WRONG[name]])
def test_wrong_arguments_are_named(program, words):
    """One line says what is wrong."""
    pytest.importorskip("trl" if program == "trl_trainers" else "transformers")
    *_, option, value = words.split()
    with pytest.raises(SystemExit, match=f"{option}|{value}"):
        importlib.import_module(program).main(["--device", "cpu", *words.split()])
