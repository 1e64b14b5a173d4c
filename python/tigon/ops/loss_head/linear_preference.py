"""Preference and policy-gradient losses of answers, whose log-probabilities a linear head computes.

Contracts: ``csrc/tigon/ops/linear_preference/linear_preference.h`` and ``linear_policy.h``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon._op import has_kernel, is_transformed
from tigon.error import check
from tigon.ops import policy as _policy
from tigon.ops import preference as _preference
from tigon.ops.arguments import called, check_float, check_indices, check_like, kind_of, readable
from tigon.ops.cross_entropy import check_denominator
from tigon.ops.loss_head import linear_log_prob as _log_prob
from tigon.ops.loss_head import operands
from tigon.ops.loss_head.autograd import HeadLoss, empty_loss
from tigon.ops.loss_head.labels import labels_of, shifted
from tigon.ops.loss_head.operands import HeadCall, TrainedCalls
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import Planner, Sizes, check_unbounded
from tigon.ops.preference import KTOResult, PreferenceResult


def _check_answers(op, hidden, weight, target, head: HeadOptions):
    """Check the operands of hidden states [answers, T, H] and return the labels [answers, T]."""
    target = labels_of(target, head.ignore_index)
    operands.check_head(op, hidden, weight, target, head)
    check(op, target.dim() == 2, "target must be [answers, T], got {}", target.shape)
    return target


def _has_kernel(op, hidden, head: HeadOptions) -> bool:
    return has_kernel(op, hidden=hidden, beside=operands.float_parts(head))


def _log_probs(op, hidden, weight, labels, head: HeadOptions, entropy=False):
    """Log-probabilities [answers, T] (and entropies) with a graph: full logits in float64, else chunked."""
    kernel = hidden.dtype != torch.float64
    check_unbounded(op, head.max_peak_mb, "under the transforms of torch.func")
    fits = not kernel or head.lora is None
    check(op, fits, "lora must be None under the transforms of torch.func, got {}", "one")
    options = head._replace(valid_rows=None, chunk_rows=None).log_prob_options()
    log_prob = _log_prob.linear_log_prob if kernel else _log_prob.reference
    return log_prob(hidden, weight, labels, entropy=entropy, **options)


def _check_ref(op, ref, hidden, weight) -> None:
    """Sums of answers, or a second head: (hidden, weight) or (hidden, weight, bias)."""
    if not isinstance(ref, (tuple, list)):
        _preference.check_ref(op, ref, hidden.shape[0], hidden.device)
        return
    tensors = all(isinstance(t, torch.Tensor) for t in ref[:2]) and len(ref) in (2, 3)
    check(op, tensors, "ref must be a float tensor or tensors (hidden, weight[, bias]), got {}", kind_of(ref))
    for t in ref:
        if t is not None:
            check_float(op, "ref", t)
            check(op, t.device == hidden.device, "ref must be on {}, got {}", hidden.device, t.device)
    states, ref_weight, *bias = ref
    lead = hidden.shape[:-1]
    check(op, states.shape[:-1] == lead, "ref must have rows {}, got {}", lead, states.shape)
    wanted = (weight.shape[0], states.shape[-1])
    check(op, ref_weight.shape == wanted, "ref must have a weight {}, got {}", list(wanted), ref_weight.shape)
    if bias and bias[0] is not None:
        fits = bias[0].shape == wanted[:1]
        check(op, fits, "ref must have a bias {}, got {}", list(wanted[:1]), bias[0].shape)


def _ref_operands(ref, like):
    """Convert the reference's operands to constants in the dtype of `like`."""
    states, weight, *bias = (None if t is None else t.detach() for t in ref)
    states, weight, _ = operands.whole_vectors(states.to(like.dtype), weight.to(like.dtype))
    bias = bias[0] if bias else None
    if bias is not None and bias.dtype not in (like.dtype, torch.float32):
        bias = bias.float()
    return states, weight, bias


# The operators: results of answers or rows come after the loss, the reduction's factor and the gradients.


