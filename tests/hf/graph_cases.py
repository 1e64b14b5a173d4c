"""Models with and without graphs, side by side."""

import copy

import torch
import torch.nn.functional as F
from tiny import batch, make, own_loss, report_of, same_bits, step

import tigon
from tigon.integrations.transformers import apply, fp8
from tigon.integrations.transformers.graph_arguments import bucket
from tigon.integrations.transformers.graphs import GRAPHS
from tigon.integrations.transformers.patch import unwrapped

TOKENS = 32  # a bucket: nothing is padded


def twins(model, **options):
    """The model patched, without graphs, and a copy with them."""
    apply(model, **options)
    twin = copy.deepcopy(model)
    apply(twin, graphs=True, **options)
    return model, twin


def pair(family="qwen3", **changes):
    """The same patched model, without and with graphs."""
    return twins(make(family, **changes))


def near(got, wanted):
    """Two steps, of rows with and without padding."""
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], wanted[1], rtol=2e-4, atol=2e-5)


def same_steps(models, seeds, tokens=TOKENS, loss_of=own_loss, **changes):
    """Steps of both on the batches of these seeds have the same bits."""
    for seed in seeds:
        same_bits(*(step(m, inputs(seed, tokens, **changes), loss_of, seed) for m in models))


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


def captured_pair(**changes):
    """The same patched model, without and with graphs, of which there is one; and these."""
    model, twin = pair(**changes)
    return model, twin, captured(twin)


def fp8_pair(monkeypatch, **changes):
    """The same model in float8, without and with graphs, each with an optimizer."""
    monkeypatch.setattr(fp8, "gains", lambda rows, columns: True)
    models = twins(make("qwen3", **changes), fp8="rowwise")
    assert report_of(models[1]).count("fp8")
    return [(m, tigon.optim.AdamW(m.parameters(), lr=1e-2)) for m in models]


def fp8_follows_the_optimizer(pairs, batches):
    """A replayed graph reads the bytes of the weights as they are now, and not as they were captured."""
    losses = []
    for given in batches:
        results = [step(model, given) for model, _ in pairs]
        same_bits(results[1], results[0])
        losses.append(results[0][0].item())
        for _, optimizer in pairs:
            optimizer.step()
    assert losses[-1] < losses[0] - 0.1, losses
    assert held(pairs[1][0]).replays >= 3, [*held(pairs[1][0]).lines()]
