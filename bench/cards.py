"""The tables of docs/one-card.md, from the records of ``bench/e2e.py --suite card``: `make results`."""

from __future__ import annotations

from statistics import median

import e2e
from readme import DATA
from store import ROOT
from tables import markdown

PAGE, FILE = ROOT / "docs/one-card.md", DATA / "e2e_card.jsonl"
MODELS = {
    "qwen3-0.6b": "Qwen3 0.6B",
    "llama3.2-1b": "Llama 3.2 1B",
    "qwen3-1.7b": "Qwen3 1.7B",
    "llama3.2-3b": "Llama 3.2 3B",
    "qwen3-4b": "Qwen3 4B",
    "llama3-8b": "Llama 3 8B",
    "qwen3-8b": "Qwen3 8B",
}
RECIPES = (  # name, provider, optimizer, limit
    ("Tigon, at most 37 GB", "tigon", "int8", "37"),
    ("Tigon, no limit", "tigon", "int8", ""),
    ("transformers, bitsandbytes' PagedAdamW8bit in the backward", "stock", "int8", ""),
    ("transformers, PyTorch's fused AdamW", "stock", "torch", ""),
)
WAYS = {  # provider, optimizer, rank of adapters
    "Tigon, all parameters": ("tigon", "int8", 0),
    "Tigon, LoRA": ("tigon", "torch", 16),
    "transformers, all parameters, fused AdamW": ("stock", "torch", 0),
}


def _rate(record: dict) -> float:
    """Tokens a second of the median step."""
    return 1e3 * record["batch"] * record["seq"] / median(record["step_ms"])


def _figures(record: dict | None) -> list[str]:
    if record is None or "error" in record:
        return ["out of memory" if record and record.get("out_of_memory") else "-", "-", "-"]
    return [f"{_rate(record):,.0f}", f"{record['peak_gb']:.1f}", f"{record['card_gb']:.1f}"]


def _smallest(record: dict | None) -> str:
    if record is None or "error" in record:
        return "none of these" if record and record.get("out_of_memory") else "-"
    return f"**{record['memory_gb']} GB**: {record['peak_gb']:.1f} GB, {_rate(record):,.0f} tokens/s"


def tables() -> str:
    """Recipes of the model of 8 billion parameters; the smallest card of each model."""
    records = e2e.read(FILE)
    if not records:
        return "Not measured yet."
    named = ("model", "seq", "provider", "optimizer", "memory", "lora")
    found = {tuple(map(r.get, named)): r for r in records}
    lengths = (2048, 4096)
    recipes = [
        [name, *(cell for seq in lengths for cell in _figures(found.get(("llama3-8b", seq, *way, 0))))]
        for name, *way in RECIPES
    ]
    head = [
        f"1 x {seq}: {what}" for seq in lengths for what in ("tokens/s", "GB allocated", "GB of the card")
    ]
    cards = [
        [title]
        + [
            _smallest(found.get((model, 2048, provider, optimizer, e2e.CARDS, rank)))
            for provider, optimizer, rank in WAYS.values()
        ]
        for model, title in MODELS.items()
    ]
    cards = [row for row in cards if {*row[1:]} != {"-"}]  # those that were measured
    blocks = ["## Llama 3 8B, every parameter", markdown(["", *head], recipes)]
    if cards:
        blocks += [
            "## What fits which card",
            f"The smallest of {e2e.CARDS.replace(',', ', ')} GB under which a step of 1 x 2048 tokens runs.",
            markdown(["", *WAYS], cards),
        ]
    return "\n\n".join(blocks)
