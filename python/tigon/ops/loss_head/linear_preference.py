"""Preference losses of a linear head.

Contract: ``csrc/tigon/ops/linear_preference/linear_preference.h``.
"""

from __future__ import annotations

import torch

from tigon._op import has_kernel
from tigon.error import check
from tigon.ops import preference as _preference
from tigon.ops.arguments import check_indices, readable
from tigon.ops.cross_entropy import check_denominator, split_denominator
from tigon.ops.loss_head.labels import labels_of
from tigon.ops.loss_head.operands import autocast, check_plain, plain_weight, shifted
from tigon.ops.loss_head.token_loss import (
    Head,
    check_operands,
    check_ref_head,
    fake_gradients,
    log_probs,
    native_call,
    plain,
    ref_operands,
    token_loss_op,
)
from tigon.ops.preference import KTOResult, PreferenceResult


def _fake(*arguments):
    hidden, desirable, answers = arguments[0], arguments[12], arguments[-2]
    pairs, f32 = desirable is None, {"dtype": torch.float32}
    return (
        hidden.new_empty((), **f32),
        hidden.new_empty(answers, **f32),
        hidden.new_empty(answers, **f32),
        hidden.new_empty(() if pairs else (0,), **f32),
        hidden.new_empty(answers // 2 if pairs else 0, **f32),
        *fake_gradients(arguments),
    )


_op = token_loss_op("linear_preference", _fake)


def _merged(op, target, nll_target, ignore_index):
    """One label a row, from those of the pairs and those of the nll term."""
    chosen, rejected = target.chunk(2)
    both = (chosen != ignore_index) & (nll_target != ignore_index) & (chosen != nll_target)
    if readable(target):
        wrong = both.nonzero()[:1].tolist()
        check(op, not wrong, "nll_target must be target where both count, got another label at {}", wrong)
    bad = -2 if ignore_index == -1 else -1  # a wrong label: NaN where nobody can look
    label = torch.where(nll_target != ignore_index, nll_target, chosen)
    return torch.cat((torch.where(both, bad, label), rejected))


def _run(op, hidden, weight, target, head: Head, ref, nll_target, desirable, kl, denominator, formula):
    """Kernel or reference, on checked arguments."""
    check_denominator(op, denominator)
    hidden, weight = autocast(hidden), plain_weight(op, weight)
    shift, ignore_index = head.shift, head.ignore_index
    native = has_kernel(op, hidden, beside=(head.bias, *(head.lora or ())[:2]))
    if not native:
        check_plain(op, weight, target, ignore_index, shift, head.valid_rows)
    labels = None
    if nll_target is not None or not native or plain(hidden):
        target = shifted(target, ignore_index, shift).long()
        shift = False
    if nll_target is not None:
        nll_target = shifted(nll_target, ignore_index, head.shift).long()
        labels = _merged(op, target, nll_target, ignore_index)
    ref_head = ref if isinstance(ref, (tuple, list)) else None
    like = hidden if native else hidden.double()
    sums = None if ref_head is not None else _preference.constant(ref, like)
    if not native or plain(hidden):
        of = target if labels is None else labels
        log_prob = log_probs(op, hidden, weight, of, head)
        mask = target != ignore_index
        if ref_head is not None:
            states, of_ref, *bias = ref_head
            with torch.no_grad():
                options = head._replace(bias=bias[0] if bias else None, lora=None)
                sums = torch.where(
                    mask, log_probs(op, states.to(hidden), of_ref.to(hidden), of, options), 0.0
                ).sum(-1)
        nll_mask = None if nll_target is None else nll_target != ignore_index
        return _preference.run(op, log_prob, mask, nll_mask, sums, desirable, kl, denominator, formula)
    call = native_call(op, hidden, weight, target if labels is None else labels, shift, head)
    reference = (None, None, None) if ref_head is None else ref_operands(ref_head, hidden)
    device, number = split_denominator(denominator, hidden.device)
    flat = [None, None] if labels is None else [t.reshape(-1) for t in (target, nll_target)]
    results = _op(
        *call.operands, *reference, *flat, sums, desirable, kl, device, number, *formula, *call.options
    )
    loss, log_prob, rewards, nll, margin = results
    if desirable is not None:
        return KTOResult(loss, log_prob, rewards)
    return PreferenceResult(loss, log_prob, rewards, nll, margin)


def linear_preference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    ref: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    average: bool | None = None,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    tau: float = 0.05,
    nll: float | None = None,
    nll_target: torch.Tensor | None = None,
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
) -> PreferenceResult:
    """:func:`tigon.preference_loss` of the log-probabilities of labels under a linear head, whose logits
    never exist as a whole; the gradients are formed in the same pass: three matrix products (two with a
    frozen weight or hidden, one without gradients), one more for a reference head.

    Args:
        hidden: ``[2P, T, H]``, chosen answers first, then rejected ones in the same order; dtypes as in
            :func:`tigon.linear_cross_entropy`.
        weight: ``[V, H]``.
        target: ``[2P, T]`` labels; ``ignore_index`` does not count.
        kind, beta, average, label_smoothing, gamma, tau, nll, denominator: as in
            :func:`tigon.preference_loss`.
        ref: ``[2P]`` sums of the reference's log-probabilities; or its head, ``(hidden [2P, T, H'], weight
            [V, H'])`` and maybe its bias ``[V]``, streamed beside with the same workspace, scale, softcap and
            temperature; no gradient either way.
        nll_target: ``[P, T]`` labels of the nll term, which may count where those of target do not (a
            prompt); where both count they are the same (on the CPU checked, on CUDA another makes the loss
            NaN). ``None``: target's.
        bias, temperature, softcap, logit_scale, ignore_index, shift, valid_rows, lora: as in
            :func:`tigon.linear_cross_entropy`; ``valid_rows`` counts rows with a label of either target.
        chunk_rows, max_workspace_mb: bounds of a chunk. Pairs share chunks whole; by default a chunk grows to
            its longest pair while its logits have no more than 1 GiB. A pair that fits no chunk: every
            chunk's logits but the last one's are computed twice (four products).

    Returns:
        :class:`tigon.ops.preference.PreferenceResult`: ``(loss, log_prob [2P], rewards [2P], nll, margin
        [P])``; the loss is differentiable in hidden, weight, bias, A and B, each only where needed; the rest
        is detached, of the same pass. Traced by torch.compile as one operator. Bitwise deterministic as
        :func:`tigon.linear_cross_entropy`. With ``weight.tigon_main_grad`` the weight's gradient is
        formed as without, and added to ``weight.main_grad``.

    Raises:
        tigon.Error: as the two functions named, and a ref of other rows or classes.
    """
    op = "linear_preference"
    head = Head(bias, temperature, softcap, logit_scale, ignore_index, shift, valid_rows, lora, chunk_rows,
                max_workspace_mb)  # fmt: skip
    target = labels_of(target, ignore_index)
    check_operands(op, hidden, weight, target, head)
    answers = target.shape[0]
    _preference.check_pairs(op, "target", answers)
    formula = _preference.pair_formula(op, kind, beta, average, label_smoothing, gamma, tau, nll, ref)
    if isinstance(ref, (tuple, list)):
        check_ref_head(op, ref, hidden, weight)
    else:
        _preference.check_ref(op, ref, answers, hidden.device)
    if nll_target is not None:
        nll_target = labels_of(nll_target, ignore_index)
        check_indices(op, "nll_target", nll_target)
        wanted = (answers // 2, target.shape[1])
        check(op, nll_target.shape == wanted, "nll_target must be {}, got {}", list(wanted), nll_target.shape)
        same = nll_target.device == target.device
        check(op, same, "nll_target must be on {}, got {}", target.device, nll_target.device)
    return _run(op, hidden, weight, target, head, ref, nll_target, None, None, denominator, formula)


def linear_kto(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    desirable: torch.Tensor,
    *,
    kind: str = "kto",
    beta: float = 0.1,
    kl: float | torch.Tensor = 0.0,
    weights: tuple[float, float] = (1.0, 1.0),
    ref: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    average: bool = False,
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
) -> KTOResult:
    """:func:`tigon.kto_loss` of the log-probabilities of labels under a linear head, whose logits never exist
    as a whole.

    Args:
        hidden, weight, target: ``[B, T, H]``, ``[V, H]``, ``[B, T]``.
        desirable, kind, beta, kl, weights, average, denominator: as in :func:`tigon.kto_loss`.
        ref, bias, temperature, softcap, logit_scale, ignore_index, shift, valid_rows, lora, chunk_rows,
            max_workspace_mb: as in :func:`linear_preference`; answers share chunks whole.

    Returns:
        :class:`tigon.ops.preference.KTOResult`: ``(loss, log_prob [B], rewards [B])``, as
        :func:`linear_preference`.

    Raises:
        tigon.Error: as :func:`linear_preference`.
    """
    op = "linear_kto"
    head = Head(bias, temperature, softcap, logit_scale, ignore_index, shift, valid_rows, lora, chunk_rows,
                max_workspace_mb)  # fmt: skip
    target = labels_of(target, ignore_index)
    check_operands(op, hidden, weight, target, head)
    formula = _preference.single_formula(op, kind, beta, average, kl, weights)
    _preference.check_desirable(op, desirable, target.shape[0], hidden.device)
    if isinstance(ref, (tuple, list)):
        check_ref_head(op, ref, hidden, weight)
    else:
        _preference.check_ref(op, ref, target.shape[0], hidden.device)
    point = _preference.kl_tensor(kl, hidden)
    return _run(op, hidden, weight, target, head, ref, None, desirable, point, denominator, formula)
