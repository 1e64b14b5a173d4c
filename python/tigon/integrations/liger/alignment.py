"""``liger_kernel.chunked_loss``: preference, KTO and policy losses of a linear head, without its logits.

The log-probabilities come from :func:`tigon.linear_log_prob`, the losses from :func:`tigon.preference_loss`,
:func:`tigon.kto_loss` and :func:`tigon.policy_loss`; arguments, tuples, normalisation and errors are those of
``liger_kernel`` 0.8.5. ``compiled`` and ``chunk_size`` choose nothing. A ``kl`` for each answer is taken as
such, and ``"luspo"`` leaves out masked tokens, as TRL does.
"""

from __future__ import annotations

import math
import warnings

import torch
import torch.distributed as dist

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
    log_prob = head_log_prob(hidden, weight, target, bias, ignore_index)
    sums = None if ref is None else _reference(*ref[:2], target, ref[2], ignore_index)
    result = tigon.preference_loss(
        log_prob, target != ignore_index, kind=kind, beta=beta, average=average, ref=sums, nll=0.0, **options
    )
    mean = result.nll.new_zeros(())
    if nll:
        labels, tokens = target[:half], log_prob[:half]
        if nll_target is not None:
            labels = nll_target[:half]
            tokens = head_log_prob(hidden[:half], weight, labels, bias, ignore_index)
        mean = -tokens.sum() / (labels != ignore_index).sum()
    logits = logit_sums(hidden, weight, bias) / (half * target.shape[1] * weight.shape[0])
    shared = (
        *result.log_prob.split(half),
        *(part.sum() for part in logits.split(half)),
        mean.detach(),
        *result.rewards.split(half),
    )
    return result.loss + alpha * mean if nll else result.loss, shared


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
    log_prob = head_log_prob(hidden, weight, target, bias, ignore_index)
    ref = _reference(ref_input, ref_weight, target, ref_bias, ignore_index) if use_ref_model else None
    counts = target != ignore_index
    point, shifted = 0.0, ref  # one reference point for all, or one for each answer: part of its reference
    if isinstance(kl, torch.Tensor) and kl.numel() > 1:
        length = counts.sum(-1) if average_log_prob else 1
        shifted = kl.reshape(-1).float() * length + (0.0 if ref is None else ref)
    elif kl is not None:
        point = kl.detach() if isinstance(kl, torch.Tensor) else float(kl)
    result = tigon.kto_loss(
        log_prob, desirable, counts, beta=beta, kl=point, ref=shifted, average=average_log_prob
    )
    rewards = result.rewards
    if shifted is not ref:
        rewards = rewards + beta * kl.reshape(-1)
    logits = logit_sums(hidden, weight, bias)
    sums = [
        torch.where(wanted, values, 0.0).sum()
        for values in (result.log_prob, logits, rewards)
        for wanted in (desirable, ~desirable)
    ]
    return result.loss, tuple(sums)


# --- Policies --------------------------------------------------------------------------------

_KINDS = {"cispo": "cispo", "sapo": "sapo", "vespo": "vespo"}
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def share_of_tokens(attention_mask, num_items_in_batch=None):
    """DAPO's denominator: the tokens of all processes, of each its share."""
    processes, items = 1, num_items_in_batch
    if dist.is_available() and dist.is_initialized():
        processes = dist.get_world_size()
    if items is None:
        items = attention_mask.sum().float()
        if processes > 1:
            dist.all_reduce(items)
    if not isinstance(items, torch.Tensor):
        items = torch.full((), float(items), device=attention_mask.device)
    return (items.to(attention_mask.device).float() / processes).clamp(min=1.0)


