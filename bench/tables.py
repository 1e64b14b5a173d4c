"""What the pages of docs/results are made of: sections, comparisons, Markdown and figures as printed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import store

# A peer is ahead when Tigon's speed is below this fraction of its speed.
LEVEL = 1 / 1.03


@dataclass(frozen=True)
class Comparison:
    """Tigon beside its fastest peer in one case: what was measured, both figures, speed of Tigon / peer."""

    what: str
    ours: str
    peer: str
    theirs: str
    speed: float

    @property
    def behind(self) -> bool:
        """Whether the peer is ahead by more than the runs' spread."""
        return self.speed < LEVEL


@dataclass
class Section:
    """A part of a page; `run` is the file (results.Run) it shows."""

    run: Any
    heading: str
    text: str
    comparisons: list[Comparison] = field(default_factory=list)
    of_limit: list[float] = field(default_factory=list)
    alone: int = 0  # cases without a peer in the same run
    op: str | None = None  # the one op that it shows

    def compare(self, what: str, ours: float, peers: dict[str, float]) -> str:
        """Milliseconds of Tigon beside those of the fastest peer: noted, and the speed as text."""
        if not peers:
            self.alone += 1
            return "-"
        peer = min(peers, key=peers.get)
        speed = peers[peer] / ours
        self.comparisons.append(Comparison(what, f"{ms(ours)} ms", peer, f"{ms(peers[peer])} ms", speed))
        return speed_text(speed)


RUN = ("gpu", "torch", "commit", "recorded")  # the fields in which all records of one run agree


class Row(dict[str, dict]):
    """The records of one case by provider, all of one run; what only another run has is kept apart."""

    def __init__(self, records: list[dict]):
        """Of the newest run that has Tigon's record. An error without a device belongs to any run."""
        placed = [r for r in records if "gpu" in r]
        by_tigon = [r for r in placed if r["provider"].startswith("tigon")]
        ours = [r for r in by_tigon if r["provider"] == "tigon"]
        self.run = run_of((ours or by_tigon or placed or records)[-1])
        here = [r for r in records if "gpu" not in r or run_of(r) == self.run]
        self.update((r["provider"], r) for r in here)
        self.elsewhere = {r["provider"]: r for r in records if r["provider"] not in self}

    def shown(self, name: str, text: Callable[[dict | None], str]) -> str:
        """A provider's cell, marked if its record is of another run."""
        other = self.elsewhere.get(name)
        return text(self.get(name)) if other is None else f"{text(other)} †"

    def apart(self) -> dict[str, str]:
        """What tells the other runs of providers from this one."""
        found = {}
        for name, other in self.elsewhere.items():
            pairs = zip(run_of(other), self.run, strict=True)
            found[name] = ", ".join(str(value) for value, own in pairs if value not in (own, None))
        return found


def run_of(record: dict) -> tuple:
    return tuple(map(record.get, RUN))


def by_provider(records: Iterable[dict], key: Callable[[dict], Hashable]) -> dict[Hashable, Row]:
    """The records of every case, by provider; a comparison holds records of one run."""
    found: dict[Hashable, list[dict]] = {}
    for r in records:
        found.setdefault(key(r), []).append(r)
    return {case: Row(same) for case, same in found.items()}


def by_tokens(what: Callable[[dict], str], row: Row) -> list[Comparison]:
    """Tigon beside the peer of most tokens a second; `row`: records by provider, `what`: of Tigon's."""
    peers = [r for name, r in row.items() if not name.startswith("tigon")]
    ours = row.get("tigon")
    if not peers or ours is None:
        return []
    peer = max(peers, key=lambda r: r["tokens_per_s"])
    rates = [f"{r['tokens_per_s']:,.0f} tokens/s" for r in (ours, peer)]
    speed = ours["tokens_per_s"] / peer["tokens_per_s"]
    return [Comparison(what(ours), rates[0], peer["provider"], rates[1], speed)]


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def notes(rows: Iterable[Row]) -> str:
    """What the mark of other runs means below a table; nothing where it has none."""
    runs = dict.fromkeys(f"{name} {where}" for row in rows for name, where in row.apart().items())
    return f"\n\n† Of another run, not compared: {'; '.join(sorted(runs))}." if runs else ""


def by_field(
    head: Iterable[str],
    rows: dict[tuple[str, ...], Row],
    providers: Iterable[str],
    fields: dict[str, Callable[[dict], str]],
    more: dict[str, Callable[[Row], str]],
) -> str:
    """A row for each case: its names, a column for each field and provider, then columns of the whole row."""
    columns = [(name, label) for label in fields for name in providers]

    def cell(label: str, first: bool) -> Callable[[dict | None], str]:
        def text(record: dict | None) -> str:
            if record is None or ("error" in record and not first):
                return "-"
            return store.error_text(record) if "error" in record else fields[label](record)

        return text

    first = next(iter(fields))
    lines = [
        [*names, *(row.shown(name, cell(label, label == first)) for name, label in columns)]
        + [text(row) for text in more.values()]
        for names, row in rows.items()
    ]
    names = [*head, *(f"{name}, {label}" for name, label in columns), *more]
    return markdown(names, lines) + notes(rows.values())


def pair(row: Row, other: str, who: str = "tigon") -> tuple[dict, dict] | None:
    """The records of Tigon, or of `who`, and of another one, if both have figures."""
    found = row.get(who), row.get(other)
    return None if any(r is None or "error" in r for r in found) else found


def ratio(other: str, value: Callable[[dict], float], who: str = "tigon") -> Callable[[Row], str]:
    """A value of Tigon's, or of `who`, over another's."""
    return lambda row: f"{value(two[0]) / value(two[1]):.2f}x" if (two := pair(row, other, who)) else "-"


def distance(other: str, field: str) -> Callable[[Row], str]:
    """The largest relative difference of a list of numbers."""

    def text(row: Row) -> str:
        if not (two := pair(row, other)):
            return "-"
        return f"{max(abs(a - b) / abs(b) for a, b in zip(*(r[field] for r in two), strict=True)):.1e}"

    return text


# Peers that overwrite what they are given without a name that says so.
OVERWRITES = {("cross_entropy", "liger"), ("rope", "liger")}


def fastest_peer(measured: dict[str, dict]) -> tuple[dict, dict] | None:
    """Records of Tigon and of the fastest peer; both in place where the peer works in place."""
    peers = [r for name, r in measured.items() if not name.startswith("tigon")]
    if not peers or "tigon" not in measured:
        return None
    peer = min(peers, key=lambda r: r["ms"])
    in_place = peer["provider"].endswith("_inplace") or (peer["op"], peer["provider"]) in OVERWRITES
    return measured.get("tigon_inplace" if in_place else "tigon", measured["tigon"]), peer


def ms(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def speed_text(speed: float) -> str:
    """A ratio of speeds, marked where Tigon is behind."""
    return f"{speed:.2f}x" + (" behind" if speed < LEVEL else "")


def mib(record: dict | None) -> str:
    return "-" if not record or record.get("peak_mb") is None else f"{record['peak_mb']:.0f}"
