"""Norms -> tigon.rms_norm, layer_norm, gated_rms_norm and group_norm."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import nn

from tigon._dtensor import PLAIN, rows_stay_local
from tigon.integrations.transformers.canonical import NoSource, Unrecognised, canonical
from tigon.integrations.transformers.forward import blocked, plain, read, stock
from tigon.integrations.transformers.patterns.norms import (
    DECLARED,
    FACTORS,
    GATED_NORMS,
    GROUP_NORMS,
    LAYER_NORMS,
    NORMS,
)
from tigon.integrations.transformers.recognition import Match, Structure, equals, match, probe_norm
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
    eps: str | float = 0.0  # the attribute (see `eps_of`), or the number if the source has one
    rounding: str = "llama"
    offset: float = 0.0
    shift: str | float = 0.0  # added to the weight in its own dtype; an attribute says whether one is
    unit: bool = False  # rows of length one, not of mean square one
    autocast: bool = False  # a torch function that CUDA's autocast runs in fp32
    channels_first: bool = False
    activation: str = "silu"  # of a gate
    group_size: str | None = None  # attribute; its value may be None
    norm_first: bool = True
    groups: str | None = None
    decided: tuple = ()  # names and values of attributes by which the rest was chosen
    simple: bool = field(init=False)  # over whole rows, with the weight as it is

    def __post_init__(self):
        known = self.op == "rms_norm" and self.rounding in ("llama", "gemma", "none")
        other = self.shift or self.unit or self.autocast or self.group_size
        object.__setattr__(self, "simple", bool(known and not other))


def norm_forward(module: nn.Module, spec: NormSpec, *args):
    """Run a recognised norm; tensors that the op does not take run the original forward."""
    if spec.simple and not spec.decided and len(args) == 1 and type(args[0]) in PLAIN:
        weight, eps = read(module, spec.weight, spec.eps)
        if (weight is None or type(weight) in PLAIN) and eps is not None:
            return rms_norm(args[0], weight, eps, offset=spec.offset, rounding=spec.rounding)
    for name, value in spec.decided:
        if getattr(module, name) != value:
            return stock(module, *args)
    return _FORWARDS[spec.op](module, spec, *args)


def eps_of(module: nn.Module, spec: NormSpec, x: torch.Tensor) -> float:
    """The module's eps; if torch chooses it, that of the dtype in which rms_norm computes."""
    (eps,) = read(module, spec.eps)
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps


def _plain(*parts) -> bool:
    return all(part is None or plain(part) for part in parts)


def _rms(module, spec, x):
    weight, size, shift = read(module, spec.weight, spec.group_size, spec.shift)
    eps, rounding = eps_of(module, spec, x), spec.rounding
    if rounding == "t5":  # rounds to the weight's dtype when that is a half
        rounding = "llama" if weight.dtype == x.dtype else "none"
        if rounding == "none" and weight.dtype != torch.float32:
            return stock(module, x)
    local = spec.group_size is None and not spec.unit and rows_stay_local(x, weight)
    if not (_plain(x, weight) or local):
        return stock(module, x)
    if shift:
        weight = weight + float(shift)
    if spec.unit:  # a sum of squares is the mean times the columns
        columns = x.shape[-1]
        weight = x.new_full((columns,), columns**-0.5, dtype=torch.promote_types(x.dtype, torch.float32))
        eps = eps / columns
    if size is not None:  # a weight for every group: behind the norm, in float32
        groups = torch.unflatten(x.float(), -1, (-1, size))
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
        x,
        gate,
        weight,
        eps,
        norm_before_gate=spec.norm_first,
        group_size=size,
        activation=spec.activation,
        rounding=spec.rounding,
    )


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
    None: FACTORS,
}
_FORWARDS = {"rms_norm": _rms, "layer_norm": _layer, "gated_rms_norm": _gated, "group_norm": _group}
_DECIDING = ("with_weight", "data_format", "activation")
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def _wide(x, spec):
    """The input as the torch function gets it under autocast, which does not change norms on the CPU."""
    return x.float() if spec.autocast and x.is_cuda and torch.is_autocast_enabled("cuda") else x


def plan_norm(module: nn.Module) -> tuple | str | None:
    """Plan a norm: (spec, op), why it is left, or None for a module of another kind."""
    if next(module.children(), None) is not None:
        return None
    found = recognise(module)
    if isinstance(found, str):  # the name only decides whether it is worth a line in the report
        return found if _called_norm(module) else None
    structure = found.structure
    op = next(op for op, rows in _TABLES.items() if structure in rows)
    if op is None:
        return None
    reason = blocked(module) or _unfit(module, structure, found.roles)
    if reason is not None:
        return reason
    roles, options = dict(found.roles), dict(structure.options)
    deciding = [roles[role] for role in _DECIDING if role in roles]
    options["decided"] = tuple((name, getattr(module, name)) for name in deciding)
    for checked in ("shape", "axis"):
        roles.pop(checked, None)
    if getattr(module, roles.pop("with_weight", ""), True) is False:
        roles["weight"] = None
    if "data_format" in roles:
        options["channels_first"] = getattr(module, roles.pop("data_format")) == "channels_first"
    if "unit_offset" in roles:
        options["shift"] = roles.pop("unit_offset")
    if "activation" in roles:
        options["activation"] = GATES[getattr(module, roles.pop("activation"))]
    return NormSpec(op, **{**options, **roles}), f"tigon.{op} ({structure.name})"


def _unfit(module: nn.Module, structure: Structure, roles: dict) -> str | None:
    """Why a recognised norm is not one the ops compute, or None."""
    eps = getattr(module, roles.get("eps", ""), None)
    torchs = eps is None and structure in NORMS and "shape" in roles  # torch's rms_norm knows one itself
    if "eps" in roles and not (torchs or isinstance(eps, float)):
        return f"{roles['eps']} is {eps!r}, not a number: set it to a float"
    if "axis" in roles and getattr(module, roles["axis"]) != -1:
        return f"normalises over axis {getattr(module, roles['axis'])}, not over the last one (-1)"
    if "shape" in roles and len(getattr(module, roles["shape"])) != 1:
        return f"normalises over {len(getattr(module, roles['shape']))} axes"
    if "activation" in roles and getattr(module, roles["activation"]) not in GATES:
        return f"its gate is {getattr(module, roles['activation'])!r}"
    weight = getattr(module, roles.get("weight", ""), None)
    if weight is not None and weight.ndim != 1:
        return f"its weight has {weight.ndim} axes, one for every head"
    return None


def _called_norm(module: nn.Module) -> bool:
    """Whether the name of a class says norm; norms of batches and of weights are other operations."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    names = [base.__name__.lower() for base in type(module).__mro__]
    other = type(module).__module__.startswith("torch.nn.utils.") or any("batchnorm" in n for n in names)
    return not other and any("norm" in name for name in names)


def recognise(module: nn.Module) -> Match | str:
    """The structure of a norm; text when it looks like a norm and is in no row of the table."""
    try:
        expression = canonical(type(module).forward, type(module))
    except NoSource:
        return probe_norm(module, NORMS) or "no source, and equal to no known norm in numbers"
    except Unrecognised as error:
        declared = DECLARED.get(f"{type(module).__module__}.{type(module).__qualname__}")
        if declared is not None and equals(module, declared):
            return declared
        return f"unrecognised forward: {error}"
    found = match(expression, tuple(itertools.chain(*_TABLES.values())))
    return found or f"unrecognised forward: {expression.text}"
