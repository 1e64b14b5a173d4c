"""Readers of quantised Linears, by the names of their classes: what their weights stand for.

No library is imported: a reader looks at the tensors of a module. It returns its codes, or a function that
makes the weight, or None if the module holds no codes (yet, or any more).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from tigon._dtensor import PLAIN

_LINEAR = nn.Linear.forward
SCHEME = "quantization_scheme"  # the attribute by which compressed-tensors makes a plain Linear quantised


class Codes(NamedTuple):
    """The arguments of :func:`tigon.dequantize`."""

    codes: torch.Tensor
    scales: torch.Tensor
    kind: str | None = None
    block: tuple[int, int] | None = None
    columns: int | None = None
    zeros: torch.Tensor | None = None
    divisor: torch.Tensor | None = None


Made = Codes | Callable[[Callable], torch.Tensor] | None  # a function is given tigon.dequantize


def read(linear: nn.Module) -> Made:
    """The codes of a quantised Linear, or a function that makes its weight; None if there are none."""
    reader = _reader(linear)
    made = None if reader is None else reader(linear)
    tensors = [t for t in made if isinstance(t, torch.Tensor)] if isinstance(made, Codes) else []
    return made if all(type(t) in PLAIN for t in tensors) else None  # others are sharded


def is_quantised(linear: nn.Module) -> bool:
    """Whether a reader knows it, with codes or not."""
    return _reader(linear) is not None


def peft_reads(linear: nn.Module) -> bool:
    """Whether PEFT dequantises the weight itself when it needs more than the matmul."""
    return _reader(linear) in (_bitsandbytes, _by_itself, _hqq)


def has_library_forward(linear: nn.Module) -> bool:
    """Whether the forward of the instance is compressed-tensors', which rounds x before nn.Linear's."""
    function = getattr(vars(linear).get("forward"), "__func__", None)
    of = getattr(function, "__globals__", {}).get("__name__", "")
    return of.startswith("compressed_tensors.") and _reader(linear) is _compressed_tensors


def has_backend_forward(kind: type) -> bool:
    """Whether the class's forward is one of HQQ's, which `set_backend` chooses by name."""
    return kind.forward.__qualname__.startswith("HQQLinear.forward_") and _is_hqq(kind)


def why_not(linear: nn.Module) -> str:
    """Words for a base that no reader knows: its class, and for gptqmodel's what to load instead."""
    name = type(linear).__name__
    if type(linear).__module__.startswith("gptqmodel."):
        return f"the base is {name}, whose weight Tigon does not read (load it with backend='auto_trainable')"
    return f"the base is {name}, not nn.Linear"


def device_of(linear: nn.Module, default: torch.device) -> torch.device:
    """The device of codes that are no parameter, or `default`; group indices of GPTQ may be elsewhere."""
    return getattr(getattr(linear, "qweight", None), "device", default)


def _is_hqq(kind: type) -> bool:
    return kind.__name__ == "HQQLinear" and kind.__module__.startswith("hqq.")


def _reader(linear: nn.Module) -> Callable[[nn.Module], Made] | None:
    """A subclass with another forward may compute something else."""
    kind = type(linear)
    if not isinstance(linear, nn.Linear):
        if kind.__module__.startswith("gptqmodel."):
            return _OF_GPTQMODEL.get(kind.__name__)
        return _hqq if _is_hqq(kind) else None
    if kind.forward is _LINEAR:
        if SCHEME in vars(linear):
            return _compressed_tensors
        of = type(linear._parameters.get("weight"))
        # torchao's weights and Tigon's Fp8Weight
        itself = of not in PLAIN and of.__module__.startswith(("torchao.", "tigon."))
        return _by_itself if itself else None
    if kind.__module__.startswith("bitsandbytes."):
        return _bitsandbytes
    for base in kind.__mro__:
        if base.__name__ in _READERS and base.__module__.startswith("transformers."):
            return _READERS[base.__name__] if kind.forward is base.forward else None
    return None


def _blocks(linear):
    """Codes of float8 with a scale for each block of 128 by 128 or all; or two codes of 4 bits a byte."""
    weight, scales = linear.weight, linear.weight_scale_inv
    if weight.dtype == torch.int8:
        return Codes(weight, scales, "e2m1")
    if weight.dtype != torch.float8_e4m3fn:
        return None
    return Codes(weight, scales, block=linear.block_size and tuple(linear.block_size))


def _rows(linear):
    """Codes of float8 with a scale for each row, or one for all."""
    weight = linear.weight
    return Codes(weight, linear.weight_scale.flatten()) if weight.dtype == torch.float8_e4m3fn else None


