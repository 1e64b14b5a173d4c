"""Steps that wait for the host, side by side: eager, as CUDA graphs, compiled; in a loop, in Trainer, in TRL.

    python bench/small_steps.py                                   every case, one GPU of 80 GB
    python bench/small_steps.py --under loop --steps 20           forward, backward and optimizer of one batch
    python bench/small_steps.py --cases qwen3-0.6b:2x512 --ways tigon_graphs,stock
    python bench/small_steps.py --table out/small_steps.jsonl     the table of an earlier run

Ways of a loop: `stock`, `liger` and `tigon` eagerly, `tigon_graphs` by tigon.apply(graphs=True),
`stock_compiled` under torch.compile(mode="reduce-overhead"). The eager ones are captured by hand after that:
forward and backward as one graph without a mask in attention, which a capture would build in full; a capture
that fails is the result. In Trainer: rows of 0.4 to 1 times the tokens, drawn, padded to the longest of each
batch. In TRL: SFTTrainer as trl/scripts/sft.py runs it with LoRA (packed rows, float32 under bf16 autocast,
checkpointing, 8 steps of accumulation) on Python's standard library, `stock` as TRL is, `liger` with
use_liger_kernel. Random weights of the published configurations, bfloat16, fused AdamW.
Milliseconds are medians of wall times after the device is done; memory is what PyTorch took of the device in
the whole life of a case's process, by its own settings.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import tempfile
import time

import e2e
import processes
import store
from tables import Row, by_field, by_provider

sys.path.append(str(e2e.ROOT / "examples"))  # sft_data

ROW = ("model", "layers", "rank", "batch", "seq")
CASES = {  # model, layers (None: as published), rank of LoRA (0: none), rows, tokens
    "qwen3-0.6b:2x512": ("qwen3-0.6b", None, 0, 2, 512),
    "llama3.2-1b:2x512": ("llama3.2-1b", None, 0, 2, 512),
    "lora:1x1024": ("llama3-8b", 8, 16, 1, 1024),
    "qwen3-0.6b:16x512": ("qwen3-0.6b", None, 0, 16, 512),
    "lora:4x2048": ("llama3-8b", 8, 16, 4, 2048),
}
SFT = ("qwen3-0.6b", None, 32, 2, 1024)
WAYS = {
    "loop": ("tigon", "tigon_graphs", "stock", "liger", "stock_compiled"),
    "trainer": ("tigon", "tigon_graphs", "stock", "liger"),
    "trl": ("tigon", "tigon_graphs", "stock", "liger"),
}
WARMUP = {"loop": 5, "trainer": 16, "trl": 2}
key = store.key_of("small_steps")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = processes.command_line(__doc__, "out/small_steps.jsonl", 120.0, "set dtype device")
    add = parser.add_argument
    add("--under", default=",".join(WAYS))
    add("--cases", default=",".join(CASES))
    add("--ways", default=",".join(WAYS["loop"]))
    add("--steps", type=int, default=10, help="measured steps, in Trainer twice as many, in TRL half of it")
    args = parser.parse_args(arguments)
    processes.split(args, under=WAYS, cases=CASES, ways=WAYS["loop"])
    return args


def cases(args: argparse.Namespace) -> list[dict]:
    """Every case: row by row, the ways of one setting one after the other."""
    shared = {"changes": e2e.pairs(args.set, json.loads), "dtype": args.dtype, "device": args.device}
    steps = {"loop": args.steps, "trainer": 2 * args.steps, "trl": -(-args.steps // 2)}
    settings = [(under, CASES[name]) for name in args.cases for under in args.under if under != "trl"]
    settings += [("trl", SFT)] * ("trl" in args.under)
    return [
        {"under": under, **dict(zip(ROW, row, strict=True)), **shared, "way": way, "steps": steps[under]}
        | {"provider": way, "checkpointing": False}
        for under, row in settings
        for way in args.ways
        if way in WAYS[under]
    ]


# --- one case, in its own process -------------------------------------------------------------


def patched(case: dict, model):
    """The model with adapters and what its way puts in; Tigon's callback does this in Trainer."""
    if case["way"] == "liger":
        e2e.patch(model, "liger")
    if case["rank"]:
        from peft import LoraConfig, get_peft_model

        options = {"r": case["rank"], "lora_alpha": 2 * case["rank"], "target_modules": "all-linear"}
        model = get_peft_model(model, LoraConfig(**options))
    if case["way"].startswith("tigon") and case["under"] == "loop":
        e2e.patch(model, "tigon", graphs=case["way"] == "tigon_graphs")
    return model.train()


