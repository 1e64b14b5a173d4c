"""Does a model trained in float8 learn what it learns in bf16? Loss curves, held-out text, signal to noise.

    python bench/fp8_accuracy.py                                    every case, one after the other, one GPU
    python bench/fp8_accuracy.py --cases 300m:rowwise:0 --batch 8   one run; cases may run side by side
    python bench/fp8_accuracy.py --table out/fp8_accuracy.jsonl     the table of an earlier run

A case is a model, a recipe and the seed of the weights. Every Linear of the layers is in float8, also those
that `apply` leaves because they gain nothing. Weights are bfloat16, with float32 ones in Tigon's AdamW;
the text is Python's standard library in tokens of a BPE trained on it, in the same order for all runs.
The distance of two curves is the root mean square of their relative differences, of means over WINDOW steps.
The band is the largest distance of two runs in bf16; a run in float8 is inside if its median distance from
those is, and if its held-out loss is at most the largest of theirs and their spread. Held-out text, every
EVERY-th row, is read by the trained weights in bf16.
Signal to noise, in decibels: a middle layer of the trained model, its input and upstream gradient on held-out
text, output and all gradients against the layer in float32. Shown is the least and which it is.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from unittest import mock

import convergence
import e2e
import processes
import store
from tables import markdown

sys.path.append(str(store.ROOT / "examples"))  # train_data

VOCABULARY = 8192
_300M = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}
MODELS = {  # the configuration it changes, the changes, steps, learning rate, seeds of bf16, recipes
    "300m": ("llama3-8b", _300M, 1000, 6e-4, (0, 1, 2), ("rowwise", "rowwise_dw_bf16")),
    "1b": ("llama3.2-1b", {}, 200, 3e-4, (0, 1), ("rowwise",)),
}
CASES = {
    f"{model}:{recipe}:{seed}": (model, recipe, seed)
    for model, (*_, seeds, recipes) in MODELS.items()
    for recipe, seed in [*(("bf16", seed) for seed in seeds), *((recipe, 0) for recipe in recipes)]
}
LAYERS = {  # ways to compute the layer whose signal to noise is taken
    "bf16": {},
    "rowwise": {"fp8": "rowwise"},
    "rowwise_dw_bf16": {"fp8": "rowwise_dw_bf16"},
    "rowwise, q and k in bf16": {"fp8": "rowwise", "fp8_except": ["q_proj", "k_proj"]},
}
WINDOW, EVERY = 25, 40
SETTING = ("model", "changes", "steps", "batch", "seq", "gpu")
key = store.key_of("fp8_accuracy")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = processes.command_line(__doc__, "out/fp8_accuracy.jsonl")
    add = parser.add_argument
    add("--cases", default=",".join(CASES))
    add("--steps", type=int, default=0, help="of every run; 0: 1,000 of 300m and 200 of 1b")
    add("--batch", type=int, default=8)
    add("--seq", type=int, default=512)
    add("--set", default="", metavar="K=V,...", help="other changes of every configuration")
    add("--held", type=int, default=128, help="rows of held-out text")
    add("--data", nargs="+", metavar="FILE", help="other text")
    add("--device", default="cuda")
    args = parser.parse_args(arguments)
    processes.split(args, cases=CASES)
    return args


def text(args: argparse.Namespace):
    """Rows to train on and rows that are held out, [rows, seq] each."""
    import numpy as np
    import torch
    import train_data

    found = train_data.prepare(args.data, args.out.parent / "text", VOCABULARY)
    tokens = torch.from_numpy(np.load(found["tokens_file"])).long()
    rows = tokens[: len(tokens) // args.seq * args.seq].view(-1, args.seq)
    held = torch.arange(len(rows)) % EVERY == 0
    return rows[~held], rows[held][: args.held]


def rate(step: int, steps: int, most: float) -> float:
    """Rises for a tenth of the steps, then falls to a tenth as half a cosine."""
    warm = max(1, steps // 10)
    if step < warm:
        return most * (step + 1) / warm
    return most * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(model, rows, case: dict, most: float) -> list[float]:
    """The loss of every step. All runs read the same rows in the same order."""
    import torch

    import tigon

    optimizer = tigon.optim.AdamW(
        model.parameters(), lr=most, betas=(0.9, 0.95), weight_decay=0.1, rounding="master", max_grad_norm=1.0
    )
    count = case["steps"] * case["batch"]
    generator = torch.Generator().manual_seed(1)
    epochs = [torch.randperm(len(rows), generator=generator) for _ in range(-(-count // len(rows)))]
    batches = rows[torch.cat(epochs)[:count]].view(case["steps"], case["batch"], -1).to(case["device"])
    losses = torch.empty(case["steps"], device=case["device"])
    for step, ids in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, case["steps"], most)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
    return [float(f"{loss:.6g}") for loss in losses.tolist()]


def held_out(model, rows) -> float:
    """The mean loss of these rows in the model's own dtype."""
    import torch

    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in rows.split(8)]
    return statistics.mean(losses)


