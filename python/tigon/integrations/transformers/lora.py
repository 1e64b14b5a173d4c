"""PEFT's LoRA layers: base and low-rank products of all active adapters in one call each way.

The layer's class, parameters, names and methods stay PEFT's. Every call looks at the layer's state, so that
merged, disabled and switched adapters do what they did; what the native call does not compute is PEFT's
forward as before.
"""

from __future__ import annotations

import ast
import functools
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from tigon.integrations.transformers.canonical import NoSource, source_tree
from tigon.integrations.transformers.forward import (
    autocast_dtype,
    blocked,
    bound,
    foreign,
    has_hooks,
    stock,
)
from tigon.integrations.transformers.head_operands import is_linear
from tigon.ops.lora_linear import Adapter, Base, adapted, draw_seed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PARTS = ("base_layer", "lora_A", "lora_B", "active_adapters", "scaling")


def plan_lora(module: nn.Module) -> tuple[LoraSpec, str] | str | None:
    """(spec, what it is), why a LoRA layer is left, or None where there is none."""
    if not type(module).__module__.startswith("peft.") or not all(hasattr(module, p) for p in _PARTS):
        return None
    name = type(module).__name__
    if name not in ("Linear", "Linear4bit"):
        return f"lora.{name} is not an adapter of a plain or 4-bit Linear"
    base = module.base_layer
    if not (is_linear(base) or _is_4bit(base)):
        return f"the base is {type(base).__name__}, not nn.Linear"
    if foreign(base):
        return "the base's forward is bound to the instance (tensor parallel, kernels or another patch)"
    variants = {type(v).__name__ for v in getattr(module, "lora_variant", {}).values()}
    others = variants - {"DoraLinearVariant"}
    if others:
        return f"{', '.join(sorted(others))} changes what the adapter computes"
    return blocked(module) or (LoraSpec(), "tigon.lora_linear")


class State(NamedTuple):
    """What a call multiplies with."""

    dtype: torch.dtype
    base: Base
    adapters: list[Adapter]
    magnitude: torch.Tensor | None  # DoRA's lengths of rows
    sources: list[torch.Tensor | None]  # the layer's own tensors that these were made of

    def drops(self) -> bool:
        return any(adapter.dropout for adapter in self.adapters)

    def shareable(self) -> bool:
        """Whether it may be computed with others. Seeds are drawn call by call: a checkpoint repeats them."""
        return self.magnitude is None and isinstance(self.base.weight, torch.Tensor) and not self.drops()

    def key(self) -> tuple:
        """What makes two states of a layer equal."""
        versions = [None if t is None else (id(t), t._version) for t in self.sources]
        return self.dtype, versions, [adapter.scale for adapter in self.adapters]


class Siblings:
    """Layers that a module gives one x, one after the other: the first call computes for all.

    A result is handed out for the same x and the state that it was computed of, otherwise dropped.
    """

    def __init__(self, parent: nn.Module, names: tuple[str, ...]):
        self.parent, self.names = parent, names
        self.forget()

    def forget(self) -> None:
        self.x, self.version, self.results = None, -1, {}

    def __reduce__(self):
        return Siblings, (self.parent, self.names)

    def call(self, name: str, x: torch.Tensor, state: State) -> torch.Tensor:
        """What the layer `name` makes of x."""
        same = self.x is not None and self.x() is x and self.version == x._version
        key, y = self.results.pop(name, (None, None)) if same else (None, None)
        if key is not None and key == state.key():
            return y
        self.forget()
        states = {name: state} | self._others(name, x, state)
        bases = [other.base for other in states.values()]
        adapters = [
            adapter._replace(base=i) for i, other in enumerate(states.values()) for adapter in other.adapters
        ]
        y, *ys = adapted(x.to(state.dtype), bases, adapters)
        self.x, self.version = weakref.ref(x), x._version
        others = list(states.items())[1:]
        self.results = {of: (other.key(), z) for (of, other), z in zip(others, ys, strict=True)}
        return y

    def _others(self, name, x, state) -> dict[str, State]:
        found = {}
        for other in self.names:
            layer = self.parent._modules.get(other)
            forward = None if other == name or layer is None else bound(layer)
            if forward is None or forward.spec.siblings is not self:
                continue
            there = _state(layer, x)
            if there is None or not there.shareable() or there.dtype != state.dtype:
                continue
            if there.adapters[0].a.dtype == state.adapters[0].a.dtype:
                found[other] = there
        return found


@dataclass(eq=False)
class LoraSpec:
    """A layer's name among its siblings, if it has some."""

    name: str = ""
    siblings: Siblings | None = None


def find_siblings(parent: nn.Module, names: list[str]) -> Siblings | None:
    """The children of these names that the forward of their parent gives one x, in whatever it does next."""
    if len(names) < 2:
        return None
    shared = _callees(type(parent).forward, frozenset(names))
    return Siblings(parent, shared) if len(shared) > 1 else None


@functools.cache
def _callees(forward, names: frozenset[str]) -> tuple[str, ...]:
    """Of these attributes those called with one variable in a run of statements that leave it alone."""
    try:
        tree = source_tree(forward)
    except NoSource:
        return ()
    body = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)).body
    best: list[str] = []
    called: dict[str, list[str]] = {}
    for statement in body:
        branches = isinstance(statement, ast.If | ast.For | ast.While | ast.Try | ast.With)
        for node in ast.walk(statement):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=name),
                    args=[ast.Name(id=x)],
                    keywords=[],
                ) if name in names and not branches:
                    called.setdefault(x, []).append(name)
                    best = max(best, called[x], key=len)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                called.pop(node.id, None)
    return tuple(dict.fromkeys(best))


