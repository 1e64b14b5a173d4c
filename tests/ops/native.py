"""Runs a script under every CPU instruction set and thread count and compares the results bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys

_PRELUDE = """
import hashlib, os, sys
import torch
torch.set_num_threads(int(os.environ["TIGON_TEST_THREADS"]))
_digest = hashlib.sha256()
def emit(*tensors):
    for t in tensors:
        _digest.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
"""


def bits_under(script: str, isas=("scalar", "avx2", "avx512"), threads=(1, 2, 3)) -> set[str]:
    """The distinct digests of everything the script passed to ``emit(*tensors)``; one element when all agree.

    A set the machine lacks falls back to the next lower one, which then is simply compared twice. Matrix
    products are the framework's and not bitwise over threads: scripts leave them out.
    """
    digests = set()
    configurations = [(isa, threads[-1]) for isa in isas] + [(isas[-1], n) for n in threads[:-1]]
    for isa, n in configurations:
        env = {**os.environ, "TIGON_CPU_ISA": isa, "TIGON_TEST_THREADS": str(n)}
        code = _PRELUDE + script + "\nprint(_digest.hexdigest())\n"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip().splitlines()[-1])
    return digests
