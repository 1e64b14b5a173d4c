"""The passes of a sharded head over its chunks of rows, and its autograd function.

A chunk is rows of this process's hidden states. With sequence parallelism it is rows of all processes: a
gather collects a chunk's hidden states, and a reduce-scatter returns its gradients. A chunk has parts
(``plan.divide``). Each exchange of one part overlaps matmuls of the other or of the whole chunk:

    logits 0, statistics 0, [gather 0 behind logits 1], statistics 1,
    [gather 1 behind dlogits 0, dhidden 0], [reduction 0 behind dlogits 1, dhidden 1],
    [reduction 1 behind dweight, one matmul of the chunk].

A reduction takes multiprocessors, which a matmul needs and a row pass hardly misses. So it is started before
a row pass.

Where gradients of logits without smoothing, softcap and z-loss are formed in the forward, there is one row
pass (``Rows.in_one_pass``), with the statistics: dlogits as if the shard's classes were all. What is left are
the label's element of each row and a factor of the row, which the matmuls apply. Then the order of three
parts is

    logits 0, statistics 0, [gather 0 behind logits 1], dhidden 0,
    [reduction 0 behind statistics 1], [gather 1 behind logits 2], statistics 2,
    [gather 2 behind dhidden 1], [reduction 1 behind dhidden 2],
    [reduction 2 behind dweight].

The hidden states of a part are gathered one part ahead. Without gradients the statistics are gathered behind
the logits of the next part, also of the next chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon._deterministic import is_deterministic
from tigon._op import once
from tigon.ops.loss_head.autograd import scale_gradients
from tigon.ops.loss_head.driver import Chunk, Gradients, Part, RowPass
from tigon.ops.loss_head.matmuls import compute_gradients, compute_logits
from tigon.ops.loss_head.operands import HIDDEN, NEEDS, WEIGHT
from tigon.ops.loss_head.plan import padded
from tigon.parallel.collectives import Work
from tigon.parallel.plan import divide
from tigon.parallel.rows import IGNORED, NUMBERS, LabelSets, Rows, total

OP = "parallel.linear_cross_entropy"


class ShardedCall(NamedTuple):
    """A call of a head on checked arguments."""

    rows: Rows
    target: torch.Tensor  # int64 [sp_size, rows of a sequence shard]
    labels: torch.Tensor | None  # int64 [sp_size, rows of a sequence shard, K], if a row has several
    token_weight: torch.Tensor | None  # float32, target's shape
    scale: torch.Tensor | None  # None: a loss for each row
    result: int  # index in NUMBERS of what is returned for a row
    entropy: bool  # the entropies get gradients
    needs: int
    chunk: int  # rows of a sequence shard
    keep: bool  # the gradients of the logits, for the backward
    wide: bool
    one_pass: bool  # over the logits: the statistics with the gradient
    partial: bool  # hidden's gradient is this process's part
    lora_scale: float
    main_grad: torch.Tensor | None  # weight's gradient is added to it; only for losses of rows


class ShardPass(RowPass):
    """A pass over the rows of a shard: the operands and the running exchanges."""

    gathers = True  # whether hidden states are wanted

    def __init__(self, call: ShardedCall, hidden, weight, bias, lora_a, lora_b) -> None:
        self.call, self.shards, self.sp_size = call, call.rows.shards, call.target.shape[0]
        self.work, real, dtype = Work(self.shards), self.shards.real, hidden.dtype
        exchanges = self.shards.size > 1
        chunks = divide(
            hidden.shape[0], call.chunk, self.sp_size, exchanges=exchanges, on_cuda=hidden.is_cuda
        )
        super().__init__(hidden, real, chunks)
        self.weight, self.width = weight.detach().to(dtype)[:real], weight.shape[0]
        self.lora = (None, None, 1.0)
        if lora_a is not None:
            self.lora = (lora_a.detach().to(dtype), lora_b.detach().to(dtype)[:real], call.lora_scale)
        self.shard = call.rows._replace(bias=_float_bias(bias, dtype, call.wide, real))
        self.logit_dtype = torch.float32 if call.wide else dtype
        # Rounded once in both cases: by its matmul, or from float32 to weight's dtype.
        narrow = len(chunks) == 1 and weight.dtype == dtype == torch.bfloat16
        self.dweight_dtype = dtype if narrow else torch.float32

    def allocate(self) -> None:
        """Allocate the gradients."""
        needs, main_grad = self.call.needs, self.call.main_grad
        needs = needs if main_grad is None else needs & ~WEIGHT
        self.gradients = Gradients(self, needs, self.width, self.dweight_dtype, self.lora[0])
        self.first_part = self.first = True
        if main_grad is not None:
            self.gradients.dweight = main_grad

    def add_hidden(self, part: Part, hidden, dlogits, factor=None) -> None:
        """A part's matmuls for hidden and A, which are summed over the shards; starts hidden's reduction."""
        dhidden, dlora_a, own, whole = self.gradients.dhidden, self.gradients.dlora_a, None, None
        if dhidden is None and dlora_a is None:
            return
        if dhidden is not None:
            own = whole = dhidden[part.begin : part.end]
            if self.sp_size > 1:
                self.work.wait(but=1)  # of the parts before: their memory is free
                whole = own.new_empty(self.sp_size * (part.end - part.begin), own.shape[1])
        if self.vocab:
            like = whole if hidden is None else hidden  # only its shape is used then
            sums = {"factor": factor, "first": self.first_part, "padded": True, "lora": self.lora}
            compute_gradients(dlogits, like, self.weight, dhidden=whole, dlora_a=dlora_a, **sums)
        elif whole is not None:
            whole.zero_()
        self.first_part = False
        if own is None or self.call.partial:
            return
        if self.sp_size == 1:
            self.work.start_all_reduce(whole)
        else:
            self.work.start_reduce_scatter(whole, own)

    def add_others(self, chunk: Chunk, hidden, dlogits, factor=None) -> None:
        """A chunk's matmuls for the parameters of this shard."""
        gradients, added = self.gradients, self.call.main_grad is not None
        if chunk.last and gradients.dlora_a is not None:
            self.work.start_all_reduce(gradients.dlora_a)  # a sum over all classes, as hidden's gradient is
        own = {name: getattr(gradients, name) for name in ("dweight", "dbias", "dlora_b")}
        own = {name: g[: self.vocab] for name, g in own.items() if g is not None}
        if self.vocab and own:
            sums = {"factor": factor, "first": self.first, "add_dweight": added, "lora": self.lora}
            compute_gradients(dlogits, hidden, self.weight, padded=True, **own, **sums)
        self.first = False

    def select(self, values: torch.Tensor | None, place: Chunk | Part) -> torch.Tensor | None:
        """Select values of the rows of a chunk or a part, of all sequence shards."""
        if values is None:
            return None
        values = values.view(self.sp_size, -1, *values.shape[2:])
        parts = getattr(place, "parts", (place,)) if self.sp_size > 1 else (place,)
        slices = [values[:, p.begin : p.end].flatten(0, 1) for p in parts]
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def states(self):
        """The hidden states of all processes, gathered one part ahead, or None if they are not needed."""
        if self.sp_size == 1:
            yield from super().states()
            return
        parts = [(chunk, part) for chunk in self.chunks for part in chunk.parts]
        if not self.gathers:
            yield from ((chunk, part, None) for chunk, part in parts)
            return
        waits, memory = [], {}
        for i, (chunk, part) in enumerate(parts):
            for ahead, later in parts[len(waits) : i + 2]:
                if ahead.begin not in memory:
                    rows = self.sp_size * (ahead.end - ahead.begin)
                    memory[ahead.begin] = self.hidden.new_empty(rows, self.hidden.shape[1])
                to = memory[ahead.begin][later.at]
                waits.append(self.work.start_gather(self.hidden[later.begin : later.end], to))
            waits[i]()
            waits[i] = None
            yield chunk, part, memory[chunk.begin]
            if part.last:
                del memory[chunk.begin]

    def logits(self, hidden, logits) -> torch.Tensor:
        """Compute the part's logits of this shard."""
        if self.vocab:
            compute_logits(logits, hidden, self.weight, self.lora)
        return logits

    def differentiate(self, logits, to, target, log_mass, scale, **options) -> None:
        """Compute dlogits of a part from its logits."""
        if self.vocab:
            self.shard.gradient(logits, to, target, log_mass, scale, **options)