def noise(model, ids) -> dict[str, dict[str, float]]:
    """Signal to noise of a middle layer's output and gradients, by the way it is computed."""
    import torch

    import tigon

    layers = model.model.layers
    layer, seen = layers[len(layers) // 2], {}
    hooks = (
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(args=args, kwargs=kwargs), with_kwargs=True
        ),
        layer.register_full_backward_hook(lambda _, __, upstream: seen.update(upstream=upstream[0])),
    )
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    for hook in hooks:
        hook.remove()

    def run(layer, dtype) -> dict:
        def cast(given):
            if isinstance(given, tuple):
                return tuple(map(cast, given))
            return given.detach().to(dtype) if torch.is_tensor(given) and given.is_floating_point() else given

        x = cast(seen["args"][0] if seen["args"] else seen["kwargs"]["hidden_states"]).requires_grad_()
        kwargs = {name: cast(value) for name, value in seen["kwargs"].items() if name != "hidden_states"}
        y = layer(x, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        named = {"x": x, **dict(layer.named_parameters())}
        found = torch.autograd.grad(y, list(named.values()), cast(seen["upstream"]))
        return {"output": y.detach(), **dict(zip(named, found, strict=True))}

    exact = run(copy.deepcopy(layer).float(), torch.float32)
    ratios = {}
    for way, options in LAYERS.items():
        holder = torch.nn.Module()
        holder.layers = torch.nn.ModuleList([copy.deepcopy(layer)])
        tigon.apply(holder.train(), **options)
        got = run(holder.layers[0], layer.mlp.up_proj.weight.dtype)
        ratios[way] = {
            name: round(
                10 * math.log10(want.double().square().sum() / (got[name].double() - want).square().sum()), 2
            )
            for name, want in exact.items()
        }
    return ratios


def run_case(name: str, rows, held, args: argparse.Namespace) -> dict:
    import tigon
    from tigon.integrations.transformers import fp8

    model_name, recipe, seed = CASES[name]
    known, changes, steps, most, *_ = MODELS[model_name]
    changes = changes | e2e.pairs(args.set, json.loads)
    run = {"model": known, "changes": changes, "layers": None, "recipe": recipe, "seed": seed}
    run |= {"steps": args.steps or steps, "batch": args.batch, "seq": args.seq, "device": args.device}
    case = run | {"dtype": "bfloat16", "checkpointing": False}
    start = time.perf_counter()
    model = e2e.build(case)
    with mock.patch.object(fp8, "gains", lambda rows, columns: True):
        report = tigon.apply(model, **({} if recipe == "bf16" else {"fp8": recipe}))
        losses = train(model, rows, case, most)
        tigon.undo(model)
        ratios = noise(model, held[:4])
    return {
        **case,
        "parameters": sum(p.numel() for p in model.parameters()),
        "linears": report.count("fp8") if recipe != "bf16" else 0,
        "held_out": held_out(model, held),
        "noise": ratios,
        "seconds": round(time.perf_counter() - start, 1),
        **store.facts(args.device, "transformers"),
        "losses": losses,
    }


# --- what the records say ---------------------------------------------------------------------


def smooth(losses: list[float]) -> list[float]:
    """Means over WINDOW steps each."""
    return [statistics.mean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def settings(records: list[dict]) -> dict[str, list[dict]]:
    """Records by what their runs agree in, bf16 first."""
    found: dict[str, list[dict]] = {}
    for record in sorted(records, key=lambda r: (r["recipe"] != "bf16", r["recipe"], r["seed"])):
        found.setdefault(store.fields(*SETTING)(record), []).append(record)
    return found


def verdict(record: dict, plain: list[dict]) -> dict:
    """Distance and held-out loss of a run in float8, and what those of the runs in bf16 allow."""
    curves = [smooth(r["losses"]) for r in plain]
    found = convergence.bands(curves, [smooth(record["losses"])])
    held = [r["held_out"] for r in plain]
    found["held_out_limit"] = max(held) + (max(held) - min(held))
    inside = found["distance"] <= found["band"] and record["held_out"] <= found["held_out_limit"]
    return found | {"inside": inside}


def least(ratios: dict[str, float]) -> str:
    name = min(ratios, key=ratios.get)
    return f"{ratios[name]:.1f} ({name.removesuffix('.weight').rpartition('.')[2]})"


HEAD = ("recipe", "seed", "first", "1/4", "1/2", "3/4", "last", "held out")
HEAD += ("distance", "band", "inside", "least signal to noise")


def line(record: dict, plain: list[dict]) -> list[str]:
    curve = smooth(record["losses"])
    cells = [record["recipe"], str(record["seed"])]
    cells += [f"{curve[round(i * (len(curve) - 1) / 4)]:.3f}" for i in range(5)]
    cells.append(f"{record['held_out']:.4f}")
    if record["recipe"] == "bf16" or len(plain) < 2:
        cells += ["", "", ""]
    else:
        found = verdict(record, plain)
        cells += [f"{found['distance']:.1e}", f"{found['band']:.1e}", "yes" if found["inside"] else "**no**"]
    return [*cells, least(record["noise"][record["recipe"]])]


def table(records: list[dict]) -> str:
    parts = []
    for runs in settings(records).values():
        plain, first = [r for r in runs if r["recipe"] == "bf16"], runs[0]
        size = f"{first['parameters'] / 1e6:.0f} M parameters, {first['steps']} steps of {first['batch']}"
        parts += [
            f"{size} x {first['seq']} tokens, {first['gpu']}. Losses: means of {WINDOW} steps.",
            markdown(HEAD, [line(r, plain) for r in runs]),
            "The least signal to noise of a middle layer, in decibels, by the run that trained its weights:",
            markdown(
                ("the layer in", *(f"{r['recipe']}, seed {r['seed']}" for r in runs)),
                [[way, *(least(r["noise"][way]) for r in runs)] for way in LAYERS],
            ),
        ]
    return "\n\n".join(parts)


def measured(args: argparse.Namespace) -> Iterator[dict]:
    rows, held = text(args)
    held = held.to(args.device)
    for name in args.cases:
        yield run_case(name, rows, held, args)


def main(words: list[str] | None = None) -> int:
    return processes.main(words, parse, measured, lambda path: store.read(path, key), table)


if __name__ == "__main__":
    sys.exit(main())
