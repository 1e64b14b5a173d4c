"""The output classes of ``liger_kernel`` and its door into wrapped modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast


@dataclass
class LigerCausalLMOutputWithPast(CausalLMOutputWithPast):
    """transformers' output, and what the loss head counts on the way."""

    token_accuracy: torch.FloatTensor | None = None
    predicted_tokens: torch.LongTensor | None = None


@dataclass
class LigerMoeCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    """The same of models with experts."""

    token_accuracy: torch.FloatTensor | None = None
    predicted_tokens: torch.LongTensor | None = None


class _FSDPForwardRedirection:
    """Calls a function of a wrapped module from inside the wrapper's forward, where its weights are whole."""

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
