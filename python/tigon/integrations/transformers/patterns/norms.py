"""Norms, gated norms, LayerNorm and GroupNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from tigon.integrations.transformers.recognition import Match, form


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
