"""A frozen weight of which only the float8 bytes are kept."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map_only

from tigon.ops.fp8_linear import Quantized

_aten = torch.ops.aten
_SET = torch.Tensor.data.__set__


class _Held:
    """The storage of a weight and its aliases: the bytes, or a dense tensor after a write."""

    __slots__ = ("dense", "quantized")

    def __init__(self, quantized: Quantized | None, dense: torch.Tensor | None = None):
        self.quantized, self.dense = quantized, dense

    def like(self) -> torch.Tensor:
        return self.dense if self.quantized is None else self.quantized.bytes


class Fp8Weight(torch.Tensor):
    """A weight in float8 with a scale for each row.

    Every operation reads what the bytes stand for, in the weight's dtype. A copy into the weight is
    quantised. Any other write, such as that of a merge, makes it dense, and so does a dense ``.data``.
    """

    @staticmethod
    def __new__(cls, held: _Held, dtype: torch.dtype):
        like = held.like()
        self = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)
        self.held = held
        return self

    @classmethod
    def of(cls, weight: torch.Tensor) -> Fp8Weight:
        """A frozen parameter with the bytes of a weight."""
        made = cls(_Held(Quantized.make(weight, keeps_transposed=False)), weight.dtype)
        made._is_param = True
        return made

    def dequantize(self) -> torch.Tensor:
        """The numbers of the weight; no copy if it is dense."""
        made = self.held.quantized
        if made is None:
            return self.held.dense.to(self.dtype)
        wide = torch.float32 if self.dtype == torch.float16 else self.dtype
        return made.bytes.to(wide).mul_(made.scales[:, None]).to(self.dtype)

    def densify(self) -> torch.Tensor:
        if self.held.quantized is not None:
            self.held.dense, self.held.quantized = self.dequantize(), None
        return self.held.dense

    def pack(self) -> Quantized:
        """The bytes; a dense weight is quantised again and keeps only the bytes."""
        if self.held.quantized is None:
            made = Quantized.make(self.held.dense, keeps_transposed=False)
            self.held.quantized, self.held.dense = made, None
        return self.held.quantized

    def __repr__(self):
        return f"Fp8Weight({self.dequantize()})"

    def __deepcopy__(self, memo):
        made = self.held.quantized
        held = _Held(made and made.map(torch.clone), None if made else self.held.dense.clone())
        memo[id(self)] = copied = type(self)(held, self.dtype)
        copied._is_param = self._is_param
        return copied

    def __reduce_ex__(self, protocol):
        made = self.held.quantized
        parts = (self.held.dense,) if made is None else (made.bytes, made.scales)
        return _rebuilt, (parts, self.dtype, getattr(self, "_is_param", False))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.data_ptr:  # of what a captured graph reads
            return args[0].held.like().data_ptr()
        with torch._C.DisableTorchFunctionSubclass():
            if func != _SET or not isinstance(args[0], cls):
                return func(*args, **(kwargs or {}))
            weight, value = args
            if not isinstance(value, cls):
                value = cls(_Held(None, value), value.dtype)
            func(weight, value)
            weight.held = value.held
        return None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs, weight = kwargs or {}, args[0] if args else None
        made = weight.held.quantized if isinstance(weight, cls) else None
        if func in (_aten.detach.default, _aten.alias.default) and isinstance(weight, cls):
            return cls(weight.held, weight.dtype)
        if func is _aten._to_copy.default and made is not None:
            moved = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking")}
            return cls(_Held(made.map(lambda t: t.to(**moved))), kwargs.get("dtype") or weight.dtype)
        if func is _aten.copy_.default and made is not None:
            given = tree_map_only(cls, cls.dequantize, args[1]).to(weight.device, weight.dtype)
            weight.held.quantized = Quantized.make(given, keeps_transposed=False)
            return weight
        written = False
        for given, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(given, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                given.densify()
                written = True
        result = func(*tree_map_only(cls, cls.dequantize, args), **tree_map_only(cls, cls.dequantize, kwargs))
        return weight if written else result


def _rebuilt(parts, dtype, parameter):
    held = _Held(Quantized(*parts, keeps_transposed=False)) if len(parts) == 2 else _Held(None, *parts)
    made = Fp8Weight(held, dtype)
    if parameter:
        made._is_param = True
    return made
