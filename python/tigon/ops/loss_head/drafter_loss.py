"""Losses of a draft model (speculative decoding) against its teacher's head.

Contract: ``csrc/tigon/ops/drafter_loss/drafter_loss.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tigon._op import has_kernel
from tigon.error import check
from tigon.ops import arguments
from tigon.ops import cross_entropy as _cross_entropy
from tigon.ops.loss_head import operands
from tigon.ops.loss_head.autograd import empty_loss, teacher_head_loss
from tigon.ops.loss_head.labels import check_shift
from tigon.ops.loss_head.operands import HeadCall, TrainedCalls
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import Planner, Sizes
from tigon.ops.loss_head.reference import result_type

_OP = "drafter_loss"
_KINDS = {"ce": 0, "kl": 1, "hard": 2, "tv": 3, "lk": 4}
# Whether p is a softmax of all classes: for the overlap, and for ce and kl.
_OUTSIDE = {"renormalize": (False, False), "mixed": (True, False), "count": (True, True)}
_IGNORED = -100


class Drafter(NamedTuple):
    """The loss, as the caller gave it."""

    loss: str
    eta: float
    outside: str
    mask_outside: bool
    reduction: str
    denominator: float | torch.Tensor | None
    shifts: Sequence[int]  # of each step
    step_weights: Sequence[float]
    draft_ids: torch.Tensor | None


def _fake(call: HeadCall):
    rows = call.operands.target.shape[0]
    numbers = call.operands.hidden.new_empty((2, rows), dtype=torch.float32)
    return *empty_loss(call, call.own.reduction != 0), numbers


_loss = teacher_head_loss(_OP, _fake)


def reference(hidden, weight, teacher, counts, d: Drafter):
    """Losses, overlaps and counted rows of ``hidden [..., (S,) H]``, computed with PyTorch operations."""
    wide, lead = torch.promote_types(hidden.dtype, torch.float32), teacher[0].dim() - 1

    def stepwise(t):
        return t.unsqueeze(lead) if hidden.dim() > lead + 1 else t

    with torch.no_grad():
        z = F.linear(*(t.to(hidden.dtype) for t in teacher)).to(wide)
        ids = torch.arange(z.shape[-1], device=z.device) if d.draft_ids is None else d.draft_ids
        inside = z[..., ids.clamp(min=0)].masked_fill(ids < 0, -torch.inf)
        log_p, log_all = torch.log_softmax(inside, -1), torch.logsumexp(z, -1, keepdim=True)
        overlap_log_p, soft = (stepwise(inside - log_all if own else log_p) for own in _OUTSIDE[d.outside])
        label = stepwise(inside.argmax(-1)).expand(hidden.shape[:-1])
        if d.mask_outside:
            counts = counts & stepwise(inside.amax(-1) == z.amax(-1))
    logits = F.linear(hidden, weight.to(hidden.dtype)).to(wide)
    log_q, p = torch.log_softmax(logits, -1), soft.exp()
    overlap = torch.minimum(overlap_log_p.exp(), log_q.exp()).sum(-1)
    cross = -torch.where(p > 0, p * log_q, 0.0).sum(-1)
    kl = cross + torch.where(p > 0, p * soft, 0.0).sum(-1)
    blend = torch.exp(-d.eta * overlap.detach())
    rows = {
        "ce": cross,
        "kl": kl,
        "hard": -log_q.gather(-1, label.unsqueeze(-1)).squeeze(-1),
        "tv": 1 - overlap,
        "lk": blend * kl + (1 - blend) * (1 - overlap),
    }[d.loss]
    return torch.where(counts, rows, 0.0), torch.where(counts, overlap.detach(), 0.0), counts.to(wide)


def _check_ids(draft_ids, classes, teacher_classes, device):
    if draft_ids is None:
        words = "weight must have the teacher's {} classes where draft_ids is None, got {}"
        check(_OP, classes == teacher_classes, words, teacher_classes, classes)
        return
    arguments.check_indices(_OP, "draft_ids", draft_ids)
    arguments.check_shape(_OP, "draft_ids", draft_ids, (classes,))
    arguments.check_dense(_OP, "draft_ids", draft_ids)
    check(_OP, draft_ids.device == device, "draft_ids must be on {}, got {}", device, draft_ids.device)
    if not arguments.readable(draft_ids):
        return
    used = draft_ids[draft_ids >= 0].tolist()
    words = "draft_ids must be below the teacher's {} classes, got {}"
    check(_OP, max(used, default=0) < teacher_classes, words, teacher_classes, max(used, default=0))
    check(_OP, len(used) > 0, "draft_ids must hold at least one of the teacher's classes, got none")
    check(_OP, len({*used}) == len(used), "draft_ids must be different classes, got one twice")


def _inverse(draft_ids, teacher_classes):
    """``[V_t]``: the draft's id of each class of the teacher, -1 if it has none."""
    ids = draft_ids.long()
    ids = torch.where((ids >= 0) & (ids < teacher_classes), ids, teacher_classes)
    table = ids.new_full((teacher_classes + 1,), -1, dtype=torch.int32)
    return table.scatter(0, ids, torch.arange(ids.numel(), device=ids.device, dtype=torch.int32))[:-1]


