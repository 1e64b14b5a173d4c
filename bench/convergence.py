"""Does a patched model learn what the stock model learns? Ten families, the same text, the same seed.

    python bench/convergence.py                               both dtypes, minutes on two cores
    python bench/convergence.py --device cuda                 the same on a GPU
    python bench/convergence.py --families llama,qwen3 --steps 20
    python bench/convergence.py --draw bench/results/cpu/convergence.jsonl --picture curves.png

Rounding alone lets two runs of one model drift apart, so equality is no yardstick. The yardstick here is
stock itself: it is trained several times, each time as the same function with its sums in another order (the
features of the residual stream permuted in every weight, the rows of every batch permuted). The band is the
largest distance of two such runs. The patched model is trained like this too, some times, since one run
may be odd by luck; it is inside if the median distance of its runs from those of stock is within the band.
The distance of two runs is the root mean square, over the steps, of the relative difference of their losses.
In the same way the logits of the first batch after the last step and all weights are compared, by the norm of
their difference; a family is inside if losses, logits and weights are.
In 16 bits a patched model rounds less often than stock, so the table also says how far both are from a stock
run in float32, and --plain-runs trains it on Tigon's formulas in plain PyTorch, too: what these do to the
curve is the formulas' doing and not the kernels'.

The text is Python's own standard library, byte by byte: nothing is downloaded, and there is no tokenizer.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import processes
import store
from tables import markdown

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "python"), str(ROOT / "examples")]  # tigon, unless it is installed; the text
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

HIDDEN = 80  # no other size of these models: it tells the residual stream's axes from all others
SHARED = {
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_cache": False,
    "attention_dropout": 0.0,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "olmo2": {},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 4.0},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "output_router_logits": True,
        "decoder_sparse_step": 1,
    },
}
DTYPES = ("float32", "bfloat16")
# Four units in the last place of a float32 loss: what is nearer is not told apart.
FLOOR = 4 * 2.0**-23
# How far apart the first losses of one function may be, its sums in another order.
FIRST = {"float32": 1e-5, "bfloat16": 1e-2}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = processes.command_line(__doc__, "out/convergence.jsonl")
    add = parser.add_argument
    add("--families", default=",".join(FAMILIES))
    add("--dtypes", default=",".join(DTYPES))
    add("--runs", type=int, default=8, help="of stock, each with its sums in another order")
    add("--patched-runs", type=int, default=3, help="of the patched model, likewise")
    add("--plain-runs", type=int, default=0, help="of the patched model without kernels, likewise")
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=8)
    add("--seq", type=int, default=64)
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0, help="of the weights")
    add("--device", default="cpu")
    args = parser.parse_args(arguments)
    processes.split(args, families=FAMILIES, dtypes=DTYPES)
    if args.runs < 2:
        raise SystemExit("--runs must be at least 2: a band has two sides")
    return args


def batches(args: argparse.Namespace):
    """[steps, batch, seq] bytes of the standard library, the same ones for every run."""
    import torch
    import train_data

    text = bytearray()
    for path in train_data.standard_library():
        text += path.read_bytes()
        if len(text) > 2_000_000:
            break
    data = torch.frombuffer(text, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(data) - args.seq, (args.steps, args.batch, 1), generator=generator)
    return data[starts + torch.arange(args.seq)].long().to(args.device)


def build(family: str, args: argparse.Namespace, dtype: str):
    """The family's model, the same numbers each time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SHARED, **FAMILIES[family])
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(args.device, getattr(torch, dtype)).train()


def shuffle_features(model, seed: int, back: bool = False) -> None:
    """The same function with the features of the residual stream in another order; `back`: in the first."""
    import torch

    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(seed))
    order = order.argsort() if back else order
    with torch.no_grad():
        for parameter in model.parameters():
            for axis in [axis for axis, size in enumerate(parameter.shape) if size == HIDDEN]:
                parameter.copy_(parameter.index_select(axis, order.to(parameter.device)))


def train(model, data, args: argparse.Namespace, seed: int | None = None) -> list[float]:
    """The loss of every step; with a seed the rows of each batch change places."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    generator = torch.Generator().manual_seed(seed or 0)
    losses = torch.empty(len(data), device=data.device)
    for step, ids in enumerate(data):
        if seed is not None:
            ids = ids[torch.randperm(len(ids), generator=generator).to(ids.device)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = loss.detach()
    return [float(f"{loss:.8g}") for loss in losses.tolist()]


def end(model, ids, seed: int | None) -> dict:
    """What a run has learnt: logits, and weights with their features in the first order."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=ids).logits.float().flatten()
    if seed:
        shuffle_features(model, seed, back=True)
    return {
        "logits": logits,
        "weights": torch.cat([p.detach().float().flatten() for p in model.parameters()]),
    }


