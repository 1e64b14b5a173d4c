"""The decisions of the build: CUDA or not, which PyTorch, what is said where there is none."""

import os
import re
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
        (None, {"TIGON_CUDA_ARCHS": "80-real;90a-real"}, "AUTO 80-real;90a-real"),
        ("9.0", {"TIGON_CUDA_ARCHS": "OFF"}, "AUTO OFF"),
    ],
)
def test_cuda_is_built_for_the_gpu_that_is_there(gpu, wish, options, tmp_path):
    env = with_gpu(gpu, tmp_path) | wish
    command = ["bash", "-c", OPTIONS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == options


def with_gpu(gpu, folder) -> dict:
    """An environment whose nvidia-smi names a capability, or none."""
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + (f"echo {gpu}\n" if gpu else "exit 9\n"))
    smi.chmod(0o755)
    env = {key: value for key, value in os.environ.items() if not key.startswith("TIGON_")}
    return env | {"PATH": f"{folder}:{env['PATH']}"}


@pytest.mark.parametrize("gpu, said", [(None, "CPU only \\(no NVIDIA GPU"), ("8.0", "80-real|no nvcc")])
def test_pip_and_cmake_look_for_the_gpu_too(gpu, said, tmp_path):
    """With the definitions that pyproject.toml passes where the environment says nothing."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    defaults = re.findall(r'^(TIGON_\w+) = \{.*default = "(.*)" \}', text, re.MULTILINE)
    assert ("TIGON_CUDA", "AUTO") in defaults and ("TIGON_CUDA_ARCHS", "") in defaults
    options = [f"-D{name}={value}" for name, value in (*defaults, ("TIGON_TORCH", "OFF"))]
    command = [
        ROOT / ".venv/bin/cmake",
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={ROOT}/.venv/bin/ninja",
        "-S",
        ROOT,
        "-B",
        tmp_path / "build",
        *options,
    ]
    env = with_gpu(gpu, tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert re.search(said, done.stdout), done.stdout


def test_no_compiler_is_said_in_one_line(tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "CXX"} | {"PATH": str(tmp_path)}
    code = "import build_backend; build_backend.get_requires_for_build_wheel()"
    command = [sys.executable, "-c", code]
    env["PYTHONPATH"] = str(ROOT / "tools")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.strip().count("\n") == 0
    assert "C++20 compiler" in done.stderr and "apt install g++" in done.stderr


def find_torch(*packages: Path):
    """What cmake/find_torch.py says where nothing but ``packages`` can be imported."""
    code = "import runpy, sys; sys.path[:] = sys.argv[2:] + [p for p in sys.path if 'packages' not in p]; "
    code += "runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", code, ROOT / "cmake/find_torch.py", *packages]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_no_torch_is_said_in_the_first_line():
    done = find_torch()
    assert done.returncode == 1 and done.stdout == ""
    first = done.stderr.splitlines()[0]
    assert "PyTorch >= 2.10" in first and "here is none: pip install torch==" in first


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
        assert done.returncode == 1 and f"here is {version}: pip install" in done.stderr
