"""Runs a script under every CPU instruction set and thread count and compares the results bit by bit.

One process has imported torch and Tigon and forks for each run: the library chooses its instruction set at
its first call, and the framework starts its threads at theirs.
"""

import functools
import json
import subprocess
import sys

_FORKS = """
import hashlib, json, os, sys, traceback
import tigon, torch

def digest_of(script):
    digest = hashlib.sha256()
    def emit(*tensors):
        for t in tensors:
            digest.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    exec(script, {"__name__": "__main__", "torch": torch, "emit": emit})
    return digest.hexdigest()

for line in sys.stdin:
    script, isa, threads = json.loads(line)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.environ["TIGON_CPU_ISA"] = isa
        torch.set_num_threads(threads)
        try:
            answer = [digest_of(script), ""]
        except BaseException:
            answer = ["", traceback.format_exc()]
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, status = os.wait()
    print(answer or json.dumps(["", f"ended with status {status}"]), flush=True)
"""


@functools.cache
def _forks() -> subprocess.Popen:
    command = [sys.executable, "-c", _FORKS]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def bits_under(script: str, isas=("scalar", "avx2", "avx512"), threads=(1, 2, 3)) -> set[str]:
    """The distinct digests of everything the script passed to ``emit(*tensors)``; one element when all agree.

    A set the machine lacks falls back to the next lower one, which then is simply compared twice. Matmuls
    are the framework's and not bitwise over threads: scripts leave them out.
    """
    digests = set()
    configurations = [(isa, threads[-1]) for isa in isas] + [(isas[-1], n) for n in threads[:-1]]
    for isa, n in configurations:
        forks = _forks()
        forks.stdin.write(json.dumps([script, isa, n]) + "\n")
        forks.stdin.flush()
        digest, error = json.loads(forks.stdout.readline())
        assert not error, error
        digests.add(digest)
    return digests
