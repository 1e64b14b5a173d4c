"""The passes of a sharded head over its chunks of rows, and its autograd function.

A chunk is rows of this process's hidden states: with sequence parallelism those of every process together, so
that a gather brings a chunk's hidden states and a reduce-scatter takes its gradients back. It has two parts
(``plan.divide``), and each exchange of one runs behind products of the other, or of the whole chunk:

    logits 0, statistics 0, [gather 0 behind logits 1], statistics 1,
    [gather 1 behind dlogits 0, dhidden 0], [reduction 0 behind dlogits 1, dhidden 1],
    [reduction 1 behind dweight, one product of the chunk].

The hidden states of a part are gathered a part ahead. Without gradients to form, statistics are gathered
behind the next part's logits, of the next chunk too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon._deterministic import is_deterministic
from tigon._op import once, raw
from tigon.ops.loss_head.autograd import finished
from tigon.ops.loss_head.operands import BIAS, HIDDEN, LORA_A, LORA_B, NEEDS, WEIGHT
from tigon.ops.loss_head.plan import padded
from tigon.parallel.plan import Chunk, Part, divide
from tigon.parallel.rows import NUMBERS, Rows, total
from tigon.parallel.shards import Work

OP = "parallel.linear_cross_entropy"

_logits = raw("linear_product_logits", lambda *_: None, "linear_cross_entropy")
_gradients = raw("linear_product_gradients", lambda *_: None, "linear_cross_entropy")


class ShardedCall(NamedTuple):
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
    lora_scale: float
    main_grad: torch.Tensor | None  # weight's gradient is added to it; only for losses of rows


class Stream:
    """The operands of a pass, of one dtype."""

    def __init__(self, call: ShardedCall, hidden, weight, bias, lora_a, lora_b) -> None:
        self.call, self.hidden = call, hidden
        self.shards, self.width = call.rows.shards, weight.shape[0]
        real, dtype = self.shards.real, hidden.dtype
        self.weight = weight.detach().to(dtype)[:real]
        self.lora = (None, None, 1.0)
        if lora_a is not None:
            self.lora = (lora_a.detach().to(dtype), lora_b.detach().to(dtype)[:real], call.lora_scale)
        self.rows = call.rows._replace(bias=_float_bias(bias, dtype, call.wide, real))
        self.shares = call.target.shape[0]
        self.work = Work(self.shards)
        self.chunks = divide(
            hidden.shape[0], call.chunk, self.shares, exchanges=self.shards.size > 1, on_cuda=hidden.is_cuda
        )
        # Rounded once either way: by its product, or from float32 to weight's dtype.
        narrow = len(self.chunks) == 1 and weight.dtype == dtype == torch.bfloat16
        self.dweight = dtype if narrow else torch.float32

    def space(self, rows: int, dtype=None) -> torch.Tensor:
        real = self.shards.real
        return self.hidden.new_empty(rows, padded(real), dtype=dtype or self.hidden.dtype)[:, :real]

    def select(self, values: torch.Tensor | None, place: Chunk | Part) -> torch.Tensor | None:
        """Values of the rows of a chunk or a part, of all shares."""
        if values is None:
            return None
        values = values.view(self.shares, -1)
        parts = getattr(place, "parts", (place,)) if self.shares > 1 else (place,)
        slices = [values[:, p.begin : p.end].reshape(-1) for p in parts]
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def walk(self, gathers: bool = True):
        """``(chunk, part, hidden states of the chunk)``: those of the part are there; None: none wanted."""
        parts = [(chunk, part) for chunk in self.chunks for part in chunk.parts]
        if not gathers or self.shares == 1:
            for chunk, part in parts:
                own = self.hidden[chunk.begin : chunk.end]
                yield chunk, part, own if self.shares == 1 else None
            return
        waits, memory = [], {}
        for i, (chunk, part) in enumerate(parts):
            for ahead, later in parts[len(waits) : i + 2]:
                if ahead.begin not in memory:
                    rows = self.shares * (ahead.end - ahead.begin)
                    memory[ahead.begin] = self.hidden.new_empty(rows, self.hidden.shape[1])
                to = memory[ahead.begin][later.at]
                waits.append(self.work.start_gather(self.hidden[later.begin : later.end], to))
            waits[i]()
            waits[i] = None
            yield chunk, part, memory[chunk.begin]
            if part.last:
                del memory[chunk.begin]

    def logits(self, hidden, logits) -> torch.Tensor:
        """The part's logits of this shard."""
        if self.shards.real:
            _logits(logits, hidden, self.weight, *self.lora)
        return logits

    def forward(self):
        call, rows = self.call, self.rows
        count, most = call.target.numel(), call.chunk * self.shares
        numbers = self.hidden.new_empty(len(NUMBERS), *call.target.shape, dtype=torch.float32)
        predicted = torch.empty_like(call.target)
        keep = call.keep and call.scale is None and call.needs != 0
        wide = call.wide and self.hidden.dtype != torch.float32
        kept = self.space(count) if keep else None
        space = None if keep and not wide else self.space(most, torch.float32 if wide else None)
        narrow = self.space(most) if wide and call.scale is not None and call.needs else None
        gradients = Gradients(self) if call.scale is not None and call.needs else None

        def losses(part, target, gathered):
            """What the statistics of all shards say of a part; each row's logarithm for its gradient."""
            found, classes = rows.combined(gathered(), target, self.select(call.token_weight, part))
            numbers[:, :, part.begin : part.end] = found.view(len(NUMBERS), self.shares, -1)
            if classes.numel():
                predicted[:, part.begin : part.end] = classes.view(self.shares, -1)
            return found[NUMBERS.index("log_share")]

        owed = []  # parts whose statistics are on their way
        for chunk, part, hidden in self.walk():
            target = self.select(call.target, part)
            here = None if kept is None else kept[chunk.at]
            whole = here if space is None else space
            logits = self.logits(hidden[part.at], whole[part.at])
            owed.append((part, target, self.work.start_gather(rows.statistics(logits, target))))
            if gradients is None and here is None:
                if len(owed) > 1:
                    losses(*owed.pop(0))
                continue
            if not part.last:
                continue
            to = here if here is not None else whole if narrow is None else narrow
            for owed_part, target, gathered in owed:
                log_share = losses(owed_part, target, gathered)
                factor = None if gradients is None else self.factor(owed_part)
                self.differentiate(whole[owed_part.at], to[owed_part.at], target, log_share, factor)
                if gradients is not None:
                    gradients.hidden(owed_part, hidden[owed_part.at], to[owed_part.at])
            owed.clear()
            if gradients is not None:
                gradients.others(chunk, hidden, to[: hidden.shape[0]])
        for entry in owed:
            losses(*entry)
        self.work.wait()
        return numbers.flatten(1), predicted.flatten(), kept, gradients

    def factor(self, part: Part) -> torch.Tensor | None:
        """Of the rows of a scalar loss's gradient; in float16 without scale, which would leave the range."""
        early = None if self.hidden.dtype == torch.float16 else self.call.scale
        token_weight = self.select(self.call.token_weight, part)
        if token_weight is None:
            return early
        return token_weight if early is None else token_weight * early

    def differentiate(self, logits, to, target, log_share, scale, entropy_scale=None, entropy=None) -> None:
        """dlogits of a part from its logits."""
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
        most = call.chunk * self.shares
        space = None if kept is not None else self.space(most, torch.float32 if wide else None)
        narrow = self.space(most) if kept is None and wide else None
        late = kept is not None or (is_deterministic() and entropy_upstream is None)  # after the products
        for chunk, part, hidden in self.walk(kept is None or call.needs & ~HIDDEN != 0):
            own = None if hidden is None else hidden[part.at]
            to = space if narrow is None else narrow
            factor = self.select(upstream, part) if late else None
            if kept is not None:
                to = kept[chunk.at]
            else:
                logits = self.logits(own, space[part.at])
                self.differentiate(
                    logits,
                    to[part.at],
                    self.select(call.target, part),
                    self.select(log_share, part),
                    None if late else self.select(upstream, part),
                    self.select(entropy_upstream, part),
                    self.select(entropy, part),
                )
            gradients.hidden(part, own, to[part.at], factor)
            if part.last:
                rows = self.shares * (chunk.end - chunk.begin)
                gradients.others(chunk, hidden, to[:rows], self.select(upstream, chunk) if late else None)
        self.work.wait()
        return gradients


