"""Functions made from text: the signature of another package's function, and a few statements.

The text becomes a real function, as in dataclasses' ``__init__``: a wrong call raises Python's own error, and
compilers see an ordinary function.
"""

from __future__ import annotations

from collections.abc import Callable


def maker(signature: str, *statements: str, names: tuple[str, ...] = ()) -> Callable[..., Callable]:
    """A function that makes ``def signature: statements`` from the objects called ``names``."""
    name, scope = signature.partition("(")[0], {}
    body = "\n  ".join(statements)
    exec(f"def make({', '.join(names)}):\n def {signature}:\n  {body}\n return {name}", scope)
    return scope["make"]
