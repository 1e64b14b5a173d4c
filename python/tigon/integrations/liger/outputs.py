"""The output classes of ``liger_kernel`` and its door into wrapped modules."""

from __future__ import annotations

import functools
import importlib
from dataclasses import field, make_dataclass

import torch

# Where the class that each extends is: transformers' own name is the rest of the name.
_MODELS = {
    "Gemma3": "gemma3",
    "Gemma4": "gemma4",
    "Glm4vMoe": "glm4v_moe",
    "InternVL": "internvl",
    "Llava": "llava",
    "MuseGlimmer": "muse_glimmer",
    "PaliGemma": "paligemma",
    "Qwen2VL": "qwen2_vl",
    "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen3VL": "qwen3_vl",
    "Qwen3VLMoe": "qwen3_vl_moe",
    "Qwen3_5": "qwen3_5",
    "Qwen3_5Moe": "qwen3_5_moe",
}
_REST = "CausalLMOutputWithPast"
OUTPUTS = tuple(f"Liger{model}{_REST}" for model in ("", "Moe", *_MODELS))


def __getattr__(name: str):
    """The classes are made when first asked for: each imports a modelling module."""
    if name in OUTPUTS:
        return _output_class(name)
    raise AttributeError(name)


def __dir__():
    return [*globals(), *OUTPUTS]


@torch.compiler.assume_constant_result  # tracing imports nothing
def _output_class(name: str) -> type | None:
    return _make(name)


@functools.cache
def _make(name: str) -> type | None:
    """transformers' output with what the loss head counts on the way; None where it has no such class."""
    base = name[len("Liger") :]
    model = _MODELS.get(base[: -len(_REST)])
    place = f"models.{model}.modeling_{model}" if model else "modeling_outputs"
    try:
        module = importlib.import_module(f"transformers.{place}")
    except ImportError:
        return None
    parent = getattr(module, base, None)
    if parent is None:
        return None
    fields = [
        ("token_accuracy", torch.FloatTensor | None, field(default=None)),
        ("predicted_tokens", torch.LongTensor | None, field(default=None)),
    ]
    made = make_dataclass(name, fields, bases=(parent,))
    made.__module__, made.__doc__ = __name__, f"{base}, and what the loss head counts on the way."
    return made


def with_counts(output):
    """The same output as its class of this module, if there is one."""
    name = f"Liger{type(output).__name__}"
    made = _output_class(name) if name in OUTPUTS else None
    if made is None or not issubclass(made, type(output)):
        return output
    return made(**output)


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
