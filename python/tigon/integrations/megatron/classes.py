"""Which of Megatron's classes a module is of, told by name: nothing of Megatron is imported to look."""

from __future__ import annotations


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def is_one_of(module, *names: str) -> bool:
    """Whether its class is one of these, not derived from it."""
    return class_name(type(module)) in names


def derives_from(module, name: str) -> bool:
    """Whether its class is this or derived from it."""
    return any(class_name(cls) == name for cls in type(module).__mro__)
