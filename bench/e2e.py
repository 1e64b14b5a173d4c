"""Training steps of whole models, side by side: Hugging Face as it is, with Tigon, with Liger.

    python bench/e2e.py --suite six                       six models, 16 x 512 tokens, one GPU of 141 GB
    python bench/e2e.py --suite paper --budget 25         five models over batch sizes, at most 25 minutes
    python bench/e2e.py --suite moe --seq 2048            mixtures of experts, 4 layers of each
    python bench/e2e.py --suite people --budget 9         as people train: autocast, long and packed rows, ...
    python bench/e2e.py --suite card --steps 3            what fits cards of 24, 40, 48 and 80 GB
    python bench/e2e.py --models llama3-8b --layers 8     a quarter of the layers, for a smaller card
    python bench/e2e.py --optimizer tigon --clip 1        the whole step: tigon.optim.AdamW beside fused AdamW
    python bench/e2e.py --apply norm=False                options of tigon.apply, recorded with the numbers
    python bench/e2e.py --providers torchao --compile layers --optimizer tigon --apply "fp8='rowwise'"
    python bench/e2e.py --table out/e2e.jsonl             the table of an earlier run

Random weights from the published configurations, bfloat16, fused AdamW (``--optimizer``: Tigon's own under
Tigon), sdpa attention (flex_attention where heads have sinks, which sdpa lacks; eager on a CPU), experts by
transformers' grouped_mm, one optimizer step per measured step. Every case runs in a process of its own on the
same data; its record (or its error) is appended to --out when it ends, so a run that is cut off has lost one
case, and the same command goes on where it ended. While a case runs, the processes of the next ones import
their libraries and wait, without touching the card. Throughput is the mean over the steps with its standard
deviation, padding counted; peak memory is that of torch's allocator, model and optimizer included. With
--memory a case tries each limit of that allocator until one is enough: others are named in its record.
`torchao` is measured if it is named: the Linears of layers by torchao's recipe of that name, or as they are,
with Tigon's loss head and optimizer, so that the layers alone differ from `tigon`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import mfu
import processes
import store
from tables import by_field, by_provider, distance, ratio

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "python"))  # tigon, unless it is installed

LLAMA = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}
MODELS = {
    "llama3-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "qwen2-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "gemma-7b": {
        "model_type": "gemma",
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "vocab_size": 256000,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": None,
    },
    "phi3-mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32064,
    },
    "llama3.2-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "gemma3-4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
    },
    "qwen3-vl-2b": {
        "model_type": "qwen3_vl",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "llama3.2-3b": LLAMA
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "vocab_size": 128256,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}
for _name, _hidden, _intermediate, _layers, _heads, _tied in (
    ("qwen3-1.7b", 2048, 6144, 28, 16, True),
    ("qwen3-4b", 2560, 9728, 36, 32, True),
    ("qwen3-8b", 4096, 12288, 36, 32, False),
):
    MODELS[_name] = MODELS["qwen3-0.6b"] | {
        "hidden_size": _hidden,
        "intermediate_size": _intermediate,
        "num_hidden_layers": _layers,
        "num_attention_heads": _heads,
        "tie_word_embeddings": _tied,
    }
MOE = ("qwen3-30b-a3b", "gpt-oss-20b")
SINKS = ("gpt-oss-20b",)
DENSE = tuple(MODELS)[:6]
PEOPLE = (  # as people train; each fits a card of 80 GB
    {"model": "llama3.2-1b", "batch": 4, "seq": 2048, "dtype": "float32", "autocast": True},
    {"model": "gemma3-4b", "layers": 12, "batch": 4, "seq": 2048},
    {"model": "qwen3-vl-2b", "layers": 14, "batch": 4, "seq": 2048},
    {"model": "llama3-8b", "layers": 8, "batch": 1, "seq": 32768, "checkpointing": True},
    {"model": "llama3-8b", "layers": 8, "batch": 1, "seq": 8192, "packed": 512},
    {"model": "qwen3-0.6b", "batch": 128, "seq": 256, "contrastive": True},
    {"model": "qwen3.5-9b", "layers": 8, "batch": 4, "seq": 2048},
)
FULL = {"optimizer": "int8"}
CARDS = "24,40,48,80"
ON_CARDS = (
    *("llama3.2-1b", "llama3.2-3b", "llama3-8b"),
    *("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"),
)
CARD = (  # in the order of their worth: 8B under limits and beside other recipes, then what fits which card
    *(
        {"model": "llama3-8b", "seq": seq, **FULL, "memory": memory}
        for memory in ("37", "")
        for seq in (2048, 4096)
    ),
    *(
        {"provider": "stock", "model": "llama3-8b", "seq": seq, "optimizer": optimizer}
        for optimizer in ("int8", "torch")
        for seq in (2048, 4096)
    ),
    *(
        {"model": model, "seq": 2048, "memory": CARDS, **way}
        for way in (FULL, {"provider": "stock"}, {"lora": 16})
        for model in ON_CARDS
    ),
)
SUITES = {  # models, batches, layers (None: as published); people, card: what is None is each case's own
    "paper": (DENSE[:5], (4, 8, 16, 32), None),
    "six": (DENSE, (16,), None),
    "moe": (MOE, (16,), 4),
    "people": (tuple(dict.fromkeys(case["model"] for case in PEOPLE)), (None,), None),
    "card": (ON_CARDS, (1,), None),
}
PROVIDERS = ("stock", "tigon", "liger")
ASKED = ("torchao",)  # providers that are measured only if named
PARTS = ("norm", "mlp", "rope", "experts", "router", "qkv", "hyper", "lora")  # but the loss head
WARMUP = 3
OPTIMIZERS = ("torch", "tigon", "backward", "int8")
SETTING = (
    "seq",
    "layers",
    "steps",
    "masked",
    "padding",
    "packed",
    "checkpointing",
    "compile",
    "optimizer",
    "clip",
    "dtype",
    "autocast",
    "contrastive",
    "memory",
    "lora",
    "device",
    "attention",
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = processes.command_line(__doc__, "out/e2e.jsonl", 600.0, "set dtype device", steps=10)
    add = parser.add_argument
    add("--suite", choices=tuple(SUITES), default="six")
    add("--models", help=f"of {', '.join(MODELS)} (the suite's)")
    add("--batches", help="batch sizes, comma-separated (the suite's)")
    add("--providers", default=",".join(PROVIDERS))
    add("--seq", type=int, help="512, or the suite's")
    add("--layers", type=int, help="fewer layers than published (the suite's)")
    add("--attention", choices=("sdpa", "flex_attention", "eager"), help="transformers' (see above)")
    add("--apply", default="", metavar="K=V,...", help="options of tigon.apply, as Python writes them")
    add("--masked", type=float, default=0.0, help="fraction of labels that do not count")
    add("--padding", type=float, default=0.0, help="mean fraction of a row that is padding, under a mask")
    add(
        "--packed",
        type=int,
        default=0,
        metavar="TOKENS",
        help="rows packed of sequences of this mean length, told apart by position_ids",
    )
    add("--checkpointing", action="store_true", help="gradient checkpointing")
    add("--autocast", action="store_true", help="bfloat16 by autocast (weights: --dtype)")
    add("--contrastive", action="store_true", help="a bi-encoder: half of the rows belong to the other half")
    add(
        "--compile",
        nargs="?",
        const="model",
        choices=("model", "layers"),
        default="",
        help="torch.compile of the model, patched or not, or of its layers one by one",
    )
    add(
        "--optimizer",
        default="torch",
        choices=OPTIMIZERS,
        help="under Tigon: torch's fused AdamW, tigon.optim.AdamW, its step in the backward, or that with "
        "moments in 8 bits; int8 for others: bitsandbytes' PagedAdamW8bit, in the backward too",
    )
    add("--clip", type=float, default=0.0, metavar="NORM", help="clip the gradients' norm (0: do not)")
    add(
        "--memory", default="", metavar="GB,...", help="limits of torch's allocator: the first that is enough"
    )
    add("--lora", type=int, default=0, metavar="RANK", help="PEFT's adapters on all linear layers")
    args = parser.parse_args(arguments)
    models, batches, layers = SUITES[args.suite]
    args.layers = args.layers or layers
    args.seq = args.seq or (None if args.suite in ("people", "card") else 512)
    args.models = args.models or ",".join(models)
    args.batches = [int(b) for b in args.batches.split(",")] if args.batches else list(batches)
    processes.split(args, models=MODELS, providers=PROVIDERS + ASKED)
    if not 0 <= args.padding <= 0.5:
        raise SystemExit(f"--padding must be from 0 to 0.5, got {args.padding}")
    if args.clip and args.optimizer in ("backward", "int8"):
        raise SystemExit("--clip: a step in the backward does not know the norm of all gradients")
    return args


def cases(args: argparse.Namespace) -> list[dict]:
    """Every case: batch by batch the models, providers of one setting one after the other."""
    mappings = {"changes": pairs(args.set, json.loads), "apply": pairs(args.apply, ast.literal_eval)}
    shared = {name: getattr(args, name) for name in SETTING}
    rows = [{"model": model, "batch": batch} for batch in args.batches for model in args.models]
    if args.suite == "people":
        sizes = {"layers": args.layers, "seq": args.seq, "batch": args.batches[0]}
        given = {name: value for name, value in sizes.items() if value}
        rows = [case | given for case in PEOPLE if case["model"] in args.models]
    if args.suite == "card":
        given = {"seq": args.seq, "memory": args.memory, "layers": args.layers}
        given = {name: value for name, value in given.items() if value} | {"batch": args.batches[0]}
        rows = [
            {"provider": "tigon", "checkpointing": True, **case, **given}
            for case in CARD
            if case["model"] in args.models and case.get("provider", "tigon") in args.providers
        ]
    return [
        {"provider": provider, **mappings, **shared, **row}
        | {"attention": args.attention or attention_of(row["model"], args.device)}
        for row in rows
        for provider in ((None,) if "provider" in row else args.providers)
    ]


def attention_of(model: str, device: str) -> str:
    """The implementation of every provider; sdpa has no sinks, nor flex_attention on a CPU."""
    if model in SINKS:
        return "flex_attention" if device.startswith("cuda") else "eager"
    return "sdpa"


def pairs(text: str, parse_value) -> dict:
    named = (pair.partition("=") for pair in filter(None, text.split(",")))
    return {name: parse_value(value) for name, _, value in named}


def options(given: dict) -> str:
    """The same as text, values as Python writes them."""
    return ",".join(f"{name}={value!r}" for name, value in given.items())


# --- one case, in its own process -------------------------------------------------------------


def build(case: dict):
    """The model of a case on its device, the same numbers for every provider."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    config = MODELS[case["model"]] | case["changes"]
    if case["layers"]:
        config["num_hidden_layers"] = min(case["layers"], config["num_hidden_layers"])
    config["max_position_embeddings"] = max(case["seq"], 4096)
    given = {"experts_implementation": "grouped_mm"} if case["model"] in MOE else {}
    kind = AutoModel if case.get("contrastive") else AutoModelForCausalLM
    if case["model"] == "qwen3-vl-2b":  # its text, behind the least of a vision tower
        kind, text = (
            AutoModelForImageTextToText,
            {**config, "model_type": "qwen3_vl_text", "use_cache": False},
        )
        vision = {
            "depth": 1,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": config["hidden_size"],
            "deepstack_visual_indexes": [0],
        }
        config = {
            "model_type": "qwen3_vl",
            "text_config": text,
            "vision_config": vision,
            "tie_word_embeddings": True,
        }
    config = AutoConfig.for_model(**config, use_cache=False, pad_token_id=None)
    torch.manual_seed(case.get("seed", 0))
    with torch.device(case["device"]):
        model = kind.from_config(
            config,
            dtype=getattr(torch, case["dtype"]),
            attn_implementation=case.get("attention", "sdpa"),
            **given,
        )
    if case["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=case["lora"], lora_alpha=2 * case["lora"], target_modules="all-linear")
        model = get_peft_model(model, config)
    return model.train()


def inputs(case: dict, vocabulary: int, generator) -> dict:
    """A batch of random tokens: the model's arguments."""
    import torch

    shape = case["batch"], case["seq"]
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    if case["contrastive"]:
        return {"input_ids": ids}
    labels = ids.masked_fill(torch.rand(shape, generator=generator) < case["masked"], -100)
    if case["packed"]:  # a sequence begins at any token, once in so many
        begins = torch.rand(shape, generator=generator) < 1 / case["packed"]
        begins[:, 0] = True
        index = torch.arange(shape[1]).expand(shape)
        since = torch.where(begins, index, 0).cummax(-1).values
        return {"input_ids": ids, "labels": labels.masked_fill(begins, -100), "position_ids": index - since}
    if not case["padding"]:
        return {"input_ids": ids, "labels": labels}
    lengths = shape[1] * (1 - 2 * case["padding"] * torch.rand(shape[0], 1, generator=generator))
    mask = torch.arange(shape[1]) < lengths.ceil()
    return {"input_ids": ids, "labels": labels.masked_fill(~mask, -100), "attention_mask": mask.long()}


def patch(model, provider: str, **options) -> str:
    """Put the provider in; what it reports. The options are those of tigon.apply."""
    if provider == "tigon":
        import tigon

        return str(tigon.apply(model, **options))
    if provider == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=hasattr(model, "lm_head"))
    if provider == "torchao":
        return with_torchao(model, **options)
    return ""


