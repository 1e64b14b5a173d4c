"""Hugging Face models: replace their parts by Tigon's kernels in one line, and undo it."""

from tigon.integrations.transformers.lazy_logits import LazyLogits
from tigon.integrations.transformers.patch import apply, undo
from tigon.integrations.transformers.report import Entry, HeadCalls, Report

__all__ = ["Entry", "HeadCalls", "LazyLogits", "Report", "apply", "undo"]
