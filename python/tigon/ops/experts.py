"""Experts of a mixture. Contract of the pieces: ``csrc/tigon/ops/experts/experts.h``.

This module defines the operators of a whole layer. Routing, gather, gate and combine are native, and so are
the matmuls between them on the CPU and on sm_90. On other GPUs PyTorch computes the matmuls.
"""

from __future__ import annotations

import functools
import re
from collections import namedtuple
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tigon._deterministic import is_deterministic
from tigon._load import native
from tigon._op import define, has_kernel, paired
from tigon.environment import own_products
from tigon.error import check, refuse
from tigon.ops import arguments
from tigon.ops.loss_head.products import form_gradients, form_logits

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
_route, _gather, _gate = native("experts_route"), native("experts_gather"), native("experts_gate")
_gate_bwd, _gate_bwd_in_place = native("experts_gate_bwd"), native("experts_gate_bwd_in_place")
_combine, _sum = native("experts_combine"), native("experts_sum")
_zero_rest, _copy = native("experts_zero_rest"), native("experts_copy")
_product, _weight_gradient = native("experts_product"), native("experts_weight_gradient")
_gated_product, _gradient = native("experts_gated_product"), native("experts_adapter_gradient")
_adapter_pass, _gate_pass = native("experts_adapter_pass"), native("experts_gate_pass")


def own_fits(rows, other) -> bool:
    """Whether the native matmuls take these: on CUDA 16-bit rows of whole 16-byte vectors, on sm_90."""
    if rows.is_cpu:
        return True
    if rows.dtype == torch.float32 or not own_products(rows.device):
        return False
    aligned = (t.data_ptr() % 16 == 0 and t.is_contiguous() for t in (rows, other))
    return all(aligned) and all(n % 8 == 0 for t in (rows, other) for n in t.shape[1:])


def pass_fits(rows, t, most=2048) -> bool:
    """Whether one native pass over rows of the backward takes an adapter whose rows are t."""
    columns = rows.shape[1]
    fits = rows.is_cuda and rows.dtype == torch.bfloat16 and columns % 16 == 0 and columns <= most
    return fits and 0 < t.shape[1] <= 16 and own_fits(rows, t)


def grouped_fits(offsets, rows) -> bool:
    """Whether ``grouped_mm`` has a kernel for these."""
    return rows.dtype == torch.bfloat16 and offsets.numel() <= 1024


def _whole(t):
    """t with zeros up to whole 16-byte vectors in every dimension but the first, at an aligned address."""
    zeros = [n for size in reversed(t.shape[1:]) for n in (0, -size % 8)]
    t = F.pad(t, zeros) if any(zeros) else t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def grouped_product(rows, stack, offsets, transposed):
    """:func:`product` in one launch."""
    columns, stack = stack.shape[2 if transposed else 1], _whole(stack)
    matrices = stack if transposed else stack.transpose(1, 2)
    return F.grouped_mm(_whole(rows), matrices, offs=offsets[1:])[:, :columns].contiguous()


def grouped_weight_gradient(a, b, offsets):
    """:func:`weight_gradient` in one launch."""
    out = F.grouped_mm(_whole(a).t(), _whole(b), offs=offsets[1:])
    return out[:, : a.shape[1], : b.shape[1]].contiguous()


def each_product(rows, stack, offsets, transposed):
    """:func:`product` expert by expert; waits for the device."""
    out = rows.new_empty(rows.shape[0], stack.shape[2 if transposed else 1])
    ends, alike = offsets.tolist(), is_deterministic()  # PyTorch chooses a kernel by the number of rows
    for matrix, begin, end in zip(stack, ends, ends[1:], strict=False):
        part, to = rows[begin:end], out[begin:end]
        if not alike:
            torch.mm(part, matrix if transposed else matrix.t(), out=to)
        elif transposed:
            form_gradients(part, to, matrix, dhidden=to)
        else:
            form_logits(to, part, matrix)
    return out


