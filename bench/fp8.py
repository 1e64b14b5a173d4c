"""Linears in float8: a layer beside its bare matmuls, microbatches; the tables of docs/fp8.md.

    python bench/fp8.py                                both, one GPU with such matmuls
    python bench/fp8.py --fp8 layer                    norms, Linears and the gated unit of one layer
    python bench/fp8.py --fp8 microbatches             four of them beside four times one

Layer: LLaMA 3 8B's, 16 x 512 tokens, forward and backward under `tigon.apply`, with everything but RoPE and
attention, whose result is q and whose gradients cost nothing. `bf16` and `fp8` are that layer; `bf16 matmuls`
are its 21 matmuls alone, `fp8 matmuls` those of Tigon's op with all bytes and scales given, `scaled_mm` those
of torch._scaled_mm with scales of rows, sums fast in y and promoted in dx and dW. All take turns in ROUNDS
rounds, so that they see the card in the same state. Gradients are taken away after each call, so that every
call quantises the weights as the step after an optimizer's does.
Microbatches: forward and backward of 8 layers with the loss head, without an optimizer.
Times are device times of calls in a row. Whole steps are bench/e2e.py's.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
from collections.abc import Iterator

import e2e
import processes
import store
from readme import DATA
from store import ROOT
from tables import markdown, ms

PAGE, FILE = ROOT / "docs/fp8.md", DATA / "fp8.jsonl"
STEPS, PEERS = DATA / "e2e_fp8.jsonl", DATA / "e2e_fp8_peers.jsonl"
TITLES = {"llama3-8b": "LLaMA 3 8B", "llama3.2-1b": "LLaMA 3.2 1B"}
PARTS = ("layer", "microbatches")
ROUNDS = 5
LEAST_DECIBELS = 15  # of a layer's output and gradients, beside those in bfloat16
key = store.key_of("fp8")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = processes.command_line(__doc__, "out/fp8.jsonl", options="set device", batch=16, seq=512)
    add = parser.add_argument
    add("--fp8", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    add("--layers", type=int, default=8, help="of microbatches")
    args = parser.parse_args(arguments)
    processes.split(args, fp8=PARTS)
    return args


def measured(args: argparse.Namespace) -> Iterator[dict]:
    for part, records in (("layer", bench_layer), ("microbatches", bench_microbatches)):
        if part in args.fp8:
            case = {"fp8": part, "model": "llama3-8b", "changes": e2e.pairs(args.set, json.loads)}
            case |= {"batch": args.batch, "seq": args.seq, "dtype": "bfloat16", "device": args.device}
            case |= {"layers": 1 if part == "layer" else args.layers}
            found = {} if args.device == "cpu" else {"copy_gbps": copy_gbps(args.device)}
            yield from (case | r | found | store.facts(args.device, "transformers") for r in records(case))


def copy_gbps(device: str) -> float:
    import timing
    import torch

    return timing.copy_gbps(torch.device(device))


# --- one layer --------------------------------------------------------------------------------


def projections_alone(attention):
    """The Linears of an attention alone: o_proj reads q, and k and v are their own gradients."""
    import torch

    class Core(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(k, v)
            return q.view_as(q)

        @staticmethod
        def backward(ctx, dy):
            return dy, *ctx.saved_tensors

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                self.add_module(name, getattr(attention, name))

        def forward(self, hidden_states, **_):
            q, k, v = (part(hidden_states) for part in (self.q_proj, self.k_proj, self.v_proj))
            return self.o_proj(Core.apply(q, k, v)), None

    return Attention()


def make_layer(case: dict, fp8: str | None):
    """A layer of the model in training, and the number of its Linears in float8."""
    import torch

    import tigon

    made = e2e.build({**case, "checkpointing": False}).model.layers[0]
    made.self_attn = projections_alone(made.self_attn)
    holder = torch.nn.Module()
    holder.layers = torch.nn.ModuleList([made])
    report = tigon.apply(holder.train(), fp8=fp8)
    return made, report.count("fp8") if fp8 else 0


def step_of(layer, x, dy):
    """Forward and backward; gradients go."""

    def call(_):
        layer(x).backward(dy)
        for tensor in (x, *layer.parameters()):
            tensor.grad = None

    return call


def matmuls_bf16(linears: list[tuple]):
    import torch.nn.functional as F

    def call(_):
        for x, weight, _dy in linears:
            F.linear(x, weight)
        for x, weight, dy in reversed(linears):
            dy @ weight
            dy.t() @ x

    return call


def matmuls_fp8(linears: list[tuple], library: bool):
    """The same of bytes that are given, by Tigon's op or by torch._scaled_mm.

    dW is a matmul of the same kind as dx, which the op computes of bytes alone: rows are outputs, sums are
    over tokens.
    """
    import torch

    from tigon._dtensor import KERNEL_DTYPES
    from tigon.ops import fp8_linear as op

    of_y, of_gradients = [], []
    for x, weight, dy in linears:
        (xq, xs), (wq, ws) = op.quantize_rows(x), op.quantize_rows(weight)
        dyq, dys = op._quantize(dy, ws)
        dyt, dyc = op._transpose(dyq, xs, dys, ws)
        of_y.append((xq, xs, wq, ws))
        of_gradients.append(((dyq, dys, op.transpose(wq)), (dyt, dyc, op.transpose(xq))))
    gradients = [given for pair in reversed(of_gradients) for given in pair]
    ones = torch.ones(max(max(a.shape[1], b.shape[0]) for a, _, b in gradients), device=x.device)
    upstream = {a.shape: torch.empty(a.shape, dtype=x.dtype, device=x.device) for a, *_ in gradients}
    code = KERNEL_DTYPES.index(x.dtype)

    def ours(_):
        for given in of_y:
            op._fwd(*given, code, None)
        for a, scales, b in gradients:
            dy = upstream[a.shape]  # of which only the shape is read
            op._bwd(dy, None, None, None, b, ones[: a.shape[1]], a, scales, True, False, code)

    def theirs(_):
        for xq, xs, wq, ws in of_y:
            scaled(xq, xs, wq, ws, True)
        for a, scales, b in gradients:
            scaled(a, scales, b, ones[: b.shape[0]], False)

    def scaled(a, a_scales, b, b_scales, fast):
        scales = a_scales[:, None], b_scales[None]
        return torch._scaled_mm(a, b.t(), *scales, out_dtype=x.dtype, use_fast_accum=fast)

    return theirs if library else ours


def decibels(layer, other, x, dy) -> float:
    """The least signal to noise of output and gradients of a layer, beside those of the other."""
    import torch

    def run(of):
        y = of(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *of.parameters()], dy)]

    ratios = [
        10 * math.log10(want.double().square().sum() / (got.double() - want.double()).square().sum())
        for got, want in zip(run(layer), run(other), strict=True)
    ]
    return min(ratios)


def bench_layer(case: dict) -> Iterator[dict]:
    import timing
    import torch

    device = torch.device(case["device"])
    plain, _ = make_layer(case, None)
    quick, count = make_layer(case, "rowwise")
    if count != 7:
        raise RuntimeError(f"{count} Linears are in float8, not 7")
    like = {"device": device, "dtype": torch.bfloat16}
    shape, width = (case["batch"], case["seq"]), plain.self_attn.q_proj.in_features
    x = torch.randn(*shape, width, **like).requires_grad_()
    dy = torch.randn(*shape, width, **like)
    if (found := decibels(quick, plain, x, dy)) < LEAST_DECIBELS:
        raise RuntimeError(f"the layer in float8 has {found:.1f} dB")
    linears, given = [], None
    for name, linear in plain.named_modules():
        if isinstance(linear, torch.nn.Linear):
            outputs, inputs = linear.weight.shape
            if not name.endswith(("k_proj", "v_proj", "up_proj")):  # which read what the one before reads
                given = torch.randn(x.shape[:-1].numel(), inputs, **like)
            dys = torch.randn(len(given), outputs, **like)
            linears.append((given, linear.weight.detach(), dys))
    calls = {
        "fp8 matmuls": matmuls_fp8(linears, False),
        "scaled_mm": matmuls_fp8(linears, True),
        "fp8": step_of(quick, x, dy),
        "bf16 matmuls": matmuls_bf16(linears),
        "bf16": step_of(plain, x, dy),
    }
    if device.type == "cpu":
        del calls["scaled_mm"]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            with torch.set_grad_enabled(name in ("fp8", "bf16")):
                times[name].append(timing.median_ms(call, device))
    for name, rounds in times.items():
        yield {"way": name, "ms": statistics.median(rounds), "rounds_ms": rounds, "decibels": found}


# --- microbatches -----------------------------------------------------------------------------


def bench_microbatches(case: dict) -> Iterator[dict]:
    import timing
    import torch

    import tigon

    device = torch.device(case["device"])
    for way in ("bf16", "rowwise"):
        model = e2e.build({**case, "checkpointing": False})
        tigon.apply(model, fp8=None if way == "bf16" else way)
        vocabulary = model.config.vocab_size
        ids = torch.randint(vocabulary, (4, case["batch"], case["seq"]), device=device)

        def call(count: int, model=model, ids=ids):
            def microbatches(_):
                for part in ids[:count]:
                    model(input_ids=part, labels=part).loss.backward()
                model.zero_grad()

            return microbatches

        calls = {count: call(count) for count in (1, 4)}
        times = {count: timing.median_ms(step, device) for count, step in calls.items()}
        for count, found in times.items():
            yield {"way": way, "microbatches": count, "ms": found}
        del model, call, calls
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


# --- tables -----------------------------------------------------------------------------------


def _row(record: dict, bf16: dict | None) -> list[str]:
    what = [TITLES[record["model"]], record["layers"] and f"{record['layers']} layers"]
    what += [record["lora"] and f"LoRA of rank {record['lora']}", f"{record['batch']} x {record['seq']}"]
    options = record["apply"]
    way = (
        f"`{options['fp8']}`"
        + ", `fp8_base_only`" * options.get("fp8_base_only", False)
        + ", `graphs`" * bool(options.get("graphs"))
        if options
        else "bf16"
    )
    if record["provider"] == "torchao":
        way = f"{f'torchao {way}' if options else way}, layers compiled"
    median = statistics.median(record["step_ms"])
    speed = f"{statistics.median(bf16['step_ms']) / median:.2f}" if record is not bf16 and bf16 else ""
    cells = [f"{median:.1f} ({min(record['step_ms']):.1f})", f"{record['peak_gb']:.2f} GB", speed]
    return [", ".join(filter(None, what)), way, *cells]


def table() -> str:
    """Each model in bfloat16 and in float8; torchao's recipes; one layer and microbatches."""
    with_peers = steps(e2e.read(PEERS))
    if with_peers:
        with_peers = "With torchao's recipes, in one run:\n\n" + with_peers
    return "\n\n".join(filter(None, (steps(e2e.read(STEPS)), with_peers, parts(store.read(FILE, key)))))


