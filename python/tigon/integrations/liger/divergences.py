"""``liger_kernel``'s divergences: functions, classes and what their ``apply`` takes, by Tigon's.

Losses are formed in float32 and the gradient is the student's alone, as there.
"""

from __future__ import annotations

import torch
from torch import nn

import tigon
from tigon.integrations.liger.names import check
from tigon.integrations.liger.signatures import Loss, function_class

_REDUCTIONS = ("none", "sum", "mean", "batchmean")


def _or_zero(loss, labels, ignore_index):
    """Without a row that counts: nothing, where Tigon's mean is that of no numbers."""
    return loss if labels is None else torch.where((labels != ignore_index).any(), loss, 0.0)


def liger_jsd(input, target, shift_labels=None, beta: float = 0.5, ignore_index: int = -100):
    """Jensen-Shannon of log-probabilities, by :func:`tigon.jsd`; ``input`` is the student's, in its dtype."""
    target = target.to(input.dtype).detach()
    loss = tigon.jsd(input, target, shift_labels, beta=beta, log_probs=True, ignore_index=ignore_index)
    return _or_zero(loss, shift_labels, ignore_index).to(input.dtype)


def kl_div(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
    """``y_true * (log max(y_true, eps) - y_pred)``, of log-probabilities ``y_pred``.

    Reduced ones run :func:`tigon.kl_div`: a probability of zero adds nothing there whatever ``eps`` is. One
    value for every element (``"none"``) is as large as the logits, so it is plain PyTorch.
    """
    check(reduction in _REDUCTIONS, f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
    y_true = y_true.detach().float()
    if reduction != "none":
        teacher = y_true if log_target else torch.where(y_true > 0, y_true.clamp(min=eps), y_true).log()
        return tigon.kl_div(y_pred.float(), teacher, log_probs=True, reduction=reduction)
    if log_target:
        return y_true.exp() * (y_true - y_pred.float())
    return y_true * (y_true.clamp(min=eps).log() - y_pred.float())


def liger_kl_div(
    input,
    target,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
):
    """:func:`kl_div` with torch's two dead arguments."""
    return kl_div(input, target, reduction, log_target, eps)


def tvd(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
    """``|p - q| / 2`` of probabilities; where they are equal the gradient is 0.

    :func:`tigon.tvd` takes logits and is the one to use in new code: with probabilities given there is
    nothing left to fuse but a difference, so this is plain PyTorch.
    """
    check(reduction in _REDUCTIONS, f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
    terms = (p.float() - q.detach().float()).abs() / 2
    rows = p.numel() // p.shape[-1]
    if shift_labels is not None:
        kept = shift_labels != ignore_index
        terms, rows = torch.where(kept.unsqueeze(-1), terms, 0.0), kept.sum()
    if reduction == "none":
        return terms
    return terms.sum() / {"sum": 1, "batchmean": rows, "mean": rows * p.shape[-1]}[reduction]


def liger_tvd(input, target, shift_labels=None, reduction: str = "mean", ignore_index: int = -100):
    """:func:`tvd`, with another default."""
    return tvd(input, target, shift_labels, reduction, ignore_index)


def ce_tvd(student_logits, teacher_logits, target, ignore_index=-100):
    """(cross-entropy, total variation distance) of logits, one of each a row, by Tigon's two."""
    shape, other = student_logits.shape, teacher_logits.shape
    check(
        shape == other,
        "student_logits and teacher_logits must have the same shape, got {} and {}",
        shape,
        other,
    )
    check(len(shape) == 2, "student_logits must be 2D (BT, V), got {}", shape)
    fits = target.shape == shape[:1]
    check(fits, "target must have shape {}, got {}", shape[:1], target.shape)
    loss = tigon.cross_entropy(student_logits, target, ignore_index=ignore_index, reduction="none")
    teacher = teacher_logits.to(student_logits.dtype).detach()
    distance = tigon.tvd(student_logits, teacher, target, ignore_index=ignore_index, reduction="none")
    return loss, distance


def _jsd(log_q, log_p, shift_labels, beta=0.5, ignore_index=-100):
    return liger_jsd(log_q, log_p, shift_labels, beta, ignore_index)


class LigerJSD(Loss, target=_jsd, operands="log_q, log_p, shift_labels=None"):
    """Jensen-Shannon divergence: ``beta`` 0 is ``KL(teacher || student)``, 1 the other way round."""


class LigerTVDLoss(Loss, target=tvd, operands="p, q, shift_labels=None"):
    """Total variation distance of probabilities; the gradient is that of ``p``."""


class LigerFusedCETVDLoss(Loss, target=ce_tvd, operands="student_logits, teacher_logits, target"):
    """Cross-entropy and total variation distance, both unreduced."""


class LigerKLDIVLoss(nn.KLDivLoss):
    """``torch.nn.KLDivLoss`` with an ``eps`` before its arguments."""

    def __init__(self, eps: float = 1e-10, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred, y_true):
        """Log-probabilities, and probabilities (or logs of them, with ``log_target``)."""
        return kl_div(y_pred, y_true, self.reduction, self.log_target, self.eps)


LigerJSDFunction = function_class(
    "LigerJSDFunction",
    liger_jsd,
    "_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None",
)
LigerKLDivLossFunction = function_class("LigerKLDivLossFunction", kl_div)
LigerTVDLossFunction = function_class("LigerTVDLossFunction", tvd)
LigerFusedCETVDFunction = function_class("LigerFusedCETVDFunction", ce_tvd)


# From hidden states. Both heads' logits are float32, and weight gradients are summed in float32 whatever
# ``accum_dtype`` says.


def _check_labels(labels, rows):
    shape = None if labels is None else tuple(labels.shape)
    assert shape in (None, (rows,)), f"the shape of shift_labels must be (BT,). Got: {labels.shape}"


def liger_fused_linear_jsd(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    shift_labels=None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype=None,
):
    """Jensen-Shannon divergence of two heads, a mean of the rows that count: :func:`tigon.linear_jsd`."""
    _check_labels(shift_labels, teacher_input.shape[0])
    loss = tigon.linear_jsd(
        student_input,
        student_weight,
        (teacher_input, teacher_weight),
        shift_labels,
        beta=jsd_beta,
        temperature=temperature,
        ignore_index=ignore_index,
    )
    return _or_zero(loss, shift_labels, ignore_index)


def liger_fused_linear_kl_div(
    student_input,
    student_weight,
    target,
    shift_labels=None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    eps: float = 1e-10,
    accum_dtype=None,
):
    """``sum q (log max(q, eps) - log softmax(z))`` against probabilities q, by :func:`tigon.linear_kl_div`.

    A row of q need not add up to 1: its sum is the row's weight.
    """
    if reduction not in ("batchmean", "mean", "sum"):
        raise ValueError(
            f"reduction must be one of ('batchmean', 'mean', 'sum'), got {reduction!r}. "
            "reduction='none' is not supported by the fused kernel; "
            "use LigerKLDIVLoss for element-wise losses."
        )
    assert temperature != 0, "temperature cannot be 0."
    _check_labels(shift_labels, student_input.shape[0])
    with torch.no_grad():
        q = target.float()
        mass = q.sum(-1)
        teacher = q.log()
        # Tigon compares with q / mass, and gives 0 log 0 = 0 whatever eps is.
        constant = torch.where(mass > 0, mass * mass.log(), 0.0)
    loss = tigon.linear_kl_div(
        student_input,
        student_weight,
        teacher,
        shift_labels,
        temperature=temperature,
        teacher_logit_scale=temperature,
        token_weight=mass,
        reduction=reduction,
        ignore_index=ignore_index,
    )
    if shift_labels is not None:
        kept = shift_labels != ignore_index
        constant, count = torch.where(kept, constant, 0.0), kept.sum()
    else:
        count = constant.numel()
    columns = target.shape[-1]
    loss = loss + constant.sum() / {"sum": 1, "batchmean": count, "mean": count * columns}[reduction]
    return _or_zero(loss, shift_labels, ignore_index)


class _Distillation(Loss):
    def validate(self):
        assert self.temperature != 0, "temperature cannot be 0."


class LigerFusedLinearJSD(
    _Distillation,
    target=liger_fused_linear_jsd,
    operands="student_input, student_weight, teacher_input, teacher_weight, shift_labels=None",
):
    """:func:`liger_fused_linear_jsd` with its options fixed."""


class LigerFusedLinearKLDivLoss(
    _Distillation,
    target=liger_fused_linear_kl_div,
    operands="student_input, student_weight, target, shift_labels=None",
):
    """:func:`liger_fused_linear_kl_div` with its options fixed."""

    def extra_repr(self):
        return ", ".join(f"{name}={getattr(self, name)}" for name in self._options)


LigerFusedLinearJSDFunction = function_class(
    "LigerFusedLinearJSDFunction",
    liger_fused_linear_jsd,
    "student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, "
    "ignore_index=-100, temperature=1.0, accum_dtype=None, jsd_impl=None, jsd_mode=None",
)
LigerFusedLinearKLDivFunction = function_class("LigerFusedLinearKLDivFunction", liger_fused_linear_kl_div)


# Primitives of the dispatcher: (losses, gradient of the first argument), without autograd, in plain PyTorch.


def _kept(labels, ignore_index, *values):
    """Rows that do not count are zero."""
    if labels is None:
        return values
    keep = labels != ignore_index
    return tuple(torch.where(keep.view(-1, *[1] * (value.dim() - 1)), value, 0.0) for value in values)


@torch.no_grad()
def kl_loss_and_grad(logits, target, shift_labels, ignore_index, temperature, eps, scale):
    """``KL(target || softmax(logits / temperature)) * scale``: loss ``[BT]`` of rows, and dlogits."""
    log_q = (logits.float() / temperature).log_softmax(-1)
    p = target.float()
    loss = scale * (p * (p.clamp(min=eps).log() - log_q)).sum(-1)
    gradient = scale / temperature * (log_q.exp() * p.sum(-1, keepdim=True) - p)
    loss, gradient = _kept(shift_labels, ignore_index, loss, gradient)
    return loss, gradient.to(logits.dtype)


@torch.no_grad()
def jsd_loss_and_grad(log_q, log_p, shift_labels, beta, ignore_index, n_non_ignore):
    """Jensen-Shannon of log-probabilities over ``n_non_ignore``: an element's loss ``[BT, V]`` and dlog_q."""
    x, y = log_q.float(), log_p.float()
    q, p = x.exp(), y.exp()
    if beta == 0.0:
        loss, gradient = p * (y - x), -p
    elif beta == 1.0:
        loss = q * (x - y)
        gradient = loss + q
    else:
        weights = torch.tensor((beta, 1 - beta), device=x.device).log()
        log_m = torch.logaddexp(y + weights[0], x + weights[1])
        gradient = (1 - beta) * q * (x - log_m)
        loss = beta * p * (y - log_m) + gradient
    loss, gradient = _kept(shift_labels, ignore_index, loss / n_non_ignore, gradient / n_non_ignore)
    return loss, gradient.to(log_q.dtype)
