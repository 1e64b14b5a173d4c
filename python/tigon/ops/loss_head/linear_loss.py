"""Streaming losses: a Python function of log-probabilities, differentiated while its chunk has logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tigon._op import has_kernel, is_transformed, once, raw, refuse_tangents
from tigon.error import check
from tigon.ops import arguments
from tigon.ops import cross_entropy as _cross_entropy
from tigon.ops.loss_head import linear_log_prob as _log_prob
from tigon.ops.loss_head import operands
from tigon.ops.loss_head.autograd import RESULTS, dtypes_of, scale_gradients
from tigon.ops.loss_head.driver import Chunk, Gradients, Part, RowPass
from tigon.ops.loss_head.labels import check_count, labels_of, sequence_counts, shifted
from tigon.ops.loss_head.matmuls import (
    ENTROPY,
    compute_gradients,
    compute_logits,
    row_gradient,
    row_statistics,
)
from tigon.ops.loss_head.operands import NEEDS, HeadCall, TrainedCalls
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import MOST_GROUP_LOGITS, Sizes, check_unbounded, padded, plan, with_head

_OP = "linear_loss"
KINDS = ("sequence", "pair")


def _default_chunk(hidden, weight, rows, dweight):
    return plan(with_head(Sizes(train_weight=dweight), hidden, weight.shape[0], rows)).chunk_rows


class Groups:
    """Answers ``[B, T]`` as groups in order: each answer by itself, or answer g with answer B/2 + g."""

    def __init__(self, op, kind, target, ignore_index, shift=False, position_ids=None):
        arguments.check_choice(op, "group", kind, KINDS)
        check(op, target.dim() == 2, "target must be [B, T] with group, got {}", target.shape)
        answers, self.tokens = target.shape
        self.sides = 2 if kind == "pair" else 1
        even = answers % self.sides == 0
        check(op, even, "target must have chosen and rejected answers with group='pair', got {}", answers)
        self.number, self.rows = answers // self.sides, self.sides * self.tokens
        counts = sequence_counts(target, ignore_index, shift, position_ids)  # None: not known here
        if counts is None:
            self.sizes = [self.rows] * self.number
        else:
            self.sizes = [sum(counts[g :: self.number]) for g in range(self.number)]

    def chunks(self, limit) -> list[Chunk]:
        """Chunks of whole groups: as many groups as fit `limit` rows, at least one."""
        limit, chunks, begin, end, first = max(limit, *self.sizes, 1), [], 0, 0, 0
        for group, size in enumerate(self.sizes):
            if end + size - begin > limit:
                chunks.append(Chunk.whole(begin, end, groups=slice(first, group)))
                begin, first = end, group
            end += size
        whole = Chunk.whole(begin, end, groups=slice(first, self.number))
        return [*chunks, whole] if self.number else []

    def limit(self, hidden, weight, chunk_rows) -> int:
        """Rows of a chunk, which the longest group may make longer; 0 if it fits none."""
        longest, limit = max(self.sizes, default=0), chunk_rows
        if chunk_rows is None:
            dweight = torch.is_grad_enabled() and weight.requires_grad
            limit = _default_chunk(hidden, weight, sum(self.sizes), dweight)
            row = padded(weight.shape[0]) * hidden.element_size()
            chunk_rows = MOST_GROUP_LOGITS // row
        return max(limit, longest) if longest <= max(limit, chunk_rows) else 0

    def order(self, device):
        """The rows in the order of groups; None if they already have that order."""
        if self.sides == 1:
            return None
        rows = torch.arange(self.number * self.rows, device=device)
        return rows.view(self.sides, self.number, self.tokens).transpose(0, 1).reshape(-1)

    def part(self, t, first, last):
        """The part of a tensor [B, T, ...] or [B] for groups [first, last), as fn sees it; a view."""
        shaped = t.view(self.sides, self.number, *t.shape[1:])[:, first:last]
        return shaped if self.sides > 1 else shaped[0]

    def seen(self, values, slots, count):
        """Values of rows as fn sees them, 0 for rows left out: [groups, T] or [2, groups, T]."""
        if slots is not None:
            values = values.new_zeros(count * self.rows).scatter(0, slots, values)
        values = values.view(count, self.sides, self.tokens).transpose(0, 1)
        return values if self.sides > 1 else values[0]


def _fake_rows(target, ignore_index, count):
    return target.new_empty(count), target.new_empty(count), target.new_empty((), dtype=torch.float32)


list_rows = raw("linear_loss_rows", _fake_rows)


class UserLoss(NamedTuple):
    """The loss function of the log-probabilities, and how its losses become a scalar."""

    fn: Callable[..., torch.Tensor]
    entropy: bool
    reduction: str
    denominator: Any  # 0-dim tensor, number, or "count": the rows that count
    wrt: tuple[bool, ...]  # which per-token tensors need a gradient
    grad: bool  # gradients are recorded in the calling code
    groups: Groups | None = None  # fn sees whole groups, else rows


def _losses(fn, statistics, tensors, counts, groups=None):
    """Compute the losses of fn on rows, 0 if the label is ignored; or on `groups` groups."""
    values = fn(*statistics, *tensors)
    log_prob, *_ = statistics
    what, shape = ("row", log_prob.shape) if groups is None else ("group", (groups,))
    fits = isinstance(values, torch.Tensor) and values.shape == shape
    given = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
    check(_OP, fits, "fn must return one loss per " + what + ", a tensor {}, got {}", list(shape), given)
    return values if counts is None else torch.where(counts, values, 0.0)


def graph_leaves(result) -> Iterator[torch.Tensor]:
    """Find the leaves that a tensor's gradient reaches."""
    seen, nodes = set(), [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes.extend(parent for parent, _ in node.next_functions)


def _check_closed(values, leaves):
    """Refuse tensors that fn reaches on its own, which would silently get no gradient."""
    allowed = {id(leaf) for leaf in leaves}
    closed = all(id(leaf) in allowed for leaf in graph_leaves(values))
    words = "fn must take tensors that need a gradient as arguments of {}, got one from elsewhere"
    check(_OP, closed, words, _OP)


class _UserPass(RowPass):
    """The function on chunks of rows, with the gradients that are needed."""

    def __init__(self, loss: UserLoss, call: HeadCall, tensors) -> None:
        hidden, weight, target, *_ = self.operands = call.operands
        super().__init__(hidden.reshape(-1, hidden.shape[-1]), weight.shape[0], [])
        self.loss, self.formula, self.tensors, groups = loss, call.formula, tensors, loss.groups
        self.needs = call.memory.needs & ~operands.MAY_ROUND
        self.ignore_index, valid = call.formula.ignore_index, call.memory.valid_rows
        if target.device.type == "cpu":
            valid = check_count(_OP, target, self.ignore_index, valid)
        if groups is not None:
            valid = sum(groups.sizes)
        order = None if groups is None else groups.order(target.device)
        self.index, self.labels, self.fault = order, target if order is None else target[order], None
        self.place = None  # of the listed rows in the order of the groups
        if 0 <= valid < target.shape[0]:
            self.place, self.labels, self.fault = list_rows(self.labels, self.ignore_index, valid)
            self.index = self.place if order is None else order[self.place]
        count, limit = self.labels.shape[0], call.memory.chunk_rows
        limit = limit or _default_chunk(hidden, weight, count, self.needs & operands.WEIGHT != 0)
        limit = min(limit, max(count, 1))
        if groups is None:
            self.chunks = [Chunk.whole(i, min(i + limit, count)) for i in range(0, count, limit)]
        else:
            self.chunks = groups.chunks(limit)

    def states(self):
        if self.index is None:
            yield from super().states()
            return
        for chunk in self.chunks:
            yield chunk, chunk.parts[0], self.hidden[self.index[chunk.at]]

    def memory(self, rows: int) -> None:
        loss, target = self.loss, self.operands.target
        self.logits = self.space(rows, torch.float32 if self.formula.wide_logits else None)
        self.gradients = Gradients(self, self.needs, self.vocab)
        if self.gradients.dhidden is not None and (self.index is not None or not self.chunks):
            self.gradients.dhidden.zero_()
        needed = zip(self.tensors, loss.wrt, strict=True)
        self.dtensors = [torch.zeros_like(t) if need else None for t, need in needed]
        self.total = torch.zeros((), dtype=torch.float64, device=self.hidden.device)
        denominator = loss.denominator
        if denominator == "count":
            denominator = (target != self.ignore_index).sum()
        if not isinstance(denominator, torch.Tensor):
            denominator = torch.full((), denominator, dtype=torch.float64, device=target.device)
        self.scale = denominator.reshape(()).double().reciprocal()  # on the device
        self.early = self.scale.float() if self.hidden.dtype != torch.float16 else None

    def finish(self) -> torch.Tensor:
        loss = self.total * self.scale
        return (loss if self.fault is None else loss + self.fault).float()

    def _seen(self, chunk, statistics):
        """The arguments of fn for a chunk, and which rows count (None: all, or groups)."""
        groups, part = self.loss.groups, chunk.at
        if groups is None:
            rows = part if self.index is None else self.index[part]
            counts = self.labels[part] != self.ignore_index if self.index is None else None
            return statistics, [t[rows] for t in self.tensors], counts
        first, last = chunk.groups.start, chunk.groups.stop
        slots, count = None, last - first
        if self.place is not None:  # a wrong list may hold any places; its losses are NaN
            slots = (self.place[part] - first * groups.rows).clamp(0, max(count * groups.rows - 1, 0))
        seen = [groups.seen(t, slots, count) for t in statistics]
        return seen, [groups.part(t, first, last) for t in self.tensors], None

    def _passed(self, logits, labels) -> dict:
        """What both row passes take, over all classes."""
        names = ("ignore_index", "label_smoothing", "softcap", "z_loss", "logit_scale", "temperature")
        formula = {name: getattr(self.formula, name) for name in names}
        rows = {"logits": logits, "target": labels, "bias": self.operands.bias}
        return {**rows, **formula, "first_class": 0, "classes": 0}

    def _statistics(self, logits, hidden, labels) -> tuple[torch.Tensor, ...]:
        """Compute the log-probabilities of a chunk's rows, and the entropies if fn takes them."""
        entropy = self.loss.entropy
        parts = hidden.new_empty(3 + entropy, hidden.shape[0], dtype=torch.float32)
        if hidden.shape[0]:
            compute_logits(logits, hidden, self.operands.weight)
            row_statistics.named(**self._passed(logits, labels), parts=parts, kinds=ENTROPY * entropy)
        if not entropy:
            return (parts[2],)
        return parts[2], torch.where(labels == self.ignore_index, 0.0, parts[3])

    def rows(self, chunk: Chunk, part: Part, hidden) -> None:
        loss, labels, trains = self.loss, self.labels[chunk.at], self.needs != 0
        logits, wanted = self.logits[: hidden.shape[0]], trains or any(loss.wrt)
        statistics = self._statistics(logits, hidden, labels)
        with torch.set_grad_enabled(loss.grad):
            for t in statistics:
                t.requires_grad_(trains)
            seen, parts, counts = self._seen(chunk, statistics)
            needed = zip(parts, loss.wrt, strict=True)
            tensors = [t.detach().requires_grad_(need and wanted) for t, need in needed]
            number = None if loss.groups is None else chunk.groups.stop - chunk.groups.start
            values = _losses(loss.fn, seen, tensors, counts, number)
            total = values.sum()
        self.total += values.detach().double().sum()
        leaves = [t for t in (*statistics, *tensors) if t.requires_grad]
        if chunk is self.chunks[0] and loss.grad:
            _check_closed(total, leaves)
        if not wanted:
            return
        gradients = iter(torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ())
        if trains:
            upstream = next(gradients, None)
            # of the loss -log_prob
            upstream = torch.zeros_like(statistics[0]) if upstream is None else upstream.neg()
            entropy_upstream = next(gradients, None) if loss.entropy else None
            self._differentiate(chunk, hidden, logits, upstream, entropy_upstream)
        for kept, t in zip(self.dtensors, tensors, strict=True):
            gradient = next(gradients, None) if t.requires_grad else None
            if gradient is not None and loss.groups is None:
                kept[chunk.at if self.index is None else self.index[chunk.at]] = gradient
            elif gradient is not None:
                loss.groups.part(kept, chunk.groups.start, chunk.groups.stop).copy_(gradient)

    def _differentiate(self, chunk, hidden, logits, upstream, entropy_upstream) -> None:
        """Compute what the chunk adds to the head's gradients."""
        if hidden.shape[0] == 0:
            return
        if self.early is not None:
            upstream = upstream * self.early
            entropy_upstream = None if entropy_upstream is None else entropy_upstream * self.early
        gradients, dhidden, listed = self.gradients, None, self.index is not None
        if gradients.dhidden is not None:
            dhidden = torch.empty_like(hidden) if listed else gradients.dhidden[chunk.at]
        dlogits = logits if logits.dtype == hidden.dtype else self.space(hidden.shape[0])
        rows = self._passed(logits, self.labels[chunk.at])
        row_gradient.named(**rows, dlogits=dlogits, scale=upstream, entropy_scale=entropy_upstream)
        sums = {"dweight": gradients.dweight, "dbias": gradients.dbias, "first": chunk.begin == 0}
        compute_gradients(dlogits, hidden, self.operands.weight, dhidden=dhidden, padded=True, **sums)
        if dhidden is not None and listed:
            gradients.dhidden[self.index[chunk.at]] = dhidden


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, call, hidden, weight, bias, *tensors):  # the call holds them too
        rows = _UserPass(fn, call, tensors)
        loss = rows.run()
        ctx.shape, ctx.needs = hidden.shape, rows.needs
        ctx.dtypes = dtypes_of(hidden, weight, bias)[:3]
        kept = (hidden.new_empty(0) if g is None else g for g in rows.gradients.as_tuple())
        ctx.save_for_backward(rows.scale.float(), *kept, *rows.dtensors)
        return loss

    @staticmethod
    @once(_OP)
    def backward(ctx, dloss):
        saved = ctx.saved_tensors
        computed, dtensors, factor = saved[: RESULTS - 1], saved[RESULTS - 1 :], dloss * saved[0]
        scaled = scale_gradients(dloss, computed, *ctx.dtypes[1:])
        gradients = zip(scaled, ctx.dtypes, NEEDS.values(), strict=False)
        dhidden, dweight, dbias = (g.to(dtype) if ctx.needs & bit else None for g, dtype, bit in gradients)
        dtensors = (None if g is None else torch.where(g == 0, g, g * factor).to(g.dtype) for g in dtensors)
        return None, None, None if dhidden is None else dhidden.view(ctx.shape), dweight, dbias, *dtensors


