"""A linear head sharded over the vocabulary, with its loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tigon._deterministic import is_deterministic
from tigon._op import has_kernel
from tigon.error import check
from tigon.ops.agreement import Facts, agree, comparable, number_of, of_rows, or_unknown, values_of
from tigon.ops.arguments import called, check_booleans, check_float, check_indices
from tigon.ops.cross_entropy import check_loss
from tigon.ops.loss_head import operands
from tigon.ops.loss_head.labels import labels_of, shifted
from tigon.ops.loss_head.linear_cross_entropy import OUTPUTS
from tigon.ops.loss_head.linear_log_prob import has_several_labels
from tigon.ops.loss_head.operands import LabelFormula
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import Sizes, check_keep, limit_bytes, padded, with_head
from tigon.ops.loss_head.reference import result_type
from tigon.parallel.cross_entropy import check_eager, check_layout, take_class_weight
from tigon.parallel.plan import choose, known_count, list_counted_rows
from tigon.parallel.rows import IGNORED, NUMBERS, Rows, make_rows, scale_of
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
    compared: tuple = ()  # what else the processes compare


class ShardedArguments(NamedTuple):
    """The arguments of a call on a sharded head, as the caller gave them."""

    op: str
    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    group: torch.distributed.ProcessGroup
    head: HeadOptions
    options: ShardedOptions

    def formula(self) -> LabelFormula:
        """The numbers of the loss; LoRA's scale is not among them."""
        head, options = self.head, self.options
        return LabelFormula(
            ignore_index=head.ignore_index,
            label_smoothing=options.label_smoothing,
            softcap=0.0 if head.softcap is None else head.softcap,
            logit_scale=head.logit_scale,
            temperature=head.temperature,
            z_loss=options.z_loss,
        )

    def has_several_labels(self) -> bool:
        """Whether each row has several labels, in target's last dimension."""
        return self.op == LOG_PROB and has_several_labels(self.hidden, self.target)

    def shifted(self, target: torch.Tensor) -> torch.Tensor:
        """The labels after head's shift."""
        ignore_index, shift = self.head.ignore_index, self.head.shift
        if not self.has_several_labels():
            return shifted(target, ignore_index, shift)
        return shifted(target.movedim(-1, 0), ignore_index, shift).movedim(0, -1)