def _run(loss: HeadLoss, op, hidden, weight, labels, head: HeadOptions, group, own):
    """Run an operator with its `own` arguments by name; `group`: answers that share a chunk."""
    own = loss.own(answers=labels.shape[0], **own)
    call, _ = operands.native_call(op, hidden, weight, labels, head, own=own)
    planner = Planner("tigon_linear_preference_plan", (group, labels.shape[1]))
    call = operands.within_peak(op, call, head, Sizes(classes=True), weight, planner=planner)
    return loss.run(call, tuple(getattr(call.operands, name) for name in operands.NEEDS))


def _fake_preference(call: HeadCall):
    pairs = call.own.desirable is None
    results = _preference.empty_results(call.operands.hidden, call.own.answers, pairs)
    return *empty_loss(call, True), *results


def _fake_policy(call: HeadCall):
    hidden, target, ref = call.operands.hidden, call.operands.target, call.own.ref
    rows, kl = (hidden.new_empty(n, dtype=torch.float32) for n in (target.shape, (0,)))
    return *empty_loss(call, True), rows, rows.clone(), kl if ref is None else rows.clone(), rows.clone()


_preference_loss = HeadLoss("linear_preference", _fake_preference)
_policy_loss = HeadLoss("linear_policy", _fake_policy)


def _merged(op, target, nll_target, ignore_index):
    """Merge the labels of the pairs and of the nll term into one label a row."""
    chosen, rejected = target.chunk(2)
    both = (chosen != ignore_index) & (nll_target != ignore_index) & (chosen != nll_target)
    if readable(target):
        wrong = both.nonzero()[:1].tolist()
        check(op, not wrong, "nll_target must be target where both count, got another label at {}", wrong)
    bad = -2 if ignore_index == -1 else -1  # a wrong label: NaN if it cannot be checked on the host
    label = torch.where(nll_target != ignore_index, nll_target, chosen)
    return torch.cat((torch.where(both, bad, label), rejected))


def _prefer(
    op, hidden, weight, target, head, formula, ref, denominator, *, nll_target=None, desirable=None, kl=None
):
    """Run the kernel or the reference on checked arguments."""
    check_denominator(op, denominator)
    TrainedCalls.count(hidden, weight)
    hidden, weight = operands.autocast(hidden), operands.plain_weight(op, weight)
    ignore_index, shift, native = head.ignore_index, head.shift, _has_kernel(op, hidden, head)
    plain = not native or is_transformed()  # log-probabilities with a graph first
    if not native:
        operands.check_plain(op, weight.shape[0], target, head)
    labels = target
    if nll_target is not None or plain:
        labels = target = shifted(target, ignore_index, shift).long()
        head = head._replace(shift=False)
    if nll_target is not None:
        nll_target = shifted(nll_target, ignore_index, shift).long()
        labels = _merged(op, target, nll_target, ignore_index)
    ref_head = ref if isinstance(ref, (tuple, list)) else None
    sums = None if ref_head is not None else _preference.constant(ref, hidden if native else hidden.double())
    if plain:
        log_prob, mask = _log_probs(op, hidden, weight, labels, head), target != ignore_index
        if ref_head is not None:
            sums = _ref_sums(op, hidden, ref_head, labels, mask, head)
        nll_mask = None if nll_target is None else nll_target != ignore_index
        return _preference.run(op, log_prob, mask, nll_mask, sums, desirable, kl, denominator, formula)
    reference = (None, None, None) if ref_head is None else _ref_operands(ref_head, hidden)
    own = dict(zip(("ref_hidden", "ref_weight", "ref_bias"), reference, strict=True), ref=sums)
    own |= {"target": None, "nll_target": None, "desirable": desirable, "kl": kl}
    if nll_target is not None:
        own |= {"target": target.reshape(-1), "nll_target": nll_target.reshape(-1)}
    own |= operands.divisors(denominator, hidden.device) | formula._asdict()
    group = 2 if desirable is None else 1
    results = _run(_preference_loss, op, hidden, weight, labels, head, group, own)
    return PreferenceResult(*results) if desirable is None else KTOResult(*results[:3])


