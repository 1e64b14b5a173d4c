"""Rotary functions -> tigon.rope.

A rotary function is a global of the modelling module, called by name from the attention forwards. The global
stays: other models call it. The forward of each attention of this model is compiled from its own source with
`fused if rotary is stock else rotary` in the place of the name, so that a function which other code puts
there is called.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types

import torch
from torch import nn

from tigon.integrations.transformers.canonical import NoSource, Unrecognised, canonical
from tigon.integrations.transformers.forward import follows, plain
from tigon.integrations.transformers.patterns.rope import ROTARY
from tigon.integrations.transformers.recognition import Match, Structure, match, probe_rotary
from tigon.integrations.transformers.rewriting import (
    Rewritten,
    replace_expressions,
    rewrite_innermost,
    rewritten_forward,
)
from tigon.ops.rope import quick, rope

Key = tuple[str, str]  # module name, name of the global
_STOCK, _FUSED = "_tigon_stock_", "_tigon_fused_"
ROLES = {"x": "q", "tensor": "q", "xq": "q", "xk": "k", "freqs_cis": "cos"}  # of names in the table


def make_rotary(stock, structure: Structure):
    """A rotary function that fuses what `stock` does, and leaves odd calls to it."""
    options, fixed = structure.options, structure.options["rope"]
    parameters = inspect.signature(structure.reference).parameters
    roles = [ROLES.get(name, name) for name in parameters]
    required = {role for role, p in zip(roles, parameters.values(), strict=True) if p.default is p.empty}
    names = [*(parameters if stock is None else inspect.signature(_source_of(stock)).parameters)]
    role_of = dict(zip(names if len(names) == len(roles) else parameters, roles, strict=True))

    plain_form = (fixed, options["tables"], options["back"], options["keeps_k"]) == ({}, "all", False, False)
    plain_form = plain_form and roles[:4] == ["q", "k", "cos", "sin"] and options["at"] == 1

    def with_op(original, op):
        def rotary(*args, **kwargs):
            if plain_form and op is rope and len(args) == 4 and not kwargs and _fit(options["ndim"], args):
                y = quick(*args)
                if y is not None:
                    return y
            given = dict(zip(roles, args, strict=False))
            for name, value in kwargs.items():
                given[role_of.get(name)] = value
            q, k, cos, sin = given.get("q"), given.get("k"), given.get("cos"), given.get("sin")
            dim = given.get("unsqueeze_dim", options["at"])
            whole = len(given) == len(args) + len(kwargs) and all(role in given for role in required)
            if not whole or None in given or not _usual(options["ndim"], q, k, cos, sin, dim):
                return original(*args, **kwargs)
            dims = {} if "unsqueeze_dim" in fixed else {"unsqueeze_dim": dim or 1}
            if options["tables"] == "left":
                half = cos.shape[-1] // 2
                cos, sin = cos[..., :half], sin[..., :half]
            if options["tables"] != "all":
                dims["rotary_dim"] = 2 * cos.shape[-1]
            turned = op(q, k, cos, -sin if options["back"] else sin, **dims, **fixed)
            return (turned, None) if k is None and options["keeps_k"] else turned

        return rotary

    rotary = with_op(stock, rope)
    rotary.with_op = with_op  # the same around another op than rope, and another function for odd calls
    rotary.form = fixed
    return rotary


def _fit(dims, args: tuple) -> bool:
    """Whether q and k are heads, and stock takes the tables."""
    q, k, cos, _ = args
    whole = torch.is_tensor(q) and torch.is_tensor(k) and torch.is_tensor(cos)
    return whole and q.ndim in dims and cos.ndim == q.ndim - 1


def _usual(dims, q, k, cos, sin, unsqueeze_dim) -> bool:
    """Whether `tigon.rope` computes what stock does of these tensors."""
    tensors = [x for x in (q, k, cos, sin) if x is not None]
    if q is None or cos is None or type(unsqueeze_dim) is not int:
        return False
    if not plain(*tensors) or q.ndim not in dims:
        return False
    shared = unsqueeze_dim == 0 and q.ndim == 4 and cos.ndim == 2  # Pixtral: one table for all
    if not shared and (cos.ndim != q.ndim - 1 or unsqueeze_dim not in (1, 2, -2)):
        return False
    if cos.dtype != (torch.complex64 if sin is None else sin.dtype):
        return False
    if k is not None and (k.ndim != q.ndim or k.dtype != q.dtype):
        return False
    device = q.device
    return all(x.device == device for x in tensors)


def rotary_callers(cls: type) -> dict[str, dict[Key, object]]:
    """The methods of a class that name globals which look like rotary functions, with these globals."""
    bases = [base for base in cls.__mro__ if not base.__module__.startswith("torch.")]
    callers = {}
    for name in dict.fromkeys(name for base in bases for name in vars(base)):
        method = inspect.getattr_static(cls, name)
        method = inspect.unwrap(method) if callable(method) else method
        if isinstance(method, types.FunctionType):
            callers[name] = rotary_names(method)
    return {name: functions for name, functions in callers.items() if functions}


def rotary_names(method) -> dict[Key, object]:
    """The globals named in a function that look like rotary functions."""
    namespace = method.__globals__
    module_name = namespace.get("__name__", "")
    functions = {name: namespace[name] for name in method.__code__.co_names if name in namespace}
    return {
        (module_name, name): function
        for name, function in functions.items()
        if not isinstance(function, type) and callable(function) and _takes_tables(function)
    }


def _takes_tables(function) -> bool:
    try:
        names = set(inspect.signature(_source_of(function)).parameters)
    except (TypeError, ValueError):
        return False
    return {"cos", "sin"} <= names or "freqs_cis" in names


def _source_of(function):
    """The Python function behind a global that `kernels` has wrapped into a module."""
    if not isinstance(function, nn.Module):
        return function
    cells = getattr(type(function).forward, "__closure__", None) or ()
    inner = [cell.cell_contents for cell in cells]
    return next((f for f in inner if isinstance(f, types.FunctionType)), function)


def plan_rotary(key: Key, function) -> str | tuple[str]:
    """(what it is,), or why the function is left."""
    module = sys.modules.get(key[0])
    if module is None or vars(module).get(key[1]) is not function:
        return "its module is not importable by name"
    found = _recognise(function)
    if isinstance(found, str):
        return found
    return (f"tigon.rope ({found.structure.name})",)


def rotary_form(key: Key) -> dict | None:
    """The options of `tigon.rope` that replace a rotary function; None if the function is unknown."""
    found = _recognise(vars(sys.modules[key[0]])[key[1]])
    return None if isinstance(found, str) else found.structure.options["rope"]


def _recognise(function) -> Match | str:
    try:
        expression = canonical(_source_of(function))
    except NoSource:
        return probe_rotary(function, ROTARY) or "no source, and equal to no known rotary in numbers"
    except Unrecognised as error:
        return f"unrecognised rotary function: {error}"
    return match(expression, ROTARY) or "a rotary form tigon.rope does not have"


@follows
def rotary_forward(module: nn.Module, spec: Rewritten, *args, **kwargs):
    """Call a method of a class in which only rotary functions are replaced."""
    return rewritten_forward(module, spec, *args, **kwargs)


def rewrite(method, names: tuple[str, ...]) -> tuple[tuple[str, ...], types.FunctionType] | None:
    """These names, and a method that calls `tigon.rope` for those that are known functions."""
    inner = inspect.unwrap(method)
    if not (isinstance(method, types.FunctionType) and isinstance(inner, types.FunctionType)):
        return None
    return _rewrite(method, tuple((name, inner.__globals__.get(name)) for name in names))


@functools.cache
def _rewrite(method, functions: tuple) -> tuple[tuple[str, ...], types.FunctionType] | None:
    fused = {name: (function, _fused(function)) for name, function in functions}
    fused = {name: pair for name, pair in fused.items() if pair[1] is not None}

    def turn(part):
        name = getattr(part, "id", None)
        return f"{_FUSED}{name} if {name} is {_STOCK}{name} else {name}" if name in fused else None

    def change(node):
        replace_expressions(node, turn)
        return tuple(fused)

    held = {_STOCK + name: function for name, (function, _) in fused.items()}
    held |= {_FUSED + name: replacement for name, (_, replacement) in fused.items()}
    return rewrite_innermost(method, change, **held) if fused else None


@functools.cache
def _fused(function):
    """The replacement of a rotary function; None if the function is unknown."""
    found = _recognise(function)
    return None if isinstance(found, str) else make_rotary(function, found.structure)
