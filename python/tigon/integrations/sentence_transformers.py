"""Losses of sentence-transformers with :func:`tigon.contrastive_loss`.

After :func:`install` these compute their loss without the matrix of similarities:
MultipleNegativesRankingLoss, MultipleNegativesSymmetricRankingLoss and GISTEmbedLoss, and the cached forms of
the three, which compute embeddings twice in mini batches as before. Directions among queries and among
documents, one softmax over several directions and embeddings gathered from several processes are supported.
Loss and gradients equal those without Tigon within rounding.

Similarities other than cosine and dot product, and hardness weighting, use the original code. The logger
``tigon`` says so once for each reason.
"""

from __future__ import annotations

import importlib
import itertools
import logging

import torch

import tigon
from tigon.error import refuse
from tigon.integrations import replacing
from tigon.integrations.replacing import ForeignReplacement, parameters_of
from tigon.ops.loss_head.contrastive import guides, limits, normalized, statistics
from tigon.ops.loss_head.operands import autocast

LOSSES = "sentence_transformers.sentence_transformer.losses"
log = logging.getLogger("tigon")
_said: set[str] = set()


def _why_not(loss) -> str:
    """Why a loss uses the original code; empty if Tigon computes it."""
    from sentence_transformers import util

    if hasattr(loss, "guide"):
        cosine = type(loss.similarity_fct) is torch.nn.CosineSimilarity
        return "" if cosine else "similarity_fct is not CosineSimilarity"
    if loss.similarity_fct not in (util.cos_sim, util.dot_score):
        return "similarity_fct is neither cos_sim nor dot_score"
    if loss.hardness_mode is not None and loss.hardness_strength > 0:
        return f"hardness_mode={loss.hardness_mode!r}"
    return ""


def _taken(loss) -> bool:
    """Whether Tigon computes the loss; logs once why not."""
    reason = _why_not(loss)
    if reason and reason not in _said:
        _said.add(reason)
        log.warning("[sentence_transformers] %s stays stock: %s", type(loss).__name__, reason)
    return not reason


class _Batch:
    """The rows of all processes if a loss gathers them, with gradients, and the range of this process."""

    def __init__(self, loss, rows, device):
        from sentence_transformers import util

        first = util.get_rank() * rows if loss.gather_across_devices else 0
        self.own = slice(first, first + rows)
        self.labels = torch.arange(first, first + rows, device=device)[:, None]
        self.whole = util.all_gather_with_grad if loss.gather_across_devices else (lambda x: x)
        self.is_part = loss.gather_across_devices and util.get_world_size() > 1


def _joint(blocks, scale, labels):
    """The mean loss of queries, each with one softmax over all blocks; the first holds the positives."""
    total = picked = None
    for rows, columns, options in blocks:
        lse, _, of_labels = statistics(
            rows, torch.cat(columns), scale, labels if picked is None else None, **options
        )
        total, picked = (lse, of_labels) if picked is None else (torch.logaddexp(total, lse), picked)
    loss = (total - picked[:, 0]).mean()
    return loss.to(torch.promote_types(blocks[0][0].dtype, torch.float32))


def _scale(like, factor):
    return torch.full((1,), factor, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _ranking_loss(loss, queries, documents):
    """The ranking loss of float32 embeddings; the first of the documents are the positives."""
    from sentence_transformers import util

    queries, *documents = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (queries, *documents))
    cosine, directions = loss.similarity_fct is util.cos_sim, set(loss.directions)
    options = {"temperature": 1.0 / loss.scale, "normalize": cosine}
    batch = _Batch(loss, len(queries), queries.device)
    if loss.partition_mode != "joint" and len(directions) > 1:
        if batch.is_part:
            options |= {"group": torch.distributed.group.WORLD, "reduction": "none"}
        return tigon.contrastive_loss(queries, torch.cat(documents), symmetric=True, **options).mean()
    if len(directions) == 1:
        documents = torch.cat([batch.whole(x) for x in documents])
        return tigon.contrastive_loss(queries, documents, batch.labels if batch.is_part else None, **options)
    own = [normalized(x) if cosine else x for x in map(autocast, (queries, *documents))]
    every, *documents = map(batch.whole, own)
    index = torch.arange(len(every), device=every.device)  # of queries: equal pairs are left out
    none = torch.full_like(index, -1)
    among = {
        "query_to_doc": (documents, none),
        "query_to_query": ([every], index),
        "doc_to_query": ([every], none),
        "doc_to_doc": (documents, index),
    }
    blocks = []
    for rows, side in zip(own, ("query", "doc"), strict=False):
        candidates = [among[name] for name in among if name in directions and name.startswith(side + "_to")]
        if candidates:
            columns = [x for parts, _ in candidates for x in parts]
            ids = torch.cat([own_ids for parts, own_ids in candidates for _ in parts])
            blocks.append((rows, columns, {"ids": (index[batch.own], ids)}))
    return _joint(blocks, _scale(every, loss.scale / (every.shape[1] if cosine else 1)), batch.labels)


