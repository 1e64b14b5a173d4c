"""ranks.py: processes that end with the one that started them."""

import os
import signal

import ranks

SCRIPT = """
import sys, time
with open(sys.argv[1], "w", buffering=1) as pipe:
    print("here", file=pipe)
    time.sleep(30)
    print("still here", file=pipe)
"""


def test_ranks_end_with_a_killed_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "IMPORTS", [])
    monkeypatch.setattr(ranks, "_forks", ranks._forks.__wrapped__)  # one of its own
    (tmp_path / "script.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "pipe")
    if (parent := os.fork()) == 0:
        ranks.run_ranks(tmp_path / "script.py", [tmp_path / "pipe"], tmp_path)
        os._exit(0)
    with open(tmp_path / "pipe") as pipe:
        assert pipe.read(10) == "here\nhere\n"
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert pipe.read() == ""  # until nobody has it open to write
