"""The switch of deterministic calls; the native library holds it."""

from __future__ import annotations

import ctypes
import functools
import inspect
import threading
import weakref
from collections.abc import Callable

from tigon._load import library
from tigon.error import check, refuse

_set = library.tigon_set_deterministic
_set.argtypes = [ctypes.c_int]
_AS_TORCH = -1
_OP = "deterministic"


class _Level:
    """What holds outside of all blocks, or in one: what the last call said that no block has undone."""

    def __init__(self, mode: int) -> None:
        self._mode, self._calls = mode, []  # each call that may yet be undone, with its mode, in their order

    @property
    def mode(self) -> int:
        return self._calls[-1][1] if self._calls else self._mode

    def switch(self, by: deterministic, mode: int) -> None:
        """Note a call. What came before one that nobody holds any more never comes back."""
        for i, (held, theirs) in reversed([*enumerate(self._calls)]):
            if held() is None:
                self._mode, self._calls = theirs, self._calls[i + 1 :]
                break
        self._calls.append((weakref.ref(by), mode))

    def undo(self, by: deterministic) -> None:
        self._calls = [(held, mode) for held, mode in self._calls if held() is not by]


# The process' own level and those of open blocks, in the order of their beginnings: the last one holds.
_levels = [_Level(_AS_TORCH)]
_lock = threading.Lock()


class deterministic:
    """Make a row's results bitwise equal whatever the other rows, from here on or in a ``with`` block.

    ``tigon.deterministic()`` is the switch of the whole process, all threads and CUDA graphs captured from
    then on included; as a context it puts back at the end of the block what was there before. One object may
    be entered any number of times, also inside itself, and blocks may end in any order: the one that began
    last among those still open holds. As a decorator of a function it is a block around each call. A backward
    outside the block runs as it would without it. Without any call Tigon is deterministic if
    ``torch.use_deterministic_algorithms(True)`` is on.

    Args:
        mode: True, False whatever PyTorch's switch says, or None: as PyTorch's switch.

    Raises:
        tigon.Error: another mode; a class, a generator or a coroutine function to decorate, whose body runs
            when the call has returned.
    """

    def __init__(self, mode: bool | None = True) -> None:
        given = mode is None or isinstance(mode, bool)
        check(_OP, given, "mode must be True, False or None, got {!r}", mode)
        self._mode = _AS_TORCH if mode is None else int(mode)
        self._blocks: list[_Level] = []
        with _lock:
            self._level = _levels[-1]  # which this call switches: a block or a decorator undoes that
            self._level.switch(self, self._mode)
            _set(self._mode)

    def __enter__(self) -> deterministic:
        with _lock:
            self._level.undo(self)
            self._blocks.append(_Level(self._mode))
            _levels.append(self._blocks[-1])
            _set(self._mode)
        return self

    def __exit__(self, *_) -> None:
        with _lock:
            _levels.remove(self._blocks.pop())
            _set(_levels[-1].mode)

    def __call__(self, function: Callable) -> Callable:
        late = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if isinstance(function, type) or not callable(function) or any(kind(function) for kind in late):
            self._put_back()
            refuse(
                _OP,
                "only functions that have run when they return can be decorated, got {!r}: put a "
                "with block inside",
                function,
            )
        self._put_back()

        @functools.wraps(function)
        def call(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return call

    def _put_back(self) -> None:
        with _lock:
            self._level.undo(self)
            _set(_levels[-1].mode)


def is_deterministic() -> bool:
    """Whether calls are deterministic now."""
    return library.tigon_deterministic() != 0
