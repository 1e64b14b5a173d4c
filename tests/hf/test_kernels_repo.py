"""The repository for Hugging Face's package ``kernels``: made from a wheel, loaded without Tigon."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import kernels_repo
import pytest

from tigon._load import library_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """The variant of a wheel of this tree."""
    folder = tmp_path_factory.mktemp("kernels")
    wheel = folder / "tigon-1.2.3-py3-none-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library_path(), "tigon/lib/libtigon_torch.so")
        for file in (ROOT / "python" / "tigon").rglob("*.py"):
            archive.write(file, file.relative_to(ROOT / "python"))
    (made,) = kernels_repo.write_repository([wheel], folder / "repository")
    return made


def test_variant(variant):
    """Its name says for whom it is, and its metadata the same."""
    metadata = json.loads((variant / "metadata.json").read_text())
    backend = metadata["backend"]["type"]
    assert variant.name == f"torch-stable-abi210-{backend.replace('cuda', 'cu130')}-x86_64-linux"
    assert metadata["id"].endswith("_1_2_3")


@pytest.mark.parametrize(
    "built, name, architectures",
    [
        (b"\0CUDA 13.0.88 (80-real 90a-real 100-virtual)\0", "cu130", ["8.0", "9.0a", "10.0+PTX"]),
        (b"CUDA 12.8.93 (120-real)", "cu128", ["12.0"]),
    ],
)
def test_backend(built, name, architectures):
    """A library's own words are read."""
    assert kernels_repo.backend(built) == (name, {"type": "cuda", "archs": architectures})


def test_loaded_from_its_folder(variant, tmp_path):
    """``get_local_kernel`` and ``kernelize``: the layers run, losses and gradients are stock's."""
    pytest.importorskip("kernels", reason="needs the package kernels")
    if variant.name.split("-")[3] != "cpu":
        pytest.skip("needs a library built without CUDA")
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TIGON_LIBRARY")}
    command = [sys.executable, str(ROOT / "tests/hf/kernels_repo_cases.py"), str(variant.parents[1])]
    done = subprocess.run(
        command, cwd=tmp_path, env=env | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
