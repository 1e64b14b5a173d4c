"""Contrastive losses of embeddings. Contract: ``csrc/tigon/ops/contrastive/contrastive.h``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tigon._op import Op, has_kernel, is_batched, raw
from tigon.environment import has_matmul_kernels
from tigon.error import check
from tigon.ops import arguments
from tigon.ops.agreement import tells_refusals
from tigon.ops.loss_head.gather import Gather
from tigon.ops.loss_head.linear_cross_entropy import linear_cross_entropy
from tigon.ops.loss_head.operands import autocast
from tigon.ops.rms_norm import rms_norm

OP = "contrastive_loss"
IGNORED = -100
# The tensors that the operator takes first; chunk_rows and the flags of its results follow.
_TENSORS = ("q", "d", "scale", "labels", "q_ids", "d_ids", "limit", "guide_q", "guide_d")


def reference(q, d, scale, labels, q_ids=None, d_ids=None, limit=None, guide_q=None, guide_d=None):
    """Compute ``(row_lse, col_lse, picked)`` with PyTorch operations and the full similarities."""
    z = q @ d.mT
    t = z.detach() if guide_q is None else guide_q @ guide_d.mT
    out = torch.zeros_like(z, dtype=torch.bool)
    if q_ids is not None:
        out = q_ids[:, None] == d_ids
    if limit is not None:
        out = out | (t > limit[:, None])
    inside = (labels >= 0) & (labels < d.shape[0])
    label = torch.where(inside, labels, 0)
    kept = torch.zeros_like(out, dtype=torch.int8).scatter_add(1, label, inside.to(torch.int8)) > 0
    picked = torch.where(inside, (scale * z).gather(1, label), 0.0)
    z = (scale * z).masked_fill(out & ~kept, -torch.inf)
    return z.logsumexp(1).double(), z.logsumexp(0).double(), picked


def _wanted(like, sizes, dtypes, wanted):
    """Allocate results of these sizes; those not wanted have no elements."""
    each = zip(sizes, dtypes, wanted, strict=True)
    return tuple(like.new_empty(size if want else (0,), dtype=dtype) for size, dtype, want in each)


def _fake(q, d, scale, labels, *options):
    sizes = (q.shape[:1], d.shape[:1], (0 if labels is None else labels.numel(),))
    return _wanted(q, sizes, (torch.float64, torch.float64, torch.float32), options[-3:])


def _fake_bwd(q, d, *options):
    return _wanted(q, (q.shape, d.shape, (1,)), (q.dtype, d.dtype, torch.float32), options[-3:])


_bwd = raw("contrastive_bwd", _fake_bwd)


def _setup_context(ctx, inputs, output):
    ctx.chunk_rows, *ctx.wants = inputs[len(_TENSORS) :]
    ctx.save_for_backward(*inputs[: len(_TENSORS)], *output[:2])
    ctx.set_materialize_grads(False)


def _backward(ctx, *upstream):
    upstream = [
        g.float() if g is not None and want else None for g, want in zip(upstream, ctx.wants, strict=True)
    ]
    need_q, need_d, need_scale = ctx.needs_input_grad[:3]
    given = [g for g in upstream if g is not None]
    dq = dd = dscale = None
    if given:
        *inputs, row_lse, col_lse = ctx.saved_tensors
        tensors = dict(zip(_TENSORS, inputs, strict=True))
        q, power_of_two = tensors["q"], None
        if q.dtype == torch.float16:  # a mean's or a scaled loss's gradients may leave its range
            most = [g.abs().amax() for g in given if g.numel()]
            largest = torch.stack(most).amax().clamp_min(1e-30) if most else torch.ones((), device=q.device)
            power_of_two = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
            upstream = [None if g is None else g / power_of_two for g in upstream]
        drow, dcol, dpicked = upstream
        rows = {"row_lse": None if drow is None else row_lse, "drow": drow}
        columns = {"col_lse": None if dcol is None else col_lse, "dcol": dcol}
        needs = {"need_dq": need_q, "need_dd": need_d, "need_dlog_scale": need_scale}
        dq, dd, dscale = _bwd.named(
            **tensors, chunk_rows=ctx.chunk_rows, **rows, **columns, dpicked=dpicked, **needs
        )
        dscale = dscale / tensors["scale"] if need_scale else None  # it was of log(scale)
        if power_of_two is not None:  # exact, as the division
            dq, dd, dscale = (None if g is None else g * power_of_two.to(g.dtype) for g in (dq, dd, dscale))
    results = (dq if need_q else None, dd if need_d else None, dscale)
    return *results, *(None,) * (len(_op.names) - len(results))


_op = Op("contrastive", fake=_fake, setup_context=_setup_context, backward=_backward)

_MOST_SCALE = 60.0  # kContrastiveMostScale
_ONE_CHUNK = 2**29  # pairs: up to here gradients are single matmuls, not summed


def _fake_cosine(q, d, scale, reduction_scale, symmetric, weight, chunk_rows, wide, *wanted):
    sizes = ((1,), (q.shape[0],), q.shape, (d.numel(),))
    dtypes = (torch.float32, torch.float32, q.dtype, torch.float32 if wide else q.dtype)
    return _wanted(q, sizes, dtypes, wanted)


def _fake_cosine_bwd(q, d, *options):
    return _wanted(q, (q.shape, d.shape), (q.dtype, d.dtype), options[-2:])


_cosine_bwd = raw("contrastive_cosine_bwd", _fake_cosine_bwd)


def _setup_cosine(ctx, inputs, output):
    q, d, scale, reduction_scale, symmetric, *_ = inputs
    ctx.options = {"scale": scale, "reduction_scale": reduction_scale, "symmetric": symmetric}
    ctx.save_for_backward(q, d, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_cosine(ctx, dloss, *_):
    dq = dd = None
    if dloss is not None:
        q, d, factor, gd, gq = ctx.saved_tensors
        need_q, need_d = ctx.needs_input_grad[:2]
        saved = {"factor": factor, "gd": gd if need_q else None, "gq": gq if need_d else None}
        needs = {"need_dq": need_q, "need_dd": need_d}
        dq, dd = _cosine_bwd.named(q=q, d=d, **ctx.options, **saved, dloss=dloss, **needs)
        dq, dd = dq if need_q else None, dd if need_d else None
    return dq, dd, *(None,) * (len(_cosine.names) - 2)


_cosine = Op("contrastive_cosine", fake=_fake_cosine, setup_context=_setup_cosine, backward=_backward_cosine)


class ContrastiveOptions(NamedTuple):
    """Options that the losses of all sizes share."""

    temperature: float | torch.Tensor
    symmetric: bool
    normalize: bool
    weight: torch.Tensor | None
    reduction: str
    chunk_rows: int | None
    margin: float | None
    relative_margin: bool
    labels: torch.Tensor | None  # positives [n, K]
    ids: tuple[torch.Tensor, torch.Tensor] | None
    guide: tuple[torch.Tensor, torch.Tensor] | None
    diagonal: bool = False  # document i of query i
    batch: Gather | SingleProcess | None = None  # queries of all processes, documents of this one
    limit: torch.Tensor | None = None  # of the guide


def _has_cosine(q, temperature, sizes):
    """Whether one forward and one backward operator compute the whole cosine loss: on sm_90, in bfloat16."""
    return (
        q.dtype == torch.bfloat16
        and not isinstance(temperature, torch.Tensor)
        and temperature * _MOST_SCALE >= 1.0
        and all(size % 8 == 0 for size in sizes)
        and q.shape[0] > 0
        and (torch.compiler.is_compiling() or not is_batched())
        and has_matmul_kernels(q.device)
    )


def _cosine_loss(q, d, o: ContrastiveOptions):
    """Compute the loss of cosines; document i belongs to query i."""
    train, weight = torch.is_grad_enabled(), o.weight
    form = {"scale": 1.0 / o.temperature, "symmetric": o.symmetric}
    form["reduction_scale"] = 1.0 / len(q) if o.reduction == "mean" else 1.0
    form["weight"] = None if weight is None else weight.detach().float()
    form["wide"] = o.chunk_rows is not None or len(q) * len(d) > _ONE_CHUNK
    needs = {"need_gd": train and q.requires_grad, "need_gq": train and d.requires_grad}
    needs |= {"need_loss": True, "need_factor": True}
    loss, *_ = _cosine.named(q=q, d=d, **form, chunk_rows=o.chunk_rows or 0, **needs)
    return loss.view(())


def statistics(q, d, scale, labels=None, *, ids=None, limit=None, guide=None, columns=False, chunk_rows=0):
    """``(row_lse [n], col_lse [m] or None, picked [n, K] or None)`` of ``scale * q @ d.T``, differentiable;
    the first two in float64.

    Args:
        scale: float32 ``[1]``.
        labels: int64 ``[n, K]``, the columns that are positives; a value outside ``[0, m)`` is no positive.
        ids: ``(q_ids, d_ids)`` int64: pairs of equal ids are left out, except positives.
        limit: float32 ``[n]``: pairs are left out if their ``q @ d.T``, or that of `guide`, is above it.
    """
    (q_ids, d_ids), (guide_q, guide_d) = ids or (None, None), guide or (None, None)
    if not has_kernel(OP, q=q, d=d):
        none = torch.zeros(q.shape[0], 0, dtype=torch.int64, device=q.device)
        wide = torch.promote_types(q.dtype, scale.dtype)
        row_lse, col_lse, picked = reference(
            q, d, scale.to(wide), none if labels is None else labels, q_ids, d_ids, limit, guide_q, guide_d
        )
    else:
        bounds = {"q_ids": q_ids, "d_ids": d_ids, "limit": limit, "guide_q": guide_q, "guide_d": guide_d}
        needs = {"need_row_lse": True, "need_col_lse": bool(columns), "need_picked": labels is not None}
        row_lse, col_lse, picked = _op.named(
            q=q, d=d, scale=scale, labels=labels, **bounds, chunk_rows=chunk_rows, **needs
        )
    picked = None if labels is None else picked.view(labels.shape)
    return row_lse, col_lse if columns else None, picked


def normalized(x):
    """x with rows of length ``sqrt(columns)``: one kernel in the forward, one in the backward."""
    return rms_norm(x, eps=1e-24 / x.shape[-1], rounding="none")


def guides(q, *embeddings):
    """The embeddings normalized, in their common dtype or float32."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in embeddings))
    dtype = torch.float32 if dtype == torch.float64 != q.dtype else dtype
    return tuple(normalized(x.detach().to(dtype)) for x in embeddings)