def _at(h, shift):
    """The states of ``shift`` positions earlier, which are compared with the teacher's at each position."""
    shift = min(shift, h.shape[-2])
    return F.pad(h[..., : h.shape[-2] - shift, :], (0, 0, shift, 0)) if shift else h


@arguments.called()
def drafter_loss(
    hidden: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor,
    teacher: tuple[torch.Tensor, torch.Tensor],
    draft_ids: torch.Tensor | None = None,
    *,
    loss: str = "kl",
    eta: float = 3.0,
    outside: str = "mixed",
    mask_outside: bool = True,
    mask: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    shifts: tuple[int, ...] | None = None,
    step_weights: tuple[float, ...] | None = None,
    position_ids: torch.Tensor | None = None,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    valid_rows: int | None = None,
    chunk_rows: int | None = None,
    max_peak_mb: float | None = None,
    outputs: tuple[str, ...] = ("loss",),
) -> torch.Tensor | NamedTuple:
    """Loss of a draft model's head against its teacher's, for one or several steps, without the full logits.

    With ``p`` the teacher's probabilities of the draft's classes and ``q`` the draft's, a row's loss is
    ``-sum p log q`` (``"ce"``), ``sum p (log p - log q)`` (``"kl"``), ``-log q[argmax]`` (``"hard"``),
    ``1 - overlap`` with ``overlap = sum min(p, q)`` (``"tv"``), or ``lambda kl + (1 - lambda) tv`` with
    ``lambda = exp(-eta overlap)``, which gets no gradient (``"lk"``). The teacher's head takes one matmul for
    all steps, the draft's head three for each step. Both sides' logits are rounded to hidden's dtype. For a
    temperature, divide both hidden states by it.

    Args:
        hidden: the draft's hidden states before its head, ``[..., T, H]`` float32, bfloat16 or float16. For
            several steps (training-time test): a list of such tensors, or ``[..., T, S, H]``, which is not
            copied. float64 runs the eager reference, which computes the full logits.
        weight: the draft's head ``[V, H]``. Another float dtype is converted to hidden's; its gradient keeps
            the dtype of weight.
        teacher: ``(hidden, weight)`` of the teacher, ``[..., T, H_t]`` and ``[V_t, H_t]``, converted to
            hidden's dtype. It never gets a gradient.
        draft_ids: int64 ``[V]``, the teacher's class for each of the draft's classes, all different; -1 marks
            a class that the teacher does not have. ``None``: both have the same classes. (From a mask
            ``t2d``: ``t2d.nonzero().flatten()``; from offsets ``d2t``: ``torch.arange(V) + d2t``.)
        loss: the loss to minimise, see above.
        eta: >= 0, for ``"lk"``; 0 gives ``"kl"``, a large value approaches ``"tv"``.
        outside: how to treat the teacher's probability outside the draft's classes. ``"renormalize"`` leaves
            it out: p is a softmax over the draft's classes. ``"count"`` takes p from the softmax over all
            classes, so that classes outside are never accepted. ``"mixed"`` does so for the overlap and
            renormalizes p for ``"ce"`` and ``"kl"``, as the authors of the LK losses do.
        mask_outside: leave out the rows whose most likely class the draft does not have, as EAGLE-3 does.
            ``False`` with ``"renormalize"`` computes only the draft's classes of the teacher's logits; the
            label of ``"hard"`` is then the most likely of these classes.
        mask: bool ``[..., T]``, the teacher's positions that count; ``None``: all.
        token_weight: ``[..., T]``, factor of the losses at a teacher's position (detached). It does not
            change the divisor of a mean.
        shifts: for each step how far it looks ahead, >= 0: the state at t is compared with the teacher's at
            ``t + shift``. ``None``: 0.
        step_weights: a factor for each step; ``None``: 1.
        position_ids: ``[..., T]``, positions that restart at each packed sequence, for shifts.
        reduction: ``"mean"`` (for each step the mean over the positions of `mask` that it reaches, summed
            over the steps), ``"sum"``, or ``"none"``: losses ``[..., T]``, or ``[..., T, S]`` for several
            steps, at the teacher's positions; its backward computes the logits again.
        denominator: as in :func:`tigon.linear_cross_entropy`.
        valid_rows: how many positions `mask` has, if the caller knows. On CUDA the other positions then cost
            nothing.
        chunk_rows: how many draft rows have logits at a time; ``None`` chooses a number.
        max_peak_mb: as in :func:`tigon.linear_cross_entropy`, but only by smaller chunks: the weight's
            gradient is summed in float32.
        outputs: ``("loss",)``, or ``("loss", "acceptance")`` for a named tuple. The acceptance, float32
            ``[S]`` and detached, is the mean overlap over each step's rows that count: the probability that a
            drafted token is accepted. It is NaN if no row counts.

    Returns:
        float32 scalar, or losses of rows; with more outputs a named tuple. It is differentiable in hidden and
        weight, and bitwise deterministic. If `mask` has no row, a mean is NaN and gradients are zero.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit; on the CPU also draft_ids that are not
            different classes of the teacher, or none at all. On CUDA a number that is not a class of the
            teacher is treated as a class that the teacher does not have.

    Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
    Training-Time Test" (arXiv:2503.01840); Samarin et al. 2026, "LK Losses: Direct Acceptance Rate
    Optimization for Speculative Decoding" (arXiv:2602.23881).
    """
    states, teacher_weight = _check_teacher(teacher)
    lead, alone = states.shape[:-1], isinstance(hidden, torch.Tensor) and hidden.dim() == states.dim()
    draft = _draft_states(hidden, weight, states)
    number = len(draft)
    shifts = arguments.one_each(_OP, "shifts", shifts, number, "steps", [0] * number)
    step_weights = arguments.one_each(_OP, "step_weights", step_weights, number, "steps", [1.0] * number)
    options = {"mask_outside": mask_outside, "reduction": reduction, "denominator": denominator}
    options |= {"shifts": shifts, "step_weights": step_weights, "draft_ids": draft_ids}
    d = Drafter(loss, eta, outside, **options)
    _check_options(d)
    outputs = operands.check_outputs(_OP, outputs, ("loss", "acceptance"))
    stacked = hidden
    if any(shifts) or not isinstance(hidden, torch.Tensor):
        moved = [_at(h, k) for h, k in zip(draft, shifts, strict=True)]
        stacked = moved[0] if alone else torch.stack(moved, -2)
    base = _labels(mask, lead, stacked.device)
    target = base if alone else base.unsqueeze(-1).expand(*lead, number).contiguous()
    operands.check_token_weight(_OP, token_weight, base)
    if token_weight is not None:
        arguments.check_like(_OP, "token_weight", token_weight, lead, stacked.device)
    check_shift(_OP, any(shifts), position_ids, base)
    arguments.check_integers(_OP, or_none=True, valid_rows=valid_rows)
    valid_rows = None if valid_rows is None else valid_rows * number
    head = HeadOptions(valid_rows=valid_rows, chunk_rows=chunk_rows, max_peak_mb=max_peak_mb)
    operands.check_head(_OP, stacked, weight, target, head)
    _check_ids(draft_ids, weight.shape[0], teacher_weight.shape[0], stacked.device)
    TrainedCalls.count(stacked, weight)
    weight, copied = operands.plain_weight(_OP, weight), [] if stacked is hidden else [stacked]
    held = None  # which of the draft's classes the teacher has, if another one may be the most likely
    if not mask_outside and draft_ids is not None:
        held = (draft_ids >= 0) & (draft_ids < len(teacher_weight))
    if outside == "renormalize" and held is not None:  # no other class is needed
        teacher_weight = teacher_weight[draft_ids.clamp(0, teacher_weight.shape[0] - 1)]
        copied.append(teacher_weight)
        d = d._replace(draft_ids=torch.where(held, torch.arange(len(draft_ids), device=stacked.device), -1))
    extra_bytes = sum(t.numel() * t.element_size() for t in copied)
    factor, reaches = _factors(stacked, base, token_weight, position_ids, d)
    stacked, teacher = operands.autocast(stacked), (states, teacher_weight)
    parts = {"weight": weight, "target": target, "token_weight": token_weight, "draft_ids": d.draft_ids}
    parts |= {"teacher": states, "teacher_weight": teacher_weight}
    call = stacked, weight, teacher, base, target, head, factor, d
    native = has_kernel(_OP, hidden=stacked, beside=parts)
    losses, overlap, counted = _run(*call, extra_bytes) if native else _run_plain(*call)
    if held is not None and not arguments.readable(held):  # without any class there is no loss
        losses = torch.where(held.any(), losses, torch.nan)
    if outputs == ("loss",):
        return losses
    if reaches is not None:
        overlap, counted = (torch.where(reaches, x, 0.0) for x in (overlap, counted))
    acceptance = overlap.reshape(-1, number).sum(0) / counted.reshape(-1, number).sum(0)
    return result_type(outputs, "DrafterLoss")(losses, acceptance)


