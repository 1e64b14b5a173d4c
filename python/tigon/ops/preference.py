"""Preference losses of given log-probabilities.

Contract: ``csrc/tigon/ops/preference/preference.h``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tigon._op import has_kernel, loss_with_gradients
from tigon.error import check, refuse
from tigon.ops import arguments
from tigon.ops.cross_entropy import check_denominator, divide, split_denominator


class Kind(NamedTuple):
    """A kind of pair loss: its formula, and the values that its paper fixes."""

    formula: int  # PreferenceKind of the C++ side
    average: bool = False  # default: scores by length
    nll: float = 0.0  # default factor of the nll term
    ref: bool = True  # takes a reference
    smoothing: str = ""  # range of label_smoothing; "": must be 0
    gamma: bool = False  # takes a margin


_LOGISTIC, _HINGE, _IPO, _ROBUST, _EXO, _NCA, _BCO, _SPPO, _APO_ZERO, _APO_DOWN, _DISCOPOP, _ORPO, _KTO = (
    range(13)
)
PAIR_KINDS = {
    "sigmoid": Kind(_LOGISTIC, gamma=True),
    "cdpo": Kind(_LOGISTIC, smoothing="[0, 0.5]", gamma=True),
    "cpo": Kind(_LOGISTIC, nll=1.0, ref=False, smoothing="[0, 0.5]", gamma=True),
    "simpo": Kind(_LOGISTIC, average=True, ref=False, smoothing="[0, 0.5]", gamma=True),
    "hinge": Kind(_HINGE, gamma=True),
    "ipo": Kind(_IPO, average=True),
    "robust": Kind(_ROBUST, smoothing="[0, 0.5)"),
    "exo_pair": Kind(_EXO, smoothing="(0, 0.5]"),
    "nca_pair": Kind(_NCA),
    "bco_pair": Kind(_BCO),
    "sppo_hard": Kind(_SPPO),
    "apo_zero": Kind(_APO_ZERO),
    "apo_down": Kind(_APO_DOWN),
    "discopop": Kind(_DISCOPOP),
    "orpo": Kind(_ORPO, average=True, nll=1.0, ref=False),
}
_RANGES = {
    "": lambda eps: eps == 0,
    "[0, 0.5]": lambda eps: 0 <= eps <= 0.5,
    "[0, 0.5)": lambda eps: 0 <= eps < 0.5,
    "(0, 0.5]": lambda eps: 0 < eps <= 0.5,
}
SINGLE_KINDS = ("kto", "apo_zero_unpaired")


class PreferenceFormula(NamedTuple):
    """Numbers of a call as the native operators take them, in the order of their schemas."""

    kind: int
    average: bool = False
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0
    tau: float = 0.05
    nll: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


class PreferenceResult(NamedTuple):
    """The results of the losses of pairs; all but the loss are detached."""

    loss: torch.Tensor  # float32 scalar
    log_prob: torch.Tensor  # [2P]: sum over the tokens of each answer, divided by length if the loss is
    rewards: torch.Tensor  # [2P]: beta times the difference to the reference
    nll: torch.Tensor  # scalar: mean of -log_prob over the chosen answers' nll tokens, without its factor
    margin: torch.Tensor  # [P]: reward of the chosen answer minus that of the rejected one


class KTOResult(NamedTuple):
    """The results of the losses of single answers; all but the loss are detached."""

    loss: torch.Tensor  # float32 scalar
    log_prob: torch.Tensor  # [B]: sum over the tokens of each answer
    rewards: torch.Tensor  # [B]: beta times the difference to the reference


def pair_formula(op, kind, beta, average, label_smoothing, *, gamma, tau, nll, ref) -> PreferenceFormula:
    """Check the options of a loss of pairs."""
    arguments.check_choice(op, "kind", kind, PAIR_KINDS)
    own = PAIR_KINDS[kind]
    arguments.check_positive(op, "beta", beta)
    arguments.check_positive(op, "tau", tau)
    arguments.check_numbers(op, label_smoothing=label_smoothing, gamma=gamma)
    fits = _RANGES[own.smoothing](label_smoothing)
    wanted = f"in {own.smoothing}" if own.smoothing else "0"
    check(op, fits, "label_smoothing must be {} with kind {!r}, got {}", wanted, kind, label_smoothing)
    check(op, own.gamma or gamma == 0, "gamma must be 0 with kind {!r}, got {}", kind, gamma)
    check(op, own.ref or ref is None, "ref must be None with kind {!r}, got {}", kind, arguments.kind_of(ref))
    average = own.average if average is None else average
    if not isinstance(average, bool):
        refuse(op, "average must be True, False or None, got {}", arguments.kind_of(average))
    nll = own.nll if nll is None else nll
    arguments.check_numbers(op, nll=nll)
    check(op, nll >= 0, "nll must be >= 0 (or None), got {}", nll)
    return PreferenceFormula(
        own.formula, average, float(beta), float(label_smoothing), float(gamma), float(tau), float(nll)
    )


def single_formula(op, kind, beta, average, kl, weights) -> PreferenceFormula:
    """Check the options of a loss of single answers."""
    arguments.check_choice(op, "kind", kind, SINGLE_KINDS)
    arguments.check_positive(op, "beta", beta)
    arguments.check_booleans(op, average=average)
    two = isinstance(weights, (tuple, list)) and len(weights) == 2
    check(op, two, "weights must be (of desirable, of undesirable answers), got {}", weights)
    arguments.check_numbers(op, **{"weights[0]": weights[0], "weights[1]": weights[1]})
    if isinstance(kl, torch.Tensor):
        arguments.check_float(op, "kl", kl)
        check(op, kl.numel() == 1, "kl must be one float, got {}", kl.shape)
        arguments.check_constant(op, "kl", kl)
    else:
        arguments.check_numbers(op, kl=kl)
    none = not isinstance(kl, torch.Tensor) and kl == 0
    check(op, kind == "kto" or none, "kl must be 0 with kind {!r}, got {}", kind, kl)
    return PreferenceFormula(
        _KTO, average, float(beta), desirable_weight=float(weights[0]), undesirable_weight=float(weights[1])
    )


def check_ref(op, ref, answers, device) -> None:
    """Check the reference's sums, one for each answer."""
    if ref is not None:
        arguments.check_float(op, "ref", ref)
        arguments.check_like(op, "ref", ref, (answers,), device)


