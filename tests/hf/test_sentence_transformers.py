"""Losses of sentence-transformers after install(): stock's values and gradients."""

import functools
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
    """What was called in place of matrices of similarities."""
    found = []

    def count(module, name):
        original = getattr(module, name)

        def counted(*args, **options):
            found.append(name)
            return original(*args, **options)

        monkeypatch.setattr(module, name, counted)

    count(tigon, "contrastive_loss")
    count(integration, "statistics")
    return found


def columns(count, n=13, size=24):
    generator = torch.Generator().manual_seed(count)
    anchor = torch.randn(n, size, generator=generator)
    others = [anchor + torch.randn(n, size, generator=generator) for _ in range(count - 1)]
    return [x.requires_grad_() for x in (anchor, *others)]


def step(loss, leaves):
    value = loss.compute_loss_from_embeddings(leaves, None)
    return value.detach(), torch.autograd.grad(value, leaves)


def cached_step(loss, leaves, guide_or_labels=None):
    reps = [[part.detach().requires_grad_() for part in x.split(5)] for x in leaves]
    value = loss.calculate_loss(reps, guide_or_labels, with_backward=True)
    assert not value.requires_grad
    return value, [torch.cat([part.grad for part in parts]) for parts in reps]


def guided(name, **options):
    """A GIST loss without models, which is given embeddings."""
    loss = getattr(losses, name).__new__(getattr(losses, name))
    torch.nn.Module.__init__(loss)
    defaults = {"guide": None, "temperature": 0.05, "margin_strategy": "absolute", "margin": 0.0}
    defaults |= {"contrast_anchors": True, "contrast_positives": True, "gather_across_devices": False}
    defaults |= {"must_retokenize": False, "mini_batch_size": 5, "show_progress_bar": False}
    defaults |= {"similarity_fct": torch.nn.CosineSimilarity(dim=-1)}
    defaults |= {"cross_entropy_loss": torch.nn.CrossEntropyLoss()}
    for key, value in (defaults | options).items():
        setattr(loss, key, value)
    return loss


def guided_step(loss, leaves, guide):
    """Stock's or ours, by the class of the loss."""
    if isinstance(loss, losses.CachedGISTEmbedLoss):
        return cached_step(loss, leaves, [x.split(5) for x in guide])
    loss.model, loss.guide = (Given(x) for x in (leaves, guide))
    value = loss([{"column": i} for i in range(len(leaves))], None)
    return value.detach(), torch.autograd.grad(value, leaves)


def loss_of(name, **options):
    return guided(name, **options) if "GIST" in name else getattr(losses, name)(MODEL, **options)


def step_of(name, guide):
    """How a step of a loss of this name runs; `guide`: the embeddings that GIST losses are given besides."""
    if "GIST" in name:
        return functools.partial(guided_step, guide=guide)
    return cached_step if name.startswith("Cached") else step


class Given(torch.nn.Module):
    """A model whose embeddings are there."""

    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings

    def forward(self, features):
        return {"sentence_embedding": self.embeddings[features["column"]]}


