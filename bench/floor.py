"""The floor of a training step of bench/e2e.py: what no step can do without, timed alone on the same card.

    python bench/floor.py --table bench/results/h200/e2e_six.jsonl

Four parts, each the time of its work and nothing else:

* matmuls: forward, gradient of the input and of the weight of every linear layer and of the head, bare, on
  operands that lie ready;
* attention: scaled dot products, forward and backward, as the step calls them;
* optimizer: the bytes of AdamW (parameters and both moments read and written, gradients read, once more with
  clipping) at the rate of a copy;
* the rest: the least bytes that norms, residual additions, rotary embedding, gated units, the loss's row pass
  and the embedding read and write, at the rate of a large copy. Sums of gradients where paths meet, copies of
  layouts and casts are not in it: matmuls could take them along.

Beside them the step that e2e measured (``--table``: its records, those of Tigon) and the fraction of it that
the floor is. The setting is that of e2e; its options are taken too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterator

import e2e
import processes
import timing
import torch
import torch.nn.functional as F
from tables import markdown

PARTS = ("products", "attention", "optimizer", "rest")  # keys of records: products are matmuls


def matmuls_ms(model, tokens: int, dtype: torch.dtype, device: torch.device) -> float:
    """All matmuls of linear layers: each shape's three, as often as the model has it."""
    shapes = Counter(
        (m.in_features, m.out_features) for m in model.modules() if isinstance(m, torch.nn.Linear)
    )
    total = 0.0
    for (inner, outer), times in shapes.items():
        x, weight, dy = (
            torch.randn(shape, dtype=dtype, device=device)
            for shape in ((tokens, inner), (outer, inner), (tokens, outer))
        )
        results = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)

        def call(_, x=x, weight=weight, dy=dy, results=results):
            torch.mm(x, weight.t(), out=results[0])
            torch.mm(dy, weight, out=results[1])
            torch.mm(dy.t(), x, out=results[2])

        total += times * timing.median_ms(call, device)
    return total


def attention_ms(config, case: dict, dtype: torch.dtype, device: torch.device) -> float:
    shape = sizes(config)
    q, k, v, dy = (
        torch.randn(case["batch"], heads, case["seq"], shape["head"], dtype=dtype, device=device)
        for heads in (shape["q"], shape["kv"], shape["kv"], shape["q"])
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def call(_):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape["q"] != shape["kv"])
        torch.autograd.grad(y, leaves, dy)

    return config.num_hidden_layers * timing.median_ms(call, device)


def optimizer_bytes(model, clip: float, itemsize: int) -> int:
    """What a step of AdamW moves, all in the model's dtype."""
    return sum(p.numel() for p in model.parameters()) * itemsize * (8 if clip else 7)


def sizes(config) -> dict[str, int]:
    """Heads of queries, heads of keys, columns of a head."""
    heads = config.num_attention_heads
    return {
        "q": heads,
        "kv": config.num_key_value_heads,
        "head": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def rest_bytes(config, tokens: int, itemsize: int) -> int:
    """The least bytes that everything but matmuls, attention and optimizer moves, forward and backward."""
    hidden, layers, shape = config.hidden_size, config.num_hidden_layers, sizes(config)
    rotated = (shape["q"] + shape["kv"]) * shape["head"]
    layer_elements = (
        2 * (4 + 4) * hidden  # residual and norm: two in, two out; backward the same
        + 2 * 2 * rotated  # in and out, forward and backward
        + (3 + 5) * config.intermediate_size  # gate, up, result; their gradients besides
    )
    head = (4 + 4) * hidden + 2 * config.vocab_size  # the last norm; logits in, their gradient out
    embedding = (2 + 1) * hidden * tokens + config.vocab_size * hidden  # rows; the table's gradient
    return itemsize * (tokens * (layers * layer_elements + head) + embedding)


def floor(case: dict) -> dict:
    """Milliseconds of each part of one step of `case`, and of all."""
    device, dtype = torch.device(case["device"]), getattr(torch, case["dtype"])
    model = e2e.build({**case, "device": "meta"})
    config, tokens = model.config, case["batch"] * case["seq"]
    moved = rest_bytes(config, tokens, dtype.itemsize)
    updated = optimizer_bytes(model, case["clip"], dtype.itemsize)
    bytes_per_ms = 1e6 * timing.copy_gbps(device)
    parts = {
        "products": matmuls_ms(model, tokens, dtype, device),
        "attention": attention_ms(config, case, dtype, device),
        "optimizer": updated / bytes_per_ms,
        "rest": moved / bytes_per_ms,
    }
    bytes_moved = {"rest_bytes": moved, "optimizer_bytes": updated}
    return {**case, "parts_ms": parts, "floor_ms": sum(parts.values()), **bytes_moved}


def table(records: list[dict], steps: dict[tuple, float]) -> str:
    rows = []
    for r in records:
        cells = [f"{r['parts_ms'][part]:.1f}" for part in PARTS]
        step = steps.get(e2e.key(r))
        cells += [f"{r['floor_ms']:.1f}", *([f"{step:.1f}", f"{r['floor_ms'] / step:.0%}"] if step else "--")]
        rows.append([r["model"], *cells])
    return markdown(("model", "matmuls", *PARTS[1:], "floor ms", "Tigon's step ms", "floor of step"), rows)


def measured(args: argparse.Namespace) -> Iterator[dict]:
    for case in e2e.cases(args):
        print(f"{case['model']} ...", flush=True)
        yield {**floor(case), **e2e.versions(case)}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def parse(words: list[str]) -> argparse.Namespace:
    args = e2e.parse(["--out", "out/floor.jsonl", *words])
    args.providers = ["tigon"]
    if others := set(args.models) - set(e2e.DENSE):
        raise SystemExit(
            f"--models: a floor has the parts of {', '.join(e2e.DENSE)}, not of {', '.join(others)}"
        )
    args.steps_file, args.table = args.table, None  # the table of a floor is beside measured steps
    return args


def main(words: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if words is None else words)
    measured_steps = e2e.read(args.steps_file) if args.steps_file else []
    steps = {e2e.key(r): statistics.mean(r["step_ms"]) for r in measured_steps if "step_ms" in r}
    return processes.main(words, parse, measured, e2e.read, lambda records: table(records, steps))


if __name__ == "__main__":
    sys.exit(main())
