"""Draw the JSON lines of bench/run.py: one picture for each file and op, in percent of the limit.

Of the loss head also time and memory over tokens and over classes, where enough of them were measured; of
bench/convergence.py its curves. bench/results.py draws what docs/results shows with the same functions.

python bench/plot.py bench/results/cpu/*.jsonl --out docs/img
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import convergence
import processes
import store

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
TIGON_MARKER = {"marker": "o", "ms": 5, "zorder": 3}
PEER_MARKER = {"marker": "D", "ms": 3.5, "zorder": 2}


def new_figure(rows: int, columns: int, **options):
    """A figure and its grid of axes, without the two spines that carry no scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    for axis in grid.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, grid


def save(figure, path: Path) -> None:
    """Write the figure; the bytes do not name the version of matplotlib."""
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw(op: str, records: list[dict], path: Path) -> None:
    """A panel for each pass, a line for each case, a marker for each provider."""
    dtypes = {r["dtype"] for r in records}
    named = [(r, r["case"] if len(dtypes) == 1 else f"{r['case']} {r['dtype']}") for r in records]
    cases = list(dict.fromkeys(name for _, name in named))
    passes = list(dict.fromkeys(r["pass"] for r in records))
    providers = list(dict.fromkeys(r["provider"] for r in records))
    size = (2.2 + 3.6 * len(passes), 1.3 + 0.19 * len(cases))
    figure, grid = new_figure(1, len(passes), figsize=size, sharey=True)
    for axis, which in zip(grid[0], passes, strict=True):
        for provider in providers:
            mine = [
                (100 * r["of_limit"], cases.index(name))
                for r, name in named
                if (r["pass"], r["provider"]) == (which, provider)
            ]
            if mine:
                look = TIGON_MARKER if provider == "tigon" else PEER_MARKER
                axis.plot(
                    *zip(*mine, strict=True), ls="", label=provider, color=COLOURS.get(provider), **look
                )
        axis.axvline(100, color="black", lw=0.8, ls=":")
        axis.set_xlim(left=0)
        axis.set_yticks(range(len(cases)), cases, fontsize=7)
        axis.grid(axis="y", lw=0.3)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_xlabel(f"{which}, percent of the limit", fontsize=8)
    grid[0][0].invert_yaxis()
    handles = {
        label: handle
        for axis in grid[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        frameon=False,
        fontsize=7,
        ncols=len(handles),
        loc="outside lower center",
    )
    figure.suptitle(f"{op}, {records[0]['gpu']}, torch {records[0]['torch']}", fontsize=9)
    save(figure, path)


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
    place, dtype, *others = key
    fixed = ", ".join(
        f"{n} {name}" for n, name in zip(others, (a for a in AXES if a != AXES[place]), strict=True)
    )
    figure, grid = new_figure(1, 2, figsize=(9, 3.6))
    for axis, field, label in zip(
        grid[0], ("ms", "peak_mb"), ("milliseconds", "MiB beside the operands"), strict=True
    ):
        for provider in dict.fromkeys(r["provider"] for r in records):
            mine = {r["at"]: r[field] for r in records if r["provider"] == provider and r[field]}
            xs = sorted(mine)
            colour = COLOURS.get(provider)
            axis.plot(xs, [mine[x] for x in xs], marker="o", ms=3, lw=1.2, label=provider, color=colour)
        if field == "ms":
            limit = dict(sorted({r["at"]: r["limit_ms"] for r in records}.items()))
            axis.plot(limit.keys(), limit.values(), color="black", lw=0.8, ls=":", label="bare matmuls")
        axis.set(xscale="log", yscale="log", xlabel=AXES[place], ylabel=label)
    grid[0][0].legend(frameon=False, fontsize=7)
    figure.suptitle(f"{op} step, {fixed}, {dtype}, {records[0]['gpu']}", fontsize=10)
    save(figure, path)


def pictures(path: Path, records: list[dict]) -> dict[str, Callable[[Path], None]]:
    """What is drawn of one file of results: names of pictures, and what draws each of them."""
    run = f"{path.parent.name}_{path.stem}"
    if any("family" in r for r in records):
        return {f"{run}.png": partial(convergence.draw, records)}
    measured = [r for r in records if "of_limit" in r]
    found = {}
    for op in dict.fromkeys(r["op"] for r in measured):
        mine = [r for r in measured if r["op"] == op]
        found[f"{run}_{op}.png"] = partial(draw, op, mine)
        for key, swept in sweeps(mine).items() if op == "linear_cross_entropy" else ():
            sizes_kept = "x".join(map(str, key[2:]))
            found[f"{run}_over_{AXES[key[0]]}_{sizes_kept}.png"] = partial(draw_sweep, op, key, swept)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = processes.command_line(__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the pictures (beside the results)")
    args = parser.parse_args(arguments)
    found = {name: draw for path in args.results for name, draw in pictures(path, store.read(path)).items()}
    if not found:
        raise SystemExit("nothing measured in these files")
    folder = args.out or args.results[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw_to in found.items():
        draw_to(folder / name)
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
