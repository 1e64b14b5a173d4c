"""Makes ``import liger_kernel...`` find the interface, without a file on disk."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import re

from tigon.integrations.liger.names import PACKAGE, VERSION, resolve, table

DISTRIBUTION = "liger-kernel"
OURS = "tigon-liger-compat"  # the summary of that distribution where compat/liger_kernel is installed


class VirtualDistribution(importlib.metadata.Distribution):
    """The metadata that availability checks read: name, version, the package it brings."""

    FILES = {
        "METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n"
        "Summary: interface provided by tigon.compat.liger for this process\n",
        "top_level.txt": f"{PACKAGE}\n",
    }

    def read_text(self, filename):
        return self.FILES.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(path)


class Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds and makes the modules; with ``top=False`` only those below an existing package."""

    def __init__(self, top: bool = True):
        self.top = top

    def find_spec(self, fullname, path=None, target=None):
        below = _below(fullname)
        if below is None or (below == "" and not self.top) or not _known(below):
            return None
        package = below == "" or any(name.startswith(f"{below}.") for name in table())
        return importlib.machinery.ModuleSpec(fullname, self, origin="tigon.compat.liger", is_package=package)

    def find_distributions(self, context=None):
        name = getattr(context, "name", None)
        if self.top and (name is None or re.sub(r"[-_.]+", "-", name).lower() == DISTRIBUTION):
            yield VirtualDistribution()

    def create_module(self, spec):
        return

    def exec_module(self, module):
        """Names are looked up when first used: nothing heavy is imported before."""
        below = _below(module.__name__)
        names = table().get(below, ())
        module.__version__ = VERSION
        module.__all__ = [name for name in names if not name.startswith("_")]

        def __getattr__(name):
            if name not in names:
                raise AttributeError(f"[compat.liger] {module.__name__} {VERSION} has no {name}")
            if below == "" and name in table():
                return importlib.import_module(f"{module.__name__}.{name}")
            value = resolve(name, below)
            setattr(module, name, value)
            return value

        module.__getattr__ = __getattr__
        module.__dir__ = lambda: sorted({*vars(module), *names})
        for name in names:
            if below and f"{below}.{name}" in table():  # a function hides the module of its name
                importlib.import_module(f"{module.__name__}.{name}")
                setattr(module, name, resolve(name, below))


def _below(fullname: str) -> str | None:
    if fullname == PACKAGE:
        return ""
    return fullname[len(PACKAGE) + 1 :] if fullname.startswith(f"{PACKAGE}.") else None


def _known(below: str) -> bool:
    """Modules of the table, and packages above them."""
    return any(f"{name}.".startswith(f"{below}.") for name in table()) or below == ""
