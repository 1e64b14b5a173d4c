"""The measured part of README, a table and a picture, from bench/results: `make results` writes both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

import adapters
import e2e
import plot
import store
from store import ROOT
from tables import Row, by_provider, fastest_peer, markdown

DATA, PAGE = ROOT / "bench/results/h200", ROOT / "README.md"
MARKS = "<!-- written by `make results` -->\n", "<!-- end -->"
MODELS = {
    "llama3-8b": "Llama 3 8B",
    "qwen2-7b": "Qwen2 7B",
    "mistral-7b": "Mistral 7B",
    "gemma-7b": "Gemma 7B",
    "phi3-mini": "Phi-3 mini",
    "llama3.2-1b": "Llama 3.2 1B",
}
COLOURS = {"stock": plot.COLOURS["eager"], "liger": plot.COLOURS["liger"], "tigon": plot.COLOURS["tigon"]}
NAMES = {"stock": "transformers", "liger": "Liger", "trl": "TRL", "peft": "PEFT", "compile": "torch.compile"}
NAMES |= {"frozen": "frozen", "bf16": "Tigon in bf16"}
# What, page of the results, file, op, case and pass of bench/run.py.
OPS = (
    ("KL divergence, 8192 x 128256", "losses", "losses", "divergence", "kl_8192x128256", "step"),
    (
        *("Loss head, 8192 x 4096 x 128256, 80 % of labels masked", "loss_head", "loss_head"),
        *("linear_cross_entropy", "8192x4096x128256_masked80", "step"),
    ),
    (
        *("Loss head, 8192 x 4096 x 128256", "loss_head", "loss_head"),
        *("linear_cross_entropy", "8192x4096x128256", "step"),
    ),
    ("Cross-entropy of logits, 8192 x 128256", "losses", "losses", "cross_entropy", "8192x128256", "step"),
    ("Experts of Qwen3-30B-A3B, 8192 tokens", "experts", "experts", "experts", "qwen3_30b_8192", "step"),
)


def _line(what: str, page: str, row: Row, milliseconds, gib, peers: tuple[str, ...] = ()) -> list[str]:
    """A case beside its fastest peer: time and memory of both, and the speed."""
    others = [r for name, r in row.items() if (name in peers if peers else not name.startswith("tigon"))]
    ours, peer = row["tigon"], min((r for r in others if "error" not in r), key=milliseconds)
    if "op" in ours:
        ours, peer = fastest_peer(row)
        what += ", in place" * ours["provider"].endswith("_inplace")
    times = [milliseconds(r) for r in (ours, peer)]
    name = NAMES.get(peer["provider"], peer["provider"])
    cells = [f"{t:,.0f} ms" if t >= 100 else f"{t:.2f} ms" for t in times]
    speed = f"{times[1] / times[0]:.2f}x"
    return [f"[{what}](docs/results/{page}.md)", cells[0], f"{name} {cells[1]}", speed, gib(ours), gib(peer)]


def rows() -> list[list[str]]:
    """Ten cases: steps of models, of a trainer and of layers with adapters, and ops."""

    def step(r: dict) -> float:
        return mean(r["step_ms"])

    def gb(r: dict) -> str:
        return f"{r['peak_gb' if 'peak_gb' in r else 'gb']:.1f} GB"

    def mib(r: dict) -> str:
        return f"{r['peak_mb']:,.0f} MiB"

    found = []
    for model, title in (("llama3-8b", "Training step of Llama 3 8B, 16 x 512"),):
        found.append(_line(title, "models", six()[model], step, gb))
    people = by_provider(e2e.read(DATA / "e2e_people.jsonl"), lambda r: r["model"])
    title = "Training step of Gemma 3 4B, 12 layers, 4 x 2048"
    found.append(_line(title, "models", people["gemma3-4b"], step, gb))
    whole = [r for r in e2e.read(DATA / "e2e_fp8.jsonl") if r["layers"] is None]
    row = Row([r if r["apply"] else r | {"provider": "bf16"} for r in whole])
    found.append(_line("The step of Llama 3 8B with FP8 linears", "models", row, step, gb))
    lora = adapters.cases(store.read(DATA / "lora.jsonl")).items()
    wanted = {"part": "model", "rows": 4, "tokens": 2048, "checkpointing": False, "dora": False, "nf4": False}
    (row,) = (r for _, r in lora if all(next(iter(r.values())).get(k) == v for k, v in wanted.items()))
    peers = tuple(name for name in row if name.startswith(("peft", "unsloth")))
    title = "Llama of 8B's width with LoRA, 8 layers, 4 x 2048"
    found.append(_line(title, "adapters", row, lambda r: r["ms"], gb, peers))
    trl = by_provider(store.read(DATA / "trl_trainers.jsonl"), lambda r: r["trainer"])
    found.append(_line("Step of TRL's DPO trainer, 8 x 1024", "post_training", trl["dpo"], step, gb))
    for what, page, file, *case in OPS:
        records = (r for r in store.read(DATA / f"{file}.jsonl") if "ms" in r)
        by = by_provider(records, lambda r: (r["op"], r["case"], r["pass"]))
        found.append(_line(what, page, by[tuple(case)], lambda r: r["ms"], mib))
    return found


def six() -> dict[str, Row]:
    return by_provider(e2e.read(DATA / "e2e_six.jsonl"), lambda r: r["model"])


def table(pages: str = "docs/results/") -> str:
    """The rows, with links to pages in a folder."""
    head = ("one H200, bfloat16", "Tigon", "fastest peer", "speed", "memory", "peer's")
    return markdown(head, rows()).replace("docs/results/", pages)


def draw(path: Path) -> None:
    """Bars: speed and peak memory of the six models, relative to stock."""
    figure, grid = plot.new_figure(1, 2, figsize=(9, 3.3))
    measured = six()
    for axis, field, title in (
        (grid[0][0], "tokens_per_s", "Tokens per second, transformers = 1"),
        (grid[0][1], "peak_gb", "Peak memory, transformers = 1"),
    ):
        for n, (who, colour) in enumerate(COLOURS.items()):
            heights = [measured[model][who][field] / measured[model]["stock"][field] for model in MODELS]
            places = [place + 0.28 * (n - 1) for place in range(len(MODELS))]
            bars = axis.bar(places, heights, 0.26, color=colour, label=NAMES.get(who, "Tigon"))
            axis.bar_label(
                bars, [f"{h:.2f}".lstrip("0") for h in heights] if who != "stock" else None, fontsize=6.5
            )
        axis.set_xticks(
            range(len(MODELS)), [name.replace(" ", "\n", 1) for name in MODELS.values()], fontsize=7.5
        )
        axis.set_title(title, fontsize=10)
    grid[0][0].legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    grid[0][0].set_ylim(top=1.75)
    optimizer = "PyTorch's fused AdamW in all three"
    figure.suptitle(f"A training step, 16 x 512 tokens, bfloat16, one H200, {optimizer}", fontsize=10)
    plot.save(figure, path)


PICTURES: dict[str, Callable[[Path], None]] = {"six_models.png": draw}


def page(text: str, measured: str) -> str:
    """A page whose text between the marks is this."""
    begin, rest = text.split(MARKS[0])
    return f"{begin}{MARKS[0]}{measured}\n{MARKS[1]}{rest.split(MARKS[1], 1)[1]}"
