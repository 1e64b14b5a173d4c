"""docs/paper.md: the figures of Liger's paper (arXiv:2410.10989) for which bench/results has data.

python bench/figures.py                  docs/paper.md and docs/img/paper_*.png
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import e2e
import medusa
import plot
from tables import markdown

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE, IMAGES = ROOT / "bench/results/h200", ROOT / "docs/paper.md", ROOT / "docs/img"
COLOURS = plot.COLOURS | {"stock": plot.COLOURS["eager"]}
# Throughput and memory against stock that Liger's examples of fine-tuning state, in percent.
STATED = {"llama3-8b": (20, -40), "qwen2-7b": (10, -50), "gemma-7b": (24, -33)}


def models() -> dict[str, dict[int, dict[str, dict]]]:
    """Records of e2e_paper.jsonl by model, batch and provider."""
    found: dict[str, dict[int, dict[str, dict]]] = {}
    for r in e2e.read(DATA / "e2e_paper.jsonl"):
        found.setdefault(r["model"], {}).setdefault(r["batch"], {})[r["provider"]] = r
    return {name: dict(sorted(rows.items())) for name, rows in found.items()}


def heads() -> dict[str, dict[int, dict[str, dict]]]:
    """Records of medusa.jsonl by stage and heads, length and provider."""
    found: dict[str, dict[int, dict[str, dict]]] = {}
    for r in medusa.read(DATA / "medusa.jsonl"):
        name = f"medusa_stage{r['stage']}_{r['heads']}heads"
        found.setdefault(name, {}).setdefault(r["seq"], {})[r["provider"]] = r
    return {name: dict(sorted(rows.items())) for name, rows in found.items()}


def draw_model(
    name: str, batches: dict[int, dict[str, dict]], path: Path, xlabel: str = "batch, rows"
) -> None:
    """Tokens a second and peak memory over batch sizes or lengths; what did not run has no point."""
    figure, grid = plot.new_figure(1, 2, figsize=(8, 3))
    for axis, kind, label in zip(grid[0], ("tokens_per_s", "peak_gb"), ("tokens/s", "peak GB"), strict=True):
        for who in ("stock", "liger", "tigon"):
            points = [(n, row[who][kind]) for n, row in batches.items() if kind in row.get(who, {})]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", ms=4, label=who, color=COLOURS[who])
        axis.set(xlabel=xlabel, ylabel=label, xticks=list(batches))
        axis.set_ylim(bottom=0)
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{name}, one H200", fontsize=10)
    plot.save(figure, path)


def pictures() -> dict[str, Callable[[Path], None]]:
    """Names of the pictures, and what draws each."""
    drawn = {f"paper_{name}.png": partial(draw_model, name, rows) for name, rows in models().items()}
    of_heads = {name: rows for name, rows in heads().items() if len(rows) > 1}  # one length is no figure
    return drawn | {
        f"paper_{name}.png": partial(draw_model, name, rows, xlabel="tokens a row")
        for name, rows in of_heads.items()
    }


def _against(record: dict | None, stock: dict | None) -> str:
    if record is None:
        return "-"
    if "error" in record:
        return "out of memory" if record.get("out_of_memory") else "error"
    text = f"{record['tokens_per_s']:,.0f} tokens/s, {record['peak_gb']:.1f} GB"
    if stock is None or stock is record or "error" in stock:
        return text
    speed, memory = (100 * record[k] / stock[k] - 100 for k in ("tokens_per_s", "peak_gb"))
    return f"{text} ({speed:+.0f} %, {memory:+.0f} %)"


def page() -> str:
    """The text of docs/paper.md."""
    blocks = [
        "# The figures of Liger's paper",
        "Written by `make figures` from `bench/results/h200`; do not edit. [Method](benchmarks.md), "
        "[all results](results/index.md).\n\nThe paper (arXiv:2410.10989) measured A100 GPUs; here one H200 "
        "runs stock transformers, Liger 0.8.5 and\nTigon.",
        "## Figures 4 to 8: whole models over batch sizes",
        "In brackets throughput and peak memory against stock, where stock runs. The last column is what "
        "Liger's\nexamples of fine-tuning state, for four A100 of 80 GB under FSDP with activation "
        "checkpointing, batches of 64\nand more a GPU and sequences of 512. Here one GPU holds model, "
        "gradients and optimizer, without FSDP and\nwithout checkpointing: percentages of memory are not "
        "comparable, since the shares of parameters and\nactivations differ.",
    ]
    for name, batches in models().items():
        stated = "{:+d} %, {:+d} %".format(*STATED[name]) if name in STATED else "-"
        rows = [
            [
                str(n),
                *(_against(row.get(who), row.get("stock")) for who in ("stock", "liger", "tigon")),
                stated,
            ]
            for n, row in batches.items()
        ]
        blocks += [f"### {name}", markdown(("batch", "stock", "liger", "tigon", "stated for Liger"), rows),
                   f"![paper_{name}.png](img/paper_{name}.png)"]  # fmt: skip
    blocks += [
        "## Figures 9 to 12: Medusa's heads over lengths",
        "Stage 1 trains the heads on a frozen model, stage 2 both. Liger's heads have the residual blocks\n"
        "that its example leaves out. A figure is drawn where `bench/results/h200/medusa.jsonl` has more\n"
        "than one length.",
        medusa.table(medusa.read(DATA / "medusa.jsonl")),
        *(f"![{name}](img/{name})" for name in pictures() if name.startswith("paper_medusa")),
        "## Figures 2 and 3: kernels over hidden and vocabulary sizes",
        "Not drawn. Their data are in the tables of [losses](results/losses.md), [norms](results/norms.md),\n"
        "[rotary embedding](results/rope.md) and [elementwise ops](results/elementwise.md): norms over 13\n"
        "hidden sizes beside PyTorch and Liger; cross-entropy over 53 vocabularies of Tigon alone, of the\n"
        "peers over four; gated units over two widths, rotary embedding over four shapes, beside Liger.",
    ]
    return "\n\n".join(blocks) + "\n"


def main() -> int:
    """Write page and pictures."""
    PAGE.write_text(page())
    for name, draw in pictures().items():
        draw(IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