def with_torchao(model, fp8: str | None = None) -> str:
    """torchao's Linears of a recipe in the layers, all of them stock else; Tigon's loss head."""
    import tigon

    if fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(decoder_layers(model), config=Float8LinearConfig.from_recipe_name(fp8))
    return str(tigon.apply(model, **dict.fromkeys(PARTS, False)))


def experts_of(model) -> str | None:
    """Who computes the experts: transformers' implementation, or the method that a provider bound."""
    experts = getattr(decoder_layers(model)[0].mlp, "experts", None)
    if experts is None:
        return None
    bound = vars(experts).get("forward")
    return bound.__qualname__ if bound else model.config._experts_implementation


def decoder_layers(model):
    """The decoder's layers, whatever the model is wrapped in."""
    return next(module.layers for module in model.modules() if hasattr(module, "layers"))


def loss_of(model, case: dict, data: dict):
    """The model's own loss, or a contrastive one of last states: row i of each half is a pair."""
    import torch
    import torch.nn.functional as F

    with torch.autocast(case["device"].partition(":")[0], torch.bfloat16, enabled=case["autocast"]):
        if not case["contrastive"]:
            return model(**data).loss
        queries, documents = model(**data).last_hidden_state[:, -1].chunk(2)
        if case["provider"] == "tigon":
            import tigon

            return tigon.contrastive_loss(queries, documents, temperature=0.05)
        scores = (F.normalize(queries, dim=-1) @ F.normalize(documents, dim=-1).t()).float() / 0.05
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def compiled(model, what: str):
    """The model under torch.compile, as a whole, layer by layer, or not at all."""
    import torch

    if what == "model":
        return torch.compile(model)
    for layer in decoder_layers(model) if what else ():
        layer.compile()
    return model


