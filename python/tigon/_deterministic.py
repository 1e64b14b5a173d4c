"""The switch of deterministic calls; the native library holds it."""

from __future__ import annotations

import ctypes

from tigon._load import library
from tigon.error import check

_set = library.tigon_set_deterministic
_set.argtypes = [ctypes.c_int]
_AS_TORCH = -1


class deterministic:
    """Make a row's results the same bits whatever stands beside it, from here on or in a ``with`` block.

    ``tigon.deterministic()`` is the switch of the whole process, all threads and CUDA graphs captured from
    then on included; as a context it puts back at the end of the block what was there before. A backward
    outside the block runs as it would without it. Without any call Tigon is deterministic where
    ``torch.use_deterministic_algorithms(True)`` is on.

    Args:
        mode: True, False whatever PyTorch's switch says, or None: as PyTorch's switch.
    """

    def __init__(self, mode: bool | None = True) -> None:
        given = mode is None or isinstance(mode, bool)
        check("deterministic", given, "mode must be True, False or None, got {!r}", mode)
        self._before = _set(_AS_TORCH if mode is None else int(mode))

    def __enter__(self) -> deterministic:
        return self

    def __exit__(self, *_) -> None:
        _set(self._before)


def is_deterministic() -> bool:
    """Whether calls are deterministic now."""
    return library.tigon_deterministic() != 0
