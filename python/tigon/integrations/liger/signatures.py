"""Functions and classes made from signatures of ``liger_kernel``.

The text of a signature becomes a real function, as dataclasses make ``__init__``: a wrong call raises
Python's own error, and compilers see an ordinary function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn


def _made(signature: str, body: str, **names) -> Callable:
    """``def signature: body``, where ``names`` stand for these objects."""
    name, scope = signature.partition("(")[0], {}
    exec(f"def make({', '.join(names)}):\n def {signature}:\n  {body}\n return {name}", scope)
    return scope["make"](**names)


def _parameters(signature: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(_made(signature, "pass")).parameters)


def by_position(signature: str, target: Callable) -> Callable:
    """``name(parameters)``: calls ``target`` with the first of them, as many as it takes by position.

    Parameters that come by keyword are passed on where ``target`` has them.
    """
    known = inspect.signature(target).parameters
    room = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in known.values())
    given = _parameters(signature).values()
    passed = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD][:room]
    passed += [f"{p.name}={p.name}" for p in given if p.kind is p.KEYWORD_ONLY and p.name in known]
    return _made(signature, f"return _target({', '.join(passed)})", _target=target)


def _arguments(names: list[str], target: Callable, prefix: str = "") -> str:
    """Those that ``target`` knows, by name: ``lin_weight`` is its ``weight``, ``_input`` its ``input``."""
    known = inspect.signature(target).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in known.values())
    passed = []
    for name in names:
        its = [n for n in (name, name.lstrip("_"), name.removeprefix("lin_")) if n in known]
        if its or every:
            passed.append(f"{(its or [name])[0]}={prefix}{name}, ")
    return "".join(passed)


def by_name(signature: str, target: Callable, **fixed) -> Callable:
    """``name(parameters)``: calls ``target`` with those that it knows by name, and ``fixed``."""
    call = f"return _target({_arguments([*_parameters(signature)], target)}**_fixed)"
    return _made(signature, call, _target=target, _fixed=fixed)


def function_class(name: str, function: Callable, parameters: str | None = None) -> type:
    """A class whose ``apply`` is ``function``: how the autograd functions of that package are called.

    ``parameters``: those of ``apply``, where there are more than ``function`` takes.
    """
    apply = function if parameters is None else by_position(f"apply({parameters})", function)
    doc = (
        f"``apply`` of the ``liger_kernel`` interface: :func:`{function.__module__}.{function.__qualname__}`."
    )
    return type(name, (), {"apply": staticmethod(apply), "__doc__": doc})


def _with_defaults(options: str, target: Callable) -> str:
    """The parameters of a constructor: those without a default have that of ``target``."""
    known, whole = inspect.signature(target).parameters, []
    for option in options.split(", ") if options else ():
        default = "" if "=" in option else f"={known[option].default!r}"
        whole.append(option + default)
    return ", ".join(whole)


class Loss(nn.Module):
    """A loss whose options are its attributes.

    A subclass names ``target``, the function of the loss, the parameters of its constructor (``options``,
    with the defaults of ``target`` unless it gives others) and of its ``forward`` (``operands``). ``forward``
    calls ``target`` with both, by name.
    """

    def __init_subclass__(cls, target: Callable | None = None, options: str = "", operands: str = ""):
        super().__init_subclass__()
        if target is None:
            return
        options = _with_defaults(options, target)
        cls._options = (*_parameters(f"options({options})"),)
        given = _arguments([*_parameters(f"operands({operands})")], target)
        call = f"return _target({given}{_arguments(cls._options, target, 'self.')})"
        cls.__init__ = _made(f"__init__(self, {options})", "_begin(self, locals())", _begin=Loss._begin)
        cls.forward = _made(f"forward(self, {operands})", call, _target=target)

    def _begin(self, options: dict) -> None:
        nn.Module.__init__(self)
        for name in self._options:
            setattr(self, name, options[name])
        self.validate()

    def validate(self) -> None:
        """Refuses options; called by the constructor."""