FORMS = {
    "pairs": ("MultipleNegativesRankingLoss", 2, {}),
    "negatives": ("MultipleNegativesRankingLoss", 4, {"scale": 30.0}),
    "dots": ("MultipleNegativesRankingLoss", 3, {"scale": 0.1, "similarity_fct": st.util.dot_score}),
    "both": ("MultipleNegativesSymmetricRankingLoss", 2, {}),
    "both_negatives": ("MultipleNegativesSymmetricRankingLoss", 3, {}),
    "cached": ("CachedMultipleNegativesRankingLoss", 3, {"mini_batch_size": 5}),
    "cached_both": ("CachedMultipleNegativesSymmetricRankingLoss", 2, {"mini_batch_size": 5}),
    "joint": ("MultipleNegativesRankingLoss", 3, {"directions": ("query_to_doc", "doc_to_query")}),
    "among_queries": ("MultipleNegativesRankingLoss", 2, {"directions": ("query_to_doc", "query_to_query")}),
    "among_documents": (
        "CachedMultipleNegativesRankingLoss",
        3,
        {"mini_batch_size": 5, "directions": ("query_to_doc", "doc_to_doc"), "scale": 10.0},
    ),
    "all_directions": (
        "MultipleNegativesRankingLoss",
        4,
        {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), "scale": 5.0},
    ),
    "gist": ("GISTEmbedLoss", 2, {}),
    "gist_negatives": ("GISTEmbedLoss", 3, {"margin": 0.1}),
    "gist_relative": ("GISTEmbedLoss", 3, {"margin": 0.2, "margin_strategy": "relative"}),
    "gist_documents": ("GISTEmbedLoss", 2, {"contrast_anchors": False, "contrast_positives": False}),
    "gist_anchors": ("GISTEmbedLoss", 2, {"contrast_positives": False, "margin": -0.3}),
    "cached_gist": ("CachedGISTEmbedLoss", 4, {"margin": 0.05}),
}


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_stocks(form, calls):
    name, count, options = FORMS[form]
    leaves, guide = columns(count), [x.detach() for x in columns(count + 10, size=17)[:count]]
    guide[1][3] = guide[1][2]  # documents that the guide cannot tell apart
    loss, run = loss_of(name, **options), step_of(name, guide)
    want = run(loss, leaves)
    assert not calls
    integration.install()
    integration.install()  # again: nothing happens
    try:
        got = run(loss, leaves)
        used = len(calls)
        assert used
    finally:
        integration.uninstall()
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-6)
    assert torch.equal(run(loss, leaves)[0], want[0]) and len(calls) == used


def squared_errors(found, exact) -> list[float]:
    """Of a loss and its gradients, in their Euclidean norms."""
    pairs = zip((found[0], *found[1]), (exact[0], *exact[1]), strict=True)
    return [((x.double() - y).norm() / y.norm()).item() ** 2 for x, y in pairs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["pairs", "cached_both", "all_directions", "gist_negatives", "cached_gist"])
def test_errors_are_at_most_twice_stocks(form, dtype):
    name, count, options = FORMS[form]
    loss = loss_of(name, **options)
    squares = []
    for part in range(0, 244, 61):  # of several batches: one number's error may be small by chance
        leaves, guide = (
            [x.detach()[part:][:61] for x in columns(seed, n=244, size=size)[:count]]
            for seed, size in ((count, 48), (count + 10, 17))
        )
        run = step_of(name, guide)
        given = [x.to(dtype).requires_grad_() for x in leaves]
        exact = run(loss, [x.detach().double().requires_grad_() for x in given])
        stock = run(loss, given)
        integration.install()
        ours = run(loss, given)
        integration.uninstall()
        squares.append([squared_errors(found, exact) for found in (ours, stock)])
    ours, stock = torch.tensor(squares).mean(0).sqrt()
    assert (ours <= 2 * stock + torch.finfo(dtype).eps / 4).all(), (ours, stock)


def tiny(folder, words):
    """A sentence encoder of its own vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    )
    torch.manual_seed(len(words))
    options = {"vocab_size": len(vocab), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    options |= {"intermediate_size": 32, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0}
    options |= {"attention_probs_dropout_prob": 0.0}
    config = BertConfig(**options)
    BertModel(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return st.SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("others", [False, True], ids=["tokens", "another_vocabulary"])
def test_a_guide_that_reads_texts(others, tmp_path, installed, calls):
    words = ["a", "b", "c", "d", "e", "f", "g", "h"]
    model = tiny(tmp_path / "model", words)
    guide = tiny(tmp_path / "guide", words[::-1] if others else words)
    loss = losses.GISTEmbedLoss(model, guide)
    assert loss.must_retokenize == others
    texts = [["a b", "c d e", "f"], ["b a g", "e d", "h f"], ["c", "a b", "g g"]]

    def run():
        model.zero_grad()
        value = loss([model.preprocess(column) for column in texts], None)
        value.backward()
        return value.detach(), [x.grad.clone() for x in model.parameters() if x.grad is not None]

    got, used = run(), len(calls)
    integration.uninstall()
    want = run()
    assert used and len(calls) == used
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, reason",
    [
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