def _composed(hidden, weight, target, loss: UserLoss, tensors, kernel, head: HeadOptions):
    """Log-probabilities of all rows, then fn: for unreduced losses, whose upstream gradients come later."""
    log_prob = _log_prob.linear_log_prob if kernel else _log_prob.reference
    weight = weight if kernel else operands.plain_weight(_OP, weight)
    target = shifted(target, head.ignore_index, head.shift, head.position_ids)
    options = head.log_prob_options() | {"entropy": loss.entropy, "max_peak_mb": head.max_peak_mb}
    statistics = log_prob(hidden, weight, target, **options)
    statistics = [s.reshape(-1) for s in (statistics if loss.entropy else (statistics,))]
    groups = loss.groups
    if groups is None:
        counts = (target != head.ignore_index).reshape(-1)
        values = _losses(loss.fn, statistics, tensors, counts)
    else:
        seen = [groups.part(s.view(target.shape), 0, groups.number) for s in statistics]
        parts = [groups.part(t, 0, groups.number) for t in tensors]
        values = _losses(loss.fn, seen, parts, None, groups.number)
    if loss.denominator is not None:
        return _cross_entropy.divide(values.sum(), loss.denominator)
    if loss.reduction == "none":
        return values.view(target.shape) if groups is None else values
    if loss.reduction == "sum":
        return values.sum()
    return values.sum() / (counts.sum() if groups is None else groups.number)


