"""The divergence of a sharded head from the K most likely classes of a teacher."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon.error import check
from tigon.ops.agreement import number_of, tells_refusals, values_of
from tigon.ops.arguments import called, check_booleans, check_float, kind_of
from tigon.ops.cross_entropy import check_target
from tigon.ops.loss_head import operands, top_k
from tigon.ops.loss_head.linear_divergence import Divergence, check_options
from tigon.ops.loss_head.options import HeadOptions
from tigon.parallel.cross_entropy import check_eager
from tigon.parallel.head import LOG_PROB, ShardedArguments, ShardedOptions, run

OP = "parallel.linear_kl_div"


@tells_refusals
def _distilled(
    hidden, weight, labels, head: HeadOptions, d: Divergence, shard_options: ShardedOptions, *, group
):
    """The results on any arguments; errors before the exchange of log-probabilities are told."""
    classes = d.teacher[0] if top_k.is_top_k(d.teacher) else None
    words = "teacher must be (indices, log_prob) of its most likely classes, got {}"
    check(OP, classes is not None, words, kind_of(d.teacher))
    check_float(OP, "hidden", hidden)
    check_eager(OP, hidden=hidden, indices=classes, log_prob=d.teacher[1], labels=labels)
    labels, head, d = check_options(OP, classes.shape[:-1], hidden.device, labels, head, d)
    check_target(OP, "labels", labels, classes.shape[:-1])
    operands.check_token_weight(OP, d.token_weight, labels)
    dtype = operands.autocast(hidden).dtype
    tensors = (values_of(t, hidden.device) for t in (d.teacher[1], d.token_weight))
    divergence = d._replace(teacher=None, token_weight=None, denominator=number_of(d.denominator))
    compared = (OP, *divergence, *tensors)

    def log_prob(target, *, entropy=False, **options):
        sharded = shard_options._replace(entropy=entropy, compared=compared)
        given = ShardedArguments(LOG_PROB, hidden, weight, target, group, HeadOptions(**options), sharded)
        results = run(given, "log_prob")
        values = results.loss.view(target.shape)
        return (values, results.entropies.view(labels.shape)) if entropy else values

    return d.results(*top_k.top_k_loss(OP, log_prob, dtype, shard_options.vocab, labels, head, d))


@torch._disable_dynamo
@called(stored=False)
def linear_kl_div(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: tuple[torch.Tensor, torch.Tensor],
    group: torch.distributed.ProcessGroup,
    *,
    labels: torch.Tensor | None = None,
    reverse: bool = False,
    soft: float = 1.0,
    hard: float = 0.0,
    reduction: str = "batchmean",
    outputs: tuple[str, ...] = ("loss",),
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    token_weight: torch.Tensor | None = None,
    denominator: float | torch.Tensor | None = None,
    shift: int | bool = False,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    vocab: int | None = None,
    first_class: int | None = None,
    sequence_parallel: bool = False,
    partial_hidden_grad: bool = False,
) -> torch.Tensor | NamedTuple:
    """:func:`tigon.linear_kl_div` from a teacher's K most likely classes, with a weight sharded over a group.

    Each process scores the candidates that are its own classes. The processes exchange ``4 (K + 3)`` bytes a
    row and process, no logits, and all losses are bitwise equal.

    Args:
        teacher: ``(indices, log_prob)`` ``[..., K]`` for all processes' rows, the same in all: classes of the
            whole vocabulary and their log-probabilities at `temperature`. ``-inf`` is not a candidate.
        labels: ``[...]`` for all processes' rows, the same in all. ``None``: every row counts.
        hidden, weight, group, vocab, first_class, sequence_parallel, partial_hidden_grad, lora, chunk_rows:
            as in :func:`tigon.parallel.linear_cross_entropy`.
        reverse, soft, hard, reduction, outputs, bias, ignore_index, softcap, logit_scale, temperature,
            token_weight, denominator, shift: as in :func:`tigon.linear_kl_div`; `hard` and ``"hard"`` compute
            the logits once more.

    Returns:
        As :func:`tigon.linear_kl_div`. Gradients are those of :func:`tigon.parallel.linear_log_prob`.

    Raises:
        tigon.Error: as :func:`tigon.parallel.linear_cross_entropy`. A class outside ``[0, vocab)`` makes its
            row NaN in all processes.
    """
    check_booleans(OP, reverse=reverse)
    logits = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    head = HeadOptions(**logits, lora=lora, ignore_index=ignore_index, shift=shift, chunk_rows=chunk_rows)
    d = Divergence(
        teacher,
        kind="reverse_kl" if reverse else "forward_kl",
        soft=soft,
        hard=hard,
        token_weight=token_weight,
        reduction=reduction,
        denominator=denominator,
        outputs=outputs,
    )
    shard_options = ShardedOptions(vocab, first_class, sequence_parallel, partial_hidden_grad, keep_mb=None)
    return _distilled(hidden, weight, labels, head, d, shard_options, group=group)
