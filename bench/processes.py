"""The runner of the programs in bench: cases one after the other, their records as each ends, a table.

A case that wants a process of its own (`each`) has a record whatever happens to that process. While it runs,
the processes of the next cases import what they need and wait, without touching the card.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path

import store
from store import Key

AHEAD = min(4, max(2, (os.cpu_count() or 2) // 4))  # processes that get ready beside that of a case


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

    def wait(self) -> None:
        """Until the process is ready, or has ended."""
        while self.process.poll() is None and not self.result_file.with_name("ready").exists():
            time.sleep(0.02)

    def close(self) -> None:
        """End the process, if it has not ended."""
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()


# Options of several programs.
OPTIONS = {
    "layers": {"type": int, "help": "fewer layers than published"},
    "set": {"default": "", "metavar": "K=V,...", "help": "other changes of every configuration"},
    "batch": {"type": int, "help": "rows of a step"},
    "seq": {"type": int, "help": "tokens of a row"},
    "steps": {"type": int, "help": "measured steps, after those to warm up"},
    "dtype": {"default": "bfloat16", "choices": ("bfloat16", "float32")},
    "device": {"default": "cuda"},
}


def command_line(
    doc: str, out: str | None = None, timeout: float = 0.0, options: str = "", **defaults: int
) -> argparse.ArgumentParser:
    """The parser of a program, which prints its docstring as it stands.

    `out`: the file of a program that `main` runs, "" if it is named after the device. `timeout`: seconds of
    a case with a process of its own. `options`: names of `OPTIONS`; `defaults`: others with
    their defaults.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name in (*options.split(), *defaults):
        add(f"--{name}", **OPTIONS[name])
    parser.set_defaults(**defaults)
    if out is not None:
        add("--out", type=Path, default=Path(out) if out else None, help="JSON lines")
        add("--table", type=Path, metavar="JSONL", help="only print the table of this file")
    if timeout:
        add("--case-timeout", type=float, default=timeout, metavar="SECONDS")
        add(
            "--budget", type=float, default=0.0, metavar="MINUTES", help="end, even within a case, after this"
        )
        add("--again", action="store_true", help="run cases that --out already holds, too")
    return parser


def split(args: argparse.Namespace, **known: Iterable[str]) -> None:
    """Options with commas become lists of known words; another word ends the program."""
    for name, words in known.items():
        given = getattr(args, name).split(",")
        if unknown := set(given) - set(words):
            raise SystemExit(f"--{name}: {', '.join(sorted(unknown))} is not of {', '.join(words)}")
        setattr(args, name, given)


def serve(case_file: str, result_file: str, prepare: Callable, run_case: Callable[[dict], dict]) -> None:
    """The other side: import what takes long, wait for the word, run the case; an error is a record."""
    case = json.loads(Path(case_file).read_text())
    try:
        prepare(case)
        Path(result_file).with_name("ready").touch()
        if not sys.stdin.readline():
            return
        result = run_case(case)
    except Exception as error:
        kind, text = type(error).__name__, str(error).strip().splitlines() or [""]
        result = {"error": f"{kind}: {text[0]}", "out_of_memory": kind == "OutOfMemoryError"}
    Path(result_file).write_text(json.dumps(result))


def measure(
    script: str, key: Key, case: dict, timeout: float, following: Iterable[dict] = (), quiet: bool = False
) -> dict:
    """The record of one case; processes of those that follow get ready meanwhile, or before it if quiet."""
    if quiet and key(case) in ready:
        following = ()
    for each in (case, *following):
        if key(each) not in ready:
            ready[key(each)] = Worker(script, each)
    if quiet:
        for worker in ready.values():
            worker.wait()
    return ready.pop(key(case)).run(timeout)


ready: dict[Hashable, Worker] = {}


def close() -> None:
    """End the processes that still wait."""
    while ready:
        ready.popitem()[1].close()


def each(
    script: str,
    args: argparse.Namespace,
    cases: Iterable[dict],
    key: Key,
    known: list[dict],
    line=None,
    quiet: bool = False,
) -> Iterator[dict]:
    """The records of the cases that are not among the known ones, each from a process of its own.

    Where a batch was out of memory a larger one of the same case is not tried. `line`: a record as text.
    `quiet`: no other process gets ready while a case runs, for steps that wait for the host.
    """
    from tqdm import tqdm

    start = time.perf_counter()
    known = [] if args.again else known
    done = {key(r) for r in known if store.finished(r)}
    too_large: dict[Hashable, int] = {}  # the smallest batch that was, of everything but batches

    def row(record: dict) -> Hashable:
        return key({**record, "batch": None})

    def note(record: dict) -> None:
        if record.get("out_of_memory"):
            too_large[row(record)] = min(record["batch"], too_large.get(row(record), math.inf))

    for record in known:
        note(record)
    waiting = [case for case in cases if key(case) not in done]
    bar = tqdm(waiting, unit="case", dynamic_ncols=True)
    for number, case in enumerate(bar):
        left = 60 * args.budget - (time.perf_counter() - start) if args.budget else args.case_timeout
        if left <= 0:
            bar.write(f"out of time: {len(waiting) - number} cases not started")
            break
        if case["batch"] >= too_large.get(row(case), math.inf):
            record = {**case, "error": "a smaller batch was out of memory", "out_of_memory": True}
        else:
            following = waiting[number + 1 : number + 1 + AHEAD]
            limit = min(left, args.case_timeout)
            record = measure(script, key, case, limit, following, quiet)
        note(record)
        yield record
        if line:
            bar.write(line(record))
    close()


def main(
    words: list[str] | None,
    parse: Callable,
    measured: Callable[[argparse.Namespace], Iterable[dict]],
    read: Callable[[Path], list[dict]],
    table: Callable[[list[dict]], str],
) -> int:
    """Each record that `measured` yields is written to --out at once; then the table of that file.

    Of several ranks the first one writes. 1 if all cases of this run failed.
    """
    args = parse(sys.argv[1:] if words is None else words)
    if args.table:
        print(table(read(args.table)))
        return 0
    first, found = os.environ.get("RANK", "0") == "0", []
    with contextlib.suppress(KeyboardInterrupt):
        for record in measured(args):
            found.append(record)
            if first:
                store.append(args.out, record)
    if first:
        broken = sum(not store.finished(record) for record in found)
        print(f"\n{table(read(args.out))}\n\n{len(found)} cases, {broken} broken; {args.out}")
    return int(bool(found) and not any(map(store.finished, found)))


def main_of_cases(
    script: str,
    words: list[str] | None,
    parse,
    cases,
    key: Key,
    prepare,
    run_case,
    table,
    read=None,
    line=None,
    quiet: bool = False,
) -> int:
    """`main` of a program whose cases have a process each, the program itself as such a process."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["--worker"]:
        serve(*words[1:3], prepare, run_case)
        return 0
    read = read or (lambda path: store.read(path, key))

    def measured(args: argparse.Namespace) -> Iterator[dict]:
        return each(script, args, cases(args), key, read(args.out), line, quiet)

    return main(words, parse, measured, read, table)