class ForwardResults(NamedTuple):
    """What a forward returns and keeps."""

    numbers: torch.Tensor  # NUMBERS of all rows
    predicted: torch.Tensor
    kept: torch.Tensor | None  # gradients of logits, for the backward
    kept_factor: torch.Tensor | None  # of their rows
    gradients: Gradients | None  # of a scalar loss
    log_probs: torch.Tensor | None  # of several labels a row
    top: torch.Tensor | None  # the best score of a row's labels


class ForwardPass(ShardPass):
    """The losses, and the gradients of a scalar one.

    ``gradients`` are of a scalar loss, ``kept`` is dlogits of losses of rows; a call has one or neither. One
    pass leaves factors of rows: ``kept_factor`` of ``kept``, ``factors`` of a chunk's parts. Parts are
    ``pending`` while their statistics are gathered. Several labels a row have ``log_probs`` and ``top``.
    """

    def memory(self, rows: int) -> None:
        call, hidden, wide = self.call, self.hidden, self.logit_dtype != self.hidden.dtype
        self.numbers = hidden.new_empty(len(NUMBERS), *call.target.shape, dtype=torch.float32)
        self.predicted = torch.empty_like(call.target)
        sets = call.labels is not None
        self.log_probs = self.numbers.new_empty(call.labels.shape) if sets else None
        self.top = self.numbers.new_empty(call.target.shape) if sets else None
        forms = call.scale is not None and call.needs != 0
        keeps = call.keep and call.scale is None and call.needs != 0
        self.kept = self.space(call.target.numel()) if keeps else None
        self.chunk_logits = None if keeps and not wide else self.space(rows, self.logit_dtype)
        self.chunk_dlogits = self.space(rows) if wide and forms else self.chunk_logits
        self.gradients = None
        if forms:
            self.allocate()
        renormalizes = keeps and call.one_pass and self.vocab > 0
        self.kept_factor = self.numbers.new_empty(call.target.shape) if renormalizes else None
        self.pending, self.factors = [], []

    def losses(self, part, target, gathered) -> torch.Tensor:
        """Store a part's losses, from the statistics of all shards; return NUMBERS of its rows."""
        whole = gathered()
        if self.log_probs is not None:
            labels = self.select(self.call.labels, part)
            whole, scores, top = self.shard.split(whole, labels)
        numbers, classes = self.shard.combined(whole, target, self.select(self.call.token_weight, part))
        rows = slice(part.begin, part.end)
        if self.log_probs is not None:
            label = numbers[NUMBERS.index("log_prob")]
            log_probs = self.shard.log_probs(labels, target, scores, top, label)
            self.log_probs[:, rows] = log_probs.view(self.sp_size, -1, log_probs.shape[-1])
            self.top[:, rows] = top.view(self.sp_size, -1)
        self.numbers[:, :, rows] = numbers.view(len(NUMBERS), self.sp_size, -1)
        if classes.numel():
            self.predicted[:, rows] = classes.view(self.sp_size, -1)
        return numbers

    def factor(self, part: Part) -> torch.Tensor | None:
        """Factors of the rows of a scalar loss's gradient; in float16 without scale, to stay in its range."""
        early = None if self.hidden.dtype == torch.float16 else self.call.scale
        token_weight = self.select(self.call.token_weight, part)
        if token_weight is None:
            return early
        return token_weight if early is None else token_weight * early

    def rows(self, chunk: Chunk, part: Part, hidden) -> None:
        target, gradients = self.select(self.call.target, part), self.gradients
        kept = None if self.kept is None else self.kept[chunk.at]
        whole = kept if self.chunk_logits is None else self.chunk_logits
        to = self.chunk_dlogits if kept is None else kept
        logits = self.logits(hidden[part.at], whole[part.at])
        if self.call.one_pass and not part.last:
            self.renormalize(hidden, to)
        dlogits = to[part.at] if self.call.one_pass else None
        labels = self.select(self.call.labels, part)
        statistics = self.shard.statistics(logits, target, labels, dlogits)
        self.pending.append((part, target, self.work.start_gather(statistics)))
        if gradients is None and kept is None:
            if len(self.pending) > 1:
                self.losses(*self.pending.pop(0))
            return
        if not part.last:
            return
        if self.call.one_pass:
            self.renormalize(hidden, to)
        for ready, target, gathered in self.pending:
            log_mass = self.losses(ready, target, gathered)[NUMBERS.index("log_mass")]
            factor = None if gradients is None else self.factor(ready)
            self.differentiate(whole[ready.at], to[ready.at], target, log_mass, factor)
            if gradients is not None:
                self.add_hidden(ready, hidden[ready.at], to[ready.at])
        self.pending.clear()
        if gradients is not None:
            factor = torch.cat(self.factors) if self.factors else None
            self.factors.clear()
            self.add_others(chunk, hidden, to[: hidden.shape[0]], factor)

    def renormalize(self, hidden, dlogits) -> None:
        """Finish dlogits of the parts whose statistics are pending, and compute hidden's gradient of them."""
        for part, target, gathered in self.pending:
            numbers, factor = self.losses(part, target, gathered), None
            if self.vocab:
                scale = None if self.gradients is None else self.factor(part)
                factor = self.shard.renormalize(dlogits[part.at], target, numbers, scale)
            if self.kept_factor is not None:
                self.kept_factor[:, part.begin : part.end] = factor.view(self.sp_size, -1)
            if self.gradients is not None:
                self.factors += [] if factor is None else [factor]
                self.add_hidden(part, hidden[part.at], dlogits[part.at], factor)
        self.pending.clear()

    def finish(self):
        for entry in self.pending:
            self.losses(*entry)
        self.work.wait()
        log_probs, top = (None if t is None else t.flatten(0, 1) for t in (self.log_probs, self.top))
        return ForwardResults(
            numbers=self.numbers.flatten(1),
            predicted=self.predicted.flatten(),
            kept=self.kept,
            kept_factor=None if self.kept_factor is None else self.kept_factor.flatten(),
            gradients=self.gradients,
            log_probs=log_probs,
            top=top,
        )


