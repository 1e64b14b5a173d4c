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
# # Fine-tune in five minutes
#
# A model learns to answer sums, with Hugging Face's `Trainer` and one callback of Tigon. The same run
# without Tigon follows, and a plot shows both curves. Nothing is downloaded: the model is a small Llama
# with random weights, so that the notebook runs on any CPU in seconds. Set `MODEL` to a checkpoint of
# yours, and the rest stays as it is.

# %%
import copy
import random
import tempfile

import torch
from matplotlib import pyplot as plt
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

import tigon

torch.manual_seed(0)
MODEL = None  # or "meta-llama/Llama-3.2-1B"
STEPS, BATCH = 200, 32

# %% [markdown]
# ## The model
#
# Without a checkpoint, tokens are bytes.

# %%
if MODEL:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
else:
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
stock = copy.deepcopy(model)  # for the comparison below

# %% [markdown]
# ## The data
#
# A sample is a question and its answer. Only the answer is learned: the labels of the question, and of the
# padding, are -100. The patched model counts the others before its layers run, and computes logits only for
# them.


# %%
def sample(a: int, b: int) -> dict:
    question = tokenizer(f"{a} + {b} =", add_special_tokens=False).input_ids
    answer = [*tokenizer(f" {a + b}", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return {"input_ids": question + answer, "labels": [-100] * len(question) + answer}


def collate(samples: list[dict]) -> dict:
    length = max(len(s["input_ids"]) for s in samples)
    fill = {"input_ids": tokenizer.pad_token_id or 0, "labels": -100}
    return {
        name: torch.tensor([s[name] + [value] * (length - len(s[name])) for s in samples])
        for name, value in fill.items()
    }


random.seed(0)
samples = [sample(random.randrange(10), random.randrange(10)) for _ in range(STEPS * BATCH)]
samples[0]

# %% [markdown]
# ## Training
#
# The callback calls `tigon.apply` on the trainer's model. After the first step it checks that the loss
# really came from Tigon. The report says which modules were replaced and which were left.


# %%
def train(model, callbacks) -> list[float]:
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        logging_steps=4,
        logging_strategy="steps",
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    trainer = Trainer(model, arguments, train_dataset=samples, data_collator=collate, callbacks=callbacks)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


callback = tigon.TigonTrainerCallback()
with_tigon = train(model, [callback])
callback.report

# %% [markdown]
# ## The same without Tigon

# %%
without = train(stock, [])

figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
steps = range(4, STEPS + 1, 4)
axis.plot(steps, without, lw=5, alpha=0.6, color="#8a8f98", label="stock")
axis.plot(steps, with_tigon, lw=1.6, color="#e8710a", label="Tigon")
axis.set(xlabel="step", ylabel="loss of the answers", title="Loss with and without Tigon")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
figure.savefig("fine_tune.png", dpi=120)
plt.show()

# %% [markdown]
# ## What it answers
#
# In evaluation the patched model returns ordinary logits, so `generate` works as ever.

# %%
model.eval()
sums = [(a, b) for a in range(10) for b in range(10)]
questions = [tokenizer(f"{a} + {b} =", add_special_tokens=False).input_ids for a, b in sums]
questions = torch.tensor(questions, device=model.device)  # all of one length
answers = model.generate(
    questions, attention_mask=torch.ones_like(questions), max_new_tokens=4, do_sample=False
)
texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
right = sum(text == f"{a} + {b} = {a + b}" for text, (a, b) in zip(texts, sums, strict=True))
print(f"{texts[34]!r}, and {right} of 100 sums are right")

# %% [markdown]
# Next: [what changes and what does not](../../docs/what-changes.md), and the same [with
# TRL](../../docs/trl.md) or [with LoRA](../../docs/lora.md).
