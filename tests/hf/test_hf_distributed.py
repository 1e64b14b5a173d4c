"""Two processes over gloo, and over NCCL where two GPUs are there: the cases are in distributed_cases.py."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import distributed_cases
import pytest
import torch
from packaging.version import Version
from two_processes import CASES, NEEDS

from ranks import SECONDS, run_ranks

RANKS = 2
ON_GPUS = (  # the others build on the CPU
    *("ddp", "fsdp2", "parallel_", "dtensor_", "losses_of_sharded"),
    *("adamw_", "clip_grad_norm_", "muon_", "contrastive_"),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """What went wrong in each chosen case, by rank; a case that is not there was not reached."""
    folder = tmp_path_factory.mktemp("ranks")
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    chosen = {item.callspec.params.get("name") for item in items}
    names = [name for name in CASES if name in chosen and not missing(name)]
    said = run_ranks(Path(distributed_cases.__file__), [folder, *names], folder, check=False)
    return outcomes_of(folder, said)


@pytest.fixture(scope="module")
def outcomes_on_gpus(tmp_path_factory):
    """The same over NCCL."""
    folder = tmp_path_factory.mktemp("gpus")
    names = [name for name in CASES if name.startswith(ON_GPUS)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        distributed_cases.__file__,
        str(folder),
        *names,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return outcomes_of(folder, [ran.stdout, ran.stderr])


def outcomes_of(folder, said):
    """What each process has written, and its last words under its rank."""
    found = {rank: text[-3000:] for rank, text in enumerate(said)}
    for path in folder.glob("rank*.jsonl"):
        for name, error in map(json.loads, path.read_text().splitlines()):
            found.setdefault(name, []).append(error)
    return found


def missing(name):
    """The package, of a version where one is named, that a case needs and that is not here, or None."""
    if name not in NEEDS:
        return None
    package, _, version = NEEDS[name].partition(">=")
    if importlib.util.find_spec(package) is None:
        return NEEDS[name]
    old = version and Version(importlib.metadata.version(package)) < Version(version)
    return NEEDS[name] if old else None


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("name", CASES)
def test_two_processes(name, request):
    if missing(name):
        pytest.skip(f"needs {missing(name)}")
    check(request.getfixturevalue("outcomes"), name)


@pytest.mark.xdist_group("two processes")
def test_three_processes(tmp_path):
    """They cannot share the rows of most weights evenly."""
    name = "fp8_gather_rows"
    said = run_ranks(Path(distributed_cases.__file__), [tmp_path, name], tmp_path, size=3, check=False)
    check(outcomes_of(tmp_path, said), name, 3)


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(ON_GPUS)])
def test_two_gpus(name, request):
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    check(request.getfixturevalue("outcomes_on_gpus"), name)


def check(said, name, ranks=RANKS):
    assert name in said, f"not reached; the processes said:\n{said[0]}\n{said[1]}"
    assert said[name] == [None] * ranks, "\n".join(error or "right" for error in said[name])