class BackwardPass(ShardPass):
    """The gradients of losses of rows, from the kept gradients or from logits that are computed again."""

    def __init__(
        self, call, operands, *, log_mass, entropy, kept, top, label, upstream, entropy_upstream
    ) -> None:
        super().__init__(call, *operands)
        self.label_sets = None
        if call.labels is not None:  # the row pass has the sum of a row's, and no label
            upstream = torch.where(call.labels.flatten(0, 1) == IGNORED, 0.0, upstream)
            of_rows = {"upstream": upstream, "top": top, "log_prob": label}
            shaped = {name: t.view(*call.target.shape, *t.shape[1:]) for name, t in of_rows.items()}
            self.label_sets = LabelSets(call.labels, **shaped)
            upstream = upstream.sum(-1)
        if call.token_weight is not None:
            upstream = upstream * call.token_weight.flatten()
        ignored = call.target.flatten() == self.shard.formula.ignore_index
        self.upstream = torch.where(ignored, 0.0, upstream).contiguous()
        self.log_mass, self.entropy, self.entropy_upstream = log_mass, entropy, entropy_upstream
        self.kept = None if kept is None else kept[:, : self.vocab]
        self.gathers = kept is None or call.needs & ~HIDDEN != 0
        # Whether factors of rows are applied after the matmuls.
        self.late = kept is not None or (
            is_deterministic() and entropy_upstream is None and call.labels is None
        )

    def memory(self, rows: int) -> None:
        if self.kept is None:
            self.chunk_logits = self.space(rows, self.logit_dtype)
            wide = self.logit_dtype != self.hidden.dtype
            self.chunk_dlogits = self.space(rows) if wide else self.chunk_logits
        self.allocate()

    def rows(self, chunk: Chunk, part: Part, hidden) -> None:
        own = None if hidden is None else hidden[part.at]
        to = self.chunk_dlogits if self.kept is None else self.kept[chunk.at]
        factor = self.select(self.upstream, part)
        if self.kept is None:
            logits = self.logits(own, self.chunk_logits[part.at])
            target, log_mass = (self.select(t, part) for t in (self.call.target, self.log_mass))
            options = {"entropy_scale": self.entropy_upstream, "entropy": self.entropy}
            options = {name: self.select(t, part) for name, t in options.items()}
            options["label_sets"] = self.labelled(part)
            self.differentiate(
                logits, to[part.at], target, log_mass, None if self.late else factor, **options
            )
        self.add_hidden(part, own, to[part.at], factor if self.late else None)
        if part.last:
            count = self.sp_size * (chunk.end - chunk.begin)
            factor = self.select(self.upstream, chunk) if self.late else None
            self.add_others(chunk, hidden, to[:count], factor)

    def labelled(self, part: Part) -> LabelSets | None:
        """The labels of a part's rows, if they have several."""
        sets = self.label_sets
        return None if sets is None else LabelSets(*(self.select(t, part) for t in sets))

    def finish(self) -> tuple:
        self.work.wait()
        return self.gradients.as_tuple()


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
        results = ForwardPass(call, hidden.detach(), *parameters).run()
        numbers = results.numbers
        ctx.call = call
        ctx.dtypes = tuple(parameters[0].dtype if p is None else p.dtype for p in parameters)
        entropy = numbers[NUMBERS.index("entropy")].clone() if call.entropy else numbers.new_empty(0)
        ctx.mark_non_differentiable(numbers, results.predicted)
        if call.scale is not None:
            ctx.mark_non_differentiable(entropy)
            if results.gradients is not None:
                none = hidden.new_empty(0)
                gradients = (none if g is None else g for g in results.gradients.as_tuple())
                ctx.save_for_backward(call.scale.reshape(()), *gradients)
            return total(numbers[0], call.scale), entropy, numbers, results.predicted
        ctx.set_materialize_grads(False)
        if not call.entropy:
            ctx.mark_non_differentiable(entropy)
        log_mass = numbers[NUMBERS.index("log_mass")].clone()
        result = numbers[call.result].clone() if results.log_probs is None else results.log_probs
        label = None if results.top is None else numbers[NUMBERS.index("log_prob")].clone()
        kept = results.kept
        if kept is not None:  # with what follows each row, so that a hook of saved tensors keeps that too
            width = padded(kept.shape[1])
            kept = kept.as_strided((kept.shape[0], width), (width, 1))
        kept = (kept, results.kept_factor)
        ctx.save_for_backward(hidden, *parameters, log_mass, entropy, *kept, results.top, label)
        return result, entropy, numbers, results.predicted

    @staticmethod
    @once(OP)
    def backward(ctx, dloss, dentropy, *_):
        call = ctx.call
        if call.scale is not None:
            gradients = scale_gradients(dloss, ctx.saved_tensors, *ctx.dtypes[:2])
        elif dloss is None and dentropy is None:
            return (None,) * (1 + len(NEEDS))
        else:
            gradients = _row_gradients(ctx, dloss, dentropy)
        needs = call.needs if call.main_grad is None else call.needs & ~WEIGHT
        pairs = zip(NEEDS.values(), gradients, strict=True)
        dhidden, *others = (g if needs & bit else None for bit, g in pairs)
        typed = (None if g is None else g.to(dtype) for g, dtype in zip(others, ctx.dtypes, strict=True))
        return None, dhidden, *typed


def _row_gradients(ctx, dloss, dentropy):
    call = ctx.call
    *operands, log_mass, entropy, kept, kept_factor, top, label = ctx.saved_tensors
    upstream = dloss
    if upstream is None:
        like = log_mass if call.labels is None else call.labels.flatten(0, 1)
        upstream = torch.zeros_like(like, dtype=torch.float32)
    if NUMBERS[call.result] == "log_prob":
        upstream = -upstream  # the row pass computes the loss, -log_prob
    if kept_factor is not None:
        upstream = upstream * kept_factor
    entropy = entropy if call.entropy else None
    dentropy = None if dentropy is None else dentropy.contiguous()
    options = {"log_mass": log_mass, "entropy": entropy, "kept": kept, "top": top, "label": label}
    return BackwardPass(call, operands, **options, upstream=upstream, entropy_upstream=dentropy).run()