def steps(records: list[dict]) -> str:
    """Whole steps: of each model first bfloat16, then float8, then those of others."""
    records, rows = [r for r in records if "error" not in r], []
    for case in {(r["model"], r["lora"], r["layers"], r["batch"], r["seq"]): None for r in records}:
        of = [r for r in records if (r["model"], r["lora"], r["layers"], r["batch"], r["seq"]) == case]
        bf16 = next((r for r in of if not r["apply"] and r["provider"] == "tigon"), None)
        of.sort(key=lambda r: (r["provider"] != "tigon", bool(r["apply"]), str(r["apply"])))
        rows += [_row(r, bf16) for r in of]
    return markdown(("model", "Linears", "ms", "peak", "times as fast"), rows) if rows else ""


def parts(records: list[dict]) -> str:
    """One layer and microbatches."""
    blocks = []
    layer = {r["way"]: r for r in records if r["fp8"] == "layer"}
    if layer:
        r = next(iter(layer.values()))
        bare = {name: layer[name]["ms"] for name in ("fp8 matmuls", "scaled_mm") if name in layer}
        least = {"fp8": min(bare.values(), default=math.nan), "bf16": layer["bf16 matmuls"]["ms"]}
        rows = [
            (name, ms(layer[name]["ms"]), ms(floor), f"{layer[name]['ms'] / floor:.3f}")
            for name, floor in least.items()
        ]
        names = {"fp8 matmuls": "Tigon's", "scaled_mm": "`torch._scaled_mm`'s"}
        found = " and ".join(f"{names[name]} {ms(value)}" for name, value in bare.items())
        blocks += [
            f"One layer without RoPE and attention, forward and backward, {r['batch']} x {r['seq']} tokens, "
            f"in milliseconds of the device. Bare are its 21\nmatmuls, in float8 the faster of {found}:",
            markdown(("Linears", "layer", "bare matmuls", "layer / bare"), rows),
        ]
    several = [r for r in records if r["fp8"] == "microbatches"]
    if several:
        r, rows = several[0], []
        for way in dict.fromkeys(r["way"] for r in several):
            one, four = (
                next(r["ms"] for r in several if r["way"] == way and r["microbatches"] == count)
                for count in (1, 4)
            )
            rows.append((way, ms(one), ms(four), f"{four / (4 * one):.3f}"))
        blocks += [
            f"Microbatches of {r['batch']} x {r['seq']} that accumulate gradients, {r['layers']} layers, "
            "forward and backward:",
            markdown(("Linears", "one", "four", "four / 4 times one"), rows),
        ]
    return "\n\n".join(blocks)


def main(words: list[str] | None = None) -> int:
    return processes.main(words, parse, measured, lambda path: store.read(path, key), parts)


if __name__ == "__main__":
    sys.exit(main())
