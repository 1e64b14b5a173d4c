"""Linear maps with low-rank adapters. Contract: ``csrc/tigon/ops/lora_linear/lora_linear.h``."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from tigon import _fp8_bytes, _op
from tigon._load import native
from tigon.error import Error, check, refuse
from tigon.ops import fp8_linear
from tigon.ops.arguments import called, check_dense, check_float, check_numbers, check_stored, kind_of
from tigon.ops.loss_head.operands import autocast
from tigon.ops.philox import seed_of, words_of_matrix
from tigon.ops.rms_norm import column_dot

_OP = "lora_linear"


class Base(NamedTuple):
    """A frozen linear map: its weight, or a function that makes it in each pass, and its bias.

    With `quantised`, a function that gives the weight in float8, the matmuls are those of `fp8_linear`. A
    `gathered` weight exists only while it is gathered.
    """

    weight: torch.Tensor | Callable[[], torch.Tensor]
    bias: torch.Tensor | None = None
    quantised: Callable[[], fp8_linear.Quantized] | None = None
    gathered: bool = False


class Adapter(NamedTuple):
    """``scale * d(x) @ a.T @ b.T`` of the map at place ``base`` of the list."""

    base: int
    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0
    dropout: float = 0.0


def dropout_factors(shape: tuple[int, int], p: float, seed: torch.Tensor, stream: int) -> torch.Tensor:
    """The factors by which the kernels multiply the elements of x, as float64: 0 or ``1 / (1 - p)``."""
    rows, columns = shape
    words = words_of_matrix(torch.arange(rows, device=seed.device), columns, stream, seed)
    return (words >= int(p * 2**32)).double() / (1 - p)


def reference(x, bases, adapters, seed=None, linear=F.linear):
    """Compute the same formula with PyTorch operations (any float dtype, any device)."""
    rows = x.reshape(-1, x.shape[-1])
    ys = [linear(rows, base.weight, base.bias) for base in bases]
    for i, (base, a, b, scale, p) in enumerate(adapters):
        dropped = rows
        if p > 0:
            dropped = rows * dropout_factors(tuple(rows.shape), p, seed, i).to(rows)
        t = F.linear(dropped, a.to(x.dtype))
        ys[base] = ys[base] + F.linear(t, b.to(x.dtype)) * scale
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys)


def _columns(rank: int) -> int:
    """The number of columns of an adapter in t: each adapter starts at a multiple of 8."""
    return (rank + 7) // 8 * 8


class CallOptions(NamedTuple):
    """The lists of numbers that the operators take, in their order."""

    linears: list[int]  # the linear of each adapter, then of each bias
    scales: list[float]
    dropouts: list[float]


@dataclasses.dataclass(slots=True, eq=False)  # not a tuple: vmap would look for tensors in it
class CallLayout:
    """The meaning of a call's tensors, in this order: weights, biases, A of each adapter, B of each."""

    count: int  # of weights
    options: CallOptions
    makers: Sequence[Callable | None] = ()  # functions that make a weight for the forward or the backward
    dora: bool = False  # an adapter and no bias for each weight; the magnitudes are the last tensors
    quantised: Sequence[Callable] = ()  # functions that give the weights in float8, of none or of all
    gathered: bool = False  # they are called in each pass

    @property
    def adapters(self) -> int:
        return len(self.options.scales)

    def dense(self, tensors):
        """The tensors, with the weights that the makers give."""
        if not self.makers:
            return tensors
        made = [t if make is None else make() for make, t in zip(self.makers, tensors, strict=False)]
        return (*made, *tensors[self.count :])

    def operands(self, tensors, made):
        """The tensors, with the weights of this call: made by the makers, or the bytes of `made`."""
        if not self.quantised:
            return self.dense(tensors)
        return (*(weight.bytes for weight in made), *tensors[self.count :])


def _constant(layout, need_x, needs, ys) -> list:
    """The results that depend on no tensor that needs a gradient."""
    if need_x:
        return []
    n, each = layout.count, layout.adapters
    # The map of each tensor: weights, biases, A and B.
    linears = layout.options.linears
    of = (*range(n), *linears[each:], *linears[:each] * 2)
    trained = {i for i, need in zip(of, needs, strict=True) if need}
    return [y for i, y in enumerate(ys) if i not in trained]


def _split_adapters(tensors, scales) -> tuple:
    """All A and all B."""
    each = len(scales)
    return tensors[len(tensors) - 2 * each : len(tensors) - each], tensors[len(tensors) - each :]


