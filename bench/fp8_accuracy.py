"""Does a model with fewer bits learn what it learns with more? Curves on real text, several seeds.

    python bench/fp8_accuracy.py                                 linears in float8, one GPU with such matmuls
    python bench/fp8_accuracy.py --parts moments --batch 2       AdamW's moments in 8 and 16 bits
    python bench/fp8_accuracy.py --parts 300m --ways bf16,rowwise --device cpu --steps 3 --layers 2

A Llama of 300 M parameters for 1,000 steps of 4 x 512 tokens, and LLaMA 3.2 1B for 200, from random
weights, on Python's own standard library with a byte-level BPE of 8,192 tokens. Weights are bfloat16;
tigon.optim.AdamW keeps their low halves (rounding="split"). A seed gives the weights and the order of rows.
Every Linear of a layer is in float8, also those which `tigon.apply` would leave since nothing is gained.
The trained weights are evaluated in bfloat16, without float8, on files that were held out. The distance of
two curves is the root mean square of their relative differences, of means over WINDOW steps; that of a run in
float8 is the median to those of bfloat16, whose band is the largest distance between two of them.
Moments: 2,000 steps with betas (0.9, 0.999), beside moments in float32.
Signal to noise is that of a middle layer with the trained weights: output and all gradients, of the input and
the upstream gradient that held-out text gives it, against the layer in float32. Shown is the least.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import convergence
import e2e
import processes
import store
from tables import markdown

sys.path.append(str(e2e.ROOT / "examples"))  # the text

VOCABULARY = 8192
SMALL = {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12, "num_key_value_heads": 4}
FP8 = {  # ways of Linears: options of tigon.apply
    "bf16": {},
    "rowwise": {"fp8": "rowwise"},
    "rowwise_dw_bf16": {"fp8": "rowwise_dw_bf16"},
    "rowwise_qk_bf16": {"fp8": "rowwise", "fp8_except": ["q_proj", "k_proj"]},
}
NAMES = {"rowwise_qk_bf16": "rowwise, q and k in bf16"}  # of ways, in records of noise and in tables
MOMENTS = {  # ways to keep moments: options of tigon.optim.AdamW, dtypes as text
    "moments_float32": {"moment_dtype": "float32"},
    "moments_int8": {"moment_dtype": "int8"},
    "moments_bf16": {"moment_dtype": "bfloat16"},
    "moments_bf16_nearest": {"moment_dtype": "bfloat16", "moment_rounding": "nearest"},
}
# A configuration of bench/e2e.py, its layers, steps, ways with the number of their seeds, of which the first
# gives the band, changes of the configuration.
MODELS = {
    "300m": ("llama3-8b", 12, 1000, dict(zip(FP8, (3, 2, 1), strict=False)), SMALL),
    "1b": ("llama3.2-1b", 16, 200, dict(zip(FP8, (4, 3, 1, 2), strict=True)), {}),
    "moments": ("llama3-8b", 12, 2000, dict(zip(MOMENTS, (3, 2, 1, 1), strict=True)), SMALL),
}
WAYS = (*FP8, *MOMENTS)
HELD_OUT = 24  # batches
WINDOW = 25
key = store.key_of("fp8_accuracy")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = processes.command_line(__doc__, "out/fp8_accuracy.jsonl", 400.0, "layers device")
    add = parser.add_argument
    add("--parts", default="300m,1b", help=f"of {', '.join(MODELS)}")
    add("--ways", default=",".join(WAYS))
    add("--seeds", help="comma-separated (those of each part)")
    add("--steps", type=int, help="of a curve (1000, 200; 2000 of moments)")
    add("--batch", type=int, default=4, help="rows of 512 tokens in a step")
    args = parser.parse_args(arguments)
    processes.split(args, parts=MODELS, ways=WAYS)
    return args


def cases(args: argparse.Namespace) -> list[dict]:
    found = []
    for part in args.parts:
        name, layers, steps, ways, changes = MODELS[part]
        for way, count in ways.items():
            if way not in args.ways:
                continue
            seeds = [int(seed) for seed in args.seeds.split(",")] if args.seeds else range(count)
            shared = {"changes": {"vocab_size": VOCABULARY} | changes, "dtype": "bfloat16"}
            shared |= {"layers": min(layers, args.layers or layers), "batch": args.batch, "seq": 512}
            shared |= {"device": args.device, "steps": args.steps or steps, "checkpointing": False}
            found += [{"accuracy": part, "model": name, "way": way, "seed": seed, **shared} for seed in seeds]
    return found


# --- one case, in its own process -------------------------------------------------------------


def apply(case: dict, model) -> None:
    """Tigon, with every Linear of a layer in float8 where the way says so."""
    import tigon
    from tigon.integrations.transformers import fp8

    fp8.gains = lambda rows, columns: True
    options = FP8.get(case["way"], {})
    report = tigon.apply(model, **options)
    wanted = (7 - len(options.get("fp8_except", ()))) * case["layers"] if options else 0
    if (found := report.count("fp8")) != wanted:
        raise RuntimeError(f"{found} Linears are in float8, not {wanted}")


def tokens() -> tuple:
    """The file of those to train on, and rows of those that are held out: every 20th file of the text."""
    import numpy as np
    import torch
    import train_data

    files = [str(file) for file in train_data.standard_library()]
    cache, held = e2e.ROOT / "out/cache", files[::20]
    kept = train_data.prepare([file for i, file in enumerate(files) if i % 20], cache, VOCABULARY)
    held = train_data.prepare(held, cache, VOCABULARY, Path(kept["tokenizer_file"]))
    rows = torch.from_numpy(np.load(held["tokens_file"])).long()
    return kept["tokens_file"], rows[: len(rows) // 512 * 512].view(-1, 512)


def optimizer_of(case: dict, model):
    import torch

    import tigon

    options = {"betas": (0.9, 0.95)}
    if case["way"] in MOMENTS:
        options = {"betas": (0.9, 0.999)} | MOMENTS[case["way"]]
        dtype = options["moment_dtype"]
        options["moment_dtype"] = dtype if dtype == "int8" else getattr(torch, dtype)
    return tigon.optim.AdamW(model.parameters(), lr=6e-4, rounding="split", max_grad_norm=1.0, **options)


def train(case: dict, model, file: str) -> Iterator:
    """The loss of each step, on the device."""
    import torch
    import train_data

    optimizer, steps, warm = optimizer_of(case, model), case["steps"], max(1, case["steps"] // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1.0, (n + 1) / warm) * (0.1 + 0.45 * (1 + math.cos(math.pi * n / steps)))
    )
    for rows in train_data.batches(file, case["batch"], case["seq"], steps, case["seed"]):
        ids = torch.from_numpy(rows).to(case["device"])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss.detach()


def curve(case: dict) -> dict:
    import torch

    import tigon

    file, held = tokens()
    model = e2e.build(case)
    apply(case, model)
    losses = torch.stack(list(train(case, model, file))).tolist()
    tigon.undo(model)
    tigon.apply(model)
    with torch.no_grad():
        batches = held[: 4 * HELD_OUT].to(case["device"]).split(4)
        found = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in batches]
    last = losses[-max(1, case["steps"] // 20) :]
    made = {"losses": losses, "last": sum(last) / len(last), "held_out": torch.stack(found).mean().item()}
    tigon.undo(model)
    if case["way"] in FP8:
        made["noise"] = noise(model, held[:4].to(case["device"]))
    return {**made, "parameters": sum(p.numel() for p in model.parameters())}


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
    for way, options in FP8.items():
        holder = torch.nn.Module()
        holder.layers = torch.nn.ModuleList([copy.deepcopy(layer)])
        tigon.apply(holder.train(), **options)
        got = run(holder.layers[0], layer.mlp.up_proj.weight.dtype)
        ratios[name_of(way)] = {
            name: round(
                10 * math.log10(want.double().square().sum() / (got[name].double() - want).square().sum()), 2
            )
            for name, want in exact.items()
        }
    return ratios


def run_case(case: dict) -> dict:
    return {**curve(case), **e2e.versions(case)}


def prepare(case: dict) -> None:
    import tigon  # noqa: F401

    e2e.build({**case, "device": "meta"})
    tokens()


# --- all cases --------------------------------------------------------------------------------


def name_of(way: str) -> str:
    return NAMES.get(way, way)


def smooth(losses: list[float]) -> list[float]:
    """Means over WINDOW steps each."""
    return [statistics.mean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def least(ratios: dict[str, float]) -> str:
    name = min(ratios, key=ratios.get)
    return f"{ratios[name]:.1f} ({name.removesuffix('.weight').rpartition('.')[2]})"


def compared(record: dict, plain: list[dict]) -> list[str]:
    """How far a run of fewer bits is from those of more, and whether it is inside their band."""
    if record in plain or len(plain) < 2:
        return ["", "", ""]
    found = convergence.bands([smooth(r["losses"]) for r in plain], [smooth(record["losses"])])
    held = [r["held_out"] for r in plain]
    inside = found["distance"] <= found["band"] and record["held_out"] <= max(held)
    return [f"{found['distance']:.1e}", f"{found['band']:.1e}", "yes" if inside else "**no**"]


HEAD = ("way", "seed", "first", "1/4", "1/2", "3/4", "last", "held out, in bf16")
HEAD += ("distance", "band", "inside")  # and the least signal to noise, of linears in float8


def table(records: list[dict]) -> str:
    parts, done = [], [r for r in records if "error" not in r]
    for part in MODELS:
        runs = [r for r in done if r["accuracy"] == part]
        if not runs:
            continue
        runs.sort(key=lambda r: (WAYS.index(r["way"]), r["seed"]))
        widest, rows, first = next(iter(MODELS[part][3])), [], runs[0]
        plain = [r for r in runs if r["way"] == widest]
        for r in runs:
            curve = smooth(r["losses"])
            cells = [name_of(r["way"]), str(r["seed"])]
            cells += [f"{curve[round(i * (len(curve) - 1) / 4)]:.3f}" for i in range(5)]
            cells += [f"{r['held_out']:.4f}", *compared(r, plain)]
            rows.append(cells + [least(noise[name_of(r["way"])]) for noise in (r.get("noise"),) if noise])
        size = f"{first['parameters'] / 1e6:.0f} M parameters, {first['steps']} steps of {first['batch']}"
        parts += [
            f"{size} x {first['seq']} tokens, {first['gpu']}. Losses are means of {WINDOW} steps.",
            markdown((*HEAD, "least signal to noise")[: len(rows[0])], rows),
        ]
        if "noise" not in first:
            continue
        parts += [
            "The least signal to noise of a middle layer, in decibels, by the run that trained its weights:",
            markdown(
                ("the layer in", *(f"{name_of(r['way'])}, seed {r['seed']}" for r in runs)),
                [[way, *(least(r["noise"][way]) for r in runs)] for way in map(name_of, FP8)],
            ),
        ]
    return "\n\n".join(parts)


def _line(r: dict) -> str:
    return f"{r['accuracy']} {r['way']} {r['seed']}: " + (r.get("error") or f"held out {r['held_out']:.4f}")


def main(arguments: list[str] | None = None) -> int:
    return processes.main_of_cases(
        __file__, arguments, parse, cases, key, prepare, run_case, table, None, _line
    )


if __name__ == "__main__":
    sys.exit(main())
