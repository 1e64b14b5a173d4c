"""The optimizer's step beside PyTorch's and a copy of as many bytes.

    python bench/optimizer.py
    OMP_NUM_THREADS=2 python bench/optimizer.py --device cpu
    OMP_NUM_THREADS=1 python bench/optimizer.py --device cpu --host
    python bench/optimizer.py --muon

On a GPU: LLaMA 3 8B's parameters, as many of its layers as fit the memory with the widest state; on the CPU
25 million parameters. Then 2,000 tensors of 4 to 100,000 elements and 2,000 of 4, whose time on the CPU is
the host's; --host measures these alone. --muon times Muon's step on the matrices of LLaMA 3 8B's first layers
beside torch.optim.Muon's, and prints that only. Every configuration is timed in turn with PyTorch's fused and
foreach AdamW where they have it, those of 8-bit moments with bitsandbytes' and torchao's where they are
installed, and with a copy of the bytes that it must move (14 an element in bfloat16 with bfloat16 moments).
Prints a table and writes JSON lines: milliseconds, the share of the copy's rate, microseconds of the host
(native: of the native call alone), and the largest difference from PyTorch's fused result.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "python")]  # the cases; tigon, unless it is installed

import processes
import store
import timing

import tigon
from cases.adamw import llama, llama_8b, many_small

BF16, F32 = torch.bfloat16, torch.float32
# Name: parameters' dtype, options, bytes an element moved and held, and whether PyTorch has the same.
KINDS: dict[str, tuple[torch.dtype, dict, float, float, bool]] = {
    "bf16": (BF16, {}, 14, 8, True),
    "bf16_nearest_moments": (BF16, {"moment_rounding": "nearest"}, 14, 8, False),
    "bf16_wide_moments": (BF16, {"moment_dtype": F32}, 22, 12, False),
    "split": (BF16, {"rounding": "split"}, 18, 10, False),
    "fp32": (F32, {}, 28, 16, True),
    "stochastic": (BF16, {"rounding": "stochastic"}, 14, 8, False),
    "clipped": (BF16, {"max_grad_norm": 1.0}, 16, 8, True),
    "int8": (BF16, {"moment_dtype": "int8"}, 10 + 16 / 256, 6 + 8 / 256, False),
    "int8_stochastic": (BF16, {"moment_dtype": "int8", "rounding": "stochastic"}, 10 + 16 / 256, 7, False),
    "int8_split": (BF16, {"moment_dtype": "int8", "rounding": "split"}, 14 + 16 / 256, 9, False),
}
APART = 8 * 2**30  # bytes for temporaries: a copy's buffers, a random tensor


def shapes_that_fit(kind: str, device: torch.device) -> tuple[str, tuple]:
    """LLaMA 3 8B, or as many layers as leave room for everything beside it."""
    if device.type == "cpu":
        return "25M", llama(512, 1536, 128, 6, 4096)
    free = torch.cuda.mem_get_info(device)[0] * 0.95 - APART
    for layers in (32, 28, 24, 16, 12, 8, 4, 2):
        shapes = llama_8b(layers)
        if sum(map(_numel, shapes)) * KINDS[kind][3] <= free:
            break
    return f"llama_8b_{layers}_layers", shapes


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def parameters(shapes, dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    made = []
    for i, shape in enumerate(shapes):
        draw = torch.Generator(device).manual_seed(i)
        p = torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype, generator=draw) * 0.02)
        p.grad = torch.randn(shape, device=device, dtype=dtype, generator=draw) * 1e-3
        made.append(p)
    return made


def milliseconds(call: Callable, device: torch.device) -> float:
    """Median device time of one call; wall time on the CPU."""
    if device.type == "cpu":
        return timing.median_ms(lambda _: call(), device)
    for _ in range(3):
        call()
    times = []
    for _ in range(9):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(20_000_000)  # the host queues meanwhile
        marks[0].record()
        call()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
    return sorted(times)[len(times) // 2]


def host_us(call: Callable, device: torch.device) -> float:
    """Least microseconds until a call returns."""
    times = []
    for _ in range(12):
        timing.synchronize(device)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    timing.synchronize(device)
    return 1e6 * min(times)


def native_us(optimizer, device: torch.device) -> float:
    """Microseconds of the native call alone: its list is there."""
    from tigon.ops.adamw import adamw_

    tensors = optimizer._listed(optimizer._with_gradients(), device, None)
    with torch.no_grad():
        roundings = {"rounding": optimizer.rounding, "moment_rounding": optimizer.moment_rounding}
        return host_us(lambda: adamw_(tensors, **roundings), device)


def clip_alone(params, device: torch.device) -> dict[str, float]:
    """The clipping that writes gradients, ours and PyTorch's: host time, time with a factor and with none."""
    clips = {"tigon": tigon.clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}
    record = {}
    for who, clip in clips.items():
        record[f"{who}_clip_host_us"] = host_us(lambda clip=clip: clip(params, 1e-3), device)
        # From the first call on the norm is max_norm, and the factor a little less than 1.
        record[f"{who}_clip_ms"] = milliseconds(lambda clip=clip: clip(params, 1e-3), device)
        record[f"{who}_no_clip_ms"] = milliseconds(lambda clip=clip: clip(params, 1e9), device)
    return record


