"""The interface of ``liger_kernel`` for programs that call it, implemented with Tigon.

Call ``install()`` before such a program imports the package. From then on ``import liger_kernel`` finds the
interface in this process, and the availability checks of transformers, TRL, Axolotl and LLaMA-Factory
succeed. An installed Liger is hidden only with ``replace=True``. Child processes start without the interface.
If they do not run your script from its top, install the small distribution of ``compat/liger_kernel``
instead.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import re
import sys
from pathlib import Path

from tigon.error import Error
from tigon.integrations.liger.paths import PACKAGE, VERSION, dropped, is_module, names_of, resolve

__all__ = ["VERSION", "adopt", "install", "installed", "uninstall"]

DISTRIBUTION = "liger-kernel"
OURS = "tigon-liger-compat"  # the summary of the distribution compat/liger_kernel


def installed() -> bool:
    """Whether ``import liger_kernel`` finds Tigon's interface in this process."""
    return any(isinstance(finder, Finder) and finder.top for finder in sys.meta_path)


def install(*, replace: bool = False) -> None:
    """Make ``import liger_kernel`` find this interface in this process.

    Args:
        replace: hide an installed Liger. Names imported from it before keep Liger's objects.

    Raises:
        tigon.Error: a Liger is installed and ``replace`` was not given. Nothing is modified.
    """
    if installed():
        return
    installation = _on_disk()
    if installation and not replace:
        raise Error(
            "[compat.liger] liger_kernel must not be installed, or replace=True must be given to hide it in "
            f"this process, got the installation at {installation}"
        )
    _forget_modules()
    sys.meta_path.insert(0, Finder())
    _look_again()


def uninstall() -> None:
    """Undo :func:`install`, also the watch of constructors for ``apply_liger_kernel_to_*``."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    _forget_modules()
    construction = sys.modules.get("tigon.integrations.liger.construction")
    if construction is not None:
        construction.forget()
    _look_again()


def adopt(package: str) -> None:
    """Fill the ``liger_kernel`` package on disk, that of ``compat/liger_kernel``, with the interface."""
    distributions = importlib.metadata.distributions(name=DISTRIBUTION)
    for other in () if installed() else distributions:
        if other.metadata["Summary"] != OURS:
            raise ImportError(
                f"{OURS} and {DISTRIBUTION} {other.version} are both installed and share one folder: "
                f"pip uninstall both, then install one of them"
            )
    finder = Finder(top=False)
    if not installed():
        sys.meta_path.insert(0, finder)
    module = sys.modules[package]
    finder.exec_module(module)


def _on_disk() -> str | None:
    """The path of a Liger that is not this interface, or None."""
    spec = importlib.machinery.PathFinder.find_spec(PACKAGE)
    if spec is None:
        return None
    if spec.origin is None:
        return str([*(spec.submodule_search_locations or ())])
    ours = "tigon.compat.liger" in Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    return None if ours else str(Path(spec.origin).parent)


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]


def _look_again() -> None:
    """Clear the cached answers of availability checks."""
    importlib.invalidate_caches()
    for name in ("transformers.utils.import_utils", "trl.import_utils", "accelerate.utils.imports"):
        check = getattr(sys.modules.get(name), "is_liger_kernel_available", None)
        if hasattr(check, "cache_clear"):
            check.cache_clear()


# Classes that make ``import liger_kernel...`` find the interface without a file on disk.


class VirtualDistribution(importlib.metadata.Distribution):
    """The metadata that availability checks read: name, version, and the package that it contains."""

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
        """Treat every module as a package, so that ``from ... import`` of a missing name asks this finder."""
        below = _below(fullname)
        if below is None or (below == "" and not self.top):
            return None
        if not is_module(below):
            if words := dropped(below):
                raise ImportError(words, name=fullname)
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="tigon.compat.liger", is_package=True)

    def find_distributions(self, context=None):
        name = getattr(context, "name", None)
        if self.top and (name is None or re.sub(r"[-_.]+", "-", name).lower() == DISTRIBUTION):
            yield VirtualDistribution()

    def create_module(self, spec):
        return

    def exec_module(self, module):
        """Look up names at their first use, so that nothing heavy is imported before."""
        below = _below(module.__name__)
        names = names_of(below)
        module.__version__ = VERSION
        module.__all__ = [name for name in names if not name.startswith("_")]

        def __getattr__(name):
            if is_module(f"{below}.{name}".lstrip(".")):  # imported with its package, there
                return importlib.import_module(f"{module.__name__}.{name}")
            value = resolve(below, name)
            setattr(module, name, value)
            return value

        module.__getattr__ = __getattr__
        module.__dir__ = lambda: sorted({*vars(module), *names})


def _below(fullname: str) -> str | None:
    if fullname == PACKAGE:
        return ""
    return fullname[len(PACKAGE) + 1 :] if fullname.startswith(f"{PACKAGE}.") else None
