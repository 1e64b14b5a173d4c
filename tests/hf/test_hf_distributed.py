"""Two processes over gloo, and over NCCL where two GPUs are there: the cases are in distributed_cases.py."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import distributed_cases
import pytest
import torch
from packaging.version import Version
from two_processes import CASES, NEEDS

RANKS = 2
SECONDS = 600  # of all cases, on a machine that does other work too; a case that hangs ends them
ON_GPUS = (  # the others build on the CPU
    *("ddp", "fsdp2", "parallel_", "dtensor_", "losses_of_sharded"),
    *("adamw_", "clip_grad_norm_", "muon_", "contrastive_"),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What went wrong in each case, by rank; a case that is not there was not reached."""
    names = [name for name in CASES if not missing(name)]
    return run(tmp_path_factory.mktemp("ranks"), names, {"CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture(scope="module")
def outcomes_on_gpus(tmp_path_factory):
    """The same over NCCL."""
    names = [name for name in CASES if name.startswith(ON_GPUS)]
    return run(tmp_path_factory.mktemp("gpus"), names, {})


def run(folder, names, variables):
    """Start the processes, and read what each has written."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= variables
    command = [sys.executable, distributed_cases.__file__, str(folder), *names]
    logs = [folder / f"rank{rank}.log" for rank in range(RANKS)]
    ranks = []
    for rank, log in enumerate(logs):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        with open(log, "w") as file:
            ranks.append(
                subprocess.Popen(
                    command, env=environment | place, stdout=file, stderr=file, cwd=Path(__file__).parent
                )
            )
    try:
        for process in ranks:
            process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = {}
    for rank, log in enumerate(logs):
        path = folder / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        for name, error in map(json.loads, lines):
            said.setdefault(name, []).append(error)
        said[rank] = log.read_text()[-3000:]
    return said


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
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(ON_GPUS)])
def test_two_gpus(name, request):
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    check(request.getfixturevalue("outcomes_on_gpus"), name)


def check(said, name):
    assert name in said, f"not reached; the processes said:\n{said[0]}\n{said[1]}"
    assert said[name] == [None] * RANKS, "\n".join(error or "right" for error in said[name])