def make_step(model, case: dict):
    """The optimizer's step, clipping included; it frees the gradients."""
    import torch

    own = case["provider"] in ("tigon", *ASKED) and case["optimizer"] != "torch"
    clip, kind = case["clip"], case["optimizer"]
    parameters = [p for p in model.parameters() if p.requires_grad]
    if own:
        import tigon

        moments = "int8" if kind == "int8" else None
        optimizer = tigon.optim.AdamW(parameters, lr=1e-5, max_grad_norm=clip or None, moment_dtype=moments)
        if kind in ("backward", "int8"):
            tigon.optim.step_in_backward(optimizer)
    elif kind == "int8":
        return paged_step(parameters)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def step() -> None:
        if clip and not own:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def paged_step(parameters: list):
    """bitsandbytes' paged AdamW of 8 bits, a parameter's step when its gradient is there; nothing remains."""
    from bitsandbytes.optim import PagedAdamW8bit

    optimizers = {p: PagedAdamW8bit([p], lr=1e-5) for p in parameters}

    def update(parameter) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(update)
    return lambda: None


def run_case(case: dict) -> dict:
    """The figures of a case, under the first limit of its memory that is enough."""
    import torch

    limits = [float(limit) for limit in case["memory"].split(",") if limit]
    if not limits:
        return run_model(case, build(case))
    for limit in limits:
        # PyTorch keeps a model whose backward was out of memory: the next process has none.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                return process.submit(run_within, case, limit).result()
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
    raise torch.OutOfMemoryError(f"out of memory: {limits[-1]:g} GB are too little")


