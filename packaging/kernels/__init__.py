"""Tigon as a kernel of the Hub: its functions, and :mod:`layers` for ``kernelize``."""

import importlib.util
import sys
from pathlib import Path

# Operators are registered once in a process: an installed Tigon serves.
if importlib.util.find_spec("tigon") is None:
    sys.path.append(str(Path(__file__).parent))

from tigon import cross_entropy, linear_cross_entropy, linear_log_prob, rms_norm, rope, swiglu

from . import layers

__all__ = ["cross_entropy", "layers", "linear_cross_entropy", "linear_log_prob", "rms_norm", "rope", "swiglu"]
