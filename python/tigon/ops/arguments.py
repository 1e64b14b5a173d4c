"""Checks of the arguments of public functions, with the same words for all of them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from tigon._op import check_stored, foreign, is_transformed
from tigon.error import Error, check, refuse, renamed

F = TypeVar("F", bound=Callable[..., Any])
_STRIDED = torch.strided
_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_LEAST = -(2**63)
_MOST_FLOAT = torch.finfo(torch.float32).max


def kind_of(value: object) -> object:
    """The kind of an argument for an error: the dtype of a tensor, the type of anything else."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    advice = ": give logits.materialise()" if hasattr(type(value), "materialise") else ""
    return type(value).__name__ + advice


def called(words: Mapping[str, str] | None = None, *, stored: bool = True) -> Callable[[F], F]:
    """Decorates what calls operators of other names: an error names the function, and arguments as it does.

    Args:
        words: as :func:`tigon.error.renamed`.
        stored: tensors must have their storage, which is asked first: PyTorch's operations crash without one.
            False if the native operators are the first to read, which ask too.
    """

    def decorate(function: F) -> F:
        names = _positional(inspect.signature(function))

        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                if stored:
                    _check_all_stored(function.__name__, names, args, kwargs)
                return function(*args, **kwargs)
            except Error as error:
                refused = renamed(error, function.__name__, words)
            raise refused

        return call  # type: ignore[return-value]

    return decorate


def _positional(signature: inspect.Signature) -> tuple[str, ...]:
    return tuple(p.name for p in signature.parameters.values() if p.kind <= p.VAR_POSITIONAL)


def unpacked(*functions: Callable) -> Callable[[F], F]:
    """Decorates what takes ``**options: Unpack[...]``: its signature shows them as these functions have them,
    of one name the first; another keyword is a TypeError, and those left out come with their defaults."""

    def decorate(taker: F) -> F:
        signature = inspect.signature(taker, eval_str=True)
        *own, last = signature.parameters.values()
        wanted = last.annotation.__args__[0]
        taken = {p.name: p for f in reversed(functions) for p in inspect.signature(f).parameters.values()}
        inherited = [p for p in taken.values() if p.name in wanted.__annotations__]
        defaults = {p.name: p.default for p in inherited}
        known = {p.name for p in own} | defaults.keys()

        @functools.wraps(taker)
        def call(*args, **options):
            if not known.issuperset(options):
                other = next(key for key in options if key not in known)
                raise TypeError(f"{taker.__qualname__}() got an unexpected keyword argument {other!r}")
            return taker(*args, **defaults | options)

        own = list(inspect.signature(taker).parameters.values())[:-1]
        call.__signature__ = inspect.signature(taker).replace(parameters=own + inherited)  # type: ignore
        return call  # type: ignore[return-value]

    return decorate


