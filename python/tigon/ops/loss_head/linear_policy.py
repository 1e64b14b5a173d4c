"""Policy-gradient losses of a linear head.

Contract: ``csrc/tigon/ops/linear_preference/linear_policy.h``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon._op import has_kernel
from tigon.error import check
from tigon.ops import policy as _policy
from tigon.ops.arguments import kind_of
from tigon.ops.cross_entropy import check_denominator, split_denominator
from tigon.ops.loss_head.labels import labels_of
from tigon.ops.loss_head.operands import autocast, check_plain, plain_weight, shifted
from tigon.ops.loss_head.token_loss import (
    Head,
    check_operands,
    fake_gradients,
    log_probs,
    native_call,
    plain,
    token_loss_op,
)


class LinearPolicyResult(NamedTuple):
    """What :func:`linear_policy` returns; all but the loss is detached."""

    loss: torch.Tensor  # float32 scalar
    log_prob: torch.Tensor  # [B, T]
    entropy: torch.Tensor  # [B, T]
    kl: torch.Tensor | None  # [B, T]: estimate of each token; None without ref
    clipped: torch.Tensor  # [B, T]: -1 and 1 where the ratio is clipped below and above, else 0


def _fake(*arguments):
    hidden, _, labels, *_ = arguments
    ref = arguments[8]

    def rows(wanted):
        return hidden.new_empty(labels.shape if wanted else (0,), dtype=torch.float32)

    loss = hidden.new_empty((), dtype=torch.float32)
    return loss, rows(True), rows(True), rows(ref is not None), rows(True), *fake_gradients(arguments)


_op = token_loss_op("linear_policy", _fake)


def linear_policy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    advantage: torch.Tensor,
    *,
    kind: str = "clip",
    level: str = "token",
    old: torch.Tensor | None = None,
    ref: torch.Tensor | None = None,
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
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    shift: int | bool = False,
    valid_rows: int | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    chunk_rows: int | None = None,
    max_workspace_mb: float | None = None,
) -> LinearPolicyResult:
    """:func:`tigon.policy_loss` of the log-probabilities of sampled tokens under a linear head, whose logits
    never exist as a whole; the gradients are formed in the same pass: three matrix products.

    Args:
        hidden, weight, target: ``[B, T, H]``, ``[V, H]``, ``[B, T]`` sampled tokens; ``ignore_index`` does
            not count.
        advantage, kind, level, old, ref, importance, clip, delta, tau, gamma, kl, kl_estimator, kl_corrected,
            entropy, entropy_denominator, normalise, denominator: as in :func:`tigon.policy_loss`. With
            ``shift`` what is per token belongs to the position whose hidden state predicts it.
        bias, temperature, softcap, logit_scale, ignore_index, shift, valid_rows, lora: as in
            :func:`tigon.linear_cross_entropy`.
        chunk_rows, max_workspace_mb: as in :func:`tigon.linear_preference`; where the loss of a token depends
            on its answer (a level other than ``"token"``, vespo) answers share chunks whole.

    Returns:
        :class:`LinearPolicyResult`: ``(loss, log_prob, entropy, kl, clipped)``, per token ``[B, T]`` and
        detached but for the loss, which is differentiable in hidden, weight, bias, A and B. Entropies are
        free; their gradient (``entropy != 0``) costs one more read of the logits. Traced by torch.compile as
        one operator. In float16 the gradients are formed without the denominator, by which the last step
        divides in float32: advantages of thousands overflow there, whatever the denominator is.

    Raises:
        tigon.Error: as the two functions named.
    """
    op = "linear_policy"
    head = Head(bias, temperature, softcap, logit_scale, ignore_index, shift, valid_rows, lora, chunk_rows,
                max_workspace_mb)  # fmt: skip
    target = labels_of(target, ignore_index)
    check_operands(op, hidden, weight, target, head)
    f = _policy.formula(
        op, kind, level, clip, delta, tau, gamma, kl, kl_estimator, kl_corrected, entropy, normalise
    )
    check(
        op,
        isinstance(advantage, torch.Tensor),
        "advantage must be a float tensor, got {}",
        kind_of(advantage),
    )
    _policy.check_tokens(op, target.shape, hidden.device, advantage, old, ref, importance, kl)
    check_denominator(op, denominator)
    check_denominator(op, entropy_denominator, "entropy_denominator")
    advantage, old, ref, importance = (
        None if t is None else t.detach() for t in (advantage, old, ref, importance)
    )
    hidden, weight = autocast(hidden), plain_weight(op, weight)
    if not has_kernel(op, hidden, beside=(bias, *(lora or ())[:2])) or plain(hidden):
        if hidden.dtype == torch.float64:
            check_plain(op, weight, target, ignore_index, shift, valid_rows)
        labels = shifted(target, ignore_index, shift).long()
        log_prob, entropies = log_probs(op, hidden, weight, labels, head, entropy=True)
        options = (log_prob, advantage, labels != ignore_index, old, ref, importance, entropies, denominator,
                   entropy_denominator, f)  # fmt: skip
        loss, estimate, clipped = _policy.run(*options)
        return LinearPolicyResult(loss, log_prob.detach(), entropies.detach(), estimate, clipped)
    call = native_call(op, hidden, weight, target, shift, head)
    floats = [None if t is None else t.float() for t in (advantage, old, ref, importance)]
    by, number = split_denominator(denominator, hidden.device)
    entropy_by, entropy_number = split_denominator(entropy_denominator, hidden.device)
    loss, *tokens = _op(
        *call.operands, *floats, by, entropy_by, number, entropy_number, *f, True, *call.options
    )
    log_prob, entropies, estimate, clipped = tokens
    estimate = None if ref is None else estimate.view(target.shape)
    log_prob, entropies, clipped = (t.view(target.shape) for t in (log_prob, entropies, clipped))
    return LinearPolicyResult(loss, log_prob, entropies, estimate, clipped)