def _flat_tensors(tensors, target, device, groups: Groups | None) -> list[torch.Tensor]:
    """Check the tensors of fn and return them row by row, or with groups as they are."""
    for t in tensors:
        check(_OP, isinstance(t, torch.Tensor), "tensors must be tensors, got {}", arguments.kind_of(t))
        arguments.check_layout(_OP, "tensors", t)
        check(_OP, not arguments.is_narrow(t), "tensors must be of at least 16 bits, got {}", t.dtype)
        fits = t.shape[: target.dim()] == target.shape or (groups is not None and t.shape == target.shape[:1])
        check(_OP, fits, "tensors must be {} or longer, got {}", target.shape, t.shape)
        check(_OP, t.device == device, "tensors must be on {}, got {}", device, t.device)
    if groups is not None:
        return [t.contiguous() for t in tensors]
    return [t.reshape(target.numel(), *t.shape[target.dim() :]) for t in tensors]


def _native_call(
    hidden, weight, target, loss: UserLoss, tensors, chunk, head: HeadOptions
) -> HeadCall | None:
    """The call of one pass by chunks; None if ``max_peak_mb`` has no room for it."""
    call, _ = operands.native_call(_OP, hidden, operands.plain_weight(_OP, weight), target, head)
    call, groups = call.with_memory(chunk_rows=chunk), loss.groups
    if head.max_peak_mb is None:
        return call
    if call.formula.wide_logits:
        check_unbounded(_OP, head.max_peak_mb, "with logit_dtype=torch.float32")
    kept = sum(t.numel() * t.element_size() for t, needed in zip(tensors, loss.wrt, strict=True) if needed)
    head_plan = operands.plan_within(_OP, call, head, Sizes(sums=True), weight, extra_bytes=kept)
    if head_plan.least or (
        groups is not None and head_plan.capped and head_plan.chunk_rows < max(groups.sizes)
    ):
        return None
    return call.divided(head_plan)


