"""``liger_kernel``'s policy losses, of a linear head without its logits or of given logits.

The losses are those of :func:`tigon.policy_loss`; arguments, tuples, normalisation and errors are those of
``liger_kernel`` 0.8.5. ``compiled`` and ``chunk_size`` choose nothing. ``"luspo"`` leaves out masked tokens,
as TRL does.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
import torch.distributed as dist

import tigon
from tigon.integrations.liger.preferences import head_log_prob
from tigon.integrations.liger.signatures import Loss, by_name, function_class
from tigon.ops.policy import formula, token_losses

_KINDS = {"cispo": "cispo", "sapo": "sapo", "vespo": "vespo"}
_DEFAULTS = {
    "op": "triton_grpo_loss",
    "delta": None,
    "tau": (1.0, 1.05),
    "gamma": (2.0, 3.0, 3.0, 2.0),
    "kl_estimator": "k3",
    "entropy": 0.0,
    "normalise": "token",
}
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


def _check(
    *, loss_type, importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg, **options
) -> None:
    level = importance_sampling_level
    if loss_type not in _LOSSES:
        raise ValueError(f"Unknown loss type: {loss_type}")
    if level not in ("token", "sequence"):
        raise ValueError(
            f"Unknown importance sampling level: {level}. Possible values are 'token' and 'sequence'."
        )
    kind = _KINDS.get(loss_type, "clip")
    if level == "sequence" and kind != "clip":
        raise ValueError(f"Sequence-level importance sampling is not supported for loss_type='{loss_type}'.")
    if kind == "sapo" and min(sapo_temperature_pos, sapo_temperature_neg) <= 0:
        raise ValueError("sapo_temperature must be > 0.")


def _formula(
    mask,
    advantages,
    old,
    ref,
    *,
    beta,
    clip,
    loss_type,
    importance_sampling_level,
    sapo_temperature_pos,
    sapo_temperature_neg,
    vllm_is_ratio,
    delta,
    use_bias_correction_kl,
    vespo_k_pos,
    vespo_lambda_pos,
    vespo_k_neg,
    vespo_lambda_neg,
):
    kind, importance = _KINDS.get(loss_type, "clip"), vllm_is_ratio
    if importance is not None:
        importance = importance.detach().float()
        if importance.dim() == 2 and importance.shape[1] == 1:
            importance = importance[:, 0]
        if kind == "vespo" and importance.dim() == 1:  # a factor of the answer's ratio, once
            share = 1 / mask.sum(-1, keepdim=True).clamp(min=1)
            importance = importance.unsqueeze(-1).pow(share).expand(mask.shape)
        importance = importance.contiguous()
    operands = {
        "advantage": advantages.float(),
        "old": None if old is None else old.detach().float(),
        "ref": None if ref is None else ref.detach().float(),
        "importance": importance,
    }
    options = {"kind": kind, "level": importance_sampling_level, "clip": clip, "kl": beta}
    options["kl_corrected"] = use_bias_correction_kl
    if kind == "clip":
        options["delta"] = delta
    elif kind == "sapo":
        options["tau"] = (sapo_temperature_pos, sapo_temperature_neg)
    elif kind == "vespo":
        options["gamma"] = (vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)
    return operands, options


def _policy(
    result, mask, advantages, old, ref, *, beta, max_completion_length, num_items_in_batch, **options
):
    """(loss, [mean divergence where beta is not 0, share of clipped tokens]).

    ``result``: that of tigon's policy losses from the operands and options of the formula.
    """
    _check(**options)
    factor, loss_type = 0.0 if ref is None else beta, options["loss_type"]
    operands, options = _formula(mask, advantages, old, ref, beta=factor, **options)
    normalise, denominator = "token", None
    answers = mask.shape[0]
    if loss_type in ("grpo", "sapo"):
        normalise = "sequence"
    elif loss_type == "luspo":
        normalise, denominator = "length", answers
    elif loss_type == "dr_grpo":
        denominator = answers * max_completion_length
    elif loss_type != "bnpo":
        denominator = share_of_tokens(mask, num_items_in_batch)
    found = result(**operands, **options, normalise=normalise, denominator=denominator)
    tokens = mask.sum().clamp(min=1.0)
    divergence = found.loss.new_zeros(()) if ref is None else found.kl.sum() / tokens  # 0 from itself
    metrics = [divergence] if beta != 0.0 else []
    return found.loss, (*metrics, (found.clipped != 0).sum() / tokens)


def _grpo(
    _input,
    weight,
    selected_token_ids,
    attention_mask,
    advantages,
    bias,
    ref_per_token_logps,
    old_per_token_logps,
    ref_input,
    ref_weight,
    ref_bias,
    temperature,
    use_ref_model,
    compiled,
    chunk_size,
    epsilon_low,
    epsilon_high,
    **options,
):
    vllm_is_ratio = options["vllm_is_ratio"]
    if use_ref_model:
        assert ref_per_token_logps is not None or ref_input is not None, (
            "If use_ref_model is True, ref_per_token_logps or ref_input must be provided"
        )
        if ref_per_token_logps is not None and ref_input is not None:
            warnings.warn(
                "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
                stacklevel=3,
            )
    if options["loss_type"] == "dr_grpo":
        assert options["max_completion_length"] is not None, (
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
    if not use_ref_model:
        ref_per_token_logps = None
    elif ref_per_token_logps is None:
        with torch.no_grad():
            ref_per_token_logps = head_log_prob(ref_input, ref_weight, target, ref_bias, -100, temperature)
    hidden = _input.reshape(*target.shape, _input.shape[-1])
    head = {"bias": bias, "temperature": temperature}
    return _policy(
        functools.partial(tigon.linear_policy, hidden, weight, target, **head),
        mask,
        advantages,
        old_per_token_logps,
        ref_per_token_logps,
        clip=(epsilon_low, epsilon_high),
        **options,
    )


liger_fused_linear_grpo = by_name(
    "liger_fused_linear_grpo(_input, weight, selected_token_ids, attention_mask, advantages, bias=None, "
    "ref_per_token_logps=None, old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, "
    "beta=0.04, epsilon_low=0.2, epsilon_high=0.2, loss_type='dapo', max_completion_length=None, "
    "importance_sampling_level='token', sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, "
    "temperature=1.0, compiled=True, use_ref_model=True, chunk_size=1, vllm_is_ratio=None, delta=None, "
    "use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, "
    "vespo_lambda_neg=2.0, num_items_in_batch=None)",
    _grpo,
)
LigerFusedLinearGRPOFunction = function_class("LigerFusedLinearGRPOFunction", liger_fused_linear_grpo)


class LigerFusedLinearGRPOLoss(
    Loss,
    target=liger_fused_linear_grpo,
    operands="_input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None, "
    "ref_per_token_logps=None, old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, "
    "vllm_is_ratio=None, num_items_in_batch=None",
    first="beta, compiled, use_ref_model, chunk_size",
):
    """Group relative policy optimisation and its relatives."""


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
    """``[B, L]`` log-probabilities, 0 where the mask is, of logits ``[B, L + 1, V]``.

    Logits over a temperature exist in float32, for they are not rounded to their dtype.
    """
    rows = logits[:, :-1]
    if temperature != 1:
        wide = torch.promote_types(rows.dtype, torch.float32)
        rows = rows.to(wide, copy=True).div_(temperature)
    target = ids[:, -rows.shape[1] :] if rows.shape[1] else ids[:, :0]
    if mask is not None:
        target = target.masked_fill(mask[:, mask.shape[1] - rows.shape[1] :] == 0, -100)
    return -tigon.cross_entropy(rows, target, reduction="none")


@torch.no_grad()
def fused_selective_log_softmax(logits, input_ids, temperature=0.9, mask=None):
    """The log-probabilities of the last L of ``input_ids``, by :func:`tigon.cross_entropy`; no gradient."""
    return _selected(logits, input_ids, temperature, mask)


def _reduce_grpo_loss(
    per_token_loss, completion_mask, loss_type, max_completion_length, num_items_in_batch=None
):
    """The reduction of each type, of losses of tokens."""
    mask = torch.ones_like(per_token_loss) if completion_mask is None else completion_mask.to(per_token_loss)
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


def _grpo_of_logits(
    logits,
    old_logp,
    ref_logp,
    completion_ids,
    advantages,
    completion_mask,
    temperature,
    eps_low,
    eps_high,
    inplace,
    reduce,
    max_completion_length,
    num_items_in_batch,
    **options,
):
    level, loss_type = options["importance_sampling_level"], options["loss_type"]
    if level not in ("token", "sequence"):
        raise AssertionError(f"importance_sampling_level must be 'token' or 'sequence', got {level}")
    if loss_type not in _LOSSES:
        raise ValueError(f"Unknown loss_type '{loss_type}'. Supported types: {list(_LOSSES)}")
    if options["delta"] is not None and loss_type in _KINDS:
        raise ValueError(f"delta (two-sided clipping) is not supported for loss_type='{loss_type}'.")
    if level == "sequence" and loss_type in _KINDS:
        raise ValueError(f"Sequence-level importance sampling is not supported for loss_type='{loss_type}'.")
    mask = (torch.ones_like(completion_ids) if completion_mask is None else completion_mask) != 0
    log_prob = _selected(logits, completion_ids, temperature, completion_mask)
    options["clip"] = (eps_low, eps_high)
    if not reduce:
        beta, corrected = options["beta"], options["use_bias_correction_kl"]
        operands, formula_options = _formula(mask, advantages, old_logp, ref_logp, **options)
        numbers = formula(**_DEFAULTS | formula_options)
        advantage, *others = operands.values()
        losses, ratio, divergence, clipped = token_losses(log_prob, advantage, mask, *others, numbers)
        if beta == 0.0:
            return losses, None, clipped.abs()
        return losses, divergence * ratio if corrected else divergence, clipped.abs()
    return _policy(
        functools.partial(tigon.policy_loss, log_prob, mask=mask),
        mask,
        advantages,
        old_logp,
        ref_logp,
        max_completion_length=log_prob.shape[1] if max_completion_length is None else max_completion_length,
        num_items_in_batch=num_items_in_batch,
        **options,
    )


# Of each token, or reduced with the metrics, from logits [B, L + 1, V]; inplace has no effect.
triton_grpo_loss = by_name(
    "triton_grpo_loss(logits, old_logp, ref_logp, completion_ids, advantages, completion_mask=None, "
    "temperature=0.9, beta=0.04, eps_low=0.2, eps_high=0.4, inplace=True, loss_type='dapo', "
    "max_completion_length=None, importance_sampling_level='token', reduce=False, sapo_temperature_pos=1.0, "
    "sapo_temperature_neg=1.05, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, "
    "num_items_in_batch=None, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0)",
    _grpo_of_logits,
)
