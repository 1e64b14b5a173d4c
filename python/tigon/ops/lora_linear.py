"""Linear maps with low-rank adapters. Contract: ``csrc/tigon/ops/lora_linear/lora_linear.h``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from tigon import _op
from tigon._load import native
from tigon.error import check, refuse
from tigon.ops.arguments import check_float, check_numbers, kind_of

_OP = "lora_linear"


class Base(NamedTuple):
    """A frozen linear map: its weight, or what makes it anew for each direction, and its bias."""

    weight: torch.Tensor | Callable[[], torch.Tensor]
    bias: torch.Tensor | None = None


class Adapter(NamedTuple):
    """``scale * d(x) @ a.T @ b.T`` of the map at place ``base`` of the list."""

    base: int
    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0
    dropout: float = 0.0


def _words(counter: list[torch.Tensor], seed: torch.Tensor) -> list[torch.Tensor]:
    """Philox4x32-10 on words held in int64."""
    low = 0xFFFFFFFF
    key0, key1 = seed & low, (seed >> 32) & low

    def multiply(a, b):  # without the sign bit of 64
        upper, lower = a * (b >> 16), a * (b & 0xFFFF)
        whole = (upper & 0xFFFF) * 65536 + lower
        return ((upper >> 16) + (whole >> 32)) & low, whole & low

    for _ in range(10):
        (high0, low0), (high2, low2) = multiply(0xD2511F53, counter[0]), multiply(0xCD9E8D57, counter[2])
        counter = [high2 ^ counter[1] ^ key0, low2, high0 ^ counter[3] ^ key1, low0]
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    return counter


def dropout_factors(shape: tuple[int, int], p: float, seed: torch.Tensor, stream: int) -> torch.Tensor:
    """What the kernels multiply the elements of x by, as float64: 0 or ``1 / (1 - p)``."""
    rows, columns = shape
    row = torch.arange(rows, device=seed.device)[:, None]
    block = torch.arange((columns + 3) // 4, device=seed.device)[None]
    row, block = torch.broadcast_tensors(row, block)
    counter = [block, row & 0xFFFFFFFF, row >> 32, torch.full_like(row, stream)]
    words = torch.stack(_words(counter, seed.reshape(())), -1).reshape(rows, -1)[:, :columns]
    return (words >= int(p * 2**32)).double() / (1 - p)


def reference(x, bases, adapters, seed=None):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    rows = x.reshape(-1, x.shape[-1])
    ys = [F.linear(rows, weight, bias) for weight, bias in bases]
    for i, (base, a, b, scale, p) in enumerate(adapters):
        dropped = rows
        if p > 0:
            dropped = rows * dropout_factors(tuple(rows.shape), p, seed, i).to(rows)
        t = F.linear(dropped, a.to(x.dtype))
        ys[base] = ys[base] + F.linear(t, b.to(x.dtype)) * scale
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys)


def _columns(rank: int) -> int:
    """Of t: an adapter's begin at multiples of 8."""
    return (rank + 7) // 8 * 8


def _fake(x, weights, biases, a, b, biased, linears, scales, dropouts, seed, t, only_t):
    rows, columns = x.shape[:-1].numel(), sum(_columns(m.shape[0]) for m in a)
    ys = [] if only_t else [x.new_empty(*x.shape[:-1], w.shape[0]) for w in weights]
    return [*ys, x.new_empty(rows, columns) if t is None else x.new_empty(0)]


def _fake_bwd(dy, x, weights, a, b, t, linears, scales, dropouts, seed, need_x, need_a, need_b):
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


class _Lists(NamedTuple):
    """A call's lists, and its options: which map each adapter belongs to, scales, dropouts."""

    weights: Sequence
    biases: Sequence  # of the maps `biased`: autograd takes no lists with gaps
    a: Sequence
    b: Sequence
    biased: Sequence
    how: tuple


def _dense(weights) -> list[torch.Tensor]:
    return [w if isinstance(w, torch.Tensor) else w() for w in weights]


def _keep(ctx, *tensors):
    with torch.enable_grad():
        ctx.kept = _Kept.apply(_ANCHOR, *tensors)  # the result, which holds the node


def _save(ctx, x, seed, lists: _Lists, t, keep=None, again=None):
    """`again` makes x once more: it is then not kept."""
    ctx.biased, ctx.how, ctx.again = lists.biased, lists.how, again
    ctx.sources = [None if isinstance(w, torch.Tensor) else w for w in lists.weights]
    kept = [w if isinstance(w, torch.Tensor) else None for w in lists.weights]
    tensors = (x if again is None else None, seed, t, *kept, *lists.a, *lists.b)
    if keep is None:
        ctx.save_for_backward(*tensors)
    else:
        keep(ctx, *tensors)
    ctx.set_materialize_grads(False)