def each_weight_gradient(a, b, offsets):
    """:func:`weight_gradient` expert by expert; waits for the device."""
    ends = offsets.tolist()
    out = a.new_empty(len(ends) - 1, a.shape[1], b.shape[1])
    for e, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        torch.mm(a[begin:end].t(), b[begin:end], out=out[e])
    return out


_NO_LORA = None, None


def product(rows, stack, offsets, transposed, lora=_NO_LORA, order=None, place=None):
    """Rows of expert e times its matrix: ``[in, out]`` if `transposed`, else ``[out, in]``.

    Args:
        lora: other rows and another stack of the same layout, whose matmul is added.
        order, place: the rows of the experts are those of `rows` in this order, if given.
    """
    if own_fits(rows, stack):
        return _product(rows, stack, offsets, transposed, order, place, *lora)
    rows = rows.contiguous() if order is None else _gather(rows, place)
    run = grouped_product if grouped_fits(offsets, rows) else each_product
    y = run(rows, stack, offsets, transposed)
    return y if lora[0] is None else y.add_(run(*lora, offsets, transposed))


def gated_product(x, order, place, stack, bias, offsets, unit, keep, lora=_NO_LORA):
    """Rows of x (in `order`, if given) times gate_up, empty unless kept; and the gated unit."""
    if own_fits(x, stack):
        return _gated_product(x, order, place, stack, bias, offsets, *unit, keep, *lora)
    z = product(x, stack, offsets, unit.transposed, lora, order, place)
    return z, _gate(z, bias, offsets, unit.kind, unit.columns, unit.alpha, unit.limit)


def weight_gradient(a, b, offsets):
    """``a_e^T b_e`` of the rows of every expert e; zeros if it has none."""
    if own_fits(a, b):
        return _weight_gradient(a, b, offsets)
    return (grouped_weight_gradient if grouped_fits(offsets, a) else each_weight_gradient)(a, b, offsets)


