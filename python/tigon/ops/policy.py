"""Policy-gradient losses of given log-probabilities.

Contract: ``csrc/tigon/ops/policy/policy.h``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tigon._op import has_kernel, loss_with_gradients
from tigon.error import check
from tigon.ops import arguments
from tigon.ops.cross_entropy import check_denominator, divide, split_denominator
from tigon.ops.preference import check_mask, native_mask

KINDS = {"clip": 0, "cispo": 1, "sapo": 2, "vespo": 3}
LEVELS = {"token": 0, "sequence": 1, "sum": 2}
NORMALISE = {"token": 0, "sequence": 1, "length": 2}
ESTIMATORS = {"k1": 0, "k2": 1, "k3": 2}


class PolicyFormula(NamedTuple):
    """Numbers of a call as the native operators take them, in the order of their schemas."""

    kind: int
    level: int
    normalise: int
    low: float
    high: float
    delta: float  # 0: none
    tau_positive: float
    tau_negative: float
    k_positive: float
    lambda_positive: float
    k_negative: float
    lambda_negative: float
    estimator: int
    kl: float
    kl_corrected: bool
    entropy_factor: float


class PolicyConstants(NamedTuple):
    """The tensors of a call that get no gradient."""

    advantage: torch.Tensor
    old: torch.Tensor | None
    ref: torch.Tensor | None
    importance: torch.Tensor | None


class Divisors(NamedTuple):
    """Both denominators as the native operators take them: a tensor on the device, or a number."""

    denominator: torch.Tensor | None
    entropy_denominator: torch.Tensor | None
    host_denominator: float | None
    host_entropy_denominator: float | None

    @classmethod
    def of(cls, denominator, entropy_denominator, device) -> Divisors:
        tensor, number = split_denominator(denominator, device)
        entropy_tensor, entropy_number = split_denominator(entropy_denominator, device)
        return cls(tensor, entropy_tensor, number, entropy_number)


class PolicyResult(NamedTuple):
    """The results of :func:`policy_loss`; all but the loss are detached."""

    loss: torch.Tensor  # float32 scalar
    kl: torch.Tensor | None  # [B, T]: estimate of each token; None without ref
    clipped: torch.Tensor  # [B, T]: -1 if the ratio is clipped below, 1 if above, else 0


def formula(
    op, *, kind, level, clip, delta, tau, gamma, kl, kl_estimator, kl_corrected, entropy, normalise
) -> PolicyFormula:
    """Check the options of a loss and return its numbers."""
    arguments.check_choice(op, "kind", kind, KINDS)
    arguments.check_choice(op, "level", level, LEVELS)
    arguments.check_choice(op, "normalise", normalise, NORMALISE)
    arguments.check_choice(op, "kl_estimator", kl_estimator, ESTIMATORS)
    low, high = _numbers(op, "clip", clip, 2)
    check(op, low >= 0 and high >= 0, "clip must be two numbers >= 0, got {}", clip)
    arguments.check_positive(op, "delta", delta, or_none=True)
    check(op, kind == "clip" or delta is None, "delta must be None with kind {!r}, got {}", kind, delta)
    positive, negative = _numbers(op, "tau", tau, 2)
    check(op, positive > 0 and negative > 0, "tau must be two numbers > 0, got {}", tau)
    gamma = _numbers(op, "gamma", gamma, 4)
    arguments.check_numbers(op, kl=kl, entropy=entropy)
    arguments.check_booleans(op, kl_corrected=kl_corrected)
    codes = KINDS[kind], LEVELS[level], NORMALISE[normalise]
    bounds = low, high, float(delta or 0.0), positive, negative, *gamma
    return PolicyFormula(*codes, *bounds, ESTIMATORS[kl_estimator], float(kl), kl_corrected, float(entropy))


def _numbers(op, name, values, count):
    several = isinstance(values, (tuple, list)) and len(values) == count
    check(op, several, name + " must be {} numbers, got {}", count, values)
    arguments.check_numbers(op, **{f"{name}[{i}]": value for i, value in enumerate(values)})
    return tuple(float(value) for value in values)


def constants(
    op, shape, device, *, advantage, old, ref, importance, kl, denominator, entropy_denominator
) -> PolicyConstants:
    """Check advantages, old and reference log-probabilities and factors for log-probabilities [B, T]."""
    tensor = isinstance(advantage, torch.Tensor)
    check(op, tensor, "advantage must be a float tensor, got {}", arguments.kind_of(advantage))
    for name, t, either in (
        ("advantage", advantage, True),
        ("old", old, False),
        ("ref", ref, False),
        ("importance", importance, True),
    ):
        if t is None:
            continue
        arguments.check_float(op, name, t)
        fits = t.shape == shape or (either and t.shape == shape[:1])
        wanted = f"{list(shape)} or {list(shape[:1])}" if either else list(shape)
        check(op, fits, name + " must be {}, got {}", wanted, t.shape)
        check(op, t.device == device, name + " must be on {}, got {}", device, t.device)
    check(op, kl == 0 or ref is not None, "ref must be given with kl, got None")
    check_denominator(op, denominator)
    check_denominator(op, entropy_denominator, "entropy_denominator")
    return PolicyConstants(*(None if t is None else t.detach() for t in (advantage, old, ref, importance)))


# The same formulas in plain PyTorch.


def _k(estimator, q):
    if estimator == ESTIMATORS["k1"]:
        return -q
    return q.square() / 2 if estimator == ESTIMATORS["k2"] else torch.expm1(q) - q


def _surrogate(f, ratio, log_prob, advantage, log_weight):
    if f.kind == KINDS["clip"]:
        capped = ratio.clamp(max=f.delta) if f.delta else ratio
        return -torch.min(capped * advantage, ratio.clamp(1 - f.low, 1 + f.high) * advantage)
    if f.kind == KINDS["cispo"]:
        return -ratio.detach().clamp(max=f.high) * advantage * log_prob
    if f.kind == KINDS["sapo"]:
        tau = torch.where(advantage > 0, f.tau_positive, f.tau_negative).to(ratio)
        return -4 / tau * (tau * (ratio - 1)).sigmoid() * advantage
    k = torch.where(advantage < 0, f.k_negative, f.k_positive).to(ratio)
    rate = torch.where(advantage < 0, f.lambda_negative, f.lambda_positive).to(ratio)
    return -(rate + k * log_weight - rate * log_weight.exp()).exp() * advantage * log_prob


def _clipped(f, ratio, advantage):
    above = (ratio > (1 + f.high if f.kind == KINDS["clip"] else f.high)) & (advantage > 0)
    below = (ratio < 1 - f.low) & (advantage < 0)
    if f.kind == KINDS["clip"]:
        return above.float() - below.float()
    return above.float() * (f.kind == KINDS["cispo"])


def token_losses(log_prob, counts, constants: PolicyConstants, f: PolicyFormula):
    """Compute the loss, the ratio, the estimate of the divergence (None without ref) and the clipping of each
    token [B, T] with PyTorch operations; 0 if a token does not count."""
    wide = torch.promote_types(log_prob.dtype, torch.float32)
    log_prob, advantage, old, ref, importance = (
        None if t is None else (t.unsqueeze(-1) if t.dim() == 1 else torch.where(counts, t, 0.0)).to(wide)
        for t in (log_prob, *constants)
    )
    log_ratio = log_prob - (log_prob.detach() if old is None else old)
    log_weight = log_ratio.detach().clamp(-20, 20).sum(-1, keepdim=True)
    if importance is not None:
        least = math.log(1e-8)
        logs = torch.where(counts, importance.log().clamp(least, 20), 0.0)
        log_weight = log_weight + logs.sum(-1, keepdim=True)
    log_weight = log_weight.clamp(math.log(1e-8), 20)
    if f.level != LEVELS["token"]:
        log_ratio = log_ratio.sum(-1, keepdim=True)
        length = counts.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = log_ratio / length if f.level == LEVELS["sequence"] else log_ratio
    ratio = log_ratio.exp()
    loss = _surrogate(f, ratio, log_prob, advantage, log_weight)
    if importance is not None and f.kind != KINDS["vespo"]:
        loss = loss * importance
    estimate = None
    if ref is not None:
        estimate = _k(f.estimator, ref - log_prob)
        if f.kl != 0:
            loss = loss + f.kl * (ratio * estimate if f.kl_corrected else estimate)
    results = (loss, ratio, estimate, _clipped(f, ratio, advantage).to(wide))
    return tuple(None if t is None else torch.where(counts, t, 0.0) for t in results)


def reference(
    log_prob, mask, constants: PolicyConstants, entropy, denominator, entropy_denominator, f: PolicyFormula
):
    """Compute the same formulas with PyTorch operations (any float dtype, any device)."""
    counts = torch.ones_like(log_prob, dtype=torch.bool) if mask is None else mask != 0
    loss, _, estimate, clipped = token_losses(log_prob, counts, constants, f)
    length = counts.sum(-1, keepdim=True).clamp(min=1)
    by_answer = f.normalise == NORMALISE["sequence"]
    own = {NORMALISE["token"]: counts.sum().clamp(min=1)}.get(f.normalise, max(counts.shape[0], 1))
    denominator = own if denominator is None else denominator
    total = divide((loss / length if by_answer else loss).sum(), denominator)
    if entropy is not None and f.entropy_factor != 0:
        entropy = torch.where(counts, entropy, 0.0).to(loss.dtype)
        if entropy_denominator is None:
            bonus = divide((entropy / length if by_answer else entropy).sum(), denominator)
        else:
            bonus = divide(entropy.sum(), entropy_denominator)
        total = total - f.entropy_factor * bonus
    return PolicyResult(total, None if estimate is None else estimate.detach(), clipped)


# The operator, and what runs it or the reference.


def _fake(log_prob, advantage, target, old, ref, importance, entropy, *_):
    def rows(wanted):
        return log_prob.new_empty(log_prob.shape if wanted else (0,), dtype=torch.float32)

    loss = log_prob.new_empty((), dtype=torch.float32)
    return loss, rows(ref is not None), rows(True), rows(True), rows(entropy is not None)


_op = loss_with_gradients("policy", _fake, results=3, places=(0, 6))  # log_prob, entropy


class _Rows(NamedTuple):
    """The tensors that the operator takes first, in the order of its schema."""

    log_prob: torch.Tensor
    advantage: torch.Tensor | None
    target: torch.Tensor | None
    old: torch.Tensor | None
    ref: torch.Tensor | None
    importance: torch.Tensor | None
    entropy: torch.Tensor | None


def run(log_prob, mask, constants: PolicyConstants, entropies, denominator, entropy_denominator, f):
    """Run the kernel or the reference on checked arguments."""
    if not has_kernel("policy_loss", log_prob=log_prob):
        return reference(log_prob, mask, constants, entropies, denominator, entropy_denominator, f)
    advantage, old, ref, importance = (None if t is None else t.float() for t in constants)
    rows = _Rows(
        log_prob=log_prob.float(),
        advantage=advantage,
        target=None if mask is None else native_mask(mask),
        old=old,
        ref=ref,
        importance=importance,
        entropy=entropies.float() if entropies is not None and f.entropy_factor != 0 else None,
    )
    by = Divisors.of(denominator, entropy_denominator, log_prob.device)
    loss, estimate, clipped = _op(*rows, *by, *f, 0)  # rows whose target is 0 do not count
    return PolicyResult(loss, None if ref is None else estimate, clipped)


@arguments.called({"target": "mask", "policy.entropy": "entropies"})
def policy_loss(
    log_prob: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    kind: str = "clip",
    level: str = "token",
    old: torch.Tensor | None = None,
    ref: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    delta: float | None = None,
    tau: tuple[float, float] = (1.0, 1.05),
    gamma: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0),
    kl: float = 0.0,
    kl_estimator: str = "k3",
    kl_corrected: bool = False,
    entropy: float = 0.0,
    entropy_denominator: float | torch.Tensor | None = None,
    normalise: str = "token",
    denominator: float | torch.Tensor | None = None,
) -> PolicyResult:
    """Policy-gradient losses from the log-probabilities of sampled tokens.

    With ``d = log_prob - old``, the ratio ``rho = exp(d)`` and the advantage A, a token's loss is

    ===== ==================================================================================================
    kind  loss
    ===== ==================================================================================================
    clip  ``-min(min(rho, delta) A, clamp(rho, 1 - low, 1 + high) A)``: PPO, GRPO; delta: dual clip
    cispo ``-min(rho, high) A log_prob``, the factor a constant
    sapo  ``-4 / tau s(tau (rho - 1)) A``, tau by the sign of A
    vespo ``-phi A log_prob``, ``phi = exp(lambda + k log w - lambda w)`` a constant, w the answer's ratio
    ===== ==================================================================================================

    times `importance`, plus ``kl`` times an estimate of the divergence from the reference, minus ``entropy``
    times the entropy. The loss is the sum of the tokens' losses divided by a denominator. These options give
    the losses that trainers name:

    ==================== ================================================================================
    name                 options
    ==================== ================================================================================
    GRPO                 ``normalise="sequence"``
    BNPO                 ``normalise="token"``
    DAPO, CISPO, VESPO   ``normalise="token", denominator=num_items_in_batch / processes``
    Dr. GRPO             ``normalise="token", denominator=B * max_completion_length``
    GSPO                 ``level="sequence", normalise="sequence"``
    LUSPO                ``level="sequence", normalise="length"``
    RLOO                 ``level="sum", normalise="sequence"``
    ==================== ================================================================================

    Args:
        log_prob: ``[B, T]`` log-probabilities of the sampled tokens, of any float dtype; float64 runs the
            eager reference.
        advantage: ``[B]`` or ``[B, T]``. advantage, old, ref and importance are constants: they get no
            gradient, even if they require one.
        mask: ``[B, T]`` bool or integer: 0 if a token does not count (whatever its value); ``None``: all
            count.
        kind: see above.
        level: ``"token"``: rho of each token; ``"sequence"``: rho is the exponential of the mean of d over
            the answer; ``"sum"``: of the sum of d.
        old: ``[B, T]`` log-probabilities of the policy that sampled; ``None``: log_prob, detached (ratio 1).
        ref: ``[B, T]`` log-probabilities of the reference.
        entropies: ``[B, T]`` entropies of the distributions for the entropy term, differentiable.
        importance: ``[B]`` or ``[B, T]`` factors of the surrogate, not of divergence and entropy, such as
            corrections for the rollout engine, or masks (0). In vespo they are factors of w instead.
        clip: ``(low, high)``; cispo uses only high.
        delta: > 0, upper bound of the ratio in the branch that is not clipped; ``None``: none.
        tau: for sapo: tau for advantages > 0, then for others.
        gamma: for vespo: k and lambda for advantages >= 0, then for those < 0.
        kl, kl_estimator, kl_corrected: factor, ``"k1"``, ``"k2"`` or ``"k3"`` (with ``q = ref - log_prob``:
            ``-q``, ``q**2 / 2``, ``exp(q) - q - 1``), and whether it is multiplied by rho.
        entropy: factor of the entropy bonus.
        entropy_denominator: number or tensor: the entropies are summed and divided by it; ``None``: weighted
            like the tokens' losses.
        normalise: ``"token"``: sum over tokens / denominator, by default the tokens that count;
            ``"sequence"``: mean over each answer, their sum / denominator, by default B; ``"length"``: sum
            over tokens / denominator, by default B.
        denominator: number or tensor of one element (read on the device), for this process: the loss runs no
            collective.

    Returns:
        :class:`PolicyResult`: ``(loss, kl [B, T] or None, clipped [B, T])`` in float32. The loss is
        differentiable in log_prob and entropies. The others are detached, and 0 if a token does not count. If
        no token counts, the loss is 0. The loss is bitwise deterministic. At ratio 1 the gradient is that of
        ``-A log_prob``.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit.

    Source: see the contract; Schulman et al. 2017 (arXiv:1707.06347), Shao et al. 2024 (arXiv:2402.03300).
    """
    op = "policy_loss"
    arguments.check_float(op, "log_prob", log_prob)
    check(op, log_prob.dim() == 2, "log_prob must be [B, T], got {}", log_prob.shape)
    shape, device = log_prob.shape, log_prob.device
    check_mask(op, "mask", mask, shape, device)
    surrogate = {"kind": kind, "level": level, "clip": clip, "delta": delta, "tau": tau, "gamma": gamma}
    terms = {"kl": kl, "kl_estimator": kl_estimator, "kl_corrected": kl_corrected, "entropy": entropy}
    f = formula(op, **surrogate, **terms, normalise=normalise)
    given = {"advantage": advantage, "old": old, "ref": ref, "importance": importance, "kl": kl}
    divisors = {"denominator": denominator, "entropy_denominator": entropy_denominator}
    tensors = constants(op, shape, device, **given, **divisors)
    if entropies is not None:
        arguments.check_float(op, "entropies", entropies)
        arguments.check_like(op, "entropies", entropies, shape, device)
    check(op, entropy == 0 or entropies is not None, "entropies must be given with entropy, got None")
    return run(log_prob, mask, tensors, entropies, **divisors, f=f)
