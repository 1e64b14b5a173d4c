"""Which names live in which module of ``liger_kernel`` 0.8.5, and what stands behind them here."""

from __future__ import annotations

import functools
import importlib
import inspect
from importlib import resources

from tigon import error

VERSION = "0.8.5"  # of the interface
PACKAGE = "liger_kernel"
_BEHIND = (
    "bases", "chunked_loss", "divergences", "distillation", "functional", "modules",
    "hyper_connections", "outputs", "patching", "policies", "preferences", "sharded", "megatron", "utils",
    "backends",
)  # fmt: skip
_APART = {"chunked_loss"}  # packages whose names mean something else outside of them

check = functools.partial(error.check, "compat.liger")


@functools.cache
def table() -> dict[str, tuple[str, ...]]:
    """Module path below ``liger_kernel`` -> the names in it: interface.txt, one module a paragraph."""
    text = resources.files(__package__).joinpath("interface.txt").read_text(encoding="utf-8")
    paragraphs = (line.split(":") for line in text.replace("\n  ", " ").splitlines())
    return {module[len(PACKAGE) + 1 :]: tuple(names.split()) for module, names in paragraphs}


@functools.cache
def _places() -> dict[str, object]:
    """Name -> the module that it stands in; of a name that two define, the last one."""
    modules = [importlib.import_module(f"tigon.integrations.liger.{name}") for name in _BEHIND]
    return {
        name: module
        for module in modules
        for name in dir(module)
        if not inspect.ismodule(vars(module).get(name))
    }


@functools.cache
def resolve(name: str, below: str = "") -> object:
    """What stands behind a name of module ``below``: an implementation, or a class that refuses its use."""
    from tigon.integrations.liger.missing import missing

    package = below.partition(".")[0]
    if package in _APART:
        own = importlib.import_module(f"tigon.integrations.liger.{package}")
        if name in vars(own):
            return vars(own)[name]
    found = getattr(_places()[name], name) if name in _places() else None
    return missing(name) if found is None else found


def public(below: str, name: str, default: object) -> object:
    """What stands at a public path now: callers exchange attributes there, and expect it to count."""
    try:
        module = importlib.import_module(f"{PACKAGE}.{below}")
    except ImportError:
        return default
    return getattr(module, name)


def implemented() -> dict[str, bool]:
    """Every name of the interface, and whether something stands behind it."""
    names = {name for row in table().values() for name in row}
    return {name: name in _places() for name in sorted(names - {"functional"})}
