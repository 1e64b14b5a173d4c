"""The newest Megatron-Core. Its wheels name Python 3.12; what runs here of it is Python of 3.11 and newer."""

from __future__ import annotations

import sys

from mcore import CASES, DISTRIBUTION, PACKAGES  # noqa: F401

PROGRAM = "Megatron-Core, newest"
CHEAP = True
ALONE = "megatron-core==0.19.2"
if sys.version_info < (3, 12):
    ALONE = "--ignore-requires-python --python-version 3.12 --only-binary=:all: --target {site} " + ALONE