def apart(one, other) -> float:
    """The norm of the difference of two tensors, relative."""
    return ((one - other).norm() / other.norm()).item()


def distance(one: list[float], other: list[float]) -> float:
    """How far two curves are apart: the root mean square of their relative differences, step by step."""
    return math.sqrt(statistics.mean(gap * gap for gap in gaps(one, other)))


def gaps(one: list[float], other: list[float]) -> list[float]:
    """The relative difference of two curves at every step."""
    return [abs(a - b) / abs(b) for a, b in zip(one, other, strict=True)]


def bands(stock: list, tigon: list, far=distance, name: str = "") -> dict:
    """The largest distance of two stock runs, and the median one of a patched run from stock."""
    band = max(FLOOR, *(far(a, b) for a, b in itertools.combinations(stock, 2)))
    from_stock = statistics.median(far(a, b) for a, b in itertools.product(tigon, stock))
    return {f"{name}band": band, f"{name}distance": from_stock}


def verdict(stock: list[list[float]], tigon: list[list[float]], ends: dict | None = None) -> dict:
    """Bands, distances, and whether the patched runs are inside; `ends`: of each provider's runs."""
    found = bands(stock, tigon)
    for name in ("logits", "weights") if ends else ():
        end_losses = ([run[name] for run in ends[provider]] for provider in ("stock", "tigon"))
        found |= bands(*end_losses, apart, f"{name}_")
    learned = all(run[-1] < 0.9 * run[0] for run in tigon)
    within = all(found[key] <= found[key.replace("distance", "band")] for key in found if "distance" in key)
    return found | {"inside": within and learned}


@contextlib.contextmanager
def without_kernels():
    """Tigon's ops compute their formulas in plain PyTorch."""
    places = [m for name, m in sys.modules.items() if name.startswith("tigon.") and hasattr(m, "has_kernel")]
    known = places[0].has_kernel
    for place in places:
        place.has_kernel = lambda *_, **__: False
    try:
        yield
    finally:
        for place in places:
            place.has_kernel = known


def plain_distances(curves: dict) -> dict:
    """How far the formulas alone are from stock, and Tigon from the formulas alone."""
    pairs = {"plain_distance": ("plain", "stock"), "tigon_from_plain": ("tigon", "plain")}
    return {
        name: statistics.median(distance(a, b) for a, b in itertools.product(curves[one], curves[other]))
        for name, (one, other) in pairs.items()
        if curves["plain"]
    }


def from_float32(record: dict, records: list[dict]) -> dict:
    """How far a 16-bit record's runs are from stock in float32, where that was run before."""
    exact = [r for r in records if (r["family"], r["dtype"]) == (record["family"], "float32")]
    if not exact or record["dtype"] == "float32":
        return record
    curve = exact[0]["stock"][0]
    for provider in ("stock", "tigon"):
        far = statistics.median(distance(run, curve) for run in record[provider])
        record[f"{provider}_from_float32"] = far
    return record


def compare(family: str, dtype: str, data, args: argparse.Namespace) -> dict:
    """Stock and patched, each several times."""

    import tigon

    start = time.perf_counter()
    model = build(family, args, dtype)
    curves, ends = ({"stock": [], "tigon": [], "plain": []} for _ in range(2))
    for provider, runs in zip(curves, (args.runs, args.patched_runs, args.plain_runs), strict=True):
        for run in range(runs):
            twin = copy.deepcopy(model)
            if run:
                shuffle_features(twin, run)
            report = tigon.apply(twin) if provider != "stock" else None
            with without_kernels() if provider == "plain" else contextlib.nullcontext():
                curves[provider].append(train(twin, data, args, run or None))
                ends[provider].append(end(twin, data[0], run or None))
            if report:
                report.check()
                count = len(report.replaced), len(report.left)
            gap = abs(curves[provider][run][0] / curves["stock"][0][0] - 1)
            if gap > FIRST[dtype] and provider == "stock":
                raise SystemExit(f"{family} {dtype}: permuted it is another function, loss off by {gap:.1e}")
    return {
        "family": family,
        "dtype": dtype,
        "steps": args.steps,
        "batch": args.batch,
        "seq": args.seq,
        "seed": args.seed,
        **verdict(curves["stock"], curves["tigon"], ends),
        **plain_distances(curves),
        "replaced": count[0],
        "left": count[1],
        "seconds": round(time.perf_counter() - start, 1),
        **store.facts(args.device, "transformers"),
        **{provider: runs for provider, runs in curves.items() if runs},
    }


