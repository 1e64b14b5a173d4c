"""The passes of ``linear_loss`` over the chunks of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tigon._op import once, raw
from tigon.error import check
from tigon.ops.loss_head.groups import Groups, Span
from tigon.ops.loss_head.labels import check_count
from tigon.ops.loss_head.linear_log_prob import statistics_fake
from tigon.ops.loss_head.memory import default_chunk, padded
from tigon.ops.loss_head.operands import BIAS, HIDDEN, WEIGHT, Options
from tigon.ops.loss_head.operators import finish

OP = "linear_loss"


def _fake_rows(target, ignore_index, count):
    return target.new_empty(count), target.new_empty(count), target.new_empty((), dtype=torch.float32)


def _fake_logits(logits, hidden, weight, target, *options):
    *_, entropy = options
    return statistics_fake(hidden, target, entropy)


_logits = raw("linear_loss_logits", _fake_logits)
_gradient = raw("linear_loss_gradient", lambda *_: None)
list_rows = raw("linear_loss_rows", _fake_rows)


class Call(NamedTuple):
    """A call of :func:`tigon.linear_loss` with a scalar result."""

    fn: Callable[..., torch.Tensor]
    options: Options
    entropy: bool
    denominator: Any  # 0-dim tensor, number, or "count": the rows that count
    needs: int
    wrt: tuple[bool, ...]  # which per-token tensors need a gradient
    grad: bool  # gradients are recorded where the call is made
    groups: Groups | None = None  # fn sees whole groups, else rows


def losses(fn, statistics, tensors, counts, groups=None):
    """fn on rows: its losses, 0 where the label is ignored; or on so many groups."""
    values = fn(*statistics, *tensors)
    log_prob, *_ = statistics
    what, shape = ("row", log_prob.shape) if groups is None else ("group", (groups,))
    fits = isinstance(values, torch.Tensor) and values.shape == shape
    given = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
    check(OP, fits, "fn must return one loss per " + what + ", a tensor {}, got {}", list(shape), given)
    return values if counts is None else torch.where(counts, values, 0.0)


def _check_closed(values, leaves):
    """A tensor that fn reaches on its own would silently get no gradient."""
    allowed, seen, stack = {id(leaf) for leaf in leaves}, set(), [values.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        closed = leaf is None or id(leaf) in allowed
        check(
            OP,
            closed,
            "fn must take tensors that need a gradient as arguments of linear_loss, got one from elsewhere",
        )
        stack.extend(parent for parent, _ in node.next_functions)


class _Stream:
    """One forward pass over the chunks; with gradients where they are wanted."""

    def __init__(self, call: Call, hidden, weight, bias, target, tensors):
        self.call, self.weight, self.bias = call, weight, bias
        self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.tensors = tensors
        rows, (vocab, size) = target.shape[0], weight.shape
        options = call.options
        self.ignore_index = options.ignore_index
        self.of_logits = (
            options.ignore_index, options.softcap, options.logit_scale, options.temperature,
            options.wide_logits,
        )  # fmt: skip
        valid = options.valid_rows
        if target.device.type == "cpu":
            valid = check_count(OP, target, self.ignore_index, valid)
        groups = call.groups
        if groups is not None:
            valid = sum(groups.sizes)
        order = None if groups is None else groups.order(target.device)
        self.index, self.labels, self.fault = order, target if order is None else target[order], None
        self.place = None  # of the rows of the list in the order of the groups
        if 0 <= valid < rows:
            self.place, self.labels, self.fault = list_rows(self.labels, self.ignore_index, valid)
            self.index = self.place if order is None else order[self.place]
        self.count = self.labels.shape[0]
        chunk = options.chunk_rows or default_chunk(
            hidden.device.type, hidden.dtype, self.count, size, vocab, dweight=call.needs & WEIGHT != 0
        )
        chunk = min(chunk, max(self.count, 1))
        if groups is None:
            self.spans = [Span(b, min(b + chunk, self.count), 0, 0) for b in range(0, self.count, chunk)]
        else:
            self.spans = groups.spans(chunk)
        longest = max((span.end - span.begin for span in self.spans), default=1)
        dtype = torch.float32 if options.wide_logits else hidden.dtype
        self.space = hidden.new_empty(longest, padded(vocab), dtype=dtype)[:, :vocab]
        make = torch.zeros if self.index is not None or self.count == 0 else torch.empty
        f32 = {"dtype": torch.float32, "device": hidden.device}
        needs = call.needs
        written = torch.empty if self.count else torch.zeros
        self.dhidden = (
            make(self.hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs & HIDDEN else None
        )
        self.dweight = written(weight.shape, **f32) if needs & WEIGHT else None
        self.dbias = written(vocab, **f32) if needs & BIAS else None
        self.dtensors = [
            torch.zeros_like(t) if need else None for t, need in zip(tensors, call.wrt, strict=True)
        ]
        self.total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        self.scale = self._scale(target)

    def _scale(self, target):
        """1 / denominator on the device."""
        denominator = self.call.denominator
        if denominator == "count":
            denominator = (target != self.ignore_index).sum()
        if not isinstance(denominator, torch.Tensor):
            denominator = torch.full((), denominator, dtype=torch.float64, device=target.device)
        return denominator.reshape(()).double().reciprocal()

    def run(self):
        """The loss."""
        early = self.hidden.dtype != torch.float16
        scale = self.scale.float()
        for span in self.spans:
            self._chunk(span, scale if early else None)
        loss = self.total * self.scale
        return (loss if self.fault is None else loss + self.fault).float()

    def _seen(self, span, statistics):
        """What fn takes of a chunk: statistics and tensors; which rows count (None: all, or groups)."""
        begin, end, first, last = span
        groups, part = self.call.groups, slice(begin, end)
        if groups is None:
            rows = part if self.index is None else self.index[part]
            counts = self.labels[part] != self.ignore_index if self.index is None else None
            return statistics, [t[rows] for t in self.tensors], counts
        slots, count = None, last - first
        if self.place is not None:  # a wrong list has places anywhere, and NaN for its losses
            slots = (self.place[part] - first * groups.rows).clamp(0, max(count * groups.rows - 1, 0))
        seen = [groups.seen(t, slots, count) for t in statistics]
        return seen, [groups.part(t, first, last) for t in self.tensors], None

    def _chunk(self, span, scale):
        call, part = self.call, slice(span.begin, span.end)
        rows = part if self.index is None else self.index[part]
        hidden, labels, logits = self.hidden[rows], self.labels[part], self.space[: span.end - span.begin]
        log_prob, entropy = _logits(
            logits, hidden, self.weight, labels, self.bias, *self.of_logits, call.entropy
        )
        wanted = call.needs != 0 or any(call.wrt)
        with torch.set_grad_enabled(call.grad):
            log_prob.requires_grad_(call.needs != 0)
            if call.entropy:
                entropy.requires_grad_(call.needs != 0)
            statistics = (log_prob, entropy) if call.entropy else (log_prob,)
            seen, parts, counts = self._seen(span, statistics)
            tensors = [
                t.detach().requires_grad_(need and wanted) for t, need in zip(parts, call.wrt, strict=True)
            ]
            number = None if call.groups is None else span.last - span.first
            values = losses(call.fn, seen, tensors, counts, number)
            total = values.sum()
        self.total += values.detach().double().sum()
        leaves = [t for t in (log_prob, entropy, *tensors) if t.requires_grad]
        if span is self.spans[0] and call.grad:
            _check_closed(total, leaves)
        if wanted:
            self._differentiate(span, rows, hidden, labels, logits, total, leaves, tensors, scale)

    def _differentiate(self, span, rows, hidden, labels, logits, total, leaves, tensors, scale):
        call = self.call
        gradients = iter(torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ())
        if call.needs:
            upstream = next(gradients, None)
            upstream = (
                torch.zeros_like(leaves[0]) if upstream is None else upstream.neg()
            )  # of the loss -log_prob
            of_entropy = next(gradients, None) if call.entropy else None
            if scale is not None:
                upstream = upstream * scale
                of_entropy = None if of_entropy is None else of_entropy * scale
            dhidden = None
            if self.dhidden is not None:
                dhidden = self.dhidden[rows] if self.index is None else torch.empty_like(hidden)
            _gradient(logits, dhidden, self.dweight, self.dbias, upstream, of_entropy, hidden, self.weight,
                      labels, self.bias, *self.of_logits, span.begin == 0)  # fmt: skip
            if dhidden is not None and self.index is not None:
                self.dhidden[rows] = dhidden
        for kept, t in zip(self.dtensors, tensors, strict=True):
            gradient = next(gradients, None) if t.requires_grad else None
            if gradient is not None and call.groups is None:
                kept[rows] = gradient
            elif gradient is not None:
                call.groups.part(kept, span.first, span.last).copy_(gradient)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, hidden, weight, bias, target, *tensors):
        stream = _Stream(call, hidden, weight, bias, target, tensors)
        loss = stream.run()
        ctx.shape, ctx.needs = hidden.shape, call.needs
        ctx.dtypes = (weight.dtype, weight.dtype if bias is None else bias.dtype)
        kept = [hidden.new_empty(0) if stream.dhidden is None else stream.dhidden]
        kept += [
            hidden.new_empty(0, dtype=torch.float32) if g is None else g
            for g in (stream.dweight, stream.dbias)
        ]
        ctx.save_for_backward(stream.scale.float(), *kept, *stream.dtensors)
        return loss

    @staticmethod
    @once(OP)
    def backward(ctx, dloss):
        scale, dhidden, dweight, dbias, *dtensors = ctx.saved_tensors
        none = dbias.new_empty(0)
        gradients = finish(dloss, scale, dhidden, dweight, dbias, none, none, *ctx.dtypes)
        dhidden, dweight, dbias = (
            g if ctx.needs & bit else None for g, bit in zip(gradients, (HIDDEN, WEIGHT, BIAS), strict=False)
        )
        factor = dloss * scale
        dtensors = (None if g is None else torch.where(g == 0, g, g * factor).to(g.dtype) for g in dtensors)
        return None, None if dhidden is None else dhidden.view(ctx.shape), dweight, dbias, None, *dtensors
