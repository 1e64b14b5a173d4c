"""scikit-build-core's hooks, which say what to do where there is no PyTorch to build against."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scikit_build_core import build as hooks
from scikit_build_core.build import *  # noqa: F403

FIND_TORCH = Path(__file__).resolve().parents[1] / "cmake" / "find_torch.py"


def _after_torch(hook):
    def checked(*args, **kwargs):
        # -E: pip's isolated build environment hides by PYTHON* variables what is installed.
        if not os.environ.get("TIGON_TORCH_DIR"):
            found = subprocess.run([sys.executable, "-E", FIND_TORCH], stdout=subprocess.DEVNULL, check=False)
            if found.returncode:
                raise SystemExit(1)
        return hook(*args, **kwargs)

    return checked


get_requires_for_build_wheel = _after_torch(hooks.get_requires_for_build_wheel)
get_requires_for_build_editable = _after_torch(hooks.get_requires_for_build_editable)
prepare_metadata_for_build_wheel = _after_torch(hooks.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _after_torch(hooks.prepare_metadata_for_build_editable)
