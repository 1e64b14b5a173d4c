"""``tigon.compat.liger``, ``.trl``, ``.kernels``, ``.verl``: public paths of :mod:`tigon.integrations`."""

import importlib

_MODULES = ("kernels", "liger", "trl", "verl")


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
