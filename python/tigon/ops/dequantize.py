"""Weights of 8 and 4 bits as floats. Contract: ``csrc/tigon/ops/dequantize/dequantize.h``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tigon import _op
from tigon.error import check
from tigon.integrations.quantised import Codes, read
from tigon.ops.arguments import check_choice

_OP = "dequantize"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("e4m3", "int8", "int4", "e2m1")
_NIBBLES = ("int4", "e2m1")
_BY_DTYPE = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}


def _fake(codes, scales, zeros, divisor, kind, columns, block_rows, block_cols, dtype):
    return codes.new_empty(codes.shape[0], columns, dtype=_DTYPES[dtype])


_dequantize = _op.raw(_OP, _fake, _OP)


def dequantize(
    source: torch.Tensor | nn.Module,
    scales: torch.Tensor | None = None,
    kind: str | None = None,
    *,
    block: tuple[int, int] | None = None,
    columns: int | None = None,
    zeros: torch.Tensor | None = None,
    divisor: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The weight that codes with a grid of scales stand for, ``(value - zero) * (scale / divisor)``.

    Args:
        source: codes ``[..., N, K]`` of 8 bits, or of 4 bits ``[..., N, K / 2]`` in bytes (or 32-bit words)
            with the low bits first. Or a quantised Linear of transformers, compressed-tensors, bitsandbytes
            or torchao, or PEFT's layer around one: all but `dtype` is then read from it.
        scales: ``[..., n, k]``, one for each block; ``[N]``: one for each row; one element: one for all.
            float32, bfloat16, float16, float8 e4m3 or e8m0 (uint8: the bytes of e8m0).
        kind: what a code is: ``"e4m3"``, ``"int8"``, ``"int4"`` (stored plus 8) or ``"e2m1"``. ``None``: by
            the dtype of codes of 8 bits.
        block: rows and columns of a block. ``None``: N / n and K / k, which must be whole.
        columns: K, if the last bytes of a row hold more codes than the weight has.
        zeros: zero points, of scales' shape. ``None``: 0.
        divisor: one number by which scales are divided, as NVFP4's ``weight_global_scale``. ``None``: 1.
        dtype: of the weight: float32, bfloat16 or float16.

    Returns:
        The weight ``[..., N, K]``. Computed in float32 and rounded once; bitwise deterministic. It has no
        gradient.

    Raises:
        tigon.Error: sizes, dtypes or devices that do not fit; a module that no reader knows.
    """
    check(_OP, dtype in _DTYPES, "dtype must be float32, bfloat16 or float16, got {}", dtype)
    if isinstance(source, nn.Module):
        linear = getattr(source, "base_layer", source)
        made, name = read(linear), type(linear).__name__
        check(_OP, made is not None, "source must be a quantised Linear that tigon reads, got {}", name)
        return weight_of(made, dtype)
    check(_OP, isinstance(source, torch.Tensor), "source must be a tensor or a module, got {}", type(source))
    check(_OP, isinstance(scales, torch.Tensor), "scales must be a tensor, got {}", type(scales))
    kind = kind or _BY_DTYPE.get(source.dtype)
    check(_OP, kind is not None, "kind must be given with codes of {}", source.dtype)
    check_choice(_OP, "kind", kind, KINDS)
    check(_OP, source.dim() >= 2, "source must have 2 or more dimensions, got {}", source.dim())
    codes, scales = source.detach(), scales.detach()
    if kind == "e4m3":
        check(_OP, codes.dtype == torch.float8_e4m3fn, "source must hold float8_e4m3fn, got {}", codes.dtype)
    elif codes.dtype != torch.uint8:
        check(_OP, not codes.dtype.is_floating_point, "source must hold integers, got {}", codes.dtype)
        codes = codes.contiguous().view(torch.uint8)
    lead, (rows, width) = codes.shape[:-2], codes.shape[-2:]
    if columns is None:
        columns = 2 * width if kind in _NIBBLES else width
    elif kind in _NIBBLES:
        codes = codes[..., : (columns + 1) // 2]
    if scales.numel() == 1:
        block = (max(1, lead.numel() * rows), max(1, columns))
        scales = scales.reshape(1, 1)
    elif scales.dim() == 1:
        scales = scales[:, None]
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if block is None:
        grid = scales.shape[-2:]
        check(
            _OP,
            0 not in grid and rows % grid[0] == 0 and columns % grid[1] == 0,
            "block must be given where scales {} do not divide the weight [{}, {}]",
            tuple(grid),
            rows,
            columns,
        )
        block = (max(1, rows // grid[0]), max(1, columns // grid[1]))
    if lead and scales.dim() > 2:
        whole = rows % block[0] == 0 and scales.shape[:-2] == lead
        check(
            _OP, whole, "scales of a stack {} must be whole blocks, got {}", tuple(codes.shape), scales.shape
        )
    if zeros is not None:
        zeros = zeros.detach().float()
        zeros = zeros.reshape(scales.shape) if zeros.numel() == scales.numel() else zeros
    weight = _dequantize(
        codes.flatten(0, -2),
        scales.flatten(0, -2),
        None if zeros is None else zeros.flatten(0, -2),
        None if divisor is None else divisor.detach(),
        KINDS.index(kind),
        columns,
        *block,
        _DTYPES.index(dtype),
    )
    return weight.unflatten(0, (*lead, rows)) if lead else weight


def weight_of(made: Codes | Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The weight of what was read of a module."""
    if not isinstance(made, Codes):
        return made().detach().to(dtype)
    codes, scales, kind, *_ = made
    options = {name: getattr(made, name) for name in ("block", "columns", "zeros", "divisor")}
    return dequantize(codes, scales, kind, dtype=dtype, **options)
