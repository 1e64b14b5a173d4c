"""Megatron's classes, recognised by name without importing Megatron, and its modules, imported if needed."""

from __future__ import annotations

import importlib
from types import ModuleType


def core(path: str, asked: str) -> ModuleType:
    """The module ``megatron.core.<path>``, which `asked` of :mod:`tigon.megatron` needs."""
    try:
        return importlib.import_module(f"megatron.core.{path}")
    except ImportError as error:
        raise ImportError(
            f"tigon.megatron.{asked} needs megatron-core 0.16 or newer (pip install megatron-core): {error}",
            name=error.name,
        ) from error


def class_name(cls: type) -> str:
    """The name of a class with its module, as it is imported."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_one_of(module, *names: str) -> bool:
    """Whether its class is one of these, not derived from it."""
    return class_name(type(module)) in names


def derives_from(module, name: str) -> bool:
    """Whether its class is this one or derived from it."""
    return any(class_name(cls) == name for cls in type(module).__mro__)
