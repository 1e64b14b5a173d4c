"""Experts of a mixture. Contract of the pieces: ``csrc/tigon/ops/experts/experts.h``.

This module defines the operators of a whole layer. Routing, gather, gate and combine are native, and so are
the matmuls between them on the CPU and on sm_90. On other GPUs PyTorch computes the matmuls.
"""

from __future__ import annotations

import functools
import re
from collections import namedtuple
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tigon._load import native
from tigon._op import define, has_kernel, paired
from tigon.error import check, refuse
from tigon.ops import arguments, grouped_gemm
from tigon.ops.grouped_gemm import Addend, GatedUnit

_OP = "experts"
ALPHA, LIMIT = 1.702, 7.0
# Activation of the gate -> kind of the native gated unit.
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai", "relu_squared", "swiglu_clamped")
KINDS = {activation: kind for kind, activation in enumerate(_ACTIVATIONS)}
_CLAMPED = ("swiglu_oai", "swiglu_clamped")
_HALVES, _INTERLEAVED, _SINGLE = range(3)


def _unit(z, activation, interleaved, gated, alpha, limit):
    """The gated unit of the columns of z."""
    if not gated:
        gate, up = z, None
    elif interleaved:
        gate, up = z[..., ::2], z[..., 1::2]
    else:
        gate, up = z.chunk(2, dim=-1)
    if activation in _CLAMPED:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if activation == "swiglu_clamped":
            return F.silu(gate) * up
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    act = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu_squared": lambda x: F.relu(x).square(),
    }[activation](gate)
    return act if up is None else act * up


def _merged(stack, lora):
    """The matrices ``[E, in, out]`` with an adapter added."""
    if lora is None:
        return stack
    a, b, scale = _adapter(lora, stack.shape[0])
    return stack + scale * (a.mT @ b.mT).to(stack.dtype)


def reference(
    x,
    gate_up,
    down,
    ids,
    weights=None,
    *,
    activation="silu",
    interleaved=False,
    gated=True,
    transposed=False,
    gate_up_bias=None,
    down_bias=None,
    gate_up_lora=None,
    down_lora=None,
    alpha=ALPHA,
    limit=LIMIT,
):
    """Compute the same formulas with PyTorch operations (any float dtype, any device)."""
    if not transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate_up, down = _merged(gate_up, gate_up_lora), _merged(down, down_lora)
    y = x.new_zeros(x.shape, dtype=x.dtype if x.dtype == torch.float64 else torch.float32)
    for j in range(ids.shape[-1]):
        here = (ids[..., j] >= 0) & (ids[..., j] < gate_up.shape[0])
        e = ids[..., j].clamp(0, gate_up.shape[0] - 1)
        z = torch.einsum("...h,...hi->...i", x, gate_up[e])
        z = z if gate_up_bias is None else z + gate_up_bias[e]
        act = _unit(z, activation, interleaved, gated, alpha, limit)
        out = torch.einsum("...i,...ih->...h", act, down[e])
        out = out if down_bias is None else out + down_bias[e]
        out = out if weights is None else out * weights[..., j, None]
        y = y + torch.where(here[..., None], out, 0)
    return y.to(x.dtype)


def _reference_of_rows(rows, offsets, row_weights=None, **options):
    """:func:`reference` of sorted rows."""
    positions = torch.arange(rows.shape[0], device=rows.device)
    ids = torch.searchsorted(offsets.long(), positions, right=True)
    weights = None if row_weights is None else row_weights[:, None]
    return reference(rows, ids=ids[:, None], weights=weights, **options)


# The pieces are called only inside the operators of the layer, which tracers treat as opaque.
_route, _gather = native("experts_route"), native("experts_gather")
_gate_bwd, _gate_bwd_in_place = native("experts_gate_bwd"), native("experts_gate_bwd_in_place")
_combine, _sum = native("experts_combine"), native("experts_sum")
_zero_rest, _copy = native("experts_zero_rest"), native("experts_copy")
_gradient, _adapter_pass = native("experts_adapter_gradient"), native("experts_adapter_pass")
_native_gate_pass = native("experts_gate_pass")


def _pass_fits(rows, t, most=2048) -> bool:
    """Whether one native pass over rows of the backward takes an adapter whose rows are t."""
    columns = rows.shape[1]
    fits = rows.is_cuda and rows.dtype == torch.bfloat16 and columns % 16 == 0 and columns <= most
    return fits and 0 < t.shape[1] <= 16 and grouped_gemm.native_fits(rows, t)


