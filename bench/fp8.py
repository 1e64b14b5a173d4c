"""The table of docs/fp8.md, whole steps in bfloat16 and in float8: `make results`."""

from __future__ import annotations

from statistics import median

import e2e
from readme import DATA
from store import ROOT
from tables import markdown

PAGE, FILE = ROOT / "docs/fp8.md", DATA / "e2e_fp8.jsonl"
TITLES = {"llama3-8b": "LLaMA 3 8B", "llama3.2-1b": "LLaMA 3.2 1B"}


def _row(record: dict, bf16: dict | None) -> list[str]:
    what = [TITLES[record["model"]], record["layers"] and f"{record['layers']} layers"]
    what += [record["lora"] and f"LoRA of rank {record['lora']}", f"{record['batch']} x {record['seq']}"]
    options = record["apply"]
    way = (
        f"`{options['fp8']}`" + ", `fp8_base_only`" * options.get("fp8_base_only", False)
        if options
        else "bf16"
    )
    ms = median(record["step_ms"])
    speed = f"{median(bf16['step_ms']) / ms:.2f}" if options and bf16 else ""
    cells = [f"{ms:.1f} ({min(record['step_ms']):.1f})", f"{record['peak_gb']:.2f} GB", speed]
    return [", ".join(filter(None, what)), way, *cells]


def table() -> str:
    """Each model in bfloat16, and then in float8."""
    records = [r for r in e2e.read(FILE) if "error" not in r]
    rows = []
    for case in {(r["model"], r["lora"], r["layers"], r["batch"], r["seq"]): None for r in records}:
        of = [r for r in records if (r["model"], r["lora"], r["layers"], r["batch"], r["seq"]) == case]
        bf16 = next((r for r in of if not r["apply"]), None)
        rows += [_row(r, bf16) for r in sorted(of, key=lambda r: (bool(r["apply"]), str(r["apply"])))]
    return markdown(("model", "Linears", "ms", "peak", "times as fast"), rows)
