"""What LoRA costs beside the frozen model: one linear, and steps of a whole model with PEFT's adapters.

    python bench/adapters.py                           both, on a GPU
    python bench/adapters.py --parts linear            one linear map, forward and backward
    python bench/adapters.py --parts model --compile   with PEFT under torch.compile besides
    python bench/adapters.py --parts linear --dora     DoRA's beside LoRA's
    python bench/adapters.py --parts experts           adapters of a layer of experts of Qwen3-30B-A3B
    python bench/adapters.py --parts model --nf4       QLoRA: weights in bitsandbytes' NF4, quantised twice
    python bench/adapters.py --parts dequantize,fp8    weights of 8 and 4 bits; a base of fp8
    python bench/adapters.py --device cpu --parts linear --dtype float32 --threads 2

One linear: gradients of x, A and B, adapters in the base's dtype; `base` is the matmul pair of the frozen
map.
Model: Llama of 8B's width with random weights, loss and backward, no optimizer; `frozen` has no adapters and
a gradient of its embeddings, with `tigon.apply`; `tigon_no_lora` is `tigon.apply(lora=False)`; `tigon_fp8`
and `tigon_fp8_base_only` have their base in float8 (docs/fp8.md); `unsloth` is
that with the functions of Unsloth's `kernels/fast_lora.py` in attention and MLP, where they can be imported.
Experts: gradients of x, the routing weights and float32 adapters; `frozen` is the layer without adapters,
with `tigon.apply`; `tigon_no_lora` is `tigon.apply(lora=False)`: PEFT adds the adapters to the weights.
Dequantize: `copy` moves as many bytes as the codes, scales and the weight have. Fp8: one linear map with
PEFT's adapters and `tigon.apply`, around transformers' FP8Linear; `bf16` is the same around nn.Linear.
Memory is the peak of a step above what was allocated before, without gradients of earlier steps.
Each record is a line of JSON in --out. Memory is the peak of torch's allocator, weights included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import processes
import store
import timing
import torch
import torch.nn.functional as F
from tables import by_provider

LINEARS = (
    (8192, 4096, 14336, 16),
    (8192, 4096, 4096, 16),
    (8192, 14336, 4096, 16),
    (8192, 4096, 14336, 64),
    (2048, 4096, 4096, 16),
)
STEPS = (  # rows, tokens of each, checkpointing
    (4, 2048, False),
    (4, 2048, True),
    (1, 1024, False),
)
CPU_LINEARS = ((512, 4096, 4096, 16), (512, 4096, 14336, 16), (2048, 1024, 2048, 16), (2048, 1024, 2048, 64))
FP8 = {"tigon_fp8": {"fp8": "rowwise"}, "tigon_fp8_base_only": {"fp8": "rowwise", "fp8_base_only": True}}
MODELS = ("frozen", "tigon", *FP8, "tigon_no_lora", "unsloth", "peft")
BASES = {  # codes and scales of a weight: dtypes, rows and columns of a block (0: all)
    "fp8 blocks": ("e4m3", torch.float32, 128, 128),
    "fp8 rows": ("e4m3", torch.float32, 1, 0),
    "int8 rows": ("int8", torch.float32, 1, 0),
    "int4 groups": ("int4", torch.bfloat16, 1, 128),
    "mxfp4": ("e2m1", torch.uint8, 1, 32),
    "nvfp4": ("e2m1", torch.float8_e4m3fn, 1, 16),
}
CASE = store.KEYS["adapters"][:-1]
FLOORS = ("base", "frozen", "copy", "bf16")


def linear_calls(m, k, n, r, args) -> dict:
    import peft

    import tigon
    from tigon.integrations.transformers.lora import LoraSpec, lora_forward

    like = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    x = torch.randn(m, k, **like).requires_grad_()
    dy = torch.randn(m, n, **like)
    base = torch.nn.Linear(k, n, bias=False, **like).requires_grad_(False)
    config = peft.LoraConfig(
        r=r, lora_alpha=2 * r, init_lora_weights=False, target_modules=["0"], use_dora=args.dora
    )
    model = peft.get_peft_model(torch.nn.Sequential(base), config, autocast_adapter_dtype=False)
    layer = model.base_model.model[0].to(**like)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight

    def pair(function):
        def call(_):
            function(x).backward(dy)
            for tensor in (x, *layer.parameters()):
                tensor.grad = None

        return call

    calls = {
        "base": pair(lambda x: F.linear(x, base.weight)),
        "tigon": pair(lambda x: tigon.lora_linear(x, base.weight, a, b, 2.0)),
        "peft": pair(layer),
    }
    if args.dora:
        spec = LoraSpec()
        calls |= {"tigon_lora": calls["tigon"], "tigon": pair(lambda x: lora_forward(layer, spec, x))}
    if args.compile:
        calls["peft_compile"] = pair(torch.compile(layer))
    return calls


def wall_ms(call, device, repeats=20) -> float:
    """Median time of a call with the host's part."""
    times = []
    for i in range(repeats + 3):
        timing.synchronize(device)
        start = time.perf_counter()
        call(i)
        timing.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def bench_linears(args) -> Iterator[dict]:
    """Device time, and wall time of one call that waits; on a CPU of calls in turn."""
    device = torch.device(args.device)
    on_cpu = device.type == "cpu"
    for m, k, n, r in CPU_LINEARS if on_cpu else LINEARS:
        case = {"part": "linear", "rows": m, "columns": k, "outputs": n, "rank": r, "dora": args.dora}
        case |= {"dtype": args.dtype, "threads": torch.get_num_threads() if on_cpu else None}
        calls = linear_calls(m, k, n, r, args)
        wall = timing.cpu_ms(calls) if on_cpu else {name: wall_ms(c, device) for name, c in calls.items()}
        for name, call in calls.items():
            least = wall[name] if on_cpu else timing.cuda_ms(call)
            yield case | {"provider": name, "ms": least, "wall_ms": wall[name]}
        if not on_cpu:
            torch.cuda.empty_cache()


