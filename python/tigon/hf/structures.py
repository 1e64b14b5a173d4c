"""The table of recognised structures: each is the function itself, written as models write it.

A module or function is recognised when its canonical expression (`canonical.py`) equals that of a
reference below, never by its name. The attribute names of the references are roles: the match
says which attribute of the real module plays each. The references also serve the numeric probe of
functions that have no source. To add a structure, write its reference and one row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tigon.hf.canonical import Canonical, canonical_function


@dataclass(frozen=True)
class Structure:
    """One recognised form: reference function and what the replacement needs to know."""

    name: str
    reference: object
    options: dict = field(default_factory=dict)
    forward: bool = True  # a module's forward (first parameter is self) or a plain function


@dataclass(frozen=True)
class Match:
    """A structure and the attributes that play its roles."""

    structure: Structure
    roles: dict


def match(found: Canonical, table: tuple[Structure, ...]) -> Match | None:
    """The row of `table` whose reference has the expression `found`, or None."""
    for structure in table:
        wanted = _expression(structure.reference, structure.forward)
        if wanted.text == found.text:
            roles = zip(wanted.attributes, found.attributes, strict=True)
            return Match(structure, dict(roles))
    return None


@functools.cache
def _expression(reference, forward) -> Canonical:
    if not forward:
        return canonical_function(reference)
    from tigon.hf.canonical import canonical_forward

    return canonical_forward(type("Reference", (), {"forward": reference}))


# --- norms -----------------------------------------------------------------------------------


def _normalised(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def norm_llama(self, x):
    h = _normalised(x.float(), self.eps)
    return self.weight * h.to(x.dtype)


def norm_late(self, x):
    h = _normalised(x.float(), self.eps)
    return (self.weight * h).to(x.dtype)


def norm_late_fp32(self, x):
    h = _normalised(x.float(), self.eps)
    return (self.weight.float() * h).to(x.dtype)


def norm_gemma(self, x):
    h = _normalised(x.float(), self.eps)
    return (h * (1.0 + self.weight.float())).to(x.dtype)


def norm_weightless(self, x):
    return _normalised(x.float(), self.eps).to(x.dtype)


def norm_late_optional(self, x):
    h = _normalised(x.float(), self.eps)
    if self.with_weight:
        h = h * self.weight.float()
    return h.to(x.dtype)


NORMS = (
    Structure("llama", norm_llama, {"rounding": "llama", "offset": 0.0}),
    Structure("late", norm_late, {"rounding": "gemma", "offset": 0.0}),
    Structure("late", norm_late_fp32, {"rounding": "gemma", "offset": 0.0}),
    Structure("gemma", norm_gemma, {"rounding": "gemma", "offset": 1.0}),
    Structure("weightless", norm_weightless, {"rounding": "gemma", "offset": 0.0}),
    Structure("late, optional weight", norm_late_optional, {"rounding": "gemma", "offset": 0.0}),
)


# --- MLPs --------------------------------------------------------------------------------------


def glu(self, x):
    return self.down(self.act(self.gate(x)) * self.up(x))


def glu_inline(self, x):
    return self.down(F.silu(self.gate(x)) * self.up(x))


def glu_chunk(self, x):
    gate, up = self.gate_up(x).chunk(2, dim=-1)
    return self.down(self.act(gate) * up)


def glu_multipliers(self, x):
    product = self.up(x) * self.act(self.gate(x) * self.gate_multiplier)
    return self.down(product) * self.down_multiplier


def ungated(self, x):
    return self.down(self.act(self.up(x)))


MLPS = (
    Structure("gate, up, down", glu),
    Structure("gate, up, down", glu_inline),
    Structure("gate_up, down", glu_chunk),
    Structure("gate, up, down, multipliers", glu_multipliers),
    Structure("up, down", ungated),
)

# Activations are told apart by their values (mlp.py): most hide behind functools.partial or a method.
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}
