"""The command lines that measure the records of a file of results again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable

import e2e
import small_steps
from files import Run
from store import ROOT

GIVEN = (
    "seq",
    "layers",
    "steps",
    "compile",
    "padding",
    "masked",
    "packed",
    "optimizer",
    "clip",
    "attention",
    "memory",
    "lora",
)
FLAGS = ("checkpointing", "autocast", "contrastive")
NAMED_CASES = 8  # a command names its cases up to this many


def values(records: Iterable[dict], name: str) -> str:
    """The values of a field, comma-separated."""
    return ",".join(dict.fromkeys(str(r[name]) for r in records if r.get(name) is not None))


def _device(run: Run) -> str:
    return "cpu" if run.cpu else "cuda"


def _op_command(run: Run) -> list[str]:
    there = [r for r in run.records if (ROOT / f"tests/cases/{r['op']}.py").exists()]  # an op may have gone
    words = ["python", "bench/run.py", "--ops", values(there or run.records, "op")]
    words += ["--providers", values(run.records, "provider"), "--dtypes", values(run.records, "dtype")]
    if (cases := values(run.records, "case")).count(",") < NAMED_CASES:
        words += ["--cases", cases]
    return words + (["--device", "cpu"] if run.cpu else [])


def _e2e_command(run: Run) -> list[list[str]]:
    settings: dict[tuple, list[dict]] = {}
    for r in run.records:
        given = {name: r[name] for name in GIVEN if r[name] not in (0, None, "", "torch", "sdpa")}
        given |= {"apply": e2e.options(r["apply"])} if r["apply"] else {}
        given |= {"dtype": r["dtype"]} if r["dtype"] != "bfloat16" else {}
        given |= {name: None for name in FLAGS if r[name]}
        settings.setdefault(tuple(given.items()), []).append(r)
    commands = []
    for given, records in settings.items():
        words = ["python", f"bench/{run.kind}.py"]
        words += ["--providers", values(records, "provider")] if run.kind == "e2e" else []
        words += ["--models", values(records, "model"), "--batches", values(records, "batch")]
        for name, value in given:
            words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
        commands.append(words)
    return commands


def _train_command(run: Run) -> list[str]:
    plan = run.records[0]["plan"]
    words = [f"--{name} {plan[name]}" for name in ("device", "dtype", "steps", "batch", "seq")]
    return ["make", "train", f"ARGS=--providers {','.join(run.records[0]['runs'])} {' '.join(words)}"]


def _host_command(run: Run) -> list[str]:
    return ["python", "bench/host.py", "--device", _device(run), "--dtype", run.records[0]["dtype"]]


def _adapters_command(run: Run) -> list[list[str]]:
    commands = {}
    for r in run.records:
        words = ["python", "bench/adapters.py", *(f"--{name}" for name in ("dora", "nf4") if r.get(name))]
        words += ["--device", "cpu", "--threads", str(r["threads"])] if run.cpu else []
        words += ["--dtype", r["dtype"]] if r.get("dtype", "bfloat16") != "bfloat16" else []
        commands.setdefault(tuple(words), []).append(r)
    return [[*words, "--parts", values(records, "part")] for words, records in commands.items()]


def _optimizer_command(run: Run) -> list[str]:
    kinds = values((r for r in run.records if r["kind"] != "agreement"), "kind")
    return ["python", "bench/optimizer.py", "--device", _device(run), "--kinds", kinds]


def _parallel_command(run: Run) -> list[list[str]]:
    return [
        ["torchrun", "--nproc-per-node", str(gpus), "bench/parallel.py"]
        for gpus in dict.fromkeys(r["gpus"] for r in run.records)
    ]


def _parallel_e2e_command(run: Run) -> list[list[str]]:
    commands: dict[tuple, list[dict]] = {}
    for r in run.records:
        given = {name: r[name] for name in ("model", "layers", "batch", "seq", "steps")}
        given["set"] = ",".join(f"{name}={json.dumps(value)}" for name, value in r["changes"].items())
        commands.setdefault((r["gpus"], *given.items()), []).append(r)
    return [
        [
            "torchrun",
            "--nproc-per-node",
            str(gpus),
            "bench/parallel_e2e.py",
            "--layouts",
            values(records, "layout"),
            *(w for name, v in given if v for w in (f"--{name}", str(v))),
        ]
        for (gpus, *given), records in commands.items()
    ]


def _medusa_command(run: Run) -> list[list[str]]:
    commands: list[list[str]] = []
    for model, layers, batch, steps in dict.fromkeys(
        tuple(map(r.get, ("model", "layers", "batch", "steps"))) for r in run.records
    ):
        mine = [r for r in run.records if (r["model"], r.get("layers"), r["batch"]) == (model, layers, batch)]
        words = ["python", "bench/medusa.py", "--model", model, "--batch", str(batch), "--steps", str(steps)]
        words += ["--layers", str(layers)] if layers else []
        named = {"heads": "heads", "stages": "stage", "lengths": "seq", "providers": "provider"}
        commands.append(
            words + [w for flag, name in named.items() for w in (f"--{flag}", values(mine, name))]
        )
    return commands


def _trl_command(run: Run) -> list[list[str]]:
    settings: dict[tuple, list[dict]] = {}
    for r in run.records:
        given = {name: r[name] for name in ("model", "layers", "batch", "seq", "prompt", "steps")}
        given["set"] = ",".join(f"{name}={json.dumps(value)}" for name, value in r["changes"].items())
        given |= {} if r["checkpointing"] else {"checkpointing": 0}
        settings.setdefault(tuple(given.items()), []).append(r)
    return [
        [
            "python",
            "bench/trl_trainers.py",
            "--trainers",
            values(records, "trainer"),
            "--providers",
            values(records, "provider"),
            *(w for name, v in given if v != "" for w in (f"--{name}", str(v))),
        ]
        for given, records in settings.items()
    ]


def _small_steps_command(run: Run) -> list[str]:
    """Cases of a loop and of Trainer by their names; TRL has one of its own."""
    words = ["python", "bench/small_steps.py", "--ways", values(run.records, "way")]
    words += ["--under", values(run.records, "under")]
    measured = {tuple(map(r.get, small_steps.ROW)) for r in run.records}
    names = [name for name, row in small_steps.CASES.items() if row in measured]
    return words + (["--cases", ",".join(names)] if names else [])


def _fp8_command(run: Run) -> list[str]:
    return ["python", "bench/fp8.py", "--device", _device(run), "--fp8", values(run.records, "fp8")]


def _accuracy_command(run: Run) -> list[str]:
    words = ["python", "bench/fp8_accuracy.py", "--device", _device(run)]
    return [*words, "--parts", values(run.records, "accuracy"), "--batch", values(run.records, "batch")]


COMMANDS: dict[str, Callable[[Run], list]] = {
    "op": _op_command,
    "host": _host_command,
    "e2e": _e2e_command,
    "floor": _e2e_command,
    "train": _train_command,
    "adapters": _adapters_command,
    "optimizer": _optimizer_command,
    "parallel": _parallel_command,
    "parallel_e2e": _parallel_e2e_command,
    "medusa": _medusa_command,
    "trl_trainers": _trl_command,
    "small_steps": _small_steps_command,
    "fp8": _fp8_command,
    "fp8_accuracy": _accuracy_command,
    "convergence": lambda run: ["python", "bench/convergence.py", "--device", _device(run)],
}


def command_lines(run: Run) -> list[str]:
    """The command lines that measure the same again, as far as the records tell."""
    found = COMMANDS[run.kind](run)
    return [shlex.join(words) for words in (found if isinstance(found[0], list) else [found])]