class Gradients:
    """The gradients that are wanted, summed over chunks."""

    def __init__(self, stream: Stream) -> None:
        needs, hidden = stream.call.needs, stream.hidden
        self.stream, self.real = stream, stream.shards.real
        self.first_part = self.first = True
        # Columns of padding get zeros; the others what the first chunk writes.
        written = self.real if stream.chunks else 0
        self.dhidden = torch.empty_like(hidden) if needs & HIDDEN else None
        self.dweight = self.dbias = self.dlora_a = self.dlora_b = None
        if needs & WEIGHT:
            self.dweight = stream.call.main_grad
            if self.dweight is None:
                self.dweight = hidden.new_empty(stream.width, hidden.shape[1], dtype=stream.dweight)
                self.dweight[written:] = 0.0
        if needs & BIAS:
            self.dbias = hidden.new_empty(stream.width, dtype=torch.float32)
            self.dbias[written:] = 0.0
        if needs & LORA_A:
            self.dlora_a = torch.empty_like(stream.lora[0], dtype=torch.float32)
            if written == 0:
                self.dlora_a.zero_()
        if needs & LORA_B:
            self.dlora_b = hidden.new_empty(stream.width, stream.lora[1].shape[1], dtype=torch.float32)
            self.dlora_b[written:] = 0.0

    def hidden(self, part: Part, hidden, dlogits, factor=None) -> None:
        """A part's products for hidden and A; the reduction of hidden's is under way on return."""
        stream, own, whole = self.stream, None, None
        if self.dhidden is None and self.dlora_a is None:
            return
        if self.dhidden is not None:
            own = whole = self.dhidden[part.begin : part.end]
            if stream.shares > 1:
                stream.work.wait(but=1)  # of the parts before: their memory is free
                whole = own.new_empty(stream.shares * (part.end - part.begin), own.shape[1])
        if self.real:
            like = whole if hidden is None else hidden  # only its shape is looked at then
            _gradients(
                dlogits,
                like,
                stream.weight,
                whole,
                None,
                None,
                factor,
                self.first_part,
                False,
                *stream.lora,
                self.dlora_a,
                None,
            )
        elif whole is not None:
            whole.zero_()
        self.first_part = False
        if own is None or stream.call.partial:
            return
        if stream.shares == 1:
            stream.work.start_all_reduce(whole)
        else:
            stream.work.start_reduce_scatter(whole, own)

    def others(self, chunk: Chunk, hidden, dlogits, factor=None) -> None:
        """A chunk's products for the parameters of this shard."""
        stream = self.stream
        if chunk.last and self.dlora_a is not None:
            stream.work.start_all_reduce(self.dlora_a)  # a sum over all classes, as hidden's gradient is
        dweight, dbias, dlora_b = (
            None if g is None else g[: self.real] for g in (self.dweight, self.dbias, self.dlora_b)
        )
        if self.real and any(g is not None for g in (dweight, dbias, dlora_b)):
            _gradients(
                dlogits,
                hidden,
                stream.weight,
                None,
                dweight,
                dbias,
                factor,
                self.first,
                stream.call.main_grad is not None,
                *stream.lora,
                None,
                dlora_b,
            )
        self.first = False

    def formed(self) -> tuple:
        """In the order of the parameters, hidden's first."""
        return self.dhidden, self.dweight, self.dbias, self.dlora_a, self.dlora_b