def _fake(x, tensors, linears, scales, dropouts, seed, t, only_t, fp8):
    a, _ = _split_adapters(tensors, scales)
    weights = tensors[: len(tensors) - len(linears) - len(scales)]
    rows, columns = x.shape[:-1].numel(), sum(_columns(m.shape[0]) for m in a)
    ys = [] if only_t else [x.new_empty(*x.shape[:-1], w.shape[0]) for w in weights]
    return [*ys, x.new_empty(rows, columns) if t is None else x.new_empty(0)]


def _fake_bwd(dy, x, tensors, t, linears, scales, dropouts, seed, need_x, need_a, need_b, fp8):
    a, b = _split_adapters(tensors, scales)
    dtype = x.dtype if a and a[0].dtype == x.dtype else torch.float32
    empty = x.new_empty(0)
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else empty,
        x.new_empty(t.shape[1], x.shape[-1], dtype=dtype) if need_a else empty.to(dtype),
        *(torch.empty(m.shape, dtype=dtype, device=x.device) if need_b else empty.to(dtype) for m in b),
    ]


_registered = native(_OP)
_op.register_fake(_OP, _OP, _fake)
_fwd = _op.raw(f"{_OP}_fwd", _fake)
_bwd = _op.raw(f"{_OP}_bwd", _fake_bwd)
_eager = _op.caller(_OP, native(f"{_OP}_fwd"))
_eager_bwd = _op.caller(_OP, native(f"{_OP}_bwd"))


def _save(ctx, layout, x, seed, t, tensors, recompute=None, save=None, made=()):
    """Save tensors for the backward; with `recompute`, which computes x again, x is not kept."""
    ctx.layout, ctx.recompute, ctx.made = layout, recompute, None if layout.gathered else made
    if ctx.made:  # what producers of x and of the results' gradients look for
        ctx.fp8_factors = [weight.scales for weight in made] if ctx.needs_input_grad[2] else None
        ctx.fp8_weight = weakref.ref(made[0].scales)
    (save or ctx.save_for_backward)(x if recompute is None else None, seed, t, *tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dys, need_x, needs):
    """Gradients of x and of the tensors, ``None`` if one is not needed."""
    layout, kept = ctx.layout, getattr(ctx, "kept", None)
    x, seed, t, *tensors = (ctx if kept is None else kept.grad_fn).saved_tensors
    if kept is not None and not _op.graph_is_kept():
        ctx.kept = None
    dys, gradients = list(dys[: layout.count]), [None] * len(tensors)
    if all(dy is None for dy in dys):
        return None, gradients
    if x is None:
        x = ctx.recompute()
    linears, each = layout.options.linears, layout.adapters
    first_b = len(tensors) - each
    first_a = first_b - each
    wanted = need_x, True in needs[first_a:first_b], True in needs[first_b:]
    made = [quantised() for quantised in layout.quantised] if ctx.made is None else ctx.made
    dense = layout.operands(tensors, made)
    fp8 = [weight.scales for weight in made]
    if made and need_x:
        keeps = not layout.gathered
        fp8 += [w.transposed() if keeps and w.keeps_transposed else None for w in made]
        pairs = zip(dys, made, strict=True)
        bytes_and_scales = [(None, None) if dy is None else _fp8_bytes.take(dy, w.scales) for dy, w in pairs]
        fp8 += [q for q, _ in bytes_and_scales] + [s for _, s in bytes_and_scales]
    if _op.is_compiling():
        dx, da, *db = _bwd(dys, x, dense, t, *layout.options, seed, *wanted, [])
    elif _op.is_transformed():
        dx, da, *db = _bwd_transformed(layout, *wanted, x, seed, t, *dys, *dense)
    else:
        dx, da, *db = _eager_bwd(dys, x, dense, t, *layout.options, seed, *wanted, fp8)
    if True in needs[:first_a]:
        for i, at in enumerate((*range(layout.count), *linears[each:])):
            if needs[i] and dys[at] is not None:
                dy = dys[at].reshape(-1, dys[at].shape[-1])
                gradients[i] = dy.t() @ x.reshape(-1, x.shape[-1]) if i < layout.count else dy.sum(0)
    gradients[first_a:] = _adapter_gradients(layout, tensors[first_a:], needs[first_a:], dys, da, db)
    return dx if need_x else None, gradients


