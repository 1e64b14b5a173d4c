"""The outputs of patched models, and ``liger_kernel``'s door into wrapped modules."""

from __future__ import annotations

import functools
from dataclasses import field, make_dataclass

import torch
from transformers.utils import ModelOutput


def with_counts(output: ModelOutput) -> ModelOutput:
    """A causal model's output as a class that also has what the loss head counts on the way."""
    known = type(output).__name__.endswith("CausalLMOutputWithPast")
    return _extended(type(output))(**output) if known else output


@torch.compiler.assume_constant_result
def _extended(parent: type) -> type:
    return _make(parent)


@functools.cache
def _make(parent: type) -> type:
    """``parent`` with two fields more."""
    fields = [
        ("token_accuracy", torch.FloatTensor | None, field(default=None)),
        ("predicted_tokens", torch.LongTensor | None, field(default=None)),
    ]
    namespace = {"__module__": __name__, "__reduce__": _reduce, "__doc__": f"{parent.__name__} with counts."}
    return make_dataclass(f"Liger{parent.__name__}", fields, bases=(parent,), namespace=namespace)


def _reduce(self):
    return _restore, (type(self).__base__, {**self})


def _restore(parent: type, values: dict) -> ModelOutput:
    return _extended(parent)(**values)


class _FSDPForwardRedirection:
    """Calls a function of a wrapped module inside the wrapper's forward, when its weights are whole."""

    def __call__(self, wrapper_module, method, *args, **kwargs):
        inner = wrapper_module._fsdp_wrapped_module
        shadowed = inner.__dict__.get("forward")

        def restore():
            inner.__dict__.pop("forward", None)
            if shadowed is not None:
                inner.__dict__["forward"] = shadowed

        def once(*inner_args, **inner_kwargs):
            restore()  # what `method` calls is the module itself
            return method(*inner_args, **inner_kwargs)

        inner.__dict__["forward"] = once
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            restore()
