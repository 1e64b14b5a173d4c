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
from transformers.activations import ACT2FN

from tigon.integrations.transformers.canonical import (
    Canonical,
    Unrecognised,
    canonical_forward,
    canonical_function,
    canonical_method,
)


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


def recognise(module, table: tuple[Structure, ...], method: str = "forward") -> Match | str | None:
    """The row of `table` that a method of a module's class is; why it has no expression, or None."""
    try:
        return match(canonical_method(type(module), method), table)
    except Unrecognised as error:
        return str(error)


@functools.cache
def _expression(reference, forward) -> Canonical:
    if not forward:
        return canonical_function(reference)
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


def _normalised_by_group(x, eps, group_size):
    if group_size is not None:
        x = x.reshape(*x.shape[:-1], -1, group_size)
    h = _normalised(x, eps)
    return h.flatten(-2) if group_size is not None else h


def norm_gemma_by_group(self, x):
    h = _normalised_by_group(x.float(), self.eps, self.group_size)
    return (h * (1.0 + self.weight.float())).to(x.dtype)


def norm_weightless(self, x):
    return _normalised(x.float(), self.eps).to(x.dtype)


def norm_late_optional(self, x):
    h = _normalised(x.float(), self.eps)
    if self.with_weight:
        h = h * self.weight.float()
    return h.to(x.dtype)


def norm_t5(self, x):
    h = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        h = h.to(self.weight.dtype)
    return self.weight * h


def norm_llama_mixed(self, x):
    h = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
    return h * self.weight


def norm_shifted(self, x):
    h = _normalised(x.float(), self.eps)
    return (h * (1.0 + self.weight).float()).to(x.dtype)


def norm_rounded_rstd(self, x):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


def norm_torch(self, x):
    return F.rms_norm(x, self.shape, self.weight, self.eps)


def group_norm_torch(self, x):
    return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)


def group_norm_with_rest(self, x, unused=None):
    return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)


def layer_norm_torch(self, x):
    return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def layer_norm_channels(self, x):
    if self.data_format == "channels_first":
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)
    return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def layer_norm_late(self, x):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt(variance + self.eps)
    return (self.weight.float() * h).to(x.dtype)


def layer_norm_weightless(self, x):
    return F.layer_norm(x.float(), self.shape, None, None, eps=1e-5).to(x.dtype)


def layer_norm_shifted(self, x):
    return F.layer_norm(x, self.shape, self.weight + 1.0, self.bias, self.eps)


def norm_gated(self, x, gate):
    h = self.weight * _normalised(x.float(), self.eps).to(x.dtype)
    return (h * ACT2FN[self.activation](gate.float())).to(x.dtype)


def norm_gated_late(self, x, gate=None):
    h = self.weight.float() * _normalised(x.float(), self.eps)
    return (h * ACT2FN[self.activation](gate.float())).to(x.dtype)


def norm_gate_first(self, x, gate=None):
    h = x.float()
    if gate is not None:
        h = h * F.silu(gate.float())
    *leading, columns = h.shape
    groups = columns // self.group_size
    h = _normalised(h.view(*leading, groups, self.group_size), self.eps)
    return self.weight * h.view(*leading, groups * self.group_size).to(x.dtype)


_LATE = {"rounding": "gemma", "offset": 0.0}
NORMS = (
    Structure("llama", norm_llama, {"rounding": "llama", "offset": 0.0}),
    Structure("llama", norm_llama_mixed, {"rounding": "llama", "offset": 0.0}),
    Structure("late", norm_late, _LATE),
    Structure("late", norm_late_fp32, _LATE),
    Structure("gemma", norm_gemma, {"rounding": "gemma", "offset": 1.0}),
    Structure("gemma, by group", norm_gemma_by_group, {"rounding": "gemma", "offset": 1.0}),
    Structure("gemma, 1 + w rounded", norm_shifted, {**_LATE, "shift": 1.0}),
    Structure("weightless", norm_weightless, _LATE),
    Structure("weightless", norm_rounded_rstd, _LATE),
    Structure("late, optional weight", norm_late_optional, _LATE),
    Structure("t5", norm_t5, {"rounding": "t5", "offset": 0.0}),
    Structure("torch", norm_torch, {**_LATE, "autocast": True}),
)
GATED_NORMS = (
    Structure("norm, then gate", norm_gated, {"rounding": "llama"}),
    Structure("norm, then gate, late", norm_gated_late, {"rounding": "gemma"}),
    Structure("gate, then norm by group", norm_gate_first, {"rounding": "llama", "norm_first": False}),
)
GROUP_NORMS = (
    Structure("torch", group_norm_torch, {"autocast": True}),
    Structure("torch", group_norm_with_rest, {"autocast": True}),
)
LAYER_NORMS = (
    Structure("torch", layer_norm_torch, {"autocast": True}),
    Structure("channels first or last", layer_norm_channels, {"autocast": True}),
    Structure("late", layer_norm_late),
    Structure("weightless", layer_norm_weightless, {"eps": 1e-5}),
    Structure("1 + weight", layer_norm_shifted, {"shift": 1.0}),
)
# Classes whose source says more than a form does (here: what autocast casts), and the form they are where
# their numbers are equal to it, with the attributes that play its roles.
DECLARED = {
    "transformers.models.nemotron.modeling_nemotron.NemotronLayerNorm1P": Match(
        LAYER_NORMS[-1], {"shape": "normalized_shape", "weight": "weight", "bias": "bias", "eps": "eps"}
    )
}


# --- MLPs --------------------------------------------------------------------------------------