def run_within(case: dict, gb: float) -> dict:
    """The figures of a case with so much of a card for torch's allocator."""
    import torch

    if case["device"].startswith("cuda"):
        total = torch.cuda.get_device_properties(case["device"]).total_memory
        torch.cuda.set_per_process_memory_fraction(min(gb * 1e9 / total, 1.0))
    return run_model(case, build(case)) | {"memory_gb": f"{gb:g}"}


def run_model(case: dict, model) -> dict:
    cuda = case["device"].startswith("cuda")
    report = patch(model, case["provider"], **case["apply"])
    experts = experts_of(model)
    model = compiled(model, case["compile"])
    update = make_step(model, case)
    vocabulary = model.config.get_text_config().vocab_size

    kept: list[float] = []  # GB that the layers keep for the backward
    # A compiler and graphs take hooks for a part of the model: they would begin anew after the warm-up.
    hooked = cuda and not case["compile"] and not case["apply"].get("graphs")

    def step(data: dict) -> float:
        with layers_keep(model, kept) if hooked and len(kept) < WARMUP else contextlib.nullcontext():
            loss = loss_of(model, case, data)
        loss.backward()
        update()
        return loss.item()  # waits for the forward pass

    figures = timed(case, lambda generator: inputs(case, vocabulary, generator), step, WARMUP)
    return {
        **figures,
        "parameters": sum(p.numel() for p in model.parameters()),
        "report": report.splitlines(),
        "layers_keep_gb": kept,
        **({"product_tflops": mfu.matmul_tflops()} if cuda else {}),
        **({"experts": experts} if experts else {}),
        **versions(case, *(name for name in ASKED if name == case["provider"])),
    }