class _Parameters(NamedTuple):
    """The tensors that can get a gradient in addition to hidden."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None


class _CheckedCall(NamedTuple):
    """What a process computes with, of checked arguments."""

    hidden: torch.Tensor
    target: torch.Tensor  # in an integer dtype that has ignore_index
    parameters: _Parameters
    lora_scale: float
    needs: int  # bits of operands.NEEDS
    wide: bool  # logits are float32 although hidden is not
    valid_rows: int  # how many labels count; -1: not known
    main_grad: torch.Tensor | None


def _check(given: ShardedArguments) -> torch.Tensor:
    """Check the arguments, and return the labels in an integer dtype that has ignore_index."""
    op, hidden, weight, head, options = given.op, given.hidden, given.weight, given.head, given.options
    constants = {name: getattr(options, name) for name in ("class_weight", "token_weight", "denominator")}
    low_rank = head.lora if isinstance(head.lora, Sequence) else ()
    adapter = {f"lora {name}": t for name, t in zip("AB", low_rank, strict=False)}
    check_eager(op, hidden=hidden, weight=weight, target=given.target, bias=head.bias, **constants, **adapter)
    booleans = ("entropy", "sequence_parallel", "partial_hidden_grad")
    check_booleans(op, **{name: getattr(options, name) for name in booleans})
    target = labels_of(given.target, head.ignore_index)
    check_indices(op, "target", target)
    check_loss(op, options.label_smoothing, options.z_loss, options.reduction, options.denominator)
    if options.class_weight is not None:
        check_float(op, "class_weight", options.class_weight)
    operands.check_token_weight(op, options.token_weight, target)
    if options.outputs is not None:
        operands.check_outputs(op, options.outputs, OUTPUTS)
    check_float(op, "hidden", hidden)
    check_float(op, "weight", weight)
    check(op, hidden.dim() >= 1 and weight.dim() == 2, "weight must be [columns, H], got {}", weight.shape)
    labels = target
    if given.has_several_labels():
        check(op, target.shape[-1] >= 1, "target must have K >= 1 labels a row, got {}", target.shape)
        labels = target[..., 0]
    if options.sequence_parallel:
        words = "hidden must be [shard, ..., H] with sequence_parallel, got {}"
        check(op, hidden.dim() >= 2, words, hidden.shape)
        wanted = (torch.distributed.get_world_size(given.group) * hidden.shape[0], *hidden.shape[1:-1])
        fits = labels.shape == wanted
        check(op, fits, "target must be {} (of all processes), got {}", wanted, labels.shape)
        labels = labels[: hidden.shape[0]]
    own, classes = head._replace(lora=None), weight
    if weight.shape[0] == 0:  # a process without classes
        own, classes = own._replace(bias=None), weight.new_empty(1, weight.shape[1])
    operands.check_head(op, hidden, classes, labels, own)
    operands.check_lora(op, head.lora, hidden, weight)
    check_layout(op, options.vocab, options.first_class)
    check_keep(op, options.keep_mb)
    both = options.sequence_parallel and options.partial_hidden_grad
    check(op, not both, "partial_hidden_grad must be False with sequence_parallel, which sums it, got True")
    return target


def _checked_call(given: ShardedArguments) -> _CheckedCall:
    """Check the arguments, and make the operands of the call."""
    target = _check(given)
    op, head, weight, lora = given.op, given.head, given.weight, given.head.lora
    hidden = operands.autocast(given.hidden)
    words = "hidden must be float32, bfloat16 or float16, got {}"
    check(op, has_kernel(op, hidden=hidden), words, hidden.dtype)
    wide = operands.wide_logits(op, head.logit_dtype, hidden)
    main_grad = operands.main_grad_of(op, weight)
    if main_grad is not None:  # it has weight's own columns
        check(op, main_grad.is_contiguous(), "weight.main_grad must be contiguous, got other strides")
    else:
        hidden, weight, lora = operands.whole_vectors(hidden, weight, lora)
    lora_a, lora_b, lora_scale = lora or (None, None, 1.0)
    parameters = _Parameters(weight, head.bias, lora_a, lora_b)
    if given.has_several_labels():
        counts = (given.shifted(target) != head.ignore_index).any(-1)
        valid_rows = known_count(op, counts.long() - 1, -1, False, head.valid_rows)
    else:
        valid_rows = known_count(op, target, head.ignore_index, head.shift, head.valid_rows)
    needs = operands.needs_of_tensors(hidden, *parameters)
    return _CheckedCall(hidden, target, parameters, float(lora_scale), needs, wide, valid_rows, main_grad)


def _describe(given: ShardedArguments) -> tuple[Facts, _CheckedCall]:
    """Check the arguments; return the facts that the processes compare, and the operands of the call."""
    checked, head = _checked_call(given), given.head
    hidden, target, parameters = checked.hidden, checked.target, checked.parameters
    options = {"op": given.op} | given.formula()._asdict() | given.options._asdict()
    first_class, vocab = options.pop("first_class"), options.pop("vocab")
    options |= {name: values_of(options[name], hidden.device) for name in ("class_weight", "token_weight")}
    lora = None if head.lora is None else (*values_of(parameters.lora_a, hidden.device), checked.lora_scale)
    options["lora"] = lora
    caps = ("shift", "chunk_rows", "max_workspace_mb", "max_peak_mb")
    options |= {name: getattr(head, name) for name in caps}
    options |= {"logit_dtype": checked.wide, "valid_rows": checked.valid_rows}
    options |= {"denominator": number_of(given.options.denominator), "bias": head.bias is not None}
    options |= {"main_grad": checked.main_grad is not None}
    options["labels"] = target.shape[-1] if given.has_several_labels() else 0
    facts = Facts(
        size=hidden.shape[-1],
        needs=checked.needs,
        columns=parameters.weight.shape[0],
        first_class=or_unknown(first_class),
        vocab=or_unknown(vocab),
        options=comparable(**options, deterministic=is_deterministic()),
        **of_rows(target, hidden),
    )
    return facts, checked


class _RowLabels(NamedTuple):
    """The labels of a call's rows, of all processes."""

    of_row: torch.Tensor  # int64 [rows]; `vocab` if a row has several of which one counts
    ignore_index: int
    sets: torch.Tensor | None = None  # int64 [rows, K], IGNORED where one does not count


