"""Which records are older than the code that they measured, from the history of git.

A record names its commit. If it names none, `recorded` is the commit that brought it into the repository,
and the code that it measured is not known. `make results` writes bench/commits.json, which the pages
read: they are the same in a clone without history.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from functools import cache

from store import ROOT

FILE = ROOT / "bench/commits.json"
OPS = "csrc/tigon/ops"
HEADS = ("linear_", "multi_token_loss", "drafter_loss")  # ops that share the engine of heads


def git(*words: str) -> str | None:
    """What git prints; None if it fails, or where there is no git."""
    try:
        found = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    except OSError:
        return None
    return None if found.returncode else found.stdout.strip()


def whole_history() -> bool:
    """Whether this is a clone that knows every commit."""
    return git("rev-parse", "--is-shallow-repository") == "false"


def code_of(what: str) -> list[str]:
    """The folders of what was measured: an op's kernels, and of a whole step all of them."""
    folders = [f"{OPS}/{what}"] if (ROOT / OPS / what).is_dir() else [OPS]
    return folders + [f"{OPS}/linear_head", f"{OPS}/loss_head"] * what.startswith(HEADS)


@cache
def changed(commit: str, what: str) -> bool:
    """Whether the code differs from that of the commit in more than comments and the breaks of lines."""
    difference = git("diff", "-U0", "--no-color", "--no-renames", commit, "--", *code_of(what)) or ""
    sides = {"-": "", "+": ""}
    for line in difference.splitlines():
        if line[:1] in sides and line[:3] not in ("+++", "---"):
            sides[line[0]] += re.sub(r"//.*|\s", "", line[1:])
    return sides["-"] != sides["+"]


def measured(run) -> set[tuple[str, str, bool]]:
    """What a file measured, at which commit, and whether that is only the one that brought the record."""
    found = set()
    for r in run.records:
        commit = r.get("commit") or r.get("recorded")
        if commit is not None:
            found.add((r.get("op", run.kind) if run.kind == "op" else run.kind, commit, "commit" not in r))
    return found


def history(runs: Iterable) -> dict[str, dict]:
    """Of each commit that records name its day and what has changed since."""
    found: dict[str, dict] = {}
    for what, commit, unknown in sorted(set().union(*map(measured, runs))):
        entry = found.setdefault(commit, {"day": git("log", "-1", "--format=%as", commit), "changed": []})
        if unknown or changed(commit, what):
            entry["changed"].append(what)
    return dict(sorted(found.items(), key=lambda item: (item[1]["day"] or "", item[0])))


@cache
def known() -> dict[str, dict]:
    """The history that bench/commits.json holds."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def text(history: dict[str, dict]) -> str:
    return "{\n" + ",\n".join(f'"{name}": {json.dumps(entry)}' for name, entry in history.items()) + "\n}\n"


def errors(runs: Iterable) -> list[str]:
    """Commits that do not exist, and marks that are missing; nothing where git does not know."""
    if not whole_history():
        return []
    found = history(runs)
    gone = [name for name, entry in found.items() if entry["day"] is None]
    if gone:
        return [f"no commit {name}, which records name" for name in gone]
    return [] if text(found) == FILE.read_text() else ["make results writes bench/commits.json anew"]


def mark(run, what: str | None = None) -> str:
    """A sentence on the commits of a file, or of one op of it, with what is to be measured again."""
    found = [(commit, unknown) for op, commit, unknown in measured(run) if what in (None, op)]
    history = known()

    def phrase(commit: str, unknown: bool) -> str:
        entry = history.get(commit, {})
        day = f" ({entry['day']})" if entry.get("day") else ""
        if unknown:
            return f"none named, in the repository since {commit}{day}"
        older = (what or run.kind) in entry.get("changed", ())
        return f"{commit}{day}" + (", older than its code" if older else "")

    if not found:
        return ""
    found.sort(key=lambda pair: (history.get(pair[0], {}).get("day") or "", pair))
    again = any(u or (what or run.kind) in history.get(c, {}).get("changed", ()) for c, u in found)
    return (
        f"Commits: {'; '.join(phrase(*pair) for pair in found)}.{' To be measured again.' if again else ''}"
    )
