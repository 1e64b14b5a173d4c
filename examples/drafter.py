"""Drafters of speculative decoding on a tiny model: EAGLE-3 and multi-token prediction.

    python examples/drafter.py
    python examples/drafter.py --loss kl --steps 200

EAGLE-3: one layer reads the teacher's states and the next tokens, has a third of its vocabulary, and
is unrolled for three steps on its own states (training-time test). MTP: one layer with the teacher's own
head, frozen, for the token after the next. Both learn by `tigon.drafter_loss`, without logits, and end with
the share of drafted tokens that the teacher would accept, step by step.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import tigon

VOCABULARY, DRAFT, HIDDEN, STEPS = 384, 128, 64, 3


class Layer(nn.Module):
    """A causal mixer of a state and the next token's embedding; enough to be trained."""

    def __init__(self, inputs):
        super().__init__()
        self.mix = nn.GRU(inputs, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.out(self.mix(x)[0])


class Drafter(nn.Module):
    """A layer over the teacher's states and embeddings, unrolled over its own states."""

    def __init__(self, teacher):
        super().__init__()
        self.layer, self.embedding = Layer(2 * HIDDEN), teacher["embedding"]

    def forward(self, states, tokens, steps):
        """The hidden states of each step; step k at position t drafts token t + 2 + k."""
        found = []
        for _ in range(steps):
            tokens = F.pad(tokens[:, 1:], (0, 1))
            states = states + self.layer(torch.cat((states, self.embedding(tokens)), -1))
            found.append(states)
        return found


def make_teacher():
    """A model whose next token depends on the two before it; it is not trained further."""
    teacher = nn.ModuleDict(
        {
            "embedding": nn.Embedding(VOCABULARY, HIDDEN),
            "layer": Layer(HIDDEN),
            "head": nn.Linear(HIDDEN, VOCABULARY, bias=False),
        }
    )
    with torch.no_grad():
        frequent = -torch.arange(VOCABULARY).add(1).log()  # few tokens are most of the text
        teacher["head"].weight.mul_(8.0).add_(frequent[:, None] / HIDDEN)
    return teacher.requires_grad_(False)


def text(teacher, rows, length):
    """Tokens that the teacher samples, and its states."""
    tokens = torch.randint(VOCABULARY, (rows, 1))
    for _ in range(length - 1):
        logits = teacher["head"](teacher["layer"](teacher["embedding"](tokens))[:, -1])
        tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1)), 1)
    return tokens, teacher["layer"](teacher["embedding"](tokens))


def train(name, drafter, weight, loss_of, batches, lr=3e-3):
    """Minimise loss_of(states, tokens), and report."""
    optimizer = torch.optim.AdamW([p for p in (*drafter.parameters(), weight) if p.requires_grad], lr=lr)
    first = last = None
    for tokens, states in batches:
        out = loss_of(states, tokens)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = (float(out.loss.detach()), [round(float(a), 3) for a in out.acceptance])
        first = first or last
    print(f"{name}: loss {first[0]:.3f} -> {last[0]:.3f}, accepted by step {first[1]} -> {last[1]}")
    return first, last


def main():
    """Train both drafters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", default="lk", choices=("ce", "kl", "hard", "tv", "lk"))
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    teacher = make_teacher()
    batches = [text(teacher, 16, 24) for _ in range(10)] * (args.steps // 10)
    head = teacher["head"].weight

    # EAGLE-3: the draft's vocabulary is the tokens that the text has most often.
    counts = torch.cat([tokens.flatten() for tokens, _ in batches]).bincount(minlength=VOCABULARY)
    draft_ids = counts.topk(DRAFT).indices.sort().values
    drafter, weight = Drafter(teacher), nn.Parameter(head[draft_ids].clone())

    def eagle(states, tokens):
        steps = drafter(states, tokens, STEPS)
        return tigon.drafter_loss(
            steps,
            weight,
            (states, head),
            draft_ids,
            loss=args.loss,
            shifts=range(1, STEPS + 1),
            step_weights=[0.8**k for k in range(STEPS)],
            outputs=("loss", "acceptance"),
        )

    found = [train("EAGLE-3", drafter, weight, eagle, batches)]

    # Multi-token prediction: one step more, through the teacher's own head.
    predictor = Drafter(teacher)

    def mtp(states, tokens):
        return tigon.drafter_loss(
            predictor(states, tokens, 1),
            head,
            (states, head),
            loss=args.loss,
            shifts=[1],
            outputs=("loss", "acceptance"),
        )

    found.append(train("MTP", predictor, head, mtp, batches))
    return found


if __name__ == "__main__":
    main()