def _row_labels(given: ShardedArguments, vocab: int, device) -> _RowLabels:
    ignore_index = given.head.ignore_index
    labels = given.shifted(given.target.to(device, torch.int64, non_blocking=True))
    if not given.has_several_labels():
        return _RowLabels(labels.reshape(-1), ignore_index)
    counts = labels != ignore_index
    wrong = (counts & ((labels < 0) | (labels >= vocab))).any(-1)
    # No shard has the class `vocab`; the one after it does not exist.
    of_row = torch.where(wrong, vocab + 1, torch.where(counts.any(-1), vocab, IGNORED))
    return _RowLabels(of_row.reshape(-1), IGNORED, torch.where(counts, labels, IGNORED).flatten(0, -2))


class HeadResults(NamedTuple):
    """The results of a call; those of rows are flat."""

    loss: torch.Tensor
    entropies: torch.Tensor
    numbers: dict[str, torch.Tensor]  # NUMBERS by name
    predicted: torch.Tensor
    labels: torch.Tensor


def _choose(
    given: ShardedArguments, checked: _CheckedCall, rows: Rows, hidden, sp_size: int, *, listed, scaled
):
    """:func:`choose` for the computed rows of a sequence shard.

    Args:
        listed: hidden is a copy of the rows that count.
        scaled: the rows of a chunk are copied once more, times their factors.
    """
    shards, head, (weight, _, lora_a, _) = rows.shards, given.head, checked.parameters
    widest = max(shards.widest, 1)
    # This process's statistics and those of all, and logits of both precisions.
    row = 4 * rows.per_row() * (1 + shards.size) + 4 * padded(widest) * checked.wide
    sizes = Sizes(
        chunk_rows=head.chunk_rows or 0,
        cap=limit_bytes(head.max_workspace_mb),
        copies=3 * (sp_size > 1) + scaled,  # a gathered chunk, the next one, and gradients being reduced
        row=row,
        fixed=2 * sp_size * hidden.numel() * hidden.element_size() * listed,
        lean=False,  # fewer rows would be more exchanges
    )
    sizes = operands.with_needs(sizes, checked.needs, lora_a, checked.main_grad)
    sizes = with_head(sizes, hidden, widest, sp_size * hidden.shape[0])
    dtypes, recomputes = (hidden.dtype, weight.dtype), given.options.entropy or given.has_several_labels()
    return choose(
        given.op, head, sizes, dtypes, sp_size, keep_mb=given.options.keep_mb, recomputes=recomputes
    )


