"""Streaming losses: a Python function of log-probabilities, differentiated while its chunk's logits exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tigon._op import has_kernel, once, raw, refuse_tangents
from tigon.error import check
from tigon.ops import cross_entropy as _cross_entropy
from tigon.ops import linear_log_prob as _log_prob
from tigon.ops.arguments import kind_of
from tigon.ops.head import (
    BIAS,
    HIDDEN,
    REDUCTIONS,
    WEIGHT,
    autocast,
    check_head,
    check_plain,
    prepare,
    whole_vectors,
)
from tigon.ops.head_autograd import finish
from tigon.ops.head_memory import default_chunk, padded
from tigon.ops.labels import check_count

_OP = "linear_loss"


def _fake_logits(
    logits, hidden, weight, target, bias, ignore_index, softcap, logit_scale, temperature, entropy
):
    rows = target.shape
    return (
        hidden.new_empty(rows, dtype=torch.float32),
        hidden.new_empty(rows if entropy else (0,), dtype=torch.float32),
    )


def _fake_rows(target, ignore_index, count):
    return target.new_empty(count), target.new_empty(count), target.new_empty((), dtype=torch.float32)


_logits = raw("linear_loss_logits", _fake_logits)
_gradient = raw("linear_loss_gradient", lambda *_: None)
_rows = raw("linear_loss_rows", _fake_rows)


class _Call(NamedTuple):
    fn: Callable[..., torch.Tensor]
    options: tuple  # ignore_index, softcap, logit_scale, temperature
    entropy: bool
    denominator: Any  # 0-dim tensor, number, or None: 1
    valid_rows: int
    chunk_rows: int | None
    needs: int
    wrt: tuple[bool, ...]  # which per-token tensors need a gradient
    grad: bool = False  # gradients are recorded where the call is made


def _losses(call, log_prob, entropy, tensors, counts):
    """fn on one chunk: its losses, 0 where the label is ignored."""
    values = call.fn(log_prob, *((entropy,) if call.entropy else ()), *tensors)
    fits = isinstance(values, torch.Tensor) and values.shape == log_prob.shape
    given = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
    check(_OP, fits, "fn must return one loss per row, a tensor {}, got {}", log_prob.shape, given)
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
            _OP,
            closed,
            "fn must take tensors that need a gradient as arguments of linear_loss, got one from elsewhere",
        )
        stack.extend(parent for parent, _ in node.next_functions)


class _Stream:
    """One forward pass over the chunks; with gradients where they are wanted."""

    def __init__(self, call: _Call, hidden, weight, bias, target, tensors):
        self.call, self.weight, self.bias = call, weight, bias
        self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.tensors = tensors
        rows, vocab = target.shape[0], weight.shape[0]
        valid = call.valid_rows
        if target.device.type == "cpu":
            valid = check_count(_OP, target, call.options[0], valid)
        self.index, self.labels, self.fault = None, target, None
        if 0 <= valid < rows:
            self.index, self.labels, self.fault = _rows(target, call.options[0], valid)
        self.count = self.labels.shape[0]
        chunk = call.chunk_rows or default_chunk(
            hidden.device.type,
            hidden.dtype,
            self.count,
            *weight.shape[::-1],
            dweight=call.needs & WEIGHT != 0,
        )
        self.chunk = min(chunk, max(self.count, 1))
        self.space = hidden.new_empty(self.chunk, padded(vocab))[:, :vocab]
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
            denominator = (target != self.call.options[0]).sum()
        if not isinstance(denominator, torch.Tensor):
            denominator = torch.full((), denominator, dtype=torch.float64, device=target.device)
        return denominator.reshape(()).double().reciprocal()

    def run(self):
        """The loss."""
        early = self.hidden.dtype != torch.float16
        scale = self.scale.float()
        for begin in range(0, self.count, self.chunk):
            self._chunk(begin, min(begin + self.chunk, self.count), scale if early else None)
        loss = self.total * self.scale
        return (loss if self.fault is None else loss + self.fault).float()

    def _chunk(self, begin, end, scale):
        call, part = self.call, slice(begin, end)
        rows = part if self.index is None else self.index[part]
        hidden, labels, logits = self.hidden[rows], self.labels[part], self.space[: end - begin]
        log_prob, entropy = _logits(
            logits, hidden, self.weight, labels, self.bias, *call.options, call.entropy
        )
        wanted = call.needs != 0 or any(call.wrt)
        counts = labels != call.options[0] if self.index is None else None
        with torch.set_grad_enabled(call.grad):
            log_prob.requires_grad_(call.needs != 0)
            if call.entropy:
                entropy.requires_grad_(call.needs != 0)
            tensors = [
                t[rows].detach().requires_grad_(need and wanted)
                for t, need in zip(self.tensors, call.wrt, strict=True)
            ]
            losses = _losses(call, log_prob, entropy, tensors, counts)
            total = losses.sum()
        self.total += losses.detach().double().sum()
        leaves = [t for t in (log_prob, entropy, *tensors) if t.requires_grad]
        if begin == 0 and call.grad:
            _check_closed(total, leaves)
        if wanted:
            self._differentiate(begin, rows, hidden, labels, logits, total, leaves, tensors, scale)

    def _differentiate(self, begin, rows, hidden, labels, logits, total, leaves, tensors, scale):
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
                      labels, self.bias, *call.options, begin == 0)  # fmt: skip
            if dhidden is not None and self.index is not None:
                self.dhidden[rows] = dhidden
        for kept, t in zip(self.dtensors, tensors, strict=True):
            gradient = next(gradients, None) if t.requires_grad else None
            if gradient is not None:
                kept[rows] = gradient


class _Function(torch.autograd.Function):
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
    @once(_OP)
    def backward(ctx, dloss):
        scale, dhidden, dweight, dbias, *dtensors = ctx.saved_tensors
        none = dbias.new_empty(0)
        gradients = finish(dloss, scale, dhidden, dweight, dbias, none, none, *ctx.dtypes)[:3]
        dhidden, dweight, dbias = (
            g if ctx.needs & bit else None for g, bit in zip(gradients, (HIDDEN, WEIGHT, BIAS), strict=True)
        )
        factor = dloss * scale
        dtensors = (None if g is None else torch.where(g == 0, g, g * factor).to(g.dtype) for g in dtensors)
        return None, None if dhidden is None else dhidden.view(ctx.shape), dweight, dbias, None, *dtensors


def _composed(hidden, weight, target, fn, tensors, entropy, reduction, denominator, log_prob, options):
    """Log-probabilities of all rows, then fn: for unreduced losses, whose upstream gradients come later."""
    ignore_index = options["ignore_index"]
    statistics = log_prob(hidden, weight, target, entropy=entropy, **options)
    statistics = statistics if entropy else (statistics,)
    counts = (target != ignore_index).reshape(-1)
    call = _Call(fn, (), entropy, None, -1, None, 0, ())
    values = _losses(call, statistics[0].reshape(-1), statistics[-1].reshape(-1), tensors, counts)
    if denominator is not None:
        return _cross_entropy.divide(values.sum(), denominator)
    if reduction == "none":
        return values.view(target.shape)
    return values.sum() if reduction == "sum" else values.sum() / counts.sum()


@torch._disable_dynamo  # torch.compiler.disable, but the compiler is imported by the first call, not here
def linear_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    fn: Callable[..., torch.Tensor],
    *tensors: torch.Tensor,
    bias: torch.Tensor | None = None,
    entropy: bool = False,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    valid_rows: int | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """A loss of your own on per-token log-probabilities, three matrix products and no logits.

    ``fn(log_prob, [entropy,] *tensors)`` is called for chunks of rows and returns one loss per row; its
    gradient is taken by autograd while the chunk's logits still exist. It must treat rows one by one (a row's
    loss depends on that row alone): then the chunking does not change the result beyond the order of
    additions.

    Args:
        hidden, weight, target, bias, temperature, softcap, logit_scale, ignore_index, valid_rows, chunk_rows:
            as in :func:`tigon.linear_cross_entropy`.
        fn: called with float32 vectors of one chunk. Rows with an ignored label may be among them; what it
            returns there is dropped. Tensors that need a gradient must come in through `tensors`.
        *tensors: per-token tensors ``[..., ...]`` (the leading shape of target), handed to fn row by row;
            differentiable.
        entropy: fn takes the entropies as its second argument.
        reduction: ``"mean"`` (over rows that count), ``"sum"``, or ``"none"``: ``[...]`` losses, for which
            the backward computes the logits again (four products).
        denominator: number or tensor of one element: ``sum / denominator`` instead of ``reduction``.

    Returns:
        float32 scalar, or ``[...]`` for ``"none"``. Not traced by torch.compile: the call breaks the graph.

    Raises:
        tigon.Error: shapes, dtypes or options do not fit, or fn returns something else than one loss per row.
    """
    check_head(
        _OP, hidden, weight, target, bias, False, ignore_index, softcap, logit_scale, temperature, chunk_rows
    )
    check(_OP, callable(fn), "fn must be callable, got {}", kind_of(fn))
    _cross_entropy.check_denominator(_OP, denominator)
    check(_OP, reduction in REDUCTIONS, "reduction must be one of {}, got {!r}", (*REDUCTIONS,), reduction)
    for t in tensors:
        check(_OP, isinstance(t, torch.Tensor), "tensors must be tensors, got {}", kind_of(t))
        fits = t.shape[: target.dim()] == target.shape
        check(_OP, fits, "tensors must be {} or longer, got {}", target.shape, t.shape)
        check(_OP, t.device == hidden.device, "tensors must be on {}, got {}", hidden.device, t.device)
    tensors = [t.reshape(target.numel(), *t.shape[target.dim() :]) for t in tensors]
    hidden = autocast(hidden)
    kernel = has_kernel(_OP, hidden)
    if not kernel:
        check_plain(_OP, weight, target, ignore_index, False, valid_rows)
    if not kernel or (reduction == "none" and denominator is None):
        log_prob = _log_prob.linear_log_prob if kernel else _log_prob.reference
        options = {"bias": bias, "temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
        options |= {"ignore_index": ignore_index, "valid_rows": valid_rows, "chunk_rows": chunk_rows}
        return _composed(
            hidden, weight, target, fn, tensors, entropy, reduction, denominator, log_prob, options
        )
    transformed = torch._C._are_functorch_transforms_active()
    check(
        _OP, not transformed, 'the transforms of torch.func must take reduction="none", got {!r}', reduction
    )
    if forward_ad._current_level >= 0:
        refuse_tangents(_OP, (hidden, weight, bias, *tensors))
    hidden, weight, _ = whole_vectors(hidden, weight)
    head = prepare(_OP, hidden, weight, target, bias, ignore_index, False, valid_rows)
    device, number = _cross_entropy.split_denominator(denominator, hidden.device)
    if device is not None:
        place = device.device
        check(_OP, place == hidden.device, "denominator must be on {}, got {}", hidden.device, place)
    divisor = device if device is not None else number
    if divisor is None:
        divisor = "count" if reduction == "mean" else 1.0
    grad = torch.is_grad_enabled()
    options = (ignore_index, softcap or 0.0, logit_scale, temperature)
    wrt = tuple(grad and t.requires_grad for t in tensors)
    call = _Call(fn, options, entropy, divisor, head.valid_rows, chunk_rows, head.needs, wrt, grad)
    return _Function.apply(call, head.hidden, head.weight, head.bias, head.target, *tensors)
