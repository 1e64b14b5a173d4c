"""Writes a repository for Hugging Face's package ``kernels`` from wheels: those in dist if none are named.

A wheel becomes one variant of PyTorch's stable ABI: the package, and packaging/kernels in front of it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging" / "kernels"
VERSION = (
    1  # of the interface, which `get_kernel(..., version=)` names: raised when a function or layer changes
)
STABLE_ABI = "torch-stable-abi210"
BUILT_FOR = re.compile(rb"CUDA (\d+)\.(\d+)\.\d+ \(([\w -]+)\)")  # csrc/tigon/torch/build_info.cpp


def backend(library: bytes) -> tuple[str, dict]:
    """The name of a library's backend in a variant, and its entry in metadata.json."""
    built = BUILT_FOR.search(library)
    if built is None:
        return "cpu", {"type": "cpu"}
    architectures = []
    for number, suffix, kind in re.findall(r"(\d+)([af]?)-(real|virtual)", built[3].decode()):
        architectures.append(f"{number[:-1]}.{number[-1]}{suffix}{'+PTX' if kind == 'virtual' else ''}")
    return f"cu{int(built[1])}{int(built[2])}", {"type": "cuda", "archs": architectures}


def add_variant(wheel: Path, repository: Path) -> Path:
    """One wheel as a folder of ``repository``/build."""
    with zipfile.ZipFile(wheel) as archive:
        name, entry = backend(archive.read("tigon/lib/libtigon_torch.so"))
        variant = repository / "build" / f"{STABLE_ABI}-{name}-x86_64-linux"
        archive.extractall(variant, [name for name in archive.namelist() if name.startswith("tigon/")])
    for file in ("__init__.py", "layers.py"):
        shutil.copy(PACKAGING / file, variant)
    metadata = {
        "id": f"_tigon_{name}_{wheel.name.split('-')[1].replace('.', '_')}",
        "name": "tigon",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": entry,
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def write_repository(wheels: list[Path], repository: Path) -> list[Path]:
    """The variants of a repository, which is made anew."""
    shutil.rmtree(repository, ignore_errors=True)
    variants = [add_variant(wheel, repository) for wheel in wheels]
    shutil.copy(PACKAGING / "README.md", repository)
    shutil.copy(ROOT / "LICENSE", repository)
    return variants


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "kernels-repo")
    options = parser.parse_args()
    chosen = options.wheels or sorted((ROOT / "dist").glob("**/tigon-*.whl"))
    if not chosen:
        parser.error("no wheel in dist: make wheel")
    for made in write_repository(chosen, options.out):
        print(made)