def _compressed_tensors(linear):
    """float-, int-, pack-, nvfp4-pack-, mxfp4-pack- and mxfp8-quantized, by the tensors that it holds."""
    scheme = linear.quantization_scheme
    of = getattr(scheme, "weights", None)
    if of is None or getattr(scheme, "output_activations", None) is not None:
        return None
    codes, zeros = getattr(linear, "weight_packed", None), getattr(linear, "weight_zero_point", None)
    kind = None if codes is None else "e2m1" if of.type == "float" else "int4"
    if codes is None:
        codes = getattr(linear, "weight", None)
    held = getattr(codes, "dtype", None) in (torch.float8_e4m3fn, torch.int8)
    if not (held if kind is None else of.num_bits == 4) or getattr(linear, "weight_g_idx", None) is not None:
        return None
    group = (1, of.group_size)
    blocks = {"group": group, "tensor_group": group, "channel": (1, linear.in_features)}
    block = tuple(of.block_structure) if of.strategy == "block" else blocks.get(of.strategy)
    if block is None and of.strategy != "tensor":
        return None
    if zeros is not None:
        zeros = None if of.symmetric else _zeros(zeros, linear.weight_scale)
    divisor = getattr(linear, "weight_global_scale", None)
    return Codes(codes, linear.weight_scale, kind, block, linear.in_features, zeros, divisor)


def _zeros(zeros, scales):
    """Zero points of 4 bits are packed along the first dimension and stored plus 8."""
    if zeros.dtype != torch.int32:
        return zeros
    return _unpacked(zeros.T, 4).T[: len(scales)].char() - 8


def _unpacked(words, bits):
    """Codes of bits in int32, the low ones first, as uint8: [n, m] -> [n, m * 32 / bits]."""
    shifts = torch.arange(0, 8, bits, device=words.device, dtype=torch.uint8)
    return (words.contiguous().view(torch.uint8)[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _gptq(linear):
    """Words along the inputs; `g_idx` has the group of each, in any order. Zero points are of format v2."""
    if linear.bits not in (2, 4, 8) or linear.planar or not _is_packed(linear) or linear.g_idx is None:
        return None
    return functools.partial(_of_gptq, linear)


def _of_gptq(linear, dequantize):
    bits, inputs, outputs = linear.bits, linear.in_features, linear.scales.shape[1]
    scales, zeros = linear.scales.T.contiguous(), _unpacked(linear.qzeros, bits)[:, :outputs].T.short()
    words = linear.qweight.T.contiguous()
    if bits == 4 and _in_order(linear.g_idx, linear.group_size):
        options = {"block": (1, linear.group_size), "columns": inputs, "zeros": zeros - 8}
        return dequantize(words, scales, "int4", dtype=scales.dtype, **options)
    of = linear.g_idx.to(scales.device, torch.int64)
    codes = _unpacked(words, bits)[:, :inputs].short().sub_(zeros[:, of])
    return scales[:, of].mul_(codes)


_ordered = WeakTensorKeyDictionary()


def _in_order(of, size) -> bool:
    """Whether inputs have their groups one after the other; looked at once for each tensor, which waits."""
    if _ordered.get(of, (None,))[0] != (of._version, size):
        _ordered[of] = (of._version, size), torch.equal(of.cpu().long(), torch.arange(len(of)) // size)
    return _ordered[of][1]


def _awq(linear):
    """Words along the outputs, of which a word has the even ones first."""
    return functools.partial(_of_awq, linear) if linear.bits == 4 and _is_packed(linear) else None


def _of_awq(linear, dequantize):
    scales = torch.unflatten(linear.scales, 1, (-1, 4, 2)).mT.flatten(1)  # in the order of the codes
    options = {"block": (linear.group_size, 1), "zeros": _unpacked(linear.qzeros, 4).short() - 8}
    made = dequantize(linear.qweight, scales, "int4", dtype=scales.dtype, **options)
    return torch.unflatten(made, 1, (-1, 2, 4)).permute(1, 3, 2, 0).flatten(0, 2)


def _is_packed(linear):
    """Whether words, zero points and scales are here, and nothing else changes what the layer computes."""
    words = [getattr(linear, name, None) for name in ("qweight", "qzeros")]
    plain = all(type(t) in PLAIN for t in (*words, linear.scales))
    if not plain or any(t.dtype != torch.int32 for t in words) or linear.adapter is not None:
        return False
    return not (getattr(linear, "online_full_had", False) or getattr(linear, "online_partial_had", False))


def _hqq(linear):
    return (lambda _: linear.dequantize()) if linear.ready and has_backend_forward(type(linear)) else None


def _bitsandbytes(linear):
    from peft.utils.integrations import dequantize_bnb_weight

    weight, state = linear.weight, getattr(linear, "state", None)
    four = type(weight).__name__ == "Params4bit" and weight.quant_state is not None
    eight = weight.dtype == torch.int8 and not (state is None or weight.SCB is state.SCB is None)
    if not (four or eight):
        return None
    return lambda _: dequantize_bnb_weight(weight, state)


def _by_itself(linear):
    weight = linear.weight
    own = type(weight).dequantize is not torch.Tensor.dequantize
    return (lambda _: weight.dequantize()) if own else None


# transformers has these classes.
_READERS = {"FP8Linear": _blocks, "FbgemmFp8Linear": _rows, "CompressedTensorsFP8Linear": _rows}
# gptqmodel trains these classes.
_OF_GPTQMODEL = {"TorchLinear": _gptq, "TritonV2Linear": _gptq}
_OF_GPTQMODEL |= dict.fromkeys(("AwqTorchLinear", "AwqGEMMLinear", "AwqGEMMTritonLinear"), _awq)