def _columns(rank: int) -> int:
    """The columns that an adapter's rows have: a multiple of 8."""
    return -(-rank // 8) * 8


def _packed(matrices, scale, dtype, dim):
    """``scale * matrices`` in `dtype`, with zeros in dimension `dim`, the rank, up to a multiple of 8."""
    shape = list(matrices.shape)
    rank, shape[dim] = shape[dim], _columns(shape[dim])
    if scale == 1 and matrices.is_contiguous() and shape[dim] == rank:
        return matrices.to(dtype)
    out = (matrices.new_empty if shape[dim] == rank else matrices.new_zeros)(shape, dtype=dtype)
    _copy(matrices, out.narrow(dim, 0, rank), scale)
    return out


def _added(t, second, scale, transposed):
    """What :func:`product` takes to add the product of t and an adapter's second matrices."""
    second = second.mT if transposed else second
    return t, _packed(second, scale, t.dtype, 1 if transposed else 2)


def _lowered(rows, first, second, scales, offsets, transposed, order=None, place=None):
    """Rows times an adapter's first matrices, and what :func:`product` takes to add the second ones.

    Args:
        first, second: ``[E, r, in]`` and ``[E, out, r]``, or None. In the backward b comes first.
        transposed: as in the :func:`product` to which they are added.
    """
    if first is None:
        return rows.new_empty(0, 0), _NO_LORA
    t = product(rows, _packed(first, scales[0], rows.dtype, 1), offsets, False, _NO_LORA, order, place)
    return t, _added(t, second, scales[1], transposed)


def _adapter_gradient(t, rows, offsets, like, is_b, scale=1.0, order=None, place=None):
    """``scale t_e^T rows_e`` of every expert: the gradient of `like`, a or b, in its order of memory."""
    out = torch.empty_like(like)
    matrices = out.mT if is_b else out
    if own_fits(rows, t):
        _gradient(t, rows, offsets, order, place, scale, matrices)
    else:
        rows = rows.contiguous() if order is None else _gather(rows, place)
        _copy(weight_gradient(t, rows, offsets)[:, : matrices.shape[1]], matrices, scale)
    return out


class Unit(NamedTuple):
    """The gated unit, and the layout of the matrices."""

    kind: int
    columns: int
    transposed: bool
    alpha: float
    limit: float


def _forward(x, gate_up, down, ids, weights, gate_up_bias, down_bias, *rest, keep=True):
    """y, and the tensors of the backward: rows of gate_up (only with `keep`), order, place, offsets, and the
    rows that were multiplied by a of the adapters."""
    gate_up_a, gate_up_b, down_a, down_b, is_sorted, *unit, gate_up_scale, down_scale = rest
    ints, unit = {"dtype": torch.int32, "device": x.device}, Unit(*unit)
    order = place = torch.empty(0, **ints)
    slots = x.shape[0] if is_sorted else ids.numel()
    if slots == 0:
        z = x.new_empty(0, gate_up.shape[2 if unit.transposed else 1])
        offsets = torch.zeros(gate_up.shape[0] + 1, **ints)
        lows = (x.new_empty(0, 0 if a is None else _columns(a.shape[1])) for a in (gate_up_a, down_a))
        return torch.zeros_like(x), z, order, order.clone(), offsets, *lows
    if is_sorted:
        place, offsets = order.clone(), F.pad(ids.to(torch.int32), (1, 0))
    else:
        order, place, offsets = _route(ids.contiguous(), gate_up.shape[0])
    slots = None if is_sorted else order
    layout = offsets, unit.transposed
    gate_up_t, lora = _lowered(x, gate_up_a, gate_up_b, (1, gate_up_scale), *layout, slots, place)
    z, act = gated_product(x, slots, place, gate_up, gate_up_bias, offsets, unit, keep, lora)
    down_t, lora = _lowered(act, down_a, down_b, (1, down_scale), *layout)
    y = product(act, down, *layout, lora)
    if is_sorted and weights is None and down_bias is None:
        _zero_rest(y, offsets)
    else:
        y = _combine(y, None if is_sorted else place, offsets, weights, down_bias, x.shape[0])
    return y, z, order, place, offsets, gate_up_t, down_t


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
    f"{_NEEDS}) -> ({_GRADIENTS})"
)
_Backward = namedtuple("_Backward", re.findall(r"(\w+)[,)]", _TAKEN.partition(" -> ")[0]))


