"""Prints the directory of this Python's PyTorch >= 2.10; without one, says what to do and exits with 1."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

MISSING = f"""\
Tigon is built against PyTorch >= 2.10, and here is {{found}}: pip install torch==2.13.0, then the same again.
Here: {sys.executable}. Any version from 2.10 on will do. Where a build does not see it (uv), then
    pip install scikit-build-core cmake ninja        and the same command with --no-build-isolation
A PyTorch that lies elsewhere: TIGON_TORCH_DIR=.../site-packages/torch in the environment."""


def main() -> int:
    """0 and the directory on standard output, or 1 and MISSING on standard error."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        print(MISSING.format(found="none"), file=sys.stderr)
        return 1
    root = Path(spec.origin).parent
    version = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", (root / "version.py").read_text())
    if version and (int(version[2]), int(version[3])) < (2, 10):
        print(MISSING.format(found=version[1]), file=sys.stderr)
        return 1
    print(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
