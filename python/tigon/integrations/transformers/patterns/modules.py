"""The tables of recognised structures: each row is the function itself, written as models write it.

A module or function is recognised when its canonical expression (`canonical.py`) equals that of a row, never
by its name. The attribute names of a row are roles: the match says which attribute of the real module plays
each. Rows also serve the numeric probe of functions that have no source. To add a structure, write its row:
a name, its statements, of which the last is what it returns, and what the replacement needs to know. A
canonical expression sees through functions, so that what several rows share stands in one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN  # noqa: F401  in the text of rows

from tigon.integrations.transformers.canonical import (
    SOURCE,
    Canonical,
    Unrecognised,
    canonical_forward,
    canonical_function,
)


@dataclass(frozen=True)
class Structure:
    """One recognised form: reference function and what the replacement needs to know."""

    name: str
    reference: object
    options: dict = field(default_factory=dict)
    forward: bool = True  # a module's forward (first parameter is self) or a plain function


def reference(parameters: str, statements: tuple[str, ...], names: dict):
    """A function of these parameters and statements, which returns the last; `names` are its globals."""
    *body, result = statements
    lines = (f"def reference({parameters}):", *body, f"return {result}")
    source, made = "\n    ".join(lines), {}
    exec(source, names, made)
    setattr(made["reference"], SOURCE, source)
    return made["reference"]


def form(name: str, *statements: str, parameters: str = "self, x", **options) -> Structure:
    """A row of a table of methods."""
    return Structure(name, reference(parameters, statements, globals()), options)


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
        return match(canonical_forward(type(module), method), table)
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


def _normalised_mixed(x, eps):
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def _normalised_by_group(x, eps, group_size):
    if group_size is not None:
        x = x.reshape(*x.shape[:-1], -1, group_size)
    h = _normalised(x, eps)
    return h.flatten(-2) if group_size is not None else h


_H = "h = _normalised(x.float(), self.eps)"
_UNIT_OFFSET = "(1 + self.weight) if self.unit_offset else self.weight"
_GROUP_NORM = "F.group_norm(x, self.groups, self.weight, self.bias, self.eps)"
_LAYER_NORM = "F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)"
_LAYER_NORM_OF_ROWS = _LAYER_NORM.replace("x", "x.permute(0, 2, 3, 1)")
_GATED = "(h * ACT2FN[self.activation](gate.float())).to(x.dtype)"
_LLAMA = {"rounding": "llama", "offset": 0.0}
_LATE = {"rounding": "gemma", "offset": 0.0}
_GEMMA = {"rounding": "gemma", "offset": 1.0}
NORMS = (
    form("llama", _H, "self.weight * h.to(x.dtype)", **_LLAMA),
    form("llama", "_normalised_mixed(x, self.eps).to(x.dtype) * self.weight", **_LLAMA),
    form("late", _H, "(self.weight * h).to(x.dtype)", **_LATE),
    form("late", _H, "(self.weight.float() * h).to(x.dtype)", **_LATE),
    form("gemma", _H, "(h * (1.0 + self.weight.float())).to(x.dtype)", **_GEMMA),
    form(
        "gemma, by group",
        "h = _normalised_by_group(x.float(), self.eps, self.group_size)",
        "(h * (1.0 + self.weight.float())).to(x.dtype)",
        **_GEMMA,
    ),
    form("gemma, 1 + w rounded", _H, "(h * (1.0 + self.weight).float()).to(x.dtype)", **_LATE, shift=1.0),
    form("weightless", _H, "h.to(x.dtype)", **_LATE),
    form(
        "weightless",
        "x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)",
        **_LATE,
    ),
    form(
        "late, optional weight",
        _H,
        "if self.with_weight: h = h * self.weight.float()",
        "h.to(x.dtype)",
        **_LATE,
    ),
    form(
        "t5",
        "h = _normalised_mixed(x, self.eps)",
        "if self.weight.dtype in [torch.float16, torch.bfloat16]: h = h.to(self.weight.dtype)",
        "self.weight * h",
        rounding="t5",
        offset=0.0,
    ),
    form("torch", "F.rms_norm(x, self.shape, self.weight, self.eps)", **_LATE, autocast=True),
    form("torch, fp32", "F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)", **_LATE),
    form(
        "late, optional offset",
        "h = x.float()",
        "h = h * torch.rsqrt(torch.mean(h * h, dim=self.axis, keepdim=True) + self.eps)",
        f"weight = {_UNIT_OFFSET}",
        "(h * weight.float()).to(x.dtype)",
        **_LATE,
    ),
    form(
        "unit length",
        "h = x.float()",
        "(h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + self.eps)).to(x.dtype)",
        **_LATE,
        unit=True,
    ),
)
# One number for each row: no norm, but a factor in hyper-connections, which their slot takes as a whole.
FACTORS = (form("rsqrt", "torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)"),)
GATED_NORMS = (
    form(
        "norm, then gate",
        "h = self.weight * _normalised(x.float(), self.eps).to(x.dtype)",
        _GATED,
        parameters="self, x, gate",
        rounding="llama",
    ),
    form(
        "norm, then gate, late",
        "h = self.weight.float() * _normalised(x.float(), self.eps)",
        _GATED,
        parameters="self, x, gate=None",
        rounding="gemma",
    ),
    form(
        "gate, then norm by group",
        "h = x.float()",
        "if gate is not None: h = h * F.silu(gate.float())",
        "*leading, columns = h.shape",
        "groups = columns // self.group_size",
        "h = _normalised(h.view(*leading, groups, self.group_size), self.eps)",
        "self.weight * h.view(*leading, groups * self.group_size).to(x.dtype)",
        parameters="self, x, gate=None",
        rounding="llama",
        norm_first=False,
    ),
)
GROUP_NORMS = (
    form("torch", _GROUP_NORM, autocast=True),
    form("torch", _GROUP_NORM, parameters="self, x, unused=None", autocast=True),
)
LAYER_NORMS = (
    form("torch", _LAYER_NORM, autocast=True),
    form(
        "channels first or last",
        f"if self.data_format == 'channels_first': return {_LAYER_NORM_OF_ROWS}.permute(0, 3, 1, 2)",
        _LAYER_NORM,
        autocast=True,
    ),
    form(
        "late",
        "h = x.float()",
        "mean = h.mean(-1, keepdim=True)",
        "variance = (h - mean).pow(2).mean(-1, keepdim=True)",
        "h = (h - mean) * torch.rsqrt(variance + self.eps)",
        "(self.weight.float() * h).to(x.dtype)",
    ),
    form("weightless", "F.layer_norm(x.float(), self.shape, None, None, eps=1e-5).to(x.dtype)", eps=1e-5),
    form("1 + weight", "F.layer_norm(x, self.shape, self.weight + 1.0, self.bias, self.eps)", shift=1.0),
)
# Classes whose source says more than a form does (here: what autocast casts), and the form they are where
# their numbers are equal to it, with the attributes that play its roles.
DECLARED = {
    "transformers.models.nemotron.modeling_nemotron.NemotronLayerNorm1P": Match(
        LAYER_NORMS[-1], {"shape": "normalized_shape", "weight": "weight", "bias": "bias", "eps": "eps"}
    )
}


# --- MLPs --------------------------------------------------------------------------------------


def _clamped(gate, up, limit):
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


_PRODUCT = "self.act(self.gate(x)) * self.up(x)"
_GATE_UP = "gate, up = self.gate_up(x).chunk(2, dim=-1)"
_UP_GATE = "up, gate = self.gate_up(x).chunk(2, dim=-1)"
_CLAMPED = "gate, up = _clamped(self.gate(x), self.up(x), self.limit)"
_BEFORE = "x = self.before2(self.before1(self.before0(x)))"
_DOWN = "self.down(self.act(gate) * up)"
_UP_FIRST = {"up_first": True}
_CAST = (
    "isinstance(self.down.weight, torch.Tensor) and y.dtype != self.down.weight.dtype"
    " and self.down.weight.dtype != torch.int8"
)
MLPS = (
    form("gate, up, down", f"self.down({_PRODUCT})"),
    form("gate, up, down", "self.down(F.silu(self.gate(x)) * self.up(x))"),
    form("gate, up, down", "self.down(F.gelu(self.gate(x)) * self.up(x))", activation="gelu"),
    form(
        "gate, up, down",
        "self.down(F.gelu(self.gate(x), approximate='tanh') * self.up(x))",
        activation="gelu_tanh",
    ),
    form(
        "gate, up, down",
        "self.down(F.gelu(self.gate(x), approximate=self.config.gelu_approximate) * self.up(x))",
    ),
    form(
        "gate, optional up, down",
        "h = self.act(self.gate(x))",
        "if self.up is not None: h = h * self.up(x)",
        "self.down(h)",
    ),
    form("gate, up", _PRODUCT),
    form("gate_up, down", _GATE_UP, _DOWN),
    form(
        "gate, up, down, multipliers",
        "product = self.up(x) * self.act(self.gate(x) * self.gate_multiplier)",
        "self.down(product) * self.down_multiplier",
    ),
    form("up, down", "self.down(self.act(self.up(x)))"),
    form("gate_up, down, up first", _UP_GATE, _DOWN, **_UP_FIRST),
    form("gate_up, down, up first", "x = self.before0(x)", _UP_GATE, _DOWN, **_UP_FIRST),
    form("gate_up, down, up first", "x = self.before1(self.before0(x))", _UP_GATE, _DOWN, **_UP_FIRST),
    form("gate, up, middle, down", f"self.down(self.middle({_PRODUCT}))"),
    form("gate_up, middle, down", _GATE_UP, "self.down(self.middle(self.act(gate) * up))"),
    form(
        "gate, up, middle, down, cast",
        f"y = self.middle({_PRODUCT})",
        f"if {_CAST}: y = y.to(self.down.weight.dtype)",
        "self.down(y)",
        cast=True,
    ),
    form(
        "gate_up, down, by layer",
        "x = self.gate_up(x) if layer is None else self.gate_up(x, layer)",
        "batch, tokens, _ = x.shape",
        "x = x.view(batch, tokens, 2, -1)",
        "x = self.act(x[..., 0, :]) * x[..., 1, :]",
        "self.down(x) if layer is None else self.down(x, layer)",
        parameters="self, x, layer=None",
    ),
    form(
        "gate, up, down, dropout", f"F.dropout(self.down({_PRODUCT}), p=self.dropout, training=self.training)"
    ),
    form(
        "gate, up, down, fp32",
        "gate, up = self.gate(x), self.up(x)",
        "self.down((self.act(gate.float()) * up.float()).to(gate.dtype))",
    ),
    form("gate, up, down, clamped", _CLAMPED, _DOWN),
    form("gate, up, down, clamped", _BEFORE, _CLAMPED, _DOWN),
    form(
        "gate, up, down, clamped",
        "gate = self.act(self.gate(x)).clamp(max=self.limit)",
        "self.down(gate * self.up(x).clamp(min=-self.limit, max=self.limit))",
        clamp_after=True,
    ),
    form("gate, up, down", _BEFORE, f"self.down({_PRODUCT})"),
)


# --- experts -----------------------------------------------------------------------------------


def _gate_of_experts(name: str, *statements: str, **options) -> Structure:
    return form(name, *statements, parameters="self, gate_up", **options)


_HALVES = "gate, up = gate_up.chunk(2, dim=-1)"
_CLAMP = "gate, up = _clamped(gate, up, self.limit)"
_OAI = "(up + 1) * (gate * torch.sigmoid(gate * self.alpha))"
_WIDE = "(self.act(gate.float()) * up.float())"
EXPERT_GATES = (
    _gate_of_experts("experts, clamped", _HALVES, _CLAMP, "self.act(gate) * up"),
    _gate_of_experts(
        "experts, clamped",
        _HALVES,
        "gate = self.act(gate).clamp(max=self.limit)",
        "gate * up.clamp(min=-self.limit, max=self.limit)",
        clamp_after=True,
    ),
    _gate_of_experts("experts, clamped", _HALVES, _CLAMP, "F.silu(gate) * up", activation="silu"),
    _gate_of_experts("experts, fp32", _HALVES, f"{_WIDE}.to(gate_up.dtype)"),
    _gate_of_experts("experts, fp32", _HALVES, f"{_WIDE}.to(gate.dtype)"),
    _gate_of_experts("experts", _HALVES, "self.act(gate) * up"),
    _gate_of_experts("experts", "gate, up = gate_up[..., ::2], gate_up[..., 1::2]", _CLAMP, _OAI),
    _gate_of_experts("experts, halves", _HALVES, _CLAMP, _OAI, halves=True),
)
BATCHED_EXPERTS = (
    form(
        "batched experts",
        "x = x.view(self.gate_up.shape[0], -1, self.size)",
        "gate, up = torch.bmm(x, self.gate_up).chunk(2, dim=-1)",
        "torch.bmm(up * self.act(gate), self.down).view(-1, self.size)",
    ),
)


# --- routers -----------------------------------------------------------------------------------
#
# A row returns logits, weights and ids. Its options and attribute names are fields of `routers.RouterSpec`;
# `method` is DeepSeek-V2's way to choose.


def _masked(scores, group_scores, num_experts, num_groups, top_groups, value):
    chosen = torch.topk(group_scores, top_groups, dim=-1)[1]
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, chosen, 1)
    mask = mask.unsqueeze(-1).expand(-1, num_groups, num_experts // num_groups)
    return scores.masked_fill(~mask.reshape(-1, num_experts).bool(), value)


def softmax_groups(self, x):
    x = x.view(-1, self.hidden)
    logits = F.linear(x.float(), self.weight.float())
    scores = F.softmax(logits.float(), dim=-1)
    if self.method == "greedy":
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
    elif self.method == "group_limited_greedy":
        best = scores.view(-1, self.num_groups, self.num_experts // self.num_groups).max(dim=-1).values
        scores = _masked(scores, best, self.num_experts, self.num_groups, self.top_groups, 0.0)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
    return logits, weights * self.scale, ids


def _group_choice(scores, top_k, num_experts, num_groups, top_groups):
    best = scores.view(-1, num_groups, num_experts // num_groups).topk(2, dim=-1)[0].sum(dim=-1)
    scores = _masked(scores, best, num_experts, num_groups, top_groups, float("-inf"))
    return torch.topk(scores, top_k, dim=-1)[1]


_ROWS = "x = x.reshape(-1, self.hidden)"
_LOGITS = "logits = F.linear(x, self.weight)"
_SOFTMAX = "weights, ids = torch.topk(F.softmax(logits.float(), dim=-1), self.top_k, dim=-1)"
_CHOICE = "chosen, ids = torch.topk(logits, self.top_k, dim=-1)"
_SCORES = "scores = torch.sigmoid(logits.float())"
_IDS = "ids = torch.topk(scores + self.correction, self.top_k, dim=-1)[1]"
_IDS_GIVEN = "ids = torch.topk(scores + correction, self.top_k, dim=-1)[1]"
_GATHER = "weights = scores.gather(1, ids)"
_NORMALIZE = "weights /= weights.sum(dim=-1, keepdim=True)"
_RESULT = "logits, weights, ids"
_ROUNDED = "logits, weights.to(logits.dtype), ids"
_ROUNDED_LOGITS = "logits = F.linear(x.to(self.weight.dtype), self.weight)"
_GIVEN = {"parameters": "self, x, correction"}
_WIDE_LOGITS = {"product": "float32"}
_SIGMOID = {"score": "sigmoid", "autocast": False}
_SIGMOID_GROUPS = {**_SIGMOID, **_WIDE_LOGITS, "group_score": "sum_of_two"}
_GROUPS = (
    "x = x.view(-1, self.hidden)",
    "logits = F.linear(x.float(), self.weight.float())",
    "scores = logits.sigmoid()",
    "biased = scores + self.correction",
    "ids = _group_choice(biased, self.top_k, self.num_experts, self.num_groups, self.top_groups)",
    _GATHER,
    "if self.normalize: weights /= weights.sum(dim=-1, keepdim=True) + 1e-20",
)


ROUTERS = (
    form("softmax, choice", _ROWS, _LOGITS, _SOFTMAX, _NORMALIZE, _RESULT),
    form("softmax, choice", _ROWS, _LOGITS, _SOFTMAX, _NORMALIZE, _ROUNDED, out="logits"),
    form(
        "softmax, choice",
        _ROWS,
        _LOGITS,
        _SOFTMAX,
        f"if self.normalize: {_NORMALIZE}",
        _ROUNDED,
        out="logits",
    ),
    form(
        "softmax, choice",
        _LOGITS,
        _SOFTMAX,
        "logits, weights.to(x.dtype), ids",
        out="hidden",
        normalize=False,
    ),
    form(
        "choice, softmax",
        _LOGITS,
        _CHOICE,
        "logits, F.softmax(chosen, dim=-1), ids",
        out="logits",
        autocast=False,
    ),
    form(
        "choice, softmax",
        "logits = F.linear(x, self.weight, self.bias)",
        _CHOICE,
        "logits, F.softmax(chosen, dim=1, dtype=chosen.dtype), ids",
        out="logits",
    ),
    form(
        "choice, softmax",
        "logits = F.linear(x, self.weight).float()",
        _CHOICE,
        "logits, F.softmax(chosen, dim=-1).type_as(x), ids",
        out="hidden",
        wide_logits=True,
    ),
    Structure("softmax, groups", softmax_groups, {**_WIDE_LOGITS, "normalize": False}),
    form("sigmoid, groups", *_GROUPS, "logits, weights * self.scale, ids", **_SIGMOID_GROUPS),
    form("sigmoid, groups", *_GROUPS, _RESULT, **_SIGMOID_GROUPS),
    form(
        "sigmoid",
        _ROWS,
        "logits = F.linear(x.float(), self.weight.float())",
        "scores = torch.sigmoid(logits)",
        _IDS_GIVEN,
        _GATHER,
        "weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)",
        "logits, weights * self.scale, ids",
        **_GIVEN,
        **_SIGMOID,
        **_WIDE_LOGITS,
    ),
    form(
        "sigmoid",
        _ROWS,
        _ROUNDED_LOGITS,
        _SCORES,
        _IDS,
        _GATHER,
        _NORMALIZE,
        _RESULT,
        **_SIGMOID,
        product="weight",
    ),
    form(
        "sigmoid",
        _ROWS,
        _ROUNDED_LOGITS,
        _SCORES,
        _IDS_GIVEN,
        _GATHER,
        _NORMALIZE,
        _RESULT,
        **_GIVEN,
        **_SIGMOID,
        product="weight",
    ),
)