def _as(parameter, gradient):
    return gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)


def _gradients(ctx, dys, need_x, needs: _Lists):
    """Of x, weights, biases, a and b, ``None`` where none is needed."""
    kept = getattr(ctx, "kept", None)
    x, seed, t, *rest = (ctx if kept is None else kept.grad_fn).saved_tensors
    if not _op.graph_is_kept():
        ctx.kept = None
    count, each = len(needs.weights), len(needs.a)
    weights, a, b = rest[:count], rest[count : count + each], rest[count + each :]
    dys = list(dys[:count])
    if all(dy is None for dy in dys):
        return None, [None] * count, [None] * len(needs.biases), [None] * each, [None] * each
    if x is None:
        x = ctx.again()
    dense = [w if make is None else make() for w, make in zip(weights, ctx.sources, strict=True)]
    need_a, need_b = True in needs.a, True in needs.b
    wanted = need_x, need_a, need_b
    if _op._is_compiling():
        dx, da, *db = _bwd(dys, x, dense, a, b, t, *ctx.how, seed, *wanted)
    elif _op._is_transformed():
        dx, da, *db = _bwd_of_tensors(_Shape(count, (), ctx.how, wanted), x, seed, t, *dys, *dense, *a, *b)
    else:
        dx, da, *db = _eager_bwd(dys, x, dense, a, b, t, *ctx.how, seed, *wanted)
    dweights, dbiases, das, dbs = [None] * count, [None] * len(needs.biases), [None] * each, [None] * each
    if True in needs.weights:
        for i, (dy, need) in enumerate(zip(dys, needs.weights, strict=True)):
            if need and dy is not None:
                dweights[i] = dy.flatten(0, -2).t() @ x.flatten(0, -2)
    for i, (at, need) in enumerate(zip(ctx.biased, needs.biases, strict=True)):
        if need and dys[at] is not None:
            dbiases[i] = dys[at].flatten(0, -2).sum(0)
    first = 0
    for i, at in enumerate(ctx.how[0]):
        last = first + a[i].shape[0]
        if dys[at] is not None:
            if needs.a[i]:
                das[i] = _as(a[i], da if last - first == da.shape[0] else da[first:last])
            if needs.b[i]:
                dbs[i] = _as(b[i], db[i])
        first += _columns(last - first)
    return dx if need_x else None, dweights, dbiases, das, dbs


@dataclasses.dataclass(slots=True, eq=False)  # no tuple: vmap would look for tensors in it
class _Shape:
    count: int  # maps
    biased: Sequence  # places of the biases
    how: tuple
    wanted: tuple = ()  # of a backward: whether gradients of x, a and b are
    again: Callable[[], torch.Tensor] | None = None  # makes x once more

    def lists(self, tensors) -> _Lists:
        n, each = self.count, len(self.how[0])
        m = n + len(self.biased)
        lists = tensors[:n], tensors[n:m], tensors[m : m + each], tensors[m + each :]
        return _Lists(*lists, self.biased, self.how)


def _backward_products(shape, x, seed, t, *tensors):
    dys, (weights, _, a, b, *_) = tensors[: shape.count], shape.lists(tensors[shape.count :])
    return tuple(_eager_bwd(dys, x, weights, a, b, t, *shape.how, seed, *shape.wanted))


_eager_bwd = _op.caller(_OP, native(f"{_OP}_bwd"))
_bwd_of_tensors = _op.transformable(
    _OP, f"{_OP}_bwd", _backward_products, lambda *_: None, lambda ctx, *_: _op.refuse_second(_OP)
)


# --- as an operator: traced by torch.compile ---------------------------------------------------


def _setup_operator(ctx, inputs, output):
    x, *lists, biased, linears, scales, dropouts, seed, _, _ = inputs
    ctx.mark_non_differentiable(output[-1])
    _save(ctx, x, seed, _Lists(*lists, biased, (linears, scales, dropouts)), output[-1])


def _backward_operator(ctx, dys):
    need_x, *needs = ctx.needs_input_grad[:5]
    # PyTorch takes an empty list of numbers for one of tensors.
    of_options = (None if option else [] for option in (ctx.biased, *ctx.how))
    return *_gradients(ctx, dys, need_x, _Lists(*needs, (), ())), *of_options, None, None, None


torch.library.register_autograd(
    f"tigon::{_OP}", _backward_operator, setup_context=_setup_operator, lib=_op._autograd_library
)


# --- as a function of single tensors: eager, and under the transforms of torch.func -----------


def _forward(shape, x, seed, *tensors):
    lists = shape.lists(tensors)
    return _products(lists, _dense(lists.weights), x, seed)