def _guided_loss(loss, embeddings, guided):
    batch = _Batch(loss, len(embeddings[0]), embeddings[0].device)

    def blocks(anchor, *documents):
        positive, *negatives = map(batch.whole, documents)
        anchors = [anchor] if loss.contrast_anchors else []
        yield anchor, [positive, *anchors, *negatives]
        if loss.contrast_positives:
            yield positive[batch.own], [positive]

    own = list(blocks(*map(normalized, embeddings)))
    theirs = list(blocks(*guides(embeddings[0], *guided)))
    limit = limits(
        theirs[0][0],
        torch.cat(theirs[0][1]),
        batch.labels,
        length=guided[0].shape[1],
        margin=loss.margin,
        relative=loss.margin_strategy == "relative",
    )
    guided = [{"guide": (rows, torch.cat(columns)), "limit": limit} for rows, columns in theirs]
    size = embeddings[0].shape[1]
    blocks = [(*block, options) for block, options in zip(own, guided, strict=True)]
    return _joint(blocks, _scale(own[0][0], 1.0 / (loss.temperature * size)), batch.labels)


def _backward_where(wanted, loss):
    if wanted:
        loss.backward()
    return loss.detach() if wanted else loss


def _compute_loss_from_embeddings(self, embeddings, labels):
    if len(embeddings) < 2 or not _taken(self):
        return _compute_loss_from_embeddings.original(self, embeddings, labels)
    return _ranking_loss(self, embeddings[0], embeddings[1:])


def _calculate_ranking_loss(self, reps, labels=None, *, with_backward=False):
    if not _taken(self):
        return _calculate_ranking_loss.original(self, reps, labels, with_backward=with_backward)
    queries, *documents = map(torch.cat, reps)
    return _backward_where(with_backward, _ranking_loss(self, queries, documents))


def _texts(loss, features):
    """The texts of a model's tokens, tokenized for its guide."""
    from sentence_transformers.util import batch_to_device

    tokens = features["input_ids"]
    if "cu_seq_lens_q" in features:  # one packed row
        ends = features["cu_seq_lens_q"].tolist()
        tokens = [tokens[0, begin:end].tolist() for begin, end in itertools.pairwise(ends)]
    texts = loss.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return batch_to_device(loss.guide.preprocess(texts), loss.guide.device)


def _forward(self, sentence_features, labels):
    from sentence_transformers.base.losses.merged_forward import embed_columns

    features = list(sentence_features)
    if len(features) not in (2, 3) or not _taken(self):
        return _forward.original(self, features, labels)
    theirs = [dict(x) for x in features]  # models write into their inputs
    embeddings = embed_columns(self.model, features)
    with torch.no_grad():
        theirs = [_texts(self, x) for x in features] if self.must_retokenize else theirs
        guided = embed_columns(self.guide, theirs)
    return _guided_loss(self, embeddings, guided)


def _calculate_guided_loss(self, reps, reps_guided, *, with_backward=False):
    if len(reps) != len(reps_guided) or not _taken(self):
        return _calculate_guided_loss.original(self, reps, reps_guided, with_backward=with_backward)
    both = ([torch.cat(x) for x in columns] for columns in (reps, reps_guided))
    return _backward_where(with_backward, _guided_loss(self, *both))


# Class -> method, its parameters, its replacement.
METHODS = {
    "MultipleNegativesRankingLoss": (
        "compute_loss_from_embeddings",
        "self embeddings labels",
        _compute_loss_from_embeddings,
    ),
    "CachedMultipleNegativesRankingLoss": (
        "calculate_loss",
        "self reps labels with_backward",
        _calculate_ranking_loss,
    ),
    "GISTEmbedLoss": ("forward", "self sentence_features labels", _forward),
    "CachedGISTEmbedLoss": ("calculate_loss", "self reps reps_guided with_backward", _calculate_guided_loss),
}


def _replacements() -> list[ForeignReplacement]:
    try:
        losses = importlib.import_module(LOSSES)
    except ImportError as error:
        refuse("sentence_transformers", "sentence-transformers must be version 6.2, got {}", error)
    replacements = []
    for name, (method, wanted, ours) in METHODS.items():
        loss, words = getattr(losses, name), f"{name}.{method} must take {{}} (6.2), got {{}}"
        present = parameters_of(getattr(loss, method, None))
        replacements.append(ForeignReplacement(loss, method, ours, present, wanted.split(), words))
    return replacements


def install() -> None:
    """Make these losses use Tigon in this process; existing loss objects use it too.

    Raises:
        tigon.Error: this sentence-transformers computes them differently from 6.2. Nothing is modified.
    """
    replacing.install("sentence_transformers", _replacements())


def uninstall() -> None:
    """Restore the losses' own methods."""
    replacing.uninstall(_replacements())