def bench_dequantize(args) -> Iterator[dict]:
    import tigon

    for n, k in ((14336, 4096), (4096, 4096)):
        for name, (kind, of, rows, cols) in BASES.items():
            width = k if kind in ("e4m3", "int8") else k // 2
            codes = torch.randint(0, 256, (n, width), device=args.device, dtype=torch.uint8)
            codes = codes.view(torch.float8_e4m3fn) if kind == "e4m3" else codes
            grid = n // rows, k // (cols or k)
            scales = torch.randint(110, 130, grid, device=args.device, dtype=torch.uint8)
            scales = scales if of == torch.uint8 else scales.to(of)
            half = (codes.nbytes + scales.nbytes + 2 * n * k) // 2
            half = torch.empty(half, dtype=torch.uint8, device=args.device)
            to = torch.empty_like(half)
            calls = {
                "copy": lambda _, to=to, half=half: to.copy_(half),
                "tigon": lambda _, c=codes, s=scales, kind=kind: tigon.dequantize(c, s, kind),
            }
            case = {"part": "dequantize", "columns": k, "outputs": n, "base": name, "dtype": "bfloat16"}
            for provider, call in calls.items():
                yield case | {"provider": provider, "ms": timing.cuda_ms(call), "bytes": 2 * half.nbytes}


def bench_fp8(args) -> Iterator[dict]:
    import peft
    from transformers.integrations.finegrained_fp8 import FP8Linear

    import tigon

    for m, k, n, r in LINEARS[:3]:
        like = {"device": args.device, "dtype": torch.bfloat16}
        x, dy = torch.randn(m, k, **like).requires_grad_(), torch.randn(m, n, **like)
        coded = FP8Linear(k, n, (128, 128)).to(args.device).requires_grad_(False)
        scales = torch.rand(coded.weight_scale_inv.shape, device=args.device) / 50
        coded.weight_scale_inv.data.copy_(scales)
        coded.weight.data = torch.randn(n, k, **like).to(torch.float8_e4m3fn)
        plain = torch.nn.Linear(k, n, bias=False, **like).requires_grad_(False)
        plain.weight.data = tigon.dequantize(coded)
        results = []
        for provider, base in (("bf16", plain), ("tigon", coded)):
            config = peft.LoraConfig(r=r, target_modules=["0"])
            model = peft.get_peft_model(torch.nn.Sequential(base), config).base_model.model
            if not tigon.apply(model).count("lora"):
                raise RuntimeError(f"tigon.apply left {type(base).__name__}")
            torch.manual_seed(0)
            for weight in (model[0].lora_A["default"].weight, model[0].lora_B["default"].weight):
                torch.nn.init.normal_(weight, std=0.02)

            def step(_, model=model, x=x, dy=dy):
                model(x).backward(dy)
                for leaf in (x, *model.parameters()):
                    leaf.grad = None

            results.append(model(x))
            case = {"part": "fp8", "rows": m, "columns": k, "outputs": n, "rank": r, "base": "fp8 blocks"}
            wall = wall_ms(step, torch.device(args.device))
            yield case | {"provider": provider, "ms": timing.cuda_ms(step), "wall_ms": wall}
        if not torch.equal(*results):
            raise RuntimeError("LoRA on the fp8 base differs from LoRA on its dequantised weight")


