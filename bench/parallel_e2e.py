"""Training steps of models on several GPUs, side by side: as they are, with Tigon, with Liger.

    torchrun --standalone --nproc-per-node 2 bench/parallel_e2e.py
    torchrun --standalone --nproc-per-node 2 bench/parallel_e2e.py --layouts fsdp2 --layers 2 --batch 1
    torchrun --standalone --nproc-per-node 2 bench/parallel_e2e.py --layers 1 --seq 64 --set hidden_size=64,\
intermediate_size=128,num_attention_heads=4,num_key_value_heads=2,vocab_size=512        small, for CPUs

`fsdp2`: a Hugging Face model in float32, sharded as in examples/fsdp2.py over all processes, each with a
batch of its own, matmuls in bfloat16 on GPUs. `fsdp2_fp8`: the same with fp8="rowwise". `megatron`,
`megatron_sp`: a model of Megatron-Core with the sizes of that one, tensor parallel over all processes,
without and with sequence parallelism, as examples/megatron_gpt.py builds it (with sequence parallelism
Tigon's norms are in stock's run too, since Megatron's local ones refuse it). `megatron_ddp`: the same model
whole on every process, a step by Megatron's own get_forward_backward_func with its DDP: each row of the
process's batch is a microbatch, gradients are reduced during the last one's backward. Random weights, the
same for every provider, one AdamW step per measured step. Throughput is that of all processes together,
from the median step of the slowest; peak memory is the largest of a GPU, model and optimizer included.
Writes a JSON line for each case; a case that --out holds is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))

import e2e
import processes
import store
from tables import by_field, by_provider, distance, ratio

LAYOUTS = {  # providers of each
    "fsdp2": ("stock", "tigon", "liger"),
    "fsdp2_fp8": ("tigon",),
    "megatron": ("stock", "tigon"),
    "megatron_sp": ("stock", "tigon"),
    "megatron_ddp": ("stock", "tigon"),
}
OF_MEGATRON = {  # its names of what a model's configuration holds
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
}
PACKAGES = ("transformers", "megatron-core", "liger-kernel")
key = store.key_of("parallel_e2e")


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = processes.command_line(
        __doc__, "out/parallel_e2e.jsonl", options="set", layers=4, seq=4096, steps=10
    )
    add = parser.add_argument
    add("--layouts", default=",".join(LAYOUTS), help="comma-separated")
    add("--providers", default=",".join(e2e.PROVIDERS))
    add("--model", choices=tuple(e2e.MODELS), default="llama3-8b")
    add("--batch", type=int, default=2, help="rows of a process (fsdp2, megatron_ddp), or of all")
    return parser.parse_args(words)


def cases(args: argparse.Namespace, gpus: int) -> list[dict]:
    """Every case; the providers of a layout one after the other, stock first."""
    changes = e2e.pairs(args.set, json.loads)
    shared = {name: getattr(args, name) for name in ("model", "layers", "batch", "seq", "steps")}
    return [
        {"layout": layout, "provider": provider, "changes": changes, "gpus": gpus, **shared}
        for layout in args.layouts.split(",")
        for provider in LAYOUTS[layout]
        if provider in args.providers.split(",") and (provider != "liger" or find_spec("liger_kernel"))
    ]


def make_fsdp2(case: dict, device: str):
    """A step of a Hugging Face model, what was patched, and the tokens of a step."""
    import fsdp2
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks, rank = case["gpus"], torch.distributed.get_rank()
    mesh = init_device_mesh(device, (ranks, 1), mesh_dim_names=("data", "tensor"))
    model = e2e.build(case | {"device": device, "dtype": "float32", "checkpointing": False})
    fp8 = {"fp8": "rowwise"} if case["layout"] == "fsdp2_fp8" else {}
    report = e2e.patch(model, case["provider"], **fp8)
    options = fsdp2.shard(model, mesh, case["provider"] == "tigon")
    whole = fully_shard(model, **options)
    adam = torch.optim.AdamW(whole.parameters(), lr=1e-5, fused=device == "cuda")
    rows = torch.Generator().manual_seed(1 + rank)

    def step(_: int) -> float:
        shape = case["batch"], case["seq"]
        ids = torch.randint(0, model.config.vocab_size, shape, generator=rows).to(device)
        loss = whole(input_ids=ids, labels=ids).loss
        loss.backward()
        adam.step()
        adam.zero_grad()
        return float(loss.detach())

    return step, report, ranks * case["batch"] * case["seq"]


def megatron_model(case: dict, device: str):
    """A model of Megatron-Core, what was patched, and its optimizer."""
    import megatron_gpt
    import torch

    config = e2e.MODELS[case["model"]] | case["changes"] | {"num_hidden_layers": case["layers"]}
    sizes = ",".join(f"{theirs}={config[ours]}" for theirs, ours in OF_MEGATRON.items())
    ranks = tensor_ranks(case)
    vocab = -(-config["vocab_size"] // ranks) * ranks
    args = argparse.Namespace(
        sequence_parallel=case["layout"] == "megatron_sp", model_config=sizes, seq=case["seq"]
    )
    model = megatron_gpt.build(args, vocab, ranks, device, on_cpu=device == "cpu")
    report = ""
    if case["provider"] == "tigon":
        import tigon.megatron

        report = str(tigon.megatron.apply(model))
    return model, report, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")


def tensor_ranks(case: dict) -> int:
    """Processes that share a matrix of Megatron's model."""
    return 1 if case["layout"] == "megatron_ddp" else case["gpus"]


