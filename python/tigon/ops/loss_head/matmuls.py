"""The matmuls and row passes of a chunk as separate calls, for code that runs between them."""

from __future__ import annotations

import torch

from tigon._op import raw

ENTROPY, SMOOTHING, PREDICTED = 1, 2, 4  # bits of `kinds`, as in cross_entropy_shards.h

_logits = raw("loss_head_logits", lambda *_: None, "linear_cross_entropy")
_gradients = raw("loss_head_gradients", lambda *_: None, "linear_cross_entropy")
_NO_LORA = (None, None, 1.0)


def _fake_statistics(logits, target, *options):
    return target.new_empty(target.shape if options[-1] & PREDICTED else (0,), dtype=torch.int64)


row_statistics = raw("cross_entropy_shard_statistics", _fake_statistics, "cross_entropy")
row_gradient = raw("cross_entropy_shard_gradient", lambda *_: None, "cross_entropy")


def compute_logits(logits, hidden, weight, lora=_NO_LORA) -> None:
    """``logits = hidden @ weight.T``; `lora`: A, B and scale of a second matmul."""
    _logits(logits, hidden, weight, *lora)


def compute_gradients(
    dlogits,
    hidden,
    weight,
    *,
    dhidden=None,
    dweight=None,
    dbias=None,
    factor=None,
    first=True,
    add_dweight=False,
    padded=False,
    lora=_NO_LORA,
    dlora_a=None,
    dlora_b=None,
) -> None:
    """Compute the given gradients from ``factor * dlogits``; the `first` call writes them, later calls add.

    Args:
        hidden: only its shape is used if no gradient of a parameter is given.
        add_dweight: the first call adds to dweight too.
        padded: whether zeros follow each row of dlogits, as in memory of :meth:`RowPass.space`. On a CPU with
            AMX other rows are copied.
    """
    outputs = dhidden, dweight, dbias, factor, first, add_dweight, padded
    _gradients(dlogits, hidden, weight, *outputs, *lora, dlora_a, dlora_b)
