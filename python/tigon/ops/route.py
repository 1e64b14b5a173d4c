"""The router of a mixture of experts. Contract: ``csrc/tigon/ops/route/route.h``."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tigon._op import Op, has_kernel, raw
from tigon.error import check
from tigon.ops.arguments import (
    check_booleans,
    check_choice,
    check_float,
    check_integers,
    check_layout,
    check_like,
    check_numbers,
    check_stored,
    kind_of,
)

OP = "route"
SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "sum_of_two")
MAX_EXPERTS = 1024
# In the order of tigon::DType.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
TINY = 1e-20  # added to sums of sigmoids
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16)  # of forced ids


def reference(
    logits,
    top_k,
    *,
    score="softmax",
    normalize=True,
    correction_bias=None,
    num_groups=1,
    top_groups=1,
    group_score="max",
    scale=1.0,
    dtype=torch.float32,
    ids_dtype=torch.int64,
    losses=False,
    token_weights=None,
    forced=None,
):
    """Compute the same formula with PyTorch operations (any float dtype, any device)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    z = logits.to(wide)
    sigmoids = score == "sigmoid"
    p = torch.sigmoid(z) if sigmoids else torch.softmax(z, -1)
    two = num_groups > 1 and group_score == "sum_of_two"
    compared = p if two or correction_bias is not None else z
    ids = _choice(compared, correction_bias, num_groups, top_groups, two)[..., :top_k]
    if forced is not None:
        kept = _keeps_own(forced)
        ids = torch.where(kept[..., None], ids, forced)
    weights = p.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (TINY if sigmoids else 0.0))
    results = (weights * scale).to(logits.dtype if dtype is None else wide), ids.to(ids_dtype)
    if not losses:
        return results
    q = p / (p.sum(-1, keepdim=True) + TINY) if sigmoids else p
    return *results, *_losses(z, q, ids, token_weights)


def _keeps_own(forced):
    """Which tokens keep their own choice: their first id is negative, or an expert occurs twice."""
    order = forced.sort(-1).values
    return (forced[..., 0] < 0) | (order[..., 1:] == order[..., :-1]).any(-1)


@torch.no_grad()
def _choice(c, bias, num_groups, top_groups, two):
    """The order of all experts, best first; experts of groups that are not chosen come last."""
    c = c if bias is None else c + bias
    order = c.sort(dim=-1, descending=True, stable=True).indices
    if num_groups == 1:
        return order
    best = torch.unflatten(c, -1, (num_groups, -1)).sort(-1, descending=True).values
    best = best[..., :2].sum(-1) if two else best[..., 0]
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
    closed = torch.ones_like(best, dtype=torch.uint8).scatter(-1, chosen, 0)
    closed = closed.repeat_interleave(c.shape[-1] // num_groups, -1).gather(-1, order)
    return order.gather(-1, closed.sort(dim=-1, stable=True).indices)


def _losses(z, q, ids, token_weights):
    experts = z.shape[-1]
    z, q, ids = z.reshape(-1, experts), q.reshape(-1, experts), ids.reshape(-1, ids.shape[-1])
    v = z.new_ones(len(z)) if token_weights is None else token_weights.reshape(-1).to(z.dtype)
    counts = v[:, None] != 0
    inverse = torch.where(v.sum() != 0, 1 / v.sum(), 0.0)
    chosen = F.one_hot(ids, experts).sum(1).to(z.dtype)
    fraction = (chosen * v[:, None]).sum(0) * inverse
    mean = (torch.where(counts, q, 0.0) * v[:, None]).sum(0) * inverse
    lse = torch.where(counts[:, 0], torch.logsumexp(z, -1), 0.0)
    return experts * (fraction * mean).sum(), (v * lse.square()).sum() * inverse


def _fake(logits, bias, token_weights, top_k, forced, *options):
    *_, weights_dtype, ids_dtype, losses, _, _ = options
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, top_k, dtype=DTYPES[weights_dtype])
    ids = logits.new_empty(tokens, top_k, dtype=DTYPES[ids_dtype])
    sizes = (1, 1, experts + 1) if losses else (0,) * 3
    return weights, ids, *(logits.new_empty(size, dtype=torch.float32) for size in sizes)


def _fake_bwd(dweights, daux, dz, logits, *_):
    return logits.new_empty(logits.shape)


_bwd = raw("route_bwd", _fake_bwd)


def _setup_context(ctx, inputs, output):
    _, ids, aux, z, balance = output
    logits, _, token_weights, _, _, *options = inputs
    *ctx.options, _, _, ctx.losses, _, _ = options  # without dtypes; need_aux is that of all losses
    ctx.save_for_backward(logits, ids, token_weights, balance if ctx.losses else None)
    ctx.mark_non_differentiable(ids, balance, *(() if ctx.losses else (aux, z)))
    ctx.set_materialize_grads(False)