def check_desirable(op, desirable, answers, device) -> None:
    """Check a bool for each answer."""
    fits = isinstance(desirable, torch.Tensor) and desirable.dtype == torch.bool
    check(op, fits, "desirable must be a bool tensor, got {}", arguments.kind_of(desirable))
    arguments.check_layout(op, "desirable", desirable)
    arguments.check_like(op, "desirable", desirable, (answers,), device)


def check_pairs(op, name, answers) -> None:
    """Check that the answers are chosen ones, then as many rejected ones."""
    words = name + " must have an even number of rows (chosen, then rejected), got {}"
    check(op, answers % 2 == 0, words, answers)


def _check_tokens(op, log_prob, mask) -> None:
    arguments.check_float(op, "log_prob", log_prob)
    check(op, log_prob.dim() in (1, 2), "log_prob must be [answers] or [answers, T], got {}", log_prob.shape)
    check_mask(op, "mask", mask, log_prob.shape, log_prob.device)


def native_mask(mask):
    """A mask as the operators take it: 0 if a row does not count."""
    return mask.reshape(-1) if mask.dtype in (torch.bool, torch.int64) else mask.reshape(-1) != 0


def check_mask(op, name, mask, shape, device):
    """Check that a mask is bool or integer, of this shape."""
    if mask is None:
        return
    fits = isinstance(mask, torch.Tensor) and not mask.is_floating_point() and not mask.is_complex()
    check(op, fits, name + " must be a bool or integer tensor, got {}", arguments.kind_of(mask))
    arguments.check_layout(op, name, mask)
    arguments.check_like(op, name, mask, shape, device)


# The same formulas in plain PyTorch.


def log1mexp(x):
    """log(1 - e^x) for x < 0, exact at both ends; finite for 0 (a certain or an empty answer)."""
    x = x.clamp(max=-1.2e-38)
    far = torch.log1p(-x.clamp(max=-0.6931).exp())
    return torch.where(x > -0.6931, (-torch.expm1(x)).log(), far)


