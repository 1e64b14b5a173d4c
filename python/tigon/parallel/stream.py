"""The passes of a sharded head over its chunks of rows, and its autograd function.

A chunk is rows ``[begin, end)`` of this process's hidden states: with sequence parallelism those of every
process together, so that a gather brings a chunk's hidden states and a reduce-scatter takes its gradients
back. What is under way while products run: the gather of the next chunk's hidden states, and the reduction
of hidden's gradient behind the weight's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon._op import graph_is_kept, once, raw
from tigon.ops.loss_head.memory import default_chunk, padded
from tigon.ops.loss_head.operands import BIAS, HIDDEN, WEIGHT
from tigon.ops.loss_head.operators import finish, finish_in_place
from tigon.parallel.rows import NUMBERS, Rows, total
from tigon.parallel.shards import Work

OP = "parallel.linear_cross_entropy"
_MIB = 1 << 20

_logits = raw("linear_product_logits", lambda *_: None, "linear_cross_entropy")
_gradients = raw("linear_product_gradients", lambda *_: None, "linear_cross_entropy")


class Call(NamedTuple):
    """A call of a head on checked arguments."""

    rows: Rows
    target: torch.Tensor  # int64 [shares, rows of a share]
    token_weight: torch.Tensor | None  # float32, target's shape
    scale: torch.Tensor | None  # None: a loss for each row
    result: int  # of NUMBERS: which a loss for each row is
    entropy: bool  # the entropies get gradients
    needs: int
    chunk: int  # rows of a share
    keep: bool  # the gradients of the logits, for the backward
    wide: bool
    partial: bool  # hidden's gradient is this process's part


def plan(device, dtype, rows, size, widest, dweight, chunk_rows, keep_mb, entropy):
    """Rows of a chunk and whether the logits' gradients are kept: alike in all processes."""
    widest = max(widest, 1)
    chunk = chunk_rows or default_chunk(device.type, dtype, rows, size, widest, dweight=dweight)
    chunk = max(min(chunk, rows), 1)
    if entropy:  # a gradient of the entropies is no multiple of what would be kept
        return chunk, False
    if keep_mb is None:
        return chunk, chunk >= rows
    return chunk, rows * padded(widest) * dtype.itemsize <= keep_mb * _MIB


