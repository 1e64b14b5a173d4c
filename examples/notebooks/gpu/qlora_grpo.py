# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # QLoRA and GRPO on one GPU
#
# A model in NF4 learns with adapters: first to write the bodies of Python functions (TRL's `SFTTrainer`),
# then from rewards (`GRPOTrainer`). Each run is made without Tigon and with it, and a table shows the time of
# a step and the peak memory. Install what it needs with
# `pip install trl peft bitsandbytes datasets matplotlib`.
#
# Nothing is downloaded: the model has the sizes of Qwen3 0.6B and is trained here for a few seconds, which is
# enough to see losses fall, not to write code. Set `MODEL` to a checkpoint to start from a real one.

# %%
import ast
import gc
import itertools
import random
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from matplotlib import pyplot as plt
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import tigon

MODEL = None  # or "Qwen/Qwen3-0.6B"
NF4 = True  # False: adapters on the model as it is
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
TOKENIZER = 16000  # entries of the tokenizer
FIRST, STEPS, GRPO_STEPS = 150, 30, 12  # of training the model, of SFT, of GRPO
ROWS, ANSWERS, TOKENS = 16, 8, 64  # of a step; of a prompt in GRPO; of an answer in GRPO

# %% [markdown]
# ## The data
#
# Python's own functions: signature and docstring are the prompt, the body is the answer.


# %%
def functions(text: str) -> list[dict]:
    rows, lines = [], text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            body = node.body[1].lineno - 1
            prompt = "".join(lines[node.lineno - 1 : body]).rstrip()
            rows.append({"prompt": prompt, "completion": "\n" + "".join(lines[body : node.end_lineno])})
    return rows


files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
samples = [row for text in texts for row in functions(text)]
random.Random(0).shuffle(samples)
print(f"{len(samples)} functions. The first:\n{samples[0]['prompt']}{samples[0]['completion']}")

# %% [markdown]
# ## The model
#
# `SIZES` are Qwen3 0.6B's, and so is the number of classes, although this tokenizer uses fewer of them.

# %%
torch.manual_seed(0)
folder = tempfile.mkdtemp()
if MODEL is None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    end = tokenizer.eos_token_id
    tokens = list(itertools.chain(*([*ids, end] for ids in tokenizer(texts)["input_ids"])))
    rows = [tokens[start : start + 512] for start in range(0, len(tokens) - 512, 512)]
    config = Qwen3Config(**SIZES, **HEADS, bos_token_id=end, eos_token_id=end, pad_token_id=end)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    arguments = TrainingArguments(
        folder,
        max_steps=FIRST,
        per_device_train_batch_size=ROWS,
        learning_rate=3e-4,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        bf16=torch.cuda.is_available(),
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    callback = tigon.TigonTrainerCallback()
    learned = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[callback],
    )
    learned.train()
    losses = [entry["loss"] for entry in learned.state.log_history if "loss" in entry]
    print(f"{model.num_parameters() / 1e6:.0f} M parameters, loss {losses[0]:.2f} to {losses[-1]:.2f}")
    tigon.undo(model)
    MODEL = folder + "/model"
    model.to(torch.bfloat16).save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)
    tigon.compat.trl.uninstall()  # the callback takes TRL's loss head too
    del learned, model
tokenizer = AutoTokenizer.from_pretrained(MODEL)

# %% [markdown]
# ## What each run shares


# %%
def load():
    gc.collect()
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, quantization_config=nf4 if NF4 else None)


class Clock(TrainerCallback):
    """Seconds at the end of each step."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def run(trainer) -> dict:
    """Time of a step, peak memory and curve of a training."""
    clock = Clock()
    trainer.add_callback(clock)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    steps = [(end - start) * 1e3 for start, end in itertools.pairwise(clock.ends)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    log = trainer.state.log_history
    curves = {name: [entry[name] for entry in log if name in entry] for name in ("loss", "reward")}
    return {"ms": statistics.median(steps), "GiB": peak, **curves}


lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
shared = {
    "output_dir": folder,
    "learning_rate": 5e-4,
    "bf16": torch.cuda.is_available(),
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "seed": 0,
}
found = {}

# %% [markdown]
# ## QLoRA from answers
#
# Prompts are not learned. The run without Tigon comes first: the callback's `apply` also takes TRL's loss
# head, for the whole process.


# %%
def sft(callbacks) -> dict:
    trainer = SFTTrainer(
        load(),
        SFTConfig(**shared, max_steps=STEPS, per_device_train_batch_size=ROWS, max_length=1024),
        train_dataset=Dataset.from_list(samples[: STEPS * ROWS]),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=callbacks,
    )
    return run(trainer)


found["SFT"] = sft([])
callback = tigon.TigonTrainerCallback()
found["SFT with Tigon"] = sft([callback])
callback.report

# %% [markdown]
# ## GRPO from rewards
#
# The reward is how much of an answer's pairs of characters the real body has too. `uninstall()` gives TRL its
# own head back for the first run.


# %%
def likeness(completions, answer, **_) -> list[float]:
    pairs = [
        [{text[i : i + 2] for i in range(len(text) - 1)} for text in row] for row in (completions, answer)
    ]
    return [len(got & real) / max(len(got), 1) for got, real in zip(*pairs, strict=True)]


def grpo(callbacks) -> dict:
    short = [row for row in samples if len(row["prompt"]) < 1000][: GRPO_STEPS * ROWS]
    trainer = GRPOTrainer(
        load(),
        reward_funcs=likeness,
        args=GRPOConfig(
            **shared,
            max_steps=GRPO_STEPS,
            per_device_train_batch_size=ROWS * ANSWERS // 2,
            num_generations=ANSWERS,
            max_completion_length=TOKENS,
        ),
        train_dataset=Dataset.from_list([{"prompt": r["prompt"], "answer": r["completion"]} for r in short]),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=callbacks,
    )
    return run(trainer)


tigon.compat.trl.uninstall()
found["GRPO"] = grpo([])
callback = tigon.TigonTrainerCallback()
found["GRPO with Tigon"] = grpo([callback])
callback.report

# %% [markdown]
# ## What it took
#
# Medians over the steps. Most of a step of GRPO is the generation of its answers, which Tigon leaves as it
# is.

# %%
for name, figures in found.items():
    curve = "reward" if figures["reward"] else "loss"
    line = f"{name:16}{figures['ms']:7.0f} ms a step {figures['GiB']:7.2f} GiB"
    print(f"{line}   {curve} {figures[curve][-1]:.4f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
for axis, kind, curve in zip(axes, ("SFT", "GRPO"), ("loss", "reward"), strict=True):
    axis.plot(found[kind][curve], lw=5, alpha=0.6, color="#8a8f98", label="stock")
    axis.plot(found[f"{kind} with Tigon"][curve], lw=1.6, color="#e8710a", label="Tigon")
    axis.set(xlabel="step", ylabel=curve, title=kind)
    axis.spines[["top", "right"]].set_visible(False)
axes[0].legend(frameon=False)
plt.show()
