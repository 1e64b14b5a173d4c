"""A linear map with float8 matmuls. Contract: ``csrc/tigon/ops/fp8_linear/fp8_linear.h``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from tigon import _fp8_bytes, _op
from tigon._dtensor import KERNEL_DTYPES
from tigon.error import check
from tigon.ops.arguments import called, check_choice, check_dense, check_float

_OP = "fp8_linear"
_BYTES = torch.float8_e4m3fn
_LARGEST, _LEAST_EXPONENT = 448.0, -60
MULTIPLE = 16  # of which both sizes of a weight are

# --- the formula in plain PyTorch ---------------------------------------------------------------


def scales_of(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The powers of two that rows (or columns) are divided by, in x's dtype, with that dimension kept."""
    finite = torch.where(x.isfinite(), x.abs(), 0)
    largest = finite.amax(dim, keepdim=True) if x.shape[dim] else finite.sum(dim, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # of 448: 0.875 and 9
    exponent = torch.where(largest > 0, exponent - 9 + (mantissa > 0.875), _LEAST_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(min=_LEAST_EXPONENT))


def quantized(x: torch.Tensor, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of float64 or float32 over their scales, rounded to float8, in their own dtype; and the scales."""
    scales = scales_of(x, dim)
    finite = torch.where(x.isfinite(), x / scales, torch.nan)  # PyTorch's conversion clamps infinity
    return finite.float().to(_BYTES).to(x.dtype), scales


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias, dw):
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = x.reshape(-1, x.shape[-1]).to(wide)
        (xq, xs), (wq, ws) = quantized(rows), quantized(weight.to(wide))
        y = F.linear(xq * xs, wq * ws).to(x.dtype)
        return (y if bias is None else y + bias.to(wide)).to(x.dtype).reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, ctx.dw = inputs
        ctx.save_for_backward(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            _op.refuse_second(_OP)
        x, weight, bias = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        rows, upstream = x.reshape(-1, x.shape[-1]).to(wide), dy.reshape(-1, dy.shape[-1]).to(wide)
        dx = dweight = dbias = None
        wq, ws = quantized(weight.to(wide))
        q, s = quantized(upstream * ws.T)
        if ctx.needs_input_grad[0]:
            dx = (q * s @ wq).to(x.dtype).reshape(x.shape)
        if ctx.needs_input_grad[1] and ctx.dw == "bf16":
            dweight = (upstream.T @ rows).to(weight.dtype)
        elif ctx.needs_input_grad[1]:
            xq, xs = quantized(rows)
            q, s = quantized(q * s * xs, 0)
            dweight = ((q * (s / ws.T)).T @ xq).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = upstream.sum(0).to(bias.dtype)
        return dx, dweight, dbias, None


def reference(x, weight, bias=None, dw="fp8"):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    return _Reference.apply(x, weight, bias, dw)


# --- native operators ---------------------------------------------------------------------------


def _columns(rows):
    return torch.sym_max(16, (rows + 15) // 16 * 16)


def _fake_quantize(x, column_factors):
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    return x.new_empty(rows, columns, dtype=_BYTES), x.new_empty(rows, dtype=torch.float32)


def _fake_transpose(q, row_factors, row_scales, column_divisors):
    rows, columns = q.shape
    scales = q.new_empty(0 if row_factors is None else columns, dtype=torch.float32)
    return q.new_empty(columns, _columns(rows)), scales


def _fake_quantize_transposed(x, scales):
    return _fake_transpose(_fake_quantize(x, None)[0], None, None, None)[0]


def _fake_linear(xq, xs, wq, ws, dtype, bias):
    return xq.new_empty(xq.shape[0], wq.shape[0], dtype=KERNEL_DTYPES[dtype])


def _fake_bwd(dy, xt, xs, x, wt, ws, dyq, dys, need_dx, need_dweight, dweight_dtype):
    rows, columns = dy.shape[:-1].numel(), dy.shape[-1]
    inner = x.shape[-1] if x is not None else xt.shape[0] if need_dweight else wt.shape[0]
    dtype = KERNEL_DTYPES[dweight_dtype]
    return (
        dy.new_empty(rows, inner) if need_dx else dy.new_empty(0),
        dy.new_empty(columns, inner, dtype=dtype) if need_dweight else dy.new_empty(0, dtype=dtype),
    )


_quantize = _op.raw("fp8_quantize", _fake_quantize, "fp8_quantize")
_transpose = _op.raw("fp8_transpose", _fake_transpose, "fp8_transpose")
_quantize_transposed = _op.raw("fp8_quantize_transposed", _fake_quantize_transposed)
_fwd = _op.raw("fp8_linear_fwd", _fake_linear)
_bwd = _op.raw("fp8_linear_bwd", _fake_bwd)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes ``[rows, K]`` and scales ``[rows]`` of a tensor of any leading sizes."""
    return _quantize(x, None)


def transpose(q: torch.Tensor) -> torch.Tensor:
    """The bytes ``[K, rows]``, with zeros up to a multiple of 16."""
    return _transpose(q, None, None, None)[0]


# --- bytes that are made once -------------------------------------------------------------------


class Quantized:
    """A weight in float8: what y is made with, and transposed what dx is.

    One with `of`, a function that gives the weight, has bytes only while a matmul reads them. In the
    backward they are made of the weight again, transposed, in one pass: as many bytes are moved, and no
    memory is held while other layers run. If `of` gives another `Quantized`, which holds the bytes at that
    time, those are transposed.
    """

    __slots__ = ("_transposed", "bytes", "keeps_transposed", "of", "scales", "version")

    def __init__(self, rows, scales, keeps_transposed: bool = True):
        self.bytes, self.scales, self.keeps_transposed = rows, scales, keeps_transposed
        self._transposed = self.of = None

    @staticmethod
    def make(weight: torch.Tensor, of: Callable | None = None, keeps_transposed: bool = True) -> Quantized:
        made = Quantized(*quantize_rows(weight.detach()), keeps_transposed)
        made.of, made.version = of, None if weight.is_inference() else weight._version
        return made

    def drop(self) -> None:
        """Called when a matmul has read the bytes."""
        if self.of is not None:
            self.bytes = None

    def transposed(self) -> torch.Tensor:
        if self._transposed is not None:
            return self._transposed
        if self.bytes is None:
            weight = self.of()
            if type(weight) is Quantized:
                return transpose(weight.bytes)
            if weight is None or weight._version != self.version:
                raise RuntimeError(
                    f"[{_OP}] weight must be what it was in the forward when the backward runs, got one that "
                    "has been modified by an inplace operation"
                )
            return _quantize_transposed(weight.detach(), self.scales)
        made = transpose(self.bytes)
        if self.keeps_transposed and self.of is None:
            self._transposed = made
        return made

    def map(self, function) -> Quantized:
        return Quantized(function(self.bytes), function(self.scales), self.keeps_transposed)


class _Kept:
    """The bytes of a weight, and what they are the bytes of.

    Some write to a weight where no version tells of it, by ``.data``. What they use for that is the gradient,
    and they take it away or zero it: it is then not what the backwards since have made of it.
    Bytes stay once several forwards of one step have read them (`shared`): microbatches, checkpointing. Those
    of a frozen weight stay from the first on.
    """

    __slots__ = ("_grad", "_version", "backwards", "key", "quantized", "shared", "weight")

    def __init__(self, weight, key, shared):
        self.weight, self.key, self.shared = weakref.ref(weight, _forgetter(id(weight))), key, shared
        self.quantized = Quantized.make(weight, None if shared else weakref.ref(weight))
        self._look(weight.grad)

    def _look(self, grad):
        self._grad, self._version = (None, -1) if grad is None else (weakref.ref(grad), grad._version)
        self.backwards = 0  # each adds to the gradient once

    def is_of(self, weight, key) -> bool:
        if self.weight() is not weight or self.key != key:
            return False
        grad = weight.grad
        if grad is None:
            return self._grad is None and self.backwards == 0
        same = self._grad is None or self._grad() is grad  # the first becomes one of version 0
        same = same and grad._version == self._version + self.backwards
        self._look(grad)
        return same


_kept: dict[int, _Kept] = {}
_steps = 0  # of optimizers: some write without a change of version
_hook = None


def _forgetter(key: int):
    return lambda reference: _kept.pop(key, None)


def _count_step(*_) -> None:
    global _steps
    _steps += 1


def forget_weights(weights: Iterable[torch.Tensor]) -> None:
    """Drop the bytes of these weights: the next call makes them again."""
    for weight in weights:
        _kept.pop(id(weight), None)


def quantized_weight(weight: torch.Tensor, reuse: bool, frozen: bool = False) -> Quantized:
    """A weight's bytes: the last call's if the weight is known to be unchanged.

    Known is a weight by its version, its memory, the number of optimizer steps, and by its gradient. A frozen
    one has none that would tell of a merge into its ``.data``: with `frozen` the caller tells of it, by
    `forget_weights`.
    """
    global _hook
    pack = getattr(weight, "pack", None)  # of a weight that is in float8
    if pack is not None:
        return pack()
    trained = (weight.requires_grad or frozen) and weight.is_leaf and not weight.is_meta
    if not (reuse and trained) or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return Quantized.make(weight)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_count_step)
    steps = _steps if weight.requires_grad else -1
    key = weight._version, weight.data_ptr(), steps, _fp8_bytes.stream_of(weight)
    kept = _kept.get(id(weight))
    same = kept is not None and kept.is_of(weight, key)
    if not same or kept.quantized.bytes is None:
        known = kept is not None and kept.weight() is weight and kept.shared
        shared = same or known or not weight.requires_grad
        kept = _kept[id(weight)] = _Kept(weight, key, shared)
    return kept.quantized


def _count_backward(weight: torch.Tensor) -> None:
    kept = _kept.get(id(weight))
    if kept is not None:
        kept.backwards += 1


class _Latest:
    """The bytes made of the last tensor: q, k, v and gate, up read one x."""

    def __init__(self, make):
        self.make, self.held = make, None

    def __call__(self, x):
        held, known = self.held, (x._version, _fp8_bytes.stream_of(x))
        if held is not None and held[0]() is x and held[1] == known:
            return held[2]
        made = self.make(x)
        self.held = weakref.ref(x, self._forget), known, made
        return made

    def _forget(self, reference):
        held = self.held
        if held is not None and held[0] is reference:
            self.held = None


_latest_transposed = _Latest(transpose)


def rows_of(x):
    """The bytes of x. A leaf may be a buffer that is filled again, by a replayed graph or by ``.data``."""
    _fp8_bytes.on = True
    if x.grad_fn is None:
        return quantize_rows(x.detach())
    rows = _fp8_bytes.get(x)
    if rows is None:
        _fp8_bytes.want(x)
        rows = quantize_rows(x.detach())
        _fp8_bytes.put(x, *rows)
    return rows


# --- autograd -----------------------------------------------------------------------------------


def _forward(x, weight, bias, xq, xs, wq, ws, made, dw, form=None):
    y = _fwd(xq, xs, wq, ws, KERNEL_DTYPES.index(x.dtype), bias)
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], wq.shape[0]])  # no view, so that y is held once