def lora_forward(module: nn.Module, spec: LoraSpec, x, *args, **kwargs):
    """Forward of a LoRA layer."""
    state = None if args or kwargs else _state(module, x)
    if state is None:
        return stock(module, x, *args, **kwargs)
    if spec.siblings is not None and state.shareable() and _sharing(x):
        return spec.siblings.call(spec.name, x, state)
    dtype, base, adapters, magnitude, _ = state
    x = x.to(dtype)
    bias = None if magnitude is None else base.bias
    if magnitude is not None:
        base = base._replace(bias=None)
    (y,) = adapted(x, [base], adapters, draw_seed(x) if state.drops() else None)
    if magnitude is None:
        return y
    y = y * (magnitude / _row_lengths(_dense(base), *adapters))
    return (y if bias is None else y + bias).to(dtype)


def _sharing(x) -> bool:
    """Whether results may be kept for siblings: in eager training."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return torch.is_grad_enabled() and not traced and not x.is_inference()


def _dense(base: Base) -> torch.Tensor:
    return base.weight if isinstance(base.weight, torch.Tensor) else base.weight()


def _state(module, x) -> State | None:
    """What this call multiplies with; None: PEFT computes it.

    Asked for every call: children are looked up where modules keep them, not by attribute.
    """
    parts = module._modules
    base = parts["base_layer"]
    if module._disable_adapters or module.merged_adapters or has_hooks(base) or foreign(base):
        return None
    device = x.device
    autocast = autocast_dtype(device.type)
    dtype = autocast or x.dtype
    if dtype not in _DTYPES or type(x) not in _PLAIN:
        return None
    if is_linear(base):
        weight = base.weight
        if not _usable(weight, device) or x.shape[-1] != weight.shape[1]:
            return None
        if weight.dtype != dtype:
            if autocast is None:
                return None  # an error in stock, which shall come
            weight = weight.to(dtype)
    elif _is_4bit(base) and not torch.compiler.is_compiling():
        weight = _quantised(base, dtype)
    else:
        return None
    bias, adapters, magnitude, kind = base.bias, [], None, None
    sources = [base.weight, bias]
    for name in module.active_adapters:
        down = parts["lora_A"]._modules.get(name)
        if down is None:
            continue
        up, dropout = parts["lora_B"]._modules[name], parts["lora_dropout"]._modules[name]
        if not (is_linear(down) and is_linear(up)) or any(map(has_hooks, (down, up, dropout))):
            return None
        a, b, of_b, scale = down.weight, up.weight, up.bias, module.scaling[name]
        kind = kind or a.dtype
        if not (_usable(a, device) and _usable(b, device)) or not a.dtype == b.dtype == kind:
            return None
        if type(dropout) not in (nn.Dropout, nn.Identity) or type(scale) not in (int, float):
            return None
        p = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
        if p >= 1:
            return None
        if name in module.lora_variant:
            magnitude = _magnitude(module, name, device)
            if magnitude is None or p > 0 or of_b is not None:
                return None  # dropout is of the base product too
        if of_b is not None:
            bias = of_b * scale if bias is None else bias + of_b * scale
        sources += a, b, of_b
        adapters.append(Adapter(0, a, b, float(scale), float(p)))
    if not adapters or kind not in _DTYPES or (magnitude is not None and len(adapters) > 1):
        return None  # several of which one is DoRA's add up in another way
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    return State(dtype, Base(weight, bias), adapters, magnitude, sources)


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def _usable(weight, device) -> bool:
    """Whether it is a whole tensor here; ZeRO-3 gathers its own in hooks of the parts."""
    return type(weight) in _PLAIN and weight.device == device and not hasattr(weight, "ds_id")


def _magnitude(module, name, device) -> torch.Tensor | None:
    """The lengths that DoRA gives to rows, where that is what the adapter does."""
    if type(module.lora_variant[name]).__name__ != "DoraLinearVariant":
        return None
    magnitude = module.lora_magnitude_vector[name].weight
    return magnitude if _usable(magnitude, device) else None


def _row_lengths(weight, adapter: Adapter) -> torch.Tensor:
    """Lengths of the rows of ``weight + scale * b @ a``, which is not formed; constants to autograd."""
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        a, b = adapter.a.float(), adapter.b.float()
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        cross = ((weight @ a.to(weight.dtype).t()).float() * b).sum(1)
        own = ((b @ (a @ a.t())) * b).sum(1)
        return (squares + 2 * adapter.scale * cross + adapter.scale**2 * own).clamp(min=0).sqrt()


def _is_4bit(base: nn.Module) -> bool:
    """Whether it is bitsandbytes' Linear of 4-bit weights."""
    return type(base).__name__ == "Linear4bit" and type(base).__module__.startswith("bitsandbytes.")


def _quantised(base: nn.Module, dtype: torch.dtype):
    """What makes the weight in `dtype`, for one direction at a time."""
    from peft.utils.integrations import dequantize_module_weight

    def dequantise():
        with torch.no_grad():
            return dequantize_module_weight(base).detach().to(dtype)

    return dequantise