def make_experts(args, provider):
    import peft
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import tigon

    config = Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        experts_implementation="grouped_mm",
    )
    with torch.device(args.device):
        layer = torch.nn.Sequential(Qwen3MoeExperts(config).to(getattr(torch, args.dtype)))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02).requires_grad_(False)
    if provider != "frozen":
        names = ["0.gate_up_proj", "0.down_proj"]
        adapters = peft.LoraConfig(r=16, lora_alpha=32, init_lora_weights=False, target_parameters=names)
        layer = peft.get_peft_model(layer, adapters).base_model.model
    if provider != "peft":
        tigon.apply(layer, lora=provider != "tigon_no_lora")
    return layer


def bench_experts(args) -> Iterator[dict]:
    for provider in ("frozen", "tigon", "tigon_no_lora", "peft"):
        layer = make_experts(args, provider)
        for tokens in (8192, 512):
            torch.manual_seed(0)
            x = torch.randn(tokens, 2048, device=args.device, dtype=getattr(torch, args.dtype))
            weights, ids = torch.randn(tokens, 128, device=args.device).softmax(-1).topk(8, dim=-1)
            leaves = [x.requires_grad_(), weights.to(x.dtype).requires_grad_()]
            leaves += [p for p in layer.parameters() if p.requires_grad]
            dy = torch.randn_like(x)

            def step(_, x=x, ids=ids, weights=leaves[1], leaves=leaves, dy=dy, layer=layer):
                layer[0](x, ids, weights).backward(dy)
                for leaf in leaves:
                    leaf.grad = None

            step(0)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(0)
            torch.cuda.synchronize()
            yield {
                "part": "experts",
                "tokens": tokens,
                "rank": 16,
                "dtype": args.dtype,
                "provider": provider,
                "gb": (torch.cuda.max_memory_allocated() - before) / 1e9,
                "ms": timing.cuda_ms(step),
                "wall_ms": wall_ms(step, torch.device(args.device)),
            }
        del layer, step
        gc.collect()
        torch.cuda.empty_cache()


def make_model(args, provider, cast):
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    import tigon

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=500000.0,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if args.nf4:
        quantise(model)
    if provider == "frozen":
        model.requires_grad_(False)
        model.enable_input_require_grads()
    else:
        adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", use_dora=args.dora)
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=cast)
    if provider == "unsloth":
        tigon.apply(model, lora=False, mlp=False, rope=False)
        use_unsloth(model)
    elif provider == "tigon_no_lora":
        tigon.apply(model, lora=False)
    elif not provider.startswith("peft"):
        tigon.apply(model, **FP8.get(provider, {}))
    return model.train()


def quantise(model) -> None:
    """The linear maps of the layers as QLoRA has them: NF4, its scales quantised too."""
    import bitsandbytes as bnb

    for path, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            options = {"bias": False, "quant_type": "nf4", "compute_dtype": torch.bfloat16}
            new = bnb.nn.Linear4bit(module.in_features, module.out_features, **options)
            new.weight = bnb.nn.Params4bit(module.weight.detach(), requires_grad=False, quant_type="nf4")
            model.model.layers.set_submodule(path, new.to(module.weight.device))
    model.is_loaded_in_4bit = True


def use_unsloth(model) -> None:
    """Unsloth's autograd functions in the layers; rotary embedding by Tigon."""
    from unsloth.kernels.fast_lora import apply_lora_mlp_swiglu, apply_lora_o, apply_lora_qkv

    import tigon

    def attention(self, hidden_states, position_embeddings, **_):
        rows, tokens, _ = hidden_states.shape
        heads = (rows, tokens, -1, self.head_dim)
        q, k, v = (y.view(heads).transpose(1, 2) for y in apply_lora_qkv(self, hidden_states))
        q, k = tigon.rope(q, k, *position_embeddings)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return apply_lora_o(self, y.transpose(1, 2).reshape(rows, tokens, -1)), None

    for layer in model.base_model.model.model.layers:
        layer.self_attn.forward = types.MethodType(attention, layer.self_attn)
        layer.mlp.forward = types.MethodType(apply_lora_mlp_swiglu, layer.mlp)