def _margin_loss(kind, x, eps, tau):
    wins, loses = -F.logsigmoid(x), -F.logsigmoid(-x)
    if kind == _HINGE:
        return torch.relu(1 - x)
    if kind == _ROBUST:
        return ((1 - eps) * wins - eps * loses) / (1 - 2 * eps)
    if kind == _EXO:
        log_eps = torch.tensor(eps, dtype=x.dtype, device="cpu").log().item()
        log_rest = torch.tensor(-eps, dtype=x.dtype, device="cpu").log1p().item()
        return x.sigmoid() * (-wins - log_rest) + (-x).sigmoid() * (-loses - log_eps)
    if kind == _DISCOPOP:
        return wins * (-x / tau).sigmoid() + (F.logsigmoid(x / tau) - x).exp()
    return (1 - eps) * wins + eps * loses


def _pair_loss(f: PreferenceFormula, c, r):
    """The loss of each pair, by the scores of its answers."""
    beta, kind = f.beta, f.kind
    if kind == _IPO:
        return (c - r - 0.5 / beta).square()
    if kind == _NCA:
        return -F.logsigmoid(beta * c) - 0.5 * F.logsigmoid(-beta * c) - 0.5 * F.logsigmoid(-beta * r)
    if kind == _BCO:
        return -F.logsigmoid(beta * c) - F.logsigmoid(-beta * r)
    if kind == _SPPO:
        return (c - 0.5 / beta).square() + (r + 0.5 / beta).square()
    if kind == _APO_ZERO:
        return (-beta * c).sigmoid() + (beta * r).sigmoid()
    if kind == _APO_DOWN:
        return (beta * c).sigmoid() + (-beta * (c - r)).sigmoid()
    if kind == _ORPO:
        return -beta * F.logsigmoid(c - r - (log1mexp(c) - log1mexp(r)))
    return _margin_loss(kind, beta * (c - r) - f.gamma, f.label_smoothing, f.tau)


def reference(log_prob, mask, nll_mask, ref, desirable, kl, denominator, f: PreferenceFormula):
    """Compute the same formulas with PyTorch operations (any float dtype, any device), for both kinds."""
    log_prob = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
    mask = torch.ones_like(log_prob, dtype=torch.bool) if mask is None else mask != 0
    sums, length = torch.where(mask, log_prob, 0.0).sum(-1), mask.sum(-1).clamp(min=1)
    scores = sums if ref is None else sums - ref.detach()
    if f.average:
        sums, scores = sums / length, scores / length
    rewards = (f.beta * scores).detach()
    if f.kind == _KTO:
        sign = torch.where(desirable, 1.0, -1.0).to(scores)
        weight = torch.where(desirable, f.desirable_weight, f.undesirable_weight).to(scores)
        losses = weight * (-sign * f.beta * (scores - (0.0 if kl is None else kl.detach()))).sigmoid()
        return KTOResult(_mean(losses, denominator), sums.detach(), rewards)
    pairs = scores.shape[0] // 2
    loss = _mean(_pair_loss(f, scores[:pairs], scores[pairs:]), denominator)
    nll_mask = mask[:pairs] if nll_mask is None else nll_mask != 0
    nll = -torch.where(nll_mask, log_prob[:pairs], 0.0).sum() / nll_mask.sum().clamp(min=1)
    if f.nll != 0:
        loss = loss + f.nll * nll
    margin = rewards[:pairs] - rewards[pairs:]
    return PreferenceResult(loss, sums.detach(), rewards, nll.detach(), margin)


def _mean(losses, denominator):
    return divide(losses.sum(), max(losses.shape[0], 1) if denominator is None else denominator)


# The operator, and what runs it or the reference.


