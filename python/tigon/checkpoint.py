"""The results that checkpointed layers save: a context for ``torch.utils.checkpoint`` from operator groups.

Saved operators do not run again in the backward. PyTorch's selective checkpointing does the work. This module
holds the names, and makes sure that experts are chosen once and random numbers keep their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tigon import _load as _load  # the library's operators, which the names denote
from tigon.error import refuse

_OP = "checkpoint_policy"

# Names of groups and of Tigon's operators do not change: docs/checkpointing.md promises it. An operator of
# Tigon runs as <name>_fwd, as <name>_infer if nothing needs a gradient, and as <name> in a compiled model.
GROUPS: dict[str, tuple[str, ...]] = {
    "attention": (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",
        "flex_attention",
    ),
    "matmuls": (
        "tigon::lora_linear",
        "tigon::fp8_linear",
        "aten::mm",
        "aten::addmm",
        "aten::_addmm_activation",
        "aten::_scaled_mm",
        "aten::_scaled_mm_v2",
    ),
    "batched_matmuls": ("aten::bmm", "aten::baddbmm"),
    "experts": (
        "tigon::experts",
        "aten::_grouped_mm",
        "aten::_scaled_grouped_mm",
        "aten::_scaled_grouped_mm_v2",
    ),
    "norms": (
        "tigon::rms_norm",
        "tigon::add_rms_norm",
        "tigon::gated_rms_norm",
        "tigon::modulated_rms_norm",
        "tigon::layer_norm",
        "tigon::group_norm",
        "tigon::poly_norm",
        "tigon::dyt",
        "aten::_fused_rms_norm",
        "aten::native_layer_norm",
        "aten::native_group_norm",
    ),
    "activations": (
        "tigon::glu",
        "tigon::silu",
        "tigon::mish",
        "tigon::relu_squared",
        "tigon::softmax",
        "tigon::sparsemax",
        "aten::silu",
        "aten::gelu",
        "aten::relu",
    ),
    "rope": ("tigon::rope", "tigon::qk_norm_rope"),
    "streams": ("tigon::hyper_connection", "tigon::hyper_connection_mix", "tigon::attention_residual"),
    "embedding": ("tigon::embedding", "aten::embedding"),
    "losses": (
        "tigon::cross_entropy",
        "tigon::divergence",
        "tigon::contrastive",
        "tigon::contrastive_cosine",
        "tigon::policy",
        "tigon::preference",
    ),
    "loss_heads": (
        "tigon::linear_cross_entropy",
        "tigon::linear_cross_entropy_columns",
        "tigon::linear_divergence",
        "tigon::linear_log_prob",
        "tigon::linear_policy",
        "tigon::linear_preference",
        "tigon::drafter_loss",
    ),
    "routing": ("tigon::route", "aten::topk"),
}
_ALWAYS = "routing"  # a second run may choose another expert of equal scores
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_DROPOUT = ("dropout_p", "p_dropout")


def checkpoint_policy(save: str | Sequence[str] = ("attention", "matmuls")) -> Callable[[], tuple]:
    """A ``context_fn`` for ``torch.utils.checkpoint`` that saves the results of the named operators.

    Saved results take memory, and their operators do not run again in the backward. Everything else is
    computed again, bitwise equal. The experts that routers choose are always saved.

    Args:
        save: names of groups (``"attention"``, ``"matmuls"``, ``"batched_matmuls"``, ``"experts"``,
            ``"norms"``, ``"activations"``, ``"rope"``, ``"streams"``, ``"embedding"``, ``"losses"``,
            ``"loss_heads"``, ``"routing"``), or of single operators (``"aten::convolution"``). ``()``:
            routing only.

    Returns:
        A function for ``checkpoint(..., use_reentrant=False, context_fn=...)``, and for transformers'
        ``gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": ...}``. It can be pickled.

    Raises:
        tigon.Error: a name is not one of these.
    """
    names = (save,) if isinstance(save, str) else save
    if not isinstance(names, (tuple, list, set, frozenset)):
        _refuse(save)
    for name in names:
        if not isinstance(name, str) or not (name in GROUPS or _is_operator(name)):
            _refuse(name)
    names = tuple(sorted({*map(_without_suffix, names), _ALWAYS}))
    context = functools.partial(_contexts, names)
    context.cache_hash = f"tigon.checkpoint_policy{names}"  # PyTorch's key for compiled graphs
    return context


def _refuse(given) -> None:
    words = "save must be names of groups ({}) or of operators (namespace::name), got {!r}"
    refuse(_OP, words, ", ".join(GROUPS), given)


def _is_operator(name: str) -> bool:
    namespace, separator, operator = name.partition("::")
    if not separator:
        return False
    return any(hasattr(getattr(torch.ops, namespace), other) for other in (operator, f"{operator}_fwd"))


def _without_suffix(name: str) -> str:
    return name.removesuffix("_fwd").removesuffix("_infer") if name.startswith("tigon::") else name


def _contexts(saved: tuple[str, ...]) -> tuple:
    forward, again = create_selective_checkpoint_contexts(functools.partial(_choose, saved))
    forward.__class__ = _copying(type(forward))
    return forward, again


@functools.cache
def _copying(mode: type) -> type:
    """PyTorch's mode of the forward that returns copies of the routers' results.

    Models divide the scores of the chosen experts in place, which must not change the saved results.
    """

    class Copying(mode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if _described(func)[0] == _ALWAYS:
                return tuple(t.clone() for t in out)
            return out

    return Copying


def _choose(saved: tuple[str, ...], context, op, *args, **kwargs) -> CheckpointPolicy:
    group, name, zeros = _described(op)
    if (group in saved or name in saved) and not any(_given(place, args, kwargs) for place in zeros):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _given(place: tuple[int, str], args: tuple, kwargs: dict) -> bool:
    index, name = place
    value = args[index] if index < len(args) else kwargs.get(name)
    return value is not None and (isinstance(value, torch.Tensor) or value != 0)


@functools.cache
def _described(op) -> tuple[str | None, str, tuple[tuple[int, str], ...]]:
    """An operator's group, its name, and the arguments (place and name) that forbid saving it.

    Skipping an operator that draws random numbers would shift those of all others, and an operator that
    writes into an argument has to run.
    """
    schema = getattr(op, "_schema", None)
    if schema is None:  # a higher-order operator
        return _GROUP_OF.get(op.name()), op.name(), ()
    group = _GROUP_OF.get(name := _without_suffix(schema.name))
    namespace, _, short = name.partition("::")
    if "flash_attn" in namespace and ("fwd" in short or "forward" in short):
        group = "attention"  # for packages that register attention under other names
    zeros = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.name in _DROPOUT
        or (argument.is_write and (group != "attention" or "out" in argument.name))
    )
    return group, name, zeros
