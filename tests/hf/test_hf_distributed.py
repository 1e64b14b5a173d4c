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
BATCH = 50  # cases of one run
ON_GPUS = (  # the others build on the CPU
    *("ddp", "fsdp2", "parallel_", "dtensor_", "losses_of_sharded"),
    *("adamw_", "clip_grad_norm_", "muon_", "contrastive_"),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """What went wrong in each chosen case, by rank."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    chosen = {item.callspec.params.get("name") for item in items}
    names = [name for name in CASES if name in chosen and not missing(name)]
    return run_cases(names, tmp_path_factory.mktemp("ranks"))


def run_cases(names, folder, size=RANKS):
    """Processes end after BATCH cases: each case's groups hold threads and sockets until then.

    If a case ends its processes, new ones run those behind it.
    """
    found = {}
    while left := [name for name in names if name not in found]:
        place, batch = folder / str(len(left)), left[:BATCH]
        place.mkdir()
        said = run_ranks(Path(distributed_cases.__file__), [place, *batch], place, size, check=False)
        reached = outcomes_of(place, size)
        found |= reached
        for name in [name for name in batch if name not in reached][:1]:
            found[name] = ["the processes ended in it:", *(text[-3000:] for text in said)]
    return found


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
    ended = ["not reached:", ran.stdout[-3000:], ran.stderr[-3000:]]
    return dict.fromkeys(names, ended) | outcomes_of(folder, RANKS)


def outcomes_of(folder, size):
    """What each process has written about the cases that all of them reached."""
    found = {}
    for path in folder.glob("rank*.jsonl"):
        for name, error in map(json.loads, path.read_text().splitlines()):
            found.setdefault(name, []).append(error)
    return {name: errors for name, errors in found.items() if len(errors) == size}


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
    check(request.getfixturevalue("outcomes")[name])


@pytest.mark.xdist_group("two processes")
def test_three_processes(tmp_path):
    """They cannot share the rows of most weights evenly."""
    name = "fp8_gather_rows"
    check(run_cases([name], tmp_path, 3)[name])


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(ON_GPUS)])
def test_two_gpus(name, request):
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    check(request.getfixturevalue("outcomes_on_gpus")[name])


def check(errors):
    assert not any(errors), "\n".join(error or "right" for error in errors)
