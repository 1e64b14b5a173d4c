"""Bytes of float8 that go with a tensor, from the op that writes both to the linear that reads them.

What lies between sees a plain tensor: hooks, views and foreign code change nothing here. Bytes belong to a
tensor as long as it lives and nothing has written to it; a view of all its rows finds them too. An op writes
the bytes of its result if a linear had to make them the last time, and those of its gradients if the nodes
that read them are linears of float8.
"""

from __future__ import annotations

import weakref

import torch

on = False  # a linear of float8 has run
_MOST = 4  # more than a layer's producers write before its linears read
_with: dict[int, tuple] = {}  # by the id of a tensor that is no view
_wanted: dict[int, weakref.ref] = {}  # by the id of the parameter of the op whose result's bytes are wanted


def stream_of(t: torch.Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(t.device.index) if t.is_cuda else 0


def _whole(x: torch.Tensor) -> torch.Tensor:
    base = x._base
    return x if base is None else base


def _place(x: torch.Tensor) -> tuple:
    """The place, version and stream of a tensor's rows."""
    layout = (x.numel(), x.shape[-1]) if x.is_contiguous() else (x.shape, x.stride())
    return x.data_ptr(), x._version, stream_of(x), *layout


def put(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor | None = None) -> None:
    """Keep the bytes of x's rows with it. Those of a few other tensors stay.

    Args:
        factors: by which the columns were multiplied before.
    """
    whole = _whole(x)
    key = id(whole)
    _with.pop(key, None)
    for oldest in list(_with)[: 1 - _MOST]:
        _with.pop(oldest, None)
    of = weakref.ref(whole, lambda _: _with.pop(key, None))
    _with[key] = of, _place(x), factors, (q, scales)


def get(x: torch.Tensor, factors: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The bytes and scales of x's rows, if they are kept."""
    whole = _whole(x)
    held = _with.get(id(whole))
    if held is None or held[0]() is not whole or held[2] is not factors or held[1] != _place(x):
        return None
    return held[3]


def take(x: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The bytes and scales of a gradient, which are read once; ``None`` twice if there are none."""
    found = get(x, factors)
    _with.pop(id(_whole(x)), None)
    return found or (None, None)


def want(x: torch.Tensor) -> None:
    """Ask the op that has made x to write the bytes of its results from now on."""
    of = getattr(x.grad_fn, "fp8_key", None)
    parameter = None if of is None else of()
    if parameter is not None:
        key = id(parameter)
        _wanted[key] = weakref.ref(parameter, lambda _: _wanted.pop(key, None))


def wanted(parameter: torch.Tensor) -> bool:
    of = _wanted.get(id(parameter))
    return of is not None and of() is parameter


def factors_of(ctx) -> list[torch.Tensor]:
    """By which two linears of float8 multiply the columns of gradients, if they made the first two inputs."""
    found = []
    for node, of in getattr(ctx, "next_functions", ())[:2] if on else ():  # functorch's context has none
        factors = getattr(node, "fp8_factors", None)
        found.append(factors and factors[of])
    return found if len(found) == 2 and all(f is not None for f in found) else []


def weight_behind(x: torch.Tensor) -> torch.Tensor | None:
    """The weight of the linear of float8 that has made x."""
    of = getattr(x.grad_fn, "fp8_weight", None)
    return None if of is None else of()
