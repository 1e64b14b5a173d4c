"""The tables of recognised structures: each row is a function, written as models write it.

A module or function is recognised when its canonical expression (`canonical.py`) equals that of a row, never
by its name. The attribute names of a row are roles: the match says which attribute of the real module plays
each. Rows also serve the numeric probe of functions that have no source. To add a structure, write its row:
a name, a function, and what the replacement needs to know. A canonical expression sees through functions, so
that what several rows share stands in one, and does not count how often a value is written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from tigon.integrations.transformers.recognition import Match, form

# --- norms -----------------------------------------------------------------------------------


def _normalised(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _wide(x, eps):
    return _normalised(x.float(), eps)


def _mixed(x, eps):
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def _by_group(x, eps, group_size):
    if group_size is not None:
        x = x.reshape(*x.shape[:-1], -1, group_size)
    h = _normalised(x, eps)
    return h.flatten(-2) if group_size is not None else h


def optional_weight(self, x):
    h = _wide(x, self.eps)
    if self.with_weight:
        h = h * self.weight.float()
    return h.to(x.dtype)


def t5(self, x):
    h = _mixed(x, self.eps)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        h = h.to(self.weight.dtype)
    return self.weight * h


def optional_offset(self, x):
    h = x.float()
    h = h * torch.rsqrt(torch.mean(h * h, dim=self.axis, keepdim=True) + self.eps)
    weight = (1 + self.weight) if self.unit_offset else self.weight
    return (h * weight.float()).to(x.dtype)


def unit_length(self, x):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + self.eps)).to(x.dtype)


def rounded_factor(self, x):
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


_LLAMA = {"rounding": "llama", "offset": 0.0}
_LATE = {"rounding": "gemma", "offset": 0.0}
_GEMMA = {"rounding": "gemma", "offset": 1.0}
NORMS = (
    form("llama", lambda self, x: self.weight * _wide(x, self.eps).to(x.dtype), **_LLAMA),
    form("llama", lambda self, x: _mixed(x, self.eps).to(x.dtype) * self.weight, **_LLAMA),
    form("late", lambda self, x: (self.weight * _wide(x, self.eps)).to(x.dtype), **_LATE),
    form("late", lambda self, x: (self.weight.float() * _wide(x, self.eps)).to(x.dtype), **_LATE),
    form("gemma", lambda self, x: (_wide(x, self.eps) * (1.0 + self.weight.float())).to(x.dtype), **_GEMMA),
    form(
        "gemma, by group",
        lambda self, x: (_by_group(x.float(), self.eps, self.group_size) * (1.0 + self.weight.float())).to(
            x.dtype
        ),
        **_GEMMA,
    ),
    form(
        "gemma, 1 + w rounded",
        lambda self, x: (_wide(x, self.eps) * (1.0 + self.weight).float()).to(x.dtype),
        **_LATE,
        shift=1.0,
    ),
    form("weightless", lambda self, x: _wide(x, self.eps).to(x.dtype), **_LATE),
    form("weightless", lambda self, x: x * rounded_factor(self, x), **_LATE),
    form("late, optional weight", optional_weight, **_LATE),
    form("t5", t5, rounding="t5", offset=0.0),
    form("torch", lambda self, x: F.rms_norm(x, self.shape, self.weight, self.eps), **_LATE, autocast=True),
    form(
        "torch, fp32",
        lambda self, x: F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype),
        **_LATE,
    ),
    form("late, optional offset", optional_offset, **_LATE),
    form("unit length", unit_length, **_LATE, unit=True),
)
# One number for each row: no norm, but a factor in hyper-connections, which their slot takes as a whole.
FACTORS = (form("rsqrt", rounded_factor),)


def _gated(h, activation, gate):
    return h * ACT2FN[activation](gate.float())


def norm_then_gate(self, x, gate):
    return _gated(self.weight * _wide(x, self.eps).to(x.dtype), self.activation, gate).to(x.dtype)


def norm_then_gate_late(self, x, gate=None):
    return _gated(self.weight.float() * _wide(x, self.eps), self.activation, gate).to(x.dtype)


def gate_then_norm(self, x, gate=None):
    h = x.float()
    if gate is not None:
        h = h * F.silu(gate.float())
    *leading, columns = h.shape
    groups = columns // self.group_size
    h = _normalised(h.view(*leading, groups, self.group_size), self.eps)
    return self.weight * h.view(*leading, groups * self.group_size).to(x.dtype)


GATED_NORMS = (
    form("norm, then gate", norm_then_gate, rounding="llama"),
    form("norm, then gate, late", norm_then_gate_late, rounding="gemma"),
    form("gate, then norm by group", gate_then_norm, rounding="llama", norm_first=False),
)


def group_norm(self, x):
    return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)


GROUP_NORMS = (
    form("torch", group_norm, autocast=True),
    form("torch", lambda self, x, unused=None: group_norm(self, x), autocast=True),
)


def layer_norm(self, x):
    return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def channels_first_or_last(self, x):
    if self.data_format == "channels_first":
        return layer_norm(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return layer_norm(self, x)


def late_layer_norm(self, x):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt(variance + self.eps)
    return (self.weight.float() * h).to(x.dtype)


LAYER_NORMS = (
    form("torch", layer_norm, autocast=True),
    form("channels first or last", channels_first_or_last, autocast=True),
    form("late", late_layer_norm),
    form(
        "weightless",
        lambda self, x: F.layer_norm(x.float(), self.shape, None, None, eps=1e-5).to(x.dtype),
        eps=1e-5,
    ),
    form(
        "1 + weight",
        lambda self, x: F.layer_norm(x, self.shape, self.weight + 1.0, self.bias, self.eps),
        shift=1.0,
    ),
)
# Classes whose source says more than a form does (here: what autocast casts), and the form they are where
# their numbers are equal to it, with the attributes that play its roles.
DECLARED = {
    "transformers.models.nemotron.modeling_nemotron.NemotronLayerNorm1P": Match(
        LAYER_NORMS[-1], {"shape": "normalized_shape", "weight": "weight", "bias": "bias", "eps": "eps"}
    )
}


# --- MLPs --------------------------------------------------------------------------------------


def _first(x):
    return x.chunk(2, dim=-1)[0]


def _second(x):
    return x.chunk(2, dim=-1)[1]


def _above(x, limit):
    return x.clamp(max=limit)


def _within(x, limit):
    return x.clamp(min=-limit, max=limit)


def _product(self, x):
    return self.act(self.gate(x)) * self.up(x)


def _product_of_halves(self, x):
    return self.act(_first(self.gate_up(x))) * _second(self.gate_up(x))


def _product_up_first(self, x):
    return self.act(_second(self.gate_up(x))) * _first(self.gate_up(x))


def _clamped(self, x):
    return self.act(_above(self.gate(x), self.limit)) * _within(self.up(x), self.limit)


def _before(self, x):
    return self.before2(self.before1(self.before0(x)))


def optional_up(self, x):
    h = self.act(self.gate(x))
    if self.up is not None:
        h = h * self.up(x)
    return self.down(h)


def multipliers(self, x):
    product = self.up(x) * self.act(self.gate(x) * self.gate_multiplier)
    return self.down(product) * self.down_multiplier


def cast_to_down(self, x):
    y = self.middle(_product(self, x))
    if (
        isinstance(self.down.weight, torch.Tensor)
        and y.dtype != self.down.weight.dtype
        and self.down.weight.dtype != torch.int8
    ):
        y = y.to(self.down.weight.dtype)
    return self.down(y)


def by_layer(self, x, layer=None):
    x = self.gate_up(x) if layer is None else self.gate_up(x, layer)
    batch, tokens, _ = x.shape
    x = x.view(batch, tokens, 2, -1)
    x = self.act(x[..., 0, :]) * x[..., 1, :]
    return self.down(x) if layer is None else self.down(x, layer)


def in_float32(self, x):
    gate, up = self.gate(x), self.up(x)
    return self.down((self.act(gate.float()) * up.float()).to(gate.dtype))


def clamped_after(self, x):
    return self.down(_above(self.act(self.gate(x)), self.limit) * _within(self.up(x), self.limit))


MLPS = (
    form("gate, up, down", lambda self, x: self.down(_product(self, x))),
    form("gate, up, down", lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x))),
    form("gate, up, down", lambda self, x: self.down(F.gelu(self.gate(x)) * self.up(x)), activation="gelu"),
    form(
        "gate, up, down",
        lambda self, x: self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x)),
        activation="gelu_tanh",
    ),
    form(
        "gate, up, down",
        lambda self, x: self.down(
            F.gelu(self.gate(x), approximate=self.config.gelu_approximate) * self.up(x)
        ),
    ),
    form("gate, optional up, down", optional_up),
    form("gate, up", _product),
    form("gate_up, down", lambda self, x: self.down(_product_of_halves(self, x))),
    form("gate, up, down, multipliers", multipliers),
    form("up, down", lambda self, x: self.down(self.act(self.up(x)))),
    form("gate_up, down, up first", lambda self, x: self.down(_product_up_first(self, x)), up_first=True),
    form(
        "gate_up, down, up first",
        lambda self, x: self.down(_product_up_first(self, self.before0(x))),
        up_first=True,
    ),
    form(
        "gate_up, down, up first",
        lambda self, x: self.down(_product_up_first(self, self.before1(self.before0(x)))),
        up_first=True,
    ),
    form("gate, up, middle, down", lambda self, x: self.down(self.middle(_product(self, x)))),
    form("gate_up, middle, down", lambda self, x: self.down(self.middle(_product_of_halves(self, x)))),
    form("gate, up, middle, down, cast", cast_to_down, cast=True),
    form("gate_up, down, by layer", by_layer),
    form(
        "gate, up, down, dropout",
        lambda self, x: F.dropout(self.down(_product(self, x)), p=self.dropout, training=self.training),
    ),
    form("gate, up, down, fp32", in_float32),
    form("gate, up, down, clamped", lambda self, x: self.down(_clamped(self, x))),
    form("gate, up, down, clamped", lambda self, x: self.down(_clamped(self, _before(self, x)))),
    form("gate, up, down, clamped", clamped_after, clamp_after=True),
    form("gate, up, down", lambda self, x: self.down(_product(self, _before(self, x)))),
)


# --- experts: gate and up as halves, or by turns -------------------------------------------------


def _oai(gate, up, limit, alpha):
    gate = _above(gate, limit)
    return (_within(up, limit) + 1) * (gate * torch.sigmoid(gate * alpha))


EXPERT_GATES = (
    form(
        "experts, clamped",
        lambda self, x: self.act(_above(_first(x), self.limit)) * _within(_second(x), self.limit),
    ),
    form(
        "experts, clamped",
        lambda self, x: _above(self.act(_first(x)), self.limit) * _within(_second(x), self.limit),
        clamp_after=True,
    ),
    form(
        "experts, clamped",
        lambda self, x: F.silu(_above(_first(x), self.limit)) * _within(_second(x), self.limit),
        activation="silu",
    ),
    form("experts, fp32", lambda self, x: (self.act(_first(x).float()) * _second(x).float()).to(x.dtype)),
    form(
        "experts, fp32",
        lambda self, x: (self.act(_first(x).float()) * _second(x).float()).to(_first(x).dtype),
    ),
    form("experts", lambda self, x: self.act(_first(x)) * _second(x)),
    form("experts", lambda self, x: _oai(x[..., ::2], x[..., 1::2], self.limit, self.alpha)),
    form("experts, halves", lambda self, x: _oai(_first(x), _second(x), self.limit, self.alpha), halves=True),
)


def batched_experts(self, x):
    x = x.view(self.gate_up.shape[0], -1, self.size)
    gate, up = torch.bmm(x, self.gate_up).chunk(2, dim=-1)
    return torch.bmm(up * self.act(gate), self.down).view(-1, self.size)


BATCHED_EXPERTS = (form("batched experts", batched_experts),)


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


def _group_choice(scores, top_k, num_experts, num_groups, top_groups):
    best = scores.view(-1, num_groups, num_experts // num_groups).topk(2, dim=-1)[0].sum(dim=-1)
    scores = _masked(scores, best, num_experts, num_groups, top_groups, float("-inf"))
    return torch.topk(scores, top_k, dim=-1)[1]


def _logits(self, x):
    return F.linear(x.reshape(-1, self.hidden), self.weight)


def _logits_of_rounded(self, x):
    return F.linear(x.reshape(-1, self.hidden).to(self.weight.dtype), self.weight)


def _softmax(logits, top_k):
    return torch.topk(F.softmax(logits.float(), dim=-1), top_k, dim=-1)


def _normalised_weights(weights):
    return weights / weights.sum(dim=-1, keepdim=True)


def softmax(self, x):
    logits = _logits(self, x)
    weights, ids = _softmax(logits, self.top_k)
    return logits, _normalised_weights(weights), ids


def softmax_rounded(self, x):
    logits = _logits(self, x)
    weights, ids = _softmax(logits, self.top_k)
    return logits, _normalised_weights(weights).to(logits.dtype), ids


def softmax_maybe_normalised(self, x):
    logits = _logits(self, x)
    weights, ids = _softmax(logits, self.top_k)
    if self.normalize:
        weights = _normalised_weights(weights)
    return logits, weights.to(logits.dtype), ids


def softmax_as_it_is(self, x):
    logits = F.linear(x, self.weight)
    weights, ids = _softmax(logits, self.top_k)
    return logits, weights.to(x.dtype), ids


def choice_softmax(self, x):
    logits = F.linear(x, self.weight)
    chosen, ids = torch.topk(logits, self.top_k, dim=-1)
    return logits, F.softmax(chosen, dim=-1), ids


def choice_softmax_with_bias(self, x):
    logits = F.linear(x, self.weight, self.bias)
    chosen, ids = torch.topk(logits, self.top_k, dim=-1)
    return logits, F.softmax(chosen, dim=1, dtype=chosen.dtype), ids


def choice_softmax_of_wide(self, x):
    logits = F.linear(x, self.weight).float()
    chosen, ids = torch.topk(logits, self.top_k, dim=-1)
    return logits, F.softmax(chosen, dim=-1).type_as(x), ids


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


def _best_in_groups(self, x):
    x = x.view(-1, self.hidden)
    logits = F.linear(x.float(), self.weight.float())
    scores = logits.sigmoid()
    biased = scores + self.correction
    ids = _group_choice(biased, self.top_k, self.num_experts, self.num_groups, self.top_groups)
    return logits, scores.gather(1, ids), ids


def sigmoid_groups(self, x):
    logits, weights, ids = _best_in_groups(self, x)
    if self.normalize:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return logits, weights, ids


def sigmoid_groups_scaled(self, x):
    logits, weights, ids = _best_in_groups(self, x)
    if self.normalize:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return logits, weights * self.scale, ids


def _sigmoid(scores, correction, top_k):
    ids = torch.topk(scores + correction, top_k, dim=-1)[1]
    return scores.gather(1, ids), ids


def sigmoid_wide(self, x, correction):
    logits = F.linear(x.reshape(-1, self.hidden).float(), self.weight.float())
    weights, ids = _sigmoid(torch.sigmoid(logits), correction, self.top_k)
    return logits, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * self.scale, ids


def sigmoid_given(self, x, correction):
    logits = _logits_of_rounded(self, x)
    weights, ids = _sigmoid(torch.sigmoid(logits.float()), correction, self.top_k)
    return logits, _normalised_weights(weights), ids


_WIDE_LOGITS = {"product": "float32"}
_SIGMOID = {"score": "sigmoid", "autocast": False}
_SIGMOID_GROUPS = {**_SIGMOID, **_WIDE_LOGITS, "group_score": "sum_of_two"}
ROUTERS = (
    form("softmax, choice", softmax),
    form("softmax, choice", softmax_rounded, out="logits"),
    form("softmax, choice", softmax_maybe_normalised, out="logits"),
    form("softmax, choice", softmax_as_it_is, out="hidden", normalize=False),
    form("choice, softmax", choice_softmax, out="logits", autocast=False),
    form("choice, softmax", choice_softmax_with_bias, out="logits"),
    form("choice, softmax", choice_softmax_of_wide, out="hidden", wide_logits=True),
    form("softmax, groups", softmax_groups, **_WIDE_LOGITS, normalize=False),
    form("sigmoid, groups", sigmoid_groups_scaled, **_SIGMOID_GROUPS),
    form("sigmoid, groups", sigmoid_groups, **_SIGMOID_GROUPS),
    form("sigmoid", sigmoid_wide, **_SIGMOID, **_WIDE_LOGITS),
    form("sigmoid", lambda self, x: sigmoid_given(self, x, self.correction), **_SIGMOID, product="weight"),
    form("sigmoid", sigmoid_given, **_SIGMOID, product="weight"),
)
