"""The one exception type of the library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn


class Error(RuntimeError, ValueError):
    """A refused call: ``[op] argument must be X, got Y``. Nothing was modified."""


def check(op: str, condition: bool, message: str, *values: object) -> None:
    """Raise :class:`Error` with ``[op] message`` unless ``condition`` holds.

    ``values`` fill the ``{}`` of the message, only when it is needed: ``torch.compile`` traces calls with
    symbolic sizes. A shape prints as a list.
    """
    if not condition:
        refuse(op, message, *values)


def refuse(op: str, message: str, *values: object) -> NoReturn:
    """Raise :class:`Error` with ``[op] message``.

    On the hot path, behind an ``if``: what the message needs is then not asked for before it is needed.
    """
    if values:
        message = message.format(*(list(v) if isinstance(v, tuple) else v for v in values))
    raise Error(f"[{op}] {message}")


def renamed(error: Error, op: str, words: Mapping[str, str] | None = None) -> Error:
    """The error of an operator, in the names of the function that called it.

    Args:
        words: the function's name of what an operator calls ``"argument"``, or ``"operator.argument"``.
    """
    operator, _, text = error.args[0][1:].partition("] ")  # str() is not traced by PyTorch 2.11
    if operator.rpartition(".")[2] == op:  # "parallel.cross_entropy" is tigon.parallel's
        op = operator
        if not words:
            return error
    if words:
        # Quoted is what was given.
        name = r"(?<!\w)'[^']*'|\w+"
        text = re.sub(name, lambda m: words.get(f"{operator}.{m[0]}", words.get(m[0], m[0])), text)
    return Error(f"[{op}] {text}")
