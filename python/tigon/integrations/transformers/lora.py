"""PEFT's LoRA layers: the base and adapter matmuls of a layer in one call in the forward and the backward.

PEFT keeps the layer's class, parameters, names and methods. Every call checks the layer's state, so that
merged, disabled and switched adapters work as before. PEFT's forward computes all cases that the native call
does not support.
"""

from __future__ import annotations

import ast
import functools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from tigon._dtensor import KERNEL_DTYPES, PLAIN
from tigon._op import is_traced_or_transformed, saves_through_hooks
from tigon.error import refuse
from tigon.integrations.transformers.canonical import NoSource, source_tree
from tigon.integrations.transformers.forward import (
    CALL,
    HOOKED,
    INNER,
    LINEAR,
    autocast_dtype,
    blocked,
    bound,
    calls_forward,
    foreign,
    has_hooks,
    intact,
    is_as_written,
    stock,
    written,
)
from tigon.integrations.transformers.fp8 import Fp8Spec
from tigon.integrations.transformers.head_operands import (
    LORA_PARTS,
    dora_magnitude,
    dropout_of,
    is_linear,
    row_lengths,
)
from tigon.ops import fp8_linear
from tigon.ops.again import GATED_UNITS, NORMS, again
from tigon.ops.dequantize import weight_of
from tigon.ops.fp8_weight import Fp8Weight
from tigon.ops.lora_linear import Adapter, Base, apply, prepare, reference
from tigon.ops.philox import draw_seed
from tigon.ops.quantised import (
    SCHEME,
    device_of,
    has_backend_forward,
    has_library_forward,
    is_quantised,
    peft_reads,
    read,
    why_not,
)

_PARTS = ("lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector")
_LAYERS = ("Linear", "Linear4bit", "Linear8bitLt", "TorchaoLoraLinear")
_LAYERS += ("GPTQLoraLinear", "AwqLoraLinear", "HqqLoraLinear")


def plan_lora(module: nn.Module) -> tuple[LoraSpec, str] | str | None:
    """Plan one of PEFT's LoRA layers: (spec, op), why it is left, or None."""
    if not type(module).__module__.startswith("peft.") or not all(hasattr(module, p) for p in LORA_PARTS):
        return None
    name = type(module).__name__
    if name not in _LAYERS:
        return f"lora.{name} is not an adapter of a plain or quantised Linear"
    base = module.base_layer
    if not (is_linear(base) or is_quantised(base)):
        return why_not(base)
    later = type(base).__module__.startswith("bitsandbytes.")  # quantised when it is moved to the device
    if is_quantised(base) and not later and read(base) is None:
        return f"the base, {type(base).__name__}, holds no codes that Tigon reads"
    if foreign(base) and not has_library_forward(base):
        return "the base's forward is bound to the instance (tensor parallel, kernels or another patch)"
    parts = [part for name in _PARTS for part in getattr(module, name).values()]
    base_as_written = _is_written(type(base)) and calls_forward(base)
    if not (base_as_written and all(map(is_as_written, (module, *parts)))):
        return "a part of the adapter has another forward than the one it was written with"
    variants = {type(v).__name__ for v in getattr(module, "lora_variant", {}).values()}
    others = variants - {"DoraLinearVariant"}
    if others:
        return f"{', '.join(sorted(others))} changes what the adapter computes"
    if variants and is_quantised(base) and not peft_reads(base):
        words = (
            "DoRA must be around a base that PEFT dequantises, got {}: PEFT takes the codes for the weight"
        )
        refuse("apply", words, type(base).__name__)
    return blocked(module) or (LoraSpec(), "tigon.lora_linear")


def _is_written(kind: type) -> bool:
    """Whether instances have the forward that the class, or the backend of HQQ's, was written with."""
    return kind.forward is written(kind) or has_backend_forward(kind)


