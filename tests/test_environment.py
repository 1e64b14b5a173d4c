"""tigon.env and the doctor: what they say is true, and a broken op does not pass."""

import dataclasses
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import tigon
from tigon import _requirements, doctor, environment
from tigon.__main__ import main as command_line

ROOT = Path(__file__).resolve().parent.parent


def test_env():
    found = tigon.env()
    assert found.tigon == tigon.__version__ and torch.__version__ in found.torch
    assert found.cpu.split()[0] in ("avx512", "avx2", "scalar")
    assert os.path.exists(found.library) and found.compiler[0].isdigit()
    assert len(found.devices) == torch.cuda.device_count()
    text = str(found)
    for entry in dataclasses.fields(found):
        assert entry.name.replace("_", " ") in text
    assert found.packages.keys() <= set(environment.PACKAGES)
    assert found.products == found.matmuls


def test_env_names_a_lowered_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    properties = lambda index: types.SimpleNamespace(total_memory=2**37)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for own in (True, False):
        monkeypatch.setattr(environment, "_library_function", lambda *_, own=own: lambda capability: own)
        (said,) = environment._devices()
        assert said.startswith("cuda:0 H200, sm_90, 128 GiB") and ("matmuls of our own" in said) == own
    monkeypatch.setenv("TIGON_CUDA_CAPABILITY", "80")
    assert list(environment._devices()) == ["cuda:0 H200, sm_90, kernels as on sm_80, 128 GiB"]


def test_notes():
    """What does not fit together is said."""
    notes = lambda *args: list(environment._notes(*args))  # noqa: E731
    assert notes({}, "", ()) == notes({"transformers": "5.20.1"}, "", ()) == []
    assert "no CUDA kernels" in notes({}, "", ("cuda:0, sm_90",))[0]
    (note,) = notes({}, "CUDA 13", ())
    assert "sees no CUDA device" in note and "nvidia-smi" in note
    old = notes({}, "CUDA 13", ("cuda:0 Tesla V100, sm_70, 32 GiB", "cuda:1 A100, sm_80, 80 GiB"))
    assert old == ["cuda:0 Tesla V100 is older than sm_80: leave its models stock"]
    assert "4.57.0 is outside" in notes({"transformers": "4.57.0"}, "", ())[0]


def test_the_tested_range_ends_at_the_pin():
    """What `pip install` brings beside a new Tigon must not be told that nobody looked."""
    pins = re.findall(r"^transformers==(\S+);", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    newest = max(tuple(int(part) for part in pin.split(".")[:2]) for pin in pins)
    assert newest == environment.TESTED_TRANSFORMERS[1]


@pytest.mark.parametrize("version", [None, "2.9.1+cpu", "2.10.0"])
def test_what_is_missing_is_said_in_one_line(version, tmp_path):
    """In an interpreter that has no PyTorch, or one that says it is old."""
    if version is not None:
        (tmp_path / "torch.py").write_text(f"__version__ = {version!r}\n")
    code = f"import sys; sys.path[:0] = [{str(ROOT / 'python')!r}, {str(tmp_path)!r}]; import tigon"
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    if version is None:
        assert last.startswith("ModuleNotFoundError: [load] PyTorch must be") and "pip install torch" in last
    elif version == "2.9.1+cpu":
        assert last.endswith("torch must be >= 2.10, got 2.9.1+cpu (pip install -U torch)")
    else:
        assert "[load]" not in last


def test_other_systems_are_refused():
    with pytest.raises(tigon.Error, match="must be Linux, got darwin"):
        _requirements.look("darwin")


def test_the_command_line_shows_its_help(capsys):
    assert command_line([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_doctor_finds_everything_in_order(capsys):
    assert doctor.main() == 0
    shown = capsys.readouterr().out
    assert "FAILED" not in shown and "probes in order" in shown and "without a probe" not in shown
    for op in ("rms_norm", "swiglu", "silu", "rope", "cross_entropy", "linear_cross_entropy"):
        assert f"\n{op} " in shown
    assert {"rms_norm", "linear_log_prob"} <= set(doctor.ops())


@pytest.mark.parametrize(
    "broken, told",
    [
        (lambda x, w: 1.001 * real(x, w), "differs from the reference"),
        (lambda x, w: real(x, w) * float("nan"), "differs from the reference"),
        (lambda x, w: real(x, w) * (1 + 1e-7 * next(noise)), "two runs differ"),
        (lambda x, w: real(x, w.detach()), "RuntimeError"),
        (lambda x, w: real(x, torch.ones_like(w)) * w.detach() + 0 * w, "differs from the reference"),
    ],
)
def test_doctor_sees_a_broken_op(broken, told, monkeypatch):
    """Value, NaN, repeatability, a missing gradient, a wrong gradient."""
    monkeypatch.setattr(tigon, "rms_norm", broken)
    broken.__module__ = "tigon.ops.rms_norm"
    findings = [f for f in doctor.examine(["cpu"], (torch.float32,)) if f.op == "rms_norm"]
    assert len(findings) == 1 and told in findings[0].problem and findings[0].status == "FAILED"
    assert f"rms_norm on cpu in float32: {findings[0].problem}" in doctor.table(findings)


real = tigon.rms_norm
noise = iter(range(1, 1000))


def test_doctor_names_ops_without_a_probe(monkeypatch):
    def new_op(x):
        return x

    new_op.__module__ = "tigon.ops.new_op"
    monkeypatch.setattr(tigon, "new_op", new_op, raising=False)
    monkeypatch.setattr(tigon, "__all__", [*tigon.__all__, "new_op"])
    assert "new_op" in doctor.unprobed()


def said_by(*command, **environment) -> str:
    env, command = {**os.environ, **environment}, [sys.executable, *command]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_command_line(capsys):
    """`python -m tigon`, whose library follows TIGON_CPU_ISA; a command that is not there is named."""
    assert "scalar kernels" in said_by("-m", "tigon", "env", TIGON_CPU_ISA="scalar")
    with pytest.raises(SystemExit) as ended:
        command_line(["nothing"])
    assert ended.value.code == 2 and "nothing" in capsys.readouterr().err


def test_imports():
    """No compiler, which takes longer to import than PyTorch itself, and no package that only some have."""
    code = """
import sys, tigon
print({"torch._dynamo", "torch._inductor", "sympy"} & sys.modules.keys())
import tigon.megatron
tigon.megatron.apply
print({"megatron", "transformers"} & sys.modules.keys())
sys.modules["transformers"] = None
from tigon.doctor import ops
print(len(ops()))
"""
    assert said_by("-c", code).split() == ["set()", "set()", str(len(doctor.ops()))]
