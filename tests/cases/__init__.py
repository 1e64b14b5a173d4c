"""The cases of every op: one list per op feeds its tests and its benchmarks."""

import importlib
import pkgutil
import types


def modules() -> dict[str, types.ModuleType]:
    """Every case module by the name of its op; a new file in this folder is found by itself."""
    found = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "NAME") and hasattr(module, "CASES"):
            found[module.NAME] = module
    return found