def checked_init(init: F) -> F:
    """Decorates the constructor of a module: its integers, numbers and booleans are what their annotations
    say, its sizes, integers without a default, at least 1."""
    parameters = inspect.signature(init).parameters
    names, op = list(parameters), "nn." + init.__qualname__.split(".")[0]
    kinds = {name: str(p.annotation).partition(" | ") for name, p in parameters.items()}

    @functools.wraps(init)
    def call(self, *args, **kwargs):
        for name, value in (*zip(names[1:], args, strict=False), *kwargs.items()):
            kind, _, other = kinds.get(name, ("", "", ""))
            if other not in ("", "None") or (value is None and other):
                continue
            if kind == "int":
                least = 1 if parameters[name].default is inspect.Parameter.empty else _LEAST
                check_integers(op, least=least, **{name: value})
            elif kind == "float":
                check_numbers(op, **{name: value})
                fits = abs(value) <= _MOST_FLOAT or abs(value) == math.inf
                check(op, fits, name + " must be a number of float32, got {}", value)
            elif kind == "bool":
                check_booleans(op, **{name: value})
        init(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def check_float(op: str, name: str, x: object) -> None:
    """x must be a tensor of floats of at least 16 bits."""
    if not isinstance(x, torch.Tensor) or x.dtype not in _FLOATS:
        narrow = isinstance(x, torch.Tensor) and is_narrow(x)
        wanted = "float32, bfloat16, float16 or float64" if narrow else "a float tensor"
        refuse(op, name + " must be {}, got {}", wanted, kind_of(x))
    if x.layout is not _STRIDED or x.is_nested:
        _refuse_layout(op, name, x)


def of_one_shape(x: object, y: object) -> bool:
    """Whether both are tensors of the same sizes, which nested ones do not have."""
    both = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    return both and not (x.is_nested or y.is_nested) and x.shape == y.shape


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


def check_shape(op: str, name: str, x: torch.Tensor, shape: Sequence[int]) -> None:
    """x must have this shape."""
    if x.shape != shape:
        refuse(op, name + " must be {}, got {}", tuple(shape), x.shape)


def check_like(op: str, name: str, x: torch.Tensor, shape: Sequence[int], device: torch.device) -> None:
    """x must have this shape, on this device."""
    check_shape(op, name, x, shape)
    if x.device != device:
        refuse(op, name + " must be on {}, got {}", device, x.device)


def _check_all_stored(op: str, names: Sequence[str], args: tuple, options: dict) -> None:
    """Every tensor must have its storage, those in tuples and lists too."""
    if torch.compiler.is_compiling():
        return
    more = len(args) - len(names)  # of the last one, which takes any number
    for name, value in (*zip((*names, *names[-1:] * more), args, strict=False), *options.items()):
        _look_at_storage(op, name, value)


def _look_at_storage(op: str, name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        check_stored(op, name, value)
    elif isinstance(value, (tuple, list)):
        for i, one in enumerate(value):
            _look_at_storage(op, f"{name}[{i}]", one)


def check_numbers(op: str, **values: object) -> None:
    """Each must be a number; one that the host knows must not be NaN."""
    for name, value in values.items():
        check_number(op, name, value)
        if not isinstance(value, torch.Tensor) and value != value:
            refuse(op, name + " must be a number, got NaN")


def check_number(op: str, name: str, value: object, *, learnt: bool = False) -> None:
    """It must be a number, or a tensor of one: one `learnt`, or without a gradient and off ``meta``."""
    if type(value) is float:
        return
    if not _is_number(value):
        refuse(op, name + " must be a number" + " or a tensor of one" * learnt + ", got {}", _given(value))
    if not learnt and isinstance(value, torch.Tensor):
        if value.is_meta:
            refuse(op, name + " must be a number, got a tensor on meta")
        check_constant(op, name, value)


def check_constant(op: str, name: str, x: torch.Tensor) -> None:
    """x must need no gradient: none reaches it."""
    if x.requires_grad and torch.is_grad_enabled():
        refuse(op, name + " must not require grad (it gets no gradient), got a tensor that does")


def _is_number(value) -> bool:
    if isinstance(value, torch.Tensor):
        plain = value.layout is _STRIDED and not (value.is_nested or value.is_quantized)
        real = not (value.is_complex() or is_narrow(value) or value.dtype == torch.bool)
        return real and plain and value.numel() == 1
    if isinstance(value, int):
        return _LEAST <= value < 2**63
    return isinstance(value, (float, torch.SymFloat, torch.SymInt)) or _converts("__float__", value)


def is_narrow(x: torch.Tensor) -> bool:
    """Whether a tensor is of floats of fewer than 16 bits, which PyTorch's operations do not take."""
    return x.is_floating_point() and x.dtype not in _FLOATS


def _converts(method: str, value: object) -> bool:
    """Whether a value is another library's number. A class has the method too, and so has an array."""
    if not hasattr(type(value), method) or hasattr(type(value), "__setitem__"):
        return False
    try:
        getattr(value, method)()
    except (TypeError, ValueError, ArithmeticError):
        return False
    return True


def _given(value: object) -> object:
    """The kind of a value that was given instead of a number."""
    return "one of more than 64 bits" if isinstance(value, int) else kind_of(value)


def check_booleans(op: str, **values: object) -> None:
    """Each must be True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            refuse(op, name + " must be True or False, got {}", kind_of(value))


def check_positive(op: str, name: str, value: object, *, or_none: bool = False) -> None:
    """A finite number above zero."""
    if value is None and or_none:
        return
    check_number(op, name, value)
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
    return isinstance(value, (int, torch.SymInt)) or _converts("__index__", value)


def one_each(op: str, name: str, values: object, count: int, what: str, default: object) -> object:
    """A list of one value for each of them; `default` if they are None."""
    if values is None:
        return default
    listed = isinstance(values, (Sequence, torch.Size)) and not isinstance(values, (str, bytes))
    check(op, listed, name + " must be a sequence of {} (or None), got {}", count, kind_of(values))
    check(op, len(values) == count, name + " must be one for each of {} {}, got {}", count, what, len(values))
    return list(values)


def readable(t: torch.Tensor) -> bool:
    """Whether the numbers of a tensor can be looked at without waiting: on the CPU, outside tracing and the
    transforms of ``torch.func``."""
    return not (is_traced(t) or is_transformed()) and t.device.type == "cpu"


def refuses_labels(t: torch.Tensor) -> bool:
    """Whether a label of no class is an error: on the CPU. Elsewhere its results are NaN: nothing waits."""
    return t.device.type == "cpu"


def known_labels(
    labels: torch.Tensor, ignore_index: int, classes: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Labels without those of no class, for PyTorch's functions, and a factor of the results or None.

    The factor is NaN for a label of no class. PyTorch's kernels abort on one, and the device is lost.
    It becomes a class that counts, so that the factor reaches the row's gradients.
    """
    if refuses_labels(labels):
        return labels, None
    unknown = (labels != ignore_index) & ((labels < 0) | (labels >= classes))
    factor = torch.ones((), device=labels.device).masked_fill(unknown, torch.nan)
    return labels.masked_fill(unknown, min(int(ignore_index == 0), classes - 1)), factor


def is_traced(t: torch.Tensor) -> bool:
    """Whether a tensor has no numbers, because a compiler or a planner traces shapes."""
    return torch.compiler.is_compiling() or isinstance(t, torch._subclasses.FakeTensor)


def check_choice(op: str, name: str, value: object, choices: Iterable[str]) -> None:
    """One of the names."""
    if not isinstance(value, str) or value not in choices:
        refuse(op, name + " must be one of {}, got {!r}", (*choices,), value)


def check_dtype(op: str, name: str, dtype: object, choices: Sequence[torch.dtype | None]) -> None:
    """One of the dtypes."""
    if not any(dtype is choice for choice in choices):
        refuse(op, name + " must be one of {}, got {!r}", (*choices,), dtype)


def check_range(op: str, name: str, ids: torch.Tensor, size: int, ignored: int | None = None) -> None:
    """Every id must be in [0, size), or the one that is ignored. Only the CPU is looked at: no waiting."""
    if not readable(ids):
        return
    bad = (ids < 0) | (ids >= size)
    if ignored is not None:
        bad &= ids != ignored
    wanted = "[0, {})" if ignored is None else "[0, {}) or {} (ignored)"
    values = (size,) if ignored is None else (size, ignored)
    wrong = ids[bad][:1].tolist()
    check(op, not wrong, f"{name} must be in {wanted}, got {{}}", *values, *wrong)
