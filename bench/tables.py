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
    alone: int = 0  # cases without a peer

    def compare(self, what: str, ours: float, peers: dict[str, float]) -> str:
        """Milliseconds of Tigon beside those of the fastest peer: noted, and the speed as text."""
        if not peers:
            self.alone += 1
            return "-"
        peer = min(peers, key=peers.get)
        speed = peers[peer] / ours
        self.comparisons.append(Comparison(what, f"{ms(ours)} ms", peer, f"{ms(peers[peer])} ms", speed))
        return speed_text(speed)


def by_provider(records: Iterable[dict], key: Callable[[dict], Hashable]) -> dict[Hashable, dict[str, dict]]:
    """The records of every case, by provider."""
    found: dict[Hashable, dict[str, dict]] = {}
    for r in records:
        found.setdefault(key(r), {})[r["provider"]] = r
    return found


def by_tokens(what: Callable[[dict], str], row: dict[str, dict]) -> list[Comparison]:
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
