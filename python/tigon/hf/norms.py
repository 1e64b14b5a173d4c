"""RMS norms -> tigon.rms_norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tigon.hf.canonical import NoSource, Unrecognised, canonical_forward
from tigon.hf.forward import blocked, plain, stock
from tigon.hf.probe import probe_norm
from tigon.hf.structures import NORMS, Match, Structure, match
from tigon.ops.rms_norm import rms_norm

# torch.nn.RMSNorm calls one torch function: fp32 inside, rounded once, result promoted.
TORCH_NORM = Match(
    Structure("torch", nn.RMSNorm.forward, {"rounding": "none", "offset": 0.0}),
    {"weight": "weight", "eps": "eps"},
)


@dataclass(frozen=True)
class NormSpec:
    """Attribute names and rounding policy of one norm."""

    weight: str | None
    eps: str
    rounding: str
    offset: float


def norm_forward(module: nn.Module, spec: NormSpec, x):
    """Forward of a recognised norm."""
    weight = None if spec.weight is None else getattr(module, spec.weight)
    if not plain(x) or not (weight is None or plain(weight)):
        return stock(module, x)
    eps = getattr(module, spec.eps)
    return rms_norm(x, weight, eps, offset=spec.offset, rounding=spec.rounding)


def plan_norm(module: nn.Module) -> tuple[NormSpec, str] | str | None:
    """(spec, what it is), or why a norm is left, or None where there is no norm."""
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        return f"{type(module).__name__} has no replacement yet"
    if next(module.children(), None) is not None:
        return None
    found = TORCH_NORM if type(module) is nn.RMSNorm else recognise(module)
    if isinstance(found, str):  # the name only decides whether it is worth a line in the report
        names = (base.__name__.lower() for base in type(module).__mro__)
        return found if any("norm" in name for name in names) else None
    reason = blocked(module)
    if reason is not None:
        return reason
    if type(module) is nn.RMSNorm and len(module.normalized_shape) != 1:
        return f"normalises over {len(module.normalized_shape)} axes"
    roles, options = found.roles, found.structure.options
    eps, weight = getattr(module, roles["eps"], None), roles.get("weight")
    if not isinstance(eps, float):
        return f"{roles['eps']} is {eps!r}, not a number"
    if "with_weight" in roles and not getattr(module, roles["with_weight"]):
        weight = None
    return NormSpec(weight, roles["eps"], **options), f"tigon.rms_norm ({found.structure.name})"


def recognise(module: nn.Module) -> Match | str:
    """The structure of a norm; text when it looks like a norm and is in no row of the table."""
    try:
        expression = canonical_forward(type(module))
    except NoSource:
        return probe_norm(module) or "no source, and equal to no known norm in numbers"
    except Unrecognised as error:
        return f"unrecognised forward: {error}"
    return match(expression, NORMS) or f"unrecognised forward: {expression.text}"
