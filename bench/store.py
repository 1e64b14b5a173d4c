"""Records of measurements, a line of JSON each: what they belong to, which are the same case, files."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Callable, Hashable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Key = Callable[[dict], Hashable]  # what makes two records the same case

# The fields in which two records of one case agree, by what wrote them.
KEYS = {
    "op": ("op", "case", "dtype", "pass", "provider"),
    "host": ("op",),
    "convergence": ("dtype", "family"),
    "medusa": (
        *("model", "layers", "changes", "dtype", "stage", "heads", "batch", "seq", "device", "provider"),
    ),
    "parallel": ("op", "case", "provider", "gpus"),
    "parallel_e2e": ("layout", "model", "changes", "layers", "batch", "seq", "gpus", "provider"),
    "trl_trainers": (
        *("trainer", "model", "layers", "changes", "batch", "seq", "prompt", "checkpointing", "dtype"),
        *("device", "provider"),
    ),
    "small_steps": ("under", "model", "layers", "rank", "batch", "seq", "changes", "dtype", "device", "way"),
    "adapters": (
        *("part", "rows", "tokens", "columns", "outputs", "rank", "dtype", "checkpointing", "dora", "nf4"),
        *("threads", "base", "provider"),
    ),
    "optimizer": ("parameters", "kind"),
    "fp8": ("fp8", "way", "microbatches", "model", "layers", "batch", "seq", "changes", "device"),
    "fp8_accuracy": ("accuracy", "way", "seed", "layers", "steps", "batch", "device"),
}


def fields(*names: str) -> Key:
    """The key that these fields of a record are."""
    return lambda record: json.dumps([record.get(name) for name in names], sort_keys=True)


def key_of(kind: str) -> Key:
    """What makes two records of this kind the same case."""
    return fields(*KEYS[kind])


def read(path: Path, key: Key | None = None) -> list[dict]:
    """Records of a file, none if it does not exist; with a key, of a case that was run twice the last one."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.strip()]
    return records if key is None else list({key(record): record for record in records}.values())


def append(path: Path, record: dict) -> None:
    """One line, at once: a crash later loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def finished(record: dict) -> bool:
    """Whether another run of the case would give the same."""
    return "error" not in record or bool(record.get("out_of_memory"))


def error_text(record: dict) -> str:
    """The cell of a case without figures."""
    return "out of memory" if record.get("out_of_memory") else record["error"][:60].replace("|", "/")


def commit() -> str:
    """The commit measured: from TIGON_COMMIT where the tree came without its history."""
    if os.environ.get("TIGON_COMMIT"):
        return os.environ["TIGON_COMMIT"]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device_name(device: str) -> str:
    """The card, or the processor with the threads that PyTorch uses."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return f"{found.group(1) if found else 'CPU'}, {torch.get_num_threads()} threads"


def facts(device: str, *names: str) -> dict[str, str | None]:
    """What the numbers of a program belong to; with the versions of packages, None where one is missing."""
    import torch

    found: dict[str, str | None] = {"gpu": device_name(str(device)), "torch": torch.__version__}
    for name in names:
        found[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"commit": commit()}


def results_file(gpu: str, name: str) -> Path:
    """bench/results/<device>/<name>.jsonl."""
    return ROOT / "bench/results" / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") / f"{name}.jsonl"
