"""``liger_kernel.utils``, ``liger_kernel.ops.utils`` and other small things that frameworks import."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import operator
import warnings
from dataclasses import dataclass

import torch
from packaging.version import Version

import tigon
from tigon.integrations.liger.names import public

IS_TRANSFORMERS_V5_OR_LATER = True
MIN_SUPPORTED_TRANSFORMERS_VERSION = Version("5.0.0")
LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"
PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None


def is_peft_available() -> bool:
    return PEFT_AVAILABLE


def is_transformers_available() -> bool:
    return importlib.util.find_spec("transformers") is not None


def is_npu_available() -> bool:
    """Whether torch runs on an Ascend NPU."""
    return hasattr(torch, "npu") and torch.npu.is_available()


def is_hip() -> bool:
    """Whether torch was built for AMD."""
    return torch.version.hip is not None


def infer_device() -> str:
    """The accelerator's type, or ``cpu``."""
    if torch.cuda.is_available():
        return "cuda"
    if is_npu_available():
        return "npu"
    return "xpu" if torch.xpu.is_available() else "cpu"


# What Liger calls the architectures. Others get the compute capability, the target or the device type.
_NVIDIA = {
    (7, 0): "volta_turing",
    (7, 5): "volta_turing",
    (8, 0): "ampere_ada",
    (8, 6): "ampere_ada",
    (8, 9): "ampere_ada",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell_ultra",
    (12, 0): "blackwell_consumer",
}
_AMD = {"gfx908": "cdna", "gfx90a": "cdna2", "gfx94": "cdna3", "gfx110": "rdna3"}  # by how targets begin


def _infer_nvidia_arch(device_id: int) -> str:
    found = torch.cuda.get_device_capability(device_id)
    return _NVIDIA.get(found, "sm_{}{}".format(*found))


def _infer_amd_arch(device_id: int) -> str:
    target = getattr(torch.cuda.get_device_properties(device_id), "gcnArchName", "").partition(":")[0]
    return next((arch for start, arch in _AMD.items() if target.startswith(start)), target or "cuda")


def _infer_xpu_arch(device_id: int) -> str:
    name = torch.xpu.get_device_properties(device_id).name
    return "pvc" if "Data Center GPU Max" in name else "arc" if "Arc" in name else "xpu"


def _infer_npu_arch(device_id: int) -> str:
    name = torch.npu.get_device_properties(device_id).name.lower()
    return next((arch for arch in ("ascend910", "ascend310") if arch in name), "npu")


@functools.lru_cache
def infer_device_arch(device_id: int = 0) -> str:
    """The accelerator's architecture, or the device type where it cannot be told."""
    device = public("utils", "infer_device", infer_device)()
    name = f"_infer_{('amd' if is_hip() else 'nvidia') if device == 'cuda' else device}_arch"
    try:
        return public("utils", name, globals()[name])(device_id)
    except Exception:  # a CPU, or no driver: callers ask before they know that there is one
        return device


def infer_comm_backend() -> str:
    """torch.distributed's backend for :func:`infer_device`."""
    return {"cuda": "nccl", "npu": "hccl", "xpu": "ccl"}.get(infer_device(), "gloo")


def get_total_gpu_memory() -> int:
    """GiB of the first GPU."""
    return round(torch.cuda.get_device_properties(0).total_memory / 2**30)


def compare_version(package: str, compare, target: str) -> bool:
    """``compare(installed version, target)``; False where the package is missing."""
    try:
        module = importlib.import_module(package)
    except ImportError:
        return False
    return compare(Version(module.__version__), Version(target))


def ensure_contiguous(fn):
    """Decorator of autograd methods: tensor arguments arrive contiguous."""

    def dense(x):
        return x.contiguous() if isinstance(x, torch.Tensor) else x

    @functools.wraps(fn)
    def wrapper(ctx, *args, **kwargs):
        return fn(ctx, *map(dense, args), **{name: dense(value) for name, value in kwargs.items()})

    return wrapper


def amp_custom_fwd(forward):
    """Decorator of an autograd function's forward under autocast, for :func:`infer_device`'s type."""
    return torch.amp.custom_fwd(forward, device_type=infer_device())


def amp_custom_bwd(backward):
    """The same of its backward."""
    return torch.amp.custom_bwd(backward, device_type=infer_device())


def get_amp_custom_fwd_bwd():
    return amp_custom_fwd, amp_custom_bwd


def device_context(device):
    """A context in which this device is its type's current one."""
    device = torch.device(device)
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


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


def transformers_version_dispatch(
    required_version,
    before_fn,
    after_fn,
    before_args=(),
    after_args=(),
    before_kwargs=None,
    after_kwargs=None,
):
    """Call one of two functions by transformers' version."""
    if compare_version("transformers", operator.lt, required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))


def apply_liger_triton_cache_manager() -> None:
    """Nothing to do: Tigon compiles nothing at run time."""


def print_env_report() -> None:
    """Versions, devices and what Tigon was built with."""
    print(tigon.env())


@dataclass(frozen=True)
class FusedLinearCrossEntropyConfig:
    """Sizes that ``configure`` takes."""

    max_tokens: int
    hidden_size: int
    local_vocab_size: int
    group: str | None = None
    tiles_per_reduce: int = 1


@dataclass(frozen=True)
class MoEConfig:
    """Sizes that ``configure`` takes."""

    max_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_hosts: int
    gpus_per_host: int
    group: str | None = None
    max_inflight: int = 1


def configure(*, process_groups=None, bootstrap_group=None, device=None, flsce=None, moe=None) -> bool:
    """Warns and returns False, as there without ``liger-cute-kernels``: Tigon has no runtime to set up."""
    warnings.warn("[compat.liger] configure: Tigon has no runtime to set up", stacklevel=2)
    return False
