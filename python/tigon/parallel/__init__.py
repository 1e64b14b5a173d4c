"""Losses of logits that are sharded over the vocabulary of a process group. See ``docs/distributed.md``."""

from tigon.parallel.cross_entropy import cross_entropy
from tigon.parallel.head import linear_cross_entropy, linear_log_prob
from tigon.parallel.top_k import linear_kl_div

__all__ = ["cross_entropy", "linear_cross_entropy", "linear_kl_div", "linear_log_prob"]