class LoraState(NamedTuple):
    """The operands of a call."""

    dtype: torch.dtype
    base: Base
    adapters: list[Adapter]
    magnitude: torch.Tensor | None  # DoRA's lengths of rows
    sources: list[torch.Tensor]  # the layer's tensors from which these were made
    call: tuple  # base and adapters as the op takes them
    drops: bool
    scales_weight: bool  # DoRA may scale the rows of the weight
    shareable: bool  # with others. Seeds are drawn call by call: a checkpoint repeats them

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Scale the result without the bias, as DoRA does."""
        return y if self.magnitude is None or self.base.bias is None else y + self.base.bias

    def versions(self) -> list[int]:
        return [t._version for t in self.sources]

    def equals(self, other: LoraState) -> bool:
        return other is self or (
            self.dtype == other.dtype
            and _same(self.sources, other.sources)
            and [a.scale for a in self.adapters] == [a.scale for a in other.adapters]
        )


class Siblings:
    """Layers that a module calls with one x, one after the other: the first call computes all of them.

    A later call returns its result if x and the state are the same; otherwise the result is dropped. One
    autograd node for q, k and v saves a tenth of the host's time in a small model's backward, on a CPU.
    """

    def __init__(self, parent: nn.Module, names: tuple[str, ...]):
        self.parent, self.names = parent, names
        self.specs, self.states, self.prepared = [], [], ()  # of the last call
        self.forget()

    def forget(self) -> None:
        self.x, self.version, self.results = None, -1, {}

    def __reduce__(self):
        return Siblings, (self.parent, self.names)

    def call(self, spec: LoraSpec, x: torch.Tensor, state: LoraState) -> torch.Tensor:
        if self.x is not None and self.x() is x and self.version == x._version:
            computed = self.results.pop(spec.name, None)
            if computed is not None and computed[1] == state.versions() and state.equals(computed[0]):
                return computed[2]
        self.forget()
        # The others' kept states may be out of date: each layer checks when it is called. A checkpoint counts
        # what its two runs save, so there they are looked at now.
        known = self.specs and self.specs[0] is spec and _same([s.state for s in self.specs], self.states)
        if not known or saves_through_hooks():
            self._gather(spec, x, state)
        y, *ys = _adapted(x, state.dtype, self.prepared, all_norms=spec.all_norms)
        self.x, self.version = weakref.ref(x), x._version
        for sibling, other, z in zip(self.specs[1:], self.states[1:], ys, strict=True):
            self.results[sibling.name] = other, other.versions(), other.finish(z)
        return state.finish(y)

    def _gather(self, spec, x, state) -> None:
        self.specs, self.states = [spec], [state]
        for name in self.names:
            layer = self.parent._modules.get(name)
            forward = None if name == spec.name or layer is None else bound(layer)
            if forward is None or forward.spec.siblings is not self:
                continue
            there = _state(layer, forward.spec, x)
            if there is None or not there.shareable or there.dtype != state.dtype:
                continue
            kinds = [
                (one.magnitude is None, one.adapters[0].a.dtype, one.base.quantised is None)
                for one in (state, there)
            ]
            if kinds[0] == kinds[1]:
                self.specs.append(forward.spec)
                self.states.append(there)
        self.prepared = _prepare(*self.states)


def _prepare(*states: LoraState) -> tuple:
    """The layout and tensors of one call that computes all states."""
    bases, adapters = [one.base for one in states], [one.adapters for one in states]
    adapters = [a._replace(base=i) for i, group in enumerate(adapters) for a in group]
    if states[0].magnitude is None:
        return prepare(bases, adapters)
    return prepare([Base(base.weight) for base in bases], adapters, [one.magnitude for one in states])


@dataclass(eq=False)
class LoraSpec:
    """A layer's name among its siblings, if it has some, and the inputs and state of its last call."""

    name: str = ""
    siblings: Siblings | None = None
    fp8: Fp8Spec | None = None  # the base's matmuls are of float8 in training
    all_norms: bool = False  # no result of a norm is kept, not only large ones
    seen: list | None = None
    state: LoraState | None = None

    def __reduce__(self):
        return LoraSpec, (self.name, self.siblings, self.fp8, self.all_norms)


def find_siblings(parent: nn.Module, names: list[str]) -> Siblings | None:
    """The children of these names that the forward of their parent calls with one x."""
    if len(names) < 2:
        return None
    shared = _callees(type(parent).forward, frozenset(names))
    return Siblings(parent, shared) if len(shared) > 1 else None


