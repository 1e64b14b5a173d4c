"""Training steps of TRL's own trainers: TRL as it is, with its option of Liger's layers, with Tigon.

    python bench/trl_trainers.py                                 every trainer, 4 layers of Llama 3.2 1B
    python bench/trl_trainers.py --trainers dpo,dpo_lora --batch 16 --seq 2048
    python bench/trl_trainers.py --table out/trl_trainers.jsonl   the table of an earlier run

`trl`: the trainer's defaults, whose losses come from TRL's own chunked heads. `liger`: the same with
use_liger_kernel=True, TRL's option that replaces layers (it leaves the heads). `tigon`:
`tigon.compat.trl.install()` and `tigon.apply` (the callback); GKD, whose trainer forms whole logits, on the
class of examples/trl_heads.py. Random weights, random tokens, rows of --seq tokens without padding, of which
--prompt are a prompt; for preferences --batch counts answers. GRPO and Distillation draw their completions
instead of generating them; everything else of a step is the trainer's: inputs, loss, metrics, backward,
clipping, fused AdamW. Losses of preferences and policies say little here, so the table compares norms of
gradients. A step is timed between the trainer's callbacks at its begin and end. Peak memory is
that of torch's allocator, model, reference or teacher and optimizer included. Every case runs in a process of
its own; its record (or its error) is appended to --out when it ends.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time

import e2e
import processes
import store
from tables import by_field, by_provider, distance, ratio

sys.path.append(str(e2e.ROOT / "examples"))  # trl_heads

PROVIDERS = ("trl", "liger", "tigon")
# Trainer, module, what its configuration gets besides, the speed to reach over TRL's own head.
TRAINERS = {
    "sft": ("SFT", "trl", {}),
    "sft_lora": ("SFT", "trl", {}),
    "dpo": ("DPO", "trl", {}),
    "dpo_lora": ("DPO", "trl", {}),
    "kto": ("KTO", "trl", {}),
    "grpo": ("GRPO", "trl", {}),
    "distillation_kl": ("Distillation", "trl", {"beta": 1.0}),
    "distillation_jsd": ("Distillation", "trl", {"beta": 0.5}),
    "gkd": ("GKD", "trl.experimental.gkd", {"lmbda": 0.0, "beta": 0.5}),
}
# Passes over a model's matmuls and over its attention (bench/mfu.py): three of a policy, two of matmuls
# frozen under LoRA, one of a reference or a teacher; KTO runs both forward over rows of its KL term too.
PASSES = {"sft": (3, 3), "sft_lora": (2, 3), "dpo_lora": (3, 4), "kto": (6, 6), "grpo": (3, 3)}
WARMUP = 2
SPECIAL = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}  # ids 0, 1, 2
SHARED = ("model", "layers", "batch", "seq", "prompt", "checkpointing", "dtype", "device", "steps")
key = store.key_of("trl_trainers")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = processes.command_line(
        __doc__, "out/trl_trainers.jsonl", 300.0, "set dtype device", layers=4, batch=8, seq=1024, steps=8
    )
    add = parser.add_argument
    add("--trainers", default=",".join(TRAINERS))
    add("--providers", default=",".join(PROVIDERS))
    add("--model", default="llama3.2-1b", choices=tuple(e2e.MODELS))
    add("--prompt", type=int, default=128, help="of these the prompt's")
    add("--checkpointing", type=int, default=1, choices=(0, 1), help="gradient checkpointing (TRL's default)")
    args = parser.parse_args(arguments)
    processes.split(args, trainers=TRAINERS, providers=PROVIDERS)
    if args.batch % 2 or not 2 <= args.prompt <= args.seq - 2:
        raise SystemExit(
            f"--batch must be even and --prompt from 2 to --seq - 2, got {args.batch}, {args.prompt}"
        )
    return args


def cases(args: argparse.Namespace) -> list[dict]:
    """Every case, providers of one setting one after the other."""
    shared = {name: getattr(args, name) for name in SHARED}
    shared["changes"] = e2e.pairs(args.set, json.loads)
    return [
        {"trainer": trainer, **shared, "provider": provider}
        for trainer in args.trainers
        for provider in args.providers
    ]


# --- what a trainer is given ------------------------------------------------------------------


class Tokens:
    """Random tokens as the text that the tokenizer turns back into them."""

    def __init__(self, case: dict, vocabulary: int):
        import torch

        self.case, self.vocabulary = case, vocabulary
        self.generator = torch.Generator().manual_seed(1)

    def ids(self, length: int) -> list[int]:
        """Tokens that end no answer."""
        import torch

        return torch.randint(len(SPECIAL), self.vocabulary, (length,), generator=self.generator).tolist()

    def text(self, length: int) -> str:
        """The same as words, each after a blank."""
        return "".join(f" {i}" for i in self.ids(length))

    def prompt(self) -> str:
        return self.text(self.case["prompt"])

    def answer(self) -> str:
        """The rest of a row, less the end that the trainer appends."""
        return self.text(self.case["seq"] - self.case["prompt"] - 1)

    def rows(self) -> dict[str, list]:
        """The columns of the data, as much as the steps need."""
        kind, steps = TRAINERS[self.case["trainer"]][0], WARMUP + self.case["steps"]
        count = range(steps * self.case["batch"])
        pairs = range(len(count) // 2)
        if kind == "SFT":
            return {"text": [self.text(self.case["seq"] - 1) for _ in count]}
        if kind == "DPO":
            names = {"prompt": self.prompt, "chosen": self.answer, "rejected": self.answer}
            return {name: [draw() for _ in pairs] for name, draw in names.items()}
        if kind == "KTO":
            columns = {"prompt": [self.prompt() for _ in count], "completion": [self.answer() for _ in count]}
            return {**columns, "label": [i % 2 == 0 for i in count]}
        if kind == "GKD":
            ids = [self.ids(self.case["seq"]) for _ in count]
            hidden = self.case["prompt"]
            return {"input_ids": ids, "labels": [[-100] * hidden + row[hidden:] for row in ids]}
        return {"prompt": [self.prompt() for _ in count]}


def tokenizer(vocabulary: int):
    """Of words that are numbers: the word is the id, but for the first ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL.values(), *map(str, range(len(SPECIAL), vocabulary))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, SPECIAL["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


def stacked(rows: list[dict]) -> dict:
    """GKD's batch of rows of one length."""
    import torch

    columns = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return columns | {"attention_mask": torch.ones_like(columns["input_ids"])}


def reward(completion_ids, **_) -> list[float]:
    """GRPO's: some number that tells answers apart."""
    return [float(sum(ids[:8])) for ids in completion_ids]


def without_generation(kind: type, draw, log_probs: bool) -> type:
    """The trainer with drawn completions; GRPO's method returns the sampler's log-probabilities too."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        completions = [draw() for _ in prompt_ids]
        return (completions, None) if log_probs else completions

    return type(kind.__name__, (kind,), {"_generate_single_turn": _generate_single_turn})


def make_trainer(case: dict, folder: str, callbacks: list):
    """The trainer of a case, ready to train."""
    import torch
    from datasets import Dataset

    name, package, options = TRAINERS[case["trainer"]]
    module, tigon_runs = importlib.import_module(package), case["provider"] == "tigon"
    kind = getattr(module, f"{name}Trainer")
    options, given = dict(options), {}
    model = e2e.build({**case, "checkpointing": False})
    tokens = Tokens(case, model.config.vocab_size)
    length = case["seq"] - case["prompt"]
    frozen = None
    if case["trainer"] in ("dpo", "kto", "distillation_kl", "distillation_jsd", "gkd"):
        frozen = e2e.build({**case, "checkpointing": False})
        if name in ("Distillation", "GKD"):  # another function than the student's
            with torch.no_grad():
                for parameter in frozen.parameters():
                    parameter.copy_(parameter.roll(1, 0))
        given["ref_model" if name in ("DPO", "KTO") else "teacher_model"] = frozen
    if tigon_runs:
        import trl_heads

        import tigon
        from tigon.compat import trl

        trl.install()
        callbacks = [*callbacks, tigon.TigonTrainerCallback()]
        if frozen is not None:
            tigon.apply(frozen)
        if name == "GKD":
            kind = trl_heads.trainer("GKD")
    if name in ("GRPO", "Distillation"):
        kind = without_generation(kind, lambda: tokens.ids(length), log_probs=name == "GRPO")
        options["max_completion_length"] = length
    else:
        options["max_length"] = case["seq"]
    if name == "GRPO":
        options["num_generations"] = case["batch"]
        given["reward_funcs"] = reward
    if name == "GKD":
        given["data_collator"] = stacked
    if case["trainer"].endswith("_lora"):
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    config = getattr(module, f"{name}Config")(
        output_dir=folder,
        per_device_train_batch_size=case["batch"] // (2 if name == "DPO" else 1),
        max_steps=WARMUP + case["steps"],
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        bf16=case["dtype"] == "bfloat16",
        use_cpu=not case["device"].startswith("cuda"),
        gradient_checkpointing=bool(case["checkpointing"]),
        use_liger_kernel=case["provider"] == "liger",
        **options,
    )
    return kind(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict(tokens.rows()),
        processing_class=tokenizer(model.config.vocab_size),
        callbacks=callbacks,
        **given,
    )


# --- one case, in its own process -------------------------------------------------------------


def stopwatch(cuda: bool):
    """A callback that times every step, and sets the peak of memory back after those to warm up."""
    import torch
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        seconds: list[float]

        def on_train_begin(self, args, state, control, **_):
            self.seconds = []

        def on_step_begin(self, args, state, control, **_):
            if cuda:
                if len(self.seconds) == WARMUP:
                    torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            if cuda:
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.start)

    return Stopwatch()


def run_case(case: dict) -> dict:
    import torch

    from tigon.ops.loss_head.operands import TrainedCalls  # which TRL's heads are where they are Tigon's

    cuda = case["device"].startswith("cuda")
    watch = stopwatch(cuda)
    with tempfile.TemporaryDirectory() as folder:
        before = TrainedCalls.number
        trainer = make_trainer(case, folder, [watch])
        trainer.train()
    logged = {
        name: [entry[name] for entry in trainer.state.log_history if name in entry]
        for name in ("loss", "grad_norm")
    }
    times = watch.seconds[WARMUP:]
    rate = case["batch"] * case["seq"] / statistics.mean(times)
    return {
        "step_ms": [1e3 * t for t in times],
        "tokens_per_s": rate,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0,
        "losses": logged["loss"],
        "gradient_norms": logged["grad_norm"],
        **({"heads": TrainedCalls.number > before} if case["provider"] == "tigon" else {}),
        **e2e.versions(case, "trl"),
    }


def prepare(case: dict) -> None:
    """Import what takes long."""
    e2e.build({**case, "device": "meta", "checkpointing": False})
    name, package, *_ = TRAINERS[case["trainer"]]
    getattr(importlib.import_module(package), f"{name}Trainer")
    if case["provider"] != "trl":
        importlib.import_module({"tigon": "tigon", "liger": "liger_kernel.transformers"}[case["provider"]])


# --- all cases --------------------------------------------------------------------------------


def setting(record: dict) -> str:
    """The trainer, the model and whatever is not as usual."""
    layers = f"{record['layers']} layers" if record["layers"] else "whole"
    parts = [
        f"{record['trainer']}, {record['model']}",
        layers,
        *(f"{name}={value}" for name, value in record["changes"].items()),
        not record["checkpointing"] and "without checkpointing",
        record["dtype"] == "float32" and "float32",
    ]
    return ", ".join(filter(None, parts))


def settings(records: list[dict]) -> dict[tuple, dict[str, dict]]:
    return by_provider(records, lambda r: (setting(r), f"{r['batch']} x {r['seq']}"))


def _mfu(record: dict | None) -> str:
    if record is None:
        return "-"
    trainer = record["trainer"]
    answers = 1.0 if trainer.startswith("sft") else 1 - record["prompt"] / record["seq"]
    return e2e.mfu.text(record, e2e.config_of(record), passes=PASSES.get(trainer, (4, 4)), head=answers)


def table(records: list[dict]) -> str:
    providers = [name for name in PROVIDERS if any(r["provider"] == name for r in records)]
    fields = {"ms": lambda r: f"{statistics.median(r['step_ms']):.1f}", "GB": lambda r: f"{r['peak_gb']:.2f}"}
    more = {"MFU of tigon": lambda row: _mfu(row.get("tigon"))}
    for other, name in (("trl", "TRL"), ("liger", "TRL with Liger")):
        more[f"speed to {name}"] = ratio(other, lambda r: 1 / statistics.median(r["step_ms"]))
    more["gradient norms from TRL's"] = distance("trl", "gradient_norms")
    return by_field(("trainer", "rows x tokens"), settings(records), providers, fields, more)


def main(arguments: list[str] | None = None) -> int:
    return processes.main_of_cases(__file__, arguments, parse, cases, key, prepare, run_case, table)


if __name__ == "__main__":
    sys.exit(main())