def _divisor(loss: UserLoss, device):
    """The denominator as :class:`_UserPass` takes it."""
    tensor, number = _cross_entropy.split_denominator(loss.denominator, device)
    if tensor is not None:
        check(_OP, tensor.device == device, "denominator must be on {}, got {}", device, tensor.device)
        return tensor
    if number is not None or loss.reduction == "sum":
        return 1.0 if number is None else number
    return "count" if loss.groups is None else loss.groups.number


@torch._disable_dynamo  # torch.compiler.disable, but the compiler is imported by the first call, not here
@arguments.called()
def linear_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    fn: Callable[..., torch.Tensor],
    *tensors: torch.Tensor,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    group: str | None = None,
    entropy: bool = False,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    shift: int | bool = False,
    position_ids: torch.Tensor | None = None,
    valid_rows: int | None = None,
    chunk_rows: int | None = None,
    max_peak_mb: float | None = None,
    logit_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A custom loss of per-token log-probabilities in three matmuls, without storing the full logits.

    ``fn(log_prob, [entropy,] *tensors)`` is called for each chunk of rows and returns one loss per row.
    Autograd computes its gradient while the chunk's logits still exist. The loss of a row must depend only on
    that row. Then chunking changes only the order of additions.

    Args:
        hidden, weight, target, bias, temperature, softcap, logit_scale, ignore_index, shift,
            position_ids, valid_rows, chunk_rows, logit_dtype: as in :func:`tigon.linear_cross_entropy`.
        fn: called with float32 vectors of one chunk. They may include rows with an ignored label; their
            losses are dropped. Pass tensors that need a gradient through `tensors`.
        max_peak_mb: as in :func:`tigon.linear_cross_entropy`, without what fn itself allocates for the rows
            of a chunk. The weight's gradient is summed in float32. If that has no room, the loss uses
            :func:`tigon.linear_log_prob`, at its cost and bound.
        *tensors: per-token tensors ``[..., ...]`` (the leading shape of target), passed to fn row by row;
            differentiable.
        entropy: pass the entropies to fn as its second argument.
        reduction: ``"mean"`` (over the rows that count), ``"sum"``, or ``"none"``: ``[...]`` losses, computed
            with :func:`tigon.linear_log_prob` and at its cost.
        denominator: number or tensor of one element: the loss is ``sum / denominator`` instead of
            ``reduction``.
        group: the unit of a loss, if rows depend on each other. ``None``: a row. ``"sequence"``: an answer of
            target ``[B, T]``; fn takes float32 ``[s, T]`` of s whole answers. ``"pair"``: answers g and
            ``B/2 + g`` (chosen, rejected); fn takes ``[2, s, T]``. fn returns ``[s]`` losses. A mean is over
            all groups, also those in which no label counts. At ignored labels, log-probabilities and
            entropies are 0 and get no gradient; if fn divides by a length, pass the mask as one of `tensors`.
            `tensors` are ``[B, T, ...]`` or ``[B]``; fn gets ``[s, T, ...]`` or ``[s]`` (pairs: with a
            leading 2). A chunk holds whole groups, so the call takes three matmuls. A longer group makes the
            chunk longer, up to 1 GiB of logits. If it does not fit (or ``chunk_rows`` forbids it), the loss
            uses :func:`tigon.linear_log_prob`, at its cost. Ignored rows cost nothing on the CPU, and on CUDA
            after ``tigon.count_labels(target, per_sequence=True)``.

    Returns:
        float32 scalar; for ``"none"`` losses ``[...]`` of rows or ``[groups]``. torch.compile does not trace
        the call: it breaks the graph.

    Raises:
        tigon.Error: shapes, dtypes or options do not fit, or fn does not return one loss per row or group.
    """
    logits = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    labels = {"ignore_index": ignore_index, "shift": shift, "position_ids": position_ids}
    limits = {"valid_rows": valid_rows, "chunk_rows": chunk_rows, "max_peak_mb": max_peak_mb}
    head = HeadOptions(**logits, **labels, **limits, logit_dtype=logit_dtype)
    target = labels_of(target, ignore_index)
    operands.check_head(_OP, hidden, weight, target, head)
    arguments.check_booleans(_OP, entropy=entropy)
    check(_OP, callable(fn), "fn must be callable, got {}", arguments.kind_of(fn))
    _cross_entropy.check_denominator(_OP, denominator)
    arguments.check_choice(_OP, "reduction", reduction, _cross_entropy.REDUCTIONS)
    groups = None if group is None else Groups(_OP, group, target, **labels)
    tensors = _flat_tensors(tensors, target, hidden.device, groups)
    TrainedCalls.count(hidden, weight)
    hidden = operands.autocast(hidden)
    operands.wide_logits(_OP, logit_dtype, hidden)
    kernel, grad = has_kernel(_OP, hidden=hidden), torch.is_grad_enabled()
    if not kernel:
        operands.check_plain(_OP, weight.shape[0], target, head)
    wrt = tuple(grad and t.requires_grad for t in tensors)
    loss = UserLoss(fn, entropy, reduction, denominator, wrt, grad, groups)
    chunk = (chunk_rows or 0) if groups is None else groups.limit(hidden, weight, chunk_rows)
    apart, late = groups is not None and chunk == 0, reduction == "none" and denominator is None
    composed = functools.partial(_composed, hidden, weight, target, loss, tensors, kernel, head)
    if not kernel or apart or arguments.is_traced(hidden) or late:
        return composed()
    transformed = is_transformed()
    if transformed:
        check_unbounded(_OP, max_peak_mb, "under the transforms of torch.func")
    words = 'the transforms of torch.func must take reduction="none", got {!r}'
    check(_OP, not transformed, words, reduction)
    if forward_ad._current_level >= 0:
        refuse_tangents(_OP, (hidden, weight, bias, *tensors))
    call = _native_call(hidden, weight, target, loss, tensors, chunk, head)
    if call is None:
        return composed()
    loss = loss._replace(denominator=_divisor(loss, hidden.device))
    hidden, weight, _, bias, *_ = call.operands
    return _Function.apply(loss, call, hidden, weight, bias, *tensors)
