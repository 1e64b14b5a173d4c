"""A replacement forward bound to one module instance."""

from __future__ import annotations

import torch
from torch import nn


class Forward:
    """Callable stored as `module.forward`; it runs `function(module, spec, *args, **kwargs)`.

    A plain object and not a bound method: copying or pickling the module carries it along, bound
    to the copy, and `torch.compile` traces through it.
    """

    def __init__(self, function, module: nn.Module, spec):
        self.function = function
        self.module = module
        self.spec = spec

    def __call__(self, *args, **kwargs):
        return self.function(self.module, self.spec, *args, **kwargs)

    def __repr__(self):
        return f"<tigon forward of {type(self.module).__name__}>"


def bind(function, module: nn.Module, spec) -> None:
    """Make `function` the forward of this instance; its class stays as it is."""
    module.__dict__["forward"] = Forward(function, module, spec)


def bound(module: nn.Module) -> Forward | None:
    """The replacement forward of this instance, if it carries one."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, Forward) else None


def unbind(module: nn.Module) -> None:
    """Give the instance its class's forward back."""
    if bound(module) is not None:
        del module.__dict__["forward"]


def stock(module: nn.Module, *args):
    """The forward that the class defines."""
    return type(module).forward(module, *args)


def plain(*tensors) -> bool:
    """Whether all are ordinary tensors: kernels take no DTensor, quantised or other subclass."""
    return all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors)


def foreign(module: nn.Module) -> bool:
    """Whether the instance carries a forward that is neither ours nor its class's own.

    transformers' kernels rebinds the class's own forward to every module it has no kernel for.
    """
    forward = module.__dict__.get("forward")
    own = getattr(forward, "__func__", None) is type(module).forward
    return forward is not None and not own and bound(module) is None


def blocked(module: nn.Module) -> str | None:
    """Why this instance must keep the forward it has, or None."""
    if not foreign(module):
        return None
    if getattr(module.forward, "runs_tigon", False):
        return "runs tigon already, through transformers' kernels"
    return "its forward is bound to the instance (tensor parallel, kernels or another patch)"
