"""Rotary functions -> tigon.rope.

A rotary function is a global of the modelling module, called by name from the attention forwards,
so it is replaced by rebinding that global, once for all models of the package in this process.
Every patched model owns a share; the stock function returns with the last owner.
"""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from dataclasses import dataclass, field

import torch
from torch import nn

from tigon.integrations.source import maker
from tigon.integrations.transformers.canonical import NoSource, Unrecognised, canonical_function
from tigon.integrations.transformers.forward import plain
from tigon.integrations.transformers.patterns.modules import Match, match
from tigon.integrations.transformers.patterns.rope import ROTARY, SIGNATURES
from tigon.integrations.transformers.probe import probe_rotary
from tigon.ops.rope import rope

Key = tuple[str, str]  # module name, name of the global


@dataclass
class _Rebound:
    original: object
    replacement: object
    label: str
    owners: dict = field(default_factory=dict)  # id of the owner -> its finalizer


_rebound: dict[Key, _Rebound] = {}


def make_rotary(original, options: dict):
    """A rotary function that fuses what `original` does, and leaves odd calls to it."""
    tables, fixed = options["tables"], options["rope"]

    def with_op(original, op):
        def rotate(q, k, cos, sin, unsqueeze_dim=None):
            dims = {} if unsqueeze_dim is None else {"unsqueeze_dim": unsqueeze_dim or 1}
            if tables == "left":
                half = cos.shape[-1] // 2
                cos, sin = cos[..., :half], sin[..., :half]
            if tables != "all":
                dims["rotary_dim"] = 2 * cos.shape[-1]
            if options["back"]:
                sin = -sin
            return op(q, k, cos, sin, **dims, **fixed)

        return _MAKERS[options["call"]](_usual, original, rotate)

    rotary = with_op(original, rope)
    rotary.with_op = with_op  # the same around another op than rope, and another function for odd calls
    rotary.form = fixed
    return rotary


def _usual(dims, q, k, cos, sin, unsqueeze_dim=1) -> bool:
    """Whether the tensors are such that `tigon.rope` computes what stock does."""
    tensors = [x for x in (q, k, cos, sin) if x is not None]
    if cos is None or not plain(*tensors) or q.ndim not in dims:
        return False
    shared = unsqueeze_dim == 0 and q.ndim == 4 and cos.ndim == 2  # Pixtral: one table for all
    if not shared and (cos.ndim != q.ndim - 1 or unsqueeze_dim not in (1, 2, -2)):
        return False
    if cos.dtype != (torch.complex64 if sin is None else sin.dtype):
        return False
    known = k is None or (k.ndim == q.ndim and k.dtype == q.dtype)
    return known and all(x.device == q.device for x in tensors)


# By signature: q, k, cos and sin as it calls them and the dimension that the tables get; the numbers of
# dimensions of q; what is returned of the result, where that is not all.
_CALLS = {
    "q k": ("q, k, cos, sin, unsqueeze_dim", (4,)),
    "q k positions": ("q, k, cos, sin, unsqueeze_dim", (4,)),
    "q maybe k": ("q, k, cos, sin, unsqueeze_dim", (4,), "(turned, None) if k is None else turned"),
    "q or both": ("q, k, cos, sin, unsqueeze_dim", (4,)),
    "vision": ("q, k, cos, sin, -2", (3, 4)),
    "vision packed": ("q, k, cos, sin, 1", (3,)),
    "x": ("x, None, cos, sin, unsqueeze_dim", (4,)),
    "x heads": ("x, None, cos, sin, 1", (4,)),
    "x sin cos": ("tensor, None, cos, sin, 2", (4,)),
    "complex": ("xq, xk, freqs_cis, None", (4,)),
}


def _maker(call: str, given: str, dims: tuple, result: str = "turned"):
    """What makes a replacement with this signature; the names are those of stock, which gets odd calls."""
    names = ", ".join(parameter.partition("=")[0] for parameter in SIGNATURES[call].split(", "))
    return maker(
        f"rotary({SIGNATURES[call]})",
        f"if not usual({dims}, {given}): return original({names})",
        f"turned = rotate({given})",
        f"return {result}",
        names=("usual", "original", "rotate"),
    )


_MAKERS = {call: _maker(call, *row) for call, row in _CALLS.items()}


def find_rotary(model: nn.Module) -> dict[Key, object]:
    """Globals that look like rotary functions and are named in a method of the model's modules."""
    found = {}
    for cls in {type(module) for module in model.modules()}:
        for base in cls.__mro__:
            if base.__module__.startswith("torch."):
                continue
            for method in vars(base).values():
                method = inspect.unwrap(method) if callable(method) else method
                if isinstance(method, types.FunctionType):
                    found.update(rotary_names(method))
    return found


def rotary_names(method) -> dict[Key, object]:
    """Globals that look like rotary functions and are named in a function."""
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
    if key in _rebound and function is _rebound[key].replacement:
        return (_rebound[key].label,)
    module = sys.modules.get(key[0])
    if module is None or vars(module).get(key[1]) is not function:
        return "its module is not importable by name"
    found = _recognise(function)
    if isinstance(found, str):
        return found
    return (f"tigon.rope ({found.structure.name})",)


def rotary_form(key: Key) -> dict | None:
    """What `tigon.rope` is told in the place of a rotary function, rebound or not; None of an unknown one."""
    entry = _rebound.get(key)
    function = vars(sys.modules[key[0]])[key[1]]
    if entry is not None and function is entry.replacement:
        return function.form
    found = _recognise(function)
    return None if isinstance(found, str) else found.structure.options["rope"]


def _recognise(function) -> Match | str:
    try:
        expression = canonical_function(_source_of(function))
    except NoSource:
        return probe_rotary(function) or "no source, and equal to no known rotary in numbers"
    except Unrecognised as error:
        return f"unrecognised rotary function: {error}"
    return match(expression, ROTARY) or "a rotary form tigon.rope does not have"


def rebind(key: Key, owner, label: str) -> None:
    """Replace the global for `owner`, or add `owner` to those who share the replacement."""
    namespace = vars(sys.modules[key[0]])
    entry = _rebound.get(key)
    original = namespace[key[1]]
    if entry is None or original is not entry.replacement:  # new, or rebound by somebody else since
        replacement = make_rotary(original, _recognise(original).structure.options)
        owners = {} if entry is None else entry.owners
        entry = _rebound[key] = _Rebound(original, replacement, label, owners)
        namespace[key[1]] = entry.replacement
    if id(owner) not in entry.owners:
        # A model that is dropped without undo gives its share back too.
        finalizer = weakref.finalize(owner, _release, key, id(owner))
        finalizer.atexit = False
        entry.owners[id(owner)] = finalizer


def release(key: Key, owner) -> None:
    """Give back the share of `owner`."""
    entry = _rebound.get(key)
    if entry is not None and id(owner) in entry.owners:
        entry.owners[id(owner)].detach()
        _release(key, id(owner))


def _release(key: Key, owner_id: int) -> None:
    entry = _rebound.get(key)
    if entry is None or entry.owners.pop(owner_id, None) is None or entry.owners:
        return
    del _rebound[key]
    module = sys.modules.get(key[0])
    if module is not None and vars(module).get(key[1]) is entry.replacement:
        vars(module)[key[1]] = entry.original
