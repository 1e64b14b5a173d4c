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
# # Distil a teacher
#
# A small student learns from a larger teacher: from its whole distribution over the next token, not only
# from the token that follows in the text. The divergence of the two takes two sets of logits as large as
# the vocabulary. `tigon.linear_jsd` takes the hidden states and the weights of both heads instead, and
# never forms the logits of more than a chunk of tokens.
#
# Everything is small and runs on a CPU in seconds: the text is Python's own source code, and tokens are
# bytes.

# %%
import argparse
import copy
import inspect
import textwrap
import typing

import torch
from matplotlib import pyplot as plt
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import tigon

torch.manual_seed(0)
STEPS, BATCH, LENGTH = 150, 8, 128

# %% [markdown]
# ## Text and models

# %%
sources = "".join(inspect.getsource(module) for module in (argparse, inspect, textwrap, typing))
text = torch.tensor(list(sources.encode()))
held_out, text = text[-4096:].view(-1, LENGTH), text[:-4096]


def batches(seed: int, name: str):
    """Random pieces of the text, with a progress bar."""
    generator = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(STEPS), desc=name):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(LENGTH)]


def llama(hidden_size: int, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).train()


teacher, student = llama(128, 2), llama(48, 1)
for model in (teacher, student):
    tigon.apply(model)
from_labels = copy.deepcopy(student)  # learns without the teacher, for the comparison
print(f"{teacher.num_parameters():,} parameters teach {student.num_parameters():,}")

# %% [markdown]
# ## The teacher
#
# It learns from the text, with the loss of the patched model.


# %%
def learn(model, loss_of, name: str, seed: int, look=None) -> list[float]:
    """Train; every tenth step, what `look` sees in the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seen = []
    for step, ids in enumerate(batches(seed, name)):
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if look and step % 10 == 9:
            with torch.no_grad():
                seen.append(look(model).item())
    return seen


def of_text(model, ids) -> torch.Tensor:
    return model(ids, labels=ids).loss


learn(teacher, of_text, "teacher", seed=1)
teacher.eval().requires_grad_(False)

# %% [markdown]
# ## The student
#
# `linear_jsd` compares the distributions of both heads token by token. The hidden states may have different
# sizes. `hard` adds the cross-entropy of the labels from the same pass, and `temperature` softens both
# distributions. The divergence is not multiplied by the temperature's square: `soft` is the place for such
# a factor. With `beta=0` it is `KL(teacher || student)`.


# %%
def heads(model, ids) -> tuple:
    """What the divergences take: the student's hidden states and head, and the teacher's."""
    hidden = model.model(ids).last_hidden_state
    teacher_hidden = teacher.model(ids).last_hidden_state
    return hidden, model.lm_head.weight, (teacher_hidden, teacher.lm_head.weight), ids


def distilled(model, ids) -> torch.Tensor:
    return tigon.linear_jsd(*heads(model, ids), beta=0.0, soft=4.0, hard=0.5, temperature=2.0, shift=True)


def distance(model) -> torch.Tensor:
    """Divergence from the teacher on text that neither has seen."""
    return tigon.linear_kl_div(*heads(model, held_out), shift=True)


curve = learn(student, distilled, "student of the teacher", seed=2, look=distance)
plain = learn(from_labels, of_text, "student of the text", seed=2, look=distance)

# %%
figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
steps = range(10, STEPS + 1, 10)
axis.plot(steps, plain, color="#8a8f98", label="student of the text")
axis.plot(steps, curve, color="#e8710a", label="student of the teacher and the text")
axis.set(xlabel="step", ylabel="KL(teacher || student) on unseen text", ylim=(0, None))
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
figure.savefig("distil.png", dpi=120)
plt.show()

# %% [markdown]
# ## What it saves
#
# At this size nothing. For a real vocabulary the prediction is one call. The plain formulation holds the
# logits of both sides and several tensors of that size in float32.

# %%
need = tigon.linear_divergence_memory(8192, 4096, 128_256, torch.bfloat16)
logits = 8192 * 128_256 * 4
print(f"logits of both sides: {2 * logits / 2**30:.1f} GiB")
print(f"linear_jsd, gradients included: {need.peak / 2**30:.1f} GiB")

# %% [markdown]
# A teacher behind a server may give only its K best tokens: `teacher=(indices, log_prob)`. See [two
# heads](../../docs/loss-head.md#two-heads-distillation), and [TRL](../../docs/trl.md) for its distillation
# trainer.