def _products(lists, weights, x, seed, t=None, only_t=False):
    return tuple(_eager(x, weights, *lists[1:5], *lists.how, seed, t, only_t))


def _setup_function(ctx, inputs, output):
    shape, x, seed, *tensors = inputs
    ctx.shape = shape
    ctx.mark_non_differentiable(output[-1])
    _save(ctx, x, seed, shape.lists(tensors), output[-1])


def _backward_function(ctx, *dys):
    if _op.is_batched() and not _op._is_transformed():
        refuse(_OP, "gradients must come one by one (or by torch.func.vmap), got is_grads_batched=True")
    needs = ctx.shape.lists(ctx.needs_input_grad[3:])
    dx, *lists = _gradients(ctx, dys, ctx.needs_input_grad[1], needs)
    return None, dx, None, *(gradient for one in lists for gradient in one)


_eager = _op.caller(_OP, native(f"{_OP}_fwd"))
_transformed = _op.transformable(_OP, _OP, _forward, _setup_function, _backward_function)


class _Kept(torch.autograd.Function):
    """Keeps tensors at once: those of a function that runs are kept when it ends."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.view_as(anchor)


_ANCHOR = torch.zeros(0, device="cpu", requires_grad=True)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shape, x, seed, *tensors):
        ctx.shape, ctx.kept = shape, None
        lists = shape.lists(tensors)
        weights = _dense(lists.weights)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            *ys, t = _products(lists, weights, x, seed)
            _save(ctx, x, seed, lists, t, again=shape.again)
            return tuple(ys)
        # A checkpoint runs a layer again until all that was kept is there: the last products are then spared.
        (t,) = _products(lists, weights, x, seed, only_t=True)
        _save(ctx, x, seed, lists, t, _keep)
        return _products(lists, weights, x, seed, t)[:-1]

    backward = staticmethod(_op.once(_OP)(_backward_function))


_apply = _op.direct_apply(_Function)


def prepare(bases: Sequence[Base], adapters: Sequence[Adapter]) -> tuple[_Shape, tuple]:
    """The arguments of many calls."""
    biased = [i for i, base in enumerate(bases) if base.bias is not None]
    linears, a, b, scales, dropouts = map(list, zip(*adapters, strict=True)) if adapters else ([],) * 5
    tensors = (*(base.weight for base in bases), *(bases[i].bias for i in biased), *a, *b)
    return _Shape(len(bases), biased, (linears, scales, dropouts)), tensors


def adapted(x, bases: Sequence[Base], adapters: Sequence[Adapter], seed=None):
    """`apply` of what is prepared for this call."""
    return apply(x, *prepare(bases, adapters), seed)


def apply(x, shape: _Shape, tensors: tuple, seed=None, again=None) -> tuple[torch.Tensor, ...]:
    """The maps' results. Arguments have been checked, and `prepare` has put them in order.

    Args:
        seed: a tensor where an adapter drops.
        again: makes x once more; a backward in eager mode calls it, and x is not kept.
    """
    if forward_ad._current_level >= 0:  # operators do not look into lists
        _op.refuse_tangents(_OP, (x, *tensors))
    if _op._is_compiling():
        lists = map(list, shape.lists(tensors)[:4])
        return tuple(_registered(x, *lists, shape.biased, *shape.how, seed, None, False)[:-1])
    if _op._is_transformed():
        return _transformed(shape, x, seed, *tensors)[:-1]
    if not _op._is_grad_enabled():
        return _forward(shape, x, seed, *tensors)[:-1]
    if again is not None:
        shape = dataclasses.replace(shape, again=again)
    return _apply(shape, x, seed, *tensors)


def draw_seed(x: torch.Tensor) -> torch.Tensor:
    """A seed beside x, from PyTorch's generator."""
    return torch.randint(2**62, (1,), device=x.device)


def _seed_of(seed, x) -> torch.Tensor:
    if seed is None:
        return draw_seed(x)
    if isinstance(seed, torch.Tensor):
        check(_OP, seed.dtype == torch.int64 and seed.numel() == 1, "seed must be one int64, got {}",
              kind_of(seed))  # fmt: skip
        return seed
    check(_OP, isinstance(seed, int) and not isinstance(seed, bool), "seed must be an int, got {}",
          kind_of(seed))  # fmt: skip
    check(_OP, -(2**63) <= seed < 2**63, "seed must have at most 64 bits, got {}", seed)
    return torch.full((1,), seed, dtype=torch.int64, device=x.device)


def _check_dense(name, t) -> None:
    kind = None if type(t) in _op._PLAIN else _op.foreign(name, t)
    if kind is not None:
        refuse(_OP, name + " must be a plain dense tensor, got {}", kind)


