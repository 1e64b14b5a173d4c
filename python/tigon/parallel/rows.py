"""The rows of a shard: statistics, the loss from the statistics of all shards, the gradient.

Contracts: ``csrc/tigon/ops/cross_entropy/cross_entropy.h`` (Shard), ``cross_entropy_shards.h``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon._op import raw
from tigon.ops.loss_head.operands import LabelFormula
from tigon.parallel.shards import Shards, Work

ENTROPY, SMOOTHING, PREDICTED = 1, 2, 4  # bits of `kinds`, as in cross_entropy_shards.h
NUMBERS = ("loss", "z_loss", "log_prob", "lse", "entropy", "log_share")


def _fake_statistics(logits, target, *options):
    return target.new_empty(target.shape if options[-1] & PREDICTED else (0,), dtype=torch.int64)


def _fake_combine(parts, target, *options):
    numbers = parts.new_empty(len(NUMBERS), *target.shape)
    return numbers, target.new_empty(target.shape if options[5] & PREDICTED else (0,), dtype=torch.int64)


_statistics = raw("cross_entropy_shard_statistics", _fake_statistics, "cross_entropy")
_gradient = raw("cross_entropy_shard_gradient", lambda *_: None, "cross_entropy")
_combine = raw("cross_entropy_combine", _fake_combine, "cross_entropy")


class Rows(NamedTuple):
    """Values that the rows of a call share."""

    shards: Shards
    formula: LabelFormula
    bias: torch.Tensor | None = None  # of the shard's classes
    class_weight: torch.Tensor | None = None  # float32, of all classes
    shard_weight: torch.Tensor | None = None  # float32 [shards], for smoothing
    kinds: int = 0

    def per_row(self) -> int:
        return 3 + self.kinds.bit_count()

    def _shard(self, logits, target):
        f, s = self.formula, self.shards
        formula = f.ignore_index, f.label_smoothing, f.softcap, f.z_loss
        rows = logits, target, self.bias, self.class_weight
        return *rows, *formula, s.first, s.vocab, f.logit_scale, f.temperature

    def statistics(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """This shard's part ``[kinds, rows]``; a shard without classes has probability 0."""
        parts = torch.empty(self.per_row(), target.shape[0], dtype=torch.float32, device=target.device)
        if self.shards.real == 0:
            return parts.fill_(-torch.inf)
        predicted = _statistics(*self._shard(logits, target), parts, self.kinds)
        if self.kinds & PREDICTED:
            parts[-1] = predicted + self.shards.first
        return parts

    def losses(self, parts, target, token_weight, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the parts of all shards, then :meth:`combined`."""
        whole = work.gather(parts) if target.shape[0] else parts.repeat(self.shards.size, 1)
        return self.combined(whole, target, token_weight)

    def combined(self, whole, target, token_weight) -> tuple[torch.Tensor, torch.Tensor]:
        """NUMBERS ``[6, rows]`` (entropy only if it has statistics) and the predicted classes.

        ``whole``: the parts of all shards, in their order.
        """
        f, s = self.formula, self.shards
        weights = self.class_weight, self.shard_weight, token_weight
        formula = f.ignore_index, f.label_smoothing, f.z_loss
        return _combine(whole, target, *weights, s.size, s.rank, self.kinds, s.vocab, *formula)

    def gradient(self, logits, dlogits, target, log_share, scale, entropy_scale=None, entropy=None) -> None:
        """dlogits of this shard's columns; they may overwrite the logits."""
        weight_sum = None
        if self.class_weight is not None and self.formula.label_smoothing:
            weight_sum = self.class_weight.double().sum().float().reshape(1)
        _gradient(*self._shard(logits, target), dlogits, scale, entropy_scale, log_share, entropy, weight_sum)


def make_rows(shards: Shards, formula: LabelFormula, class_weight, device, *, entropy=False, predicted=False):
    """:class:`Rows` of a call with the statistics that it needs."""
    smooth = bool(formula.label_smoothing > 0.0)
    kinds = ENTROPY * entropy + SMOOTHING * smooth + PREDICTED * predicted
    shard_weight = shards.weights(class_weight, device) if smooth else None
    return Rows(shards, formula, None, class_weight, shard_weight, kinds)


def scale_of(rows: Rows, target, reduction: str, denominator) -> torch.Tensor | None:
    """The factor of the sum of the losses, float32 ``[1]`` on the device; None: losses of rows."""
    if denominator is None and reduction == "none":
        return None
    if denominator is None and reduction == "mean":
        counts = target != rows.formula.ignore_index
        if rows.class_weight is None:
            denominator = counts.sum()
        else:
            inside = counts & (target >= 0) & (target < rows.shards.vocab)
            weights = rows.class_weight[torch.where(inside, target, 0)].double()
            denominator = torch.where(inside, weights, 0.0).sum()
    elif denominator is None:
        denominator = 1.0
    if not isinstance(denominator, torch.Tensor):
        denominator = torch.full((), denominator, dtype=torch.float64, device=target.device)
    denominator = denominator.detach().to(target.device, non_blocking=True)
    return denominator.reshape(1).double().reciprocal().float()


def total(losses: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The sum of the losses in double, times scale."""
    return (losses.double().sum() * scale.double()).float().reshape(())
