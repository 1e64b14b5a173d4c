"""Weights of 8 and 4 bits as floats. Contract: ``csrc/tigon/ops/dequantize/dequantize.h``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tigon import _op
from tigon._dtensor import KERNEL_DTYPES
from tigon.error import check
from tigon.ops.arguments import called, check_choice, check_dense, check_dtype, check_integers, kind_of
from tigon.ops.quantised import Codes, read

_OP = "dequantize"
KINDS = ("e4m3", "int8", "int4", "e2m1")
_NIBBLES = ("int4", "e2m1")
_WORDS = (torch.int8, torch.int32)
_NO_NUMBERS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)
_BY_DTYPE = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}


def _fake(codes, scales, zeros, divisor, kind, columns, block_rows, block_cols, dtype):
    return codes.new_empty(codes.shape[0], columns, dtype=KERNEL_DTYPES[dtype])


_dequantize = _op.raw(_OP, _fake, _OP)


@called()
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
            with the low bits first. Or a quantised Linear of transformers, compressed-tensors, bitsandbytes,
            torchao, gptqmodel or hqq, or PEFT's layer around one: all but `dtype` is then read from it.
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
    check_dtype(_OP, "dtype", dtype, KERNEL_DTYPES)
    if isinstance(source, nn.Module):
        linear = getattr(source, "base_layer", source)
        made, name = read(linear), type(linear).__name__
        check(_OP, made is not None, "source must be a quantised Linear that tigon reads, got {}", name)
        return weight_of(made, dtype)
    _check_tensors(source, scales, zeros, divisor)
    kind = _BY_DTYPE.get(source.dtype) if kind is None else kind
    check(_OP, kind is not None, "kind must be given with codes of {}", source.dtype)
    check_choice(_OP, "kind", kind, KINDS)
    of = torch.float8_e4m3fn if kind == "e4m3" else None
    codes = source.detach()
    if of is None and codes.dtype in _WORDS:
        codes, of = codes.contiguous().view(torch.uint8), torch.uint8
    check(_OP, codes.dtype == (of or torch.uint8), "source must hold codes of {}, got {}", kind, codes.dtype)
    *lead, rows, width = codes.shape
    packed = kind in _NIBBLES
    check_integers(_OP, least=1, or_none=True, columns=columns)
    if columns is None:
        columns = 2 * width if packed else width
    elif packed:
        codes = codes[..., : (columns + 1) // 2]
    scales = scales.detach()
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if scales.numel() == 1:
        scales, block = scales.reshape(1, 1), (max(1, codes.shape[:-1].numel()), max(1, columns))
    elif scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    if zeros is not None:
        same = zeros.numel() == scales.numel()
        check(_OP, same, "zeros must be {} as scales, got {}", scales.shape, zeros.shape)
        zeros = zeros.detach().float().reshape(scales.shape)
    block = _block_of(block, scales, rows, columns)
    if scales.dim() > 2:
        whole = rows % block[0] == 0 and [*scales.shape[:-2]] == lead
        check(_OP, whole, "scales of a stack {} must be of whole blocks, got {}", codes.shape, scales.shape)
    divisor = None if divisor is None else divisor.detach()
    matrices = (None if t is None else t.flatten(0, -2) for t in (codes, scales, zeros))
    weight = _dequantize(*matrices, divisor, KINDS.index(kind), columns, *block, KERNEL_DTYPES.index(dtype))
    return torch.unflatten(weight, 0, (*lead, rows)) if lead else weight


def _check_tensors(source, scales, zeros, divisor) -> None:
    for name, t in (("source", source), ("scales", scales), ("zeros", zeros), ("divisor", divisor)):
        if t is None and name in ("zeros", "divisor"):
            continue
        check(_OP, isinstance(t, torch.Tensor), name + " must be a tensor, got {}", kind_of(t))
        check_dense(_OP, name, t)
        check(_OP, t.dtype not in _NO_NUMBERS, name + " must hold real numbers, got {}", t.dtype)
        check(_OP, t.device == source.device, name + " must be on {}, got {}", source.device, t.device)
    check(_OP, source.dim() >= 2, "source must have 2 or more dimensions, got {}", source.dim())


def _block_of(block, scales, rows, columns) -> tuple[int, int]:
    if block is not None:
        pair = isinstance(block, (tuple, list)) and len(block) == 2
        check(_OP, pair, "block must be two integers, got {}", kind_of(block))
        check_integers(_OP, least=1, **{"rows of block": block[0], "columns of block": block[1]})
        return block[0], block[1]
    n, k = scales.shape[-2:]
    words = "block must be given where scales {} do not divide the weight [{}, {}]"
    check(_OP, n > 0 and k > 0 and rows % n == 0 and columns % k == 0, words, scales.shape, rows, columns)
    return max(1, rows // n), max(1, columns // k)


def weight_of(made: Codes | Callable[[Callable], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The weight of what was read of a module."""
    if not isinstance(made, Codes):
        return made(dequantize).detach().to(dtype)
    codes, scales, kind, *_ = made
    options = {name: getattr(made, name) for name in ("block", "columns", "zeros", "divisor")}
    return dequantize(codes, scales, kind, dtype=dtype, **options)
