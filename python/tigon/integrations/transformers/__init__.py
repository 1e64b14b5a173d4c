"""Hugging Face models: replace their parts by Tigon's kernels in one line, and undo it."""

from tigon.integrations.transformers.lazy_logits import LazyLogits
from tigon.integrations.transformers.report import Entry, HeadCalls, Report

__all__ = ["Entry", "HeadCalls", "LazyLogits", "Report", "apply", "undo"]


def __getattr__(name: str):
    """Import what needs transformers when it is first used: Megatron uses the other names without it."""
    if name not in ("apply", "undo"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tigon.integrations.transformers import patch

    return getattr(patch, name)