class Stream:
    """The operands of a pass, of one dtype."""

    def __init__(self, call: Call, hidden, weight, bias) -> None:
        self.call, self.hidden = call, hidden
        self.shards, self.width = call.rows.shards, weight.shape[0]
        self.weight = weight.detach().to(hidden.dtype)[: self.shards.real]
        self.rows = call.rows._replace(bias=_float_bias(bias, hidden.dtype, call.wide, self.shards.real))
        self.shares = call.target.shape[0]
        self.work = Work(self.shards)
        self.bounds = [
            (a, min(a + call.chunk, hidden.shape[0])) for a in range(0, hidden.shape[0], call.chunk)
        ]
        # Rounded once either way: by its product, or from float32 to weight's dtype.
        narrow = len(self.bounds) == 1 and weight.dtype == hidden.dtype == torch.bfloat16
        self.dweight = hidden.dtype if narrow else torch.float32

    def space(self, rows: int, dtype=None) -> torch.Tensor:
        """Memory for logits of this shard's classes."""
        real = self.shards.real
        return self.hidden.new_empty(rows, padded(real), dtype=dtype or self.hidden.dtype)[:, :real]

    def part(self, of: torch.Tensor | None, begin: int, end: int) -> torch.Tensor | None:
        """Rows of a chunk, of all shares."""
        return None if of is None else of.view(self.shares, -1)[:, begin:end].reshape(-1)

    def chunks(self, gathers: bool = True):
        """``(begin, end, hidden states of the chunk)``; None where they are not wanted."""
        if not gathers or self.shares == 1:
            for begin, end in self.bounds:
                yield begin, end, self.hidden[begin:end]
            return
        waits = [None] * len(self.bounds)
        for i in range(len(self.bounds)):
            for k in (i, i + 1):  # the next chunk's gather runs behind this chunk's products
                if k < len(self.bounds) and waits[k] is None:
                    waits[k] = self.work.start_gather(self.hidden[slice(*self.bounds[k])])
            yield *self.bounds[i], waits[i]()
            waits[i] = True

    def logits(self, hidden, space) -> torch.Tensor:
        """The chunk's logits of this shard."""
        logits = space[: hidden.shape[0]]
        if self.shards.real:
            _logits(logits, hidden, self.weight)
        return logits

    def forward(self):
        """Losses of the rows and the other NUMBERS, predicted classes, kept gradients of the logits."""
        call, rows = self.call, self.rows
        count, width = call.target.numel(), self.call.chunk * self.shares
        numbers = self.hidden.new_empty(len(NUMBERS), *call.target.shape, dtype=torch.float32)
        predicted = torch.empty_like(call.target)
        keep = call.keep and call.scale is None and call.needs != 0
        wide = call.wide and self.hidden.dtype != torch.float32
        kept = self.space(count) if keep else None
        space = None if keep and not wide else self.space(width, torch.float32 if wide else None)
        narrow = self.space(width) if wide and call.scale is not None and call.needs else None
        gradients = Gradients(self) if call.scale is not None and call.needs else None
        row = 0
        for begin, end, hidden in self.chunks():
            target = self.part(call.target, begin, end)
            here = None if kept is None else kept[row : row + target.shape[0]]
            logits = self.logits(hidden, here if space is None else space)
            token_weight = self.part(call.token_weight, begin, end)
            found, classes = rows.losses(rows.statistics(logits, target), target, token_weight, self.work)
            numbers[:, :, begin:end] = found.view(len(NUMBERS), self.shares, -1)
            if classes.numel():
                predicted[:, begin:end] = classes.view(self.shares, -1)
            log_share = found[NUMBERS.index("log_share")]
            if gradients is not None:
                to = logits if narrow is None else narrow[: target.shape[0]]
                self.differentiate(logits, to, target, log_share, self.factor(begin, end))
                gradients.add(begin, end, hidden, to)
            elif here is not None:
                self.differentiate(logits, here, target, log_share, None)
            row += target.shape[0]
        self.work.wait()
        return numbers.flatten(1), predicted.flatten(), kept, gradients

    def factor(self, begin: int, end: int) -> torch.Tensor | None:
        """Of the rows of a scalar loss's gradient; in float16 without scale, which would leave the range."""
        early = None if self.hidden.dtype == torch.float16 else self.call.scale
        token_weight = self.part(self.call.token_weight, begin, end)
        if token_weight is None:
            return early
        return token_weight if early is None else token_weight * early

    def differentiate(self, logits, to, target, log_share, scale, entropy_scale=None, entropy=None) -> None:
        """dlogits of a chunk from its logits."""
        if self.shards.real:
            self.rows.gradient(logits, to, target, log_share, scale, entropy_scale, entropy)

    def backward(self, log_share, entropy, kept, upstream, entropy_upstream):
        """Gradients of losses of rows."""
        call = self.call
        if call.token_weight is not None:
            upstream = upstream * call.token_weight.flatten()
        ignored = call.target.flatten() == self.rows.formula.ignore_index
        upstream = torch.where(ignored, 0.0, upstream).contiguous()
        gradients = Gradients(self)
        wide = call.wide and self.hidden.dtype != torch.float32
        width = call.chunk * self.shares
        space = None if kept is not None else self.space(width, torch.float32 if wide else None)
        narrow = self.space(width) if kept is None and wide else None
        row = 0
        for begin, end, hidden in self.chunks(gathers=kept is None or call.needs & WEIGHT != 0):
            target, factor = self.part(call.target, begin, end), self.part(upstream, begin, end)
            if kept is not None:
                gradients.add(begin, end, hidden, kept[row : row + target.shape[0]], factor)
            else:
                logits = self.logits(hidden, space)
                to = logits if narrow is None else narrow[: target.shape[0]]
                self.differentiate(
                    logits, to, target, self.part(log_share, begin, end), factor,
                    self.part(entropy_upstream, begin, end), self.part(entropy, begin, end),
                )  # fmt: skip
                gradients.add(begin, end, hidden, to)
            row += target.shape[0]
        self.work.wait()
        return gradients


