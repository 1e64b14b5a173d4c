"""A linear head sharded over the vocabulary, with its loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tigon._deterministic import is_deterministic
from tigon._op import has_kernel
from tigon.error import check
from tigon.ops.arguments import called, check_booleans, check_float, check_indices
from tigon.ops.cross_entropy import check_loss
from tigon.ops.loss_head import operands
from tigon.ops.loss_head.labels import labels_of, shifted
from tigon.ops.loss_head.linear_cross_entropy import OUTPUTS
from tigon.ops.loss_head.linear_log_prob import several
from tigon.ops.loss_head.operands import LabelFormula
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import check_keep
from tigon.ops.loss_head.reference import result_type
from tigon.parallel.cross_entropy import check_eager, check_layout, number_of, take_class_weight
from tigon.parallel.plan import choose, count, counting
from tigon.parallel.rows import IGNORED, NUMBERS, make_rows, scale_of
from tigon.parallel.shards import Facts, agree, named, of_rows, or_unknown, values_of
from tigon.parallel.stream import Function, ShardedCall

LOSS, LOG_PROB = "parallel.linear_cross_entropy", "parallel.linear_log_prob"


class ShardedOptions(NamedTuple):
    """The options of a call, without those of the head."""

    vocab: int | None
    first_class: int | None
    sequence_parallel: bool
    partial_hidden_grad: bool
    keep_mb: float | None
    entropy: bool = False
    class_weight: torch.Tensor | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    token_weight: torch.Tensor | None = None
    reduction: str = "none"
    denominator: float | torch.Tensor | None = None
    outputs: tuple[str, ...] | None = None
    more: tuple = ()  # what else the processes compare


class GivenCall(NamedTuple):
    """A call on a sharded head, as the caller gave it."""

    op: str
    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    group: torch.distributed.ProcessGroup
    head: HeadOptions
    options: ShardedOptions

    def formula(self) -> LabelFormula:
        """Return the numbers of the loss; LoRA's scale is not among them."""
        head, options = self.head, self.options
        return LabelFormula(
            ignore_index=head.ignore_index,
            label_smoothing=options.label_smoothing,
            softcap=0.0 if head.softcap is None else head.softcap,
            logit_scale=head.logit_scale,
            temperature=head.temperature,
            z_loss=options.z_loss,
        )


class _Checked(NamedTuple):
    """What a process computes with, of checked arguments."""

    hidden: torch.Tensor
    parameters: tuple[torch.Tensor | None, ...]  # weight, bias, A and B
    lora_scale: float
    needs: int  # bits of operands.NEEDS
    wide: bool  # logits are float32 although hidden is not
    known: int  # how many labels count; -1: not known
    main_grad: torch.Tensor | None


def _moved(target, head: HeadOptions, many: bool):
    """Return the labels after head's shift; `many`: several for each row."""
    if not many:
        return shifted(target, head.ignore_index, head.shift)
    return shifted(target.movedim(-1, 0), head.ignore_index, head.shift).movedim(0, -1)


