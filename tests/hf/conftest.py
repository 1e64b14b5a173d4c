"""Fixtures of the Hugging Face tests: no patch survives a test."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_patch_survives():
    """Rotary globals are shared by all models of a package: give every test stock ones."""
    yield
    rope = importlib.import_module("tigon.integrations.transformers.rope")
    for key, entry in list(rope._rebound.items()):
        for finalizer in entry.owners.values():
            finalizer.detach()
        setattr(sys.modules[key[0]], key[1], entry.original)
    rope._rebound.clear()


@pytest.fixture
def facade():
    """`import liger_kernel` is Tigon's interface during the test."""
    liger = importlib.import_module("tigon.compat.liger")
    liger.install(replace=True)
    yield
    liger.uninstall()
