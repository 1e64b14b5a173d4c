"""The common part of rope and qk_norm_rope: options, checks, tables and the rotation in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tigon._op import has_kernel
from tigon.error import check
from tigon.ops import arguments


class RopeOptions(NamedTuple):
    """How the public functions pair and choose columns."""

    interleaved: bool = False
    deinterleave: bool = False
    rotary_dim: int | None = None
    tail: bool = False
    mrope_section: Sequence[int] | None = None
    mrope_interleaved: bool = False
    keep_dtype: bool = False


class Form(NamedTuple):
    """The trailing arguments of the operators, in their order (``csrc/tigon/ops/rope/rope_fields.h``)."""

    head_dim: int
    pairs: int = 0  # 0: halves, 1: neighbours, 2: neighbours in, halves out
    shared: bool = False  # tables have R/2 columns
    tail: bool = False
    keep_dtype: bool = False
    time: int = 0
    height: int = 0
    width: int = 0
    mixed: bool = False

    @classmethod
    def of(cls, op, head_dim, cos, options: RopeOptions):
        """From the options of the public functions."""
        check(op, isinstance(cos, torch.Tensor), "cos must be a tensor, got {}", arguments.kind_of(cos))
        arguments.check_layout(op, "cos", cos)
        flags = ("interleaved", "deinterleave", "tail", "mrope_interleaved", "keep_dtype")
        arguments.check_booleans(op, **{name: getattr(options, name) for name in flags})
        paired = options.interleaved or not options.deinterleave
        check(op, paired, "interleaved must be True with deinterleave=True, got False")
        complex_table = cos.is_complex()
        fits = options.interleaved or not complex_table
        check(op, fits, "interleaved must be True with complex cos, got False")
        columns = cos.shape[-1] if cos.dim() else 0
        shared = complex_table
        rotary_dim, section = options.rotary_dim, options.mrope_section
        if rotary_dim is not None:
            arguments.check_integers(op, rotary_dim=rotary_dim)
            fits = rotary_dim == 2 * columns or (rotary_dim == columns and not complex_table)
            words = "rotary_dim must be the columns of cos or twice as many, {}, got {}"
            check(op, fits, words, columns, rotary_dim)
            shared = shared or rotary_dim != columns
        time = height = width = 0
        if section is not None:
            pairs = columns if shared else columns // 2
            some = isinstance(section, Sequence) and len(section) == 3
            whole = some and all(isinstance(n, int) and n >= 0 for n in section)
            fits = whole and sum(section) == pairs > 0
            wanted = "mrope_section must be three ints that add up to {}, got {}"
            check(op, fits, wanted, pairs, section)
            time, height, width = section
        pairs = 2 if options.deinterleave else 1 if options.interleaved else 0
        sections = {"time": time, "height": height, "width": width, "mixed": options.mrope_interleaved}
        return cls(head_dim, pairs, shared, tail=options.tail, keep_dtype=options.keep_dtype, **sections)

    def has_sections(self) -> bool:
        """Whether this is M-RoPE."""
        return self.time + self.height + self.width > 0

    def rotated(self, columns: int) -> int:
        """R, for tables of that many columns."""
        return 2 * columns if self.shared else columns


USUAL = tuple(Form(0))[1:]


def are_usual(q, k, cos, sin, head_dim) -> bool:
    """Whether the operators check themselves what is left to check, with no options: constant real tables,
    and heads of one number of dimensions that are not empty."""
    for t in (q, cos, sin) if k is None else (q, k, cos, sin):
        if not isinstance(t, torch.Tensor) or t.is_nested:
            return False
    if cos.requires_grad or sin.requires_grad or type(head_dim) is not int or head_dim < 0:
        return False
    alike = k is None or (k.dim() == q.dim() and k.numel() > 0)
    return alike and q.numel() > 0 and cos.shape == sin.shape


def head_dim_of(op, q, unsqueeze_dim) -> int:
    """The dimension of q that holds the heads."""
    dims = q.dim()
    check(op, dims in (3, 4), "q must have 3 or 4 dimensions, got {}", dims)
    arguments.check_integers(op, unsqueeze_dim=unsqueeze_dim)
    known = unsqueeze_dim in (dims - 3, dims - 2, -3, -2)
    check(op, known, "unsqueeze_dim must be {} or {}, got {!r}", dims - 3, dims - 2, unsqueeze_dim)
    return unsqueeze_dim % dims


def check_heads(op, q, k, unsqueeze_dim) -> int:
    """The dimension of the heads, when q and k fit."""
    for name, x in (("q", q), ("k", k)):
        if x is not None or name == "q":
            arguments.check_float(op, name, x)
    head_dim = head_dim_of(op, q, unsqueeze_dim)
    if k is not None:
        check(op, k.device == q.device, "k must be on {}, got {}", q.device, k.device)
        check(op, k.dtype == q.dtype, "k must be {}, got {}", q.dtype, k.dtype)
        check(op, k.dim() == q.dim(), "k must have {} dimensions, got {}", q.dim(), k.dim())
        shape, other = q.shape, k.shape
        after = head_dim + 1
        same = shape[:head_dim] == other[:head_dim] and shape[after:] == other[after:]
        if not same:
            wanted = ", ".join("H" if i == head_dim else str(n) for i, n in enumerate(q.shape))
            check(op, False, "k must be [{}], got {}", wanted, tuple(k.shape))
    return head_dim


def _sizes(q, form) -> tuple[int, int]:
    """Batch (1 when packed) and tokens."""
    dims = q.dim()
    return q.shape[0] if dims == 4 else 1, q.shape[2 * dims - 5 - form.head_dim]


def check_tables(op, q, cos, sin, positions, form) -> None:
    """Refuse tables and positions that do not fit q and each other."""
    batch, tokens = _sizes(q, form)
    complex_table = cos.is_complex()
    if not complex_table:
        arguments.check_float(op, "cos", cos)
    if complex_table:
        check(op, sin is None, "sin must be None with complex cos, got a tensor")
    else:
        arguments.check_float(op, "sin", sin)
        check(op, sin.shape == cos.shape, "sin must be {}, got {}", cos.shape, sin.shape)
    if positions is not None:
        arguments.check_indices(op, "position_ids", positions)
        arguments.check_stored(op, "position_ids", positions)
    device = q.device
    for name, x in (("cos", cos), ("sin", sin), ("position_ids", positions)):
        if x is not None and x.device != device:
            check(op, False, "{} must be on {}, got {}", name, device, x.device)
    columns = cos.shape[-1] if cos.dim() else 0
    rotated = form.rotated(columns)
    most = q.shape[-1] // (2 if form.shared else 1)
    fits = rotated % 2 == 0 and rotated <= q.shape[-1]
    what = "columns" if form.shared else "an even number of columns"
    check(op, fits, "cos must have {}, at most {}, got {}", what, most, columns)
    axes = (3,) if form.has_sections() else ()
    if positions is None:
        _check_rows(op, "cos", cos.shape, axes, batch, tokens, rest=(columns,), text=", R")
        return
    check(op, cos.dim() == 2, "cos must be [P, R] beside position_ids, got {}", tuple(cos.shape))
    _check_rows(op, "position_ids", positions.shape, axes, batch, tokens)


def takes_reference(op, q, k, cos, sin, positions, *weights, fits: bool = True) -> bool:
    """Whether the plain formula runs: no kernel has these tensors, or the tables need a gradient."""
    known = fits and has_kernel(op, q, k, *weights, cos.real if cos.is_complex() else cos, sin)
    differentiable = cos.requires_grad or (sin is not None and sin.requires_grad)
    if known and not (differentiable and torch.is_grad_enabled()):
        return False
    names = "cos", "sin", "q", "k", "q_weight", "k_weight"
    for name, x in zip(names, (cos, sin, q, k, *weights), strict=False):
        if x is not None:
            arguments.check_stored(op, name, x)
    if positions is not None:
        arguments.check_range(op, "position_ids", positions, cos.shape[0])
    return True


def check_constant(op, *needed) -> None:
    """The tables get no gradient from kernels; inside vmap only the backward learns that one is asked for."""
    check(op, not any(needed), "cos and sin must not need a gradient inside vmap, got one that does")


def _check_rows(op, name, shape, axes, batch, tokens, *, rest=(), text="") -> None:
    """[*axes, batch or 1, tokens, *rest] or without a batch."""
    lead = shape[: len(shape) - len(rest)]
    short = (*axes, tokens)
    if lead == short or lead == (*axes, 1, tokens) or lead == (*axes, batch, tokens):
        return
    lead = "3, " if axes else ""
    wanted = f"[{lead}1 or {batch}, {tokens}{text}] or [{lead}{tokens}{text}]"
    check(op, False, "{} must be {}, got {}", name, wanted, tuple(shape))


def kernel_tables(op, q, cos, sin):
    """Tables as the kernels take them: one dtype, q's or float32; complex numbers as pairs of floats."""
    if sin is None:
        arguments.check_stored(op, "cos", cos)
        return torch.view_as_real(cos.resolve_conj().to(torch.complex64)), None
    if cos.dtype != sin.dtype or cos.dtype not in (q.dtype, torch.float32):
        arguments.check_stored(op, "cos", cos)
        arguments.check_stored(op, "sin", sin)
        wide = torch.promote_types(torch.promote_types(q.dtype, cos.dtype), sin.dtype)
        return cos.to(wide), sin.to(wide)
    return cos, sin