def _layer_backward(*arguments, in_place=False):
    """Gradients of `_TRAINED`; 0 elements if one is not needed.

    Args:
        arguments: of `_Backward`.
        in_place: the gradient of gate_up_rows is written over them.
    """
    a = _Backward(*arguments)
    x, z, offsets, is_sorted, transposed = a.x, a.gate_up_rows, a.offsets, a.is_sorted, a.transposed
    if z.shape[0] == 0:
        needed = ((getattr(a, name), getattr(a, f"need_d{name}")) for name in _TRAINED)
        return tuple(torch.zeros_like(t) if need else x.new_empty(0) for t, need in needed)
    found = dict.fromkeys(_TRAINED)
    slots, places = (None, None) if is_sorted else (a.order, a.place)
    layout = offsets, not transposed
    need_dz = a.need_dx or a.need_dgate_up or a.need_dgate_up_bias or a.need_dgate_up_a or a.need_dgate_up_b
    need_act = a.need_ddown or a.need_ddown_a
    need_dact = need_dz or a.need_dweights
    # Without gradients of z or weights the kernel needs no dact; it then reads z in its place and drops dz.
    dact = z[:, : a.down.shape[1 if transposed else 2]]
    dy = a.dy if a.down_b is None else a.dy.contiguous()
    lora = _NO_LORA
    # What is passed over does not depend on which gradients of adapters are needed, so that no bit does.
    passes = pass_fits(dy, a.down_t) and own_fits(dy, a.down)
    passes = passes and (need_dact or a.need_ddown_a or a.need_ddown_b)
    if passes:
        found["down_b"] = torch.empty_like(a.down_b)
        given = offsets, slots, places, a.down_t, a.weights, a.down_scale, found["down_b"].mT, not is_sorted
        first = _packed(a.down_b.mT, a.down_scale, x.dtype, 1)
        down_dt, g = _adapter_pass(dy, first, *given)
        g = dy if is_sorted else g
        if need_dact:
            lora = _added(down_dt, a.down_a.mT, 1, layout[1])
    else:
        g = dy.contiguous() if is_sorted else _gather(dy, a.place)
        if need_dact or a.need_ddown_a:
            # The kernel of few columns reads the rows of dy in any order, and those are fewer than g's.
            is_narrow = a.down_b is not None and a.down_b.shape[2] <= 32 and g.dtype == torch.bfloat16
            rows, *by = (dy, slots, places) if is_narrow and own_fits(dy, a.down) else (g, None, None)
            pair = _turned(a.down_b), _turned(a.down_a)
            down_dt, lora = _lowered(rows, *pair, (a.down_scale, 1), *layout, *by)
            del rows, pair
    if need_dact:
        dact = product(g, a.down, *layout, lora)
    del dy, lora
    if a.need_ddown_b and not passes:
        t = a.down_t
        if a.weights is not None:
            t = (t * (a.weights if is_sorted else a.weights[slots])[:, None]).to(x.dtype)
        found["down_b"] = _adapter_gradient(t, g, offsets, a.down_b, True, a.down_scale)
    if not (a.need_ddown or a.need_ddown_bias or a.down_bias is not None):
        g = None
    unit = a.kind, a.columns, a.alpha, a.limit
    gate_inputs = (dact, z, a.gate_up_bias, a.weights, slots, offsets, g, a.down_bias, *unit)
    lora = _NO_LORA
    has_bias = a.gate_up_bias is not None or a.down_bias is not None
    gates = passes and not (has_bias or a.need_ddown) and (a.kind, a.columns) == (KINDS["silu"], _HALVES)
    gates = gates and pass_fits(dact, a.gate_up_t, 768) and own_fits(z, down_dt)
    gates = gates and a.gate_up_t.shape[1] == down_dt.shape[1]
    if gates:
        dz, act = z if in_place else z.clone(), None
        found["gate_up_b"], found["down_a"] = torch.empty_like(a.gate_up_b), torch.empty_like(a.down_a)
        first = _packed(a.gate_up_b.mT, a.gate_up_scale, x.dtype, 1)
        given = offsets, slots, a.weights, a.gate_up_t, down_dt, a.gate_up_scale
        results = found["gate_up_b"].mT, found["down_a"], a.need_dweights
        gate_up_dt, dweights = _gate_pass(dact, dz, first, *given, *results)
        if a.need_dx:
            lora = _added(gate_up_dt, a.gate_up_a.mT, 1, layout[1])
    elif in_place and need_dz:
        dz = z
        act, dweights = _gate_bwd_in_place(*gate_inputs, need_act, a.need_dweights)
    else:
        dz, act, dweights = _gate_bwd(*gate_inputs, need_dz, need_act, a.need_dweights)
    found["weights"] = dweights
    del gate_inputs
    del dact
    if a.need_ddown:
        pair = (act, g) if transposed else (g, act)
        found["down"] = weight_gradient(*pair, offsets)
    if a.need_ddown_a and not gates:
        found["down_a"] = _adapter_gradient(down_dt, act, offsets, a.down_a, False)
    del act
    if a.need_ddown_bias:
        found["down_bias"] = _sum(g, a.weights, slots, offsets)
    del g
    if (a.need_dx or a.need_dgate_up_a) and not gates:
        pair = _turned(a.gate_up_b), _turned(a.gate_up_a)
        gate_up_dt, lora = _lowered(dz, *pair, (a.gate_up_scale, 1), *layout)
    if a.need_dgate_up:
        rows = x.contiguous() if is_sorted else _gather(x, a.place)
        pair = (rows, dz) if transposed else (dz, rows)
        found["gate_up"] = weight_gradient(*pair, offsets)
        del rows, pair
    if a.need_dgate_up_a:
        given = x, offsets, a.gate_up_a, False, 1.0, slots, places
        found["gate_up_a"] = _adapter_gradient(gate_up_dt, *given)
    if a.need_dgate_up_b and not gates:
        found["gate_up_b"] = _adapter_gradient(a.gate_up_t, dz, offsets, a.gate_up_b, True, a.gate_up_scale)
    if a.need_dgate_up_bias:
        found["gate_up_bias"] = _sum(dz, None, None, offsets)
    if a.need_dx:
        dx = product(dz, a.gate_up, *layout, lora)
        if is_sorted:
            _zero_rest(dx, offsets)
        else:
            dx = _combine(dx, places, offsets, None, None, x.shape[0])
        found["x"] = dx
    return tuple(
        t if t is not None and getattr(a, f"need_d{name}") else x.new_empty(0) for name, t in found.items()
    )


