"""Loads the native library and hands out its operators."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from tigon.error import Error


def library_path() -> Path:
    """The path of the native library: TIGON_LIBRARY, or next to this file."""
    override = os.environ.get("TIGON_LIBRARY")
    if override:
        return Path(override)
    return Path(__file__).parent / "lib" / "libtigon_torch.so"


def _load() -> ctypes.CDLL:
    path = library_path()
    if not path.exists():
        raise Error(f"[load] the native library must be at {path}, found none (build: `make build`)")
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    if _has_onednn_linear():
        library.tigon_enable_onednn()
    return library


def _has_onednn_linear() -> bool:
    """Whether this PyTorch has oneDNN's linear operator in the form that ``context_cpu.cpp`` calls."""
    expected = (
        "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
        "str? algorithm) -> Tensor Y"
    )
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if packet is None or not torch.backends.mkldnn.is_available():
        return False
    return str(packet.default._schema) == expected


library = _load()  # for the few functions that are no operators


def native(name: str):
    """The overload packet-free operator ``tigon::name`` (resolved once, at import)."""
    return getattr(torch.ops.tigon, name).default