def glu(self, x):
    return self.down(self.act(self.gate(x)) * self.up(x))


def glu_alone(self, x):
    return self.act(self.gate(x)) * self.up(x)


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


def glu_chunk_up_first(self, x):
    up, gate = self.gate_up(x).chunk(2, dim=-1)
    return self.down(self.act(gate) * up)


def glu_middle(self, x):
    return self.down(self.middle(self.act(self.gate(x)) * self.up(x)))


def glu_chunk_middle(self, x):
    gate, up = self.gate_up(x).chunk(2, dim=-1)
    return self.down(self.middle(self.act(gate) * up))


def glu_dropout(self, x):
    y = self.down(self.act(self.gate(x)) * self.up(x))
    return F.dropout(y, p=self.dropout, training=self.training)


def glu_fp32(self, x):
    gate, up = self.gate(x), self.up(x)
    return self.down((self.act(gate.float()) * up.float()).to(gate.dtype))


def glu_clamped(self, x):
    gate, up = self.gate(x).clamp(max=self.limit), self.up(x).clamp(min=-self.limit, max=self.limit)
    return self.down(self.act(gate) * up)


def glu_clamped_after(self, x):
    gate = self.act(self.gate(x)).clamp(max=self.limit)
    return self.down(gate * self.up(x).clamp(min=-self.limit, max=self.limit))


def glu_merger(self, x):
    x = self.before2(self.before1(self.before0(x)))
    return self.down(self.act(self.gate(x)) * self.up(x))


def glu_clamped_merger(self, x):
    x = self.before2(self.before1(self.before0(x)))
    gate, up = self.gate(x).clamp(max=self.limit), self.up(x).clamp(min=-self.limit, max=self.limit)
    return self.down(self.act(gate) * up)


def glu_projector(self, x):
    up, gate = self.gate_up(self.before0(x)).chunk(2, dim=-1)
    return self.down(self.act(gate) * up)


def glu_projector_norm(self, x):
    up, gate = self.gate_up(self.before1(self.before0(x))).chunk(2, dim=-1)
    return self.down(self.act(gate) * up)


def glu_middle_cast(self, x):
    y = self.middle(self.act(self.gate(x)) * self.up(x))
    if (
        isinstance(self.down.weight, torch.Tensor)
        and y.dtype != self.down.weight.dtype
        and self.down.weight.dtype != torch.int8
    ):
        y = y.to(self.down.weight.dtype)
    return self.down(y)


def glu_by_layer(self, x, layer=None):
    x = self.gate_up(x) if layer is None else self.gate_up(x, layer)
    batch, tokens, _ = x.shape
    x = x.view(batch, tokens, 2, -1)
    x = self.act(x[..., 0, :]) * x[..., 1, :]
    return self.down(x) if layer is None else self.down(x, layer)


_UP_FIRST = {"up_first": True}
MLPS = (
    Structure("gate, up, down", glu),
    Structure("gate, up, down", glu_inline),
    Structure("gate, up", glu_alone),
    Structure("gate_up, down", glu_chunk),
    Structure("gate, up, down, multipliers", glu_multipliers),
    Structure("up, down", ungated),
    Structure("gate_up, down, up first", glu_chunk_up_first, _UP_FIRST),
    Structure("gate_up, down, up first", glu_projector, _UP_FIRST),
    Structure("gate_up, down, up first", glu_projector_norm, _UP_FIRST),
    Structure("gate, up, middle, down", glu_middle),
    Structure("gate_up, middle, down", glu_chunk_middle),
    Structure("gate, up, middle, down, cast", glu_middle_cast, {"cast": True}),
    Structure("gate_up, down, by layer", glu_by_layer),
    Structure("gate, up, down, dropout", glu_dropout),
    Structure("gate, up, down, fp32", glu_fp32),
    Structure("gate, up, down, clamped", glu_clamped),
    Structure("gate, up, down, clamped", glu_clamped_merger),
    Structure("gate, up, down, clamped", glu_clamped_after, {"clamp_after": True}),
    Structure("gate, up, down", glu_merger),
)

# --- experts -----------------------------------------------------------------------------------


def gate_default(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act(gate) * up


def gate_oai(self, gate_up):
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def gate_clamped(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return self.act(gate) * up


def gate_clamped_after(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    gate = self.act(gate).clamp(max=self.limit)
    return gate * up.clamp(min=-self.limit, max=self.limit)


def gate_fp32(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return (self.act(gate.float()) * up.float()).to(gate_up.dtype)


def gate_fp32_of_half(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return (self.act(gate.float()) * up.float()).to(gate.dtype)


def gate_clamped_silu(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return F.silu(gate) * up


def gate_oai_halves(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


EXPERT_GATES = (
    Structure("experts, clamped", gate_clamped),
    Structure("experts, clamped", gate_clamped_after, {"clamp_after": True}),
    Structure("experts, clamped", gate_clamped_silu, {"activation": "silu"}),
    Structure("experts, fp32", gate_fp32),
    Structure("experts, fp32", gate_fp32_of_half),
    Structure("experts", gate_default),
    Structure("experts", gate_oai),
    Structure("experts, halves", gate_oai_halves, {"halves": True}),
)


def experts_batched(self, x):
    x = x.view(self.gate_up.shape[0], -1, self.size)
    gate, up = torch.bmm(x, self.gate_up).chunk(2, dim=-1)
    return torch.bmm(up * self.act(gate), self.down).view(-1, self.size)


BATCHED_EXPERTS = (Structure("batched experts", experts_batched),)
