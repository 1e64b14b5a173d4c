"""Draw the JSON lines of bench/run.py: one picture an op, bars in percent of the limit.

python bench/plot.py bench/results/cpu/*.jsonl --out docs/img
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

COLOURS = {
    "eager": "#c9ccd1",
    "aten": "#8a8f98",
    "compile": "#5b6470",
    "tigon": "#e8710a",
    "tigon_inplace": "#f6b26b",
    "liger": "#3b6fb6",
    "liger_fp32": "#7fa6d9",
    "quack": "#3f8f5b",
    "quack_inplace": "#86c29b",
    "quack_scaled": "#86c29b",
}


def read(paths: list[Path]) -> list[dict]:
    """All measured records; lines with an error have nothing to draw."""
    lines = [line for path in paths for line in path.read_text().splitlines() if line.strip()]
    return [record for record in map(json.loads, lines) if "ms" in record]


def draw(op: str, records: list[dict], path: Path) -> None:
    """Groups of bars, a group for each case and pass."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups = list(dict.fromkeys((r["case"], r["dtype"], r["pass"]) for r in records))
    providers = list(dict.fromkeys(r["provider"] for r in records))
    width = 0.8 / len(providers)
    figure, axis = plt.subplots(
        figsize=(max(6, 1 + 0.22 * len(groups) * (len(providers) + 1)), 3.6), layout="constrained"
    )
    for i, provider in enumerate(providers):
        mine = {(r["case"], r["dtype"], r["pass"]): r for r in records if r["provider"] == provider}
        places = [g + (i - (len(providers) - 1) / 2) * width for g in range(len(groups))]
        heights = [100 * mine[g]["of_limit"] if g in mine else 0 for g in groups]
        bars = axis.bar(places, heights, width, label=provider, color=COLOURS.get(provider))
        labels = [f"{h:.0f}" if h else "" for h in heights]
        axis.bar_label(bars, labels, fontsize=6, padding=1)
    axis.axhline(100, color="black", lw=0.8, ls=":")
    axis.set_xticks(range(len(groups)), ["\n".join(g) for g in groups], fontsize=7)
    axis.set_ylabel("percent of the limit")
    axis.set_title(f"{op}, {records[0]['gpu']}, torch {records[0]['torch']}", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=7, ncols=len(providers), loc="upper center",
                bbox_to_anchor=(0.5, -0.22))  # fmt: skip
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Read, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the pictures (beside the results)")
    args = parser.parse_args(arguments)
    records = read(args.results)
    if not records:
        raise SystemExit("nothing measured in these files")
    folder = args.out or args.results[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    for op in dict.fromkeys(record["op"] for record in records):
        path = folder / f"bench_{op}.png"
        draw(op, [record for record in records if record["op"] == op], path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
