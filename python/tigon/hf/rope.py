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

from torch import nn

from tigon.hf.canonical import NoSource, Unrecognised, canonical_function
from tigon.hf.forward import plain
from tigon.hf.probe import probe_rotary
from tigon.hf.structures import ROTARY, Match, match
from tigon.ops.rope import rope

Key = tuple[str, str]  # module name, name of the global


@dataclass
class _Rebound:
    original: object
    replacement: object
    label: str
    owners: dict = field(default_factory=dict)  # id of the owner -> its finalizer


_rebound: dict[Key, _Rebound] = {}


def make_rotary(original, cast_back: bool):
    """A rotary function that fuses q and k, and leaves odd calls to `original`."""

    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        usual = q.ndim == 4 and k.ndim == 4 and cos.ndim == 3 and unsqueeze_dim in (1, 2)
        known = q.dtype == k.dtype and cos.dtype == sin.dtype
        if not usual or not known or not plain(q, k, cos, sin):
            return original(q, k, cos, sin, unsqueeze_dim)
        q_out, k_out = rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return (q_out.to(q.dtype), k_out.to(k.dtype)) if cast_back else (q_out, k_out)

    return rotary


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
                    found.update(_rotary_names(method))
    return found


def _rotary_names(method) -> dict[Key, object]:
    namespace = method.__globals__
    module_name = namespace.get("__name__", "")
    functions = {name: namespace[name] for name in method.__code__.co_names if name in namespace}
    return {
        (module_name, name): function
        for name, function in functions.items()
        if not isinstance(function, type) and callable(function) and _takes_cos_sin(function)
    }


def _takes_cos_sin(function) -> bool:
    try:
        names = set(inspect.signature(_source_of(function)).parameters)
    except (TypeError, ValueError):
        return False
    return {"cos", "sin"} <= names


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
    if entry is None:
        original = namespace[key[1]]
        cast_back = _recognise(original).structure.options["cast_back"]
        entry = _rebound[key] = _Rebound(original, make_rotary(original, cast_back), label)
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