def _policy(
    log_prob,
    advantages,
    mask,
    old,
    ref,
    *,
    loss_type,
    level,
    beta,
    clip,
    delta,
    importance,
    tau,
    gamma,
    corrected,
    max_completion_length,
    num_items,
):
    """(loss, [mean divergence where beta is not 0, share of clipped tokens])."""
    if loss_type not in _LOSSES:
        raise ValueError(f"Unknown loss type: {loss_type}")
    if level not in ("token", "sequence"):
        raise ValueError(
            f"Unknown importance sampling level: {level}. Possible values are 'token' and 'sequence'."
        )
    kind = _KINDS.get(loss_type, "clip")
    if level == "sequence" and kind != "clip":
        raise ValueError(f"Sequence-level importance sampling is not supported for loss_type='{loss_type}'.")
    if kind == "sapo" and min(tau) <= 0:
        raise ValueError("sapo_temperature must be > 0.")
    answers = mask.shape[0]
    normalise, denominator = "token", None
    if loss_type in ("grpo", "sapo"):
        normalise = "sequence"
    elif loss_type == "luspo":
        normalise, denominator = "length", answers
    elif loss_type == "dr_grpo":
        denominator = answers * max_completion_length
    elif loss_type != "bnpo":
        denominator = share_of_tokens(mask, num_items)
    if importance is not None and importance.dim() == 2 and importance.shape[1] == 1:
        importance = importance[:, 0]
    if beta != 0.0 and ref is None:
        ref = log_prob.detach()
    shape = {"sapo": {"tau": tau}, "vespo": {"gamma": gamma}}.get(kind, {})
    result = tigon.policy_loss(
        log_prob,
        advantages.to(log_prob.dtype),
        mask,
        kind=kind,
        level=level,
        old=None if old is None else old.detach().float(),
        ref=None if ref is None else ref.detach().float(),
        importance=None if importance is None else importance.detach().float().contiguous(),
        clip=clip,
        delta=delta if kind == "clip" else None,
        **shape,
        kl=beta,
        kl_corrected=corrected,
        normalise=normalise,
        denominator=denominator,
    )
    tokens = mask.sum().clamp(min=1.0)
    metrics = [result.kl.sum() / tokens] if beta != 0.0 else []
    return result.loss, (*metrics, (result.clipped != 0).sum() / tokens)