def _checked(x, linears, dropout) -> tuple[list[Base], list[Adapter]]:
    check_float(_OP, "x", x)
    _check_dense("x", x)
    check(_OP, x.dim() >= 1 and x.shape[-1] >= 1, "x must be [..., K], got {}", tuple(x.shape))
    check_numbers(_OP, dropout=dropout)
    check(_OP, 0 <= dropout < 1, "dropout must be in [0, 1), got {}", dropout)
    bases, adapters = [], []
    for i, linear in enumerate(linears):
        fits = isinstance(linear, tuple | list) and 3 <= len(linear) <= 5
        check(_OP, fits, "linears must be tuples (weight, a, b, scale, bias), got {}", kind_of(linear))
        weight, a, b, scale, bias = (*linear, *(1.0, None)[len(linear) - 3 :])
        named = {"weight": weight, "a": a, "b": b} | ({} if bias is None else {"bias": bias})
        for name, t in named.items():
            check_float(_OP, name, t)
            _check_dense(name, t)
            dims = 1 if name == "bias" else 2
            check(_OP, t.dim() == dims, name + " must have {} dimension(s), got {}", dims, t.dim())
            check(_OP, t.device == x.device, name + " must be on {}, got {}", x.device, t.device)
            if name in ("weight", "bias"):
                check(_OP, t.dtype == x.dtype, name + " must be {}, got {}", x.dtype, t.dtype)
        check_numbers(_OP, scale=scale)
        sizes, rank = (weight.shape[0], x.shape[-1]), a.shape[0]
        check(_OP, weight.shape[1] == sizes[1], "weight must be [N, {}], got {}", sizes[1],
              tuple(weight.shape))  # fmt: skip
        check(_OP, a.shape[1] == sizes[1], "a must be [r, {}], got {}", sizes[1], tuple(a.shape))
        check(_OP, tuple(b.shape) == (sizes[0], rank), "b must be {}, got {}", (sizes[0], rank),
              tuple(b.shape))  # fmt: skip
        check(_OP, b.dtype == a.dtype, "b must be {}, got {}", a.dtype, b.dtype)
        if adapters:
            check(_OP, a.dtype == adapters[0].a.dtype, "a must be {}, got {}", adapters[0].a.dtype, a.dtype)
        if bias is not None:
            check(_OP, bias.shape[0] == sizes[0], "bias must be [{}], got {}", sizes[0], tuple(bias.shape))
        bases.append(Base(weight, bias))
        adapters.append(Adapter(i, a, b, float(scale), float(dropout)))
    if not bases:
        refuse(_OP, "linears must hold at least one, got none")
    return bases, adapters


def lora_linears(
    x: torch.Tensor,
    linears: Sequence[tuple],
    *,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """:func:`tigon.lora_linear` of one x with several maps, such as q, k and v.

    x is kept once and read once for all adapters, and the gradients of x are added up where the products
    make them.

    Args:
        x: ``[..., K]``.
        linears: ``(weight, a, b)``, ``(weight, a, b, scale)`` or ``(weight, a, b, scale, bias)`` for each.
        dropout, seed: as in :func:`tigon.lora_linear`; each map drops elements of its own.

    Returns:
        A tuple of ``[..., N]``, one for each map.

    Raises:
        tigon.Error: as :func:`tigon.lora_linear`.
    """
    bases, adapters = _checked(x, linears, dropout)
    seed = _seed_of(seed, x) if dropout > 0 else None
    if not _op.has_kernel(_OP, x, *(t for _, a, b, *_ in adapters for t in (a, b))):
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

    Large maps without a bias are one product with their adapter on sm_90; elsewhere one of the two is added
    to what the other wrote. A gradient of x is formed in the same way. Kept for the backward: x and
    ``scale * d(x) @ a.T``.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16. float64 runs the eager reference.
        weight: ``[N, K]`` in x's dtype, usually frozen; it gets a gradient where it requires one.
        a, b: ``[r, K]`` and ``[N, r]`` in any one of the three dtypes, rounded to x's for the products.
            Gradients of float32 adapters are float32 sums.
        scale: of the adapter.
        bias: ``[N]`` in x's dtype.
        dropout: probability, in [0, 1), with which an element of x is dropped, for the adapter only.
        seed: of the dropout, an int or an int64 tensor on x's device; ``None``: drawn from PyTorch's
            generator. The mask follows from the seed, row and column, and is made again in the backward.

    Returns:
        ``[..., N]`` in x's dtype. Adapters of zeros give the bits of the product without them.

    Raises:
        tigon.Error: shapes, dtypes, devices or dropout do not fit.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """
    return lora_linears(x, [(weight, a, b, scale, bias)], dropout=dropout, seed=seed)[0]
