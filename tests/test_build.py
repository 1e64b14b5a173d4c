"""The decisions of the build: CUDA or not, which PyTorch, what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = 'source tools/bootstrap.sh train && cuda_options && echo "$cuda $archs $why"'


@pytest.mark.parametrize(
    "gpu, wish, options",
    [
        (None, {}, "OFF 90a-real no NVIDIA GPU: building for the CPU; TIGON_CUDA=ON builds CUDA anyway"),
        (None, {"TIGON_CUDA": "ON"}, "ON 90a-real"),
        ("9.0", {}, "AUTO 90a-real"),
        ("8.6", {}, "AUTO 86-real"),
        ("12.0", {"TIGON_CUDA_ARCHS": "120-virtual"}, "AUTO 120-virtual"),
        ("9.0", {"TIGON_CUDA": "OFF"}, "OFF 90a-real"),
    ],
)
def test_cuda_is_built_for_the_gpu_that_is_there(gpu, wish, options, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + (f"echo {gpu}\n" if gpu else "exit 9\n"))
    smi.chmod(0o755)
    env = {key: value for key, value in os.environ.items() if not key.startswith("TIGON_")}
    env |= {"PATH": f"{tmp_path}:{env['PATH']}"} | wish
    command = ["bash", "-c", OPTIONS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == options


def find_torch(*packages: Path):
    """What cmake/find_torch.py says where nothing but ``packages`` can be imported."""
    code = "import runpy, sys; sys.path[:] = sys.argv[2:] + [p for p in sys.path if 'packages' not in p]; "
    code += "runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", code, ROOT / "cmake/find_torch.py", *packages]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_no_torch_is_said_in_the_first_lines():
    done = find_torch()
    assert done.returncode == 1 and done.stdout == ""
    first, second = done.stderr.splitlines()[:2]
    assert "PyTorch, 2.10 or newer" in first and first.endswith("has none. First do")
    assert "pip install torch==" in second


@pytest.mark.parametrize("version, fits", [("2.9.1", False), ("2.10.0", True), ("3.0.0a0+git1", True)])
def test_torch_is_found_by_its_version(version, fits, tmp_path):
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text(f"__version__ = '{version}'\n")
    done = find_torch(tmp_path)
    if fits:
        assert done.returncode == 0 and done.stdout.strip() == str(torch)
    else:
        assert done.returncode == 1 and f"has {version}. First do" in done.stderr
