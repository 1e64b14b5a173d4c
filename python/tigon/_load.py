"""Loads the native library and hands out its operators."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tigon.error import Error

MINIMUM_TORCH = (2, 10)


def _library_path() -> Path:
    override = os.environ.get("TIGON_LIBRARY")
    if override:
        return Path(override)
    return Path(__file__).parent / "lib" / "libtigon_torch.so"


def _load() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < MINIMUM_TORCH:
        raise Error(f"[load] torch must be >= 2.10, got {torch.__version__}")
    path = _library_path()
    if not path.exists():
        raise Error(f"[load] the native library must be at {path}, found none (build it with `make build`)")
    torch.ops.load_library(str(path))


_load()


def native(name: str):
    """The overload packet-free operator ``tigon::name`` (resolved once, at import)."""
    return getattr(torch.ops.tigon, name).default
