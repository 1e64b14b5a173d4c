"""Runs the Python of a page as a reader pastes it: from top to bottom, in an interpreter of its own.

It imports nothing of the tests: ``python page.py PAGE`` is such an interpreter.
"""

import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The first line of a block says that it is not pasted, or that it is a file for several processes.
NOT_RUN = re.compile(r"# ((?:Needs|Part of) .+)\n")
SCRIPT = re.compile(r"# (\w+\.py): (torchrun .+)\n")
OPTIONAL = (
    "accelerate",
    "datasets",
    "kernels",
    "megatron",
    "peft",
    "sentence_transformers",
    "transformers",
    "trl",
)


def blocks(text: str) -> list[tuple[int, str, str | None]]:
    """Line, code and reason not to run it, of every block of Python of a page."""
    found = []
    for match in BLOCK.finditer(text):
        reason = NOT_RUN.match(match[1])
        line = text.count("\n", 0, match.start(1)) + 1
        found.append((line, match[1], None if reason is None else reason[1].rstrip(".")))
    return found


def torchrun(name: str, command: str, code: str) -> None:
    """A block that is a file, run by its own command."""
    Path(name).write_text(code)
    arguments = command.removeprefix("torchrun ").split()
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *arguments], check=True)


def run(page: Path) -> int:
    """0, or 3 where a block needs a package that is not installed."""
    namespace: dict = {"__name__": "__main__"}
    for line, code, reason in blocks(page.read_text(encoding="utf-8")):
        compiled = compile("\n" * (line - 1) + code, str(page), "exec")
        script = SCRIPT.match(code)
        if reason is not None:
            continue
        if script is not None:
            torchrun(*script.groups(), code)
            continue
        try:
            exec(compiled, namespace)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise
            print(f"needs {error.name}", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.path[0] = ""  # the folder it was started in, as in a session
    sys.exit(run(Path(sys.argv[1])))
