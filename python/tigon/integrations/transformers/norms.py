"""Norms -> tigon.rms_norm, layer_norm, gated_rms_norm and group_norm."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from tigon._dtensor import rows_stay_local
from tigon.integrations.transformers.canonical import NoSource, Unrecognised, canonical_forward
from tigon.integrations.transformers.forward import blocked, plain, read, stock
from tigon.integrations.transformers.patterns.modules import (
    DECLARED,
    GATED_NORMS,
    GROUP_NORMS,
    LAYER_NORMS,
    NORMS,
    Match,
    match,
)
from tigon.integrations.transformers.probe import equals, probe_norm
from tigon.ops.gated_rms_norm import gated_rms_norm
from tigon.ops.group_norm import group_norm
from tigon.ops.layer_norm import layer_norm
from tigon.ops.rms_norm import rms_norm


@dataclass(frozen=True)
class NormSpec:
    """Attribute names and arithmetic of one norm."""

    op: str = "rms_norm"
    weight: str | None = None
    bias: str | None = None
    eps: str | float = 0.0  # the attribute, or the number where the source says one
    rounding: str = "llama"
    offset: float = 0.0
    shift: float = 0.0  # added to the weight in its own dtype
    autocast: bool = False  # a torch function that CUDA's autocast runs in fp32
    channels_first: bool = False
    activation: str = "silu"  # of a gate
    group_size: str | None = None  # attribute; its value may be None
    norm_first: bool = True
    groups: str | None = None


def norm_forward(module: nn.Module, spec: NormSpec, *args):
    return _FORWARDS[spec.op](module, spec, *args)


def _plain(*parts) -> bool:
    return all(part is None or plain(part) for part in parts)


def _rms(module, spec, x):
    weight, eps, size = read(module, spec.weight, spec.eps, spec.group_size)
    rounding = spec.rounding
    if rounding == "t5":  # rounds to the weight's dtype when that is a half
        rounding = "llama" if weight.dtype == x.dtype else "none"
        if rounding == "none" and weight.dtype != torch.float32:
            return stock(module, x)
    if not (_plain(x, weight) or (spec.group_size is None and rows_stay_local(x, weight))):
        return stock(module, x)
    if spec.shift:
        weight = weight + spec.shift
    if size is not None:  # a weight for every group: behind the norm, in float32
        groups = x.float().unflatten(-1, (-1, size))
        h = rms_norm(groups, None, eps, rounding="none").flatten(-2)
        return (h * (spec.offset + weight.float())).to(x.dtype)
    return rms_norm(_wide(x, spec), weight, eps, offset=spec.offset, rounding=rounding)


def _layer(module, spec, x):
    weight, bias, eps = read(module, spec.weight, spec.bias, spec.eps)
    if not (_plain(x, weight, bias) or (not spec.channels_first and rows_stay_local(x, weight, bias))):
        return stock(module, x)
    if spec.shift:
        if torch.is_autocast_enabled():  # Nemotron casts weights and all
            return stock(module, x)
        weight = weight + spec.shift
    if spec.channels_first:
        x = x.permute(0, 2, 3, 1)
    y = layer_norm(_wide(x, spec), weight, bias, eps)
    return y.permute(0, 3, 1, 2) if spec.channels_first else y


def _gated(module, spec, x, gate=None):
    weight, eps, size = read(module, spec.weight, spec.eps, spec.group_size)
    if gate is None or gate.dtype != x.dtype or not plain(x, gate, weight):
        return stock(module, x, gate)
    return gated_rms_norm(
        x, gate, weight, eps, norm_before_gate=spec.norm_first, group_size=size, activation=spec.activation,
        rounding=spec.rounding,
    )  # fmt: skip


def _group(module, spec, x, *unused):
    groups, weight, bias, eps = read(module, spec.groups, spec.weight, spec.bias, spec.eps)
    if not _plain(x, weight, bias):
        return stock(module, x, *unused)
    return group_norm(_wide(x, spec), groups, weight, bias, eps)


_TABLES = {
    "rms_norm": NORMS,
    "layer_norm": LAYER_NORMS,
    "gated_rms_norm": GATED_NORMS,
    "group_norm": GROUP_NORMS,
}
_FORWARDS = {"rms_norm": _rms, "layer_norm": _layer, "gated_rms_norm": _gated, "group_norm": _group}
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def _wide(x, spec):
    """What the torch function would be given under autocast; on the CPU it leaves norms alone."""
    return x.float() if spec.autocast and x.is_cuda and torch.is_autocast_enabled("cuda") else x


def plan_norm(module: nn.Module) -> tuple | str | None:
    if next(module.children(), None) is not None:
        return None
    found = recognise(module)
    if isinstance(found, str):  # the name only decides whether it is worth a line in the report
        return found if _called_norm(module) else None
    structure = found.structure
    op = next(op for op, rows in _TABLES.items() if structure in rows)
    reason = blocked(module) or _unfit(module, found.roles)
    if reason is not None:
        return reason
    roles, options = dict(found.roles), dict(structure.options)
    roles.pop("shape", None)
    if getattr(module, roles.pop("with_weight", ""), True) is False:
        roles["weight"] = None
    if "data_format" in roles:
        options["channels_first"] = getattr(module, roles.pop("data_format")) == "channels_first"
    if "activation" in roles:
        options["activation"] = GATES[getattr(module, roles.pop("activation"))]
    return NormSpec(op, **{**options, **roles}), f"tigon.{op} ({structure.name})"


def _unfit(module: nn.Module, roles: dict) -> str | None:
    """Why a recognised norm is not one the ops compute, or None."""
    if "eps" in roles and not isinstance(getattr(module, roles["eps"], None), float):
        return f"{roles['eps']} is {getattr(module, roles['eps'], None)!r}, not a number"
    if "shape" in roles and len(getattr(module, roles["shape"])) != 1:
        return f"normalises over {len(getattr(module, roles['shape']))} axes"
    if "activation" in roles and getattr(module, roles["activation"]) not in GATES:
        return f"its gate is {getattr(module, roles['activation'])!r}"
    weight = getattr(module, roles.get("weight", ""), None)
    if weight is not None and weight.ndim != 1:
        return f"its weight has {weight.ndim} axes, one for every head"
    return None


def _called_norm(module: nn.Module) -> bool:
    """Whether a name of its class says norm; batch statistics are another thing."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    return any("norm" in base.__name__.lower() for base in type(module).__mro__)


def recognise(module: nn.Module) -> Match | str:
    """The structure of a norm; text when it looks like a norm and is in no row of the table."""
    try:
        expression = canonical_forward(type(module))
    except NoSource:
        return probe_norm(module) or "no source, and equal to no known norm in numbers"
    except Unrecognised as error:
        declared = DECLARED.get(f"{type(module).__module__}.{type(module).__qualname__}")
        if declared is not None and equals(module, declared):
            return declared
        return f"unrecognised forward: {error}"
    found = match(expression, tuple(itertools.chain(*_TABLES.values())))
    return found or f"unrecognised forward: {expression.text}"
