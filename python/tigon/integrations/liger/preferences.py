"""``liger_kernel.chunked_loss``: losses of pairs and of single answers from a head, without its logits.

The losses are those of :func:`tigon.linear_preference` and :func:`tigon.linear_kto`; arguments, tuples,
normalisation and errors are those of ``liger_kernel`` 0.8.5. ``compiled`` and ``chunk_size`` choose nothing.
A ``kl`` for each answer is taken as such.
"""

from __future__ import annotations

import torch

import tigon
from tigon.integrations.liger.signatures import Loss, by_name, function_class
from tigon.ops.preference import log1mexp

_DPO = (
    "sigmoid",
    "hinge",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
)


def head_log_prob(hidden, weight, target, bias, ignore_index, temperature=1.0):
    """Log-probabilities of the tokens, in target's shape."""
    hidden = hidden.reshape(*target.shape, hidden.shape[-1])
    return tigon.linear_log_prob(
        hidden, weight, target, bias=bias, ignore_index=ignore_index, temperature=temperature
    )


@torch.no_grad()
def logit_sums(hidden, weight, bias):
    """The sum of all logits of each answer, which is linear in its hidden states."""
    tokens = hidden.shape[1]
    sums = hidden.sum(1, dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
    return sums if bias is None else sums + tokens * bias.sum(dtype=torch.float32)


def _reference(target, use_ref_model, ref_input, ref_weight, ref_bias):
    """The reference head as tigon's losses take it, or None."""
    if not use_ref_model:
        return None
    return ref_input.reshape(*target.shape, ref_input.shape[-1]), ref_weight, ref_bias


def _pairs(
    _input,
    weight,
    target,
    bias=None,
    *,
    kind,
    beta,
    alpha=1.0,
    ignore_index=-100,
    compute_nll_loss=True,
    nll_target=None,
    average_log_prob=False,
    use_ref_model=False,
    ref_input=None,
    ref_weight=None,
    ref_bias=None,
    label_smoothing=0.0,
    discopop_tau=0.05,
    gamma=0.0,
    compiled=True,
    chunk_size=1,
):
    """(loss, the seven results that all losses of pairs share)."""
    half = target.shape[0] // 2
    hidden = _input.reshape(*target.shape, _input.shape[-1])
    # Its labels may be others than target's.
    apart = compute_nll_loss and (nll_target is not None or alpha < 0)
    result = tigon.linear_preference(
        hidden,
        weight,
        target,
        bias=bias,
        ignore_index=ignore_index,
        kind=kind,
        beta=beta,
        average=average_log_prob,
        ref=_reference(target, use_ref_model, ref_input, ref_weight, ref_bias),
        nll=alpha if compute_nll_loss and not apart else 0.0,
        label_smoothing=label_smoothing,
        gamma=gamma,
        tau=discopop_tau,
    )
    loss, mean = result.loss, result.nll if compute_nll_loss else torch.zeros_like(result.nll)
    if apart:
        labels = (target if nll_target is None else nll_target)[:half]
        tokens = head_log_prob(hidden[:half], weight, labels, bias, ignore_index)
        mean = -tokens.sum() / (labels != ignore_index).sum()
        loss = loss + alpha * mean
    logits = logit_sums(hidden, weight, bias) / (half * target.shape[1] * weight.shape[0])
    shared = (
        *result.log_prob.split(half),
        *(part.sum() for part in logits.split(half)),
        mean.detach(),
        *result.rewards.split(half),
    )
    return loss, shared


def _check_dpo(loss_type, label_smoothing) -> None:
    if loss_type == "ipo":
        raise NotImplementedError(
            "loss_type='ipo' is not supported here; use tigon.preference_loss(kind='ipo')"
        )
    if loss_type not in _DPO:
        raise ValueError(f"Unsupported loss_type: {loss_type}. Supported types are: {', '.join(_DPO)}")
    if loss_type == "exo_pair" and label_smoothing <= 0.0:
        raise ValueError("label_smoothing must be > 0 for loss_type='exo_pair'")
    if loss_type == "robust" and not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must lie in [0.0, 0.5) for loss_type='robust', got {label_smoothing}"
        )


def _dpo(*, loss_type, label_smoothing, discopop_tau, **options):
    _check_dpo(loss_type, label_smoothing)
    if loss_type == "discopop":
        options["discopop_tau"] = discopop_tau
    if loss_type in ("exo_pair", "robust"):
        options["label_smoothing"] = label_smoothing
    return _pairs(kind=loss_type, **options)


def _orpo(**options):
    """Two results more: the means of log-sigmoid and of the log odds."""
    loss, shared = _pairs(kind="orpo", average_log_prob=True, **options)
    chosen, rejected, *_ = shared
    odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    return loss, (*shared, torch.nn.functional.logsigmoid(odds).mean(), odds.mean())