def run(given: ShardedArguments, result: str = "loss") -> HeadResults:
    """Run a call.

    Args:
        result: the name in NUMBERS of what is returned as the loss of a row.
    """
    op, options = given.op, given.options
    device = given.hidden.device if isinstance(given.hidden, torch.Tensor) else torch.device("cpu")
    shards, checked = agree(op, given.group, device, functools.partial(_describe, given))
    needs, parameters, main_grad = checked.needs, checked.parameters, checked.main_grad
    operands.TrainedCalls.count(checked.hidden, parameters.weight)
    class_weight = take_class_weight(op, shards, options.class_weight, device)
    labels = _row_labels(given, shards.vocab, device)
    formula = given.formula()._replace(ignore_index=labels.ignore_index)
    outputs = {*(options.outputs or ())}
    entropy, predicted = options.entropy or "entropy" in outputs, bool(outputs & {"predicted", "correct"})
    rows = make_rows(shards, formula, class_weight, device, entropy=entropy, predicted=predicted)
    rows = rows._replace(labels_per_row=0 if labels.sets is None else labels.sets.shape[-1])
    scale = scale_of(rows, labels.of_row, options.reduction, options.denominator)
    sp_size = shards.size if options.sequence_parallel else 1
    # The rows of sequence shards are gathered without a copy.
    listed = list_counted_rows(
        labels.of_row, formula.ignore_index, checked.valid_rows if sp_size == 1 else -1
    )
    hidden = checked.hidden.reshape(labels.of_row.shape[0] // sp_size, checked.hidden.shape[-1])
    hidden = listed.take(hidden)
    # A main_grad needs the upstream gradient, so autograd sums the losses of the rows here.
    inner_scale = None if main_grad is not None else scale
    one_pass = needs != 0 and rows.in_one_pass(hidden.dtype)
    of_parameters = operands.WEIGHT | operands.LORA_A | operands.LORA_B
    scaled = one_pass and inner_scale is not None and needs & of_parameters != 0
    chunk, keep = _choose(
        given, checked, rows, hidden, sp_size, listed=listed.index is not None, scaled=scaled
    )
    target = listed.labels.view(sp_size, hidden.shape[0])
    label_sets = listed.take(labels.sets)
    token_weight = options.token_weight
    if token_weight is not None:
        token_weight = listed.take(token_weight.detach().to(device, torch.float32).reshape(-1))
    sharded_call = ShardedCall(
        rows=rows,
        target=target,
        labels=None if label_sets is None else label_sets.view(*target.shape, -1),
        token_weight=None if token_weight is None else token_weight.view(target.shape),
        scale=inner_scale,
        result=NUMBERS.index(result),
        entropy=options.entropy,
        needs=needs,
        chunk=max(chunk // sp_size, 1),
        keep=keep,
        wide=checked.wide,
        one_pass=one_pass and (inner_scale is not None or keep),
        partial=options.partial_hidden_grad,
        lora_scale=checked.lora_scale,
        main_grad=main_grad,
    )
    loss, entropies, numbers, predicted = Function.apply(sharded_call, hidden, *parameters)
    if scale is not None and main_grad is not None:
        loss = (loss.double().sum() * scale.double()).float().reshape(())
    if loss.dim() == 0 and listed.fault is not None:
        loss = loss + listed.fault
    return HeadResults(
        loss=listed.give(loss),
        entropies=listed.give(entropies),
        numbers={name: listed.give(n) for name, n in zip(NUMBERS, numbers, strict=True)},
        predicted=listed.give(predicted, -1),
        labels=labels.of_row,
    )


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
            over them (all-reduce). With ``sequence_parallel`` it is this process's shard of the first
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
            backward of the hidden states sums over the processes, as that of a gather of them does.
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
    results = run(ShardedArguments(LOSS, hidden, weight, target, group, head, options))
    loss = results.loss if results.loss.dim() == 0 else results.loss.view(target.shape)
    if outputs is None:
        return loss
    predicted, labels = results.predicted, results.labels
    named = results.numbers | {"predicted": predicted}
    named["correct"] = (predicted == labels) & (labels != ignore_index)
    return result_type(outputs)(*(loss if n == "loss" else named[n].view(target.shape) for n in outputs))


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
    given = ShardedArguments(LOG_PROB, hidden, weight, target, group, head, options)
    results = run(given, "log_prob")
    log_prob = results.loss.view(target.shape)
    rows = target.shape[:-1] if given.has_several_labels() else target.shape
    return (log_prob, results.entropies.view(rows)) if entropy else log_prob
