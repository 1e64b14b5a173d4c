"""Divergences from the K most likely classes of a teacher, as a teacher server sends them.

A distribution becomes K + 1 numbers: those of the candidates, and the mass of all other classes.
:func:`tigon.linear_log_prob` of labels ``[..., K]`` computes the student's.
"""

from __future__ import annotations

import torch

from tigon.error import check
from tigon.ops.arguments import check_float, check_indices, check_range, check_shape, readable
from tigon.ops.divergence import divergence
from tigon.ops.loss_head.labels import check_valid_rows, shifted

_LEAST_TAIL = 1e-7  # of the mass outside the candidates: the precision of 1 - their sum in float32
_NEVER = -1e4  # log-probability of a class that is not a candidate
_IGNORED = -(2**63)  # a label that no class has, whatever the caller's ignore_index is


def is_top_k(teacher) -> bool:
    """Whether a teacher is (indices, log-probabilities)."""
    pair = isinstance(teacher, (tuple, list)) and len(teacher) == 2 and isinstance(teacher[0], torch.Tensor)
    return pair and not teacher[0].is_floating_point()


def check_top_k(op, teacher, lead, device) -> None:
    """Check indices and log-probabilities [*lead, K] on hidden's device."""
    indices, log_prob = teacher
    check_indices(op, "teacher indices", indices)
    check_float(op, "teacher log_prob", log_prob)
    fits = indices.dim() == len(lead) + 1 and indices.shape[:-1] == lead and indices.shape[-1] >= 1
    check(op, fits, "teacher indices must be {} and then K >= 1, got {}", lead, indices.shape)
    check_shape(op, "teacher log_prob", log_prob, indices.shape)
    for t in teacher:
        check(op, t.device == device, "teacher must be on {}, got {}", device, t.device)


def _check_numbers(op, classes, log_prob, candidate) -> None:
    """On the CPU: check that a row's classes are different and their log-probabilities valid."""
    if not (readable(classes) and readable(log_prob)):
        return
    order = torch.where(candidate, classes, -1 - torch.arange(classes.shape[-1])).sort(-1).values
    twice = order[..., 1:][order.diff(dim=-1) == 0][:1].tolist()
    check(op, not twice, "teacher indices must be different classes in each row, got {} twice", *twice)
    mass = torch.where(candidate, log_prob.double(), -torch.inf).logsumexp(-1).exp()
    large = mass[mass > 1.5][:1].tolist()  # rounding may give a little more than 1
    check(op, not large, "teacher log_prob must be log-probabilities, got some of probability {}", *large)


def with_tail(log_prob):
    """Log-probabilities of K candidates and of all others together, by a formula that keeps precision.

    Candidates whose mass exceeds 1 by rounding are normalised.
    """
    mass = log_prob.logsumexp(-1, keepdim=True)
    log_prob = log_prob - mass.clamp(min=0)
    mass = mass.clamp(max=-_LEAST_TAIL)
    most = mass > -0.6931472  # the candidates have more than half of the mass
    tail = torch.where(most, mass.expm1().neg().log(), mass.exp().neg().log1p())
    return torch.cat((log_prob, tail), -1)


def top_k_loss(op, linear_log_prob, dtype, vocab, labels, head, d):
    """The loss and the results of rows, on checked arguments; `head`, `d`: of linear_divergence.

    Args:
        linear_log_prob: that function on hidden states of `dtype` and weight, ``(target, **options)``.
        vocab: number of classes; None: not known here.
    """
    ignore_index = head.ignore_index
    indices, teacher_log_prob = (t.detach() for t in d.teacher)
    labels = shifted(labels, ignore_index, head.shift, head.position_ids)
    counts = labels != ignore_index
    check_valid_rows(op, labels, ignore_index, head.valid_rows)
    wide = torch.promote_types(dtype, torch.float32)
    options = head._replace(valid_rows=None, logit_dtype=None if dtype == wide else wide).log_prob_options()
    candidate = ~(teacher_log_prob <= _NEVER) & counts.unsqueeze(-1)
    classes = torch.where(candidate, indices.long(), 0)
    if vocab is not None:
        check_range(op, "teacher indices", classes, vocab)
        check_range(op, "labels", labels, vocab, ignore_index)
    _check_numbers(op, classes, teacher_log_prob, candidate)
    targets = torch.where(counts.unsqueeze(-1), classes, _IGNORED)
    entropy = "entropy" in d.outputs
    of_candidates = options | {"ignore_index": _IGNORED, "entropy": entropy}
    log_prob = linear_log_prob(targets, **of_candidates)
    log_prob, entropies = log_prob if entropy else (log_prob, None)
    student, teacher = (
        with_tail(torch.where(candidate, t.to(wide), _NEVER)) for t in (log_prob, teacher_log_prob)
    )
    options_of_rows = {"log_probs": True, "ignore_index": ignore_index, "reduction": "none"}
    soft_rows = divergence(op, d.kind, student, teacher, labels, d.beta, **options_of_rows)
    hard_rows = None
    results = {"soft": soft_rows.detach()}
    if d.hard != 0.0 or "hard" in d.outputs:
        hard_rows = -linear_log_prob(labels, **options | {"temperature": 1.0})
        results["hard"] = hard_rows.detach()
    if entropy:
        results["entropy"] = torch.where(counts, entropies.detach(), 0.0)
    return d.reduce(soft_rows, hard_rows, counts, student.shape[-1]), results
