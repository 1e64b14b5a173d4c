"""MLPs, and the gates of experts, which stand between their matmuls."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tigon.integrations.transformers.recognition import form


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


# --- experts: gate and up as halves, or alternating ----------------------------------------------


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
