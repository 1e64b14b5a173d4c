"""Losses of sentence-transformers by :func:`tigon.contrastive_loss`.

After :func:`install` these compute their loss without the matrix of similarities:
MultipleNegativesRankingLoss, MultipleNegativesSymmetricRankingLoss, and the cached forms of both, whose
embeddings are computed twice in mini batches as before. Loss and gradients are stock's within rounding.

Stock's code stays for other similarities than cosine and dot product, for directions among queries or among
documents, for one softmax over several directions, for hardness weighting, and where embeddings are gathered
from several processes. The logger ``tigon`` says so once for each reason. GISTEmbedLoss is untouched.
"""

from __future__ import annotations

import importlib
import inspect
import logging

import torch

import tigon
from tigon.error import check, refuse

LOSSES = "sentence_transformers.sentence_transformer.losses"
METHODS = {  # class -> method, its parameters
    "MultipleNegativesRankingLoss": ("compute_loss_from_embeddings", ["self", "embeddings", "labels"]),
    "CachedMultipleNegativesRankingLoss": ("calculate_loss", ["self", "reps", "labels", "with_backward"]),
}
ONE_SIDED, SYMMETRIC = {"query_to_doc"}, {"query_to_doc", "doc_to_query"}
log = logging.getLogger("tigon")
_said: set[str] = set()


def _why_not(loss) -> str:
    """Why a loss stays stock's; empty: it does not."""
    from sentence_transformers import util

    directions = set(loss.directions)
    if loss.similarity_fct not in (util.cos_sim, util.dot_score):
        return "similarity_fct is neither cos_sim nor dot_score"
    if directions not in (ONE_SIDED, SYMMETRIC):
        return f"directions={loss.directions}"
    if directions == SYMMETRIC and loss.partition_mode == "joint":
        return 'partition_mode="joint" of two directions'
    if loss.hardness_mode is not None and loss.hardness_strength > 0:
        return f"hardness_mode={loss.hardness_mode!r}"
    gathers = loss.gather_across_devices and torch.distributed.is_initialized()
    if gathers and torch.distributed.get_world_size() > 1:
        return "gather_across_devices of several processes"
    return ""


def _taken(loss) -> bool:
    """Whether Tigon computes it; says once why not."""
    reason = _why_not(loss)
    if reason and reason not in _said:
        _said.add(reason)
        log.warning("[sentence_transformers] %s stays stock: %s", type(loss).__name__, reason)
    return not reason


def _loss(loss, queries, documents, **options):
    """Of whole embeddings; the first of the documents are the positives."""
    from sentence_transformers import util

    return tigon.contrastive_loss(
        queries, torch.cat(documents), temperature=1.0 / loss.scale, symmetric=len(loss.directions) > 1,
        normalize=loss.similarity_fct is util.cos_sim, **options,
    )  # fmt: skip


def _compute_loss_from_embeddings(self, embeddings, labels):
    if len(embeddings) < 2 or not _taken(self):
        return _compute_loss_from_embeddings.original(self, embeddings, labels)
    return _loss(self, embeddings[0], embeddings[1:])


def _calculate_loss(self, reps, labels=None, *, with_backward=False):
    if not _taken(self):
        return _calculate_loss.original(self, reps, labels, with_backward=with_backward)
    queries, *documents = map(torch.cat, reps)
    loss = _loss(self, queries, documents, chunk_rows=self.mini_batch_size)
    if with_backward:
        loss.backward()
        loss = loss.detach()
    return loss


_OURS = dict(zip(METHODS, (_compute_loss_from_embeddings, _calculate_loss), strict=True))


def _classes() -> dict[str, type]:
    try:
        losses = importlib.import_module(LOSSES)
    except ImportError as error:
        refuse("sentence_transformers", "sentence-transformers must be version 6.2, got {}", error)
    return {name: getattr(losses, name) for name in METHODS}


def install() -> None:
    """Put Tigon behind these losses, in this process; objects that exist are included.

    Raises:
        tigon.Error: this sentence-transformers computes them in another way than 6.2. Nothing is modified.
    """
    classes = _classes()
    for name, (method, wanted) in METHODS.items():
        present = getattr(classes[name], method, None)
        names = [] if present is None else list(inspect.signature(present).parameters)
        check(
            "sentence_transformers",
            names == wanted,
            "{}.{} must take {} (6.2), got {}",
            name,
            method,
            wanted,
            names,
        )
    for name, (method, _) in METHODS.items():
        present = getattr(classes[name], method)
        if present is not _OURS[name]:
            _OURS[name].original = present
            setattr(classes[name], method, _OURS[name])


def uninstall() -> None:
    """The losses' own methods again."""
    for name, kind in _classes().items():
        method = METHODS[name][0]
        if getattr(kind, method) is _OURS[name]:
            setattr(kind, method, _OURS[name].original)
