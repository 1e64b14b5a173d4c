"""Routers of experts -> tigon.route, recognised by their source; the matmul before it stays PyTorch's.

Outputs are those of the class: logits, weights and ids, in its dtypes, so that hooks, and the auxiliary loss
that models compute from the logits, see what they know. Ids come best first, of equal experts the smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tigon._dtensor import KERNEL_DTYPES
from tigon.error import check, refuse
from tigon.integrations.transformers.forward import autocast_dtype, blocked, plain, read, stock
from tigon.integrations.transformers.patterns.routers import ROUTERS
from tigon.integrations.transformers.recognition import Match, recognise
from tigon.ops.arguments import kind_of
from tigon.ops.route import MAX_EXPERTS, route

ROUTED = "_tigon_routed"  # attribute of a router with its part of a context of ``routing.py``


@dataclass(frozen=True)
class RouterSpec:
    """The formula of a router, and names of the module's attributes; ``None`` if it has none."""

    weight: str
    top_k: str
    hidden: str | None = None
    bias: str | None = None
    normalize: str | bool = True
    correction: str | None = None
    scale: str | float = 1.0
    num_experts: str | None = None
    num_groups: str | None = None
    top_groups: str | None = None
    method: str | None = None
    score: str = "softmax"
    group_score: str = "max"
    product: str = "storage"  # dtype of hidden in the matmul: its own, the weight's, or float32 for both
    wide_logits: bool = False  # logits in float32 after the matmul
    out: str = "float32"  # dtype of the weights: float32, or that of logits or hidden
    autocast: bool = True  # whether under autocast the class computes the same


class Routed:
    """The part of one router in the context: the rows that it replays, or the place where it records."""

    def __init__(self, context, layer: int) -> None:
        self.context, self.layer, self.open, self.used = context, layer, True, False

    def __reduce__(self):
        return type(None), ()  # a copy of the model is outside of the context


def routed(module: nn.Module) -> Routed | None:
    """The part that a call of this router has in a context, or None.

    Raises:
        tigon.Error: a layer is computed again in the backward, and what it replayed in the forward has ended.
    """
    part = module.__dict__.get(ROUTED)
    if part is None or part.open:
        return part
    again = torch._C._current_graph_task_id() != -1
    if not again:  # a forward of its own: the context is forgotten
        del module.__dict__[ROUTED]
        return None
    words = (
        "the context must stay open until the backward has ended: a layer whose experts were replayed is "
        "computed again, got a context that has ended"
    )
    check(part.context.op, not part.used, words)
    return None


def router_forward(module: nn.Module, spec: RouterSpec, hidden, *given):
    """Run a recognised router; `given` is a correction bias that is an argument."""
    weight, bias, correction, scale, top_k = read(
        module, spec.weight, spec.bias, spec.correction or (*given, None)[0], spec.scale, spec.top_k
    )
    tensors = [t for t in (hidden, weight, bias, correction) if t is not None]
    part = routed(module)
    if not (plain(*tensors) and _fits(spec, hidden, weight)):
        if part is not None:
            words = "router must run tigon.route, got {} of {} and a weight of {}"
            refuse(part.context.op, words, kind_of(hidden), hidden.dtype, weight.dtype)
        return stock(module, hidden, *given)
    x = hidden if spec.hidden is None else hidden.reshape(-1, getattr(module, spec.hidden))
    if spec.product == "float32":
        x, weight = x.float(), weight.float()
    elif spec.product == "weight":
        x = x.to(weight.dtype)
    logits = F.linear(x, weight, bias)
    if spec.wide_logits:
        logits = logits.float()
    num_groups, top_groups = _groups(module, spec)
    weights, ids = route(
        logits,
        top_k,
        score=spec.score,
        normalize=bool(*read(module, spec.normalize)),
        correction_bias=correction,
        num_groups=num_groups,
        top_groups=top_groups,
        scale=scale,
        group_score=spec.group_score,
        dtype=None if spec.out == "logits" else torch.float32,
        ids=None if part is None else part.context.given(part, logits),
    )
    if part is not None:
        part.context.chosen(part, ids)
    return logits, weights.to(hidden.dtype) if spec.out == "hidden" else weights, ids


def _fits(spec, hidden, weight) -> bool:
    """Whether the op takes these tensors and the class computes in their dtypes."""
    known = hidden.dtype in KERNEL_DTYPES and weight.dtype in KERNEL_DTYPES
    same = spec.autocast or autocast_dtype(hidden.device.type) is None
    return known and same and (spec.hidden is not None or hidden.ndim == 2)


def _groups(module, spec) -> tuple[int, int]:
    """(groups of experts, how many of them a token may use)."""
    method, num_groups, top_groups = read(module, spec.method, spec.num_groups, spec.top_groups)
    return (1, 1) if num_groups is None or method == "greedy" else (num_groups, top_groups)


def plan_router(module: nn.Module) -> tuple | str | None:
    """Plan a router: (spec, op), why it is left, or None for a module of another kind."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None or "topk" not in code.co_names:
        return None
    match = recognise(module, ROUTERS)
    if not isinstance(match, Match):
        return None
    spec = RouterSpec(**match.structure.options, **match.roles)
    if getattr(module, spec.top_k) is None:  # a configuration without it, with which no forward runs
        return None
    return blocked(module) or _refused(module, spec) or (spec, f"tigon.route ({match.structure.name})")


def _refused(module, spec) -> str | None:
    """The reason why the op does not take the numbers of this instance, or None."""
    weight, top_k, method, number = read(module, spec.weight, spec.top_k, spec.method, spec.num_experts)
    experts = len(weight)
    if experts > MAX_EXPERTS:
        return f"more than {MAX_EXPERTS} experts"
    if spec.method is not None and method not in ("greedy", "group_limited_greedy"):
        return f"an unknown way to choose: {method!r}"
    if spec.num_experts is not None and number != experts:
        return "its number of experts is not that of its weight"
    groups, chosen = _groups(module, spec)
    integers = all(isinstance(n, int) for n in (groups, chosen, top_k))
    if not integers or not 1 <= chosen <= groups or experts % groups or top_k > experts // groups * chosen:
        return f"{top_k} of {experts} experts in {chosen} of {groups} groups"
    if spec.group_score != "max" and experts // groups < 2:
        return "groups of one expert"
    return None