@contextlib.contextmanager
def layers_keep(model, kept: list):
    """Append the GB that are allocated between the first layer's call and the end of the last one's."""
    import torch

    before: list[int] = []
    layers = decoder_layers(model)
    hooks = (
        layers[0].register_forward_pre_hook(lambda *_: before.append(torch.cuda.memory_allocated())),
        layers[-1].register_forward_hook(
            lambda *_: kept.append((torch.cuda.memory_allocated() - before[0]) / 1e9)
        ),
    )
    yield
    for hook in hooks:
        hook.remove()


def timed(case: dict, draw, step, warmup: int) -> dict:
    """Times, losses and memory of steps: `step` takes what `draw` made on the CPU, and returns its loss."""
    import torch

    cuda = case["device"].startswith("cuda")
    generator = torch.Generator().manual_seed(1)
    seconds, losses = [], []
    for number in range(warmup + case["steps"]):
        data = {name: part.to(case["device"]) for name, part in draw(generator).items()}
        if number == warmup:  # what lives now is not looked through in a measured step
            gc.collect()
            gc.freeze()
        if cuda:
            if number == warmup:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step(data))
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    rates = [case["batch"] * case["seq"] / t for t in seconds[warmup:]]
    return {
        "tokens_per_s": statistics.mean(rates),
        "tokens_per_s_std": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "step_ms": [1e3 * t for t in seconds[warmup:]],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0,
        **(memory_of_card() if cuda else {}),
        "losses": losses,
    }


