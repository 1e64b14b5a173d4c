"""``liger_kernel.utils``, ``liger_kernel.ops.utils`` and other small things that frameworks import."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable

import torch
from packaging.version import Version

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None


def is_npu_available() -> bool:
    """Whether torch runs on an Ascend NPU."""
    return hasattr(torch, "npu") and torch.npu.is_available()


def infer_device() -> str:
    """The accelerator's type, or ``cpu``."""
    if torch.cuda.is_available():
        return "cuda"
    if is_npu_available():
        return "npu"
    return "xpu" if torch.xpu.is_available() else "cpu"


def compare_version(package: str, compare: Callable[[Version, Version], bool], target: str) -> bool:
    """``compare(installed version, target)``; False if the package is missing."""
    try:
        module = importlib.import_module(package)
    except ImportError:
        return False
    return compare(Version(module.__version__), Version(target))


def ensure_contiguous(fn: Callable) -> Callable:
    """Decorator of autograd methods: tensor arguments arrive contiguous."""

    def dense(x):
        return x.contiguous() if isinstance(x, torch.Tensor) else x

    @functools.wraps(fn)
    def wrapper(ctx, *args, **kwargs):
        return fn(ctx, *map(dense, args), **{name: dense(value) for name, value in kwargs.items()})

    return wrapper


def calculate_settings(n: int) -> tuple[int, int]:
    """(columns of one Triton block, warps) for rows of n, for kernels of their own that callers bring."""
    block = 1 << max(0, n - 1).bit_length()
    if block > 65536:
        raise RuntimeError(f"rows of {n} do not fit one Triton block of at most 65536")
    warps = next((w for limit, w in ((32768, 32), (8192, 16), (2048, 8)) if block >= limit), 4)
    return block, warps


class _TritonTypes(dict):
    """torch dtype -> Triton's, for kernels of their own that callers bring; needs triton when it is read."""

    def __missing__(self, dtype):
        import triton.language as tl

        self.update({torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16})
        return dict.__getitem__(self, dtype)


torch_to_triton_dtype = _TritonTypes()
