"""The result of `tigon.apply`: structured, and readable when printed."""

from __future__ import annotations

import html
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tigon.error import Error
from tigon.ops.loss_head.operands import TrainedCalls

log = logging.getLogger("tigon")
_traced: set[str] = set()  # reasons given while tracing


@dataclass(frozen=True)
class Entry:
    """One place in the model: its replacement, or the reason why it was left."""

    slot: (
        str  # "norm", "mlp", "experts", "router", "qkv", "qk_norm", "hyper", "lora", "rope", "loss" or "fp8"
    )
    path: str  # name of the module in the model, or module.function of a rotary function
    kind: str  # class or function found there
    by: str | None = None  # what replaced it
    reason: str | None = None  # why it was left

    @classmethod
    def of(cls, slot: str, path: str, kind: str, verdict: str | tuple) -> Entry:
        """The entry of a plan's verdict: why a place is left, or a tuple that ends with its replacement."""
        by, reason = (None, verdict) if isinstance(verdict, str) else (verdict[-1], None)
        return cls(slot, path, kind, by, reason)

    @property
    def replaced(self) -> bool:
        return self.by is not None


@dataclass
class HeadCalls:
    """Counts of the patched head's lazy logits, and whether they were computed; in eager mode."""

    lazy: int = 0  # lazy logits returned
    fused: int = 0  # losses computed without logits
    materialised: int = 0  # lazy logits that were computed later
    computed: int = 0  # training forwards that computed logits at once
    reason: str | None = None  # why, the last of them
    traced: bool = False  # torch.compile has traced a fused loss; its calls are not counted
    said: set[str] = field(default_factory=set, repr=False)  # warnings given
    others: int = field(default_factory=lambda: TrainedCalls.number, repr=False)  # when applied

    def compute(self, reason: str) -> None:
        """Count a training forward that computes its logits at once; warn once for each reason."""
        if torch.compiler.is_compiling():
            _say_tracing(reason)
            return
        self.computed += 1
        self.reason = reason
        self.say(reason)

    def say(self, reason: str) -> None:
        """Warn once that logits are computed."""
        _say(reason, self.said)

    def __int__(self):
        return self.fused


def _say(reason: str, said: set[str]) -> None:
    if reason not in said:
        said.add(reason)
        log.warning("[apply] the loss head computes all logits in training: %s", reason)


@torch.compiler.assume_constant_result
def _say_tracing(reason: str) -> None:
    _say(reason, _traced)


def reader() -> str:
    """The place of the innermost call outside Tigon and PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("tigon.", "torch.")):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}, line {frame.f_lineno},"


# Packages between a training loop and the head of a model.
_BETWEEN = (
    "tigon.",
    "torch.",
    "accelerate.",
    "peft.",
    "deepspeed.",
    "transformers.",
    "contextlib",
    "functools",
)


def caller() -> str:
    """The module of the training loop that called the model."""
    frame = sys._getframe(1)
    name = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("transformers.trainer") or not name.startswith(_BETWEEN):
            break
        frame = frame.f_back
    return name


@dataclass
class Report:
    """Result of `tigon.apply`."""

    model: str
    entries: list[Entry] = field(default_factory=list)
    head_calls: HeadCalls = field(default_factory=HeadCalls, compare=False)
    notes: list[str] = field(default_factory=list, compare=False)  # what to know before the first step
    graphs: object = field(default=None, compare=False)  # of apply(graphs=True): captures, and why not more
    recompute: object = field(default=None, compare=False)  # of apply(recompute=...)

    @property
    def replaced(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.replaced]

    @property
    def left(self) -> list[Entry]:
        """Entries that were not replaced, each with a reason."""
        return [entry for entry in self.entries if not entry.replaced]

    def count(self, slot: str) -> int:
        """Count the replaced places of a slot."""
        return sum(entry.slot == slot for entry in self.replaced)

    def check(self) -> None:
        """Raise `tigon.Error` if the head was patched and training steps have not used it.

        Call it after the first training step, so that a patch without effect does not go unnoticed. The head
        also counts as used if the program's own loss calls a loss of Tigon with the head's weight, as TRL's
        and verl's do.
        """
        calls = self.head_calls
        by_others = TrainedCalls.number > calls.others and not calls.computed
        if self.count("loss") and not (calls.fused or calls.traced or by_others):
            why = f"; logits computed at once: {calls.reason}" if calls.computed else ""
            if not (calls.computed or calls.lazy):
                why = "; the head was not called in training with gradients: model.train() first"
            raise Error(
                "[apply] loss must be computed by the patched head in a training step, got "
                f"{calls.lazy} lazy logits, {calls.materialised} materialised, 0 fused losses{why}"
            )

    def __str__(self) -> str:
        lines = (f"  {slot:<7} {what} {verdict}".rstrip() for slot, what, verdict in self._table())
        return "\n".join([f"tigon.apply({self.model})", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The report as a table, for notebooks."""
        cell = '<td style="text-align:left">{}</td>'.format
        rows = ("".join(cell(html.escape(text)) for text in row) for row in self._table())
        rows = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><caption>tigon.apply({html.escape(self.model)})</caption>{rows}</table>"

    def _table(self) -> Iterator[tuple[str, str, str]]:
        yield from self._rows()
        yield from (("note", note, "") for note in self._remarks())
        yield from ((slot, line, "") for slot, line in self._lines())

    def _remarks(self) -> list[str]:
        """The notes for the first step, and how the head has been used since."""
        calls = self.head_calls
        lost = calls.computed and not (calls.fused or calls.traced)
        return [*self.notes, *([f"the loss head computes all logits: {calls.reason}"] if lost else [])]

    def _lines(self) -> list[tuple[str, str]]:
        """The lines of options of the whole model."""
        options = (("graphs", self.graphs), ("recompute", self.recompute))
        return [(slot, line) for slot, option in options if option is not None for line in option.lines()]

    def _rows(self):
        """(slot, class or function, its replacement or reason); equal places share a row."""
        groups: dict = {}
        for entry in sorted(self.entries, key=lambda entry: not entry.replaced):
            groups.setdefault((entry.slot, entry.kind, entry.by, entry.reason), []).append(entry.path)
        for (slot, kind, by, reason), paths in groups.items():
            what = f"{len(paths)} x {kind}"
            if len(paths) == 1:  # a function's path ends with its name
                module, _, name = paths[0].rpartition(".")
                what = f"{module.rpartition('.')[2]}.{name}" if name == kind else f"{paths[0]} {kind}".strip()
            yield slot, what, f"-> {by}" if by else f"left: {reason}"
