"""Describes the environment: versions, devices and the build of the native library."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import re
import sys
from dataclasses import dataclass, field, fields

import torch

from tigon._deterministic import is_deterministic
from tigon._load import library_path

# Packages whose versions matter to readers of a report; missing ones are left out.
PACKAGES = ("transformers", "tokenizers", "accelerate", "peft", "trl", "kernels", "liger-kernel", "triton")
OLDEST_GPU = 80
# Import and test with these; outside the range everything still runs, and a warning says that nobody looked.
TESTED_TRANSFORMERS = ((5, 17), (5, 24))


@dataclass(frozen=True)
class Environment:
    """Result of :func:`tigon.env`: plain values by name; prints as a table."""

    tigon: str
    python: str
    system: str
    torch: str
    library: str
    compiler: str
    cpu: str
    cuda_build: str  # toolkit and architectures of the CUDA kernels; "" without
    deterministic: str  # tigon.deterministic
    devices: tuple[str, ...] = ()
    packages: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)  # TIGON_* that are set
    matmuls: tuple[str, ...] = ()  # kernels of deterministic matmuls on CUDA that have been found
    graphs: tuple[str, ...] = ()  # CUDA graphs of this process, and why calls run eagerly
    notes: tuple[str, ...] = ()  # what does not fit together

    @property
    def products(self) -> tuple[str, ...]:
        """The earlier name of ``matmuls``."""
        return self.matmuls

    def __str__(self) -> str:
        return "\n".join(f"{name:<13} {value}" for name, value in self._rows())

    def _rows(self):
        for entry in fields(self):
            value = getattr(self, entry.name)
            name = entry.name.replace("_", " ")
            if isinstance(value, str):
                yield name, value or "none"
            elif isinstance(value, dict):
                yield name, ", ".join(f"{key} {text}" for key, text in value.items()) or "none"
            else:
                yield from ((name, line) for line in value or ("none",))


def env() -> Environment:
    """Versions, devices, instruction set, and what the native library was built with.

    Starts no CUDA context beyond asking for the devices' names.
    """
    import tigon
    from tigon import graphs

    packages = _packages()
    cuda_build = library_text("tigon_cuda_build")
    devices = tuple(_devices())
    return Environment(
        tigon=tigon.__version__,
        python=sys.version.split()[0],
        system=platform.platform(),
        torch=f"{torch.__version__} (CUDA {torch.version.cuda})" if torch.version.cuda else torch.__version__,
        library=str(library_path()),
        compiler=library_text("tigon_compiler"),
        cpu=f"{library_text('tigon_isa')} kernels, {torch.get_num_threads()} threads",
        cuda_build=cuda_build,
        deterministic="on" if is_deterministic() else "off",
        devices=devices,
        packages=packages,
        variables={key: value for key, value in sorted(os.environ.items()) if key.startswith("TIGON_")},
        matmuls=tuple(library_text("tigon_gemm_kernels").splitlines()),
        graphs=tuple(
            line for held in graphs.live if getattr(held, "outer", None) is None for line in held.lines()
        ),
        notes=tuple(_notes(packages, cuda_build, devices)),
    )


def library_text(function: str) -> str:
    """The result of a ``const char*`` function of the native library."""
    return _library_function(function, ctypes.c_char_p)().decode()


def has_matmul_kernels(device: torch.device) -> bool:
    """Whether our own matmul kernels run there (on a CPU in tests/emulator)."""
    return _has_matmul_kernels(device)


# What torch.compiler.assume_constant_result does, which imports the compiler.
has_matmul_kernels._dynamo_marked_constant = True


@functools.cache
def _has_matmul_kernels(device):
    if device.type != "cuda":
        return device.type == "cpu" and library_text("tigon_cuda_build") == "emulated"
    major, minor = torch.cuda.get_device_capability(device)
    return _library_function("tigon_has_matmul_kernels", ctypes.c_bool)(10 * major + minor)


def _library_function(name, result):
    entry = getattr(ctypes.CDLL(str(library_path())), name)
    entry.restype = result
    return entry


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _devices():
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        lowered = os.environ.get("TIGON_CUDA_CAPABILITY")
        sm = f"sm_{major}{minor}" + (f", kernels as on sm_{lowered}" if lowered else "")
        own = _has_matmul_kernels.__wrapped__(torch.device("cuda", index))
        matmuls = ", losses without gradients, experts, LoRA and Muon by matmuls of our own" if own else ""
        yield f"cuda:{index} {torch.cuda.get_device_name(index)}, {sm}, {memory:.0f} GiB{matmuls}"


def _notes(packages, cuda_build, devices):
    if devices and not cuda_build:
        yield "this build has no CUDA kernels: calls on a GPU are refused (build it with nvcc on the PATH)"
    if cuda_build and not devices:
        wanted = f"a driver of CUDA {torch.version.cuda}" if torch.version.cuda else "a torch built for CUDA"
        yield f"built with CUDA, and torch sees no CUDA device: it takes {wanted} (see nvidia-smi)"
    for device in devices:
        if int(re.search(r"sm_(\d+)", device)[1]) < OLDEST_GPU:
            yield f"{device.split(',')[0]} is older than sm_{OLDEST_GPU}: leave its models stock"
    if "transformers" in packages:
        note = transformers_note(packages["transformers"])
        if note:
            yield note


def transformers_note(version: str) -> str | None:
    """The note on a transformers version outside the tested range, or ``None``."""
    low, high = TESTED_TRANSFORMERS
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if low <= parts <= high:
        return None
    tested = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    return (
        f"transformers {version} is outside the tested range {tested}: parts are still recognised by their "
        "source, so what changed stays stock; read the report of tigon.apply"
    )
