"""TRL's fused head by Tigon.

TRL's SFT, DPO, KTO, GRPO and RLOO trainers (1.15 and 1.16) take the per-token log-probabilities from one
function of their own. After :func:`install` that function is :func:`tigon.linear_cross_entropy` or
:func:`tigon.linear_log_prob`; what those do not give (the collision entropy, mean logits under a softcap,
ZeRO-3's partitioned heads) stays TRL's, call by call. The rest of a model (norms, MLPs, rotary functions)
comes with :class:`tigon.TigonTrainerCallback` or ``use_liger_kernel``.
"""

from __future__ import annotations

import inspect
import sys

import torch

import tigon
from tigon.error import check

NAME = "_ChunkedLogProbFunction"
PARAMETERS = ["hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
              "logit_scale", "outputs"]  # fmt: skip


class LogProbHead:
    """Stands in for TRL's autograd function: called the same way, falls back to it."""

    def __init__(self, original):
        self.original = original
        self.calls = 0  # that Tigon answered

    def apply(self, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0,
              outputs=("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")):  # fmt: skip
        """(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), None for what was not asked for."""
        ours = "log_sum_sq_probs" not in outputs and not (softcap and "mean_logits" in outputs)
        plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and not hasattr(weight, "ds_id")
        if not ours or not plain:
            return self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            )
        self.calls += 1
        head = {"bias": bias, "temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
        entropy = top = None
        if "is_top1" in outputs:  # SFT, DPO: the entropy is a metric
            names = ("loss", "correct", *(("entropy",) if "entropy" in outputs else ()))
            got = tigon.linear_cross_entropy(hidden, weight, targets, reduction="none", outputs=names, **head)
            log_probs, top, entropy = -got.loss, got.correct, getattr(got, "entropy", None)
        elif "entropy" in outputs:  # GRPO, RLOO: it may be part of the loss
            log_probs, entropy = tigon.linear_log_prob(hidden, weight, targets, entropy=True, **head)
        else:
            log_probs = tigon.linear_log_prob(hidden, weight, targets, **head)
        means = _mean_logits(hidden, weight, **head) if "mean_logits" in outputs else None
        return log_probs, entropy, None, means, top


@torch.no_grad()
def _mean_logits(hidden, weight, bias, temperature, softcap, logit_scale):
    """The mean over the vocabulary is linear: one row instead of all of them."""
    del softcap
    mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
    if bias is not None:
        mean = mean + bias.mean(dtype=torch.float32)
    return mean * (logit_scale / temperature)


def install() -> None:
    """Put Tigon behind TRL's fused head, in this process.

    Raises:
        tigon.Error: this TRL has no such function, or calls it in another way. Nothing is modified.
    """
    utils = _utils()
    present = getattr(utils, NAME, None)
    if isinstance(present, LogProbHead):
        return
    names = list(inspect.signature(present.forward).parameters)[1:] if present is not None else None
    check(
        "compat.trl",
        names == PARAMETERS,
        "trl must be one whose fused head takes {} (1.15, 1.16), got trl {} with {}",
        PARAMETERS,
        _version(),
        names,
    )
    setattr(utils, NAME, LogProbHead(present))


def uninstall() -> None:
    """TRL's own function again."""
    utils = _utils()
    present = getattr(utils, NAME, None)
    if isinstance(present, LogProbHead):
        setattr(utils, NAME, present.original)


def has_run() -> bool:
    """Whether a loss of TRL's has gone through Tigon in this process."""
    present = sys.modules.get("trl.trainer.utils")
    return getattr(getattr(present, NAME, None), "calls", 0) > 0


def _utils():
    from trl.trainer import utils

    return utils


def _version() -> str:
    import trl

    return trl.__version__
