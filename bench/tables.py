"""What the pages of docs/results are made of: sections, comparisons, Markdown and figures as printed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

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

    def compare(self, what: str, ours: float, peers: dict[str, float]) -> str:
        """Milliseconds of Tigon beside those of the fastest peer: noted, and the speed as text."""
        if not peers:
            self.alone += 1
            return "-"
        peer = min(peers, key=peers.get)
        speed = peers[peer] / ours
        self.comparisons.append(Comparison(what, f"{ms(ours)} ms", peer, f"{ms(peers[peer])} ms", speed))
        return speed_text(speed)


RUN = ("gpu", "torch", "commit")  # the fields in which all records of one run agree


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
        """A provider's cell; of a record of another run with what tells that run from this one."""
        other = self.elsewhere.get(name)
        if other is None:
            return text(self.get(name))
        apart = (str(value) for value, own in zip(run_of(other), self.run, strict=True) if value != own)
        return f"{text(other)}, at {', '.join(apart)}"


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


def ms(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def speed_text(speed: float) -> str:
    """A ratio of speeds, marked where Tigon is behind."""
    return f"{speed:.2f}x" + (" behind" if speed < LEVEL else "")


def mib(record: dict | None) -> str:
    return "-" if not record or record.get("peak_mb") is None else f"{record['peak_mb']:.0f}"