def _float_bias(bias, dtype, wide, real):
    """The bias of the classes in a dtype that the row pass takes."""
    if bias is None:
        return None
    bias = bias.detach()[:real]
    return bias if bias.dtype in ((torch.float32,) if wide else (dtype, torch.float32)) else bias.float()


class Function(torch.autograd.Function):
    """``(loss or the losses of rows, entropies, other NUMBERS, predicted)``."""

    @staticmethod
    def forward(ctx, call: ShardedCall, hidden, *parameters):
        stream = Stream(call, hidden.detach(), *parameters)
        numbers, predicted, kept, gradients = stream.forward()
        ctx.call = call
        ctx.dtypes = tuple(parameters[0].dtype if p is None else p.dtype for p in parameters)
        entropy = numbers[NUMBERS.index("entropy")].clone() if call.entropy else numbers.new_empty(0)
        ctx.mark_non_differentiable(numbers, predicted)
        if call.scale is not None:
            ctx.mark_non_differentiable(entropy)
            if gradients is not None:
                none = hidden.new_empty(0)
                formed = (none if g is None else g for g in gradients.formed())
                ctx.save_for_backward(call.scale.reshape(()), *formed)
            return total(numbers[0], call.scale), entropy, numbers, predicted
        ctx.set_materialize_grads(False)
        if not call.entropy:
            ctx.mark_non_differentiable(entropy)
        log_share = numbers[NUMBERS.index("log_share")].clone()
        ctx.save_for_backward(hidden, *parameters, log_share, entropy, kept)
        return numbers[call.result].clone(), entropy, numbers, predicted

    @staticmethod
    @once(OP)
    def backward(ctx, dloss, dentropy, *_):
        call = ctx.call
        if call.scale is not None:
            found = finished(dloss, ctx.saved_tensors, *ctx.dtypes[:2])
        elif dloss is None and dentropy is None:
            return (None,) * (1 + len(NEEDS))
        else:
            found = _row_gradients(ctx, dloss, dentropy)
        needs = call.needs if call.main_grad is None else call.needs & ~WEIGHT
        dhidden, *others = (g if needs & bit else None for bit, g in zip(NEEDS.values(), found, strict=True))
        typed = (None if g is None else g.to(dtype) for g, dtype in zip(others, ctx.dtypes, strict=True))
        return None, dhidden, *typed


def _row_gradients(ctx, dloss, dentropy):
    call = ctx.call
    hidden, *parameters, log_share, entropy, kept = ctx.saved_tensors
    upstream = torch.zeros_like(log_share) if dloss is None else dloss
    if NUMBERS[call.result] == "log_prob":
        upstream = -upstream  # the row pass knows the loss, -log_prob
    stream = Stream(call, hidden, *parameters)
    if dentropy is not None:
        dentropy = dentropy.contiguous()
    return stream.backward(log_share, entropy if call.entropy else None, kept, upstream, dentropy).formed()