def _describe(given_call: GivenCall) -> tuple[Facts, _Checked]:
    """Check the arguments; return the facts that the processes compare, and the operands of the call."""
    op, hidden, weight, target, group, head, call = given_call
    given, lora = call._asdict(), head.lora
    low = lora if isinstance(lora, Sequence) else ()
    tensors = {name: given[name] for name in ("class_weight", "token_weight", "denominator")}
    tensors |= {f"lora {name}": t for name, t in zip("AB", low, strict=False)}
    check_eager(op, hidden=hidden, weight=weight, target=target, bias=head.bias, **tensors)
    booleans = ("entropy", "sequence_parallel", "partial_hidden_grad")
    check_booleans(op, **{name: given[name] for name in booleans})
    target = labels_of(target, head.ignore_index)
    check_indices(op, "target", target)
    check_loss(op, call.label_smoothing, call.z_loss, call.reduction, call.denominator)
    if call.class_weight is not None:
        check_float(op, "class_weight", call.class_weight)
    operands.check_token_weight(op, call.token_weight, target)
    if call.outputs is not None:
        operands.check_outputs(op, call.outputs, OUTPUTS)
    check_float(op, "hidden", hidden)
    check_float(op, "weight", weight)
    check(op, hidden.dim() >= 1 and weight.dim() == 2, "weight must be [columns, H], got {}", weight.shape)
    many = op == LOG_PROB and several(hidden, target)
    check(op, not many or target.shape[-1] >= 1, "target must have K >= 1 labels a row, got {}", target.shape)
    labels = target[..., 0] if many else target
    if call.sequence_parallel:
        words = "hidden must be [share, ..., H] with sequence_parallel, got {}"
        check(op, hidden.dim() >= 2, words, hidden.shape)
        wanted = (torch.distributed.get_world_size(group) * hidden.shape[0], *hidden.shape[1:-1])
        fits = labels.shape == wanted
        check(op, fits, "target must be {} (of all processes), got {}", wanted, labels.shape)
        labels = labels[: hidden.shape[0]]
    columns, own, classes = weight.shape[0], head._replace(lora=None), weight
    if columns == 0:  # a process without classes
        own, classes = own._replace(bias=None), weight.new_empty(1, weight.shape[1])
    operands.check_head(op, hidden, classes, labels, own)
    operands.check_lora(op, lora, hidden, weight)
    check_layout(op, call.vocab, call.first_class)
    check_keep(op, call.keep_mb)
    hidden = operands.autocast(hidden)
    words = "hidden must be float32, bfloat16 or float16, got {}"
    check(op, has_kernel(op, hidden=hidden), words, hidden.dtype)
    wide = operands.wide_logits(op, head.logit_dtype, hidden)
    main_grad = operands.main_grad_of(op, weight)
    if main_grad is not None:  # it has weight's own columns
        check(op, main_grad.is_contiguous(), "weight.main_grad must be contiguous, got other strides")
    else:
        hidden, weight, lora = operands.whole_vectors(hidden, weight, lora)
    lora_a, lora_b, lora_scale = lora or (None, None, 1.0)
    parameters = (weight, head.bias, lora_a, lora_b)
    counted = target, head.ignore_index, head.shift
    if many:
        counted = (_moved(target, head, many) != head.ignore_index).any(-1).long() - 1, -1, False
    known = count(op, *counted, head.valid_rows)
    needs = 0
    if torch.is_grad_enabled():
        wanted = zip(operands.NEEDS.values(), (hidden, *parameters), strict=True)
        needs = sum(bit for bit, t in wanted if t is not None and t.requires_grad)
    both = call.sequence_parallel and call.partial_hidden_grad
    check(op, not both, "partial_hidden_grad must be False with sequence_parallel, which sums it, got True")
    values = {name: values_of(given[name], hidden.device) for name in ("class_weight", "token_weight")}
    values["lora"] = None if lora is None else (*values_of(lora_a, hidden.device), float(lora_scale))
    options = {"op": op} | given_call.formula()._asdict() | given | values
    caps = ("shift", "chunk_rows", "max_workspace_mb", "max_peak_mb")
    options |= {name: getattr(head, name) for name in caps}
    options |= {"logit_dtype": wide, "valid_rows": known, "denominator": number_of(call.denominator)}
    options |= {"main_grad": main_grad is not None, "bias": head.bias is not None}
    options["labels"] = target.shape[-1] if many else 0
    facts = Facts(
        size=hidden.shape[-1],
        needs=needs,
        columns=columns,
        first_class=or_unknown(options.pop("first_class")),
        vocab=or_unknown(options.pop("vocab")),
        options=named(**options, deterministic=is_deterministic()),
        **of_rows(target, hidden),
    )
    return facts, _Checked(
        hidden=hidden,
        parameters=parameters,
        lora_scale=float(lora_scale),
        needs=needs,
        wide=wide,
        known=known,
        main_grad=main_grad,
    )