def now(case: dict) -> float:
    """Seconds, when the device is done."""
    import torch

    if case["device"].startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def loop(case: dict) -> dict:
    """Forward and backward, and with the optimizer's step, of one batch after the other."""
    import torch

    model = patched(case, e2e.build(case))
    call = torch.compile(model, mode="reduce-overhead") if case["way"] == "stock_compiled" else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.get_text_config().vocab_size
    halves, steps, losses = [], [], []
    for _ in range(WARMUP["loop"] + case["steps"]):
        ids = torch.randint(vocabulary, (case["batch"], case["seq"]), generator=generator).to(case["device"])
        torch.compiler.cudagraph_mark_step_begin()
        start = now(case)
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        half = now(case)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(1e3 * (now(case) - start))
        halves.append(1e3 * (half - start))
        losses.append(loss.item())
        del loss
    found = {"step_ms": steps[WARMUP["loop"] :], "passes_ms": halves[WARMUP["loop"] :], "losses": losses}
    found |= memory(case)
    if case["device"].startswith("cuda") and case["way"] in ("tigon", "stock", "liger"):
        try:
            found["by_hand_ms"] = by_hand(case, model, {"input_ids": ids, "labels": ids})
        except Exception as error:
            found["by_hand_error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return found


def by_hand(case: dict, model, data: dict) -> list[float]:
    """Milliseconds of forward and backward as one graph that the program captures itself."""
    import torch
    from transformers import masking_utils

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with contextlib.ExitStack() as stack:
        for name, answer in (("find_packed_sequence_indices", None), ("is_tracing", False)):
            stack.callback(setattr, masking_utils, name, getattr(masking_utils, name))
            setattr(masking_utils, name, lambda *_, answer=answer: answer)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(**data).loss.backward()
                model.zero_grad()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            model(**data).loss.backward()
    times = []
    for _ in range(case["steps"]):
        start = now(case)
        graph.replay()
        times.append(1e3 * (now(case) - start))
    return times


def memory(case: dict) -> dict:
    """Of the device, in the life of the process; and what graphs there are."""
    import torch

    cuda = torch.cuda if case["device"].startswith("cuda") else None
    found: dict = {"reserved_gb": cuda.max_memory_reserved() / 1e9 if cuda else 0.0}
    found["allocated_gb"] = cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    if case["way"] == "tigon_graphs":
        from tigon.graphs import live

        held = [graphs for graphs in live if getattr(graphs, "captures", 0)]
        found["captures"] = sum(graphs.captures for graphs in held)
        found["replays"] = sum(graphs.replays for graphs in held)
        found["capture_s"] = sum(graphs.seconds for graphs in held)
        found["pool_gb"] = sum(graphs.bytes for graphs in held) / 1e9
        found["report"] = [line for graphs in list(live) for line in graphs.lines()]
    return found


def clock(case: dict):
    """A callback that notes the end of each step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        ends: list[float]

        def on_train_begin(self, *_, **__):
            self.ends = []

        def on_step_end(self, *_, **__):
            self.ends.append(now(case))

    return Clock()


def trained(case: dict, trainer, watch) -> dict:
    """What a run of a trainer has shown; a step ends with the next one's data."""
    trainer.train()
    ends = watch.ends[WARMUP[case["under"]] - 1 :]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    times = [1e3 * (after - before) for before, after in zip(ends, ends[1:], strict=False)]
    return {"step_ms": times, "losses": losses, **memory(case)}


class Rows:
    """Random tokens in rows of several lengths; the collator pads them."""

    def __init__(self, case: dict, vocabulary: int):
        import torch

        generator = torch.Generator().manual_seed(1)
        count = case["batch"] * (WARMUP["trainer"] + case["steps"])
        lengths = torch.randint(2 * case["seq"] // 5, case["seq"] + 1, (count,), generator=generator)
        self.rows = [torch.randint(vocabulary, (n,), generator=generator) for n in lengths.tolist()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        return self.rows[index]

    @staticmethod
    def collate(rows: list) -> dict:
        from torch.nn.utils.rnn import pad_sequence

        ids = pad_sequence(rows, batch_first=True, padding_value=-100)
        mask = (ids >= 0).long()
        return {"input_ids": ids.clamp(min=0), "attention_mask": mask, "labels": ids}


def common(case: dict, folder: str) -> dict:
    """Arguments of every trainer."""
    return {
        "output_dir": folder,
        "max_steps": WARMUP[case["under"]] + case["steps"],
        "per_device_train_batch_size": case["batch"],
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": case["dtype"] == "bfloat16",
        "use_cpu": not case["device"].startswith("cuda"),
    }


def callbacks(case: dict) -> list:
    found = [clock(case)]
    if case["way"].startswith("tigon"):
        import tigon

        found.append(tigon.TigonTrainerCallback(graphs=case["way"] == "tigon_graphs"))
    return found


def in_trainer(case: dict) -> dict:
    from transformers import Trainer, TrainingArguments

    model = patched(case, e2e.build(case))
    watch, *others = callbacks(case)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**common(case, folder), learning_rate=1e-5, logging_steps=2),
            train_dataset=Rows(case, model.config.get_text_config().vocab_size),
            data_collator=Rows.collate,
            callbacks=[watch, *others],
        )
        return trained(case, trainer, watch)


def real_text(case: dict) -> tuple:
    """Python's functions as rows of text, and a byte-level BPE of them."""
    import sft_data
    import train_data
    from transformers import PreTrainedTokenizerFast

    texts = train_data.read(train_data.standard_library())
    tokenizer = train_data.train_tokenizer(texts[::8], min(8000, case["changes"].get("vocab_size", 8000)))
    pairs = [pair for text in texts for pair in sft_data.pairs_of(text)]
    wanted = 2 * case["batch"] * (WARMUP["trl"] + case["steps"]) * 8 * case["seq"]  # in tokens
    rows = ["".join(pair) for pair in pairs[:: max(1, len(pairs) * 300 // wanted)]]
    special = {"eos_token": train_data.END, "pad_token": train_data.END}
    return rows, PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def in_trl(case: dict) -> dict:
    """TRL's script with its options for LoRA; the model is made here, the text is on the machine."""
    from datasets import Dataset
    from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

    from tigon.compat import trl

    model = e2e.build({**case, "dtype": "float32"})
    watch, *others = callbacks(case)
    if others:
        trl.install()
    rows, tokenizer = case.pop("text", None) or real_text(case)
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            **common(case, folder),
            learning_rate=2e-4,
            packing=True,
            gradient_accumulation_steps=8,
            max_length=case["seq"],
            logging_steps=1,
            use_liger_kernel=case["way"] == "liger",
        )
        adapters = get_peft_config(ModelConfig(use_peft=True, lora_r=case["rank"], lora_alpha=16))
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_dict({"text": rows}),
            processing_class=tokenizer,
            peft_config=adapters,
            callbacks=[watch, *others],
        )
        return trained(case, trainer, watch)


def run_case(case: dict) -> dict:
    found = {"loop": loop, "trainer": in_trainer, "trl": in_trl}[case["under"]](case)
    return {**found, **e2e.versions(case, "trl", "peft")}


def prepare(case: dict) -> None:
    """Import what takes long."""
    e2e.build({**case, "device": "meta"})
    provider = case["way"].partition("_")[0]
    if provider != "stock":
        importlib.import_module({"tigon": "tigon", "liger": "liger_kernel.transformers"}[provider])
    if case["under"] == "trainer":
        importlib.import_module("transformers.trainer")
    if case["rank"]:
        importlib.import_module("peft")
    if case["under"] == "trl":
        importlib.import_module("trl.trainer.sft_trainer")
        case["text"] = real_text(case)


# --- all cases --------------------------------------------------------------------------------


def setting(record: dict) -> str:
    """The model and whatever is not as usual."""
    parts = [
        record["model"],
        record["layers"] and f"{record['layers']} layers",
        record["rank"] and f"LoRA of rank {record['rank']}",
        {"trainer": "Trainer", "trl": "TRL's SFT"}.get(record["under"]),
        record["dtype"] == "float32" and "float32",
        *(f"{name}={value}" for name, value in record["changes"].items()),
    ]
    return ", ".join(filter(None, parts))


def settings(records: list[dict]) -> dict[tuple, Row]:
    return by_provider(records, lambda r: (setting(r), f"{r['batch']} x {r['seq']}"))


def median(record: dict, name: str = "step_ms") -> float:
    return statistics.median(record[name])


def _by_hand(row: dict[str, dict], way: str) -> str:
    record = row.get(way, {})
    if "by_hand_ms" not in record:
        return "fails" if "by_hand_error" in record else "-"
    return f"{median(record, 'by_hand_ms'):.1f}"


def _over(name: str, other: str):
    """Of `tigon_graphs` over another way."""

    def text(row: Row) -> str:
        two = [row.get(way, {}).get(name) for way in ("tigon_graphs", other)]
        if not all(two):
            return "-"
        values = [statistics.median(v) if isinstance(v, list) else v for v in two]
        return f"{values[0] / values[1]:.2f}" if name == "reserved_gb" else f"{values[1] / values[0]:.2f}x"

    return text


def table(records: list[dict]) -> str:
    ways = [way for way in WAYS["loop"] if any(r["way"] == way for r in records)]
    fields = {
        "ms": lambda r: f"{median(r):.1f}",
        "forward and backward": lambda r: f"{median(r, 'passes_ms'):.1f}" if "passes_ms" in r else "-",
        "GB": lambda r: f"{r['reserved_gb']:.2f}",
    }
    more = {f"{way} by hand": lambda row, way=way: _by_hand(row, way) for way in ("tigon", "stock", "liger")}
    more["memory over eager"] = _over("reserved_gb", "tigon")
    more["captures"] = lambda row: str(row.get("tigon_graphs", {}).get("captures", "-"))
    more["s for each"] = lambda row: (
        f"{r['capture_s'] / r['captures']:.2f}" if (r := row.get("tigon_graphs", {})).get("captures") else "-"
    )
    for other in ("tigon", "liger", "stock"):
        more[f"speed to {other}"] = _over("step_ms", other)
    return by_field(("step", "rows x tokens"), settings(records), ways, fields, more)


def _line(r: dict) -> str:
    name = f"{setting(r)} {r['batch']}x{r['seq']} {r['way']:<14}"
    if "error" in r:
        return f"{name} {r['error'][:200]}"
    parts = [f"{name} {median(r):.1f} ms", f"{r['reserved_gb']:.2f} GB"]
    if "passes_ms" in r:
        parts.append(f"forward and backward {median(r, 'passes_ms'):.1f}")
    if "captures" in r:
        parts.append(f"{r['captures']} captures, {r['capture_s']:.1f} s, {r['pool_gb']:.2f} GB")
    if "by_hand_ms" in r or "by_hand_error" in r:
        parts.append(f"by hand {_by_hand({r['way']: r}, r['way'])} {r.get('by_hand_error', '')[:90]}")
    return ", ".join(parts)


def main(arguments: list[str] | None = None) -> int:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "")  # as programs have it
    program = parse, cases, key, prepare, run_case, table, None, _line
    return processes.main_of_cases(__file__, arguments, *program, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
