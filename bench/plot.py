"""Draw the JSON lines of bench/run.py: one picture an op, bars in percent of the limit.

Of the loss head also time and memory over tokens and over classes, where enough of them were measured.

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
    "cce": "#8e6bbf",
    "cce_exact": "#b9a3d9",
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


FEWEST_POINTS = 4
AXES = ("tokens", "columns", "classes")  # of a loss head's case, tokens x columns x classes


def sizes(record: dict) -> tuple[int, ...] | None:
    """The sizes that name a case; None for a case that has options besides."""
    parts = record["case"].split("x")
    return tuple(map(int, parts)) if len(parts) == len(AXES) and all(map(str.isdigit, parts)) else None


def sweeps(records: list[dict]) -> dict[tuple, list[dict]]:
    """Steps that differ in one size alone, by that size's place and the other sizes."""
    found: dict[tuple, list[dict]] = {}
    for r in records:
        if r["pass"] == "step" and (shape := sizes(r)):
            for place in (0, 2):
                others = tuple(n for i, n in enumerate(shape) if i != place)
                found.setdefault((place, r["dtype"], *others), []).append(r | {"at": shape[place]})
    return {k: rs for k, rs in found.items() if len({r["at"] for r in rs}) >= FEWEST_POINTS}


def draw_sweep(op: str, key: tuple, records: list[dict], path: Path) -> None:
    """Milliseconds and extra memory of a step, a line for each provider."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    place, dtype, *others = key
    fixed = ", ".join(
        f"{n} {name}" for n, name in zip(others, (a for a in AXES if a != AXES[place]), strict=True)
    )
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, field, label in zip(
        axes, ("ms", "peak_mb"), ("milliseconds", "MiB beside the operands"), strict=True
    ):
        for provider in dict.fromkeys(r["provider"] for r in records):
            mine = {r["at"]: r[field] for r in records if r["provider"] == provider and r[field]}
            xs = sorted(mine)
            colour = COLOURS.get(provider)
            axis.plot(xs, [mine[x] for x in xs], marker="o", ms=3, lw=1.2, label=provider, color=colour)
        if field == "ms":
            floor = dict(sorted({r["at"]: r["limit_ms"] for r in records}.items()))
            axis.plot(floor.keys(), floor.values(), color="black", lw=0.8, ls=":", label="bare products")
        axis.set(xscale="log", yscale="log", xlabel=AXES[place], ylabel=label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=7)
    figure.suptitle(f"{op} step, {fixed}, {dtype}, {records[0]['gpu']}", fontsize=10)
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
        if op == "linear_cross_entropy":
            for key, swept in sweeps([r for r in records if r["op"] == op]).items():
                path = folder / f"{op}_over_{AXES[key[0]]}_{'x'.join(map(str, key[2:]))}.png"
                draw_sweep(op, key, swept, path)
                print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
