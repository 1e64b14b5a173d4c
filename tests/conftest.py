"""Fixtures of all tests: where to find things, which devices there are, seeds, poison."""

import collections
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

TESTS = Path(__file__).resolve().parent
# Commands that the tests start import the package from where the tests do (pyproject.toml, pythonpath).
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(TESTS.parent / "python"), os.environ.get("PYTHONPATH")))
)

# glibc returns large blocks to the system and faults in fresh pages, all zeros, for the next ones. Kept, they
# cost nothing and hold old numbers, so that an element that was not written shows.
if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
    M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)

FEWEST_CASES = 8  # of a test, without --all
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def pytest_addoption(parser):
    """--all, which `.ci/run` gives."""
    parser.addoption("--all", action="store_true", help="every case of every test, and tests marked slow")


def left_out(config, items) -> set:
    """The items that a run leaves out: every test keeps some cases, drawn at random, the same in each run.

    A run that names tests, or takes --all, has all of their cases.
    """
    named = config.args_source is config.ArgsSource.ARGS or config.option.keyword or config.option.markexpr
    if named or config.getoption("--all"):
        return set()
    cases = collections.defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    left = set()
    for name, of_test in cases.items():
        count = max(FEWEST_CASES, len(of_test) // 8)
        if count < len(of_test):
            left.update(set(of_test) - set(random.Random(name).sample(of_test, count)))
    return left


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config, items):
    """Skip what needs hardware that is not there or time that was not given, and say which.

    Of the cases of one test one is skipped for all, and says how many they are.
    """
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = "needs an NVIDIA GPU: torch sees no CUDA device"
    # A test that is asked for by its name is run.
    if not config.getoption("--all") and not any("::" in arg for arg in config.args):
        skips["slow"] = "slow: runs with --all"
    cases, kept = collections.Counter(), []
    for item in items:
        reasons = [reason for mark, reason in skips.items() if item.get_closest_marker(mark)]
        key = item.nodeid.partition("[")[0]
        cases[key] += bool(reasons)
        if not reasons or cases[key] == 1:
            kept.append((item, key, reasons))
    for item, key, reasons in kept:
        for reason in reasons:
            item.add_marker(pytest.mark.skip(reason=reason + f" ({cases[key]} cases)" * (cases[key] > 1)))
    left = left_out(config, [item for item, _, reasons in kept if not reasons])
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item, *_ in kept if item not in left]


def pytest_collection_finish(session):
    """Tests and their modules live to the end: no garbage collection need walk them, and few need run.

    pytest gives every logger that does not propagate its handlers three times a test; torch has fifty.
    """
    for logger in logging.root.manager.loggerDict.values():
        logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Cases that differ after their first word go to one process together, as groups do.

    Its bookkeeping takes longer with every unit that it has given: as many as functions, not as cases.
    """
    from xdist.scheduler import LoadGroupScheduling

    class Cases(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            return super()._split_scope(nodeid).partition("-")[0]

    return Cases(config, log)


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    """Every device of this machine in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    # torch.manual_seed keeps the stack of the call for each backend that is not there.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)
    torch.set_float32_matmul_precision("highest")  # trainers of other tests may have lowered it


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def allocations(call) -> list[int]:
    """Bytes that a call takes from PyTorch's CPU allocator, negative where it gives them back, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        call()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]


@contextlib.contextmanager
def poisoned():
    """Fill memory that torch hands out uninitialised with NaN, so an unwritten element shows."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    switch = importlib.import_module("tigon._deterministic")  # PyTorch's switch would turn it on
    with warnings.catch_warnings(), switch.deterministic(switch.is_deterministic()):
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)
            torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture
def poison():
    """`with poison(): ...` runs a block on poisoned memory."""
    return poisoned