def memory_of_card() -> dict:
    """GB that torch reserves, and that the card has in use: context, libraries and paged states as well."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return {"reserved_gb": torch.cuda.max_memory_reserved() / 1e9, "card_gb": (total - free) / 1e9}


def versions(case: dict, *others: str) -> dict:
    """What the numbers belong to."""
    return store.facts(case["device"], "transformers", "liger-kernel", "triton", *others)


def prepare(case: dict) -> None:
    """Import what takes long."""
    build({**case, "device": "meta"})
    modules = {"tigon": "tigon", "liger": "liger_kernel.transformers", "torchao": "torchao.float8"}
    if case["provider"] != "stock":
        importlib.import_module(modules[case["provider"]])


# --- all cases --------------------------------------------------------------------------------


def key(record: dict) -> tuple:
    names = ("model", "batch", "provider", *(name for name in SETTING if name != "steps"))
    mappings = (json.dumps(record[name], sort_keys=True) for name in ("changes", "apply"))
    return (*(record[name] for name in names), *mappings)


def read(path: Path) -> list[dict]:
    """Records of a file; of a case that was run twice the last one."""
    records = store.read(path)
    for record in records:  # as older files have them
        for name, value in (
            ("padding", 0.0),
            ("optimizer", "torch"),
            ("clip", 0.0),
            ("apply", {}),
            ("attention", "sdpa"),
            ("packed", 0),
            ("autocast", False),
            ("contrastive", False),
            ("memory", ""),
            ("lora", 0),
        ):
            record.setdefault(name, value)
        record["compile"] = {True: "model", False: ""}.get(record["compile"], record["compile"])
    return list({key(record): record for record in records}.values())


def table(records: list[dict]) -> str:
    providers = [name for name in PROVIDERS + ASKED if any(r["provider"] == name for r in records)]
    ordered = sorted(records, key=lambda r: (list(MODELS).index(r["model"]), r["batch"]))
    rows = by_provider(ordered, lambda r: (setting(r), f"{r['batch']} x {r['seq']}"))
    fields = {"tokens/s": rate, "GB": lambda r: f"{r['peak_gb']:.1f}"}
    more = {"MFU of tigon": lambda row: mfu.text(row.get("tigon"), config_of(row.get("tigon")))}
    for other in ("stock", "liger"):
        if other in providers:
            more[f"speed to {other}"] = ratio(other, lambda r: r["tokens_per_s"])
            more[f"loss from {other}'s"] = distance(other, "losses")
    return by_field(("model", "batch x tokens"), rows, providers, fields, more)


def rate(record: dict) -> str:
    return f"{record['tokens_per_s']:,.0f} ± {record['tokens_per_s_std']:,.0f}"


def config_of(record: dict | None) -> dict:
    """The configuration that a record's model was built from."""
    return MODELS[record["model"]] | record["changes"] if record else {}


def setting(record: dict) -> str:
    """The model and whatever is not as usual."""
    layers, masked, padding = record["layers"], record["masked"], record["padding"]
    parts = [
        record["model"],
        layers and f"{layers} layers",
        masked and f"{masked:.0%} masked",
        padding and f"{padding:.0%} padding",
        record["checkpointing"] and "checkpointing",
        record["packed"] and f"packed, {record['packed']} tokens a sequence",
        record["contrastive"] and "bi-encoder",
        record["lora"] and f"LoRA of rank {record['lora']}",
        record["memory"] and f"limit {record.get('memory_gb', record['memory'])} GB",
        record["autocast"] and "autocast",
        record["compile"] and f"compiled {record['compile']}",
        record["attention"] != "sdpa" and record["attention"],
        record["optimizer"] == "tigon" and "Tigon's AdamW",
        record["optimizer"] == "backward" and "Tigon's step in the backward",
        record["optimizer"] == "int8" and "moments in 8 bits, step in the backward",
        record["clip"] and f"clipped at {record['clip']:g}",
        record["dtype"] == "float32" and "float32",
        *(f"{name}={value}" for name, value in record["changes"].items()),
        record["apply"] and f"apply {options(record['apply'])}",
    ]
    return ", ".join(filter(None, parts))


def _line(r: dict) -> str:
    return f"{r['model']:<12} {r['batch']:>3} {r['provider']:<6} " + (
        store.error_text(r) if "error" in r else f"{rate(r)} tokens/s, {r['peak_gb']:.1f} GB"
    )


def main(words: list[str] | None = None) -> int:
    program = parse, cases, key, prepare, run_case, table, read, _line
    return processes.main_of_cases(__file__, words, *program)


if __name__ == "__main__":
    sys.exit(main())
