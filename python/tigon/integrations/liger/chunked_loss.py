"""``liger_kernel.chunked_loss``: losses of pairs, of single answers, of samples and of two heads.

They come from heads whose logits never exist: :func:`tigon.linear_preference`, :func:`tigon.linear_kto`,
:func:`tigon.linear_policy` and :func:`tigon.linear_jsd`. Arguments, tuples and normalisation are those of
``liger_kernel`` 0.8.5. ``compiled`` and ``chunk_size`` choose nothing. ``"luspo"`` leaves out masked tokens,
as TRL does. If the teacher has more classes than the student, those that both have are compared (Liger pads
the student's logits with zeros).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

import tigon
from tigon.error import Error
from tigon.integrations.liger.modules import Loss
from tigon.ops.preference import log1mexp

_DPO = ("sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard")
_DPO += ("apo_zero", "apo_down", "discopop")


def _log_prob(hidden, weight, target, bias, ignore_index, temperature=1.0):
    """Log-probabilities of the tokens, in target's shape."""
    hidden = hidden.reshape(*target.shape, hidden.shape[-1])
    return tigon.linear_log_prob(
        hidden, weight, target, bias=bias, ignore_index=ignore_index, temperature=temperature
    )


@torch.no_grad()
def _logit_sums(hidden, weight, bias):
    """The sum of all logits of each answer, which is linear in its hidden states."""
    tokens = hidden.shape[1]
    sums = hidden.sum(1, dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
    return sums if bias is None else sums + tokens * bias.sum(dtype=torch.float32)


def _reference(target, ref_input, ref_weight, ref_bias):
    """The reference head as tigon's losses take it."""
    return ref_input.reshape(*target.shape, ref_input.shape[-1]), ref_weight, ref_bias


class _PairLoss(Loss):
    alpha = 1.0

    def _pairs(self, kind, weight, hidden, target, bias, nll_target=None, **options):
        """(loss, the seven results that all losses of pairs share)."""
        half, nll = target.shape[0] // 2, self.alpha if self.compute_nll_loss else 0.0
        hidden = hidden.reshape(*target.shape, hidden.shape[-1])
        apart = self.compute_nll_loss and nll_target is not None  # its labels may be others than target's
        result = tigon.linear_preference(
            hidden,
            weight,
            target,
            kind=kind,
            bias=bias,
            ignore_index=self.ignore_index,
            beta=self.beta,
            nll=0.0 if apart else nll,
            **options,
        )
        loss, mean = result.loss, result.nll if self.compute_nll_loss else torch.zeros_like(result.nll)
        if apart:
            labels = nll_target[:half]
            tokens = _log_prob(hidden[:half], weight, labels, bias, self.ignore_index)
            mean = -tokens.sum() / (labels != self.ignore_index).sum()
            loss = loss + nll * mean
        logits = _logit_sums(hidden, weight, bias) / (half * target.shape[1] * weight.shape[0])
        log_probs, rewards = result.log_prob.split(half), result.rewards.split(half)
        sums = (part.sum() for part in logits.split(half))
        return loss, (*log_probs, *sums, mean.detach(), *rewards)


@dataclass(eq=False, repr=False)
class LigerFusedLinearDPOLoss(_PairLoss):
    """Direct preference optimisation and its relatives, on chosen answers followed by rejected ones."""

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    compute_nll_loss: bool = False
    compiled: bool = True
    use_ref_model: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05

    def __post_init__(self) -> None:
        if self.loss_type == "ipo":
            raise NotImplementedError(
                "loss_type='ipo' is not supported here; use tigon.preference_loss(kind='ipo')"
            )
        if self.loss_type not in _DPO:
            raise ValueError(
                f"Unsupported loss_type: {self.loss_type}. Supported types are: {', '.join(_DPO)}"
            )

    def forward(self, lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None):
        options = {"average": self.average_log_prob}
        if self.use_ref_model:
            options["ref"] = _reference(target, ref_input, ref_weight, ref_bias)
        if self.loss_type == "discopop":
            options["tau"] = self.discopop_tau
        if self.loss_type in ("exo_pair", "robust"):
            options["label_smoothing"] = self.label_smoothing
        return self._pairs(self.loss_type, lin_weight, _input, target, bias, **options)


@dataclass(eq=False, repr=False)
class LigerFusedLinearCPOLoss(_PairLoss):
    """Contrastive preference optimisation."""

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1

    def forward(self, lin_weight, _input, target, bias=None):
        options = {"average": self.average_log_prob, "label_smoothing": self.label_smoothing}
        return self._pairs("cpo", lin_weight, _input, target, bias, **options)


@dataclass(eq=False, repr=False)
class LigerFusedLinearSimPOLoss(_PairLoss):
    """Simple preference optimisation."""

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    gamma: float = 0.5
    chunk_size: int = 1

    def forward(self, lin_weight, _input, target, bias=None):
        options = {"average": True, "label_smoothing": self.label_smoothing, "gamma": self.gamma}
        return self._pairs("simpo", lin_weight, _input, target, bias, **options)


@dataclass(eq=False, repr=False)
class LigerFusedLinearORPOLoss(_PairLoss):
    """Odds ratio preference optimisation; two results more: the means of log-sigmoid and of the log odds."""

    ignore_index: int = -100
    beta: float = 0.1
    compute_nll_loss: bool = True
    compiled: bool = True
    chunk_size: int = 1

    def forward(self, lin_weight, _input, target, bias=None, nll_target=None):
        loss, shared = self._pairs("orpo", lin_weight, _input, target, bias, nll_target, average=True)
        chosen, rejected, *_ = shared
        odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
        return loss, (*shared, logsigmoid(odds).mean(), odds.mean())


@dataclass(eq=False, repr=False)
class LigerFusedLinearKTOLoss(Loss):
    """Kahneman-Tversky optimisation, of single answers with a preference each.

    Returns (loss, the sums of log-probabilities, logits and rewards by preference).
    """

    ignore_index: int = -100
    beta: float = 0.1
    compiled: bool = True
    use_ref_model: bool = False
    average_log_prob: bool = False
    chunk_size: int = 1

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
        hidden = _input.reshape(*target.shape, _input.shape[-1])
        desirable = preference_labels.bool()
        result = tigon.linear_kto(
            hidden,
            lin_weight,
            target,
            desirable,
            bias=bias,
            ignore_index=self.ignore_index,
            beta=self.beta,
            kl=0.0 if kl is None else kl,
            ref=_reference(target, ref_input, ref_weight, ref_bias) if self.use_ref_model else None,
            average=self.average_log_prob,
        )
        every = (result.log_prob, _logit_sums(hidden, lin_weight, bias), result.rewards)
        halves = ((values, wanted) for values in every for wanted in (desirable, ~desirable))
        return result.loss, tuple(torch.where(wanted, values, 0.0).sum() for values, wanted in halves)


_GRPO = {  # a type of loss in tigon's words: the formula, and over what losses of tokens are a mean
    "grpo": ("clip", "sequence"),
    "bnpo": ("clip", "token"),
    "dr_grpo": ("clip", "token"),
    "dapo": ("clip", "token"),
    "luspo": ("clip", "length"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "sequence"),
    "vespo": ("vespo", "token"),
}


def _importance(ratio, kind, mask):
    """vLLM's ratio ``[B]``, ``[B, 1]`` or ``[B, T]`` as tigon takes it, or None."""
    if ratio is None:
        return None
    ratio = ratio.detach().float()
    if ratio.dim() == 2 and ratio.shape[1] == 1:
        ratio = ratio[:, 0]
    if kind == "vespo" and ratio.dim() == 1:  # a factor of the answer's ratio, once
        share = 1 / mask.sum(-1, keepdim=True).clamp(min=1)
        ratio = ratio.unsqueeze(-1).pow(share).expand(mask.shape)
    return ratio.contiguous()


@dataclass(eq=False, repr=False)
class LigerFusedLinearGRPOLoss(Loss):
    """Group relative policy optimisation and its relatives.

    Returns (loss, [mean divergence where ``beta`` is not 0, share of clipped tokens]).
    """

    beta: float = 0.04
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int = 1
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

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
        if self.loss_type not in _GRPO:
            raise ValueError(f"Unknown loss type: {self.loss_type}")
        kind, normalise = _GRPO[self.loss_type]
        if self.importance_sampling_level != "token" and kind != "clip":
            raise ValueError(
                f"Sequence-level importance sampling is not supported for loss_type='{self.loss_type}'."
            )
        mask = attention_mask != 0
        target, ref = selected_token_ids.masked_fill(~mask, -100), None
        if self.use_ref_model:
            ref = ref_per_token_logps
            assert ref is not None or ref_input is not None, (
                "If use_ref_model is True, ref_per_token_logps or ref_input must be provided"
            )
            if ref is not None and ref_input is not None:
                warnings.warn(
                    "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
                    stacklevel=2,
                )
            if ref is None:
                with torch.no_grad():
                    ref = _log_prob(ref_input, ref_weight, target, ref_bias, -100, self.temperature)
        result = tigon.linear_policy(
            _input.reshape(*target.shape, _input.shape[-1]),
            lin_weight,
            target,
            advantages,
            old=old_per_token_logps,
            ref=ref,
            importance=_importance(vllm_is_ratio, kind, mask),
            bias=bias,
            temperature=self.temperature,
            kind=kind,
            level=self.importance_sampling_level,
            clip=(self.epsilon_low, self.epsilon_high),
            kl=0.0 if ref is None else self.beta,
            kl_corrected=self.use_bias_correction_kl,
            delta=self.delta if kind == "clip" else None,
            tau=(self.sapo_temperature_pos, self.sapo_temperature_neg),
            gamma=(self.vespo_k_pos, self.vespo_lambda_pos, self.vespo_k_neg, self.vespo_lambda_neg),
            normalise=normalise,
            denominator=self._denominator(mask, num_items_in_batch),
        )
        tokens = mask.sum().clamp(min=1.0)
        divergence = result.loss.new_zeros(()) if ref is None else result.kl.sum() / tokens  # 0 from itself
        metrics = [divergence] if self.beta != 0.0 else []
        return result.loss, (*metrics, (result.clipped != 0).sum() / tokens)

    def _denominator(self, mask: Tensor, num_items_in_batch: float | Tensor | None) -> float | Tensor | None:
        """The divisor of the sum of the tokens' losses; None: their number here.

        DAPO's is the number of the tokens of all processes, of each its share.
        """
        answers = mask.shape[0]
        if self.loss_type == "luspo":
            return answers
        if self.loss_type == "dr_grpo":
            assert self.max_completion_length is not None, (
                "max_completion_length must be provided for loss_type 'dr_grpo'"
            )
            return answers * self.max_completion_length
        if self.loss_type not in ("dapo", "cispo", "vespo"):
            return None
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if num_items_in_batch is None:
            num_items_in_batch = mask.sum().float()
            if processes > 1:
                dist.all_reduce(num_items_in_batch)
        if not isinstance(num_items_in_batch, Tensor):
            return max(num_items_in_batch / processes, 1.0)
        return (num_items_in_batch.to(mask.device).float() / processes).clamp(min=1.0)


@dataclass(eq=False, repr=False)
class LigerFusedLinearJSDLoss(Loss):
    """``weight_hard_loss * CE + weight_soft_loss * JSD``, the latter at `temperature`, of two heads.

    By :func:`tigon.linear_jsd`: sums over the number of rows that count, at least 1. Returns the loss, or
    (loss, soft, hard) with ``return_soft_hard_loss``.
    """

    weight_hard_loss: float = 0.5
    weight_soft_loss: float = 0.5
    beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    compiled: bool = True
    chunk_size: int = 1024
    return_soft_hard_loss: bool = False

    def forward(
        self,
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        true_labels,
        student_bias=None,
        teacher_bias=None,
    ):
        count = (true_labels != self.ignore_index).sum().clamp(min=1)
        biases = () if teacher_bias is None else (teacher_bias,)
        result = tigon.linear_jsd(
            student_input,
            student_weight,
            (teacher_input, teacher_weight, *biases),
            true_labels,
            beta=self.beta,
            soft=self.weight_soft_loss,
            hard=self.weight_hard_loss,
            temperature=self.temperature,
            bias=student_bias,
            denominator=count,
            ignore_index=self.ignore_index,
            outputs=("loss", "soft", "hard") if self.return_soft_hard_loss else ("loss",),
        )
        if not self.return_soft_hard_loss:
            return result
        return result.loss, result.soft.sum() / count, result.hard.sum() / count


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """For subclasses that bring a forward and a backward of their own, as Axolotl's does."""

    @staticmethod
    def forward(ctx, *args, **kwargs):
        raise Error(
            "[compat.liger] a subclass of LigerFusedLinearDistillationBase must bring its own forward, got "
            "none: use tigon.linear_loss, which takes a loss of your own"
        )
