"""A linear head sharded over the vocabulary, with its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tigon._op import has_kernel
from tigon.error import check
from tigon.ops.arguments import check_float, check_indices
from tigon.ops.loss_head.memory import check_keep
from tigon.ops.loss_head.operands import (
    BIAS,
    HIDDEN,
    WEIGHT,
    autocast,
    check_head,
    shifted,
    whole_vectors,
    wide_logits,
)
from tigon.ops.loss_head.reference import result_type
from tigon.parallel.counting import count, counting
from tigon.parallel.cross_entropy import check_eager, check_layout, check_loss, shape_of, take_class_weight
from tigon.parallel.rows import NUMBERS, Formula, make_rows, scale_of
from tigon.parallel.shards import Facts, agree, code, target_code
from tigon.parallel.stream import Call, Function, plan

LOSS, LOG_PROB = "parallel.linear_cross_entropy", "parallel.linear_log_prob"
OUTPUTS = ("loss", "z_loss", "log_prob", "lse", "entropy", "predicted", "correct")


class _Head(NamedTuple):
    """Operands of a head as they were given, and where it is."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    group: object
    vocab: int | None
    first_class: int | None
    sequence_parallel: bool
    bias: torch.Tensor | None
    shift: int | bool
    chunk_rows: int | None
    keep_mb: float | None
    logit_dtype: torch.dtype | None
    partial_hidden_grad: bool
    valid_rows: int | None


def _describe(op, head: _Head, formula: Formula, options: tuple, unsupported: dict):
    """Checks; :class:`Facts`, and hidden, weight, bias, gradients needed, wide logits, rows that count."""
    hidden, weight, target, bias = head.hidden, head.weight, head.target, head.bias
    for name, value in unsupported.items():
        check(op, value is None, "{} is not supported for a sharded head (must be None)", name)
    check_float(op, "hidden", hidden)
    check_float(op, "weight", weight)
    check_indices(op, "target", target)
    check(op, hidden.dim() >= 1 and weight.dim() == 2, "weight must be [columns, H], got {}", weight.shape)
    check(op, not getattr(weight, "tigon_main_grad", False), "weight.tigon_main_grad is not supported here")
    labels = target
    if head.sequence_parallel:
        size = torch.distributed.get_world_size(head.group)
        check(
            op,
            hidden.dim() >= 2,
            "hidden must be [share, ..., H] with sequence_parallel, got {}",
            hidden.shape,
        )
        wanted = (size * hidden.shape[0], *hidden.shape[1:-1])
        check(
            op, target.shape == wanted, "target must be {} (of all processes), got {}", wanted, target.shape
        )
        labels = target[: hidden.shape[0]]
    columns = weight.shape[0]
    if columns == 0:  # a process without classes
        weight, bias = weight.new_empty(1, weight.shape[1]), None
    cap = formula.softcap if formula.softcap else None
    check_head(
        op, hidden, weight, labels, bias, head.shift, formula.ignore_index, cap, formula.logit_scale,
        formula.temperature, head.chunk_rows,
    )  # fmt: skip
    check_layout(op, head.vocab, head.first_class)
    check_keep(op, head.keep_mb)
    hidden = autocast(hidden)
    check(op, has_kernel(op, hidden), "hidden must be float32, bfloat16 or float16, got {}", hidden.dtype)
    wide = wide_logits(op, head.logit_dtype, hidden)
    weight, bias = head.weight, head.bias
    if columns:
        hidden, weight, _ = whole_vectors(hidden, weight)
    known = count(op, target, formula.ignore_index, head.shift, head.valid_rows)
    needs = 0
    if torch.is_grad_enabled():
        needs = HIDDEN * hidden.requires_grad + WEIGHT * weight.requires_grad
        needs += BIAS * (bias is not None and bias.requires_grad)
    both = head.sequence_parallel and head.partial_hidden_grad
    check(op, not both, "partial_hidden_grad must be False with sequence_parallel, which sums it, got True")
    alike = (formula, options, head.sequence_parallel, head.partial_hidden_grad, head.shift, head.chunk_rows,
             head.keep_mb, wide, known)  # fmt: skip
    facts = Facts(
        rows=target.numel(), size=hidden.shape[-1], dtype=code(hidden.dtype), needs=needs,
        options=code((*alike, bias is None)), target=target_code(target, hidden.device), columns=columns,
        first_class=-1 if head.first_class is None else head.first_class,
        vocab=-1 if head.vocab is None else head.vocab,
    )  # fmt: skip
    return facts, (hidden, weight, bias, needs, wide, known)


