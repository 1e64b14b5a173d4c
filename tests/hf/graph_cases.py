"""Models with and without graphs, side by side."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from tiny import batch, make, step

from tigon.integrations.transformers import apply
from tigon.integrations.transformers.graph_arguments import bucket
from tigon.integrations.transformers.graphs import GRAPHS
from tigon.integrations.transformers.patch import unwrapped

TOKENS = 32  # a bucket: nothing is padded


def pair(family="qwen3", **changes):
    """The same patched model, without and with graphs."""
    model = make(family, **changes)
    apply(model)
    twin = copy.deepcopy(model)
    apply(twin, graphs=True)
    return model, twin


def inputs(seed=0, tokens=TOKENS, padded=False, **changes):
    """A batch; padded: to its bucket, as a graph has it."""
    made = {**batch(tokens=tokens, seed=seed), **changes}
    if padded:
        rest = bucket(tokens) - tokens
        made = {name: F.pad(t, (0, rest), value=-100 * (name == "labels")) for name, t in made.items()}
    return made


def held(model):
    return vars(unwrapped(model))[GRAPHS]


def captured(model, steps=4, **given):
    """Train until the graph is there; returns it."""
    for seed in range(steps):
        step(model, inputs(seed, **given))
    graphs = held(model)
    assert graphs.captures and graphs.replays, [*graphs.lines()]
    return graphs


def equal(got, wanted):
    assert torch.equal(got[0], wanted[0])
    assert got[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert torch.equal(got[1][name], gradient), name
