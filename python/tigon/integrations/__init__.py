"""Other libraries: transformers, Megatron, Liger, TRL, ``kernels``. Nothing happens without a call."""

import importlib

_MODULES = ("kernels", "liger", "megatron", "sentence_transformers", "transformers", "trl", "verl")


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
