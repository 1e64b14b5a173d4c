"""On the path of every process that tests/programs/run.py starts: counts calls of Tigon's native operators.

PyTorch's profiler sees each operator where it is dispatched, in eager code, in compiled graphs and in backward
passes. It starts when Tigon's library has been loaded, so that a process without Tigon is as it would be.
"""

import atexit
import collections
import importlib.abc
import importlib.util
import json
import os
import sys
from pathlib import Path

WATCHED = "tigon._load"


class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            count()

        spec.loader.exec_module = exec_module
        return spec


def count():
    import torch
    from torch._C._profiler import _ExperimentalConfig

    profiler = torch.autograd.profiler.profile(
        use_cpu=True, use_kineto=True, experimental_config=_ExperimentalConfig(profile_all_threads=True)
    )
    profiler.__enter__()
    atexit.register(write, profiler)


def write(profiler):
    profiler.__exit__(None, None, None)
    names = (event.name() for event in profiler.kineto_results.events())
    calls = collections.Counter(name for name in names if name.startswith("tigon::"))
    if calls:
        Path(os.environ["TIGON_COUNTS"], f"calls-{os.getpid()}.json").write_text(json.dumps(calls))


def memory():
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated()
        Path(os.environ["TIGON_COUNTS"], f"memory-{os.getpid()}.json").write_text(json.dumps(peak))


sys.meta_path.insert(0, Watch())
atexit.register(memory)
