"""Functions and classes made from signatures of ``liger_kernel``."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from tigon.integrations.source import made


def _parameters(signature: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(made(signature, "pass")).parameters)


def by_position(signature: str, target: Callable) -> Callable:
    """``name(parameters)``: calls ``target`` with the first of them, as many as it takes by position.

    Parameters that come by keyword are passed on where ``target`` has them.
    """
    known = inspect.signature(target).parameters
    room = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in known.values())
    given = _parameters(signature).values()
    passed = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD][:room]
    passed += [f"{p.name}={p.name}" for p in given if p.kind is p.KEYWORD_ONLY and p.name in known]
    return made(signature, f"return _target({', '.join(passed)})", _target=target)


def _its(name: str, target: Callable) -> str | None:
    """What ``target`` calls a parameter: ``lin_weight`` is its ``weight``, ``_input`` its ``input``."""
    known = inspect.signature(target).parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return name
    return next((n for n in (name, name.lstrip("_"), name.removeprefix("lin_")) if n in known), None)


def _arguments(names, target: Callable, prefix: str = "") -> str:
    """Those that ``target`` knows, by name."""
    return "".join(f"{its}={prefix}{name}, " for name in names if (its := _its(name, target)))


def by_name(signature: str, target: Callable, **fixed) -> Callable:
    """``name(parameters)``: calls ``target`` with those that it knows by name, and ``fixed``."""
    call = f"return _target({_arguments(_parameters(signature), target)}**_fixed)"
    return made(signature, call, _target=target, _fixed=fixed)


def function_class(name: str, function: Callable, parameters: str | None = None) -> type:
    """A class whose ``apply`` is ``function``: how the autograd functions of that package are called.

    ``parameters``: those of ``apply``, where there are more than ``function`` takes.
    """
    apply = function if parameters is None else by_position(f"apply({parameters})", function)
    words = (
        f"``apply`` of the ``liger_kernel`` interface: :func:`{function.__module__}.{function.__qualname__}`."
    )
    return type(name, (), {"apply": staticmethod(apply), "__doc__": words})


def _options(first: str, without: str, operands: str, target: Callable) -> str:
    """The parameters of a constructor, each with a default: ``first``, and what ``target`` takes besides."""
    known = inspect.signature(target).parameters
    first = [option for option in first.split(", ") if option]
    named = {option.partition("=")[0] for option in first} | {*without.split(", ")}
    named |= {_its(name, target) for name in _parameters(f"forward({operands})")}
    rest = [name for name, p in known.items() if name not in named and p.kind is p.POSITIONAL_OR_KEYWORD]
    return ", ".join(
        option if "=" in option else f"{option}={known[option].default!r}" for option in (*first, *rest)
    )


class Loss(nn.Module):
    """A loss, or another module without parameters, whose options are its attributes.

    A subclass names ``target``, the function of the loss, and the parameters of its ``forward``
    (``operands``), which calls ``target`` with them and the options by name. Options are the other parameters
    of ``target``, but for those of ``without``; ``first``: those that come before, and other defaults.
    """

    def __init_subclass__(
        cls, target: Callable | None = None, operands: str = "", first: str = "", without: str = ""
    ):
        super().__init_subclass__()
        if target is None:
            return
        options = _options(first, without, operands, target)
        cls._options = (*_parameters(f"options({options})"),)
        given = _arguments(_parameters(f"operands({operands})"), target)
        call = f"return _target({given}{_arguments(cls._options, target, 'self.')})"
        cls.__init__ = made(f"__init__(self, {options})", "_begin(self, locals())", _begin=Loss._begin)
        cls.forward = made(f"forward(self, {operands})", call, _target=target)
        for method in (cls.__init__, cls.forward):  # what errors of a wrong call name
            method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"

    def _begin(self, options: dict) -> None:
        nn.Module.__init__(self)
        for name in self._options:
            setattr(self, name, options[name])
        self.validate()

    def validate(self) -> None:
        """Refuses options; called by the constructor."""
