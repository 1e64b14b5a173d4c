"""Megatron-Core on Tigon's kernels: ``apply`` to a built model, or specs and functions for its slots.

See docs/megatron.md.
"""

from tigon.integrations import megatron as _megatron
from tigon.integrations.megatron import __all__ as __all__


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_megatron, name)
