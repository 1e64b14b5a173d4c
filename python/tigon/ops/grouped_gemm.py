"""Matmuls of the rows of each expert with its own matrix, and the kernels that are chosen for them.

They are native on the CPU and on sm_90. Elsewhere PyTorch's ``grouped_mm`` runs, or one matmul per expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from tigon._deterministic import is_deterministic
from tigon._load import native
from tigon.environment import has_matmul_kernels
from tigon.ops.loss_head.matmuls import compute_gradients, compute_logits

# The native pieces are called only inside the operators of a layer, which tracers treat as opaque.
_gather, _gate = native("experts_gather"), native("experts_gate")
_matmul, _weight_gradient = native("experts_matmul"), native("experts_weight_gradient")
_gated_matmul = native("experts_gated_matmul")


def native_fits(rows, other) -> bool:
    """Whether the native matmuls take these: on CUDA 16-bit rows of whole 16-byte vectors, on sm_90."""
    if rows.is_cpu:
        return True
    if rows.dtype == torch.float32 or not has_matmul_kernels(rows.device):
        return False
    aligned = (t.data_ptr() % 16 == 0 and t.is_contiguous() for t in (rows, other))
    return all(aligned) and all(n % 8 == 0 for t in (rows, other) for n in t.shape[1:])


def grouped_mm_fits(rows, offsets) -> bool:
    """Whether ``grouped_mm`` has a kernel for these."""
    return rows.dtype == torch.bfloat16 and offsets.numel() <= 1024


def _whole(t):
    """t with zeros up to whole 16-byte vectors in every dimension but the first, at an aligned address."""
    zeros = [n for size in reversed(t.shape[1:]) for n in (0, -size % 8)]
    t = F.pad(t, zeros) if any(zeros) else t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def grouped_matmul(rows, stack, offsets, transposed):
    """:func:`matmul` in one launch."""
    columns, stack = stack.shape[2 if transposed else 1], _whole(stack)
    matrices = stack if transposed else stack.transpose(1, 2)
    return F.grouped_mm(_whole(rows), matrices, offs=offsets[1:])[:, :columns].contiguous()


def grouped_weight_gradient(a, b, offsets):
    """:func:`weight_gradient` in one launch."""
    out = F.grouped_mm(_whole(a).t(), _whole(b), offs=offsets[1:])
    return out[:, : a.shape[1], : b.shape[1]].contiguous()


def looped_matmul(rows, stack, offsets, transposed):
    """:func:`matmul` expert by expert; waits for the device."""
    out = rows.new_empty(rows.shape[0], stack.shape[2 if transposed else 1])
    ends, alike = offsets.tolist(), is_deterministic()  # PyTorch chooses a kernel by the number of rows
    for matrix, begin, end in zip(stack, ends, ends[1:], strict=False):
        part, to = rows[begin:end], out[begin:end]
        if not alike:
            torch.mm(part, matrix if transposed else matrix.t(), out=to)
        elif transposed:
            compute_gradients(part, to, matrix, dhidden=to)
        else:
            compute_logits(to, part, matrix)
    return out


def looped_weight_gradient(a, b, offsets):
    """:func:`weight_gradient` expert by expert; waits for the device."""
    ends = offsets.tolist()
    out = a.new_empty(len(ends) - 1, a.shape[1], b.shape[1])
    for e, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        torch.mm(a[begin:end].t(), b[begin:end], out=out[e])
    return out


class Addend(NamedTuple):
    """What :func:`matmul` adds: the matmul of other rows and another stack of the same layout."""

    rows: torch.Tensor | None = None
    stack: torch.Tensor | None = None


_NO_ADDEND = Addend()


def matmul(rows, stack, offsets, transposed, addend=_NO_ADDEND, order=None, place=None):
    """Rows of expert e times its matrix: ``[in, out]`` if `transposed`, else ``[out, in]``.

    Args:
        order, place: the rows of the experts are those of `rows` in this order, if given.
    """
    if native_fits(rows, stack):
        rest = {"order": order, "place": place, "t": addend.rows, "b": addend.stack}
        return _matmul(rows, stack, offsets, transposed, **rest)
    rows = rows.contiguous() if order is None else _gather(rows, place)
    run = grouped_matmul if grouped_mm_fits(rows, offsets) else looped_matmul
    y = run(rows, stack, offsets, transposed)
    return y if addend.rows is None else y.add_(run(addend.rows, addend.stack, offsets, transposed))


class GatedUnit(NamedTuple):
    """The gated unit, and the layout of the matrices."""

    kind: int
    columns: int
    transposed: bool
    alpha: float
    limit: float


def gated_matmul(x, order, place, stack, bias, offsets, unit, keep, addend=_NO_ADDEND):
    """Rows of x (in `order`, if given) times gate_up, empty unless kept; and the gated unit."""
    if native_fits(x, stack):
        operands = {"stack": stack, "bias": bias, "offsets": offsets, "keep": keep}
        return _gated_matmul(x, order, place, **operands, **unit._asdict(), t=addend.rows, b=addend.stack)
    z = matmul(x, stack, offsets, unit.transposed, addend, order, place)
    return z, _gate(z, bias, offsets, unit.kind, unit.columns, unit.alpha, unit.limit)


def weight_gradient(a, b, offsets):
    """``a_e^T b_e`` of the rows of every expert e; zeros if it has none."""
    if native_fits(a, b):
        return _weight_gradient(a, b, offsets)
    return (grouped_weight_gradient if grouped_mm_fits(a, offsets) else looped_weight_gradient)(a, b, offsets)