def _adapter_gradients(layout, adapters, needs, dys, da, db) -> list:
    """Gradients of all A and all B. da holds the rows of all A, padded with zeros to multiples of 8."""
    linears, each = layout.options.linears, layout.adapters
    das = [da] * each
    if each > 1 and True in needs[:each]:
        das = da.split([_columns(a.shape[0]) for a in adapters[:each]])
    gradients = []
    for i, (gradient, like, need) in enumerate(zip((*das, *db), adapters, needs, strict=True)):
        if not need or dys[linears[i % each]] is None:
            gradients.append(None)
            continue
        if gradient.shape[0] > like.shape[0]:
            gradient = gradient[: like.shape[0]]
        gradients.append(gradient if gradient.dtype == like.dtype else gradient.to(like.dtype))
    return gradients


def _backward_matmuls(layout, need_x, need_a, need_b, x, seed, t, *tensors):
    dys, tensors = tensors[: layout.count], tensors[layout.count :]
    return tuple(_eager_bwd(dys, x, tensors, t, *layout.options, seed, need_x, need_a, need_b, []))


_bwd_transformed = _op.transformable(
    _OP, f"{_OP}_bwd", _backward_matmuls, lambda *_: None, lambda ctx, *_: _op.refuse_second(_OP)
)


# --- as an operator: traced by torch.compile ---------------------------------------------------


def _setup_operator(ctx, inputs, output):
    x, tensors, linears, scales, dropouts, seed, *_ = inputs
    options = CallOptions(linears, scales, dropouts)
    layout = CallLayout(len(tensors) - len(linears) - len(scales), options)
    need_x, *needs = ctx.needs_input_grad  # flat here, unlike in the backward
    constant = _constant(layout, need_x, needs[: len(tensors)], output[:-1])
    ctx.mark_non_differentiable(*constant, output[-1])
    _save(ctx, layout, x, seed, output[-1], tensors)


def _backward_operator(ctx, dys):
    # PyTorch treats an empty list of numbers as a list of tensors.
    options = (None if option else [] for option in ctx.layout.options)
    return *_gradients(ctx, dys, *ctx.needs_input_grad[:2]), *options, None, None, None, []


torch.library.register_autograd(
    f"tigon::{_OP}", _backward_operator, setup_context=_setup_operator, lib=_op._autograd_library
)


# --- as a function of single tensors: eager, and under the transforms of torch.func -----------


def _matmuls(x, tensors, options, seed, t=None, only_t=False, made=()):
    fp8 = [weight.scales for weight in made]
    if made and not only_t:
        fp8 += fp8_linear.rows_of(x)
    return tuple(_eager(x, tensors, *options, seed, t, only_t, fp8))


def _forward(layout, recompute, x, seed, *tensors):
    made = [quantised() for quantised in layout.quantised]
    return _matmuls(x, layout.operands(tensors, made), layout.options, seed, made=made)


def _setup_function(ctx, inputs, output):
    layout, _, x, seed, *tensors = inputs
    ctx.mark_non_differentiable(output[-1])
    _save(ctx, layout, x, seed, output[-1], tensors)


def _refuse_batches():
    if _op.is_batched() and not _op.is_transformed():
        refuse(_OP, "gradients must come one by one (or by torch.func.vmap), got is_grads_batched=True")


def _backward_function(ctx, *dys):
    _refuse_batches()
    needs = ctx.needs_input_grad
    dx, gradients = _gradients(ctx, dys, needs[2], needs[4:])
    return None, None, dx, None, *gradients


_transformed = _op.transformable(_OP, _OP, _forward, _setup_function, _backward_function)