def copy_ms(bytes_moved: int, device: torch.device) -> float:
    """A copy that reads half of the bytes and writes half, in pieces where they are many."""
    piece = min(bytes_moved // 2, 4 * 2**30)
    source = torch.empty(piece, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source), device) * (bytes_moved / 2 / piece)


def torch_step(params, clip: bool, **options) -> Callable:
    """PyTorch's step, with its clipping."""
    optimizer = torch.optim.AdamW(params, lr=1e-5, **options)

    def step():
        if clip:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def of_8_bits() -> dict[str, Callable]:
    """Steps of other libraries' AdamW with 8-bit moments, of those that are installed."""
    found = {}
    for library, module in (("bitsandbytes", "bitsandbytes.optim"), ("torchao", "torchao.optim")):
        try:
            cls = importlib.import_module(module).AdamW8bit
        except (ImportError, AttributeError, RuntimeError) as error:
            print(f"{library}: {error}")
            continue
        found[library] = lambda params, cls=cls: cls(params, lr=1e-5).step
    return found


def difference(ours, theirs) -> float:
    return max(
        float((a.detach() - b.detach()).abs().max()) for a, b in zip(ours, theirs, strict=True) if a.numel()
    )


def release(device: torch.device) -> None:
    """Give memory back between configurations."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(name: str, shapes, device: torch.device) -> dict:
    dtype, options, per_element, _, peers = KINDS[name]
    elements = sum(map(_numel, shapes))
    record = {
        "kind": name,
        "elements": elements,
        "tensors": len(shapes),
        "bytes": int(elements * per_element),
    }
    record["copy_ms"] = copy_ms(record["bytes"], device)
    release(device)
    params = parameters(shapes, dtype, device)
    optimizer = tigon.optim.AdamW(params, lr=1e-5, **options)
    record["tigon_ms"] = milliseconds(optimizer.step, device)
    record["of_copy"] = record["copy_ms"] / record["tigon_ms"]
    record["tigon_host_us"] = host_us(optimizer.step, device)
    record["tigon_native_us"] = native_us(optimizer, device)
    if "max_grad_norm" in options:
        record |= clip_alone(params, device)
    del optimizer, params
    release(device)
    variants: dict[str, Callable] = {}
    if peers:
        for variant in ("fused", "foreach"):
            variants[variant] = lambda params, variant=variant: torch_step(
                params, "max_grad_norm" in options, **{variant: True}
            )
    if name == "int8" and device.type == "cuda":
        variants |= of_8_bits()
    for variant, make in variants.items():
        params = parameters(shapes, dtype, device)
        step = make(params)
        try:
            record[f"{variant}_ms"] = milliseconds(step, device)
            record[f"{variant}_host_us"] = host_us(step, device)
        except torch.OutOfMemoryError as error:
            record[f"{variant}_error"] = str(error).splitlines()[0]
        del params, step
        release(device)
    return record


def agreement(device: torch.device) -> dict:
    """Five steps of a small model beside PyTorch's fused ones, as a check that the same thing was timed."""
    shapes, record = llama(256, 512, 64, 2, 999), {"kind": "agreement"}
    for name, dtype in (("bf16", BF16), ("fp32", F32)):
        ours, theirs = (parameters(shapes, dtype, device) for _ in range(2))
        a = tigon.optim.AdamW(ours, lr=1e-3, moment_rounding="nearest")
        b = torch.optim.AdamW(theirs, lr=1e-3, fused=True)
        for _ in range(5):
            a.step(), b.step()
        record[name] = difference(ours, theirs)
    on_host, on_device = (
        [nn.Parameter(p.detach().to(where)) for p in parameters(shapes, BF16, device)]
        for where in ("cpu", device)
    )
    made = [tigon.optim.AdamW(params, lr=1e-3, moment_dtype="int8") for params in (on_host, on_device)]
    for i in range(5):
        for p, q in zip(on_host, on_device, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=BF16)
            q.grad = p.grad.to(device)
        for optimizer in made:
            optimizer.step()
    record["int8_beside_cpu"] = difference(on_host, [q.cpu() for q in on_device])  # 0
    return record


