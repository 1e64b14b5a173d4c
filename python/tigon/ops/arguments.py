"""What public functions ask of their arguments, in the words that all of them use."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from tigon._op import foreign
from tigon.error import check, refuse

_STRIDED = torch.strided
_LEAST = -(2**63)


def kind_of(value: object) -> object:
    """What an argument is: the dtype of a tensor, the type of anything else."""
    return value.dtype if isinstance(value, torch.Tensor) else type(value).__name__


def options_of(*functions: Callable, but: Iterable[str] = ()) -> Callable[[Callable], Callable]:
    """Decorates what takes ``**options``: those of `functions` but for these, as their signatures say, with
    their defaults; of one name, the first's."""

    def decorate(taker):
        signature = inspect.signature(taker)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = {*but, *(p.name for p in own)}
        signatures = [inspect.signature(function).parameters for function in reversed(functions)]
        given = {name: p for parameters in signatures for name, p in parameters.items()}
        inherited = [p for p in given.values() if p.kind is p.KEYWORD_ONLY and p.name not in taken]
        defaults = {p.name: p.default for p in inherited}
        known = {p.name for p in own} | defaults.keys()

        @functools.wraps(taker)
        def call(*args, **options):
            if not known.issuperset(options):
                name = next(name for name in options if name not in known)
                raise TypeError(f"{taker.__qualname__}() got an unexpected keyword argument {name!r}")
            return taker(*args, **defaults | options)

        call.__signature__ = signature.replace(parameters=own + inherited)
        return call

    return decorate


def picked(of: type, options: dict, /, **more: object):
    """A named tuple `of` those options that it has."""
    return of(**{name: options[name] for name in of._fields if name in options}, **more)


def check_float(op: str, name: str, x: object) -> None:
    """x must be a tensor of floats."""
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        refuse(op, name + " must be a float tensor, got {}", kind_of(x))
    if x.layout is not _STRIDED or x.is_nested:
        _refuse_layout(op, name, x)


def check_indices(op: str, name: str, x: object) -> None:
    """x must be a tensor of int64 or int32."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int64, torch.int32):
        refuse(op, name + " must be an int64 or int32 tensor, got {}", kind_of(x))
    check_layout(op, name, x)


def check_layout(op: str, name: str, x: torch.Tensor) -> None:
    """x must be neither sparse nor nested, whose sizes, strides and views fail in PyTorch's words."""
    if x.layout is not _STRIDED or x.is_nested:
        _refuse_layout(op, name, x)


def _refuse_layout(op: str, name: str, x: torch.Tensor) -> None:
    refuse(op, name + " must be a plain dense tensor, got {}", foreign(name, x))


def check_dense(op: str, name: str, x: torch.Tensor) -> None:
    """x must be neither sparse nor nested nor a DTensor."""
    if foreign(name, x) is not None:
        _refuse_layout(op, name, x)


def check_like(op: str, name: str, x: torch.Tensor, shape: Sequence[int], device: torch.device) -> None:
    """x must have this shape, on this device."""
    if x.shape != shape:
        refuse(op, name + " must be {}, got {}", tuple(shape), x.shape)
    if x.device != device:
        refuse(op, name + " must be on {}, got {}", device, x.device)


def check_stored(op: str, name: str, x: torch.Tensor) -> None:
    """x must have its storage, which FSDP frees between uses. What has no numbers has none to miss."""
    if x.is_meta or is_traced(x) or torch._C._are_functorch_transforms_active():
        return
    if x.numel() > 0 and x.untyped_storage().nbytes() == 0:
        refuse(op, name + " was freed: its storage is empty")


def check_numbers(op: str, **values: object) -> None:
    """Each must be a number; one that the host knows must not be NaN."""
    for name, value in values.items():
        if type(value) is not float and not _is_number(value):
            refuse(op, name + " must be a number, got {}", kind_of(value))
        if not isinstance(value, torch.Tensor) and value != value:
            refuse(op, name + " must be a number, got NaN")


def _is_number(value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and value.layout is _STRIDED
    return isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) or hasattr(value, "__float__")


def check_booleans(op: str, **values: object) -> None:
    """Each must be True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            refuse(op, name + " must be True or False, got {}", kind_of(value))


def check_positive(op: str, name: str, value: object, *, or_none: bool = False) -> None:
    """A finite number above zero."""
    if value is None and or_none:
        return
    if type(value) is not float and not _is_number(value):
        refuse(op, name + " must be a number, got {}", kind_of(value))
    if not 0 < value < math.inf:
        refuse(op, name + " must be > 0 and finite" + " (or None)" * or_none + ", got {}", value)


def check_integers(op: str, *, least: int = _LEAST, or_none: bool = False, **values: object) -> None:
    """Each must be an integer of 64 bits, at least `least`."""
    for name, value in values.items():
        if value is None and or_none:
            continue
        if type(value) is not int and not _is_integer(value):
            refuse(op, name + " must be an int, got {}", kind_of(value))
        if not least <= value < 2**63:
            small = _LEAST <= value < least
            bound = f" must be >= {least}" + " (or None)" * or_none if small else " must have at most 64 bits"
            refuse(op, name + bound + ", got {}", value)


def _is_integer(value) -> bool:
    if isinstance(value, (bool, torch.Tensor)):
        return False
    return isinstance(value, (int, torch.SymInt)) or hasattr(value, "__index__")


def readable(t: torch.Tensor) -> bool:
    """Whether the numbers of a tensor can be looked at without waiting: on the CPU, outside tracing."""
    return not is_traced(t) and t.device.type == "cpu"


def is_traced(t: torch.Tensor) -> bool:
    """Whether a tensor has no numbers but a compiler's, or those of a planner that asks for shapes."""
    return torch.compiler.is_compiling() or isinstance(t, torch._subclasses.FakeTensor)


def check_choice(op: str, name: str, value: object, choices: Iterable[str]) -> None:
    """One of the names."""
    if not isinstance(value, str) or value not in choices:
        refuse(op, name + " must be one of {}, got {!r}", (*choices,), value)


def check_range(op: str, name: str, ids: torch.Tensor, size: int, ignored: int | None = None) -> None:
    """Every id must be in [0, size), or the one that is ignored. Only the CPU is looked at: no waiting."""
    if not readable(ids):
        return
    bad = (ids < 0) | (ids >= size)
    if ignored is not None:
        bad &= ids != ignored
    wanted = "[0, {})" if ignored is None else "[0, {}) or {} (ignored)"
    values = (size,) if ignored is None else (size, ignored)
    found = ids[bad][:1].tolist()
    check(op, not found, f"{name} must be in {wanted}, got {{}}", *values, *found)
