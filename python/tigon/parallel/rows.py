"""The rows of a shard: statistics, the loss from the statistics of all shards, the gradient.

Contracts: ``csrc/tigon/ops/cross_entropy/cross_entropy.h`` (Shard), ``cross_entropy_shards.h``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon._deterministic import is_deterministic
from tigon._op import raw
from tigon.ops.agreement import Shards
from tigon.ops.loss_head.matmuls import ENTROPY, PREDICTED, SMOOTHING
from tigon.ops.loss_head.matmuls import row_gradient as _gradient
from tigon.ops.loss_head.matmuls import row_statistics as _statistics
from tigon.ops.loss_head.operands import LabelFormula

# What is known of a row, in this order. log_mass is the logarithm of the probability that this shard's
# classes have together.
NUMBERS = ("loss", "z_loss", "log_prob", "lse", "entropy", "log_mass")


def _fake_combine(parts, target, class_weight, shard_weight, token_weight, shards, shard, kinds, *_):
    numbers = parts.new_empty(len(NUMBERS), *target.shape)
    return numbers, target.new_empty(target.shape if kinds & PREDICTED else (0,), dtype=torch.int64)


_scale = raw("cross_entropy_scale", lambda target, *_: target.new_empty((), dtype=torch.float32))
_total = raw("cross_entropy_total", lambda losses, _: losses.new_empty(()))
_renormalize = raw(
    "cross_entropy_shard_renormalize", lambda dlogits, target, *_: target.float(), "cross_entropy"
)
_combine = raw("cross_entropy_combine", _fake_combine, "cross_entropy")
_scores = raw("cross_entropy_shard_scores", lambda *_: None, "cross_entropy")
_log_probs = raw("cross_entropy_shard_log_probs", lambda labels, *_: labels.float(), "cross_entropy")
_label_gradient = raw("cross_entropy_shard_label_gradient", lambda *_: None, "cross_entropy")

IGNORED = -(2**63)  # of several labels a row: a label that does not count, whatever the caller's ignore_index


class LabelSets(NamedTuple):
    """Several labels for each of n rows, and what the backward needs of them."""

    labels: torch.Tensor  # int64 [n, K] of all classes, IGNORED ones too
    upstream: torch.Tensor | None = None  # float32 [n, K], of the loss -log_prob
    top: torch.Tensor | None = None  # [n], the best score
    log_prob: torch.Tensor | None = None  # [n], of the label with that score


class Rows(NamedTuple):
    """Values that the rows of a call share."""

    shards: Shards
    formula: LabelFormula
    bias: torch.Tensor | None = None  # of the shard's classes
    class_weight: torch.Tensor | None = None  # float32, of all classes
    shard_weight: torch.Tensor | None = None  # float32 [shards], for smoothing
    kinds: int = 0  # bits: ENTROPY, SMOOTHING, PREDICTED
    labels_per_row: int = 0  # K, if a row has several; its target is then the class `vocab`, of no shard

    def per_row(self) -> int:
        return 3 + self.kinds.bit_count() + self.labels_per_row

    def classes(self) -> int:
        return self.shards.vocab + (self.labels_per_row > 0)

    def _numbers(self, *names: str) -> dict:
        """These numbers of the formula, by name."""
        return {name: getattr(self.formula, name) for name in names}

    def _shard(self, logits, target) -> dict:
        """What both passes over the rows of a shard take."""
        rows = {"logits": logits, "target": target, "bias": self.bias, "class_weight": self.class_weight}
        rows |= {"first_class": self.shards.first, "classes": self.classes()}
        rows |= self._numbers("ignore_index", "label_smoothing", "softcap", "z_loss")
        return rows | self._numbers("logit_scale", "temperature")

    def _scored(self, logits, target, labels, scores):
        """Labels of this shard, the best one of each row (or IGNORED); scores are written."""
        first, real = self.shards.first, self.shards.real
        own = torch.where(labels == IGNORED, IGNORED, labels - first)
        here = (own >= 0) & (own < real) & (target == self.shards.vocab).unsqueeze(-1)
        chosen = torch.where(here, own, IGNORED).amax(-1)
        scores.fill_(-torch.inf)
        if real:
            of_labels = {"labels": own, "chosen": chosen, "scores": scores, "ignore_index": IGNORED}
            of_labels["top"] = scores.new_empty(chosen.shape)
            _scores.named(logits=logits, bias=self.bias, **of_labels, **self._numbers("logit_scale"))
        return own, chosen

    def in_one_pass(self, dtype: torch.dtype) -> bool:
        """Whether dlogits of this dtype may be formed with the statistics, for :meth:`renormalize`.

        A deterministic call scales rows before their rounding, as the head of one GPU does.
        """
        f = self.formula
        plain = not (f.label_smoothing or f.softcap or f.z_loss or self.labels_per_row)
        return plain and dtype != torch.float16 and not is_deterministic()

    def statistics(self, logits: torch.Tensor, target: torch.Tensor, labels=None, dlogits=None):
        """Compute this shard's statistics ``[per_row, rows]``; a shard without classes has probability 0.

        ``labels``: several for each row. Their scores follow the statistics, row by row. ``dlogits`` is
        written in the same pass, for :meth:`renormalize`; it may be the logits.
        """
        statistics = torch.empty(self.per_row(), target.shape[0], dtype=torch.float32, device=target.device)
        if self.shards.real == 0:
            return statistics.fill_(-torch.inf)
        if labels is not None:
            scores = statistics[-self.labels_per_row :].view(labels.shape)
            _, chosen = self._scored(logits, target, labels, scores)
            target = torch.where(chosen == IGNORED, target, chosen + self.shards.first)
        shard = self if dlogits is None else self._replace(class_weight=None)  # a factor of renormalize
        results = {"parts": statistics[: self.per_row() - self.labels_per_row], "dlogits": dlogits}
        predicted = _statistics.named(**shard._shard(logits, target), **results, kinds=self.kinds)
        if self.kinds & PREDICTED:
            statistics[-1] = predicted + self.shards.first
        return statistics

    def split(self, statistics, labels) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The statistics of all shards without the scores, the scores of all labels, the best of each row."""
        statistics = statistics.view(self.shards.size, self.per_row(), -1)
        scores = statistics[:, -self.labels_per_row :].amax(0).view(labels.shape)
        return statistics[:, : -self.labels_per_row].flatten(0, 1), scores, scores.amax(-1)

    def log_probs(self, labels, target, scores, top, log_prob) -> torch.Tensor:
        """Compute log_prob of several labels ``[rows, K]``, from that of the one with the best score."""
        of_labels = {"labels": labels, "chosen": target, "scores": scores, "top": top, "log_prob": log_prob}
        numbers = {"ignore_index": IGNORED} | self._numbers("softcap", "temperature")
        return _log_probs.named(**of_labels, **numbers).view(labels.shape)

    def combined(self, statistics, target, token_weight) -> tuple[torch.Tensor, torch.Tensor]:
        """NUMBERS ``[6, rows]`` (entropy only if it has statistics) and the predicted classes.

        ``statistics``: of all shards, in their order.
        """
        weights = {"class_weight": self.class_weight, "shard_weight": self.shard_weight}
        places = {"shards": self.shards.size, "shard": self.shards.rank, "classes": self.classes()}
        numbers = self._numbers("ignore_index", "label_smoothing", "z_loss") | {"kinds": self.kinds}
        rows = {"parts": statistics, "target": target, "token_weight": token_weight}
        return _combine.named(**rows, **weights, **places, **numbers)

    def renormalize(self, dlogits, target, numbers, scale) -> torch.Tensor:
        """Finish the dlogits of :meth:`statistics`; return each row's factor of them.

        ``numbers``: NUMBERS of the rows.
        """
        known = dict(zip(NUMBERS, numbers, strict=True))
        rows = {"target": target, "log_mass": known["log_mass"], "log_prob": known["log_prob"]}
        rows |= {"scale": scale, "class_weight": self.class_weight, "first_class": self.shards.first}
        formula = self._numbers("ignore_index", "logit_scale", "temperature")
        return _renormalize.named(dlogits=dlogits, **rows, **formula)

    def gradient(
        self,
        logits,
        dlogits,
        target,
        log_mass,
        scale,
        entropy_scale=None,
        entropy=None,
        label_sets=None,
        known=None,
    ) -> None:
        """Compute dlogits of this shard's columns; they may overwrite the logits.

        ``known``: the first two of :meth:`statistics` and log_prob of the rows, for a pass without sums.
        """
        weight_sum, of_labels = None, {}
        if label_sets is not None:
            scores = torch.empty(label_sets.labels.shape, device=target.device)
            own, chosen = self._scored(logits, target, label_sets.labels, scores)
            of_labels = {"labels": own, "chosen": chosen, "scores": scores, "top": label_sets.top}
        if self.class_weight is not None and self.formula.label_smoothing:
            weight_sum = self.class_weight.double().sum().float().reshape(1)
        rows = {"dlogits": dlogits, "scale": scale, "entropy_scale": entropy_scale, "log_mass": log_mass}
        rows |= {"all_entropy": entropy, "weight_sum": weight_sum}
        if known is not None:
            rows |= dict(zip(("known_max", "known_log_sum", "all_log_prob"), known, strict=True))
        _gradient.named(**self._shard(logits, target), **rows)
        if label_sets is not None:
            rows = {"dlogits": dlogits, "entropy_scale": entropy_scale, "entropy": entropy}
            rows |= {"upstream": label_sets.upstream, "log_prob": label_sets.log_prob}
            formula = {"ignore_index": IGNORED} | self._numbers("softcap", "temperature", "logit_scale")
            _label_gradient.named(**of_labels, **rows, **formula)


def make_rows(shards: Shards, formula: LabelFormula, class_weight, device, *, entropy=False, predicted=False):
    """:class:`Rows` of a call with the statistics that it needs."""
    smooth = bool(formula.label_smoothing > 0.0)
    kinds = ENTROPY * entropy + SMOOTHING * smooth + PREDICTED * predicted
    shard_weight = shards.weights(class_weight, device) if smooth else None
    return Rows(shards, formula, None, class_weight, shard_weight, kinds)


def scale_of(rows: Rows, target, reduction: str, denominator) -> torch.Tensor | None:
    """Return the factor of the sum of the losses, float32 ``[1]`` on the device; None: losses of rows."""
    if denominator is None and reduction == "none":
        return None
    if isinstance(denominator, torch.Tensor):
        denominator = denominator.detach().to(target.device, non_blocking=True)
        return denominator.reshape(1).double().reciprocal().float()
    mean = denominator is None and reduction == "mean"
    number = None if mean or denominator is None else float(denominator)
    return _scale(target, rows.class_weight, rows.formula.ignore_index, mean, number).view(1)


def total(losses: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Sum the losses in double, times scale."""
    return _total(losses, scale)