def batches(case: dict, device: str, seed: int):
    """Rows of token ids without end."""
    import torch

    rows = torch.Generator().manual_seed(seed)
    vocab = (e2e.MODELS[case["model"]] | case["changes"])["vocab_size"]
    while True:
        yield torch.randint(0, vocab, (case["batch"], case["seq"]), generator=rows).to(device)


def make_megatron(case: dict, device: str):
    """A step of Megatron-Core's model, what was patched, and the tokens of a step."""
    import megatron_gpt

    model, report, adam = megatron_model(case, device)
    train = megatron_gpt.step_of(model, adam, case["batch"], case["seq"], device)
    rows = batches(case, device, 1)
    return lambda _: train(next(rows)), report, case["batch"] * case["seq"]


def make_megatron_ddp(case: dict, device: str):
    """The same by Megatron's schedule, which averages over microbatches and processes."""
    import torch
    from megatron.core import distributed, pipeline_parallel
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        """The schedule counts tokens on a GPU."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if kwargs.get("device") == "cuda":
                kwargs = kwargs | {"device": device}
            return function(*args, **kwargs)

    model, report, adam = megatron_model(case, device)
    overlapped = distributed.DistributedDataParallelConfig(overlap_grad_reduce=True)
    whole = distributed.DistributedDataParallel(model.config, overlapped, model)
    model.config.no_sync_func = whole.no_sync
    model.config.finalize_model_grads_func = distributed.finalize_model_grads
    schedule = pipeline_parallel.get_forward_backward_func()
    rows = batches(case, device, 1 + torch.distributed.get_rank())
    seq = case["seq"]
    positions = torch.arange(seq, device=device)[None]
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool, device=device).triu(1)

    def forward(microbatches, model):
        ids = next(microbatches)
        losses = model(ids, positions, mask, labels=ids.roll(-1, 1))
        return losses, mean

    def mean(losses):
        loss = losses[:, :-1].mean()  # the last token has no next one
        return loss, {"loss": loss.detach().clone()}  # loss is divided in place

    def step(_: int) -> float:
        whole.zero_grad_buffer()
        with OnCpu() if device == "cpu" else contextlib.nullcontext():
            said = schedule(
                forward_step_func=forward,
                data_iterator=iter(next(rows).split(1)),
                model=[whole],
                num_microbatches=case["batch"],
                seq_length=seq,
                micro_batch_size=1,
            )
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        adam.step()
        adam.zero_grad()
        return float(torch.stack([one["loss"] for one in said]).mean())

    return step, report, case["gpus"] * case["batch"] * seq


MAKE = {
    "fsdp2": make_fsdp2,
    "fsdp2_fp8": make_fsdp2,
    "megatron": make_megatron,
    "megatron_sp": make_megatron,
    "megatron_ddp": make_megatron_ddp,
}


def run_case(case: dict, device: str) -> dict:
    import many_processes
    import torch

    step, report, tokens = MAKE[case["layout"]](case, device)
    found = many_processes.train(step, e2e.WARMUP + case["steps"], device, case["provider"])
    slowest = torch.tensor([found["ms"], found["peak_mib"] or 0.0], device=device)
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    ms, peak = slowest.tolist()
    return {
        "tokens_per_s": 1e3 * tokens / ms,
        "ms": ms,
        "peak_gb": peak * 2**20 / 1e9 if peak else None,
        "losses": found["losses"],
        "report": report.splitlines(),
    }


def measure(case: dict, device: str) -> dict:
    """The record of a case, an error included."""
    import torch

    start = time.perf_counter()
    try:
        if case["layout"].startswith("fsdp2"):
            result = run_case(case, device)
        else:
            import megatron_gpt

            with megatron_gpt.groups(device, tensor_ranks(case)):
                result = run_case(case, device)
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0]
        result = {"error": f"{type(error).__name__}: {words}"[:300]}
        traceback.print_exc()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return case | result | {"seconds": time.perf_counter() - start}


def settings(records: list[dict]) -> dict[str, dict[str, dict]]:
    return by_provider(records, lambda r: key(r | {"provider": None}))


def setting(record: dict) -> str:
    changes = "".join(f", {name}={value}" for name, value in record["changes"].items())
    return f"{record['layout']}, {record['model']}, {record['layers']} layers{changes}"


def table(records: list[dict]) -> str:
    providers = [name for name in e2e.PROVIDERS if any(r["provider"] == name for r in records)]
    rows = by_provider(records, lambda r: (setting(r), str(r["gpus"]), f"{r['batch']} x {r['seq']}"))
    fields = {
        "tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}",
        "GB": lambda r: "-" if r["peak_gb"] is None else f"{r['peak_gb']:.1f}",
    }
    more = {
        "MFU of tigon": lambda row: e2e.mfu.text(row.get("tigon"), e2e.config_of(row.get("tigon"))),
        "speed to stock": ratio("stock", lambda r: r["tokens_per_s"]),
        "loss from stock's": distance("stock", "losses"),
    }
    return by_field(("layout", "GPUs", "batch x tokens"), rows, providers, fields, more)


def measured(args: argparse.Namespace) -> Iterator[dict]:
    """The records of the cases that --out does not hold, on every rank."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "USE_HUB_KERNELS": "0"}
    import many_processes
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # Megatron's, of what is not installed
    device = many_processes.start()
    common = store.facts(device, *PACKAGES)
    done = {key(r) for r in store.read(args.out, key) if "error" not in r}
    dist.barrier()  # all have read the file before it grows
    for case in cases(args, dist.get_world_size()):
        if key(case) not in done:
            yield common | measure(case, device)
    dist.barrier()
    dist.destroy_process_group()


def main(words: list[str] | None = None) -> int:
    return processes.main(words, parse, measured, lambda path: store.read(path, key), table)


if __name__ == "__main__":
    sys.exit(main())