def _setup_context(ctx, inputs, output):
    x, weight, bias, xq, xs, wq, ws, ctx.made, ctx.dw, ctx.form = inputs
    ctx.shape, ctx.dtypes = x.shape, (weight.dtype, None if bias is None else bias.dtype)
    need_x, need_w = ctx.needs_input_grad[:2]
    if not need_w:
        x = xq = xs = ctx.form = None
    elif ctx.dw == "bf16":
        x, xq, xs = None if ctx.form else x, None, None
    else:
        x, xq = None, None if ctx.form else xq
    if ctx.made is not None:
        wq = ws = None
    elif not need_x:
        wq = None
    if ctx.made is not None:  # what producers of x and of dy look for
        ctx.fp8_weight, ctx.fp8_factors = weakref.ref(weight), (ctx.made.scales,)
    ctx.save_for_backward(x, xq, xs, wq, ws)


def _backward(ctx, dy):
    x, xq, xs, wq, ws = ctx.saved_tensors
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    made, wt, xt, dyq, dys = ctx.made, None, None, None, None
    if made is not None:
        ws = made.scales
        dyq, dys = _fp8_bytes.take(dy, ws)
    if need_x:
        wt = transpose(wq) if made is None else made.transposed()
    if ctx.form is not None:
        x = ctx.form().view(-1, ctx.shape[-1])
        if ctx.dw != "bf16":
            x, xt = None, _quantize_transposed(x, xs)
    elif need_w and xq is not None:
        xt = transpose(xq) if made is None else _latest_transposed(xq)
    if x is not None and dy.dtype != x.dtype:
        x = x.to(dy.dtype)
    dx = dweight = dbias = None
    if need_x or need_w:
        code = KERNEL_DTYPES.index(ctx.dtypes[0])
        dx, dweight = _bwd(dy, xt, xs, x, wt, ws, dyq, dys, need_x, need_w, code)
        dx = dx.view(ctx.shape) if need_x else None
    if made is not None and need_w and (weight := ctx.fp8_weight()) is not None:
        _count_backward(weight)
    if need_bias:
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=ctx.dtypes[1])
    return dx, dweight if need_w else None, dbias, *[None] * 7


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_op.once(_OP)(_backward))