WHAT = {"loss": "", "logits": "logits_", "weights": "weights_"}
COLUMNS = {  # of the table; the last two are of runs with --plain-runs
    **{f"{what}: {w}": f"{field}{w}" for what, field in WHAT.items() for w in ("distance", "band")},
    "stock from fp32": "stock_from_float32",
    "tigon from fp32": "tigon_from_float32",
    "plain: distance": "plain_distance",
    "tigon from plain": "tigon_from_plain",
}


def table(records: list[dict]) -> str:
    shown = {head: field for head, field in COLUMNS.items() if any(field in r for r in records)}
    rows = []
    for r in records:
        curve = r["tigon"][0]
        cells = [f"{r[field]:.1e}" if field in r else "-" for field in shown.values()]
        names = [r["family"], r["dtype"], f"{curve[0]:.3f}", f"{curve[-1]:.3f}"]
        rows.append([*names, *cells, "yes" if r["inside"] else "**no**"])
    inside = sum(r["inside"] for r in records)
    head = ("family", "dtype", "first loss", "last loss", *shown, "inside")
    return f"{markdown(head, rows)}\n\n{inside} of {len(records)} are inside the band of stock runs."


def draw(records: list[dict], path: Path) -> None:
    """A panel for each family and dtype: how far from the first stock run, step by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    families = list(dict.fromkeys(r["family"] for r in records))
    dtypes = list(dict.fromkeys(r["dtype"] for r in records))
    figure, grid = plt.subplots(
        2 * len(dtypes),
        len(families),
        figsize=(2.1 * len(families), 3.6 * len(dtypes)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
        height_ratios=[1, 1] * len(dtypes),
    )
    for r in records:
        row, column = 2 * dtypes.index(r["dtype"]), families.index(r["family"])
        curves, below = grid[row][column], grid[row + 1][column]
        first = r["stock"][0]
        for provider, colour in (("stock", "#8a8f98"), ("tigon", "#e8710a")):
            label = {"stock": "stock, sums in another order", "tigon": "tigon"}[provider]
            for run in r[provider]:
                curves.plot(run, color=colour, lw=0.8)
                if run is not first:
                    below.plot(_seen(run, first), color=colour, lw=0.7, alpha=0.7, label=label)
                    label = None
        below.set_yscale("log")
        curves.set_title(f"{r['family']}\n{r['dtype']}", fontsize=8)
        for axis in (curves, below):
            axis.tick_params(labelsize=6)
            axis.spines[["top", "right"]].set_visible(False)
    for row in range(len(dtypes)):
        grid[2 * row][0].set_ylabel("loss", fontsize=7)
        grid[2 * row + 1][0].set_ylabel("relative difference", fontsize=7)
    grid[1][0].legend(frameon=False, fontsize=5)
    device, steps = records[0]["gpu"], records[0]["steps"]
    figure.suptitle(f"Loss over {steps} steps and its distance from one stock run, {device}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _seen(run, first):
    return [max(gap, 1e-8) for gap in gaps(run, first)]  # a logarithm has no zero


def read(path: Path) -> list[dict]:
    """Records of a file; of a case that was run twice the last one."""
    order = list(itertools.product(DTYPES, FAMILIES))
    records = store.read(path, store.key_of("convergence"))
    return sorted(records, key=lambda r: order.index((r["dtype"], r["family"])))


def measured(args: argparse.Namespace) -> Iterator[dict]:
    from tqdm import tqdm

    data, records = batches(args), []
    bar = tqdm(list(itertools.product(args.dtypes, args.families)), unit="case", dynamic_ncols=True)
    for dtype, family in bar:
        bar.set_description(f"{family} {dtype}")
        records.append(from_float32(compare(family, dtype, data, args), records))
        yield records[-1]


def main(words: list[str] | None = None) -> int:
    shown: list[dict] = []

    def table_of(records: list[dict]) -> str:
        shown.extend(records)
        return table(records)

    failed = processes.main(words, parse, measured, read, table_of)
    return int(failed or not all(record["inside"] for record in shown))


if __name__ == "__main__":
    sys.exit(main())
