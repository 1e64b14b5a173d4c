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
# A model of 1.5 B parameters in NF4 learns sums with adapters: first from answers (TRL's `SFTTrainer`), then
# from rewards (`GRPOTrainer`). Each run is made without Tigon and with it, and a table shows seconds
# and peak memory. It needs a GPU, a download, and `pip install trl peft bitsandbytes datasets`.
#
# **Not run on a GPU yet.** The tests run its cells on a CPU, with a tiny model that is not quantised.

# %%
import random
import re
import tempfile
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import tigon

MODEL, NF4 = "Qwen/Qwen2.5-1.5B-Instruct", True
STEPS, BATCH, ANSWERS = 60, 16, 4  # ANSWERS: of each prompt in GRPO
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(MODEL)

# %% [markdown]
# ## Model and data


# %%
def load():
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    dtype = torch.bfloat16 if NF4 else torch.float32
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, quantization_config=nf4 if NF4 else None)


random.seed(0)
pairs = [(random.randrange(10), random.randrange(10)) for _ in range(STEPS * BATCH)]
questions = [f"{a} + {b} =" for a, b in pairs]
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
shared = {
    "output_dir": tempfile.mkdtemp(),
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "learning_rate": 2e-4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": NF4,
    "seed": 0,
}


def run(trainer) -> dict:
    """Seconds and peak memory of a training, and its last loss."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else float("nan")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"seconds": time.perf_counter() - start, "GB": peak, "last loss": losses[-1], "losses": losses}


# %% [markdown]
# ## QLoRA from answers
#
# The labels of the prompts are masked. Without Tigon comes first: the callback's `apply` also takes the loss
# head of TRL, for the process.

# %%
answers = Dataset.from_list(
    [{"prompt": q, "completion": f" {a + b}"} for q, (a, b) in zip(questions, pairs, strict=True)]
)


def sft(callbacks) -> dict:
    trainer = SFTTrainer(
        load(),
        SFTConfig(**shared),
        train_dataset=answers,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=callbacks,
    )
    return run(trainer)


found = {"SFT": sft([])}
callback = tigon.TigonTrainerCallback()
found["SFT with Tigon"] = sft([callback])
callback.report

# %% [markdown]
# ## GRPO from rewards
#
# A reward of 1 for the right sum. `tigon.compat.trl.uninstall()` gives TRL its head back for the first run.

# %%
tigon.compat.trl.uninstall()
prompts = Dataset.from_list([{"prompt": q, "sum": a + b} for q, (a, b) in zip(questions, pairs, strict=True)])


def reward(completions, sum, **_) -> list[float]:
    numbers = [re.search(r"\d+", text) for text in completions]
    return [float(n is not None and int(n[0]) == right) for n, right in zip(numbers, sum, strict=True)]


def grpo(callbacks) -> dict:
    trainer = GRPOTrainer(
        load(),
        reward_funcs=reward,
        args=GRPOConfig(**shared, num_generations=ANSWERS, max_completion_length=8),
        train_dataset=prompts,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=callbacks,
    )
    return run(trainer)


found["GRPO"] = grpo([])
callback = tigon.TigonTrainerCallback()
found["GRPO with Tigon"] = grpo([callback])
callback.report

# %% [markdown]
# ## What it took

# %%
for name, figures in found.items():
    print(f"{name:16} {figures['seconds']:8.1f} s {figures['GB']:8.2f} GB   loss {figures['last loss']:.4f}")
