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
import store
from tables import Row, by_field, by_provider, markdown, ratio

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE, IMAGES = ROOT / "bench/results/h200", ROOT / "docs/paper.md", ROOT / "docs/img"
COLOURS = plot.COLOURS | {"stock": plot.COLOURS["eager"]}
# Figures 4 to 8 of the paper: batch, throughput and memory of Liger against stock, in percent.
STATED = {
    "llama3-8b": (64, 42.8, -54.8),
    "qwen2-7b": (48, 25.5, -56.8),
    "gemma-7b": (48, 11.9, -51.8),
    "mistral-7b": (128, 27, -21),
    "phi3-mini": (128, 17, -13),
}
# Figures 2 and 3: op, beginning of its cases, title, the size that varies, what the paper says of Liger.
KERNELS = (
    ("cross_entropy", "paper_8192x", "Cross-entropy", "vocabulary", "3 x faster, 5 x less memory at 163840"),
    ("glu", "paper_geglu_4x", "GeGLU", "tokens a row", "speed as stock, 1.6 x less memory at 16384"),
    ("glu", "paper_swiglu_4x", "SwiGLU", "tokens a row", "speed as stock, 1.6 x less memory at 16384"),
    ("rms_norm", "paper_8192x", "RMSNorm", "hidden size", "7 x faster, 3 x less memory at 16384"),
    ("layer_norm", "paper_8192x", "LayerNorm", "hidden size", "30 % faster at 16384"),
    ("rope", "paper_B4_T2048_H", "RoPE", "hidden size", "8 x faster, 3 x less memory at 16384"),
)


def models() -> dict[str, dict[int, dict[str, dict]]]:
    return _sorted(e2e.read(DATA / "e2e_paper.jsonl"), lambda r: r["model"], "batch")


def heads() -> dict[str, dict[int, dict[str, dict]]]:
    records = store.read(DATA / "medusa.jsonl", medusa.key)
    return _sorted(records, lambda r: f"medusa_stage{r['stage']}_{r['heads']}heads", "seq")


def _sorted(records: list[dict], name: Callable[[dict], str], size: str) -> dict:
    """Records by name, size and provider, the sizes in order."""
    found: dict[str, list[dict]] = {}
    for r in sorted(records, key=lambda r: r[size]):
        found.setdefault(name(r), []).append(r)
    return {key: by_provider(of_one, lambda r: r[size]) for key, of_one in found.items()}


def kernels() -> list[tuple[str, str, str, dict[int, dict[str, dict]]]]:
    """Title, what varies, what the paper says and records by size and provider of every kernel."""
    records = store.read(DATA / "paper.jsonl")
    found = []
    for op, begin, title, varies, said in KERNELS:
        mine = (r for r in records if r["op"] == op and r["case"].startswith(begin))
        sizes = by_provider(mine, lambda r, begin=begin: int(r["case"].removeprefix(begin).partition("x")[0]))
        found.append((title, varies, said, dict(sorted(sizes.items()))))
    return found


def draw_kernels(field: str, label: str, path: Path) -> None:
    """A panel for every kernel: `field` over the sizes, forward and backward together."""
    figure, grid = plot.new_figure(2, 3, figsize=(10, 5.5))
    for axis, (title, varies, _, sizes) in zip(grid.flat, kernels(), strict=True):
        for who in ("eager", "liger", "tigon", "tigon_inplace"):
            points = [(n, row[who][field]) for n, row in sizes.items() if who in row]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", ms=3, label=who, color=COLOURS[who])
            spread = [
                (n, row[who]["q20"], row[who]["q80"])
                for n, row in sizes.items()
                if field == "ms" and "q20" in row.get(who, {})
            ]
            if spread:
                axis.fill_between(*zip(*spread, strict=True), color=COLOURS[who], alpha=0.25, lw=0)
        axis.set(title=title, xlabel=varies, ylabel=label, xticks=list(sizes))
        axis.set_ylim(bottom=0)
    grid[0][0].legend(frameon=False, fontsize=8)
    plot.save(figure, path)


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
    head_rows = {name: rows for name, rows in heads().items() if len(rows) > 1}  # one length is no figure
    kernel_rows = {
        "paper_kernels_time.png": partial(draw_kernels, "ms", "ms"),
        "paper_kernels_memory.png": partial(draw_kernels, "peak_mb", "peak MB"),
    }
    for name, rows in head_rows.items():
        kernel_rows[f"paper_{name}.png"] = partial(draw_model, name, rows, xlabel="tokens a row")
    return drawn | kernel_rows