@torch.no_grad()
def limits(q, d, labels, *, length, margin, relative=False, rounded=False):
    """The largest ``q @ d.T`` of a pair that counts, for rows of squared `length`, `rounded` or not.

    A document equal to the most similar positive counts at margin 0, whatever the summation order of the
    matmul. A row without positives has no limit.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    inside = (labels >= 0) & (labels < d.shape[0])
    of = torch.stack(
        [
            (q.to(wide) * d[torch.where(ok, label, 0)]).sum(-1)
            for label, ok in zip(labels.unbind(1), inside.unbind(1), strict=True)
        ],
        1,
    )
    positive = torch.where(inside.any(1), torch.where(inside, of, -torch.inf).amax(1), torch.inf)
    positive = positive.to(q.dtype if rounded else wide).to(wide)
    tie = 32 * torch.finfo(wide).eps * positive.abs()
    return positive + tie - (positive.abs() * margin if relative else margin * length)


@tells_refusals
@arguments.called({"target": "labels"})
def contrastive_loss(
    q: torch.Tensor,
    d: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    temperature: float | torch.Tensor = 0.05,
    symmetric: bool = False,
    normalize: bool = True,
    weight: torch.Tensor | None = None,
    ids: tuple[torch.Tensor, torch.Tensor] | None = None,
    margin: float | None = None,
    relative_margin: bool = False,
    guide: tuple[torch.Tensor, torch.Tensor] | None = None,
    sizes: tuple[int, ...] | None = None,
    size_weights: tuple[float, ...] | None = None,
    reduction: str = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """InfoNCE loss of queries and documents, without storing the matrix of their similarities.

    With ``z = cos(q_i, d_j) / temperature`` a query's loss is the mean over its positives p of ``log(sum_j
    exp z_ij) - z_ip``. With ``symmetric`` it is the mean of that and of ``log(sum_i exp z_ip) - z_ip``, the
    loss of the positive document among all queries (CLIP). Only one chunk of queries has similarities in
    memory at a time.

    Args:
        q: ``[n, H]`` float32, bfloat16 or float16. float64 runs the eager reference.
        d: ``[m, H]``, q's dtype: the positives, and further documents that are negatives of all queries.
        labels: ``[n]`` or ``[n, K]`` integers, the documents that are positives of each query; -100 means
            none. A query without positives has no loss, but is still a negative of the documents. ``None``:
            document i is the positive of query i.
        temperature: > 0; a tensor of one element is differentiable.
        symmetric: compute both directions, in one pass over the similarities.
        normalize: use cosines; ``False``: dot products. The op computes the gradient of the norms too.
        weight: ``[n]``, factor of each query's loss (detached). It does not change the divisor of a mean,
            which is the number of queries that have positives.
        ids: ``(q_ids [n], d_ids [m])`` integers: pairs with equal ids are left out as duplicates of a
            positive, except the positives.
        margin: pairs with a similarity above that of the query's (most similar) positive minus the margin are
            treated as false negatives: they are left out and get no gradient. At margin 0 a pair with equal
            similarity counts. In cosines, or in dot products if `normalize` is off.
        relative_margin: the margin is a fraction of the positive's similarity.
        guide: ``(q [n, G], d [m, G])``, embeddings of another model, in any one dtype. `margin` (``None``: 0)
            is applied to their similarities (GISTEmbed).
        sizes: Matryoshka sizes: for each size the loss of the first columns, normalized again, is computed;
            the losses are summed.
        size_weights: a factor for each size; ``None``: 1.
        reduction: ``"mean"`` over queries that have positives, ``"sum"`` or ``"none"`` (``[n]``).
        group: treats the batches of all processes of the group as one batch: every query is compared with the
            documents of all processes. Each process passes its own queries and documents, and `labels` among
            these. Queries are gathered; documents are not sent. The loss is that of all queries and the same
            in every process (``"none"``: of its own queries). Each process gets the gradients of its own
            rows. If gradients of parameters are then averaged over the processes, as in DDP, multiply the
            loss by the number of processes. All processes must have the same number of queries.
        chunk_rows: queries per chunk; ``None`` chooses as :func:`tigon.linear_cross_entropy`.

    Returns:
        float32, differentiable in q, d and temperature. The forward takes one matmul and the backward three;
        one direction with one positive, without ids, margin, guide and group, takes three in all. If no query
        has positives, the loss is NaN for ``"mean"``, as in PyTorch. It is bitwise deterministic if PyTorch's
        matmuls are. On sm_90 one forward and one backward operator compute the loss of bfloat16 cosines, if
        temperature is a number of at least 1 / 60, H is a multiple of 8, document i is the positive of query
        i, none of these options is used and the result is a scalar. Then similarities are not rounded, and
        only the matmuls read them.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit; on the CPU also a label that is not a
            document and not -100. On CUDA such a label makes that query's loss NaN.

    Source: van den Oord et al. 2018, arXiv:1807.03748, eq. 4; Radford et al. 2021, arXiv:2103.00020, figure
    3; Khosla et al. 2020, arXiv:2004.11362, eq. 2 (several positives); Solatorio 2024, arXiv:2402.16829
    (guide); Kusupati et al. 2022, arXiv:2205.13147, eq. 1 (sizes).
    """
    arguments.check_float(OP, "q", q)
    arguments.check_float(OP, "d", d)
    _check_beside(q, q=q, d=d)
    check(OP, q.dim() == 2 and q.shape[1] > 0, "q must be [n, H] with H > 0, got {}", q.shape)
    fits = d.dim() == 2 and d.shape[1] == q.shape[1] and d.shape[0] > 0
    check(OP, fits, "d must be [m, {}] with m > 0, got {}", q.shape[1], d.shape)
    arguments.check_booleans(OP, symmetric=symmetric, normalize=normalize, relative_margin=relative_margin)
    arguments.check_choice(OP, "reduction", reduction, ("mean", "sum", "none"))
    arguments.check_number(OP, "temperature", temperature, learnt=True)
    if isinstance(temperature, torch.Tensor):
        _check_beside(q, temperature=temperature)
    else:
        arguments.check_positive(OP, "temperature", temperature)
    q, d = autocast(q), autocast(d)
    check(OP, d.dtype == q.dtype, "d must be {}, got {}", q.dtype, d.dtype)
    n, m, size = q.shape[0], d.shape[0], q.shape[1]
    labels = _check_labels(labels, q, n, m)
    if weight is not None:
        arguments.check_float(OP, "weight", weight)
        _check_beside(q, weight=weight)
        arguments.check_shape(OP, "weight", weight, (n,))
    if ids is not None:
        _check_pair("ids", ids, q, n, m, arguments.check_indices)
        ids = tuple(x.to(torch.int64) for x in ids)
    if guide is not None:
        _check_pair("guide", guide, q, n, m, arguments.check_float)
        guide = guides(q, *guide)
        margin = 0.0 if margin is None else margin
    if margin is not None:
        arguments.check_numbers(OP, margin=margin)
    arguments.check_integers(OP, least=1, or_none=True, chunk_rows=chunk_rows)
    sizes = _check_sizes(sizes, size_weights, size)
    options = {"temperature": temperature, "symmetric": symmetric, "normalize": normalize, "weight": weight}
    options |= {"reduction": reduction, "chunk_rows": chunk_rows, "labels": labels, "ids": ids}
    o = ContrastiveOptions(**options, margin=margin, relative_margin=relative_margin, guide=guide)
    plain = normalize and reduction != "none" and all(x is None for x in (labels, ids, margin, guide, group))
    loss_of_size = _cosine_loss
    if not (plain and _has_cosine(q, temperature, sizes)):
        loss_of_size = _loss
        if labels is None:
            o = o._replace(labels=torch.arange(n, device=q.device)[:, None], diagonal=True)
        o = _gathered(q, d, o, sizes, size_weights, group)
    losses = [loss_of_size(*((q, d) if s == size else (q[:, :s], d[:, :s])), o) for s in sizes]
    if size_weights is not None:
        losses = [loss * w for loss, w in zip(losses, size_weights, strict=True)]
    return sum(losses[1:], losses[0])


def _check_labels(labels, q, n, m):
    """The positives of n queries among m documents, int64 ``[n, K]``."""
    if labels is None:
        check(OP, m >= n, "d must have at least q's {} rows without labels, got {}", n, m)
        return None
    arguments.check_indices(OP, "labels", labels)
    _check_beside(q, labels=labels)
    fits = labels.dim() in (1, 2) and labels.shape[0] == n and labels.numel() >= n
    check(OP, fits, "labels must be [{}] or [{}, K], got {}", n, n, labels.shape)
    labels = labels.to(torch.int64).reshape(n, -1 if n else 1)
    arguments.check_range(OP, "labels", labels, m, IGNORED)
    return labels


def _check_sizes(sizes, size_weights, size) -> list[int]:
    """The Matryoshka sizes of embeddings of `size` columns."""
    for name, given in (("sizes", sizes), ("size_weights", size_weights)):
        fits = given is None or (isinstance(given, Sequence) and not isinstance(given, str))
        check(OP, fits, name + " must be a tuple of numbers (or None), got {}", arguments.kind_of(given))
    sizes = [size] if sizes is None else list(sizes)
    check(OP, len(sizes) > 0, "sizes must not be empty")
    for s in sizes:
        arguments.check_integers(OP, sizes=s)
        check(OP, 1 <= s <= size, "sizes must be in [1, {}], got {}", size, s)
    if size_weights is not None:
        words = "size_weights must have one number for each of {} sizes, got {}"
        check(OP, len(size_weights) == len(sizes), words, len(sizes), len(size_weights))
        for w in size_weights:
            arguments.check_numbers(OP, size_weights=w)
    return sizes


def _gathered(q, d, o: ContrastiveOptions, sizes, size_weights, group) -> ContrastiveOptions:
    """The options with the batch of the group, and the ids and the guide of all its queries."""
    batch = SingleProcess()
    if group is not None:
        names = ("temperature", "symmetric", "normalize", "reduction", "margin", "relative_margin")
        told = {"positives": o.labels.shape[1], "labels": not o.diagonal}
        told |= {name: getattr(o, name) for name in names}
        told |= {"ids": o.ids is not None, "guide": o.guide is not None, "sizes": sizes}
        told["size_weights"] = size_weights and [float(w) for w in size_weights]
        batch = Gather(OP, group, q, (q, d, o.temperature), told)
    ids, limit, guide = o.ids, None, o.guide
    if ids is not None:
        ids = batch.rows(ids[0]), ids[1]
    if guide is not None:  # its similarities decide which pairs count, for every size
        bound = {"length": guide[0].shape[1], "margin": o.margin, "relative": o.relative_margin}
        limit = batch.rows(limits(*guide, o.labels, **bound))
        guide = batch.rows(guide[0]), guide[1]
    return o._replace(batch=batch, ids=ids, limit=limit, guide=guide)


def _check_beside(of, /, **tensors):
    """Check that each is a plain tensor on the device of q, which is `of`."""
    for name, x in tensors.items():
        arguments.check_dense(OP, name, x)
        check(OP, x.device == of.device, name + " must be on {}, got {}", of.device, x.device)


def _check_pair(name, pair, q, n, m, check_kind):
    """Check a pair of tensors, one for the queries and one for the documents."""
    fits = isinstance(pair, Sequence) and len(pair) == 2
    check(OP, fits, "{} must be a pair of tensors, got {}", name, arguments.kind_of(pair))
    for part, x in zip("qd", pair, strict=True):
        check_kind(OP, f"{part}_{name}", x)
        _check_beside(q, **{f"{part}_{name}": x})
    a, b = (x.shape for x in pair)
    fits = a[:1] == (n,) and b[:1] == (m,) and a[1:] == b[1:] and 0 not in a[1:]
    check(OP, fits, "{} must be of {} queries and {} documents, got {} and {}", name, n, m, a, b)


def _loss(q, d, o: ContrastiveOptions):
    """Compute the loss of embeddings of one size."""
    n, columns = q.shape[0], q.shape[1] if o.normalize else 1  # a normalized row's length, squared
    wide, labels, batch = torch.promote_types(q.dtype, torch.float32), o.labels, o.batch
    if o.normalize:
        q, d = normalized(q), normalized(d)
    plain = not o.symmetric and labels.shape[1] == 1 and o.ids is None and o.margin is None
    if plain and type(batch) is SingleProcess and not isinstance(o.temperature, torch.Tensor) and n:
        logits = {"logit_scale": 1.0 / columns, "temperature": float(o.temperature)}
        logits |= {"token_weight": o.weight, "reduction": o.reduction, "chunk_rows": o.chunk_rows}
        return linear_cross_entropy(q, d, labels[:, 0], **logits)
    if isinstance(o.temperature, torch.Tensor):
        scale = 1.0 / (o.temperature.to(q.device, wide).reshape(1) * columns)
    else:
        scale = torch.full((1,), 1.0 / (o.temperature * columns), dtype=torch.float64, device=q.device)
        scale = scale.to(wide)
    options = {"ids": o.ids, "limit": o.limit, "guide": o.guide, "chunk_rows": o.chunk_rows or 0}
    if o.margin is not None and o.guide is None:
        bound = {"length": columns, "margin": o.margin, "relative": o.relative_margin}
        options["limit"] = batch.rows(limits(q, d, labels, rounded=True, **bound))
    positives, rows = batch.labels(labels, IGNORED), batch.rows(q)
    row_lse, col_lse, picked = statistics(rows, d, scale, positives, columns=o.symmetric, **options)
    own, picked = batch.own(batch.log_sum(row_lse)), batch.own(picked)
    if o.diagonal:
        if o.symmetric:
            own = (own + (col_lse[:n] if n < d.shape[0] else col_lse)) / 2
        losses, count = own - picked.view(-1), n * batch.size
    else:
        counts, own = (labels >= 0) & (labels < d.shape[0]), own[:, None]
        if o.symmetric:
            own = (own + col_lse[labels.clamp(0, d.shape[0] - 1)]) / 2
        number, wrong = counts.sum(1), (~counts & (labels != IGNORED)).any(1)
        losses = torch.where(counts, own - picked, 0.0).sum(1) / number.clamp_min(1)
        losses = torch.where(wrong, torch.nan, losses)  # not checked on the host
        count = batch.sum((number > 0).sum().to(wide))
    if o.weight is not None:
        losses = losses * o.weight.detach().to(wide)
    if o.reduction == "none":
        return losses.to(wide)
    total = batch.sum(losses.sum())
    return (total / count if o.reduction == "mean" else total).to(wide)


class SingleProcess:
    """The batch of one process, as :class:`tigon.ops.loss_head.gather.Gather` has those of a group."""

    size, rows = 1, staticmethod(lambda x, *ignored: x)
    labels = log_sum = own = sum = rows