def liger_fused_linear_grpo(
    _input,
    weight,
    selected_token_ids,
    attention_mask,
    advantages,
    bias=None,
    ref_per_token_logps=None,
    old_per_token_logps=None,
    ref_input=None,
    ref_weight=None,
    ref_bias=None,
    beta=0.04,
    epsilon_low=0.2,
    epsilon_high=0.2,
    loss_type="dapo",
    max_completion_length=None,
    importance_sampling_level="token",
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    temperature=1.0,
    compiled=True,
    use_ref_model=True,
    chunk_size=1,
    vllm_is_ratio=None,
    delta=None,
    use_bias_correction_kl=False,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
    num_items_in_batch=None,
):
    """Group relative policy optimisation and its relatives."""
    if use_ref_model:
        assert ref_per_token_logps is not None or ref_input is not None, (
            "If use_ref_model is True, ref_per_token_logps or ref_input must be provided"
        )
        if ref_per_token_logps is not None and ref_input is not None:
            warnings.warn(
                "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
                stacklevel=2,
            )
    if loss_type == "dr_grpo":
        assert max_completion_length is not None, (
            "max_completion_length must be provided for loss_type 'dr_grpo'"
        )
    if vllm_is_ratio is not None:
        answers, tokens = attention_mask.shape
        fits = vllm_is_ratio.dim() in (1, 2) and vllm_is_ratio.shape[0] == answers
        fits = fits and (vllm_is_ratio.dim() == 1 or vllm_is_ratio.shape[1] in (1, tokens))
        assert fits, (
            f"vllm_is_ratio must be 1D ({answers},) or 2D ({answers}, 1) or ({answers}, {tokens}), "
            f"got {tuple(vllm_is_ratio.shape)}"
        )
    mask = attention_mask != 0
    target = selected_token_ids.masked_fill(~mask, -100)
    log_prob = head_log_prob(_input, weight, target, bias, -100, temperature)
    if not use_ref_model:
        ref_per_token_logps = None
    elif ref_per_token_logps is None:
        with torch.no_grad():
            ref_per_token_logps = head_log_prob(ref_input, ref_weight, target, ref_bias, -100, temperature)
    return _policy(
        log_prob,
        advantages,
        mask,
        old_per_token_logps,
        ref_per_token_logps,
        loss_type=loss_type,
        level=importance_sampling_level,
        beta=beta,
        clip=(epsilon_low, epsilon_high),
        delta=delta,
        importance=vllm_is_ratio,
        tau=(sapo_temperature_pos, sapo_temperature_neg),
        gamma=(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
        corrected=use_bias_correction_kl,
        max_completion_length=max_completion_length,
        num_items=num_items_in_batch,
    )


def k3_loss_fn(log_p, log_q):
    """The k3 estimate of the divergence of q from p (http://joschu.net/blog/kl-approx.html)."""
    return torch.expm1(log_p - log_q) - (log_p - log_q)


def sapo_loss_fn(importance_ratio, temperature):
    """SAPO's gate: ``4 / temperature * sigmoid(temperature * (ratio - 1))``."""
    if temperature <= 0:
        raise ValueError("sapo_temperature must be > 0.")
    return 4 / temperature * (temperature * (importance_ratio - 1)).sigmoid()


def clip_coef_fn(coef, epsilon_low, epsilon_high, loss_type):
    """(the clipped ratio or None, whether it was clipped below, above)."""
    never = torch.zeros_like(coef, dtype=torch.bool)
    if loss_type == "cispo":
        return coef.clamp(max=epsilon_high).detach(), never, coef > epsilon_high
    if loss_type in ("sapo", "vespo"):
        return None, never, never
    low, high = 1 - epsilon_low, 1 + epsilon_high
    return coef.clamp(low, high), coef < low, coef > high


@torch.no_grad()
def get_gamma_weights(
    advantages,
    log_ratio_per_token,
    mask,
    importance_sampling_ratio=None,
    k_pos=2.0,
    lambda_pos=3.0,
    k_neg=3.0,
    lambda_neg=2.0,
):
    """VESPO's factor of each answer, ``[B, 1]``."""
    least = math.log(1e-8)
    log_w = (log_ratio_per_token.clamp(-20, 20) * mask).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        log_w = log_w + importance_sampling_ratio.log().clamp(least, 20).sum(-1, keepdim=True)
    log_w = log_w.clamp(least, 20)
    positive = advantages.unsqueeze(-1) >= 0
    k = torch.where(positive, k_pos, k_neg)
    rate = torch.where(positive, lambda_pos, lambda_neg).clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


# --- The same of given logits ---------------------------------------------------------------


def _selected(logits, ids, temperature, mask):
    """``[B, L]`` log-probabilities, 0 where the mask is, of logits ``[B, L + 1, V]``."""
    rows = logits[:, :-1]
    target = ids[:, -rows.shape[1] :] if rows.shape[1] else ids[:, :0]
    if mask is not None:
        target = target.masked_fill(mask[:, mask.shape[1] - rows.shape[1] :] == 0, -100)
    return -tigon.cross_entropy(rows if temperature == 1 else rows / temperature, target, reduction="none")


@torch.no_grad()
def fused_selective_log_softmax(logits, input_ids, temperature=0.9, mask=None):
    """The log-probabilities of the last L of ``input_ids``, by :func:`tigon.cross_entropy`; no gradient."""
    return _selected(logits, input_ids, temperature, mask)


def _token_losses(
    log_prob,
    advantages,
    mask,
    old,
    ref,
    *,
    loss_type,
    level,
    beta,
    clip,
    delta,
    importance,
    tau,
    gamma,
    corrected,
):
    """``[B, T]``: the loss, the divergence (None for beta 0) and whether the ratio was clipped, of each token."""
    advantages = advantages.unsqueeze(-1)
    log_ratio = log_prob - (log_prob.detach() if old is None else old)
    weight = log_ratio
    if level == "sequence":
        weight = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
    ratio = weight.exp()
    clipped_ratio, below, above = clip_coef_fn(ratio, *clip, loss_type)
    if loss_type == "cispo":
        loss = -clipped_ratio * advantages * log_prob
    elif loss_type == "sapo":
        loss = -torch.where(advantages > 0, *(sapo_loss_fn(ratio, t) for t in tau)) * advantages
    elif loss_type == "vespo":
        shared = importance.unsqueeze(-1) if importance is not None and importance.dim() == 1 else importance
        phi = get_gamma_weights(advantages[:, 0], log_ratio, mask, shared, *gamma)
        loss = -phi * advantages * log_prob
    else:
        free = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.min(free * advantages, clipped_ratio * advantages)
    if importance is not None and loss_type != "vespo":
        loss = loss * (importance.unsqueeze(-1) if importance.dim() == 1 else importance)
    divergence = None
    if beta != 0.0:
        divergence = k3_loss_fn(ref, log_prob)
        divergence = divergence * ratio if corrected else divergence
        loss = loss + beta * divergence
    clipped = (below & (advantages < 0)) | (above & (advantages > 0))
    kept = (t if t is None else t.expand_as(log_prob) * mask for t in (loss, divergence, clipped.float()))
    return tuple(kept)


def _reduce_grpo_loss(
    per_token_loss, completion_mask, loss_type, max_completion_length, num_items_in_batch=None
):
    """The reduction of each type, of losses of tokens."""
    mask = (
        torch.ones_like(per_token_loss)
        if completion_mask is None
        else completion_mask.to(per_token_loss.dtype)
    )
    total = (per_token_loss * mask).sum()
    if loss_type in ("grpo", "sapo"):
        return ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if loss_type == "bnpo":
        return total / mask.sum().clamp(min=1.0)
    if loss_type == "dr_grpo":
        longest = per_token_loss.shape[1] if max_completion_length is None else max_completion_length
        return total / (per_token_loss.shape[0] * longest)
    if loss_type in ("dapo", "cispo", "vespo"):
        return total / share_of_tokens(mask, num_items_in_batch)
    if loss_type == "luspo":
        return (per_token_loss * mask.sum(-1, keepdim=True)).mean()
    raise ValueError(f"Unsupported loss_type '{loss_type}' for GRPO loss.")


def triton_grpo_loss(
    logits,
    old_logp,
    ref_logp,
    completion_ids,
    advantages,
    completion_mask=None,
    temperature=0.9,
    beta=0.04,
    eps_low=0.2,
    eps_high=0.4,
    inplace=True,
    loss_type="dapo",
    max_completion_length=None,
    importance_sampling_level="token",
    reduce=False,
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    vllm_is_ratio=None,
    delta=None,
    use_bias_correction_kl=False,
    num_items_in_batch=None,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
):
    """Policy losses of given logits ``[B, L + 1, V]``: of each token, or reduced with the metrics.

    The log-probabilities are those of :func:`tigon.cross_entropy`; ``inplace`` is accepted and ignored.
    """
    if importance_sampling_level not in ("token", "sequence"):
        raise AssertionError(
            f"importance_sampling_level must be 'token' or 'sequence', got {importance_sampling_level}"
        )
    if loss_type not in _LOSSES:
        raise ValueError(f"Unknown loss_type '{loss_type}'. Supported types: {list(_LOSSES)}")
    if delta is not None and loss_type in _KINDS:
        raise ValueError(f"delta (two-sided clipping) is not supported for loss_type='{loss_type}'.")
    if importance_sampling_level == "sequence" and loss_type in _KINDS:
        raise ValueError(f"Sequence-level importance sampling is not supported for loss_type='{loss_type}'.")
    mask = torch.ones_like(completion_ids) if completion_mask is None else completion_mask
    log_prob = _selected(logits, completion_ids, temperature, completion_mask)
    shared = {
        "loss_type": loss_type,
        "level": importance_sampling_level,
        "beta": beta,
        "clip": (eps_low, eps_high),
        "delta": delta,
        "importance": vllm_is_ratio,
        "tau": (sapo_temperature_pos, sapo_temperature_neg),
        "gamma": (vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
        "corrected": use_bias_correction_kl,
    }
    if not reduce:
        return _token_losses(log_prob, advantages, mask, old_logp, ref_logp, **shared)
    longest = log_prob.shape[1] if max_completion_length is None else max_completion_length
    return _policy(
        log_prob,
        advantages,
        mask != 0,
        old_logp,
        ref_logp,
        max_completion_length=longest,
        num_items=num_items_in_batch,
        **shared,
    )


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
LigerFusedLinearGRPOFunction = function_class(
    "LigerFusedLinearGRPOFunction", liger_fused_linear_grpo, "GRPO."
)


class _Loss(torch.nn.Module):
    """A loss whose options are its attributes."""

    def __init__(self, **options):
        super().__init__()
        self._options = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    def options(self) -> dict:
        """The options as they are now."""
        return {name: getattr(self, name) for name in self._options}


class LigerFusedLinearDPOLoss(_Loss):
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
        super().__init__(
            ignore_index=ignore_index,
            beta=beta,
            alpha=alpha,
            compute_nll_loss=compute_nll_loss,
            compiled=compiled,
            use_ref_model=use_ref_model,
            average_log_prob=average_log_prob,
            chunk_size=chunk_size,
            loss_type=loss_type,
            label_smoothing=label_smoothing,
            discopop_tau=discopop_tau,
        )
        _dpo_options(loss_type, label_smoothing)

    def forward(self, lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None):
        """(loss, results)."""
        return liger_fused_linear_dpo(
            _input, lin_weight, target, bias, ref_input, ref_weight, ref_bias, **self.options()
        )


class LigerFusedLinearCPOLoss(_Loss):
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
        super().__init__(
            ignore_index=ignore_index,
            beta=beta,
            alpha=alpha,
            label_smoothing=label_smoothing,
            compute_nll_loss=compute_nll_loss,
            compiled=compiled,
            average_log_prob=average_log_prob,
            chunk_size=chunk_size,
        )

    def forward(self, lin_weight, _input, target, bias=None):
        """(loss, results)."""
        return liger_fused_linear_cpo(_input, lin_weight, target, bias, **self.options())


class LigerFusedLinearSimPOLoss(_Loss):
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
        super().__init__(
            ignore_index=ignore_index,
            beta=beta,
            alpha=alpha,
            label_smoothing=label_smoothing,
            compute_nll_loss=compute_nll_loss,
            compiled=compiled,
            gamma=gamma,
            chunk_size=chunk_size,
        )

    def forward(self, lin_weight, _input, target, bias=None):
        """(loss, results)."""
        return liger_fused_linear_simpo(_input, lin_weight, target, bias, **self.options())


class LigerFusedLinearORPOLoss(_Loss):
    """:func:`liger_fused_linear_orpo` as a module."""

    def __init__(self, ignore_index=-100, beta=0.1, compute_nll_loss=True, compiled=True, chunk_size=1):
        super().__init__(
            ignore_index=ignore_index,
            beta=beta,
            compute_nll_loss=compute_nll_loss,
            compiled=compiled,
            chunk_size=chunk_size,
        )

    def forward(self, lin_weight, _input, target, bias=None, nll_target=None):
        """(loss, results)."""
        return liger_fused_linear_orpo(
            _input, lin_weight, target, bias, nll_target=nll_target, **self.options()
        )


class LigerFusedLinearKTOLoss(_Loss):
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
        super().__init__(
            ignore_index=ignore_index,
            beta=beta,
            compiled=compiled,
            use_ref_model=use_ref_model,
            average_log_prob=average_log_prob,
            chunk_size=chunk_size,
        )

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


class LigerFusedLinearGRPOLoss(_Loss):
    """:func:`liger_fused_linear_grpo` as a module."""

    def __init__(
        self,
        beta=0.04,
        compiled=True,
        use_ref_model=True,
        chunk_size=1,
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type="dapo",
        max_completion_length=None,
        importance_sampling_level="token",
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        temperature=1.0,
        delta=None,
        use_bias_correction_kl=False,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    ):
        super().__init__(
            beta=beta,
            compiled=compiled,
            use_ref_model=use_ref_model,
            chunk_size=chunk_size,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            loss_type=loss_type,
            max_completion_length=max_completion_length,
            importance_sampling_level=importance_sampling_level,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            temperature=temperature,
            delta=delta,
            use_bias_correction_kl=use_bias_correction_kl,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
        )

    def forward(
        self,
        _input,
        lin_weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias=None,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        vllm_is_ratio=None,
        num_items_in_batch=None,
    ):
        """(loss, metrics)."""
        return liger_fused_linear_grpo(
            _input,
            lin_weight,
            selected_token_ids,
            attention_mask,
            advantages,
            bias,
            ref_per_token_logps,
            old_per_token_logps,
            ref_input,
            ref_weight,
            ref_bias,
            vllm_is_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch,
            **self.options(),
        )