def _kernel_rows() -> list[list[str]]:
    rows = []
    for title, _, said, sizes in kernels():
        size, by = list(sizes.items())[-1]
        who = [by[name] for name in ("eager", "liger", "tigon")]
        cells = [f"{r['ms']:.3f}" for r in who] + [f"{r['peak_mb']:,.0f}" for r in who]
        inplace = f"{by['tigon_inplace']['peak_mb']:,.0f}" if "tigon_inplace" in by else "-"
        rows.append([title, str(size), *cells, inplace, said])
    return rows


def _models_table(batches: dict[int, Row]) -> str:
    rows = {(str(n),): row for n, row in batches.items()}
    fields = {"tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}", "GB": lambda r: f"{r['peak_gb']:.1f}"}
    more = {}
    for label, field in (("tokens/s", "tokens_per_s"), ("GB", "peak_gb")):
        for who in ("liger", "tigon"):
            more[f"{who} / stock, {label}"] = ratio("stock", lambda r, field=field: r[field], who)
    return by_field(("batch",), rows, ("stock", "liger", "tigon"), fields, more)


def _older_memory() -> str:
    """A word on records older than Tigon's gated units, and RoPE, in place."""
    if any("q20" in r for r in store.read(DATA / "paper.jsonl")):
        return ""
    return " The memory of gated units\nwas recorded before it did, that of RoPE without `inplace=True`."


def page() -> str:
    blocks = [
        "# The figures of Liger's paper",
        "<!--\nWritten by `make figures` from `bench/results/h200`.\n-->",
        "[Method](benchmarks.md), [all results](results/index.md).",
        "The paper (arXiv:2410.10989) measured A100 GPUs; here one H200 runs stock transformers, Liger\n"
        "0.8.5 and Tigon. Commits and marks of these records are on the pages of\n"
        "[models](results/models.md), [losses](results/losses.md) and [norms](results/norms.md).",
        "## Figures 2 and 3: kernels over sizes",
        "Forward and backward together in bfloat16: norms and cross-entropy of 8192 rows, gated units of\n"
        "4 rows of tokens and 11008 columns, RoPE of 4 x 2048 tokens with heads of 128. The sizes on the\n"
        "axes are the paper's, which gives no others. The table has time and peak memory of the largest\n"
        "size, as the paper has them: medians of ten repeats and more; in the plots the bands are the\n"
        "[0.2, 0.8] quantiles. `eager` is the plain PyTorch formulation; in place\n"
        "the gradient is written over the logits, and q and k are rotated where they lie, as Liger does.",
        markdown(
            (
                *(
                    "kernel",
                    "size",
                    *(f"{who}, {unit}" for unit in ("ms", "MB") for who in ("eager", "liger", "tigon")),
                ),
                *("tigon in place, MB", "paper on Liger"),
            ),
            _kernel_rows(),
        ),
        "![time](img/paper_kernels_time.png)",
        "![memory](img/paper_kernels_memory.png)",
        "What differs: the H200 has 4.8 TB/s of memory, the A100 2.0. Liger always writes both gradients of\n"
        "gated units over the saved inputs, Tigon where nothing else holds them." + _older_memory(),
        "## Figures 4 to 8: whole models over batch sizes",
        "The paper trained on four A100 of 80 GB, with parameters sharded, on Alpaca with sequences of 512,\n"
        "a cosine schedule, 20 steps and five runs. Here one GPU holds model, gradients and optimizer\n"
        "without checkpointing, and takes five measured steps of one run on random tokens at a constant\n"
        "rate. Percentages of memory are not comparable: here parameters, gradients and optimizer are a\n"
        "larger share, so the same activations are a smaller one.",
    ]
    for name, batches in models().items():
        blocks += [f"### {name}", _models_table(batches)]
        if name in STATED:
            batch, speed, memory = STATED[name]
            blocks.append(
                f"Paper, batch {batch}: Liger {speed:+} % tokens/s, {memory:+} % memory against stock."
            )
        blocks.append(f"![paper_{name}.png](img/paper_{name}.png)")
    blocks += [
        "## Figures 9 to 12: Medusa's heads over lengths",
        "Stage 1 trains the heads on a frozen model, stage 2 both, with gradient checkpointing. Liger's\n"
        "heads have the residual blocks that its example leaves out; liger_fp32 sums weight gradients in\n"
        "float32, as Tigon does, liger in bfloat16; tigon_small bounds the workspace by\n"
        "`max_workspace_mb=256`. The paper has no numbers beside its plots: on eight A100 stock ran out of\n"
        "memory at long sequences.",
        medusa.table(store.read(DATA / "medusa.jsonl", medusa.key)),
        *(f"![{name}](img/{name})" for name in pictures() if name.startswith("paper_medusa")),
    ]
    return "\n\n".join(blocks) + "\n"


def main() -> int:
    PAGE.write_text(page())
    for name, draw in pictures().items():
        draw(IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
