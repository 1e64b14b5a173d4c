"""pytest plugin of tools/liger_suite.sh: Liger's tests meet Tigon's interface, and what came of each is said.

No test is changed. Outcomes: ``passed`` (Tigon ran in it), ``idle`` (passed without a call of Tigon: says
nothing), ``refused`` (a name that the interface does not stand behind, which it says in words), ``failed``,
``skipped``, ``xfailed``. expected.json lists the failed and refused ones that are meant, with the reason: any
other, and a listed one that passes, ends the run with an error.
"""

from __future__ import annotations

import collections
import functools
import importlib.abc
import importlib.util
import json
import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import tigon
import tigon.compat.liger
from tigon._op import Op
from tigon.integrations.liger import construction

SUITE = Path(os.environ["LIGER_SUITE"])
EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("passed", "idle", "expected", "failed", "refused", "skipped", "xfailed")
MAX_ELEMENTS = float(os.environ.get("MAX_ELEMENTS", "inf"))
calls = 0


class Testing(importlib.abc.MetaPathFinder):
    """``liger_kernel.testing`` is what Liger's tests are written with: its own."""

    def find_spec(self, fullname, path=None, target=None):
        if not f"{fullname}.".startswith("liger_kernel.testing."):
            return None
        place = SUITE.joinpath(*fullname.split(".")[1:])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        search = [str(place)] if place.is_dir() else None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=search)


def counted(function):
    """The same function, whose calls are counted."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        global calls
        if not torch.compiler.is_compiling():
            calls += 1
        return function(*args, **kwargs)

    return call


tigon.compat.liger.install(replace=True)
sys.meta_path.insert(0, Testing())
for name in tigon.__all__:
    if isinstance(getattr(tigon, name), types.FunctionType):
        setattr(tigon, name, counted(getattr(tigon, name)))
Op.__call__ = counted(Op.__call__)  # what the package calls by itself


def pattern(entry) -> re.Pattern:
    """An entry's node ids; ``*`` stands for anything."""
    return re.compile(".*".join(map(re.escape, entry["tests"].split("*"))) + r"\Z")


EXPECTED = [(entry, pattern(entry)) for entry in EXPECTED if DEVICE in entry.get("device", DEVICE)]


def elements(item) -> int:
    """A guess at a test's largest tensor: the product of its integer parameters."""
    product = 1
    for value in getattr(getattr(item, "callspec", None), "params", {}).values():
        for part in value if isinstance(value, tuple) else (value,):
            if type(part) is int and part > 1:
                product *= part
    return product


def fits(item) -> bool:
    """Whether a test is for this machine: not too large, nor one that Liger expects to fail on fewer GPUs."""
    world_size = getattr(getattr(item, "callspec", None), "params", {}).get("world_size", 0)
    return elements(item) <= MAX_ELEMENTS and world_size <= torch.cuda.device_count()


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if not fits(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if fits(item)]


def not_there(error) -> bool:
    """Whether the interface said that a name is not there."""
    while error is not None:
        if isinstance(error, tigon.Error) and "is not there in tigon" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "setup":
        item.calls_before = calls
    outcome = yield
    report = outcome.get_result()
    report.user_properties = [("calls", calls - item.calls_before)]
    if call.excinfo is not None:
        refused = re.search(r"type object '(\w+)' has no attribute", str(call.excinfo.value))
        absent = refused and not tigon.compat.liger.implemented().get(refused.group(1), True)
        report.user_properties.append(("refused", bool(absent or not_there(call.excinfo.value))))


def pytest_runtest_teardown(item):
    construction.forget()  # no patch of one test reaches the next


class Outcomes:
    """On the process that the user started: what came of each test."""

    def __init__(self):
        self.of: dict[str, str] = {}
        self.words: dict[str, str] = {}

    def pytest_collectreport(self, report):
        if report.failed:
            self.of[report.nodeid], self.words[report.nodeid] = (
                "failed",
                str(report.longrepr).splitlines()[-1],
            )

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        if report.failed:
            self.of[report.nodeid] = "refused" if properties.get("refused") else "failed"
            self.words[report.nodeid] = str(getattr(report.longrepr, "reprcrash", report.longrepr))[-300:]
        elif report.skipped:
            self.of.setdefault(report.nodeid, "xfailed" if hasattr(report, "wasxfail") else "skipped")
        elif report.when == "call":
            self.of.setdefault(report.nodeid, "passed" if properties["calls"] else "idle")

    def pytest_sessionfinish(self, session):
        self.stale, listed = [], set()
        for entry, nodes in EXPECTED:
            ran = [node for node, kind in self.of.items() if nodes.match(node) and kind != "skipped"]
            failing = [node for node in ran if self.of[node] in ("failed", "expected", "refused")]
            if ran and not failing:
                self.stale.append(f"{entry['tests']} passes: {entry['reason']}")
            listed.update(failing)
        for node, kind in self.of.items():
            if node in listed and kind == "failed":
                self.of[node] = "expected"
            elif node not in listed and kind == "refused":
                self.of[node] = "failed"
        self.failed = sorted(node for node, kind in self.of.items() if kind == "failed")
        if self.of:
            session.exitstatus = 1 if self.failed or self.stale else 0
        if "LIGER_SUITE_JSON" in os.environ:
            Path(os.environ["LIGER_SUITE_JSON"]).write_text(json.dumps(self.of, indent=0))

    def pytest_terminal_summary(self, terminalreporter):
        write = terminalreporter.write_line
        files = collections.defaultdict(collections.Counter)
        for node, kind in self.of.items():
            files[node.split("::")[0]][kind] += 1
        files["total"] = sum(files.values(), collections.Counter())
        write(f"\n{'Liger 0.8.5 on ' + DEVICE:60}" + "".join(f"{kind:>9}" for kind in KINDS))
        for file, counts in files.items():
            write(f"{file:60}" + "".join(f"{counts[kind] or '':>9}" for kind in KINDS))
        for node in self.failed:
            write(f"UNEXPECTED {node}\n    {self.words.get(node, '')}")
        for line in self.stale:
            write(f"LISTED IN expected.json AND {line}")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(), "liger_suite_outcomes")
