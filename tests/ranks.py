"""Runs a script in several processes, as torchrun does on the CPU.

One process has imported what all need and forks for each rank: an import takes longer than most scripts.
All of them end with the process that runs the tests, also where that one is killed.
"""

import functools
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

SECONDS = 600  # of a run, on a machine that does other work too

IMPORTS = [
    *("tigon", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "sentence_transformers"),
    *("peft", "megatron.core.models.gpt", "transformers.models.llama.modeling_llama"),
]

_FORKS = """
import contextlib, ctypes, faulthandler, importlib, json, os, runpy, signal, sys, traceback

def end_with(parent):
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)

end_with(int(sys.argv[1]))
for name in sys.argv[2:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

def run(words, log):
    for descriptor, place in ((0, os.devnull), (1, log), (2, log)):
        os.dup2(os.open(place, os.O_RDWR | os.O_CREAT), descriptor)
    faulthandler.enable()
    sys.argv, code = words, 0
    sys.path.insert(0, os.path.dirname(words[0]))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        code = traceback.print_exc() or 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    words, logs, environment, seconds = json.loads(line)
    ranks, parent = {}, os.getpid()
    for rank, log in enumerate(logs):
        ranks[os.fork()] = rank
        if 0 in ranks:
            end_with(parent)
            os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
            run(words, log)
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(child, signal.SIGKILL) for child in ranks])
    signal.alarm(seconds)
    failed = 0
    while ranks:
        child, status = os.wait()
        ranks.pop(child)
        if status and not failed:
            failed = status
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    signal.alarm(0)
    print(failed, flush=True)
"""


@functools.cache
def _forks() -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-c", _FORKS, str(os.getpid()), *IMPORTS],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_ranks(script: Path, words: list, folder: Path, size: int = 2, *, check: bool = True) -> list[str]:
    """What each of `size` processes of the script has said. One that fails ends the others."""
    logs = [str(folder / f"rank{rank}.log") for rank in range(size)]
    # The store is ours, as it is torchrun's: no process looks for a free port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    environment = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    forks = _forks()
    forks.stdin.write(json.dumps([[str(script), *map(str, words)], logs, environment, SECONDS]) + "\n")
    forks.stdin.flush()
    failed = forks.stdout.readline()
    # faulthandler's list of modules is longer than what it says of the crash.
    said = [Path(log).read_text().partition("\nExtension modules: ")[0] for log in logs]
    if failed != "0\n":
        said[-1] += f"\nthe first that ended: status {failed}"
    assert not check or failed == "0\n", f"status {failed}" + "\n".join(text[-3000:] for text in said)
    return said
