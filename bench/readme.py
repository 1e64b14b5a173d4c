"""The measured part of README, a table and a picture, from bench/results: `make results` writes both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean

import e2e
import plot
import store
import trl_trainers
from tables import by_provider, markdown

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "bench/results/h200", ROOT / "README.md"
MARKS = "<!-- written by `make results` -->\n", "<!-- end -->"
MODELS = ("llama3-8b", "qwen2-7b", "mistral-7b", "gemma-7b", "phi3-mini", "llama3.2-1b")
TITLES = "thousands of tokens/s; height relative to stock", "peak memory, GB"
COLOURS = {"stock": plot.COLOURS["eager"], "liger": plot.COLOURS["liger"], "tigon": plot.COLOURS["tigon"]}
# What, page of the results, file, op, case and pass of bench/run.py.
OPS = (
    (
        "Loss head, 8192 x 4096 x 128256",
        "loss_head",
        "loss_head",
        "linear_cross_entropy",
        "8192x4096x128256",
        "step",
    ),
    (
        "The same with 80 % of the labels masked",
        "loss_head",
        "loss_head",
        "linear_cross_entropy",
        "8192x4096x128256_masked80",
        "step",
    ),
    ("Cross-entropy of logits, 8192 x 128256", "losses", "losses", "cross_entropy", "8192x128256", "step"),
    ("KL divergence, 8192 x 128256", "losses", "losses", "divergence", "kl_8192x128256", "step"),
    ("RMSNorm backward, 16384 x 8192", "norms", "rows", "rms_norm", "16384x8192", "bwd"),
    ("Experts of Qwen3-30B-A3B, 8192 tokens", "experts", "experts", "experts", "qwen3_30b_8192", "step"),
)


def _row(what: str, page: str, ours: str, peers: Iterable[str]) -> list[str]:
    return [f"[{what}](docs/results/{page}.md)", ours, ", ".join(peers)]


def _op_row(what: str, page: str, file: str, op: str, case: str, which: str) -> list[str]:
    """Tigon beside the fastest peer and Liger, with memory where it differs by more than a MiB."""
    rows = [r for r in store.read(DATA / f"{file}.jsonl") if "ms" in r]
    by = by_provider(rows, lambda r: (r["op"], r["case"], r["pass"]))[op, case, which]
    peers = sorted((r for name, r in by.items() if not name.startswith("tigon")), key=lambda r: r["ms"])
    shown = [r for r in peers if r is peers[0] or r["provider"] == "liger"]
    memory = len({round(r["peak_mb"] / 16) for r in (by["tigon"], *shown)}) > 1

    def text(r: dict) -> str:
        return f"{r['ms']:.2f} ms" + (f" and {r['peak_mb']:,.0f} MiB" if memory else "")

    return _row(what, page, text(by["tigon"]), (f"{r['provider']} {text(r)}" for r in shown))


def six() -> dict[str, dict[str, dict]]:
    return by_provider(e2e.read(DATA / "e2e_six.jsonl"), lambda r: r["model"])


def table() -> str:
    """Eight rows: a whole step, ops, a trainer's step."""

    def step(r: dict) -> str:
        return f"{r['tokens_per_s']:,.0f} tokens/s, {r['peak_gb']:.1f} GB"

    by = six()["llama3-8b"]
    peers = (f"{name} {step(by[name])}" for name in ("liger", "stock"))
    rows = [_row("Training step of LLaMA 3 8B, 16 x 512", "models", step(by["tigon"]), peers)]
    rows += [_op_row(*what) for what in OPS]
    trained = store.read(DATA / "trl_trainers.jsonl", trl_trainers.key)
    dpo = by_provider(trained, lambda r: r["trainer"])["dpo"]
    cells = {name: f"{mean(r['step_ms']):.0f} ms, {r['peak_gb']:.1f} GB" for name, r in dpo.items()}
    peers = (f"{label} {cells[name]}" for name, label in (("liger", "TRL with Liger"), ("trl", "TRL")))
    rows.append(_row("Step of TRL's DPO trainer, 8 x 1024", "post_training", cells["tigon"], peers))
    return markdown(("one H200, bfloat16", "Tigon", "peers in the same run"), rows) + "\n"


def draw(path: Path) -> None:
    """Bars: tokens per second, relative to stock, and peak memory of the six models."""
    figure, grid = plot.new_figure(1, 2, figsize=(10, 3.4))
    measured = six()
    for axis, field, title in zip(grid[0], ("tokens_per_s", "peak_gb"), TITLES, strict=True):
        for n, (who, colour) in enumerate(COLOURS.items()):
            for place, model in enumerate(MODELS):
                value = measured[model][who][field]
                height = value / measured[model]["stock"][field] if field == "tokens_per_s" else value
                text = f"{value / 1000:.1f}" if field == "tokens_per_s" else f"{value:.0f}"
                bar = axis.bar(
                    place + 0.28 * (n - 1), height, 0.26, color=colour, label=who if place == 0 else None
                )
                axis.bar_label(bar, [text], fontsize=6)
        axis.set_xticks(range(len(MODELS)), MODELS, fontsize=8)
        axis.set_title(title, fontsize=10)
    grid[0][0].legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    grid[0][0].set_ylim(top=1.75)
    figure.suptitle("A training step, 16 x 512 tokens, bfloat16, one H200", fontsize=10)
    plot.save(figure, path)


PICTURES: dict[str, Callable[[Path], None]] = {"six_models.png": draw}


def page(text: str) -> str:
    """README with the table between the marks written anew."""
    begin, rest = text.split(MARKS[0])
    return f"{begin}{MARKS[0]}{table()}{MARKS[1]}{rest.split(MARKS[1], 1)[1]}"