def _ref_sums(op, hidden, ref, labels, mask, head: HeadOptions):
    """The sums of the reference's log-probabilities of each answer."""
    states, weight, *bias = ref
    head = head._replace(bias=bias[0] if bias else None, lora=None)
    with torch.no_grad():
        log_prob = _log_probs(op, states.to(hidden), weight.to(hidden), labels, head)
        return torch.where(mask, log_prob, 0.0).sum(-1)


@called()
def linear_preference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    ref: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    nll_target: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    denominator: float | torch.Tensor | None = None,
    shift: int | bool = False,
    valid_rows: int | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_workspace_mb: float | None = None,
    max_peak_mb: float | None = None,
    kind: str = "sigmoid",
    beta: float = 0.1,
    average: bool | None = None,
    gamma: float = 0.0,
    tau: float = 0.05,
    nll: float | None = None,
) -> PreferenceResult:
    """:func:`tigon.preference_loss` of the log-probabilities of labels under a linear head, without storing
    the full logits. The gradients are computed in the same pass: three matmuls (two with a frozen weight or
    hidden, one without gradients). A reference head takes one more.

    Args:
        hidden: ``[2P, T, H]``, chosen answers first, then rejected ones in the same order; dtypes as in
            :func:`tigon.linear_cross_entropy`.
        weight: ``[V, H]``.
        target: ``[2P, T]`` labels; ``ignore_index`` does not count.
        kind, beta, average, label_smoothing, gamma, tau, nll, denominator: as in
            :func:`tigon.preference_loss`.
        ref: ``[2P]`` sums of the reference's log-probabilities; or the reference's head, ``(hidden [2P, T,
            H'], weight [V, H'])`` with an optional bias ``[V]``. The reference head is computed in the same
            chunks and workspace, with the same scale, softcap and temperature. Neither form gets a gradient.
        nll_target: ``[P, T]`` labels of the nll term. They may count at positions where those of target do
            not (a prompt). If both count at a position, they must be equal (the CPU checks it; on CUDA a
            difference makes the loss NaN). ``None``: target's labels.
        bias, temperature, softcap, logit_scale, ignore_index, shift, valid_rows, lora: as in
            :func:`tigon.linear_cross_entropy`; ``valid_rows`` counts rows with a label of either target.
        max_peak_mb: as in :func:`tigon.linear_cross_entropy`.
        chunk_rows, max_workspace_mb: bounds of a chunk. A chunk holds whole pairs; by default it grows to its
            longest pair if its logits take no more than 1 GiB. If a pair does not fit a chunk, the logits of
            every chunk but the last are computed twice (four matmuls).

    Returns:
        :class:`tigon.ops.preference.PreferenceResult`: ``(loss, log_prob [2P], rewards [2P], nll, margin
        [P])``. The loss is differentiable in hidden, weight, bias, A and B; each gradient is computed only if
        needed. The other results are detached and come from the same pass. torch.compile traces the call as
        one operator. It is bitwise deterministic, as :func:`tigon.linear_cross_entropy` is. With
        ``weight.tigon_main_grad`` the weight's gradient is computed as usual and added to
        ``weight.main_grad``.

    Raises:
        tigon.Error: as the two functions named above, and a ref of other rows or classes.
    """
    op = "linear_preference"
    logits = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    labels = {"ignore_index": ignore_index, "shift": shift, "valid_rows": valid_rows}
    limits = {"chunk_rows": chunk_rows, "max_workspace_mb": max_workspace_mb, "max_peak_mb": max_peak_mb}
    head = HeadOptions(**logits, **labels, **limits, lora=lora)
    target = _check_answers(op, hidden, weight, target, head)
    answers = target.shape[0]
    _preference.check_pairs(op, "target", answers)
    formula = _preference.pair_formula(
        op, kind, beta, average, label_smoothing, gamma=gamma, tau=tau, nll=nll, ref=ref
    )
    _check_ref(op, ref, hidden, weight)
    if nll_target is not None:
        nll_target = labels_of(nll_target, head.ignore_index)
        check_indices(op, "nll_target", nll_target)
        check_like(op, "nll_target", nll_target, (answers // 2, target.shape[1]), target.device)
    return _prefer(op, hidden, weight, target, head, formula, ref, denominator, nll_target=nll_target)


@called()
def linear_kto(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    desirable: torch.Tensor,
    *,
    ref: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    denominator: float | torch.Tensor | None = None,
    shift: int | bool = False,
    valid_rows: int | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_workspace_mb: float | None = None,
    max_peak_mb: float | None = None,
    kind: str = "kto",
    beta: float = 0.1,
    average: bool = False,
    kl: float | torch.Tensor = 0.0,
    weights: tuple[float, float] = (1.0, 1.0),
) -> KTOResult:
    """:func:`tigon.kto_loss` of the log-probabilities of labels under a linear head, without storing the full
    logits.

    Args:
        hidden, weight, target: ``[B, T, H]``, ``[V, H]``, ``[B, T]``.
        desirable, kind, beta, kl, weights, average, denominator: as in :func:`tigon.kto_loss`.
        ref, bias, temperature, softcap, logit_scale, ignore_index, shift, valid_rows, lora, chunk_rows,
            max_workspace_mb, max_peak_mb: as in :func:`linear_preference`; a chunk holds whole answers.

    Returns:
        :class:`tigon.ops.preference.KTOResult`: ``(loss, log_prob [B], rewards [B])``, as
        :func:`linear_preference`.

    Raises:
        tigon.Error: as :func:`linear_preference`.
    """
    op = "linear_kto"
    logits = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    labels = {"ignore_index": ignore_index, "shift": shift, "valid_rows": valid_rows}
    limits = {"chunk_rows": chunk_rows, "max_workspace_mb": max_workspace_mb, "max_peak_mb": max_peak_mb}
    head = HeadOptions(**logits, **labels, **limits, lora=lora)
    target = _check_answers(op, hidden, weight, target, head)
    formula = _preference.single_formula(op, kind, beta, average, kl, weights)
    _preference.check_desirable(op, desirable, target.shape[0], hidden.device)
    _check_ref(op, ref, hidden, weight)
    point = _preference.kl_tensor(kl, hidden)
    return _prefer(op, hidden, weight, target, head, formula, ref, denominator, desirable=desirable, kl=point)


class LinearPolicyResult(NamedTuple):
    """The results of :func:`linear_policy`; all but the loss are detached."""

    loss: torch.Tensor  # float32 scalar
    log_prob: torch.Tensor  # [B, T]
    entropy: torch.Tensor  # [B, T]
    kl: torch.Tensor | None  # [B, T]: estimate of each token; None without ref
    clipped: torch.Tensor  # [B, T]: -1 if the ratio is clipped below, 1 if above, else 0


@called()
def linear_policy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    advantage: torch.Tensor,
    *,
    ref: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    denominator: float | torch.Tensor | None = None,
    shift: int | bool = False,
    valid_rows: int | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_workspace_mb: float | None = None,
    max_peak_mb: float | None = None,
    kind: str = "clip",
    gamma: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0),
    tau: tuple[float, float] = (1.0, 1.05),
    level: str = "token",
    old: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    delta: float | None = None,
    kl: float = 0.0,
    kl_estimator: str = "k3",
    kl_corrected: bool = False,
    entropy: float = 0.0,
    entropy_denominator: float | torch.Tensor | None = None,
    normalise: str = "token",
) -> LinearPolicyResult:
    """:func:`tigon.policy_loss` of the log-probabilities of sampled tokens under a linear head, without
    storing the full logits. The gradients are computed in the same pass: three matmuls.

    Args:
        hidden, weight, target: ``[B, T, H]``, ``[V, H]``, ``[B, T]`` sampled tokens; ``ignore_index`` does
            not count.
        advantage, kind, level, old, ref, importance, clip, delta, tau, gamma, kl, kl_estimator, kl_corrected,
            entropy, entropy_denominator, normalise, denominator: as in :func:`tigon.policy_loss`. With
            ``shift`` a per-token value belongs to the position whose hidden state predicts the token.
        bias, temperature, softcap, logit_scale, ignore_index, shift, valid_rows, lora: as in
            :func:`tigon.linear_cross_entropy`.
        chunk_rows, max_workspace_mb, max_peak_mb: as in :func:`tigon.linear_preference`. If the loss of a
            token depends on its answer (a level other than ``"token"``, vespo), a chunk holds whole answers.

    Returns:
        :class:`LinearPolicyResult`: ``(loss, log_prob, entropy, kl, clipped)``. The loss is a scalar,
        differentiable in hidden, weight, bias, A and B. The others are ``[B, T]`` per token and detached.
        Entropies cost nothing; their gradient (``entropy != 0``) costs one more read of the logits.
        torch.compile traces the call as one operator. In float16 the gradients are computed without the
        denominator, and the last step divides by it in float32. So advantages of thousands overflow in
        float16, whatever the denominator is.

    Raises:
        tigon.Error: as the two functions named above.
    """
    op = "linear_policy"
    logits = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    labels = {"ignore_index": ignore_index, "shift": shift, "valid_rows": valid_rows}
    limits = {"chunk_rows": chunk_rows, "max_workspace_mb": max_workspace_mb, "max_peak_mb": max_peak_mb}
    head = HeadOptions(**logits, **labels, **limits, lora=lora)
    target = _check_answers(op, hidden, weight, target, head)
    surrogate = {"kind": kind, "level": level, "clip": clip, "delta": delta, "tau": tau, "gamma": gamma}
    terms = {"kl": kl, "kl_estimator": kl_estimator, "kl_corrected": kl_corrected, "entropy": entropy}
    f = _policy.formula(op, **surrogate, **terms, normalise=normalise)
    given = {"advantage": advantage, "old": old, "ref": ref, "importance": importance, "kl": kl}
    divisors = {"denominator": denominator, "entropy_denominator": entropy_denominator}
    constants = _policy.constants(op, target.shape, hidden.device, **given, **divisors)
    TrainedCalls.count(hidden, weight)
    hidden, weight = operands.autocast(hidden), operands.plain_weight(op, weight)
    if not _has_kernel(op, hidden, head) or is_transformed():
        return _plain_policy(op, hidden, weight, target, head, constants, divisors, f)
    group = int(level != "token" or kind == "vespo")
    return _native_policy(op, hidden, weight, target, head, constants, divisors, f, group)