def _check_options(d: Drafter) -> None:
    for k in d.shifts:
        arguments.check_integers(_OP, least=0, shifts=k)
    weights = {f"step_weights[{i}]": w for i, w in enumerate(d.step_weights)}
    arguments.check_numbers(_OP, eta=d.eta, **weights)
    check(_OP, d.eta >= 0, "eta must be >= 0, got {}", d.eta)
    arguments.check_choice(_OP, "loss", d.loss, _KINDS)
    arguments.check_choice(_OP, "outside", d.outside, _OUTSIDE)
    arguments.check_choice(_OP, "reduction", d.reduction, _cross_entropy.REDUCTIONS)
    arguments.check_booleans(_OP, mask_outside=d.mask_outside)
    _cross_entropy.check_denominator(_OP, d.denominator)


def _check_teacher(teacher):
    """The teacher's hidden states and weight, detached."""
    two = isinstance(teacher, Sequence) and len(teacher) == 2
    given = len(teacher) if isinstance(teacher, Sequence) else arguments.kind_of(teacher)
    check(_OP, two, "teacher must be (hidden, weight), got {}", given)
    states, weight = teacher
    arguments.check_float(_OP, "teacher_hidden", states)
    arguments.check_float(_OP, "teacher_weight", weight)
    fits = states.dim() >= 2 and weight.dim() == 2 and weight.shape[1:] == states.shape[-1:]
    words = "teacher must be [..., T, H_t] and [V_t, H_t], got {} and {}"
    check(_OP, fits, words, states.shape, weight.shape)
    check(_OP, weight.numel() > 0, "teacher_weight must not be empty, got {}", weight.shape)
    return states.detach(), weight.detach()


