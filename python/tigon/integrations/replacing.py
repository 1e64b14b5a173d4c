"""Puts functions of Tigon in the place of another package's in this process, and restores those."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

from tigon.error import check


class ForeignReplacement(NamedTuple):
    """A function of Tigon for an attribute of a module or class."""

    owner: Any
    name: str
    ours: Any  # called in the same way; its `original` is what it replaces
    parameters: list[str]  # of what it replaces
    wanted: list[str]  # the parameters that this must have
    words: str  # of the error about another one, for `wanted` and `parameters`

    def is_installed(self) -> bool:
        return getattr(self.owner, self.name, None) is self.ours


def parameters_of(function: Any) -> list[str]:
    """The names of a function's parameters; none if there is no function."""
    return [] if function is None else list(inspect.signature(function).parameters)


def install(op: str, replacements: Iterable[ForeignReplacement]) -> None:
    """Make replacements that are not installed; an error is raised before the first one."""
    missing = [r for r in replacements if not r.is_installed()]
    for r in missing:
        check(op, r.parameters == r.wanted, r.words, r.wanted, r.parameters)
    for r in missing:
        r.ours.original = getattr(r.owner, r.name)
        setattr(r.owner, r.name, r.ours)


def uninstall(replacements: Iterable[ForeignReplacement]) -> None:
    """Restore what the installed ones have replaced."""
    for r in replacements:
        if r.is_installed():
            setattr(r.owner, r.name, r.ours.original)