@functools.cache
def _callees(forward, names: frozenset[str]) -> tuple[str, ...]:
    """The attributes that are called with one variable, with no assignment to it between the calls."""
    try:
        tree = source_tree(forward)
    except NoSource:
        return ()
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    body = getattr(next(functions, None), "body", [])  # none of a lambda
    best: list[str] = []
    called: dict[str, list[str]] = {}
    for statement in body:
        branches = isinstance(statement, ast.If | ast.Match | ast.For | ast.While | ast.Try | ast.With)
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
    """Run a LoRA layer in one call, or as PEFT does if the call has no kernel."""
    state = None if args or kwargs else _state(module, spec, x)
    if state is None:
        return stock(module, x, *args, **kwargs)
    if state.magnitude is not None and not _scales_weight(x, state):
        y = _dora(x, state, spec.all_norms)
    elif spec.siblings is not None and state.shareable and _sharing(x):
        return spec.siblings.call(spec, x, state)
    elif state.base.quantised is not None and is_traced_or_transformed():
        y = _composed(x, state)
    else:
        seed = draw_seed(x) if state.drops else None
        y = state.finish(*_adapted(x, state.dtype, state.call, seed, spec.all_norms))
    # A 4-bit base computes in a dtype of its own.
    return y if y.dtype == x.dtype or torch.is_autocast_enabled(x.device.type) else y.to(x.dtype)


def _adapted(x, dtype, call, seed=None, all_norms=False):
    if x.dtype == dtype:
        return apply(x, *call, seed, _recompute(x, all_norms))
    return apply(x.to(dtype), *call, seed)


def _composed(x, state: LoraState) -> torch.Tensor:
    """Compute a float8 base for compilers and transforms, which trace all matmuls of the layer."""

    def linear(rows, weight, bias):
        return fp8_linear.apply(rows, weight, bias, "fp8", reuse=False)

    seed = draw_seed(x) if state.drops else None
    return reference(x.to(state.dtype), [state.base], state.adapters, seed, linear)[0]


# Keeping an x of this size costs more than a small launch.
_LARGE = 1 << 25


def _recompute(x, all_norms: bool) -> Callable[[], torch.Tensor] | None:
    """A function that computes x again in the backward, so that it is not kept: a gated unit or a large norm.

    With `all_norms`, a small one too.
    Both keep their inputs anyway. Under checkpoints and hooks, which manage saved tensors, x is kept.
    """
    if not _sharing(x):
        return None
    return again(x, (GATED_UNITS, NORMS) if all_norms or x.nbytes >= _LARGE else (GATED_UNITS,))


def _sharing(x) -> bool:
    """Whether results may be kept for siblings: only in eager training."""
    return torch.is_grad_enabled() and not is_traced_or_transformed() and not x.is_inference()


def _state(module, spec: LoraSpec, x) -> LoraState | None:
    """The operands of this call; None if PEFT computes it."""
    if is_traced_or_transformed():
        return _find_state(module, x, spec.fp8)
    seen = _look(module, spec, x)
    if seen is None or seen != spec.seen:
        spec.seen, spec.state = None, None
        state = _find_state(module, x, spec.fp8)
        if state is not None and seen is None:  # a parametrisation makes the weight anew in each call
            return state._replace(shareable=False)
        if state is None or not set(map(id, (*state.call[1], state.base.bias))) <= {
            *map(id, state.sources),
            id(None),
        }:
            return state  # of tensors that are made for each call
        spec.seen, spec.state = seen, state
    return spec.state


def _same(some, others) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _look(module, spec: LoraSpec, x) -> list | None:
    """The values that `_find_state` reads: equal lists have equal results. None if it reads others too.

    The state holds the tensors, so that no other tensor gets their identity.
    """
    base = module._modules["base_layer"]
    weight = base._parameters.get("weight")
    if spec.fp8 is not None and module.merged_adapters and weight is not None:
        fp8_linear.forget_weights([weight])  # no version tells that PEFT writes to it
    # Packed codes have other names.
    if (weight is None and not is_quantised(base)) or module._disable_adapters or module.merged_adapters:
        return None
    device = x.device
    seen = [type(x), x.dtype, device, x.shape[-1], autocast_dtype(device.type), SCHEME in base.__dict__]
    if spec.fp8 is not None and weight is not None:
        seen += _takes_fp8(module, spec.fp8, weight), spec.fp8.gathers(weight)
    seen += getattr(weight, "shape", None), getattr(weight, "requires_grad", None), *_look_at_part(base)
    if type(weight) not in PLAIN:
        seen += _look_at_quantised(base, weight)
    for name, down, up, dropout in _active(module):
        if down._parameters.get("weight") is None or up._parameters.get("weight") is None:
            return None
        scale, variant = module.scaling[name], module.lora_variant.get(name)
        seen += name, variant, type(scale), scale, dropout.training, dropout.__dict__.get("p")
        seen += *_look_at_part(down), *_look_at_part(up), *_look_at_part(dropout)
        if variant is not None:
            magnitude = dora_magnitude(module, name)
            if magnitude is None:
                return None
            seen += _look_at_tensor(magnitude)
    return seen