def _draft_states(hidden, weight, states):
    """The draft's hidden states of each step, in any of their forms; they fit the teacher's."""
    given, lead = isinstance(hidden, torch.Tensor), states.shape[:-1]
    steps = [hidden] if given else list(hidden) if isinstance(hidden, Sequence) else []
    tensors = len(steps) > 0 and all(isinstance(h, torch.Tensor) for h in steps)
    words = "hidden must be a tensor, or a tensor for each step, got {}"
    check(_OP, tensors, words, arguments.kind_of(hidden))
    for h in steps:
        arguments.check_float(_OP, "hidden", h)
    arguments.check_float(_OP, "weight", weight)
    if given and hidden.dim() == states.dim() + 1:
        steps = [hidden.select(-2, i) for i in range(hidden.shape[-2])]
    for h in steps:
        fits = h.shape[:-1] == lead and h.shape == steps[0].shape and h.dtype == steps[0].dtype
        check(_OP, fits, "hidden must be {} and then H, the same for every step, got {}", lead, h.shape)
        same = h.device == steps[0].device
        check(_OP, same, "hidden must be on {} at every step, got {}", steps[0].device, h.device)
    return steps


def _labels(mask, lead, device):
    """Labels of the teacher's positions: 0 at those that count."""
    base = torch.zeros(lead, dtype=torch.int64, device=device)
    if mask is None:
        return base
    boolean = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
    check(_OP, boolean, "mask must be a bool tensor, got {}", arguments.kind_of(mask))
    arguments.check_layout(_OP, "mask", mask)
    arguments.check_like(_OP, "mask", mask, lead, device)
    return base.masked_fill(~mask, _IGNORED)


