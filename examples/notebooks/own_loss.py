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
# # Write your own loss
#
# Many losses need one number for each token: the log-probability that the model gives to it.
# `tigon.linear_log_prob` computes it from hidden states and the head's weight, without the logits, and it
# is differentiable. What you do with it is plain PyTorch. This notebook writes two losses, compares one of
# them with the formula on logits, and trains with both.

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
STEPS, BATCH, LENGTH = 120, 8, 128

# %% [markdown]
# ## A model and text
#
# Tokens are bytes. The head's loss is ours, so `loss=False` leaves the model's own head as it is.

# %%
sources = "".join(inspect.getsource(module) for module in (argparse, inspect, textwrap, typing))
text = torch.tensor(list(sources.encode()))
held_out, text = text[-4096:].view(-1, LENGTH), text[:-4096]
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).train()
tigon.apply(model, loss=False)

# %% [markdown]
# ## The losses
#
# A focal loss counts tokens less that the model already knows. Its weight `(1 - p) ** 2` is part of the
# formula, and so is its gradient. The second loss rewards a high entropy of the model's distribution.


# %%
def focal(log_prob: torch.Tensor) -> torch.Tensor:
    return -((1 - log_prob.exp()) ** 2) * log_prob


def with_entropy(log_prob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    return -log_prob - 0.1 * entropy


# %% [markdown]
# `shift=True` compares each position with the next token, without copying the hidden states. Positions
# without a label get 0 (the last of each row, and labels of -100), so a mean counts the others.


# %%
def focal_loss(model, ids):
    hidden = model.model(ids).last_hidden_state
    log_prob = tigon.linear_log_prob(hidden, model.lm_head.weight, ids, shift=True)
    return focal(log_prob).sum() / ids[:, 1:].numel()


def entropy_loss(model, ids):
    hidden = model.model(ids).last_hidden_state
    log_prob, entropy = tigon.linear_log_prob(hidden, model.lm_head.weight, ids, shift=True, entropy=True)
    return with_entropy(log_prob, entropy).sum() / ids[:, 1:].numel()


# %% [markdown]
# ## The same with logits
#
# The gradients agree to the rounding of float32.


# %%
def focal_of_logits(model, ids):
    logits = model.lm_head(model.model(ids).last_hidden_state)
    log_prob = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    return focal(log_prob).mean()


def gradients(loss_of) -> torch.Tensor:
    model.zero_grad()
    loss_of(model, text[: 4 * LENGTH].view(4, LENGTH)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


ours, plain = gradients(focal_loss), gradients(focal_of_logits)
difference = ((ours - plain).norm() / plain.norm()).item()
print(f"relative difference of all gradients: {difference:.1e}")

# %% [markdown]
# ## One matmul less
#
# A loss on `linear_log_prob` meets its gradient when the logits are gone, so the backward may compute them
# again: four matmuls with the vocabulary. `tigon.linear_loss` takes the formula itself, and forms
# the gradients while a chunk's logits are there: three. The formula must treat each token by itself.


# %%
def focal_in_one(model, ids):
    hidden = model.model(ids).last_hidden_state
    return tigon.linear_loss(hidden, model.lm_head.weight, ids, focal, shift=True)


in_one = gradients(focal_in_one)
print(f"relative difference: {((in_one - plain).norm() / plain.norm()).item():.1e}")

# %% [markdown]
# ## Train with them


# %%
def train(loss_of, name: str) -> list[float]:
    """Every fifth step, the mean probability of the next token in text that the model has not seen."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    means = []
    for step in tqdm(range(STEPS), desc=name):
        ids = text[torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator) + torch.arange(LENGTH)]
        loss_of(trained, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            with torch.no_grad():  # one matmul, and still no logits
                hidden = trained.model(held_out).last_hidden_state
                log_prob = tigon.linear_log_prob(hidden, trained.lm_head.weight, held_out, shift=True)
                means.append(log_prob.exp()[:, :-1].mean().item())
    return means


curves = {
    "cross-entropy": train(lambda model, ids: model(ids, labels=ids).loss, "cross-entropy"),
    "focal": train(focal_in_one, "focal"),
    "with entropy": train(entropy_loss, "with entropy"),
}

# %%
figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
for (name, curve), colour in zip(curves.items(), ("#8a8f98", "#e8710a", "#3b6fb6"), strict=True):
    axis.plot(range(5, STEPS + 1, 5), curve, label=name, color=colour)
axis.set(xlabel="step", ylabel="mean probability of the next token")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
figure.savefig("own_loss.png", dpi=120)
plt.show()

# %% [markdown]
# Losses of whole answers or of pairs take `group=`, see [the recipes](../../docs/loss-head.md#recipes).
# [Which loss?](../../docs/which-loss.md) says which formulas exist already.
