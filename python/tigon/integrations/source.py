"""Functions made of a text: a signature of another package, with few statements behind it.

The text becomes a real function, as dataclasses make ``__init__``: a wrong call raises Python's own error,
and compilers see an ordinary function.
"""

from __future__ import annotations

from collections.abc import Callable


def maker(signature: str, *statements: str, names: tuple[str, ...] = ()) -> Callable[..., Callable]:
    """What makes ``def signature: statements``, given the objects that ``names`` stand for."""
    name, scope = signature.partition("(")[0], {}
    body = "\n  ".join(statements)
    exec(f"def make({', '.join(names)}):\n def {signature}:\n  {body}\n return {name}", scope)
    return scope["make"]
