"""Hugging Face models: replace their parts by Tigon's kernels in one line, and undo it."""

from tigon.hf.lazy_logits import LazyLogits
from tigon.hf.patch import apply, undo
from tigon.hf.report import Entry, HeadCalls, Report

__all__ = ["Entry", "HeadCalls", "LazyLogits", "Report", "apply", "undo"]
