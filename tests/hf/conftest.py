"""Fixtures of the Hugging Face tests."""

import importlib
import importlib.util

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


@pytest.fixture
def recorder():
    """Graphs on the CPU, by the recorder."""
    with importlib.import_module("graph_recorder").recording() as recorder:
        yield recorder


@pytest.fixture
def facade():
    """`import liger_kernel` is Tigon's interface during the test."""
    liger = importlib.import_module("tigon.compat.liger")
    liger.install(replace=True)
    yield
    liger.uninstall()