def muon(device: torch.device, layers: int, smoke: bool) -> dict:
    """Muon's step beside PyTorch's on hidden matrices, and the distance of an update from float64's, as a
    part of its norm: the largest of all shapes."""
    model = llama(64, 160, 16, layers, 1) if smoke else llama(4096, 14336, 1024, layers, 1)
    shapes = [shape for shape in model[1:-2] if len(shape) == 2]
    record = {"kind": "muon", "parameters": f"{layers} layers of Llama 3 8B", "tensors": len(shapes)}
    record["elements"] = sum(map(_numel, shapes))
    for name, optimizer in (("tigon", tigon.optim.Muon), ("torch", torch.optim.Muon)):
        record[f"{name}_ms"] = milliseconds(optimizer(parameters(shapes, BF16, device)).step, device)
        release(device)
        errors = []
        for (g,) in (parameters([shape], F32, device) for shape in set(shapes)):
            p, exact = (torch.nn.Parameter(torch.zeros_like(g, dtype=t)) for t in (F32, torch.float64))
            p.grad, exact.grad = g.detach(), g.detach().double()
            optimizer([p]).step(), tigon.optim.Muon([exact]).step()
            errors.append(float((p.data - exact.data).norm() / exact.data.norm()))
        record[f"{name}_error"] = max(errors)
    return record


def parse(words: list[str]) -> argparse.Namespace:
    parser = processes.command_line(__doc__, "")
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    add("--kinds", default=",".join(KINDS))
    add("--host", action="store_true", help="lists of many tensors alone")
    add("--muon", type=int, metavar="LAYERS", nargs="?", const=4, help="Muon only")
    add("--smoke", action="store_true", help="a few small tensors, in a second")
    args = parser.parse_args(words)
    args.out = args.out or store.results_file(store.device_name(args.device), "optimizer")
    return args


def measured(args: argparse.Namespace) -> Iterator[dict]:
    device = torch.device(args.device)
    common = store.facts(args.device)
    if args.muon:
        yield common | muon(device, args.muon, args.smoke)
        return
    count = 40 if args.smoke else 2000
    many = {f"small_{count}": many_small(count), f"tiny_{count}": ((4,),) * count}
    yield common | agreement(device)
    kinds = args.kinds.split(",")
    smoke = ("smoke", llama(64, 128, 16, 1, 50))
    runs = [
        (kind, *(smoke if args.smoke else shapes_that_fit(kind, device))) for kind in kinds if not args.host
    ]
    runs += [(kind, *item) for item in many.items() for kind in kinds if kind in ("bf16", "clipped")]
    for kind, label, shapes in runs:
        record = common | {"parameters": label} | measure(kind, shapes, device)
        print(line(record), flush=True)
        yield record


def line(r: dict) -> str:
    if r["kind"] == "agreement":
        return f"agreement: bf16 {r['bf16']}, fp32 {r['fp32']}"
    if r["kind"] == "muon":
        found = [
            f"{who} {r[f'{who}_ms']:.2f} ms, error {r[f'{who}_error']:.1e}" for who in ("tigon", "torch")
        ]
        return f"{r['parameters']}, {r['tensors']} matrices: {', '.join(found)}"
    peers = "".join(
        f"  {variant} {r[f'{variant}_ms']:8.2f} ms, host {r[f'{variant}_host_us']:6.0f} us"
        for variant in ("fused", "foreach", "bitsandbytes", "torchao")
        if f"{variant}_ms" in r
    )
    clips = "".join(
        f"  {who} clip {r[f'{who}_clip_ms']:.2f} ms ({r[f'{who}_no_clip_ms']:.2f} at factor 1), "
        f"host {r[f'{who}_clip_host_us']:.0f} us"
        for who in ("tigon", "torch")
        if f"{who}_clip_ms" in r
    )
    return (
        f"{r['parameters']:22} {r['kind']:18} {r['bytes'] / 1e9:7.2f} GB  copy {r['copy_ms']:8.2f} ms  "
        f"tigon {r['tigon_ms']:8.2f} ms ({r['of_copy']:4.0%}), host {r['tigon_host_us']:6.0f} us, native "
        f"{r['tigon_native_us']:5.0f} us{peers}{clips}"
    )


def main(words: list[str] | None = None) -> int:
    def table(records: list[dict]) -> str:
        return "\n".join(map(line, records))

    key = store.key_of("optimizer")
    return processes.main(words, parse, measured, lambda path: store.read(path, key), table)


if __name__ == "__main__":
    sys.exit(main())
