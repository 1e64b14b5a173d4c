"""Cross-entropy of given logits that are sharded over the vocabulary."""

from __future__ import annotations

import functools

import torch
from torch.autograd import forward_ad

from tigon._op import foreign, has_kernel, is_transformed, once, refuse_tangents
from tigon.error import check
from tigon.ops.agreement import Facts, Shards, agree, comparable, number_of, of_rows, or_unknown, values_of
from tigon.ops.arguments import called, check_float, check_integers, check_stored
from tigon.ops.cross_entropy import check_logits, check_loss, check_target
from tigon.ops.loss_gradient import scaled
from tigon.ops.loss_head.operands import LabelFormula
from tigon.parallel.collectives import Work
from tigon.parallel.rows import NUMBERS, Rows, make_rows, scale_of, total

OP = "parallel.cross_entropy"


def check_layout(op, vocab, first_class) -> None:
    """Check a process's description of its classes."""
    for name, value, least in (("vocab", vocab, 1), ("first_class", first_class, 0)):
        if value is not None:
            check_integers(op, least=least, **{name: value})


def check_eager(op, **tensors) -> None:
    """Check that the call runs in eager mode on plain tensors, as its collectives need."""
    check(op, not is_transformed(), "the transforms of torch.func are not supported")
    given = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    if forward_ad._current_level >= 0:
        refuse_tangents(op, tuple(given.values()))
    for name, t in given.items():
        kind = foreign(name, t)
        check(op, kind is None, "{} must be a plain dense tensor, got {}", name, kind)
        first = next(iter(given.values()))
        check(op, t.is_meta == first.is_meta, "{} must be on {}, got {}", name, first.device, t.device)
        check_stored(op, name, t)


def take_class_weight(op, shards: Shards, class_weight, device):
    """Check the weights of all classes, and return them in float32."""
    if class_weight is None:
        return None
    fits = class_weight.shape == (shards.vocab,)
    check(op, fits, "weight of classes must be that of all, [{}], got {}", shards.vocab, class_weight.shape)
    return class_weight.detach().to(device, torch.float32)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Rows, target, find_scale, logits):
        own, gathered = rows.statistics(logits[:, : rows.shards.real], target), None
        if target.shape[0]:
            gathered = Work(rows.shards).start_gather(own)
        scale = find_scale()  # while the statistics are gathered; None: one loss for each row
        statistics = own.repeat(rows.shards.size, 1) if gathered is None else gathered()
        numbers, _ = rows.combined(statistics, target, None)
        ctx.rows, ctx.scalar = rows, scale is not None
        if not ctx.scalar:
            ctx.save_for_backward(logits, own, numbers, target)
            return numbers[0].clone()  # a caller may change it in place
        if ctx.needs_input_grad[3]:
            ctx.save_for_backward(_gradient(rows, logits, own, numbers, target, scale))
        return total(numbers[0], scale)

    @staticmethod
    @once(OP)
    def backward(ctx, dloss):
        if ctx.scalar:
            return None, None, None, scaled(*ctx.saved_tensors, dloss)
        return None, None, None, _gradient(ctx.rows, *ctx.saved_tensors, dloss.contiguous())


def _gradient(rows: Rows, logits, statistics, numbers, target, scale):
    """Compute dlogits, zero in columns of padding. ``statistics``: this shard's."""
    real = rows.shards.real
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    dlogits[:, real:] = 0.0
    if real > 0 and dlogits.shape[0] > 0:
        numbers = dict(zip(NUMBERS, numbers, strict=True))
        known = (*statistics[:2], numbers["log_prob"])
        part = logits[:, :real], dlogits[:, :real]
        rows.gradient(*part, target, numbers["log_mass"], scale, known=known)
    return dlogits


@torch._disable_dynamo  # collectives and their order are the caller's: nothing to trace
@called(stored=False)
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    vocab: int | None = None,
    first_class: int | None = None,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`tigon.cross_entropy` of logits whose last dimension is sharded over a process group.

    Every process calls it with its columns and the same labels, and all losses are bitwise equal. The forward
    runs one all-gather of 12 bytes a row and process (16 with label smoothing). The backward exchanges
    nothing: each process computes its columns of the gradient.

    Args:
        logits: ``[..., columns]`` float32, bfloat16 or float16: this process's classes. Processes may have
            different numbers of columns, also 0.
        target: ``[...]`` class indices of the whole vocabulary, the same in all processes.
        group: the processes that share the vocabulary.
        vocab: number of classes of all processes together. ``None``: the processes exchange their numbers of
            columns in every call, and all columns are classes (on CUDA the host waits for the exchange, so
            pass `vocab` in training). Columns past it are padding: their values are ignored, and their
            gradient is 0. A group must shard a vocabulary in the same way in every call.
        first_class: the class of this process's first column; ``None``: processes hold classes in the order
            of their ranks.
        weight: ``[vocab]``, the weights of all classes, the same in all processes.
        ignore_index, label_smoothing, softcap, z_loss, reduction, denominator: as in
            :func:`tigon.cross_entropy`; smoothing and means are over all classes and all rows.

    Returns:
        float32 scalar, or ``[...]`` for ``"none"``. All processes must use it in the same way: the gradient
        of a process's columns is that of its own loss.

    Raises:
        tigon.Error: in every process, if one refuses its arguments or the processes make different calls (on
            CUDA only the first call of each kind checks this, which synchronises). A label outside
            ``[0, vocab)`` makes its row's loss and gradient NaN in all processes.
    """

    def describe():
        check_eager(OP, logits=logits, target=target, weight=weight, denominator=denominator)
        check_float(OP, "logits", logits)
        check(OP, logits.dim() >= 1, "logits must have at least one dimension, got 0")
        words = "logits must be float32, bfloat16 or float16, got {}"
        check(OP, has_kernel(OP, logits=logits), words, logits.dtype)
        check_target(OP, "target", target, logits.shape[:-1])
        check_layout(OP, vocab, first_class)
        check_loss(OP, label_smoothing, z_loss, reduction, denominator)
        check_logits(OP, ignore_index, softcap)
        if weight is not None:
            check_float(OP, "weight", weight)
        formula = LabelFormula(ignore_index, float(label_smoothing), softcap or 0.0, z_loss=z_loss)
        values = {"weight": values_of(weight, logits.device), "denominator": number_of(denominator)}
        return Facts(
            needs=int(logits.requires_grad and torch.is_grad_enabled()),
            columns=logits.shape[-1],
            first_class=or_unknown(first_class),
            vocab=or_unknown(vocab),
            options=comparable(op=OP, **formula._asdict(), reduction=reduction, **values),
            **of_rows(target, logits),
        ), formula

    device = logits.device if isinstance(logits, torch.Tensor) else torch.device("cpu")
    shards, formula = agree(OP, group, device, describe)
    class_weight = take_class_weight(OP, shards, weight, device)
    rows = make_rows(shards, formula, class_weight, device)
    labels = target.to(device, torch.int64, non_blocking=True).reshape(-1)
    find_scale = functools.partial(scale_of, rows, labels, reduction, denominator)
    loss = _Function.apply(rows, labels, find_scale, logits.reshape(labels.shape[0], logits.shape[-1]))
    return loss.view(target.shape) if denominator is None and reduction == "none" else loss
