"""Routers of experts -> tigon.route, recognised by their source; the product before it stays PyTorch's.

Outputs are those of the class: logits, weights and ids, in its dtypes, so that hooks, and the auxiliary loss
that models compute from the logits, see what they know. Ids come best first, of equal experts the smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tigon.integrations.transformers.forward import autocast_dtype, blocked, plain, stock
from tigon.integrations.transformers.patterns.modules import Match, recognise
from tigon.integrations.transformers.patterns.routers import ROUTERS
from tigon.ops.route import MAX_EXPERTS, route

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RouterSpec:
    """How a router computes, and attribute names of the module; ``None``: it has none."""

    weight: str
    top_k: str
    hidden: str | None = None
    bias: str | None = None
    normalize: str | None = None
    correction: str | None = None
    scale: str | None = None
    num_experts: str | None = None
    num_groups: str | None = None
    top_groups: str | None = None
    method: str | None = None
    score: str = "softmax"
    group_score: str = "max"
    normalized: bool = True  # where no attribute says
    product: str = "storage"  # dtype of hidden in it: its own, that of the weight, or float32 for both
    wide_logits: bool = False  # logits in float32 after the product
    out: str = "float32"  # dtype of the weights: float32, or that of logits or hidden
    autocast: bool = True  # whether under autocast the class computes the same


def router_forward(module: nn.Module, spec: RouterSpec, hidden, *given):
    """Forward of a recognised router; `given` is a correction bias that is an argument."""
    weight = getattr(module, spec.weight)
    bias = None if spec.bias is None else getattr(module, spec.bias)
    correction = getattr(module, spec.correction) if spec.correction else given[0] if given else None
    tensors = [t for t in (hidden, weight, bias, correction) if t is not None]
    if not (plain(*tensors) and _fits(module, spec, hidden, weight)):
        return stock(module, hidden, *given)
    x = hidden if spec.hidden is None else hidden.reshape(-1, getattr(module, spec.hidden))
    if spec.product == "float32":
        x, weight = x.float(), weight.float()
    elif spec.product == "weight":
        x = x.to(weight.dtype)
    logits = F.linear(x, weight, bias)
    if spec.wide_logits:
        logits = logits.float()
    groups = _groups(module, spec)
    weights, ids = route(
        logits, getattr(module, spec.top_k), score=spec.score, normalize=_normalize(module, spec),
        correction_bias=correction, num_groups=groups[0], top_groups=groups[1], group_score=spec.group_score,
        scale=1.0 if spec.scale is None else getattr(module, spec.scale),
        dtype=None if spec.out == "logits" else torch.float32,
    )  # fmt: skip
    return logits, weights.to(hidden.dtype) if spec.out == "hidden" else weights, ids


def _fits(module, spec, hidden, weight) -> bool:
    """Whether the op takes these tensors and the class computes in their dtypes."""
    return (
        hidden.dtype in _DTYPES
        and weight.dtype in _DTYPES
        and (spec.hidden is not None or hidden.ndim == 2)
        and (spec.autocast or autocast_dtype(hidden.device.type) is None)
    )


def _normalize(module, spec) -> bool:
    return spec.normalized if spec.normalize is None else bool(getattr(module, spec.normalize))


def _groups(module, spec) -> tuple[int, int]:
    """(groups of experts, how many of them a token may use)."""
    if spec.num_groups is None or (spec.method is not None and getattr(module, spec.method) == "greedy"):
        return 1, 1
    return getattr(module, spec.num_groups), getattr(module, spec.top_groups)


def plan_router(module: nn.Module) -> tuple | str | None:
    code = getattr(type(module).forward, "__code__", None)
    if code is None or "topk" not in code.co_names:
        return None
    found = recognise(module, ROUTERS)
    if not isinstance(found, Match):
        return None
    spec = RouterSpec(**found.structure.options, **found.roles)
    if getattr(module, spec.top_k) is None:  # a configuration without it, with which no forward runs
        return None
    return blocked(module) or _refused(module, spec) or (spec, f"tigon.route ({found.structure.name})")


def _refused(module, spec) -> str | None:
    """What the op does not take of this instance's numbers."""
    experts, top_k = len(getattr(module, spec.weight)), getattr(module, spec.top_k)
    if experts > MAX_EXPERTS:
        return f"more than {MAX_EXPERTS} experts"
    methods = ("greedy", "group_limited_greedy")
    if spec.method is not None and getattr(module, spec.method) not in methods:
        return f"an unknown way to choose: {getattr(module, spec.method)!r}"
    if spec.num_experts is not None and getattr(module, spec.num_experts) != experts:
        return "its number of experts is not that of its weight"
    groups, chosen = _groups(module, spec)
    integers = all(isinstance(n, int) for n in (groups, chosen, top_k))
    if not integers or not 1 <= chosen <= groups or experts % groups or top_k > experts // groups * chosen:
        return f"{top_k} of {experts} experts in {chosen} of {groups} groups"
    if spec.group_score != "max" and experts // groups < 2:
        return "groups of one expert"
    return None