def _factors(stacked, base, token_weight, position_ids, d: Drafter):
    """The factor of each row's loss and whether its step reaches it, ``[..., T]`` or ``[..., T, S]``; or
    ``(None, None)``."""
    if not any(d.shifts) and token_weight is None and all(w == 1.0 for w in d.step_weights):
        return None, None
    wide, device = torch.promote_types(stacked.dtype, torch.float32), base.device
    by_step = d.reduction == "mean" and d.denominator is None
    position, counts = torch.arange(base.shape[-1], device=device), base.ne(_IGNORED)
    if position_ids is not None:
        position = torch.minimum(position, position_ids.reshape(position_ids.shape[-base.dim() :]))
    position = position.expand(base.shape)
    factors, reached = [], [position >= k for k in d.shifts]
    for w, k, here in zip(d.step_weights, d.shifts, reached, strict=True):
        f = torch.full(base.shape, float(w), dtype=torch.float64, device=device).to(wide)
        f = torch.where(here, f, 0.0)
        if k and by_step:  # the mean of each step
            f = f * counts.sum() / (counts & here).sum().clamp(min=1)
        factors.append(f if token_weight is None else f * token_weight.detach())
    alone = stacked.dim() == base.dim() + 1
    return tuple(x[0] if alone else torch.stack(x, -1) for x in (factors, reached))


def _run_plain(hidden, weight, teacher, base, target, head, factor, d: Drafter):
    """As :func:`_run`, by the reference."""
    operands.check_plain(_OP, 1, target, head)
    rows, overlap, counted = reference(hidden, weight, teacher, target != _IGNORED, d)
    losses = rows if factor is None else rows * factor
    if d.denominator is not None:
        losses = _cross_entropy.divide(losses.sum(), d.denominator)
    elif d.reduction != "none":
        losses = losses.sum() / (base.ne(_IGNORED).sum() if d.reduction == "mean" else 1)
    return losses, overlap, counted


def _run(hidden, weight, teacher, base, target, head, factor, d: Drafter, extra_bytes):
    """Run the kernels: the loss, and overlaps and counted rows ``[..., S]``; `extra_bytes`: of operands."""
    extra_bytes += sum(t.numel() * hidden.element_size() for t in teacher if t.dtype != hidden.dtype)
    states, teacher_weight, _ = operands.whole_vectors(*(t.to(hidden.dtype) for t in teacher))
    draft_id = None if d.draft_ids is None else _inverse(d.draft_ids, teacher_weight.shape[0])
    overlap_outside, soft_outside = _OUTSIDE[d.outside]
    own = _loss.own(
        teacher_hidden=states,
        teacher_weight=teacher_weight,
        teacher_target=base.reshape(-1),
        draft_id=draft_id,
        kind=_KINDS[d.loss],
        eta=float(d.eta),
        overlap_outside=overlap_outside,
        soft_outside=soft_outside,
        mask_outside=d.mask_outside and draft_id is not None,
        reduction=_cross_entropy.REDUCTIONS["sum" if d.denominator is not None else d.reduction],
        **operands.divisors(d.denominator, hidden.device),
    )
    call, parameters = operands.native_call(_OP, hidden, weight, target, head, token_weight=factor, own=own)
    steps, sizes = target.numel() // max(base.numel(), 1), Sizes(per_row=own.reduction == 0)
    numbers = steps, *reversed(teacher_weight.shape), draft_id is not None
    planner = Planner("tigon_drafter_loss_plan", numbers)
    call = operands.within_peak(_OP, call, head, sizes, weight, planner=planner, extra_bytes=extra_bytes)
    losses, numbers = _loss.run(call, parameters, scalar=own.reduction != 0)
    overlap, counted = numbers.view(2, *target.shape)
    return losses if own.reduction else losses.view(target.shape), overlap, counted