def _columns(rank: int) -> int:
    """The columns that an adapter's rows have: a multiple of 8."""
    return -(-rank // 8) * 8


def _packed(matrices, scale, dtype, *, rank_dim):
    """``scale * matrices`` in `dtype`, with zeros in dimension `rank_dim` up to a multiple of 8."""
    shape = list(matrices.shape)
    rank, shape[rank_dim] = shape[rank_dim], _columns(shape[rank_dim])
    if scale == 1 and matrices.is_contiguous() and shape[rank_dim] == rank:
        return matrices.to(dtype)
    out = (matrices.new_empty if shape[rank_dim] == rank else matrices.new_zeros)(shape, dtype=dtype)
    _copy(matrices, out.narrow(rank_dim, 0, rank), scale)
    return out


class ExpertAdapter(NamedTuple):
    """Low-rank matrices of every expert: rows are multiplied by the first ones, then by the second ones."""

    first: torch.Tensor | None  # [E, r, in]; None: there is no adapter
    second: torch.Tensor | None  # [E, out, r]
    first_scale: float
    second_scale: float

    def transposed(self) -> ExpertAdapter:
        """The adapter of the backward: b comes first."""
        if self.first is None or self.second is None:
            return self
        return ExpertAdapter(self.second.mT, self.first.mT, self.second_scale, self.first_scale)

    def packed_first(self, dtype):
        return _packed(self.first, self.first_scale, dtype, rank_dim=1)

    def lower(self, rows, offsets, order=None, place=None):
        """t: rows times the first matrices."""
        if self.first is None:
            return rows.new_empty(0, 0)
        return grouped_gemm.matmul(
            rows, self.packed_first(rows.dtype), offsets, False, order=order, place=place
        )

    def addend(self, t, transposed) -> Addend:
        """What :func:`grouped_gemm.matmul` takes to add t times the second matrices."""
        if self.second is None:
            return Addend()
        second, rank_dim = (self.second.mT, 1) if transposed else (self.second, 2)
        return Addend(t, _packed(second, self.second_scale, t.dtype, rank_dim=rank_dim))


def _adapter_gradient(t, rows, offsets, *, like, is_b, scale=1.0, order=None, place=None):
    """``scale t_e^T rows_e`` of every expert: the gradient of `like`, a or b, in its order of memory."""
    out = torch.empty_like(like)
    matrices = out.mT if is_b else out
    if grouped_gemm.native_fits(rows, t):
        _gradient(t, rows, offsets, order=order, place=place, scale=scale, out=matrices)
    else:
        rows = rows.contiguous() if order is None else _gather(rows, place)
        _copy(grouped_gemm.weight_gradient(t, rows, offsets)[:, : matrices.shape[1]], matrices, scale)
    return out


_PARAMETERS = "Tensor? weights, Tensor? gate_up_bias, Tensor? down_bias"
_ADAPTERS = "Tensor? gate_up_a, Tensor? gate_up_b, Tensor? down_a, Tensor? down_b"
_OPTIONS = (
    "bool is_sorted, int kind, int columns, bool transposed, float alpha, float limit, "
    "float gate_up_scale, float down_scale"
)
_INPUTS = f"(Tensor x, Tensor gate_up, Tensor down, Tensor ids, {_PARAMETERS}, {_ADAPTERS}, {_OPTIONS})"
_LORA = ("gate_up_a", "gate_up_b", "down_a", "down_b")
_TRAINED = ("x", "gate_up", "down", "weights", "gate_up_bias", "down_bias", *_LORA)
_NEEDS, _GRADIENTS = (", ".join(prefix + t for t in _TRAINED) for prefix in ("bool need_d", "Tensor d"))
# The backward; it may write the gradient of the rows of gate_up over them.
_TAKEN = (
    f"(Tensor dy, Tensor x, Tensor gate_up, Tensor down, {_PARAMETERS}, Tensor{{}} gate_up_rows, "
    f"Tensor order, Tensor place, Tensor offsets, {_ADAPTERS}, Tensor gate_up_t, Tensor down_t, {_OPTIONS}, "
    f"{_NEEDS})"
)


def _arguments(name: str, signature: str) -> Any:
    """A named tuple of the arguments of an operator."""
    return namedtuple(name, re.findall(r"(\w+)[,)]", signature))


class _Layer:
    """What the arguments of the forward and of the backward tell together."""

    @property
    def unit(self) -> GatedUnit:
        return GatedUnit(self.kind, self.columns, self.transposed, self.alpha, self.limit)

    @property
    def gate_up_adapter(self) -> ExpertAdapter:
        return ExpertAdapter(self.gate_up_a, self.gate_up_b, 1.0, self.gate_up_scale)

    @property
    def down_adapter(self) -> ExpertAdapter:
        return ExpertAdapter(self.down_a, self.down_b, 1.0, self.down_scale)


class _Inputs(_Layer, _arguments("_Inputs", _INPUTS)):
    """The arguments of a layer."""


def _forward(*inputs, keep=True):
    """y, and the tensors of the backward: rows of gate_up (only with `keep`), order, place, offsets, and the
    rows that were multiplied by a of the adapters.

    Args:
        inputs: of `_Inputs`.
    """
    a = _Inputs(*inputs)
    x, experts, transposed = a.x, a.gate_up.shape[0], a.transposed
    ints = {"dtype": torch.int32, "device": x.device}
    if (x.shape[0] if a.is_sorted else a.ids.numel()) == 0:
        z = x.new_empty(0, a.gate_up.shape[2 if transposed else 1])
        lows = (x.new_empty(0, 0 if t is None else _columns(t.shape[1])) for t in (a.gate_up_a, a.down_a))
        order, place = torch.empty(0, **ints), torch.empty(0, **ints)
        return torch.zeros_like(x), z, order, place, torch.zeros(experts + 1, **ints), *lows
    if a.is_sorted:
        order = place = None
        offsets = F.pad(a.ids.to(torch.int32), (1, 0))
    else:
        order, place, offsets = _route(a.ids.contiguous(), experts)
    gate_up_t = a.gate_up_adapter.lower(x, offsets, order, place)
    addend = a.gate_up_adapter.addend(gate_up_t, transposed)
    z, act = grouped_gemm.gated_matmul(
        x, order, place, a.gate_up, a.gate_up_bias, offsets, unit=a.unit, keep=keep, addend=addend
    )
    down_t = a.down_adapter.lower(act, offsets)
    addend = a.down_adapter.addend(down_t, transposed)
    y = grouped_gemm.matmul(act, a.down, offsets, transposed, addend)
    if a.is_sorted and a.weights is None and a.down_bias is None:
        _zero_rest(y, offsets)
    else:
        y = _combine(y, place, offsets, a.weights, a.down_bias, x.shape[0])
    if a.is_sorted:
        order, place = torch.empty(0, **ints), torch.empty(0, **ints)
    return y, z, order, place, offsets, gate_up_t, down_t


class _Backward(_Layer, _arguments("_Backward", _TAKEN)):
    """The arguments of the backward of a layer.

    In its steps g are the rows of dy in the experts' order, dz is the gradient of gate_up_rows, and act the
    unit's result.
    """

    @property
    def need_dz(self) -> bool:
        adapter = self.need_dgate_up_a or self.need_dgate_up_b
        return self.need_dx or self.need_dgate_up or self.need_dgate_up_bias or adapter

    @property
    def need_dact(self) -> bool:
        return self.need_dz or self.need_dweights

    def needed(self) -> list[str]:
        """The tensors that get a gradient."""
        return [name for name in _TRAINED if getattr(self, f"need_d{name}")]

    def results(self, gradients: dict) -> tuple:
        """The gradients of `_TRAINED`, of 0 elements if one is not needed."""
        needed = dict.fromkeys(_TRAINED) | {name: gradients[name] for name in self.needed()}
        return tuple(self.x.new_empty(0) if t is None else t for t in needed.values())


def _layer_backward(*arguments, in_place=False):
    """Gradients of `_TRAINED`.

    Args:
        arguments: of `_Backward`.
        in_place: the gradient of gate_up_rows is written over them.
    """
    a, gradients = _Backward(*arguments), {}
    if a.gate_up_rows.shape[0] == 0:
        return a.results({name: torch.zeros_like(getattr(a, name)) for name in a.needed()})
    if a.is_sorted:
        a = a._replace(order=None, place=None)
    dy = a.dy if a.down_b is None else a.dy.contiguous()
    # What is passed over does not depend on which gradients of adapters are needed, so that no bit does.
    passes = _pass_fits(dy, a.down_t) and grouped_gemm.native_fits(dy, a.down)
    passes = passes and (a.need_dact or a.need_ddown_a or a.need_ddown_b)
    g, down_dt = _rows_pass(a, dy, gradients) if passes else _dy_rows(a, dy)
    del dy
    dact = _dact(a, g, down_dt)
    if a.need_ddown_b and not passes:
        gradients["down_b"] = _down_b_gradient(a, g)
    if not (a.need_ddown or a.need_ddown_bias or a.down_bias is not None):
        g = None
    if passes and _gate_pass_fits(a, dact, down_dt):
        dz, act, gate_up_dt = _gate_pass(a, dact, down_dt, gradients, in_place=in_place)
    else:
        dz, act, gate_up_dt = _gate_backward(a, dact, g, gradients, in_place=in_place)
    del dact
    if a.need_ddown:
        gradients["down"] = grouped_gemm.weight_gradient(*((act, g) if a.transposed else (g, act)), a.offsets)
    if a.need_ddown_a and "down_a" not in gradients:
        gradients["down_a"] = _adapter_gradient(down_dt, act, a.offsets, like=a.down_a, is_b=False)
    del act
    if a.need_ddown_bias:
        gradients["down_bias"] = _sum(g, a.weights, a.order, a.offsets)
    del g
    if gate_up_dt is None and (a.need_dx or a.need_dgate_up_a):
        gate_up_dt = a.gate_up_adapter.transposed().lower(dz, a.offsets)
    _gate_up_gradients(a, dz, gate_up_dt, gradients)
    if a.need_dx:
        gradients["x"] = _dx(a, dz, gate_up_dt)
    return a.results(gradients)


def _rows_pass(a: _Backward, dy, gradients):
    """g, these rows times b of down's adapter, and b's gradient, in one native pass over the rows."""
    gradients["down_b"] = torch.empty_like(a.down_b)
    rows = {"rows": dy, "offsets": a.offsets, "order": a.order, "place": a.place, "keep": not a.is_sorted}
    adapter = {
        "stack": a.down_adapter.transposed().packed_first(a.x.dtype),
        "t": a.down_t,
        "weights": a.weights,
    }
    down_dt, g = _adapter_pass(**rows, **adapter, scale=a.down_scale, out=gradients["down_b"].mT)
    return dy if a.is_sorted else g, down_dt


def _dy_rows(a: _Backward, dy):
    """g, and these rows times b of down's adapter if that is needed."""
    g = dy.contiguous() if a.is_sorted else _gather(dy, a.place)
    if not (a.need_dact or a.need_ddown_a):
        return g, None
    # The kernel of few columns reads the rows of dy in any order, and those are fewer than g's.
    is_narrow = a.down_b is not None and a.down_b.shape[2] <= 32 and g.dtype == torch.bfloat16
    if is_narrow and grouped_gemm.native_fits(dy, a.down):
        return g, a.down_adapter.transposed().lower(dy, a.offsets, a.order, a.place)
    return g, a.down_adapter.transposed().lower(g, a.offsets)


def _dact(a: _Backward, g, down_dt):
    """The gradient of act, without the weights."""
    if a.need_dact:
        addend = a.down_adapter.transposed().addend(down_dt, not a.transposed)
        return grouped_gemm.matmul(g, a.down, a.offsets, not a.transposed, addend)
    # Without gradients of z or weights the kernel needs no dact; it then reads z in its place and drops dz.
    return a.gate_up_rows[:, : a.down.shape[1 if a.transposed else 2]]


def _down_b_gradient(a: _Backward, g):
    t = a.down_t
    if a.weights is not None:
        t = (t * (a.weights if a.is_sorted else a.weights[a.order])[:, None]).to(a.x.dtype)
    return _adapter_gradient(t, g, a.offsets, like=a.down_b, is_b=True, scale=a.down_scale)


def _gate_pass_fits(a: _Backward, dact, down_dt) -> bool:
    """Whether :func:`_gate_pass` takes the call: SwiGLU of frozen experts whose adapters have one rank."""
    has_bias = a.gate_up_bias is not None or a.down_bias is not None
    fits = not (has_bias or a.need_ddown) and (a.kind, a.columns) == (KINDS["silu"], _HALVES)
    fits = fits and _pass_fits(dact, a.gate_up_t, 768) and grouped_gemm.native_fits(a.gate_up_rows, down_dt)
    return fits and a.gate_up_t.shape[1] == down_dt.shape[1]


def _gate_pass(a: _Backward, dact, down_dt, gradients, *, in_place):
    """The gate's backward in one native pass: dz, no act, and dz times b of gate_up's adapter."""
    dz = a.gate_up_rows if in_place else a.gate_up_rows.clone()
    gradients["gate_up_b"], gradients["down_a"] = torch.empty_like(a.gate_up_b), torch.empty_like(a.down_a)
    rows = {"dact": dact, "gate_up": dz, "offsets": a.offsets, "order": a.order, "weights": a.weights}
    adapters = {
        "stack": a.gate_up_adapter.transposed().packed_first(a.x.dtype),
        "t": a.gate_up_t,
        "act_t": down_dt,
    }
    results = {
        "out": gradients["gate_up_b"].mT,
        "act_out": gradients["down_a"],
        "need_dweights": a.need_dweights,
    }
    gate_up_dt, gradients["weights"] = _native_gate_pass(**rows, **adapters, scale=a.gate_up_scale, **results)
    return dz, None, gate_up_dt


def _gate_backward(a: _Backward, dact, g, gradients, *, in_place):
    """dz, and act times the weights if a gradient of down needs it; dz is not multiplied by b yet."""
    inputs = {"dact": dact, "gate_up": a.gate_up_rows, "bias": a.gate_up_bias, "weights": a.weights}
    inputs |= {"order": a.order, "offsets": a.offsets, "g": g, "down_bias": a.down_bias}
    inputs |= {"kind": a.kind, "columns": a.columns, "alpha": a.alpha, "limit": a.limit}
    inputs |= {"need_act": a.need_ddown or a.need_ddown_a, "need_dweights": a.need_dweights}
    if in_place and a.need_dz:
        act, gradients["weights"] = _gate_bwd_in_place(**inputs)
        return a.gate_up_rows, act, None
    dz, act, gradients["weights"] = _gate_bwd(**inputs, need_dgate_up=a.need_dz)
    return dz, act, None


def _gate_up_gradients(a: _Backward, dz, gate_up_dt, gradients) -> None:
    """The gradients of gate_up, its bias and its adapter."""
    if a.need_dgate_up:
        rows = a.x.contiguous() if a.is_sorted else _gather(a.x, a.place)
        pair = (rows, dz) if a.transposed else (dz, rows)
        gradients["gate_up"] = grouped_gemm.weight_gradient(*pair, a.offsets)
        del rows, pair
    if a.need_dgate_up_a:
        order = {"order": a.order, "place": a.place}
        gradients["gate_up_a"] = _adapter_gradient(
            gate_up_dt, a.x, a.offsets, like=a.gate_up_a, is_b=False, **order
        )
    if a.need_dgate_up_b and "gate_up_b" not in gradients:
        gradients["gate_up_b"] = _adapter_gradient(
            a.gate_up_t, dz, a.offsets, like=a.gate_up_b, is_b=True, scale=a.gate_up_scale
        )
    if a.need_dgate_up_bias:
        gradients["gate_up_bias"] = _sum(dz, None, None, a.offsets)


def _dx(a: _Backward, dz, gate_up_dt):
    """The gradients of the rows of x, summed over the experts of a token."""
    addend = a.gate_up_adapter.transposed().addend(gate_up_dt, not a.transposed)
    dx = grouped_gemm.matmul(dz, a.gate_up, a.offsets, not a.transposed, addend)
    if a.is_sorted:
        _zero_rest(dx, a.offsets)
        return dx
    return _combine(dx, a.place, a.offsets, None, None, a.x.shape[0])


_RESULTS = ("y", "gate_up_rows", "order", "place", "offsets", "gate_up_t", "down_t")
for _name in ("experts", "experts_fwd"):
    define(_name, f"{_INPUTS} -> ({', '.join('Tensor ' + name for name in _RESULTS)})", _forward)
define("experts_infer", f"{_INPUTS} -> Tensor", lambda *inputs: _forward(*inputs, keep=False)[0])
define("experts_bwd", f"{_TAKEN.format('')} -> ({_GRADIENTS})", _layer_backward)
define(
    "experts_bwd_in_place",
    f"{_TAKEN.format('(a!)')} -> ({_GRADIENTS})",
    functools.partial(_layer_backward, in_place=True),
)


def _fake(*inputs):
    a = _Inputs(*inputs)
    x, ints = a.x, {"dtype": torch.int32}
    slots = x.shape[0] if a.is_sorted else a.ids.shape[0] * a.ids.shape[1]
    order, place = (x.new_empty(0 if a.is_sorted else slots, **ints) for _ in range(2))
    offsets = x.new_empty(a.gate_up.shape[0] + 1, **ints)
    z = x.new_empty(slots, a.gate_up.shape[2 if a.transposed else 1])
    lows = ((0, 0) if t is None else (slots, _columns(t.shape[1])) for t in (a.gate_up_a, a.down_a))
    return x.new_empty(x.shape), z, order, place, offsets, *map(x.new_empty, lows)


def _fake_bwd(*arguments):
    a, gradients = _Backward(*arguments), []
    for name in _TRAINED:
        t = getattr(a, name) if getattr(a, f"need_d{name}") else a.x.new_empty(0)
        gradients.append(torch.empty_like(t) if name in _LORA else t.new_empty(t.shape))
    return tuple(gradients)


_op = paired(_OP, _fake, results=1, fake_bwd=_fake_bwd, in_place=True)


def _check(op, x, parameters, form) -> None:
    """The operands that both functions share."""
    gate_up, down, gate_up_bias, down_bias, gate_up_lora, down_lora = parameters
    activation, gated, interleaved, transposed, alpha, limit = form
    arguments.check_choice(op, "activation", activation, KINDS)
    arguments.check_booleans(op, gated=gated, interleaved=interleaved, transposed=transposed)
    check(op, gated or activation not in _CLAMPED, "gated must be True for {}, got {}", activation, gated)
    check(op, gated or not interleaved, "interleaved must be False without gate, got {}", interleaved)
    arguments.check_numbers(op, alpha=alpha)
    arguments.check_positive(op, "limit", limit)
    arguments.check_float(op, "x", x)
    for name, t in (("gate_up", gate_up), ("down", down)):
        arguments.check_float(op, name, t)
        check(op, t.dim() == 3, name + " must have three dimensions, got {}", t.dim())
    hidden, wide = (gate_up.shape[i] for i in ((1, 2) if transposed else (2, 1)))
    experts, parts = gate_up.shape[0], 2 if gated else 1
    check(op, experts >= 1, "gate_up must have at least one expert, got {}", experts)
    check(op, x.dim() >= 1 and x.shape[-1] == hidden, "x must be [..., {}], got {}", hidden, tuple(x.shape))
    check(op, wide % parts == 0, "gate_up must have an even number of columns per expert, got {}", wide)
    inner = wide // parts
    expected = (experts, inner, hidden) if transposed else (experts, hidden, inner)
    for name, t, shape in (
        ("gate_up", gate_up, gate_up.shape),
        ("down", down, expected),
        ("gate_up_bias", gate_up_bias, (experts, wide)),
        ("down_bias", down_bias, (experts, hidden)),
    ):
        if t is not None:
            arguments.check_float(op, name, t)
            arguments.check_like(op, name, t, shape, x.device)
            check(op, t.dtype == x.dtype, name + " must be {}, got {}", x.dtype, t.dtype)
    _check_adapter(op, "gate_up_lora", gate_up_lora, (experts, hidden, wide), x)
    _check_adapter(op, "down_lora", down_lora, (experts, inner, hidden), x)


_KINDS_OF_ADAPTERS = (torch.float32, torch.bfloat16, torch.float16)


def _check_adapter(op, name, lora, sizes, x) -> None:
    """(a, b, scale) of matrices of these sizes: experts, in, out."""
    if lora is None:
        return
    triple = isinstance(lora, (tuple, list)) and len(lora) == 3
    check(op, triple, name + " must be (a, b, scale), got {}", lora)
    experts, columns, rows = sizes
    arguments.check_numbers(op, **{name + "[2]": lora[2]})
    check(op, not isinstance(lora[2], torch.Tensor), name + "[2] must be a number, got a tensor")
    for i, t in enumerate(lora[:2]):
        arguments.check_float(op, f"{name}[{i}]", t)
        fits = t.dim() in (2, 3) and t.shape[i - 2] >= 1
        check(op, fits, name + "[{}] must have two or three dimensions and a rank, got {}", i, tuple(t.shape))
    rank = lora[0].shape[-2]
    for i, (t, shape) in enumerate(zip(lora[:2], ((rank, columns), (rows, rank)), strict=True)):
        arguments.check_like(op, f"{name}[{i}]", t, (experts, *shape)[3 - t.dim() :], x.device)
        kinds = (torch.float64,) if x.dtype == torch.float64 else _KINDS_OF_ADAPTERS
        check(op, t.dtype in kinds, name + "[{}] must be one of {}, got {}", i, kinds, t.dtype)


def _adapter(lora, experts) -> tuple:
    """a and b of every expert, and the scale."""
    if lora is None:
        return None, None, 1.0
    a, b = (t if t.dim() == 3 else t.expand(experts, -1, -1) for t in lora[:2])
    return a, b, float(lora[2])


def _check_weights(op, name, weights, shape, x) -> None:
    if weights is not None:
        arguments.check_float(op, name, weights)
        arguments.check_like(op, name, weights, shape, x.device)


# The operators' names of arguments, if they differ from those of both functions.
_WORDS = {
    "experts_gated_matmul.stack": "gate_up",
    "experts_gated_matmul.bias": "gate_up_bias",
    "experts_matmul.stack": "down",
    "experts_combine.bias": "down_bias",
}


class _Parameters(NamedTuple):
    """The parameters of a layer, by the names of the public functions."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate_up_lora: tuple | None
    down_lora: tuple | None


class _Form(NamedTuple):
    """The gated unit and the layout, by the names of the public functions."""

    activation: str
    gated: bool
    interleaved: bool
    transposed: bool
    alpha: float
    limit: float


def _run(x, ids, weights, is_sorted, parameters, form):
    gate_up_a, gate_up_b, gate_up_scale = _adapter(parameters.gate_up_lora, parameters.gate_up.shape[0])
    down_a, down_b, down_scale = _adapter(parameters.down_lora, parameters.gate_up.shape[0])
    inputs = _Inputs(
        x=x,
        gate_up=parameters.gate_up,
        down=parameters.down,
        ids=ids,
        weights=weights,
        gate_up_bias=parameters.gate_up_bias,
        down_bias=parameters.down_bias,
        gate_up_a=gate_up_a,
        gate_up_b=gate_up_b,
        down_a=down_a,
        down_b=down_b,
        is_sorted=is_sorted,
        kind=KINDS[form.activation],
        columns=_SINGLE if not form.gated else _INTERLEAVED if form.interleaved else _HALVES,
        transposed=form.transposed,
        alpha=form.alpha,
        limit=form.limit,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
    )
    return _op(*inputs)


@arguments.called(_WORDS)
def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_lora: tuple | None = None,
    down_lora: tuple | None = None,
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> torch.Tensor:
    """A layer of experts: ``y_t = sum over j of weights[t, j] * expert_{ids[t, j]}(x_t)``.

    An expert is ``down(unit(gate_up(x)))`` with the unit ``act(gate) * up``. The call saves x, the rows of
    gate_up and indices for the backward, and nothing else of the size of the chosen rows.

    Args:
        x: ``[..., H]`` float32, bfloat16 or float16. float64 runs the eager reference.
        gate_up: ``[E, 2 I, H]``, gate then up; `transposed`: ``[E, H, 2 I]``. All parameters have x's dtype.
        down: ``[E, H, I]``; `transposed`: ``[E, I, H]``.
        ids: ``[..., K]`` int64 or int32, the experts of a token; one may occur twice. An id ``>= E`` belongs
            to another process (expert parallelism): its slot costs nothing and adds nothing, and its weight
            gets gradient 0.
        weights: ``[..., K]`` in any of the three dtypes, or ``None``: 1.
        activation: ``"silu"``, ``"gelu"`` (exact), ``"gelu_tanh"``, ``"relu"``, ``"relu_squared"``, or
            ``"swiglu_oai"``: gpt-oss' ``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)``,
            ``g = min(gate, limit)``, or ``"swiglu_clamped"``: DeepSeek-V4's
            ``clamp(up, -limit, limit) * silu(g)``.
        gated: ``False``: only the activation, no multiplication by up; gate_up has I columns.
        interleaved: gate and up alternate by column.
        gate_up_bias, down_bias: ``[E, 2 I]`` in gate_up's order, ``[E, H]``.
        gate_up_lora, down_lora: adapters ``(a, b, scale)``: ``scale * b[e] @ a[e]`` is added to the matrix
            ``[out, in]`` of expert e, whatever `transposed` is, and never formed. a is ``[E, r, in]`` and b
            ``[E, out, r]``; without E they are those of all experts. Each has any of the three dtypes, and
            the matmuls round it to x's. The call also saves ``x @ a.T`` of the chosen rows.
        alpha, limit: parameters of ``"swiglu_oai"``; limit also of ``"swiglu_clamped"``.

    Returns:
        ``[..., H]`` in x's dtype. The K rows of a token are added in float32 in their order and rounded once.
        The result is differentiable in x, weights, parameters and adapters. It is bitwise deterministic and
        uses no float atomics. A tensor that needs no gradient costs no matmul. The gradients of an expert
        without tokens are exact zeros. The gradient of down is a matmul with the unit's result times its
        weight; in float16 this must stay below 65504.

        On CUDA Tigon's own grouped GEMM runs for 16 bits on sm_90 if H and I are multiples of 8. Otherwise
        bfloat16 uses ``torch.nn.functional.grouped_mm``. Neither synchronises, so both can be captured in
        CUDA graphs. All other cases run one GEMM per expert, which synchronises.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit; on the CPU also a negative id, which CUDA
            treats as an expert of another process.

    Source: Shazeer et al. 2017, arXiv:1701.06538; gradients without the experts' outputs: Guo et al. 2025,
    arXiv:2512.14080.
    """
    parameters = _Parameters(gate_up, down, gate_up_bias, down_bias, gate_up_lora, down_lora)
    form = _Form(activation, gated, interleaved, transposed, alpha, limit)
    _check(_OP, x, parameters, form)
    arguments.check_indices(_OP, "ids", ids)
    fits = ids.dim() == x.dim() and ids.shape[:-1] == x.shape[:-1] and x.dim() >= 2
    check(_OP, fits, "ids must be {}, got {}", (*x.shape[:-1], "K"), tuple(ids.shape))
    check(_OP, ids.device == x.device, "ids must be on {}, got {}", x.device, ids.device)
    _check_weights(_OP, "weights", weights, ids.shape, x)
    if not has_kernel(_OP, x=x, weights=weights):
        negative = ids[ids < 0][:1].tolist() if arguments.readable(ids) else []
        check(_OP, not negative, "ids must be >= 0, got {}", *negative)
        return reference(x, ids=ids, weights=weights, **parameters._asdict(), **form._asdict())
    rows, row_ids = (t.flatten(end_dim=-2) for t in (x, ids))
    row_weights = None if weights is None else weights.reshape(-1)
    return _run(rows, row_ids, row_weights, False, parameters, form).reshape(x.shape)


@arguments.called(_WORDS | {"x": "rows", "experts_combine.weights": "row_weights"})
def grouped_mlp(
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    offsets: torch.Tensor,
    row_weights: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_lora: tuple | None = None,
    down_lora: tuple | None = None,
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> torch.Tensor:
    """Experts applied to rows that are already sorted by expert, as expert parallelism delivers them.

    Args:
        rows: ``[S, H]``.
        offsets: ``[E]`` int32 or int64 on the device: the end of each expert's rows, as ``grouped_mm`` takes
            them. Rows from ``offsets[-1]`` on are not read; their results and gradients are zeros.
        row_weights: ``[S]`` in any of the three dtypes, or ``None``: 1.
        gate_up, down, activation, ...: as in :func:`tigon.experts`.

    Returns:
        ``[S, H]``: ``row_weights * expert(rows)``.

    Raises:
        tigon.Error: as :func:`tigon.experts`; on the CPU also offsets that decrease or run past the rows,
            which on CUDA are undefined behaviour.
    """
    op = "grouped_mlp"
    parameters = _Parameters(gate_up, down, gate_up_bias, down_bias, gate_up_lora, down_lora)
    form = _Form(activation, gated, interleaved, transposed, alpha, limit)
    _check(op, rows, parameters, form)
    check(op, rows.dim() == 2, "rows must have two dimensions, got {}", rows.dim())
    arguments.check_indices(op, "offsets", offsets)
    arguments.check_like(op, "offsets", offsets, gate_up.shape[:1], rows.device)
    _check_weights(op, "row_weights", row_weights, rows.shape[:1], rows)
    if arguments.readable(offsets):  # reading it on a device would synchronise
        ends, count = offsets.tolist(), rows.shape[0]
        if any(b < a for a, b in zip([0, *ends], [*ends, count], strict=True)):
            refuse(op, "offsets must not decrease and lie in [0, {}], got {}", count, ends)
    if not has_kernel(op, rows=rows, row_weights=row_weights):
        return _reference_of_rows(rows, offsets, row_weights, **parameters._asdict(), **form._asdict())
    return _run(rows, offsets, row_weights, True, parameters, form)