def _look_at_part(part: nn.Module) -> list:
    """The parameters of a part, and the attributes that decide whether it is a plain matmul."""
    own, kind = part.__dict__, type(part)
    seen = [part, kind, kind.forward, own.get("forward"), own.get(HOOKED), own.get(INNER)]
    seen += own.get(CALL), has_hooks(part)
    for tensor in own["_parameters"].values():
        seen += _look_at_tensor(tensor)
    return seen


def _look_at_tensor(t: torch.Tensor | None) -> tuple:
    return (None,) if t is None else (id(t), t.dtype, t.device, hasattr(t, "ds_id"))


def _look_at_quantised(base: nn.Module, weight) -> tuple:
    """The attributes that decide what is read and the dtype of a 4-bit base."""
    state = getattr(base, "state", None)
    states = (id(state), getattr(state, "SCB", None) is None)
    of_weight = (getattr(weight, name, None) is None for name in ("quant_state", "SCB"))
    return *states, *of_weight, getattr(base, "compute_dtype", None)


def _active(module):
    """(name, A, B, dropout) of the active adapters that the layer has."""
    downs, ups, dropouts = (module._modules[part]._modules for part in ("lora_A", "lora_B", "lora_dropout"))
    return [
        (name, downs[name], ups[name], dropouts[name]) for name in module.active_adapters if name in downs
    ]


def _takes_fp8(module, fp8: Fp8Spec | None, weight) -> bool:
    """Whether this call's base is of float8: in training, with a frozen weight."""
    return fp8 is not None and (module.training or torch.is_grad_enabled()) and not weight.requires_grad


def _find_state(module, x, fp8: Fp8Spec | None = None) -> LoraState | None:
    """Find the state; children and parameters are read from the modules' dictionaries, not by attribute.

    `_look` lists everything that this function reads; test_hf_lora_state.py compares what the two read.
    """
    if module._disable_adapters or module.merged_adapters:
        return None
    found = _find_base(module, x, fp8)
    parts = None if found is None else _find_adapters(module, x.device)
    if parts is None:
        return None
    (dtype, base, sources), (adapters, biases, magnitude) = found, parts
    weight, bias = base[:2]
    for b, adapter in zip(biases, adapters, strict=True):
        if b is not None:
            bias = b * adapter.scale if bias is None else bias + b * adapter.scale
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    sources = [*sources, *biases, *(l.a for l in adapters), *(l.b for l in adapters), magnitude]
    drops, plain = any(adapter.dropout for adapter in adapters), isinstance(weight, torch.Tensor)
    # float16 cannot represent the substitute for a magnitude of 0.
    scales = magnitude is not None and torch.float16 not in (dtype, adapters[0].a.dtype)
    scales = scales and not (plain and weight.requires_grad)
    shareable = plain and not drops and (magnitude is None or scales)
    sources = [t for t in sources if t is not None]
    base = base._replace(bias=bias)
    state = LoraState(dtype, base, adapters, magnitude, sources, (), drops, scales, shareable)
    return state._replace(call=_prepare(state))