_transformed = _op.transformable(_OP, _OP, _forward, _setup_context, _backward)


def apply(x, weight, bias, dw: str, reuse: bool, frozen: bool = False, made: Quantized | None = None):
    """The map. Arguments have been checked.

    Args:
        reuse, frozen: as in `quantized_weight`.
        made: the bytes of a weight that exists only while it is gathered. They are of this pass.
    """
    if _op.is_traced_or_transformed():
        xq, xs = quantize_rows(x.detach())
        wq, ws = quantize_rows(weight.detach())
        function = _Function.apply if _op.is_compiling() else _transformed
        return function(x, weight, bias, xq, xs, wq, ws, None, dw, None)
    made = made or quantized_weight(weight, reuse, frozen)
    xq, xs = rows_of(x)
    run = _Function.apply if _op.is_grad_enabled() else _forward
    form = getattr(x.grad_fn, "fp8_form", None)
    y = run(x, weight, bias, xq, xs, made.bytes, made.scales, made, dw, form)
    made.drop()
    return y


@called()
def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dw: str = "fp8"
) -> torch.Tensor:
    """``F.linear(x, weight, bias)`` with float8 matmuls: each row has a scale, a power of two.

    x and the weight are quantised once, by rows; the backward multiplies the upstream gradient with the same
    bytes, transposed. Parameters and results keep their dtypes. A weight's bytes are kept where several calls
    read them while gradients are recorded and nothing has changed it, so that microbatches share them. Kept
    for the backward: x in a byte an element and a number a row.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16. float64 runs the eager reference.
        weight: ``[N, K]`` in x's dtype or float32. K and N are multiples of 16.
        bias: ``[N]`` in x's dtype or float32.
        dw: the matmul of the weight's gradient, ``"fp8"``, or ``"bf16"``: in x's dtype, of an unquantised x,
            which is kept.

    Returns:
        ``[..., N]`` in x's dtype. Rows with infinity or NaN are NaN.

    Raises:
        tigon.Error: shapes, dtypes or devices do not fit; the GPU has no float8 matmuls.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; docs/fp8.md.
    """
    named = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, t in named.items():
        check_float(_OP, name, t)
        check_dense(_OP, name, t)
        check(_OP, t.device == x.device, name + " must be on {}, got {}", x.device, t.device)
        fits = t.dtype in (x.dtype, torch.float32)
        check(_OP, fits, name + " must be {} or float32, got {}", x.dtype, t.dtype)
    check(_OP, x.dim() >= 1, "x must be [..., K], got {}", tuple(x.shape))
    fits = weight.dim() == 2 and weight.shape[1] == x.shape[-1]
    check(_OP, fits, "weight must be [N, {}], got {}", x.shape[-1], weight.shape)
    for name, size in (("columns", weight.shape[1]), ("rows", weight.shape[0])):
        fits = size > 0 and size % MULTIPLE == 0
        check(_OP, fits, "weight must have " + name + " by the multiple of {}, got {}", MULTIPLE, size)
    if bias is not None:
        check(_OP, bias.shape == weight.shape[:1], "bias must be {}, got {}", weight.shape[:1], bias.shape)
    check_choice(_OP, "dw", dw, ("fp8", "bf16"))
    if not _op.has_kernel(_OP, x=x, weight=weight, bias=bias):
        return reference(x, weight, bias, dw)
    return apply(x, weight, bias, dw, reuse=_op.is_grad_enabled())
