"""A replacement method bound to one module instance."""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass

import torch
from torch import nn


class Forward:
    """`function(module, spec, *args, **kwargs)`; its method `call` is stored as `module.forward` or another.

    An object and not a closure: copying or pickling the module carries it along, bound to the copy. A bound
    method of it and not itself: `torch.compile` tells objects apart by identity, and methods by their code,
    so that layers compiled one by one share what is compiled.
    """

    def __init__(self, function, module: nn.Module, spec):
        self.function = function
        self.module = module
        self.spec = spec

    def call(self, *args, **kwargs):
        return self.function(self.module, self.spec, *args, **kwargs)

    def __repr__(self):
        return f"<tigon method of {type(self.module).__name__}>"


class ModelForward(Forward):
    """The same of a whole model. Others inspect its forward, wrap it, keep it and bind it anew.

    So this object itself stands in `module.forward`, with the signature of what it replaces, and is kept in
    the module besides: whatever wraps it, there is one.
    """

    @property
    def __signature__(self):
        return inspect.signature(self._replaced)

    @property
    def __code__(self):  # torch.export names its place
        return self._replaced.__code__

    @property
    def _replaced(self):
        below = self.module.__dict__.get(BELOW)
        return types.MethodType(type(self.module).forward, self.module) if below is None else below

    def __call__(self, *args, **kwargs):
        if args and args[0] is self.module:  # accelerate binds what it takes out of its wrappers
            args = args[1:]
        return self.call(*args, **kwargs)


def bind(function, module: nn.Module, spec, name: str = "forward", above: bool = False) -> None:
    """Make `function` a method of this instance; its class stays as it is.

    `above`: a forward that transformers' tensor parallelism gave the instance becomes `stock`.
    """
    if above and foreign(module):
        module.__dict__[BELOW] = module.__dict__[_place(module, name)]
    module.__dict__[_place(module, name)] = Forward(function, module, spec).call


def bound(module: nn.Module, name: str = "forward") -> Forward | None:
    return _ours(module.__dict__.get(_place(module, name)))


def _ours(method) -> Forward | None:
    if isinstance(method, Forward):
        return method
    if not isinstance(method, types.MethodType):
        return None
    owner = method.__self__  # not by getattr with a default: tracing, torch 2.11 answers with the default
    return owner if isinstance(owner, Forward) else None


def bind_model(function, module: nn.Module, spec) -> None:
    """As `bind` above, of a whole model; `model_forward` finds it."""
    bind(function, module, spec, above=True)
    made = ModelForward(function, module, spec)
    module.__dict__[_place(module, "forward")] = module.__dict__[MODEL] = made


def model_forward(module: nn.Module) -> ModelForward | None:
    """What `bind_model` bound, also where others have wrapped it since."""
    return module.__dict__.get(MODEL)


def unbind(module: nn.Module) -> None:
    """Give the instance the methods back that it had."""
    below = module.__dict__.pop(BELOW, None)
    if MODEL in vars(module):
        vars(module)[MODEL].function = _released  # others may hold it
    for name in [name for name, value in vars(module).items() if _ours(value)]:
        if name == HOOKED:
            module.__dict__[name] = types.MethodType(type(module).forward, module)
        else:
            del module.__dict__[name]
    if below is not None:
        module.__dict__[_place(module, "forward")] = below


def _released(module, spec, *args, **kwargs):
    del spec
    return stock(module, *args, **kwargs)


MODEL = "_tigon_forward"  # where a model keeps its `ModelForward`
BELOW = "_tigon_below"  # where a module keeps the forward that was the instance's own

# Where accelerate keeps the forward of a module that it moves tensors for (device_map, offloading).
HOOKED = "_old_forward"


def _place(module: nn.Module, name: str) -> str:
    return HOOKED if name == "forward" and HOOKED in vars(module) and hasattr(module, "_hf_hook") else name


def stock(module: nn.Module, *args, **kwargs):
    """The forward of the class, or the one that transformers' tensor parallelism gave the instance."""
    below = module.__dict__.get(BELOW)
    return type(module).forward(module, *args, **kwargs) if below is None else below(*args, **kwargs)


# Tracing, the type of a buffer made by nn.Buffer is that.
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def plain(*tensors) -> bool:
    """Whether all are ordinary tensors: kernels take no DTensor, quantised or other subclass."""
    return all(type(tensor) in _PLAIN for tensor in tensors)


def read(module: nn.Module, *names) -> list:
    """Attributes of these names; of what is no name, itself."""
    return [getattr(module, name) if isinstance(name, str) else name for name in names]


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast computes in on a kind of device; None where it is off, or has no kernel of Tigon's."""
    on = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


@dataclass(frozen=True)
class Part:
    """A child or function whose call is fused away: its attribute's name, and its class or the function."""

    name: str
    kind: object

    @classmethod
    def named(cls, module: nn.Module, name: str) -> Part:
        part = getattr(module, name)
        return cls(name, type(part) if isinstance(part, nn.Module) else part)

    def is_in(self, module: nn.Module) -> bool:
        """Whether it is what it was, and nobody watches its calls."""
        part = getattr(module, self.name)
        if not isinstance(part, nn.Module):
            return part is self.kind
        return type(part) is self.kind and not has_hooks(part)


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks
        or module._backward_hooks or module._backward_pre_hooks
    )  # fmt: skip


def foreign(module: nn.Module) -> bool:
    """Whether the instance carries a forward that is neither ours nor its class's own.

    transformers' kernels and accelerate rebind the class's own forward to modules they leave alone.
    """
    forward = module.__dict__.get(_place(module, "forward"))
    if forward is None:
        return False
    method = isinstance(forward, types.MethodType)
    own = method and forward.__func__ is type(module).forward and forward.__self__ is module
    return not own and not _ours(forward)


def tensor_parallel(module: nn.Module) -> bool:
    """Whether a Linear has the forward of transformers' column-wise plan, with logits for all processes."""
    forward = module.__dict__.get(BELOW) or module.__dict__.get(_place(module, "forward"))
    if getattr(forward, "__module__", None) != "transformers.distributed.tensor_parallel":
        return False
    styles = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
    return any(
        type(style).__name__ == "ColwiseParallel"
        and style.output_layouts.is_replicate()
        and style.use_local_output
        for style in styles
    )


def blocked(module: nn.Module) -> str | None:
    """Why this instance must keep the forward it has, or None."""
    if not foreign(module):
        return None
    if getattr(module.forward, "runs_tigon", False):
        return "runs tigon already, through transformers' kernels"
    return "its forward is bound to the instance (tensor parallel, kernels or another patch)"