class _Saved(torch.autograd.Function):
    """Saves tensors immediately: autograd saves those of a running function only when it ends."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.view_as(anchor)


_ANCHOR = torch.zeros(0, device="cpu", requires_grad=True)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layout, recompute, x, seed, *tensors):
        made, needs = [quantised() for quantised in layout.quantised], ctx.needs_input_grad
        dense = layout.operands(tensors, made)
        if not _op.saves_through_hooks():
            *ys, t = _matmuls(x, dense, layout.options, seed, made=made)
            _save(ctx, layout, x, seed, t, tensors, recompute, made=made)
            ctx.mark_non_differentiable(*_constant(layout, needs[2], needs[4:], ys))
            return tuple(ys)

        def save(*kept):
            with torch.enable_grad():
                ctx.kept = _Saved.apply(_ANCHOR, *kept)  # the result, which holds the node

        # A checkpoint recomputes a layer only until all saved tensors exist, so it skips the last GEMMs.
        (t,) = _matmuls(x, dense, layout.options, seed, only_t=True, made=made)
        _save(ctx, layout, x, seed, t, tensors, save=save, made=made)
        ys = _matmuls(x, dense, layout.options, seed, t, made=made)[:-1]
        ctx.mark_non_differentiable(*_constant(layout, needs[2], needs[4:], ys))
        return ys

    backward = staticmethod(_op.once(_OP)(_backward_function))


_apply = _op.direct_apply(_Function)


def prepare(bases: Sequence[Base], adapters: Sequence[Adapter], magnitudes=()) -> tuple[CallLayout, tuple]:
    """Make the layout and tensors for many calls; with magnitudes for DoRA, in eager mode."""
    biased = [i for i, base in enumerate(bases) if base.bias is not None]
    linears, a, b, scales, dropouts = map(list, zip(*adapters, strict=True)) if adapters else ([],) * 5
    makers = [None if isinstance(base.weight, torch.Tensor) else base.weight for base in bases]
    weights = [base.weight if make is None else None for base, make in zip(bases, makers, strict=True)]
    quantised = [base.quantised for base in bases if base.quantised is not None]
    if quantised:
        makers, weights = (), [None] * len(bases)
    options = CallOptions(linears + biased, scales, dropouts)
    layout = CallLayout(len(bases), options, makers if any(makers) else (), len(magnitudes) > 0, quantised)
    layout.gathered = any(base.gathered for base in bases)
    return layout, (*weights, *(bases[i].bias for i in biased), *a, *b, *magnitudes)


def adapted(x, bases: Sequence[Base], adapters: Sequence[Adapter], seed=None):
    """Prepare the layout and tensors for one call, and `apply` them."""
    return apply(x, *prepare(bases, adapters), seed)


def apply(x, layout: CallLayout, tensors: tuple, seed=None, recompute=None) -> tuple[torch.Tensor, ...]:
    """The maps' results. Arguments have been checked, and `prepare` has put them in order.

    Args:
        seed: a tensor if an adapter has dropout.
        recompute: computes x again; a backward in eager mode calls it, and x is not kept.
    """
    if forward_ad._current_level >= 0:  # operators do not look into lists
        _op.refuse_tangents(_OP, (x, *tensors))
    if _op.is_compiling():
        return tuple(_registered(x, list(tensors), *layout.options, seed, None, False, [])[:-1])
    if _op.is_transformed():
        return _transformed(layout, None, x, seed, *tensors)[:-1]
    if layout.dora:
        return _apply_dora(layout, recompute, x, *tensors)
    if not _op.is_grad_enabled():
        return _forward(layout, None, x, seed, *tensors)[:-1]
    return _apply(layout, recompute, x, seed, *tensors)


_factors = _op.raw(
    "dora_factors",
    lambda weight, *_: tuple(weight.new_empty(weight.shape[0], dtype=torch.float32) for _ in range(2)),
    _OP,
)
_scale_rows = _op.raw("scale_rows", lambda *_: None, _OP)


def dora_factors(weight, a, b, magnitude, scale, scaled=None) -> tuple[torch.Tensor, torch.Tensor]:
    """``magnitude / |weight + scale * b @ a|`` by row and the inverse of magnitude, float32.

    Args:
        scaled: becomes ``factors * weight``; it may be weight.
    """
    with torch.no_grad():
        return _factors(weight, a, b, magnitude, scale, scaled)


def scale_rows(x, factors, y=None) -> torch.Tensor:
    """y = ``factors * x`` by row; y may be x."""
    with torch.no_grad():
        y = torch.empty_like(x, memory_format=torch.contiguous_format) if y is None else y
        _scale_rows(x, factors, y)
        return y


class _DoraFunction(torch.autograd.Function):
    """Matmuls with weights and B whose rows are scaled. Autograd treats the factors as constants."""

    @staticmethod
    def forward(ctx, layout, recompute, x, *tensors):
        n = layout.count
        dense, scaled, factors = layout.dense(tensors[:-n]), [], []
        for weight, a, b, magnitude, scale in zip(
            dense[:n], dense[n : 2 * n], dense[2 * n :], tensors[-n:], layout.options.scales, strict=True
        ):
            scaled.append(weight if layout.makers else torch.empty_like(weight))
            factors.append(dora_factors(weight, a, b, magnitude, scale, scaled[-1]))
        b = [scale_rows(b, f) for b, (f, _) in zip(dense[2 * n :], factors, strict=True)]
        *ys, t = _matmuls(x, (*scaled, *dense[n : 2 * n], *b), layout.options, None)
        ctx.layout, ctx.recompute = layout, recompute
        ctx.save_for_backward(x if recompute is None else None, t, *tensors, *b, *ys, *sum(factors, ()))
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @_op.once(_OP)
    def backward(ctx, *dys):
        _refuse_batches()
        layout, n, needs = ctx.layout, ctx.layout.count, ctx.needs_input_grad
        x, t, *saved = ctx.saved_tensors
        weights, a, b, magnitudes, scaled_b, ys = (saved[i : i + n] for i in range(0, 6 * n, n))
        factors, inverses = saved[6 * n :: 2], saved[6 * n + 1 :: 2]
        if all(dy is None for dy in dys):
            return (None,) * len(needs)
        if x is None:
            x = ctx.recompute()
        weights = [
            scale_rows(w, f, w if layout.makers else None)
            for w, f in zip(layout.dense(weights), factors, strict=True)
        ]
        wanted = needs[2], True in needs[3 + n : 3 + 2 * n], True in needs[3 + 2 * n : 3 + 3 * n]
        dx, da, *db = _eager_bwd(dys, x, (*weights, *a, *scaled_b), t, *layout.options, None, *wanted, [])
        if wanted[2]:
            db = [scale_rows(g, f, g) for g, f in zip(db, factors, strict=True)]
        dmagnitudes = [
            (column_dot(dy, y) * inverse).to(m.dtype) if need and dy is not None else None
            for dy, y, inverse, m, need in zip(dys, ys, inverses, magnitudes, needs[-n:], strict=True)
        ]
        adapter_gradients = _adapter_gradients(layout, (*a, *b), needs[3 + n : -n], dys, da, db)
        return None, None, dx if needs[2] else None, *[None] * n, *adapter_gradients, *dmagnitudes


_apply_dora = _op.direct_apply(_DoraFunction)


def _checked(x, linears, dropout, place=None) -> tuple[torch.Tensor, list[Base], list[Adapter]]:
    """x, maps and adapters, in autocast's dtype.

    Args:
        place: the name of a map in messages, with ``{}`` for its number.
    """
    check_float(_OP, "x", x)
    check_dense(_OP, "x", x)
    check(_OP, x.dim() >= 1 and x.shape[-1] >= 1, "x must be [..., K], got {}", tuple(x.shape))
    check_numbers(_OP, dropout=dropout)
    check(_OP, 0 <= dropout < 1, "dropout must be in [0, 1), got {}", dropout)
    listed = isinstance(linears, Sequence) and not isinstance(linears, str)
    check(_OP, listed, "linears must be a sequence of tuples, got {}", kind_of(linears))
    casts = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if casts:
        check_stored(_OP, "x", x)
        x = autocast(x)
    bases, adapters = [], []
    for i, linear in enumerate(linears):
        fits = isinstance(linear, tuple | list) and 3 <= len(linear) <= 5
        check(_OP, fits, "linears must be tuples (weight, a, b, scale, bias), got {}", kind_of(linear))
        weight, a, b, scale, bias = (*linear, *(1.0, None)[len(linear) - 3 :])
        dtype = adapters[0].a.dtype if adapters else None
        try:
            base = _checked_base(x, weight, a, b, scale, bias, dtype=dtype, casts=casts)
        except Error as error:
            refused = error if place is None else Error(str(error).replace("] ", f"] {place.format(i)}", 1))
        else:
            bases.append(base)
            adapters.append(Adapter(i, a, b, float(scale), float(dropout)))
            continue
        raise refused
    if not bases:
        refuse(_OP, "linears must hold at least one, got none")
    return x, bases, adapters


def _checked_base(x, weight, a, b, scale, bias, *, dtype, casts) -> Base:
    """The map of a checked adapter, in the dtype of the others."""
    named = {"weight": weight, "a": a, "b": b} | ({} if bias is None else {"bias": bias})
    for name, t in named.items():
        check_float(_OP, name, t)
        check_dense(_OP, name, t)
        dims = 1 if name == "bias" else 2
        check(_OP, t.dim() == dims, name + " must have {} dimension(s), got {}", dims, t.dim())
        check(_OP, t.device == x.device, name + " must be on {}, got {}", x.device, t.device)
        if name in ("weight", "bias") and not casts:
            check(_OP, t.dtype == x.dtype, name + " must be {}, got {}", x.dtype, t.dtype)
    check_numbers(_OP, scale=scale)
    sizes, rank = (weight.shape[0], x.shape[-1]), a.shape[0]
    for name, t in (("weight", weight), ("a", a)):
        check(_OP, t.shape[0] >= 1, name + " must have at least one row, got 0")
    check(_OP, weight.shape[1] == sizes[1], "weight must be [N, {}], got {}", sizes[1], tuple(weight.shape))
    check(_OP, a.shape[1] == sizes[1], "a must be [r, {}], got {}", sizes[1], tuple(a.shape))
    check(_OP, tuple(b.shape) == (sizes[0], rank), "b must be {}, got {}", (sizes[0], rank), tuple(b.shape))
    check(_OP, b.dtype == a.dtype, "b must be {}, got {}", a.dtype, b.dtype)
    if dtype is not None:
        check(_OP, a.dtype == dtype, "a must be {}, got {}", dtype, a.dtype)
    if bias is not None:
        check(_OP, bias.shape[0] == sizes[0], "bias must be [{}], got {}", sizes[0], tuple(bias.shape))
    if casts:
        weight, bias = _in_dtype("weight", weight, x.dtype), _in_dtype("bias", bias, x.dtype)
    return Base(weight, bias)


def _in_dtype(name, t, dtype):
    if t is None or t.dtype == dtype:
        return t
    check_stored(_OP, name, t)
    return t.to(dtype)


@called()
def lora_linears(
    x: torch.Tensor, linears: Sequence[tuple], *, dropout: float = 0.0, seed: int | torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """:func:`tigon.lora_linear` of one x with several maps, such as q, k and v.

    x is saved once and read once for all adapters. The GEMMs of the backward accumulate the gradient of x.

    Args:
        x: ``[..., K]``.
        linears: ``(weight, a, b)``, ``(weight, a, b, scale)`` or ``(weight, a, b, scale, bias)`` for each.
        dropout, seed: as in :func:`tigon.lora_linear`; each map has a different dropout mask.

    Returns:
        A tuple of ``[..., N]``, one for each map.

    Raises:
        tigon.Error: as :func:`tigon.lora_linear`.
    """
    return _of_checked(*_checked(x, linears, dropout, "linears[{}]'s "), dropout, seed)


def _of_checked(x, bases, adapters, dropout, seed):
    seed = seed_of(_OP, seed, x) if dropout > 0 else None
    if not _op.has_kernel(_OP, x, *(t for _, a, b, *_ in adapters for t in (a, b))):
        for base in bases:
            for name, t in (("weight", base.weight), ("bias", base.bias)):
                if t is not None:
                    check_stored(_OP, name, t)
        return reference(x, bases, adapters, seed)
    return adapted(x, bases, adapters, seed)


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear map with a low-rank adapter: ``x @ weight.T + scale * d(x) @ a.T @ b.T + bias``.

    On sm_90 one matmul computes a large map without a bias together with its adapter. Otherwise the second
    matmul adds to the result of the first. The gradient of x is computed in the same way. The call saves x
    and ``scale * d(x) @ a.T`` for the backward.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16. float64 runs the eager reference. Under autocast x,
            weight and bias are converted to its dtype, as in ``F.linear``.
        weight: ``[N, K]`` in x's dtype, usually frozen; it gets a gradient if it requires one.
        a, b: ``[r, K]`` and ``[N, r]``, both in any one of the three dtypes. The matmuls round them to x's
            dtype. Gradients of float32 adapters are float32 sums.
        scale: factor of the adapter.
        bias: ``[N]`` in x's dtype.
        dropout: probability, in [0, 1), with which an element of x is dropped, for the adapter only.
        seed: seed of the dropout, an int or an int64 tensor on x's device; ``None`` draws one from PyTorch's
            generator. The mask depends only on the seed, row and column, and the backward computes it again.

    Returns:
        ``[..., N]`` in x's dtype. If the adapter is zero, the result is bitwise equal to the matmul without
        it.

    Raises:
        tigon.Error: shapes, dtypes, devices or dropout do not fit.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """
    return _of_checked(*_checked(x, [(weight, a, b, scale, bias)], dropout), dropout, seed)[0]
