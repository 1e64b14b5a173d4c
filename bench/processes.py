"""One case in one process: its record whatever happens to the process, and files of such records.

While a case runs, the processes of the next ones import what they need and wait, without touching the card.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

AHEAD = 2  # processes that get ready while a case runs
Key = Callable[[dict], Hashable]  # what makes two records the same case


class Worker:
    """A process of ``script --worker CASE RESULT`` that gets ready and waits for the word."""

    def __init__(self, script: str, case: dict):
        env = {
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "USE_HUB_KERNELS": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            **os.environ,
        }
        self.folder = tempfile.TemporaryDirectory()
        self.case_file, self.result_file = (Path(self.folder.name, name) for name in ("case", "result"))
        self.case = case
        self.case_file.write_text(json.dumps(case))
        command = [sys.executable, script, "--worker", str(self.case_file), str(self.result_file)]
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, timeout: float) -> dict:
        """The record of the case, whatever happens to its process."""
        start = time.perf_counter()
        try:
            _, errors = self.process.communicate("go\n", timeout)
            if self.result_file.exists():
                result = json.loads(self.result_file.read_text())
            else:
                last = (errors.strip().splitlines() or ["no output"])[-1]
                result = {"error": f"exit code {self.process.returncode}: {last}"}
        except subprocess.TimeoutExpired:
            result = {"error": f"more than {timeout:.0f} s"}
        self.close()
        return {**self.case, **result, "seconds": time.perf_counter() - start}

    def close(self) -> None:
        """End the process, if it has not ended."""
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()


def command_line(doc: str) -> argparse.ArgumentParser:
    """The parser of a program, which prints its docstring as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def split(args: argparse.Namespace, **known: Iterable[str]) -> None:
    """Options with commas become lists of known words; another word ends the program."""
    for name, words in known.items():
        given = getattr(args, name).split(",")
        if unknown := set(given) - set(words):
            raise SystemExit(f"--{name}: {', '.join(sorted(unknown))} is not of {', '.join(words)}")
        setattr(args, name, given)


def append(path: Path, record: dict) -> None:
    """One line, at once: a crash later loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def serve(case_file: str, result_file: str, prepare: Callable, run_case: Callable[[dict], dict]) -> None:
    """The other side: import what takes long, wait for the word, run the case; an error is a record."""
    case = json.loads(Path(case_file).read_text())
    try:
        prepare(case)
        if not sys.stdin.readline():
            return
        result = run_case(case)
    except Exception as error:
        kind, text = type(error).__name__, str(error).strip().splitlines() or [""]
        result = {"error": f"{kind}: {text[0]}", "out_of_memory": kind == "OutOfMemoryError"}
    Path(result_file).write_text(json.dumps(result))


def measure(script: str, key: Key, case: dict, timeout: float, following: Iterable[dict] = ()) -> dict:
    """The record of one case; the processes of those that follow get ready meanwhile."""
    for each in (case, *following):
        if key(each) not in ready:
            ready[key(each)] = Worker(script, each)
    return ready.pop(key(case)).run(timeout)


ready: dict[Hashable, Worker] = {}


def close() -> None:
    """End the processes that still wait."""
    while ready:
        ready.popitem()[1].close()


def fields(*names: str) -> Key:
    """The key that these fields of a record are."""
    return lambda record: json.dumps([record.get(name) for name in names], sort_keys=True)


def read(path: Path, key: Key) -> list[dict]:
    """Records of a file; of a case that was run twice the last one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({key(record): record for record in map(json.loads, filter(str.strip, lines))}.values())


def finished(record: dict) -> bool:
    return "error" not in record or bool(record.get("out_of_memory"))


def run_all(script: str, key: Key, cases: Iterable[dict], out: Path, timeout: float) -> None:
    """Every case that the file does not hold; records are appended when their case ends."""
    from tqdm import tqdm

    done = {key(r) for r in read(out, key) if finished(r)}
    waiting = [case for case in cases if key(case) not in done]
    for number, case in enumerate(tqdm(waiting, unit="case", disable=None)):
        append(out, measure(script, key, case, timeout, waiting[number + 1 : number + 1 + AHEAD]))
    close()


def main(script: str, words: list[str] | None, parse, cases, key: Key, prepare, run_case, table) -> int:
    """The cases that --out does not hold, then the table; of --table only that; as a worker one case."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["--worker"]:
        serve(*words[1:3], prepare, run_case)
        return 0
    args = parse(words)
    if not args.table:
        run_all(script, key, cases(args), args.out, args.case_timeout)
    print(table(read(args.table or args.out, key)))
    return 0


def error_text(record: dict) -> str:
    """The cell of a case without figures."""
    return "out of memory" if record.get("out_of_memory") else record["error"][:60].replace("|", "/")