def _plain_policy(op, hidden, weight, target, head: HeadOptions, constants, divisors, f):
    """The loss of log-probabilities with a graph."""
    if hidden.dtype == torch.float64:
        operands.check_plain(op, weight.shape[0], target, head)
    labels = shifted(target, head.ignore_index, head.shift).long()
    log_prob, entropies = _log_probs(op, hidden, weight, labels, head, entropy=True)
    mask = labels != head.ignore_index
    loss, estimate, clipped = _policy.run(log_prob, mask, constants, entropies, **divisors, f=f)
    return LinearPolicyResult(loss, log_prob.detach(), entropies.detach(), estimate, clipped)


def _native_policy(op, hidden, weight, target, head: HeadOptions, constants, divisors, f, group):
    own = {name: None if t is None else t.float() for name, t in constants._asdict().items()}
    own |= _policy.Divisors.of(**divisors, device=hidden.device)._asdict() | f._asdict()
    own["wants_entropy"] = True
    loss, *tokens = _run(_policy_loss, op, hidden, weight, target, head, group, own)
    log_prob, entropies, estimate, clipped = tokens
    estimate = None if constants.ref is None else estimate.view(target.shape)
    log_prob, entropies, clipped = (t.view(target.shape) for t in (log_prob, entropies, clipped))
    return LinearPolicyResult(loss, log_prob, entropies, estimate, clipped)