def empty_results(like, answers, pairs):
    """Log-probabilities and rewards of answers, nll and margins of pairs."""
    shapes = ((answers,), (answers,), () if pairs else (0,), (answers // 2 if pairs else 0,))
    return tuple(like.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _fake(log_prob, target, nll_target, ref, desirable, *_):
    loss, dlog_prob = (log_prob.new_empty(shape, dtype=torch.float32) for shape in ((), log_prob.shape))
    return loss, *empty_results(log_prob, log_prob.shape[0], desirable is None), dlog_prob


_op = loss_with_gradients("preference", _fake, results=5, places=(0,))


def run(op, log_prob, mask, nll_mask, ref, desirable, kl, denominator, formula):
    """Run the kernel or the reference on checked arguments."""
    check_denominator(op, denominator)
    tokens = log_prob.unsqueeze(-1) if log_prob.dim() == 1 else log_prob
    mask = mask.reshape(tokens.shape) if mask is not None else None
    if not has_kernel(op, tokens=tokens):
        return reference(tokens, mask, nll_mask, ref, desirable, kl, denominator, formula)
    divisor, host_divisor = split_denominator(denominator, tokens.device)
    target, nll_target = (None if t is None else native_mask(t) for t in (mask, nll_mask))
    rows = tokens.float(), target, nll_target, ref, desirable, kl
    results = _op(*rows, divisor, host_divisor, *formula, 0)
    return PreferenceResult(*results) if desirable is None else KTOResult(*results[:3])


@arguments.called({"target": "mask", "nll_target": "nll_mask"})
def preference_loss(
    log_prob: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    ref: torch.Tensor | None = None,
    average: bool | None = None,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    tau: float = 0.05,
    nll: float | None = None,
    nll_mask: torch.Tensor | None = None,
    denominator: float | torch.Tensor | None = None,
) -> PreferenceResult:
    """Losses of pairs of answers, one of which is preferred, from the log-probabilities of their tokens.

    The ``score`` of an answer is the sum of its log-probabilities minus its reference, divided by its length
    if ``average``. ``c`` and ``r`` are the scores of the chosen and the rejected answer, and ``x = beta * (c
    - r) - gamma``.

    ========== ===================================================================== ========================
    kind       loss of a pair                                                        by default
    ========== ===================================================================== ========================
    sigmoid    ``-log s(x)`` (DPO; TRL's ``sigmoid_norm`` with ``average=True``)
    cdpo       ``-(1 - eps) log s(x) - eps log s(-x)``, eps in [0, 0.5]
    cpo        as cdpo                                                               no ref, nll 1
    simpo      as cdpo; the paper's margin is gamma                                  no ref, average
    hinge      ``max(0, 1 - x)``
    ipo        ``(c - r - 1 / (2 beta))**2``                                         average
    robust     ``(-(1 - eps) log s(x) + eps log s(-x)) / (1 - 2 eps)``, eps < 0.5
    exo_pair   KL of ``s(x)`` to ``1 - eps``, 0 < eps <= 0.5
    nca_pair   ``-log s(beta c) - log s(-beta c) / 2 - log s(-beta r) / 2``
    bco_pair   ``-log s(beta c) - log s(-beta r)``
    sppo_hard  ``(c - 1 / (2 beta))**2 + (r + 1 / (2 beta))**2``
    apo_zero   ``1 - s(beta c) + s(beta r)``
    apo_down   ``s(beta c) + 1 - s(x)``
    discopop   ``-log s(x) (1 - m) + exp(-x) m, m = s(x / tau)``
    orpo       ``-beta log s(log odds of exp(c) - log odds of exp(r))``              no ref, average, nll 1
    ========== ===================================================================== ========================

    Args:
        log_prob: ``[2P, T]`` log-probabilities of the tokens, chosen answers first, then rejected ones in the
            same order; or ``[2P]`` sums (averages count them as length 1). Any float dtype; float64 runs the
            eager reference.
        mask: as log_prob, bool or integer: 0 if a token does not count (whatever its value); ``None``:
            all count.
        kind: see above. ``label_smoothing`` (eps) and ``gamma`` must be 0 if the kind has none.
        beta: > 0.
        ref: ``[2P]`` sums of the reference's log-probabilities over the same tokens, constants (divided by
            length if the scores are); ``None``: 0.
        average: divide scores by length; ``None``: as in the kind's paper.
        tau: > 0, for discopop.
        nll: factor of the mean of ``-log_prob`` over the tokens of the chosen answers; ``None``: the default
            of the kind.
        nll_mask: ``[P, T]``, the tokens of that mean; ``None``: those of mask.
        denominator: number or tensor of one element (read on the device): the sum of the losses of pairs is
            divided by it instead of P. It does not change the nll term.

    Returns:
        :class:`PreferenceResult`: ``(loss, log_prob [2P], rewards [2P], nll, margin [P])`` in float32. The
        loss is differentiable in log_prob; the others are detached. An empty answer has sum 0. Sums and
        formulas are computed in float64, and each result is rounded once. The loss is bitwise deterministic.

    Raises:
        tigon.Error: an odd number of rows, shapes, dtypes or devices that do not fit, beta <= 0,
        label_smoothing outside the range of the kind, an unknown kind.

    Source: see the contract; DPO: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7.
    """
    op = "preference_loss"
    _check_tokens(op, log_prob, mask)
    answers, device = log_prob.shape[0], log_prob.device
    check_pairs(op, "log_prob", answers)
    formula = pair_formula(op, kind, beta, average, label_smoothing, gamma=gamma, tau=tau, nll=nll, ref=ref)
    check_ref(op, ref, answers, device)
    check_mask(op, "nll_mask", nll_mask, (answers // 2, *log_prob.shape[1:]), device)
    if nll_mask is not None:
        nll_mask = nll_mask.reshape(answers // 2, math.prod(log_prob.shape[1:]))
    rest = {"desirable": None, "kl": None, "denominator": denominator, "formula": formula}
    return run(op, log_prob, mask, nll_mask=nll_mask, ref=constant(ref, log_prob), **rest)


@arguments.called({"target": "mask"})
def kto_loss(
    log_prob: torch.Tensor,
    desirable: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    kind: str = "kto",
    beta: float = 0.1,
    kl: float | torch.Tensor = 0.0,
    weights: tuple[float, float] = (1.0, 1.0),
    ref: torch.Tensor | None = None,
    average: bool = False,
    denominator: float | torch.Tensor | None = None,
) -> KTOResult:
    """Losses of single answers that are desirable or not: ``weight * (1 - s(sign * beta * (score - kl)))``.

    ``score`` is that of :func:`preference_loss`. ``sign`` is 1 for desirable answers and -1 for others.
    ``"apo_zero_unpaired"`` is the same loss with ``kl = 0``.

    Args:
        log_prob, mask, beta, ref, average, denominator: as in :func:`preference_loss`, with ``[B, T]`` or
            ``[B]`` log-probabilities; the denominator is B by default.
        desirable: ``[B]`` bool.
        kind: ``"kto"`` or ``"apo_zero_unpaired"``.
        kl: number or tensor of one element, a constant: the reference point of the paper, a non-negative
            estimate of the divergence between policy and reference over all processes. The caller computes
            the mean over processes.
        weights: weights of desirable and of undesirable answers.

    Returns:
        :class:`KTOResult`: ``(loss, log_prob [B], rewards [B])`` in float32, the loss differentiable in
        log_prob.

    Raises:
        tigon.Error: as :func:`preference_loss`.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization"
    (arXiv:2402.01306), eq. 7.
    """
    op = "kto_loss"
    _check_tokens(op, log_prob, mask)
    formula = single_formula(op, kind, beta, average, kl, weights)
    check_desirable(op, desirable, log_prob.shape[0], log_prob.device)
    check_ref(op, ref, log_prob.shape[0], log_prob.device)
    ref, kl = constant(ref, log_prob), kl_tensor(kl, log_prob)
    rest = {"desirable": desirable, "kl": kl, "denominator": denominator, "formula": formula}
    return run(op, log_prob, mask, nll_mask=None, ref=ref, **rest)


def constant(t, like):
    """Detached, in float32 (float64 with float64)."""
    return None if t is None else t.detach().to(torch.promote_types(like.dtype, torch.float32))


def kl_tensor(kl, like):
    """The reference point as a tensor on the device of `like`, ``None`` if it is 0."""
    wide = torch.promote_types(like.dtype, torch.float32)
    if isinstance(kl, torch.Tensor):
        same = kl.is_meta == like.is_meta
        check("kto_loss", same, "kl must be on {}, got {}", like.device, kl.device)
        return kl.detach().to(like.device, wide).reshape(())
    return None if kl == 0 else torch.full((), kl, dtype=torch.float64, device=like.device).to(wide)