def _find_base(module, x, fp8: Fp8Spec | None) -> tuple[torch.dtype, Base, list] | None:
    """The dtype of the call, the base, and the tensors that it is made of."""
    base, device = module._modules["base_layer"], x.device
    linear, coded = is_linear(base), is_quantised(base)
    if has_hooks(base) or not calls_forward(base) or not (linear or (coded and _is_written(type(base)))):
        return None
    if foreign(base) and not (coded and has_library_forward(base)):
        return None
    autocast = autocast_dtype(device.type)
    dtype = x.dtype if autocast is None else autocast
    weight, bias = base._parameters.get("weight") if coded else _own(base, "weight"), _own(base, "bias")
    quantised, gathered = None, False
    plain = linear and type(weight) in PLAIN and not coded
    taken = plain or (linear and type(weight) is Fp8Weight)
    if taken and not module.lora_variant and _takes_fp8(module, fp8, weight):
        gathered = fp8.gathers(weight)
        quantised = functools.partial(fp8_linear.quantized_weight, weight, not gathered, frozen=True)
    if plain or quantised:
        if weight.device != device or hasattr(weight, "ds_id") or x.shape[-1] != weight.shape[1]:
            return None
        sources = [weight, bias]
        if weight.dtype != dtype:
            if autocast is None:
                return None  # PEFT's forward raises its own error
            weight = weight if quantised else weight.to(dtype)
    elif coded and not torch.compiler.is_compiling() and (made := read(base)) is not None:
        sources = [t for t in base._parameters.values() if t is not None]
        if any(t.device != device or hasattr(t, "ds_id") for t in sources):
            return None
        if device_of(base, device) != device:
            return None
        if autocast is None and isinstance(base, nn.Linear):
            dtype = getattr(base, "compute_dtype", None) or dtype  # of a 4-bit base
        weight = _dequantised(made, dtype)
    else:
        return None
    fits = dtype in KERNEL_DTYPES and type(x) in PLAIN
    return (dtype, Base(weight, bias, quantised, gathered), sources) if fits else None


def _find_adapters(module, device) -> tuple[list[Adapter], list, torch.Tensor | None] | None:
    """The active adapters, B's bias in each, and DoRA's magnitude."""
    adapters, biases, magnitude, kind = [], [], None, None
    for name, down, up, dropout in _active(module):
        scale = module.scaling[name]
        if not (is_linear(down) and is_linear(up) and intact(down, LINEAR) and intact(up, LINEAR)):
            return None
        a, b, bias = _own(down, "weight"), _own(up, "weight"), _own(up, "bias")
        if _own(down, "bias") is not None:
            return None
        kind = kind or a.dtype
        if not (_usable(a, device) and _usable(b, device)) or not a.dtype == b.dtype == kind:
            return None
        p = dropout_of(dropout)
        if p is None or p >= 1 or type(scale) not in (int, float):
            return None
        if name in module.lora_variant:
            magnitude = dora_magnitude(module, name)
            if magnitude is None or not _usable(magnitude, device) or p > 0 or bias is not None:
                return None  # dropout applies to the base matmul too
        biases.append(bias)
        adapters.append(Adapter(0, a, b, float(scale), float(p)))
    if kind not in KERNEL_DTYPES or (magnitude is not None and len(adapters) > 1):
        return None  # several adapters with DoRA add up differently
    return adapters, biases, magnitude


def _own(module, name):
    """A parameter from the module's dictionary, which is faster than its attribute."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name)


def _usable(weight, device) -> bool:
    """Whether this process has the whole tensor; ZeRO-3 gathers weights in hooks of the parts."""
    return type(weight) in PLAIN and weight.device == device and not hasattr(weight, "ds_id")


def _scales_weight(x, state: LoraState) -> bool:
    """Whether DoRA scales rows of the weight; if x has few rows, it scales the result."""
    return not is_traced_or_transformed() and state.scales_weight and 16 * x.numel() >= x.shape[-1] ** 2


def _dora(x, state: LoraState, all_norms: bool = False) -> torch.Tensor:
    """DoRA scales the rows of ``W + scale * B A`` to the lengths `magnitude`; this scales the result."""
    dtype, (weight, bias, *_), (adapter,), magnitude, *_ = state
    made = [weight if isinstance(weight, torch.Tensor) else weight()]
    lengths = row_lengths(made[0], *adapter[1:4])
    base = Base(weight if made[0] is weight else lambda: made.pop() if made else weight())
    (y,) = _adapted(x, dtype, prepare([base], [adapter]), all_norms=all_norms)
    y = (y * (magnitude / lengths)).to(dtype)
    return y if bias is None else y + bias


def _dequantised(made, dtype: torch.dtype):
    """A function that makes the weight in `dtype`, for the forward or the backward."""

    def dequantise():
        with torch.no_grad():
            return weight_of(made, dtype)

    return dequantise
