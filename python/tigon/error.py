"""The one exception type of the library."""

from __future__ import annotations


class Error(RuntimeError, ValueError):
    """A refused call: ``[op] argument must be X, got Y``. Nothing was modified."""


def check(op: str, condition: bool, message: str) -> None:
    """Raise :class:`Error` with ``[op] message`` unless ``condition`` holds."""
    if not condition:
        raise Error(f"[{op}] {message}")
