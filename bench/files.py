"""The files of bench/results: what wrote them, their records, the page that shows them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import convergence
import e2e
import store
from store import ROOT

# The page of an op; an op that is not here has a page of its own.
GROUPS = {
    "loss_head": ("linear_cross_entropy", "multi_token_loss"),
    "post_training": (
        "linear_log_prob",
        "linear_loss",
        "linear_preference",
        "linear_policy",
        "linear_divergence",
        "drafter_loss",
        "preference",
        "policy",
        "sample",
    ),
    "losses": ("cross_entropy", "divergence", "contrastive"),
    "norms": (
        "rms_norm",
        "add_rms_norm",
        "layer_norm",
        "modulated_rms_norm",
        "gated_rms_norm",
        "group_norm",
        "poly_norm",
    ),
    "softmax": ("softmax", "sparsemax"),
    "elementwise": ("glu", "relu_squared", "dyt"),
    "rope": ("rope", "qk_norm_rope"),
    "streams": ("attention_residual", "hyper_connection"),
    "experts": ("experts", "route"),
}


MARKS = {  # the first of these fields in a record says what wrote it
    "under": "small_steps",
    "accuracy": "fp8_accuracy",
    "fp8": "fp8",
    "layout": "parallel_e2e",
    "gpus": "parallel",
    "copy_ms": "optimizer",
    "kind": "optimizer",
    "trainer": "trl_trainers",
    "stage": "medusa",
    "part": "adapters",
    "case": "op",
    "op": "host",
    "parts_ms": "floor",
    "family": "convergence",
    "model": "e2e",
}


@dataclass(frozen=True)
class Run:
    """One file of results."""

    path: Path

    @cached_property
    def kind(self) -> str:
        """What wrote it: op, or the name of the program in bench, or train."""
        if self.path.suffix == ".json":
            return "train"
        first = store.read(self.path)[0]
        return next(kind for mark, kind in MARKS.items() if mark in first)

    @cached_property
    def records(self) -> list[dict]:
        """Its records; of a case that was run twice the last one."""
        if self.kind == "train":
            return [json.loads(self.path.read_text())]
        special = {"e2e": e2e.read, "floor": e2e.read, "convergence": convergence.read}
        if self.kind in special:
            return special[self.kind](self.path)
        return store.read(self.path, store.key_of(self.kind))

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT)) if self.path.is_relative_to(ROOT) else str(self.path)

    @property
    def older(self) -> bool:
        """Whether newer files replaced its figures."""
        return self.path.parent.name == "older"

    @property
    def cpu(self) -> bool:
        """Whether it was measured on a CPU."""
        return re.search(r"\bCPU\b|\d threads", self.where()) is not None

    def page(self, op: str | None = None) -> str:
        """The page it is shown on, for an op the page of the op."""
        if self.older:
            return "older"
        if self.kind in ("adapters", "host", "convergence", "optimizer", "parallel", "parallel_e2e"):
            return self.kind.removesuffix("_e2e")
        if self.kind == "fp8_accuracy":
            return "convergence"
        if self.cpu:
            return "cpu"
        if self.kind == "trl_trainers":
            return "post_training"
        return next((page for page, ops in GROUPS.items() if op in ops), op) if op else "models"

    def where(self) -> str:
        """Device, versions and commit."""
        if self.kind == "train":
            devices = {f"{r['device_name']}, torch {r['torch']}" for r in self.records[0]["runs"].values()}
            return "; ".join(sorted(devices))
        names = ("torch", "transformers", "trl", "megatron-core", "liger-kernel", "triton", "commit")
        found = {
            ", ".join([r["gpu"], *(f"{name} {r[name]}" for name in names if r.get(name))])
            for r in self.records
            if "gpu" in r
        }
        return "; ".join(sorted(found))


def runs(folder: Path) -> list[Run]:
    return [Run(path) for path in sorted(folder.rglob("*.json*"))]
