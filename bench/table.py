"""Markdown tables from the JSON lines of bench/run.py.

python bench/table.py bench/results/h200/five_ops.jsonl

One table per op: a row per case and pass, a column per provider with milliseconds and percent of the limit
of the same run. Bold marks the fastest. Whatever a provider could not do is listed below its table, with its
own words.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def _providers(rows: list[dict]) -> list[str]:
    names = list(dict.fromkeys(row["provider"] for row in rows if "ms" in row))
    return sorted(names, key=lambda name: (not name.startswith("tigon"), names.index(name)))


def _cell(row: dict | None, best: float) -> str:
    if row is None:
        return "-"
    text = f"{row['ms']:.3f} ({100 * row['of_limit']:.0f} %)"
    return f"**{text}**" if row["ms"] <= best else text


def table(op: str, rows: list[dict]) -> str:
    """The table of one op, and what failed below it."""
    providers = _providers(rows)
    measured = {(r["case"], r["dtype"], r["pass"], r["provider"]): r for r in rows if "ms" in r}
    lines = [f"## {op}", "", "| case | pass | limit ms | " + " | ".join(providers) + " | peak MB (tigon) |"]
    lines.append("|" + "---|" * (len(providers) + 4))
    for case, dtype, which in dict.fromkeys(key[:3] for key in measured):
        found = [measured.get((case, dtype, which, name)) for name in providers]
        best = min(row["ms"] for row in found if row)
        limit = next(row["limit_ms"] for row in found if row)
        ours = measured.get((case, dtype, which, "tigon"))
        peak = f"{ours['peak_mb']:.0f}" if ours and ours.get("peak_mb") is not None else "-"
        cells = " | ".join(_cell(row, best) for row in found)
        lines.append(f"| {case} {dtype} | {which} | {limit:.3f} | {cells} | {peak} |")
    failed = {(r["provider"], r["error"].split("\n")[0][:120]): r["case"] for r in rows if "error" in r}
    lines += [""] + [f"- {name}, {case}: {error}" for (name, error), case in failed.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables of the files named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    files = parser.parse_args().files
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    machines = {(r["gpu"], r["torch"], r["commit"]) for r in rows}
    print(
        "\n".join(f"{gpu}, torch {torch}, commit {commit}" for gpu, torch, commit in sorted(machines)), "\n"
    )
    for op in dict.fromkeys(row["op"] for row in rows):
        print(table(op, [row for row in rows if row["op"] == op]))


if __name__ == "__main__":
    main()