def bench_models(args) -> Iterator[dict]:
    providers = (*MODELS, "peft_compile") if args.compile else MODELS
    for provider in providers:
        if args.providers and provider not in args.providers.split(","):
            continue
        try:
            model = make_model(args, provider, cast=True)
        except ImportError as error:
            print(f"{provider} is left out: {error}")
            continue
        for rows, tokens, checkpointing in STEPS:
            if provider == "peft_compile" and checkpointing:
                continue
            set_checkpointing(model, checkpointing)
            leaves = [p for p in model.parameters() if p.requires_grad]
            ids = torch.randint(128256, (rows, tokens), device=args.device)
            run = torch.compile(model) if provider == "peft_compile" else model

            def step(_, run=run, leaves=leaves, ids=ids):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = run(input_ids=ids, labels=ids).loss
                loss.backward()
                for leaf in leaves:  # as an optimizer does, whatever modules there are
                    leaf.grad = None

            step(0)
            torch.cuda.reset_peak_memory_stats()
            ms = wall_ms(step, torch.device(args.device), args.steps)
            yield {
                "part": "model",
                "rows": rows,
                "tokens": tokens,
                "checkpointing": checkpointing,
                "provider": provider,
                "adapters": "fp32 under autocast",
                "layers": args.layers,
                "ms": ms,
                "dora": args.dora,
                "nf4": args.nf4,
                "gb": torch.cuda.max_memory_allocated() / 1e9,
            }
            if args.profile:
                profile(step, f"{provider} {rows}x{tokens} {checkpointing}", args.profile)
        del model, run, step
        gc.collect()
        torch.cuda.empty_cache()


def set_checkpointing(model, on: bool) -> None:
    """Of a model, or of the one inside PEFT's."""
    if on:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def profile(step, title: str, path: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        step(0)
        torch.cuda.synchronize()
    with path.open("a") as file:
        print(
            title,
            found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=100),
            file=file,
        )


def parse(words: list[str]) -> argparse.Namespace:
    parser = processes.command_line(__doc__, "out/lora.jsonl", layers=8, steps=8)
    add = parser.add_argument
    add("--parts", default="linear,model")
    add("--providers", default="", help="of the model")
    add("--compile", action="store_true")
    add("--dora", action="store_true")
    add("--nf4", action="store_true", help="of the model")
    add("--device", default="cuda", help="cpu: of one linear")
    add("--dtype", default="bfloat16", help="of one linear")
    add("--threads", type=int, help="of a CPU")
    add("--profile", type=Path, help="where to write the kernels of a step")
    return parser.parse_args(words)


def measured(args: argparse.Namespace) -> Iterator[dict]:
    if args.threads:
        torch.set_num_threads(args.threads)
    common = {"bench": "lora"} | store.facts(args.device, "peft")
    runs = {"linear": bench_linears, "dequantize": bench_dequantize, "fp8": bench_fp8}
    runs |= {"experts": bench_experts, "model": bench_models}
    for part, records in runs.items():
        if part in args.parts.split(","):
            yield from (common | record for record in records(args))


def main(words: list[str] | None = None) -> int:
    key = store.key_of("adapters")
    return processes.main(words, parse, measured, lambda path: store.read(path, key), table)


def cases(records) -> dict[tuple, dict[str, dict]]:
    return by_provider(records, lambda r: tuple(map(r.get, CASE)))


def name_of(r: dict) -> str:
    if r["part"] == "model":
        words = [f"model, {r['rows']} x {r['tokens']}", "checkpointing" if r["checkpointing"] else ""]
    elif r["part"] == "experts":
        words = [f"experts, {r['tokens']} tokens, rank {r['rank']}", r["dtype"]]
    elif r["part"] == "dequantize":
        words = [f"dequantize, {r['outputs']} x {r['columns']}, {r['base']}"]
    else:
        words = [f"{r['rows']} x {r['columns']} -> {r['outputs']}, rank {r['rank']}", r.get("dtype", "")]
        words.append(r.get("base", ""))
    return ", ".join(filter(None, [*words, "DoRA" if r.get("dora") else "", "NF4" if r.get("nf4") else ""]))


def floor_of(row: dict[str, dict]) -> dict | None:
    """The record of the frozen base, or of the frozen model."""
    return next((row[name] for name in FLOORS if name in row), None)


def table(records) -> str:
    """A line for each record, its time beside the frozen base's."""
    lines = []
    for row in cases(records).values():
        floor = floor_of(row)
        for r in row.values():
            ratio = f"{r['ms'] / floor['ms']:.3f}" if floor else "-"
            rest = f"{r['gb']:.2f} GB  " if "gb" in r else ""
            rest += f"wall {r['wall_ms']:.3f}" if "wall_ms" in r else ""
            lines.append(f"{name_of(r):<48} {r['provider']:<14} {r['ms']:9.3f} ms  {ratio:>6}  {rest}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