def _run(
    op, head: _Head, formula: Formula, options, unsupported, *, class_weight=None, token_weight=None,
    reduction="none", denominator=None, result="loss", entropy=False, statistics=(), check_more=None,
):  # fmt: skip
    """The call: ``(loss, entropies, NUMBERS by name, predicted, labels)``, the last four flat."""

    def describe():
        check_eager(op, hidden=head.hidden, weight=head.weight, target=head.target, bias=head.bias)
        if check_more is not None:
            check_more()
        return _describe(op, head, formula, options, unsupported)

    device = head.hidden.device if isinstance(head.hidden, torch.Tensor) else torch.device("cpu")
    shards, (hidden, weight, bias, needs, wide, known) = agree(op, head.group, device, describe)
    class_weight = take_class_weight(op, shards, class_weight, device)
    labels = head.target.to(device, torch.int64, non_blocking=True)
    labels = shifted(labels, formula.ignore_index, head.shift)
    labels = labels.reshape(-1)
    rows = make_rows(
        shards, formula, None, class_weight, device,
        entropy=entropy or "entropy" in statistics, predicted="predicted" in statistics,
    )  # fmt: skip
    if denominator is not None:
        reduction = "sum"
    scale = None if reduction == "none" else scale_of(rows, labels, reduction, denominator)
    shares = shards.size if head.sequence_parallel else 1
    size = hidden.shape[-1]
    hidden = hidden.reshape(labels.shape[0] // shares, size)
    # The rows of a share are gathered as they are.
    listed = counting(labels, formula.ignore_index, known if shares == 1 else -1)
    hidden = listed.take(hidden)
    chunk, keep = plan(
        device, hidden.dtype, listed.labels.shape[0], size, shards.widest, needs & WEIGHT != 0,
        head.chunk_rows, head.keep_mb, entropy,
    )  # fmt: skip
    target = listed.labels.view(shares, hidden.shape[0])
    if token_weight is not None:
        token_weight = token_weight.detach().to(device, torch.float32).reshape(-1)
        token_weight = listed.take(token_weight).view(target.shape)
    call = Call(
        rows, target, token_weight, scale, NUMBERS.index(result), entropy, needs, max(chunk // shares, 1),
        keep, wide, head.partial_hidden_grad,
    )  # fmt: skip
    loss, entropies, numbers, predicted = Function.apply(call, hidden, weight, bias)
    if loss.dim() == 0 and listed.fault is not None:
        loss = loss + listed.fault
    of_rows = {name: listed.give(n) for name, n in zip(NUMBERS, numbers, strict=True)}
    return listed.give(loss), listed.give(entropies), of_rows, listed.give(predicted, -1), labels


@torch._disable_dynamo  # collectives and their order are the caller's: nothing to trace
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    vocab: int | None = None,
    first_class: int | None = None,
    sequence_parallel: bool = False,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    class_weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    z_loss: float = 0.0,
    token_weight: torch.Tensor | None = None,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    shift: int | bool = False,
    outputs: tuple[str, ...] | None = None,
    chunk_rows: int | None = None,
    keep_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
    partial_hidden_grad: bool = False,
    valid_rows: int | None = None,
    lora: None = None,
    max_workspace_mb: None = None,
) -> torch.Tensor | NamedTuple:
    """:func:`tigon.linear_cross_entropy` with a weight whose rows are sharded over a process group.

    Every process calls it with its rows of the weight and the same labels, and gets the same loss, bit by
    bit. Exchanged are 12 bytes of statistics a row and process (more with label smoothing, entropies, argmax)
    and hidden's gradient, once, in hidden's dtype, behind the product of the weight's gradient.

    Args:
        hidden: ``[..., H]`` float32, bfloat16 or float16, the same in all processes; its gradient is summed
            over them (all-reduce). With ``sequence_parallel`` this process's share of the first dimension:
            it is gathered chunk by chunk, and its gradient comes by reduce-scatter.
        weight: ``[columns, H]``: this process's classes. Processes may have different numbers of them, and
            none. Its gradient stays here.
        target: ``[...]`` class indices of the whole vocabulary, of all processes' rows, the same in all.
        group: the processes that share the vocabulary.
        vocab: classes of all processes together; ``None``: all columns, which the processes ask each other in
            every call (on CUDA the host waits for it: give it in training). Columns past it are padding: they
            take no part, whatever they hold, and their gradient is 0. A group shards a vocabulary in one way.
        first_class: the class of this process's first column; ``None``: processes hold classes in the order
            of their ranks.
        bias: ``[columns]``, of this process's classes.
        class_weight: ``[vocab]``, of all classes, the same in all processes.
        chunk_rows: rows per chunk, those of all processes together with ``sequence_parallel``.
        keep_mb: with ``"none"``, the memory of this process's gradients of logits between forward and
            backward; ``None``: kept where one chunk takes all rows. All rows are kept or none.
        partial_hidden_grad: hidden's gradient is this process's part and not the sum: for hidden states whose
            own backward sums over the processes, as that of a gather of shares does.
        valid_rows: how many labels (after ``shift``) are not ``ignore_index``: ignored rows then cost nothing
            but a copy of the others' hidden states, unless ``sequence_parallel`` is given, where all are
            computed. Labels on the CPU are counted here. A wrong number makes the loss NaN on CUDA and is an
            error on the CPU.
        lora, max_workspace_mb: not supported here, must be ``None``.
        ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss, token_weight, reduction,
            denominator, shift, outputs, logit_dtype: as in :func:`tigon.linear_cross_entropy`; smoothing,
            means and outputs are over all classes and all rows.

    Returns:
        float32 scalar, or ``target``'s shape for ``"none"``; with ``outputs`` a named tuple. All processes
        must use the loss alike: gradients are those of one loss. Not traced by ``torch.compile``.

    Raises:
        tigon.Error: in every process, when one refuses its arguments or the processes make different calls
            (on CUDA this is looked at in the first call of each kind, which synchronises). A label outside
            ``[0, vocab)`` makes its row's loss and the gradients NaN in all of them.
    """
    if outputs is not None and isinstance(outputs, Sequence) and not isinstance(outputs, str):
        outputs = tuple(outputs)

    def check_more():
        check_loss(LOSS, ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
        if class_weight is not None:
            check_float(LOSS, "class_weight", class_weight)
        if token_weight is not None:
            check_float(LOSS, "token_weight", token_weight)
            fits = token_weight.shape == target.shape
            check(LOSS, fits, "token_weight must be {}, got {}", target.shape, token_weight.shape)
        if outputs is not None:
            fits = (
                isinstance(outputs, tuple) and outputs[:1] == ("loss",) and len(set(outputs)) == len(outputs)
            )
            fits = fits and set(outputs) <= set(OUTPUTS)
            check(LOSS, fits, "outputs must be 'loss' and then some of {}, got {!r}", OUTPUTS[1:], outputs)

    statistics = set(outputs or ())
    if "correct" in statistics:
        statistics.add("predicted")
    number = None if isinstance(denominator, torch.Tensor) else denominator
    loss, _, numbers, predicted, labels = _run(
        LOSS,
        _Head(hidden, weight, target, group, vocab, first_class, sequence_parallel, bias, shift, chunk_rows,
              keep_mb, logit_dtype, partial_hidden_grad, valid_rows),
        Formula(ignore_index, label_smoothing, softcap or 0.0, logit_scale, temperature, z_loss),
        (reduction, number, outputs, shape_of(class_weight), token_weight is None),
        {"lora": lora, "max_workspace_mb": max_workspace_mb},
        class_weight=class_weight, token_weight=token_weight, reduction=reduction, denominator=denominator,
        statistics=statistics, check_more=check_more,
    )  # fmt: skip
    loss = loss if loss.dim() == 0 else loss.view(target.shape)
    if outputs is None:
        return loss
    found = numbers | {"loss": loss, "predicted": predicted}
    found["correct"] = (predicted == labels) & (labels != ignore_index)
    return result_type(outputs)(*(found[n] if n == "loss" else found[n].view(target.shape) for n in outputs))


@torch._disable_dynamo
def linear_log_prob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    vocab: int | None = None,
    first_class: int | None = None,
    sequence_parallel: bool = False,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    shift: int | bool = False,
    chunk_rows: int | None = None,
    keep_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
    partial_hidden_grad: bool = False,
    valid_rows: int | None = None,
    lora: None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`tigon.linear_log_prob` with a weight whose rows are sharded over a process group.

    Log-probability of each label, and with ``entropy`` the entropy of each distribution, both differentiable.
    Arguments, layout and errors: :func:`tigon.parallel.linear_cross_entropy`.

    Returns:
        float32, target's shape, or a pair of them; the same bits in all processes. 0 on ignored rows, with
        zero gradients.
    """
    loss, entropies, *_ = _run(
        LOG_PROB,
        _Head(hidden, weight, target, group, vocab, first_class, sequence_parallel, bias, shift, chunk_rows,
              keep_mb, logit_dtype, partial_hidden_grad, valid_rows),
        Formula(ignore_index, softcap=softcap or 0.0, logit_scale=logit_scale, temperature=temperature),
        (entropy,),
        {"lora": lora},
        result="log_prob", entropy=entropy,
    )  # fmt: skip
    log_prob = loss.view(target.shape)
    return (log_prob, entropies.view(target.shape)) if entropy else log_prob