def _kto(
    _input,
    weight,
    target,
    preference_labels,
    bias,
    ref_input,
    ref_weight,
    ref_bias,
    kl,
    ignore_index,
    beta,
    use_ref_model,
    average_log_prob,
):
    """(loss, the sums of log-probabilities, logits and rewards by preference)."""
    hidden = _input.reshape(*target.shape, _input.shape[-1])
    desirable = preference_labels.bool()
    ref = _reference(target, use_ref_model, ref_input, ref_weight, ref_bias)
    point, many = 0.0, isinstance(kl, torch.Tensor) and kl.numel() > 1
    if many:  # a reference point for each answer: part of its reference
        length = (target != ignore_index).sum(-1) if average_log_prob else 1
        with torch.no_grad():
            sums = 0.0 if ref is None else head_log_prob(*ref[:2], target, ref_bias, ignore_index).sum(-1)
        ref = kl.detach().reshape(-1).float() * length + sums
    elif kl is not None:
        point = kl.detach() if isinstance(kl, torch.Tensor) else float(kl)
    result = tigon.linear_kto(
        hidden,
        weight,
        target,
        desirable,
        bias=bias,
        ignore_index=ignore_index,
        beta=beta,
        kl=point,
        ref=ref,
        average=average_log_prob,
    )
    rewards = result.rewards
    if many:
        rewards = rewards + beta * kl.reshape(-1)
    logits = logit_sums(hidden, weight, bias)
    sums = [
        torch.where(wanted, values, 0.0).sum()
        for values in (result.log_prob, logits, rewards)
        for wanted in (desirable, ~desirable)
    ]
    return result.loss, tuple(sums)


liger_fused_linear_dpo = by_name(
    "liger_fused_linear_dpo(_input, weight, target, bias=None, ref_input=None, ref_weight=None, "
    "ref_bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=False, compiled=True, use_ref_model=True, "
    "average_log_prob=False, chunk_size=1, loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05, "
    "alpha=1.0)",
    _dpo,
)
liger_fused_linear_cpo = by_name(
    "liger_fused_linear_cpo(_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, "
    "label_smoothing=0.0, compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1)",
    _pairs,
    kind="cpo",
)
liger_fused_linear_simpo = by_name(
    "liger_fused_linear_simpo(_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, "
    "label_smoothing=0.0, compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1)",
    _pairs,
    kind="simpo",
    average_log_prob=True,
)
liger_fused_linear_orpo = by_name(
    "liger_fused_linear_orpo(_input, weight, target, bias=None, ignore_index=-100, beta=0.1, "
    "compute_nll_loss=True, nll_target=None, compiled=True, chunk_size=1)",
    _orpo,
)
liger_fused_linear_kto = by_name(
    "liger_fused_linear_kto(_input, weight, target, preference_labels, bias=None, ref_input=None, "
    "ref_weight=None, ref_bias=None, kl=None, ignore_index=-100, beta=0.1, compiled=True, "
    "use_ref_model=True, average_log_prob=False, chunk_size=1)",
    _kto,
)
LigerFusedLinearDPOFunction = function_class("LigerFusedLinearDPOFunction", liger_fused_linear_dpo)
LigerFusedLinearCPOFunction = function_class("LigerFusedLinearCPOFunction", liger_fused_linear_cpo)
LigerFusedLinearSimPOFunction = function_class("LigerFusedLinearSimPOFunction", liger_fused_linear_simpo)
LigerFusedLinearORPOFunction = function_class("LigerFusedLinearORPOFunction", liger_fused_linear_orpo)
LigerFusedLinearKTOFunction = function_class("LigerFusedLinearKTOFunction", liger_fused_linear_kto)


_OPERANDS = "lin_weight, _input, target, bias=None"


class LigerFusedLinearDPOLoss(
    Loss,
    target=liger_fused_linear_dpo,
    operands=f"{_OPERANDS}, ref_input=None, ref_weight=None, ref_bias=None",
    first="ignore_index, beta, alpha",
):
    """Direct preference optimisation and its relatives, on chosen answers followed by rejected ones."""

    def validate(self):
        _check_dpo(self.loss_type, self.label_smoothing)


class LigerFusedLinearCPOLoss(Loss, target=liger_fused_linear_cpo, operands=_OPERANDS):
    """Contrastive preference optimisation."""


class LigerFusedLinearSimPOLoss(
    Loss,
    target=liger_fused_linear_simpo,
    operands=_OPERANDS,
    first="ignore_index, beta, alpha, label_smoothing, compute_nll_loss=True",
):
    """Simple preference optimisation."""


class LigerFusedLinearORPOLoss(
    Loss, target=liger_fused_linear_orpo, operands=f"{_OPERANDS}, nll_target=None"
):
    """Odds ratio preference optimisation."""


class LigerFusedLinearKTOLoss(
    Loss,
    target=liger_fused_linear_kto,
    operands="_input, lin_weight, target, bias=None, preference_labels=None, ref_input=None, "
    "ref_weight=None, ref_bias=None, kl=None",
    first="ignore_index, beta, compiled, use_ref_model=False",
):
    """Kahneman-Tversky optimisation, of single answers with a preference each."""
