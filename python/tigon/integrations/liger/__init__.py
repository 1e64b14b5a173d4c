"""The interface of ``liger_kernel`` for programs that call it, with Tigon behind it.

``install()`` before such a program asks for the package: from then on, in this process, ``import
liger_kernel`` finds the interface, and the availability checks of transformers, TRL, Axolotl and
LLaMA-Factory succeed. An installed Liger is never hidden unless asked for (``replace=True``). Child processes
start without it; where they do not run your script from its top, install the small distribution of
``compat/liger_kernel`` instead.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import sys
from pathlib import Path

from tigon.error import Error
from tigon.integrations.liger.finder import DISTRIBUTION, OURS, Finder
from tigon.integrations.liger.names import PACKAGE, VERSION, implemented

__all__ = ["VERSION", "adopt", "implemented", "install", "installed", "uninstall"]


def installed() -> bool:
    """Whether ``import liger_kernel`` finds Tigon's interface in this process."""
    return any(isinstance(finder, Finder) and finder.top for finder in sys.meta_path)


def install(*, replace: bool = False) -> None:
    """Make ``import liger_kernel`` find this interface in this process.

    Args:
        replace: hide an installed Liger. What was imported from it before keeps what it has.

    Raises:
        tigon.Error: a Liger is installed and ``replace`` was not given. Nothing is modified.
    """
    if installed():
        return
    found = _on_disk()
    if found and not replace:
        raise Error(
            "[compat.liger] liger_kernel must not be installed, or replace=True must be given to hide it in "
            f"this process, got the installation at {found}"
        )
    _forget_modules()
    sys.meta_path.insert(0, Finder())
    _look_again()


def uninstall() -> None:
    """Take :func:`install` back, constructors watched for ``apply_liger_kernel_to_*`` included."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    _forget_modules()
    construction = sys.modules.get("tigon.integrations.liger.construction")
    if construction is not None:
        construction.forget()
    _look_again()


def adopt(package: str) -> None:
    """For the ``liger_kernel`` package on disk of ``compat/liger_kernel``: fill it with the interface."""
    found = importlib.metadata.distributions(name=DISTRIBUTION)
    for other in () if installed() else found:
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
    """Where a Liger that is not this interface lies, or None."""
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
    """Availability checks remember their first answer."""
    importlib.invalidate_caches()
    for name, module in list(sys.modules.items()):
        if name in ("transformers.utils.import_utils", "trl.import_utils", "accelerate.utils.imports"):
            check = getattr(module, "is_liger_kernel_available", None)
            if hasattr(check, "cache_clear"):
                check.cache_clear()
