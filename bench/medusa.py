"""Training steps with Medusa's heads over sequence lengths: stock, Liger's losses, Tigon.

    python bench/medusa.py                                 Llama 3 8B, 3 and 5 heads, both stages, 141 GB
    python bench/medusa.py --layers 8 --lengths 1024,4096  fewer layers and lengths, for a smaller card
    python bench/medusa.py --table out/medusa.jsonl        the table of an earlier run

Random weights of the published configuration, gradient checkpointing, fused AdamW; stage 1 trains the heads
on a frozen model, stage 2 both (with the loss of the model's own head). Every provider has Medusa's heads
with their residual blocks: stock takes PyTorch's cross-entropy of every head's logits; liger calls
LigerFusedLinearCrossEntropyLoss once for each head, as the example of liger-kernel 0.8.5 does, but on the
head's own hidden states (that example leaves the blocks out there); tigon makes one call of
`tigon.nn.MedusaHeads`, tigon_small with max_workspace_mb=256. Tigon sums a weight's gradient over chunks in
float32; liger does so in its dtype, liger_fp32 in float32. Every case runs in a process of its own on
the same data; its record (or its error) is appended to --out when it ends. Peak memory is that of torch's
allocator, model and optimizer included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

import e2e
import processes
import store
from tables import by_field, by_provider, ratio

PROVIDERS = ("stock", "liger", "liger_fp32", "tigon", "tigon_small")
SMALL_MB = 256  # max_workspace_mb of tigon_small
WARMUP = 2
SCALE, DECAY = 0.2, 0.8
key = store.key_of("medusa")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = processes.command_line(
        __doc__, "out/medusa.jsonl", 600.0, "layers set dtype device", batch=1, steps=5
    )
    add = parser.add_argument
    add("--model", default="llama3-8b", choices=tuple(e2e.MODELS))
    add("--heads", default="3,5")
    add("--stages", default="1,2")
    add("--lengths", default="1024,2048,4096,8192,16384,32768", help="tokens of a row")
    add("--providers", default=",".join(PROVIDERS))
    args = parser.parse_args(arguments)
    processes.split(args, providers=PROVIDERS)
    return args


def cases(args: argparse.Namespace) -> list[dict]:
    """Every case, providers of one setting one after the other."""
    changes = e2e.pairs(args.set, json.loads)
    shared = {name: getattr(args, name) for name in ("model", "layers", "batch", "dtype", "device", "steps")}
    return [
        {**shared, "changes": changes, "stage": stage, "heads": heads, "seq": seq, "provider": provider}
        for stage in map(int, args.stages.split(","))
        for heads in map(int, args.heads.split(","))
        for seq in map(int, args.lengths.split(","))
        for provider in args.providers
    ]


def head_by_head(cross_entropy):
    """The loss of all heads, each from `cross_entropy(hidden states, weight, labels)`."""

    def loss_of(model, heads, hidden, labels, joint):
        made = [([], model.lm_head.weight)] if joint else []
        made += [(list(head)[:-1], head[-1].weight) for head in heads]
        total, first, scale = 0.0, 0 if joint else 1, SCALE if joint else 1.0
        for i, (blocks, weight) in enumerate(made, start=first):
            states = hidden[:, : -(i + 1)]
            for block in blocks:
                states = block(states)
            loss = cross_entropy(states.flatten(0, 1), weight, labels[:, i + 1 :].flatten())
            total = total + loss * (scale * DECAY**i if i else 1.0)
        return total

    return loss_of


def loss_of_provider(provider: str):
    """``(model, heads, hidden, labels, joint) -> loss``."""
    if provider.startswith("tigon"):
        cap = {"max_workspace_mb": SMALL_MB} if provider == "tigon_small" else {}

        def loss_of(model, heads, hidden, labels, joint):
            model_operands = {"head": model.lm_head, "scale": SCALE} if joint else {}
            return heads(hidden, labels, decay=DECAY, **model_operands, **cap).loss

        return loss_of
    if provider.startswith("liger"):
        import torch
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss(
            accum_dtype=torch.float32 if provider == "liger_fp32" else None
        )
        return head_by_head(lambda states, weight, labels: fused(weight, states, labels))
    import torch.nn.functional as F

    return head_by_head(lambda states, weight, labels: F.cross_entropy((states @ weight.t()).float(), labels))


def run_case(case: dict) -> dict:
    import torch

    import tigon

    joint = case["stage"] == 2
    model = e2e.build({**case, "checkpointing": joint})
    e2e.patch(model, case["provider"].split("_")[0])
    model.requires_grad_(joint)
    vocab, size = model.lm_head.weight.shape
    to = {"device": case["device"], "dtype": model.dtype}
    heads = tigon.nn.MedusaHeads(size, vocab, case["heads"], 1, **to).copy_head(model.lm_head.weight)
    loss_of = loss_of_provider(case["provider"])
    trained = [p for module in (model, heads) for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def draw(generator) -> dict:
        return {"ids": torch.randint(0, vocab, (case["batch"], case["seq"]), generator=generator)}

    def step(data: dict) -> float:
        ids = data["ids"]
        with torch.set_grad_enabled(joint):
            hidden = model.model(input_ids=ids).last_hidden_state
        loss = loss_of(model, heads, hidden, ids, joint)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for the device

    return {**e2e.timed(case, draw, step, WARMUP), **e2e.versions(case)}


def prepare(case: dict) -> None:
    """Import what takes long."""
    e2e.build({**case, "device": "meta", "checkpointing": False})
    loss_of_provider(case["provider"])
    importlib.import_module("tigon")


def work(record: dict, config: dict) -> dict:
    """The operations that the heads add; a frozen model runs forward alone and has no head of its own."""
    block, head = config["hidden_size"] ** 2, config["vocab_size"] * config["hidden_size"]
    if record["stage"] == 2:
        return {"others": 6 * record["heads"] * (block + head)}
    return {"passes": (1, 1), "head": 0.0, "others": record["heads"] * (4 * block + 6 * head)}


def table(records: list[dict]) -> str:
    def setting(r: dict) -> tuple[str, str]:
        layers = f", {r['layers']} layers" if r["layers"] else ""
        changed = "".join(f", {name}={value}" for name, value in r["changes"].items())
        name = f"{r['model']}{layers}{changed}, {r['dtype']}, stage {r['stage']}, {r['heads']} heads"
        return name, f"{r['batch']} x {r['seq']}"

    order = sorted(records, key=lambda r: (r["model"], r["layers"] or 0, r["stage"], r["heads"], r["seq"]))
    providers = [name for name in PROVIDERS if any(r["provider"] == name for r in records)]
    fields = {"tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}", "GB": lambda r: f"{r['peak_gb']:.1f}"}
    more = {"MFU of tigon": lambda row: _mfu(row.get("tigon"))}
    more |= {f"speed to {name}": ratio(name, lambda r: r["tokens_per_s"]) for name in ("stock", "liger")}
    return by_field(("model", "batch x tokens"), by_provider(order, setting), providers, fields, more)


def _mfu(record: dict | None) -> str:
    config = e2e.config_of(record)
    return e2e.mfu.text(record, config, **(work(record, config) if record else {}))


def main(arguments: list[str] | None = None) -> int:
    return processes.main_of_cases(__file__, arguments, parse, cases, key, prepare, run_case, table)


if __name__ == "__main__":
    sys.exit(main())
