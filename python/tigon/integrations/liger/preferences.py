"""``liger_kernel.chunked_loss``: losses of pairs and of single answers from a head, without its logits.

The losses are those of :func:`tigon.linear_preference` and :func:`tigon.linear_kto`; arguments, tuples,
normalisation and errors are those of ``liger_kernel`` 0.8.5. ``compiled`` and ``chunk_size`` choose nothing.
A ``kl`` for each answer is taken as such.
"""

from __future__ import annotations

import torch

import tigon
from tigon.integrations.liger.missing import function_class
from tigon.ops.preference import log1mexp


def head_log_prob(hidden, weight, target, bias, ignore_index, temperature=1.0):
    hidden = hidden.reshape(*target.shape, hidden.shape[-1])
    return tigon.linear_log_prob(
        hidden, weight, target, bias=bias, ignore_index=ignore_index, temperature=temperature
    )


@torch.no_grad()
def _reference(hidden, weight, target, bias, ignore_index):
    """The sum over each answer of the reference's log-probabilities."""
    return head_log_prob(hidden, weight, target, bias, ignore_index).sum(-1)


@torch.no_grad()
def logit_sums(hidden, weight, bias):
    """The sum of all logits of each answer, which is linear in its hidden states."""
    tokens = hidden.shape[1]
    sums = hidden.sum(1, dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
    return sums if bias is None else sums + tokens * bias.sum(dtype=torch.float32)


def _pairs(
    hidden,
    weight,
    target,
    bias,
    *,
    kind,
    beta,
    alpha=1.0,
    ignore_index=-100,
    nll=True,
    nll_target=None,
    average=False,
    ref=None,
    **options,
):
    """(loss, the seven results that all losses of pairs share)."""
    half = target.shape[0] // 2
    hidden = hidden.reshape(*target.shape, hidden.shape[-1])
    # Its labels may be others than target's.
    apart = nll and (nll_target is not None or alpha < 0)
    result = tigon.linear_preference(
        hidden, weight, target, bias=bias, ignore_index=ignore_index, kind=kind, beta=beta, average=average,
        ref=None if ref is None else (ref[0].reshape(*target.shape, ref[0].shape[-1]), *ref[1:]),
        nll=alpha if nll and not apart else 0.0, **options,
    )  # fmt: skip
    loss, mean = result.loss, result.nll if nll else torch.zeros_like(result.nll)
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


def _with_reference(given, ref_input, ref_weight, ref_bias):
    return (ref_input, ref_weight, ref_bias) if given else None


# --- Pairs -----------------------------------------------------------------------------------

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


def _dpo_options(loss_type, label_smoothing) -> dict:
    """What a type takes beside beta."""
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
    return {"label_smoothing": label_smoothing} if loss_type in ("exo_pair", "robust") else {}


def liger_fused_linear_dpo(
    _input,
    weight,
    target,
    bias=None,
    ref_input=None,
    ref_weight=None,
    ref_bias=None,
    ignore_index=-100,
    beta=0.1,
    compute_nll_loss=False,
    compiled=True,
    use_ref_model=True,
    average_log_prob=False,
    chunk_size=1,
    loss_type="sigmoid",
    label_smoothing=0.0,
    discopop_tau=0.05,
    alpha=1.0,
):
    """Direct preference optimisation and its relatives, on chosen answers followed by rejected ones."""
    options = _dpo_options(loss_type, label_smoothing)
    if loss_type == "discopop":
        options["tau"] = discopop_tau
    return _pairs(
        _input,
        weight,
        target,
        bias,
        kind=loss_type,
        beta=beta,
        alpha=alpha,
        ignore_index=ignore_index,
        nll=compute_nll_loss,
        average=average_log_prob,
        ref=_with_reference(use_ref_model, ref_input, ref_weight, ref_bias),
        **options,
    )


def liger_fused_linear_cpo(
    _input,
    weight,
    target,
    bias=None,
    ignore_index=-100,
    beta=0.1,
    alpha=1.0,
    label_smoothing=0.0,
    compute_nll_loss=True,
    compiled=True,
    average_log_prob=False,
    chunk_size=1,
):
    """Contrastive preference optimisation."""
    return _pairs(
        _input,
        weight,
        target,
        bias,
        kind="cpo",
        beta=beta,
        alpha=alpha,
        ignore_index=ignore_index,
        nll=compute_nll_loss,
        average=average_log_prob,
        label_smoothing=label_smoothing,
    )


def liger_fused_linear_simpo(
    _input,
    weight,
    target,
    bias=None,
    ignore_index=-100,
    beta=0.1,
    alpha=1.0,
    label_smoothing=0.0,
    compute_nll_loss=False,
    compiled=True,
    gamma=0.5,
    chunk_size=1,
):
    """SimPO."""
    return _pairs(
        _input,
        weight,
        target,
        bias,
        kind="simpo",
        beta=beta,
        alpha=alpha,
        ignore_index=ignore_index,
        nll=compute_nll_loss,
        average=True,
        label_smoothing=label_smoothing,
        gamma=gamma,
    )


def liger_fused_linear_orpo(
    _input,
    weight,
    target,
    bias=None,
    ignore_index=-100,
    beta=0.1,
    compute_nll_loss=True,
    nll_target=None,
    compiled=True,
    chunk_size=1,
):
    """Odds ratio preference optimisation; two results more: the means of log-sigmoid and of the log odds."""
    loss, shared = _pairs(
        _input,
        weight,
        target,
        bias,
        kind="orpo",
        beta=beta,
        ignore_index=ignore_index,
        nll=compute_nll_loss,
        nll_target=nll_target,
        average=True,
    )
    chosen, rejected, *_ = shared
    odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    return loss, (*shared, torch.nn.functional.logsigmoid(odds).mean(), odds.mean())


# --- Single answers --------------------------------------------------------------------------


def liger_fused_linear_kto(
    _input,
    weight,
    target,
    preference_labels,
    bias=None,
    ref_input=None,
    ref_weight=None,
    ref_bias=None,
    kl=None,
    ignore_index=-100,
    beta=0.1,
    compiled=True,
    use_ref_model=True,
    average_log_prob=False,
    chunk_size=1,
):
    """Kahneman-Tversky optimisation: the sums of log-probabilities, logits and rewards by preference."""
    hidden = _input.reshape(*target.shape, _input.shape[-1])
    desirable = preference_labels.bool()
    ref = _with_reference(use_ref_model, ref_input, ref_weight, ref_bias)
    if ref is not None:
        ref = (ref_input.reshape(*target.shape, ref_input.shape[-1]), *ref[1:])
    point, many = 0.0, isinstance(kl, torch.Tensor) and kl.numel() > 1
    if many:  # a reference point for each answer: part of its reference
        length = (target != ignore_index).sum(-1) if average_log_prob else 1
        sums = 0.0 if ref is None else _reference(ref_input, ref_weight, target, ref_bias, ignore_index)
        ref = kl.detach().reshape(-1).float() * length + sums
    elif kl is not None:
        point = kl.detach() if isinstance(kl, torch.Tensor) else float(kl)
    result = tigon.linear_kto(
        hidden, weight, target, desirable, bias=bias, ignore_index=ignore_index, beta=beta, kl=point, ref=ref,
        average=average_log_prob,
    )  # fmt: skip
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


# --- The classes -----------------------------------------------------------------------------

LigerFusedLinearDPOFunction = function_class("LigerFusedLinearDPOFunction", liger_fused_linear_dpo, "DPO.")
LigerFusedLinearCPOFunction = function_class("LigerFusedLinearCPOFunction", liger_fused_linear_cpo, "CPO.")
LigerFusedLinearSimPOFunction = function_class(
    "LigerFusedLinearSimPOFunction", liger_fused_linear_simpo, "SimPO."
)
LigerFusedLinearORPOFunction = function_class(
    "LigerFusedLinearORPOFunction", liger_fused_linear_orpo, "ORPO."
)
LigerFusedLinearKTOFunction = function_class("LigerFusedLinearKTOFunction", liger_fused_linear_kto, "KTO.")


class Loss(torch.nn.Module):
    """A loss whose options are its attributes."""

    def __init__(self, options):
        super().__init__()
        self._options = tuple(name for name in options if name not in ("self", "__class__"))
        for name in self._options:
            setattr(self, name, options[name])

    def options(self) -> dict:
        """The options as they are now."""
        return {name: getattr(self, name) for name in self._options}


class LigerFusedLinearDPOLoss(Loss):
    """:func:`liger_fused_linear_dpo` as a module."""

    def __init__(
        self,
        ignore_index=-100,
        beta=0.1,
        alpha=1.0,
        compute_nll_loss=False,
        compiled=True,
        use_ref_model=True,
        average_log_prob=False,
        chunk_size=1,
        loss_type="sigmoid",
        label_smoothing=0.0,
        discopop_tau=0.05,
    ):
        super().__init__(locals())
        _dpo_options(loss_type, label_smoothing)

    def forward(self, lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None):
        """(loss, results)."""
        return liger_fused_linear_dpo(
            _input, lin_weight, target, bias, ref_input, ref_weight, ref_bias, **self.options()
        )


class LigerFusedLinearCPOLoss(Loss):
    """:func:`liger_fused_linear_cpo` as a module."""

    def __init__(
        self,
        ignore_index=-100,
        beta=0.1,
        alpha=1.0,
        label_smoothing=0.0,
        compute_nll_loss=True,
        compiled=True,
        average_log_prob=False,
        chunk_size=1,
    ):
        super().__init__(locals())

    def forward(self, lin_weight, _input, target, bias=None):
        """(loss, results)."""
        return liger_fused_linear_cpo(_input, lin_weight, target, bias, **self.options())


class LigerFusedLinearSimPOLoss(Loss):
    """:func:`liger_fused_linear_simpo` as a module."""

    def __init__(
        self,
        ignore_index=-100,
        beta=0.1,
        alpha=1.0,
        label_smoothing=0.0,
        compute_nll_loss=True,
        compiled=True,
        gamma=0.5,
        chunk_size=1,
    ):
        super().__init__(locals())

    def forward(self, lin_weight, _input, target, bias=None):
        """(loss, results)."""
        return liger_fused_linear_simpo(_input, lin_weight, target, bias, **self.options())


class LigerFusedLinearORPOLoss(Loss):
    """:func:`liger_fused_linear_orpo` as a module."""

    def __init__(self, ignore_index=-100, beta=0.1, compute_nll_loss=True, compiled=True, chunk_size=1):
        super().__init__(locals())

    def forward(self, lin_weight, _input, target, bias=None, nll_target=None):
        """(loss, results)."""
        return liger_fused_linear_orpo(
            _input, lin_weight, target, bias, nll_target=nll_target, **self.options()
        )


class LigerFusedLinearKTOLoss(Loss):
    """:func:`liger_fused_linear_kto` as a module."""

    def __init__(
        self,
        ignore_index=-100,
        beta=0.1,
        compiled=True,
        use_ref_model=False,
        average_log_prob=False,
        chunk_size=1,
    ):
        super().__init__(locals())

    def forward(
        self,
        _input,
        lin_weight,
        target,
        bias=None,
        preference_labels=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        kl=None,
    ):
        """(loss, sums)."""
        return liger_fused_linear_kto(
            _input,
            lin_weight,
            target,
            preference_labels,
            bias,
            ref_input,
            ref_weight,
            ref_bias,
            kl,
            **self.options(),
        )
