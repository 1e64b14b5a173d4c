"""Losses of sentence-transformers after install(): stock's values and gradients."""

from __future__ import annotations

import logging

import pytest
import torch

st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
losses = pytest.importorskip(
    "sentence_transformers.sentence_transformer.losses", reason="needs its version 6"
)

import tigon
from tigon.integrations import sentence_transformers as integration

MODEL = torch.nn.Sequential(torch.nn.Identity())  # the losses are given embeddings


@pytest.fixture
def installed():
    integration.install()
    yield
    integration.uninstall()


@pytest.fixture
def calls(monkeypatch):
    """The options of calls of tigon.contrastive_loss."""
    found, original = [], tigon.contrastive_loss

    def counted(*args, **options):
        found.append(options)
        return original(*args, **options)

    monkeypatch.setattr(tigon, "contrastive_loss", counted)
    return found


def columns(count, n=13, size=24):
    generator = torch.Generator().manual_seed(count)
    anchor = torch.randn(n, size, generator=generator)
    others = [anchor + torch.randn(n, size, generator=generator) for _ in range(count - 1)]
    return [x.requires_grad_() for x in (anchor, *others)]


def step(loss, leaves):
    value = loss.compute_loss_from_embeddings(leaves, None)
    return value.detach(), torch.autograd.grad(value, leaves)


def cached_step(loss, leaves, rows=5):
    reps = [[part.detach().requires_grad_() for part in x.split(rows)] for x in leaves]
    value = loss.calculate_loss(reps, None, with_backward=True)
    assert not value.requires_grad
    return value, [torch.cat([part.grad for part in parts]) for parts in reps]


FORMS = {
    "pairs": ("MultipleNegativesRankingLoss", 2, {}),
    "negatives": ("MultipleNegativesRankingLoss", 4, {"scale": 30.0}),
    "dots": ("MultipleNegativesRankingLoss", 3, {"scale": 0.1, "similarity_fct": st.util.dot_score}),
    "both": ("MultipleNegativesSymmetricRankingLoss", 2, {}),
    "both_negatives": ("MultipleNegativesSymmetricRankingLoss", 3, {}),
    "cached": ("CachedMultipleNegativesRankingLoss", 3, {"mini_batch_size": 5}),
    "cached_both": ("CachedMultipleNegativesSymmetricRankingLoss", 2, {"mini_batch_size": 5}),
}


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_stocks(form, calls):
    name, count, options = FORMS[form]
    loss, leaves = getattr(losses, name)(MODEL, **options), columns(count)
    run = cached_step if name.startswith("Cached") else step
    want = run(loss, leaves)
    assert not calls
    integration.install()
    integration.install()  # again: nothing happens
    try:
        got = run(loss, leaves)
        assert len(calls) == 1
    finally:
        integration.uninstall()
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert torch.equal(run(loss, leaves)[0], want[0]) and len(calls) == 1


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"directions": ("query_to_doc", "doc_to_query")}, "joint"),
        ({"directions": ("query_to_doc", "query_to_query")}, "directions"),
        ({"hardness_mode": "all_negatives", "hardness_strength": 2.0}, "hardness_mode"),
        ({"similarity_fct": st.util.euclidean_sim}, "similarity_fct"),
    ],
)
def test_the_rest_stays_stocks_and_says_so(options, reason, installed, calls, caplog, monkeypatch):
    monkeypatch.setattr(integration, "_said", set())
    loss, leaves = losses.MultipleNegativesRankingLoss(MODEL, **options), columns(2)
    with caplog.at_level(logging.WARNING, logger="tigon"):
        got = step(loss, leaves), step(loss, leaves)
    integration.uninstall()
    assert torch.equal(got[0][0], step(loss, leaves)[0]) and not calls
    assert [reason in r.getMessage() for r in caplog.records] == [True]


def test_another_signature_is_refused(monkeypatch):
    monkeypatch.setattr(
        losses.MultipleNegativesRankingLoss, "compute_loss_from_embeddings", lambda self, x: x
    )
    with pytest.raises(tigon.Error, match="compute_loss_from_embeddings must take"):
        integration.install()


def test_a_version_without_these_losses_is_refused(monkeypatch):
    monkeypatch.setattr(integration, "LOSSES", "sentence_transformers.nowhere")
    with pytest.raises(tigon.Error, match=r"must be version 6.2, got No module named .*nowhere"):
        integration.install()
