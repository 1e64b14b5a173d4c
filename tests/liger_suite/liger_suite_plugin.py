"""pytest plugin of tools/liger_suite.sh: Liger's tests meet Tigon's interface, and what came of each is said.

No test is changed. Outcomes: ``passed`` (Tigon ran in it), ``idle`` (passed without a call of Tigon: says
nothing), ``dropped`` (uses a name that the interface leaves out, which it says in words), ``failed``,
``skipped``, ``xfailed``. expected.json lists the failed ones that are meant, with the reason: any other, and
a listed one that passes, ends the run with an error.
"""

import collections
import functools
import importlib.abc
import importlib.machinery
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
from tigon.integrations.liger import construction, paths

EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("passed", "idle", "expected", "failed", "dropped", "skipped", "xfailed")
MAX_ELEMENTS = float(os.environ.get("MAX_ELEMENTS", "inf"))
calls = 0


class Dropped(types.ModuleType):
    """In the place of what the interface leaves out: tests import it at the top of their files."""

    def __init__(self, path, *of_a_subclass):
        super().__init__(path)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs):
        raise ImportError(paths.dropped(self.__name__.removeprefix("liger_kernel.")))

    __getitem__ = __call__


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds that, where the interface's own finder raises."""

    def find_spec(self, fullname, path=None, target=None):
        package, _, below = fullname.partition(".")
        left_out = package == "liger_kernel" and not paths.is_module(below) and paths.dropped(below)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if left_out else None

    def create_module(self, spec):
        return Dropped(spec.name)

    def exec_module(self, module):
        pass


def counted(function):
    """The same function, whose calls are counted."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        global calls
        if not torch.compiler.is_compiling():
            calls += 1
        return function(*args, **kwargs)

    return call


def transformers_version_dispatch(required, before, after, before_args=(), after_args=(), **keywords):
    """Liger's helper of this name, which tests call: its versions are older than ours."""
    return after(*after_args, **(keywords.get("after_kwargs") or {}))


tigon.compat.liger.install(replace=True)
sys.meta_path.insert(0, Finder())
importlib.import_module("liger_kernel.utils").transformers_version_dispatch = transformers_version_dispatch
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


def is_dropped(error) -> bool:
    """Whether the interface said that it leaves a name out."""
    while error is not None:
        if "is not part of Tigon's interface" in str(error):
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
        report.user_properties.append(("dropped", is_dropped(call.excinfo.value)))


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
            self.of[report.nodeid] = "dropped" if properties.get("dropped") else "failed"
            self.words[report.nodeid] = str(getattr(report.longrepr, "reprcrash", report.longrepr))[-300:]
        elif report.skipped:
            self.of.setdefault(report.nodeid, "xfailed" if hasattr(report, "wasxfail") else "skipped")
        elif report.when == "call":
            self.of.setdefault(report.nodeid, "passed" if properties["calls"] else "idle")

    def pytest_sessionfinish(self, session):
        self.stale, listed = [], set()
        for entry, nodes in EXPECTED:
            of = {node: kind for node, kind in self.of.items() if nodes.match(node)}
            failing = [node for node, kind in of.items() if kind == "failed"]
            if not failing and not {"passed", "idle"}.isdisjoint(of.values()):
                self.stale.append(f"{entry['tests']} passes: {entry['reason']}")
            listed.update(failing)
        self.of.update(dict.fromkeys(listed, "expected"))
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