def _backward(ctx, dweights, dids, daux, dz, *_):
    if not ctx.losses:
        daux = dz = None
    if dweights is None and daux is None and dz is None:
        return (None,) * len(_op.names)
    return _bwd(dweights, daux, dz, *ctx.saved_tensors, *ctx.options), *(None,) * (len(_op.names) - 1)


_op = Op(OP, fake=_fake, setup_context=_setup_context, backward=_backward, results=4)


class _Options(NamedTuple):
    """The options of :func:`route` that are no tensors."""

    score: str
    normalize: bool
    num_groups: int
    top_groups: int
    group_score: str
    scale: float
    dtype: torch.dtype | None
    ids_dtype: torch.dtype
    losses: bool


def _check(logits, top_k, options, correction_bias, token_weights, forced):
    score, normalize, num_groups, top_groups, group_score, scale, dtype, ids_dtype, losses = options
    check_float(OP, "logits", logits)
    check(OP, logits.dim() >= 1, "logits must have at least one dimension, got {}", logits.dim())
    experts = logits.shape[-1]
    known = 1 <= experts <= MAX_EXPERTS
    check(OP, known, "logits must have 1 to {} columns, got {}", MAX_EXPERTS, experts)
    check_choice(OP, "score", score, SCORES)
    check_choice(OP, "group_score", group_score, GROUP_SCORES)
    check_integers(OP, top_k=top_k, num_groups=num_groups, top_groups=top_groups)
    check_numbers(OP, scale=scale)
    check_booleans(OP, normalize=normalize, losses=losses)
    check(OP, -math.inf < scale < math.inf, "scale must be finite, got {}", scale)
    divides = num_groups >= 1 and experts % num_groups == 0
    check(OP, divides, "num_groups must divide {}, got {}", experts, num_groups)
    size = experts // num_groups
    among = 1 <= top_groups <= num_groups
    check(OP, among, "top_groups must be in [1, {}], got {}", num_groups, top_groups)
    there = size * top_groups
    text = "top_k must be in [1, {}] ({} groups of {} experts), got {}"
    check(OP, 1 <= top_k <= there, text, there, top_groups, size, top_k)
    fits = group_score == "max" or num_groups == 1 or size >= 2
    check(OP, fits, "group_score must be 'max' for groups of one expert, got {!r}", group_score)
    known = any(dtype is d for d in (None, torch.float32, logits.dtype))
    check(OP, known, "dtype must be None, torch.float32 or {}, got {}", logits.dtype, dtype)
    integers = ids_dtype is torch.int64 or ids_dtype is torch.int32
    check(OP, integers, "ids_dtype must be torch.int64 or torch.int32, got {}", ids_dtype)
    if correction_bias is not None:
        check_float(OP, "correction_bias", correction_bias)
        check_like(OP, "correction_bias", correction_bias, (experts,), logits.device)
        check_stored(OP, "correction_bias", correction_bias)
    if token_weights is not None:
        check(OP, losses, "token_weights must be None without losses, got {}", kind_of(token_weights))
        real = isinstance(token_weights, torch.Tensor) and not token_weights.is_complex()
        check(OP, real, "token_weights must be a tensor of real numbers, got {}", kind_of(token_weights))
        check_layout(OP, "token_weights", token_weights)
        check_like(OP, "token_weights", token_weights, logits.shape[:-1], logits.device)
        check_stored(OP, "token_weights", token_weights)
    if forced is not None:
        whole = isinstance(forced, torch.Tensor) and forced.dtype in _INTEGERS
        check(OP, whole, "ids must be a tensor of integers, got {}", kind_of(forced))
        check_layout(OP, "ids", forced)
        check_like(OP, "ids", forced, (*logits.shape[:-1], top_k), logits.device)
        check_stored(OP, "ids", forced)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    normalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    scale: float = 1.0,
    dtype: torch.dtype | None = torch.float32,
    ids_dtype: torch.dtype = torch.int64,
    losses: bool = False,
    token_weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The experts chosen for each token, their weights, and the losses that balance the experts.

    With ``p = softmax(logits)`` or ``sigmoid(logits)``, a token gets the `top_k` experts with the largest p,
    or with the largest ``p + correction_bias``. Their weights are ``scale * p``; with `normalize` these are
    divided by their sum. A normalized softmax equals the softmax of only the chosen logits, so a model may
    compute the softmax before or after the choice. Models:

    =============================== =========================================================================
    model                           options
    =============================== =========================================================================
    Mixtral, gpt-oss                (gpt-oss: ``dtype=None``)
    Qwen3-MoE, OLMoE                ``normalize=config.norm_topk_prob, dtype=None``
    DeepSeek-V2                     ``normalize=False, num_groups=, top_groups=, scale=``
    DeepSeek-V3, GLM4-MoE           ``score="sigmoid", correction_bias=, num_groups=, top_groups=,
                                    group_score="sum_of_two", scale=``
    Switch, Llama 4 (``top_k=1``)   ``normalize=False`` (Llama 4: ``score="sigmoid"``)
    =============================== =========================================================================

    Args:
        logits: ``[..., E]`` float32, bfloat16 or float16, E from 1 to 1024, any leading strides (rows dense,
            or copied once). float64 runs the eager reference.
        top_k: K, from 1 to the experts of `top_groups` groups.
        score: ``"softmax"`` or ``"sigmoid"``.
        normalize: divide the weights by their sum (``+ 1e-20`` for sigmoid).
        correction_bias: ``[E]`` float, added to p only for the choice; a constant.
        num_groups, top_groups: experts are chosen from the `top_groups` best of `num_groups` groups of
            adjacent experts.
        group_score: the score of a group: ``"max"``, the largest p (+ bias) in it, or ``"sum_of_two"``, the
            sum of its two largest.
        scale: factor of the weights.
        dtype: dtype of the weights: ``torch.float32`` (float64 for float64), or ``None``: that of logits.
        ids_dtype: ``torch.int64`` or ``torch.int32``.
        losses: return ``aux`` and ``z`` too.
        token_weights: ``[...]``, numbers or bool, constant: how much each token counts in the losses, such
            as an attention mask. A token of weight 0 adds nothing to them. ``None``: 1.
        ids: ``[..., K]`` integers of any dtype (int32 and int64 are read in place, others are copied once):
            the experts of each token in this order, as another engine or an earlier pass chose them (routing
            replay). The weights are computed from these logits and have their gradient; the bias and the
            groups are not used. A token keeps its own choice if its first id is negative or if an expert
            occurs twice, as in rows of zeros. `losses` count the given experts.

    Returns:
        ``(weights [..., K], ids [..., K])``, best expert first, contiguous; the ids of one token differ. With
        `losses` also two float32 scalars. ``aux = E * sum_e f_e P_e``, where f_e counts the tokens that chose
        expert e and P_e is the sum of p (sigmoid: of p divided by its sum over the experts), both divided by
        the number of tokens, as in transformers' ``load_balancing_loss_func`` for one layer (perfect balance:
        K). ``z`` is the mean over tokens of ``logsumexp(logits)**2``. Neither is multiplied by its
        coefficient. If no token counts, both are 0. The results are differentiable in logits and bitwise
        deterministic, and the call does not synchronise.

        If two experts are equal, the smaller id comes first (``torch.topk`` guarantees no order). Without
        correction_bias and ``"sum_of_two"`` the logits themselves are compared, so that rounding of p creates
        no ties. NaN counts as the largest value. With softmax a row that contains a NaN has NaN weights. On
        CUDA a row of `ids` that are not experts has NaN weights.

    Raises:
        tigon.Error: shape, dtype, device or an option does not fit; on the CPU also `ids` that are not
            experts.

    Source: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021 (Switch), arXiv:2101.03961, eq. 4 to 6;
    Zoph et al. 2022 (ST-MoE), arXiv:2202.08906, eq. 5; DeepSeek-V2 and V3, arXiv:2405.04434,
    arXiv:2412.19437, eq. 12 to 18; Ma et al. 2025 (routing replay), arXiv:2510.11370.
    """
    forced, options = (
        ids,
        _Options(score, normalize, num_groups, top_groups, group_score, scale, dtype, ids_dtype, losses),
    )
    _check(logits, top_k, options, correction_bias, token_weights, forced)
    if forced is not None and forced.is_cpu and logits.dtype == torch.float64:  # the operator checks others
        wide = forced.to(torch.int64)
        bad = ((wide < 0) | (wide >= logits.shape[-1])).any(-1) & (wide[..., 0] >= 0)
        words = "ids must be in [0, {}), or begin with a negative one, got {}"
        check(OP, not bad.any(), words, logits.shape[-1], wide[bad][:1].tolist())
    if forced is not None and forced.dtype not in (torch.int32, torch.int64):
        forced = forced.to(torch.int32)
    if not has_kernel(OP, logits=logits):
        return reference(
            logits,
            top_k,
            **options._asdict(),
            correction_bias=correction_bias,
            token_weights=token_weights,
            forced=None if forced is None else forced.to(torch.int64),
        )
    lead = logits.shape[:-1]
    bias = None if correction_bias is None else correction_bias.detach().float()
    v = None if token_weights is None else token_weights.detach().reshape(-1).float()
    rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    forced = None if forced is None else forced.reshape(-1, top_k)
    codes = SCORES.index(score), normalize, num_groups, top_groups, GROUP_SCORES.index(group_score)
    dtypes = DTYPES.index(dtype or logits.dtype), DTYPES.index(ids_dtype)
    codes = *codes, float(scale), *dtypes, *(losses,) * 3
    weights, ids, aux, z = _op(rows, bias, v, top_k, forced, *codes)
    if logits.dim() != 2:
        weights, ids = weights.reshape(*lead, top_k), ids.reshape(*lead, top_k)
    return (weights, ids, aux.view(()), z.view(())) if losses else (weights, ids)