class Gradients:
    """The gradients that are wanted, summed over chunks."""

    def __init__(self, stream: Stream) -> None:
        needs, hidden = stream.call.needs, stream.hidden
        self.stream, self.real, self.first = stream, stream.shards.real, True
        # Columns of padding get zeros; the others what the first chunk writes.
        written = self.real if stream.bounds else 0
        self.dhidden = torch.empty_like(hidden) if needs & HIDDEN else None
        self.dweight = self.dbias = None
        if needs & WEIGHT:
            self.dweight = hidden.new_empty(stream.width, hidden.shape[1], dtype=stream.dweight)
            self.dweight[written:] = 0.0
        if needs & BIAS:
            self.dbias = hidden.new_empty(stream.width, dtype=torch.float32)
            self.dbias[written:] = 0.0

    def add(self, begin, end, hidden, dlogits, factor=None) -> None:
        """A chunk's products; hidden's comes first, and its reduction runs behind the others."""
        stream, needs = self.stream, self.stream.call.needs
        if needs & HIDDEN:
            self._hidden(begin, end, hidden, dlogits, factor)
        if self.real and needs & (WEIGHT | BIAS):
            dweight = None if self.dweight is None else self.dweight[: self.real]
            dbias = None if self.dbias is None else self.dbias[: self.real]
            _gradients(dlogits, hidden, stream.weight, None, dweight, dbias, factor, self.first)
        self.first = False

    def _hidden(self, begin, end, hidden, dlogits, factor) -> None:
        stream = self.stream
        own = self.dhidden[begin:end]
        whole = own if stream.shares == 1 else own.new_empty(stream.shares * (end - begin), own.shape[1])
        if self.real:
            like = hidden if hidden.shape[0] == whole.shape[0] else whole  # only its shape is looked at
            _gradients(dlogits, like, stream.weight, whole, None, None, factor, True)
        else:
            whole.zero_()
        if stream.call.partial:
            return
        if stream.shares == 1:
            stream.work.start_all_reduce(whole)
        else:
            stream.work.start_reduce_scatter(whole, own)


def _float_bias(bias, dtype, wide, real):
    """The bias of the classes in a dtype that the row pass takes."""
    if bias is None:
        return None
    bias = bias.detach()[:real]
    return bias if bias.dtype in ((torch.float32,) if wide else (dtype, torch.float32)) else bias.float()


class Function(torch.autograd.Function):
    """``(loss or the losses of rows, entropies, other NUMBERS, predicted)``."""

    @staticmethod
    def forward(ctx, call: Call, hidden, weight, bias):
        stream = Stream(call, hidden.detach(), weight, bias)
        numbers, predicted, kept, gradients = stream.forward()
        ctx.call = call
        ctx.dtypes = (weight.dtype, weight.dtype if bias is None else bias.dtype)
        entropy = numbers[NUMBERS.index("entropy")].clone() if call.entropy else numbers.new_empty(0)
        ctx.mark_non_differentiable(numbers, predicted)
        if call.scale is not None:
            ctx.mark_non_differentiable(entropy)
            if gradients is not None:
                none = hidden.new_empty(0)
                formed = (gradients.dhidden, gradients.dweight, gradients.dbias)
                ctx.save_for_backward(call.scale.reshape(()), *(none if g is None else g for g in formed))
            return total(numbers[0], call.scale), entropy, numbers, predicted
        ctx.set_materialize_grads(False)
        if not call.entropy:
            ctx.mark_non_differentiable(entropy)
        log_share = numbers[NUMBERS.index("log_share")].clone()
        ctx.save_for_backward(hidden, weight, bias, log_share, entropy, kept)
        return numbers[call.result].clone(), entropy, numbers, predicted

    @staticmethod
    @once(OP)
    def backward(ctx, dloss, dentropy, *_):
        call = ctx.call
        if call.scale is not None:
            found = _finished(ctx, dloss)
        elif dloss is None and dentropy is None:
            return None, None, None, None
        else:
            found = _of_rows(ctx, dloss, dentropy)
        wanted = zip((HIDDEN, WEIGHT, BIAS), found, strict=True)
        return None, *(g if call.needs & bit else None for bit, g in wanted)


def _finished(ctx, dloss):
    """The gradients formed in the forward, times the upstream gradient."""
    scale, dhidden, dweight, dbias = ctx.saved_tensors
    none = dhidden.new_empty(0)
    run = finish if graph_is_kept() else finish_in_place
    return run(dloss, scale, dhidden, dweight, dbias, none, none, *ctx.dtypes)[:3]


def _of_rows(ctx, dloss, dentropy):
    call = ctx.call
    hidden, weight, bias, log_share, entropy, kept = ctx.saved_tensors
    upstream = torch.zeros_like(log_share) if dloss is None else dloss
    if NUMBERS[call.result] == "log_prob":
        upstream = -upstream  # the row pass knows the loss, -log_prob
    stream = Stream(call, hidden, weight, bias)
    if dentropy is not None:
        dentropy = dentropy.contiguous()
    gradients = stream.backward(log_share, entropy if call.entropy else None, kept, upstream, dentropy)
    of_weight, of_bias = ctx.dtypes
    return (
        gradients.dhidden,
        None if gradients.dweight is None else gradients.dweight.to(of_weight),
        None if gradients.dbias is None else gradients.dbias.to(of_bias),
    )