def _turned(matrices):
    return None if matrices is None else matrices.mT


_RESULTS = ("y", "gate_up_rows", "order", "place", "offsets", "gate_up_t", "down_t")
for _name in ("experts", "experts_fwd"):
    define(_name, f"{_INPUTS} -> ({', '.join('Tensor ' + name for name in _RESULTS)})", _forward)
define("experts_infer", f"{_INPUTS} -> Tensor", lambda *inputs: _forward(*inputs, keep=False)[0])
define("experts_bwd", _TAKEN.format(""), _layer_backward)
define("experts_bwd_in_place", _TAKEN.format("(a!)"), functools.partial(_layer_backward, in_place=True))


def _fake(x, gate_up, down, ids, weights, gate_up_bias, down_bias, *rest):
    gate_up_a, _, down_a, _, is_sorted, _, _, transposed, *_ = rest
    ints = {"dtype": torch.int32}
    slots = x.shape[0] if is_sorted else ids.shape[0] * ids.shape[1]
    order, place = (x.new_empty(0 if is_sorted else slots, **ints) for _ in range(2))
    offsets = x.new_empty(gate_up.shape[0] + 1, **ints)
    z = x.new_empty(slots, gate_up.shape[2 if transposed else 1])
    lows = ((0, 0) if a is None else (slots, _columns(a.shape[1])) for a in (gate_up_a, down_a))
    return x.new_empty(x.shape), z, order, place, offsets, *map(x.new_empty, lows)


def _fake_bwd(*arguments):
    a, found = _Backward(*arguments), []
    for name in _TRAINED:
        t = getattr(a, name) if getattr(a, f"need_d{name}") else a.x.new_empty(0)
        found.append(torch.empty_like(t) if name in _LORA else t.new_empty(t.shape))
    return tuple(found)


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
    "experts_gated_product.stack": "gate_up",
    "experts_gated_product.bias": "gate_up_bias",
    "experts_product.stack": "down",
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
    gate_up, down, gate_up_bias, down_bias, *loras = parameters
    columns = _SINGLE if not form.gated else _INTERLEAVED if form.interleaved else _HALVES
    unit = Unit(KINDS[form.activation], columns, form.transposed, form.alpha, form.limit)
    (*gate_up_ab, gate_up_scale), (*down_ab, down_scale) = (
        _adapter(lora, gate_up.shape[0]) for lora in loras
    )
    rest = (*gate_up_ab, *down_ab, is_sorted, *unit, gate_up_scale, down_scale)
    return _op(x, gate_up, down, ids, weights, gate_up_bias, down_bias, *rest)


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
    rows, row_ids = (t.reshape(-1, t.shape[-1]) for t in (x, ids))
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
