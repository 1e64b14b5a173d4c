"""scikit-build-core's hooks, which say what to do where there is no compiler or no PyTorch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from scikit_build_core import build as hooks
from scikit_build_core.build import *  # noqa: F403

COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = "Tigon is built by a C++20 compiler, and there is none: apt install g++, or CXX=/path/to/one"
FIND_TORCH = Path(__file__).resolve().parents[1] / "cmake" / "find_torch.py"


def _has_compiler() -> bool:
    chosen = os.environ.get("CXX", "").split()
    return any(map(shutil.which, chosen[:1] or COMPILERS))


def _checked(hook):
    def checked(*args, **kwargs):
        if sys.platform != "linux":
            raise SystemExit(f"Tigon runs on Linux only, not on {sys.platform}: a container or WSL 2 will do")
        if not _has_compiler():
            raise SystemExit(NO_COMPILER)
        # -E: pip's isolated build environment hides by PYTHON* variables what is installed.
        if not os.environ.get("TIGON_TORCH_DIR"):
            found = subprocess.run([sys.executable, "-E", FIND_TORCH], stdout=subprocess.DEVNULL, check=False)
            if found.returncode:
                raise SystemExit(1)
        return hook(*args, **kwargs)

    return checked


get_requires_for_build_wheel = _checked(hooks.get_requires_for_build_wheel)
get_requires_for_build_editable = _checked(hooks.get_requires_for_build_editable)
prepare_metadata_for_build_wheel = _checked(hooks.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _checked(hooks.prepare_metadata_for_build_editable)