def heads_like(x, dtype, swapped):
    """Dense, sizes of x; ``swapped``: heads and tokens in the other order in memory."""
    if not swapped:
        return x.new_empty(x.shape, dtype=dtype)
    *lead, one, two, cols = x.shape
    width = max(cols, 1)
    inner = max(one, 1) * width
    strides = (*(max(two, 1) * inner for _ in lead), width, inner, 1)
    return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device)


def both_like(q, k, dtype):
    """Results for q and k in their order of heads and tokens."""
    y = heads_like(q, dtype, heads_swapped(q))
    return y, q.new_empty(0, dtype=dtype) if k is None else heads_like(k, dtype, heads_swapped(k))


def heads_swapped(x) -> bool:
    """Whether heads and tokens lie in memory in the other order than in the tensor."""
    return bool(x.stride(-3) < x.stride(-2))


def _axis_of(pair, form):
    if form.mixed:
        height = (pair % 3 == 1) & (pair < 3 * form.height)
        return height.long() + 2 * ((pair % 3 == 2) & (pair < 3 * form.width))
    return (pair >= form.time).long() + (pair >= form.time + form.height)


def turns(cos, sin, positions, form, q):
    """cos and sin of the first and the second of every pair, in at least float32, shaped to meet q's."""
    tables = (cos.real, cos.imag) if sin is None else (cos, sin)
    columns = torch.arange(tables[0].shape[-1], device=cos.device)
    halves = form.shared or form.pairs != 1
    found = []
    for table in tables:
        x = table.to(torch.promote_types(torch.promote_types(q.dtype, table.dtype), torch.float32))
        if positions is not None:
            known = (positions >= 0) & (positions < x.shape[0])
            x = torch.where(known.unsqueeze(-1), x[torch.where(known, positions, 0).long()], torch.nan)
        if form.has_sections():
            pair = columns if form.shared else columns % (len(columns) // 2) if halves else columns // 2
            axis = _axis_of(pair, form)
            x = torch.where(axis == 0, x[0], torch.where(axis == 1, x[1], x[2]))
        batched = q.dim() == 4
        x = x.unsqueeze(0) if x.dim() == 2 and batched else x[0] if x.dim() == 3 and not batched else x
        x = x.unsqueeze(form.head_dim)
        if form.shared:
            found += [x, x]
        elif halves:
            found += x.tensor_split(2, dim=-1)
        else:
            found += [x[..., 0::2], x[..., 1::2]]
    return found


def rotate(x, c1, c2, s1, s2, form):
    """The rotation of one tensor in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, c1.dtype))
    rotated = 2 * c1.shape[-1]
    start = x.shape[-1] - rotated if form.tail else 0
    before, turned, after = wide.split((start, rotated, x.shape[-1] - rotated - start), dim=-1)
    x1, x2 = turned.tensor_split(2, dim=-1) if form.pairs == 0 else (turned[..., 0::2], turned[..., 1::2])
    y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    y = torch.stack((y1, y2), dim=-1).flatten(-2) if form.pairs == 1 else torch.cat((y1, y2), dim=-1)
    return torch.cat((before, y, after), dim=-1)
