"""Tigon as a kernel of the Hub: its functions, and :mod:`layers` for ``kernelize``."""

import importlib.util
import sys
from pathlib import Path

if (
    importlib.util.find_spec("tigon") is None
):  # its operators are registered once a process: an installed one serves
    sys.path.append(str(Path(__file__).parent))

from tigon import cross_entropy, linear_cross_entropy, linear_log_prob, rms_norm, rope, swiglu

from . import layers

__all__ = ["cross_entropy", "layers", "linear_cross_entropy", "linear_log_prob", "rms_norm", "rope", "swiglu"]
