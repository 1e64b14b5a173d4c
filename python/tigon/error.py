"""The one exception type of the library."""

from __future__ import annotations


class Error(RuntimeError, ValueError):
    """A refused call: ``[op] argument must be X, got Y``. Nothing was modified."""


def check(op: str, condition: bool, message: str, *values: object) -> None:
    """Raise :class:`Error` with ``[op] message`` unless ``condition`` holds.

    ``values`` fill the ``{}`` of the message, only when it is needed: calls on the hot path format nothing,
    and ``torch.compile`` traces them with symbolic sizes. A shape prints as a list.
    """
    if condition:
        return
    if values:
        message = message.format(*(list(v) if isinstance(v, tuple) else v for v in values))
    raise Error(f"[{op}] {message}")