def run(given_call: GivenCall, result: str = "loss") -> tuple:
    """Run a call and return ``(loss, entropies, NUMBERS by name, predicted, labels)``, the last four flat.

    Args:
        result: the name in NUMBERS of what the first one is.
    """
    op, hidden, _, target, group, head, options = given_call
    formula = given_call.formula()
    device = hidden.device if isinstance(hidden, torch.Tensor) else torch.device("cpu")
    shards, given = agree(op, group, device, functools.partial(_describe, given_call))
    hidden, parameters, lora_scale, needs, wide, known, main_grad = given
    class_weight = take_class_weight(op, shards, options.class_weight, device)
    token_weight, wanted, entropy = options.token_weight, {*(options.outputs or ())}, options.entropy
    many = op == LOG_PROB and several(hidden, target)
    labels, every = _moved(target.to(device, torch.int64, non_blocking=True), head, many), None
    if many:
        counts = labels != formula.ignore_index
        every = torch.where(counts, labels, IGNORED).flatten(0, -2)
        formula = formula._replace(ignore_index=IGNORED)
        wrong = (counts & ((labels < 0) | (labels >= shards.vocab))).any(-1)
        # No shard has the class `vocab`; the one after it does not exist.
        labels = torch.where(wrong, shards.vocab + 1, torch.where(counts.any(-1), shards.vocab, IGNORED))
    labels = labels.reshape(-1)
    kinds = {"entropy": entropy or "entropy" in wanted, "predicted": bool(wanted & {"predicted", "correct"})}
    rows = make_rows(shards, formula, class_weight, device, **kinds)
    rows = rows._replace(labels=0 if every is None else every.shape[-1])
    scale = scale_of(rows, labels, options.reduction, options.denominator)
    shares = shards.size if options.sequence_parallel else 1
    hidden = hidden.reshape(labels.shape[0] // shares, hidden.shape[-1])
    # The rows of a share are gathered without a copy.
    listed = counting(labels, formula.ignore_index, known if shares == 1 else -1)
    hidden = listed.take(hidden)
    sizes = {
        "statistics": 4 * rows.per_row() * (1 + shards.size),  # bytes of a row: this process's, those of all
        "listed": listed.index is not None,  # the rows worked on are copies
        "wide": wide,
        "train_hidden": needs & operands.HIDDEN != 0,
        "train_weight": needs & operands.WEIGHT != 0,
        "train_bias": needs & operands.BIAS != 0,
        "weight_dtype": parameters[0].dtype,
        "main_grad": main_grad is not None,
        "lora_rank": 0 if head.lora is None else parameters[2].shape[0],
    }
    # A main_grad needs the upstream gradient, so autograd sums the losses of the rows here.
    formed = None if main_grad is not None else scale
    one_pass = needs != 0 and rows.in_one_pass(hidden.dtype)
    others = operands.WEIGHT | operands.LORA_A | operands.LORA_B
    # The rows are copied, times a factor.
    sizes["scaled"] = one_pass and formed is not None and needs & others != 0
    layout = {"shares": shares, "widest": shards.widest}
    kept = {"keep_mb": options.keep_mb, "recomputes": entropy or many}
    chunk, keep = choose(op, hidden, head, **layout, **kept, **sizes)
    target = listed.labels.view(shares, hidden.shape[0])
    if many:
        every = listed.take(every).view(*target.shape, -1)
    if token_weight is not None:
        token_weight = token_weight.detach().to(device, torch.float32).reshape(-1)
        token_weight = listed.take(token_weight).view(target.shape)
    one_pass = one_pass and (formed is not None or keep)
    call = ShardedCall(
        rows=rows,
        target=target,
        labels=every,
        token_weight=token_weight,
        scale=formed,
        result=NUMBERS.index(result),
        entropy=entropy,
        needs=needs,
        chunk=max(chunk // shares, 1),
        keep=keep,
        wide=wide,
        one_pass=one_pass,
        partial=options.partial_hidden_grad,
        lora_scale=lora_scale,
        main_grad=main_grad,
    )
    loss, entropies, numbers, predicted = Function.apply(call, hidden, *parameters)
    if scale is not None and main_grad is not None:
        loss = (loss.double().sum() * scale.double()).float().reshape(())
    if loss.dim() == 0 and listed.fault is not None:
        loss = loss + listed.fault
    row_values = {name: listed.give(n) for name, n in zip(NUMBERS, numbers, strict=True)}
    return listed.give(loss), listed.give(entropies), row_values, listed.give(predicted, -1), labels


@torch._disable_dynamo  # collectives and their order are the caller's: nothing to trace
@called(stored=False)
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
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
    valid_rows: int | None = None,
    outputs: tuple[str, ...] | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_workspace_mb: float | None = None,
    max_peak_mb: float | None = None,
    keep_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
    vocab: int | None = None,
    first_class: int | None = None,
    sequence_parallel: bool = False,
    partial_hidden_grad: bool = False,
) -> torch.Tensor | NamedTuple:
    """:func:`tigon.linear_cross_entropy` with a weight whose rows are sharded over a process group.

    Every process calls it with its rows of the weight and the same labels, and all losses are bitwise equal.
    The processes exchange 12 bytes of statistics a row and process (more with label smoothing, entropies,
    argmax). They also exchange hidden's gradient once, in hidden's dtype, while the matmul of the weight's
    gradient runs.

    Args:
        hidden: ``[..., H]`` float32, bfloat16 or float16, the same in all processes. Its gradient is summed
            over them (all-reduce). With ``sequence_parallel`` it is this process's share of the first
            dimension: it is gathered chunk by chunk, and a reduce-scatter returns its gradient.
        weight: ``[columns, H]``: this process's classes. Processes may have different numbers of them, also
            0. Its gradient is not exchanged. With ``tigon_main_grad = True`` the backward adds it to
            ``main_grad`` (float32, this process's classes, contiguous), in all processes or in none.
        target: ``[...]`` class indices of the whole vocabulary for all processes' rows, the same in all.
        group, vocab, first_class: as in :func:`tigon.parallel.cross_entropy`.
        bias: ``[columns]``, for this process's classes.
        class_weight: ``[vocab]``, weights of all classes, the same in all processes.
        chunk_rows: rows per chunk; with ``sequence_parallel`` those of all processes together.
        keep_mb: with ``"none"``, the memory for this process's gradients of logits between forward and
            backward. Either all rows are kept or none. ``None``: they are kept if one chunk holds all rows.
        partial_hidden_grad: return this process's part of hidden's gradient instead of the sum. Use it if the
            backward of the hidden states sums over the processes, as that of a gather of shares does.
        valid_rows: how many labels (after ``shift``) are not ``ignore_index``. Ignored rows then cost only a
            copy of the other rows' hidden states; with ``sequence_parallel`` all rows are computed. Labels on
            the CPU are counted in the call. A wrong number makes the loss NaN on CUDA and raises an error on
            the CPU.
        lora: ``(A [r, H], B [columns, r], scale)``. B is sharded like weight, and its gradient is not
            exchanged. A is the same in all processes. Its gradient, a sum over all classes, is summed over
            the processes (all-reduce in float32, with ``partial_hidden_grad`` too).
        max_workspace_mb: upper bound of each process's memory, in MiB, without inputs, results and gradients,
            the same in all processes. Chunks shrink to fit the widest shard.
        max_peak_mb: upper bound of all that each process allocates, in MiB, gradients and results included,
            the same in all processes. Chunks shrink to fit the widest shard, and `keep_mb` is not used.
        ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss, token_weight, reduction,
            denominator, shift, outputs, logit_dtype: as in :func:`tigon.linear_cross_entropy`; smoothing,
            means and outputs are over all classes and all rows.

    Returns:
        float32 scalar, or ``target``'s shape for ``"none"``; with ``outputs`` a named tuple. All processes
        must use the loss in the same way: gradients are those of one loss. ``torch.compile`` does not trace
        the call.

    Raises:
        tigon.Error: as :func:`tigon.parallel.cross_entropy`. A label outside ``[0, vocab)`` makes its row's
            loss and the gradients NaN in all processes.
    """
    if isinstance(outputs, Sequence) and not isinstance(outputs, str):
        outputs = tuple(outputs)
    head = HeadOptions(
        bias=bias,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        lora=lora,
        ignore_index=ignore_index,
        shift=shift,
        valid_rows=valid_rows,
        chunk_rows=chunk_rows,
        max_workspace_mb=max_workspace_mb,
        logit_dtype=logit_dtype,
        max_peak_mb=max_peak_mb,
    )
    options = ShardedOptions(
        vocab=vocab,
        first_class=first_class,
        sequence_parallel=sequence_parallel,
        partial_hidden_grad=partial_hidden_grad,
        keep_mb=keep_mb,
        class_weight=class_weight,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        token_weight=token_weight,
        reduction=reduction,
        denominator=denominator,
        outputs=outputs,
    )
    loss, _, numbers, predicted, target_labels = run(
        GivenCall(LOSS, hidden, weight, target, group, head, options)
    )
    loss = loss if loss.dim() == 0 else loss.view(target.shape)
    if outputs is None:
        return loss
    found = numbers | {"loss": loss, "predicted": predicted}
    found["correct"] = (predicted == target_labels) & (target_labels != ignore_index)
    return result_type(outputs)(*(found[n] if n == "loss" else found[n].view(target.shape) for n in outputs))


@torch._disable_dynamo
@called(stored=False)
def linear_log_prob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    entropy: bool = False,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    shift: int | bool = False,
    valid_rows: int | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_peak_mb: float | None = None,
    keep_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
    vocab: int | None = None,
    first_class: int | None = None,
    sequence_parallel: bool = False,
    partial_hidden_grad: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`tigon.linear_log_prob` with a weight whose rows are sharded over a process group.

    Returns the log-probability of each label, and with ``entropy`` the entropy of each distribution; both are
    differentiable. Arguments, layout and errors are those of :func:`tigon.parallel.linear_cross_entropy`.

    Args:
        target: as there, or ``[..., K]``: K labels for each row, some of them perhaps ignored or equal. The
            processes then exchange ``4 K`` bytes a row more, and the backward computes the logits again.

    Returns:
        float32 of target's shape, and with ``entropy`` the entropies of the rows; bitwise equal in all
        processes. They are 0 on ignored labels and rows, with zero gradients.
    """
    head = HeadOptions(
        bias=bias,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        lora=lora,
        ignore_index=ignore_index,
        shift=shift,
        valid_rows=valid_rows,
        chunk_rows=chunk_rows,
        logit_dtype=logit_dtype,
        max_peak_mb=max_peak_mb,
    )
    options = ShardedOptions(
        vocab=vocab,
        first_class=first_class,
        sequence_parallel=sequence_parallel,
        partial_hidden_grad=partial_hidden_grad,
        keep_mb=keep_mb,
        entropy=entropy,
    )
    given = GivenCall(LOG_PROB, hidden, weight, target, group, head, options)
    loss, entropies, *_ = run(given, "log_prob")
    log_prob = loss.view(target.shape)
    rows = target.shape[:-1] if several(hidden, target) else target.shape
    return (log_prob, entropies.view(rows)) if entropy else log_prob
