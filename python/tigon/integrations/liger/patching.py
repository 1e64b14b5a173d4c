"""``apply_liger_kernel_to_*`` and related functions: Liger's interface, implemented with :func:`tigon.apply`.

Their switches choose slots: ``rms_norm`` and ``layer_norm`` the norms, ``swiglu``, ``geglu`` and
``relu_squared`` the MLPs, experts and routers, ``rope`` the rotary function,
``fused_linear_cross_entropy`` the loss head, ``cross_entropy`` the loss of given logits. An unset switch
(``None``) is off. Slots that Liger does not have use their Tigon names (``lora=False``).
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import nn
from transformers.utils import ModelOutput

import tigon
from tigon.error import Error
from tigon.integrations.liger import functional
from tigon.integrations.liger.construction import on_construction
from tigon.integrations.liger.outputs import with_counts
from tigon.integrations.liger.paths import check
from tigon.integrations.transformers import causal_loss
from tigon.integrations.transformers.forward import model_forward
from tigon.integrations.transformers.head import forward_of_model, watched_forward
from tigon.integrations.transformers.lazy_logits import LazyLogits
from tigon.integrations.transformers.modules import AutoTigonForCausalLM
from tigon.integrations.transformers.patch import unwrapped

log = logging.getLogger("tigon")

_SWITCHES = {
    "rope": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
    "rms_norm": True,
    "layer_norm": True,
    "swiglu": True,
    "geglu": True,
    "relu_squared": True,
}
_OWN = ("qkv", "qk_norm", "hyper", "lora")  # slots of tigon.apply without a switch in Liger
MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., None]] = {}
P = ParamSpec("P")


def _like(shape: Callable[P, None], *types: str, **defaults: bool) -> Callable[P, None]:
    """The function of models of these types; its parameters are the shape's, some with other defaults."""
    signature = inspect.signature(shape)
    parameters = [p.replace(default=defaults.get(p.name, p.default)) for p in signature.parameters.values()]
    signature = signature.replace(parameters=parameters)

    def function(*args: P.args, **kwargs: P.kwargs) -> None:
        own = {name: kwargs.pop(name) for name in _OWN if name in kwargs}
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        given = bound.arguments | bound.arguments.get("kwargs", {}) | own
        bound.apply_defaults()
        model = bound.arguments.pop("model", None)
        options = bound.arguments | given
        if "kwargs" in options:  # the function of a model that contains others
            options = _of_parts(model) | options.pop("kwargs") | options
        slots, logits_loss = _slots(options, given)
        if model is not None:
            _patch(model, slots, logits_loss)
            return
        for model_type in types:
            if not on_construction(model_type, lambda model: _patch(model, slots, logits_loss)):
                log.warning(
                    "[compat.liger] this transformers has no model type %s: nothing to do", model_type
                )

    function.__name__ = function.__qualname__ = f"apply_liger_kernel_to_{types[0]}"
    function.__signature__ = signature
    function.__doc__ = (
        f"Tigon into {types[0]} models: into ``model``, or without one into every such model, now and later."
    )
    MODEL_TYPE_TO_APPLY_LIGER_FN.update(dict.fromkeys(types, function))
    return function


# Parameters and defaults that several functions share.


def _swiglu(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: nn.Module | None = None,
) -> None: ...


def _geglu(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    geglu: bool = True,
    model: nn.Module | None = None,
) -> None: ...


def _swiglu_and_vision(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: nn.Module | None = None,
) -> None: ...


def _geglu_and_vision(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True,
    rms_norm: bool = True,
    geglu: bool = True,
    model: nn.Module | None = None,
) -> None: ...


def _llama4(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: nn.Module | None = None,
    layer_norm: bool = True,
) -> None: ...


def _qwen2_vl(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    layer_norm: bool = True,
    swiglu: bool = True,
    model: nn.Module | None = None,
) -> None: ...


def _pixtral(
    rope: bool = True, rms_norm: bool = True, swiglu: bool = True, model: nn.Module | None = None
) -> None: ...


def _nemotron(
    relu_squared: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    model: nn.Module | None = None,
    **kwargs: bool,
) -> None: ...


def _of_models(
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    model: nn.Module | None = None,
    **kwargs: bool,
) -> None: ...


def _of_models_and_norms(
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    layer_norm: bool = True,
    model: nn.Module | None = None,
    **kwargs: bool,
) -> None: ...


apply_liger_kernel_to_llama = _like(_swiglu, "llama")
apply_liger_kernel_to_smollm3 = _like(_swiglu, "smollm3")
apply_liger_kernel_to_ministral = _like(_swiglu, "ministral")
apply_liger_kernel_to_mistral = _like(_swiglu, "mistral")
apply_liger_kernel_to_mixtral = _like(_swiglu, "mixtral")
apply_liger_kernel_to_qwen2 = _like(_swiglu, "qwen2")
apply_liger_kernel_to_qwen3 = _like(_swiglu, "qwen3")
apply_liger_kernel_to_qwen3_moe = _like(_swiglu, "qwen3_moe")
apply_liger_kernel_to_phi3 = _like(_swiglu, "phi3")
apply_liger_kernel_to_olmo2 = _like(_swiglu, "olmo2")
apply_liger_kernel_to_olmo3 = _like(_swiglu, "olmo3")
apply_liger_kernel_to_falcon_h1 = _like(_swiglu, "falcon_h1")
apply_liger_kernel_to_hunyuan_v1_dense = _like(_swiglu, "hunyuan_v1_dense")
apply_liger_kernel_to_hunyuan_v1_moe = _like(_swiglu, "hunyuan_v1_moe")
apply_liger_kernel_to_exaone4 = _like(_swiglu, "exaone4")
apply_liger_kernel_to_glm4 = _like(_swiglu, "glm4", rope=False)
apply_liger_kernel_to_glm4v = _like(_swiglu, "glm4v", rope=False)
apply_liger_kernel_to_glm4v_moe = _like(_swiglu, "glm4v_moe", rope=False)
apply_liger_kernel_to_qwen3_next = _like(_swiglu, "qwen3_next", rope=False)
apply_liger_kernel_to_deepseek_v2 = _like(_swiglu, "deepseek_v2", rope=False)
apply_liger_kernel_to_deepseek_v3 = _like(_swiglu, "deepseek_v3", rope=False)
apply_liger_kernel_to_deepseek_v4 = _like(_swiglu, "deepseek_v4", rope=False, swiglu=False)
apply_liger_kernel_to_gpt_oss = _like(_swiglu, "gpt_oss", swiglu=False)
apply_liger_kernel_to_granite = _like(
    _swiglu, "granite", cross_entropy=True, fused_linear_cross_entropy=False
)
apply_liger_kernel_to_qwen2_5_vl = _like(_swiglu, "qwen2_5_vl", "qwen2_5_vl_text")
apply_liger_kernel_to_qwen3_vl = _like(_swiglu, "qwen3_vl", "qwen3_vl_text", swiglu=False)
apply_liger_kernel_to_qwen3_vl_moe = _like(_swiglu, "qwen3_vl_moe", "qwen3_vl_moe_text")
apply_liger_kernel_to_qwen3_5 = _like(_swiglu, "qwen3_5", "qwen3_5_text", rope=False)
apply_liger_kernel_to_qwen3_5_moe = _like(_swiglu, "qwen3_5_moe", "qwen3_5_moe_text", rope=False)
apply_liger_kernel_to_gemma = _like(_geglu, "gemma")
apply_liger_kernel_to_gemma2 = _like(_geglu, "gemma2")
apply_liger_kernel_to_gemma3_text = _like(_geglu, "gemma3_text")
apply_liger_kernel_to_gemma4_text = _like(_geglu, "gemma4_text", rope=False)
apply_liger_kernel_to_gemma3 = _like(_geglu_and_vision, "gemma3")
apply_liger_kernel_to_paligemma = _like(_geglu_and_vision, "paligemma")
apply_liger_kernel_to_gemma4 = _like(_geglu_and_vision, "gemma4", rope=False, layer_norm=False)
apply_liger_kernel_to_mllama = _like(_swiglu_and_vision, "mllama", "mllama_text_model")
apply_liger_kernel_to_muse_glimmer = _like(_swiglu_and_vision, "muse_glimmer")
apply_liger_kernel_to_llama4 = _like(_llama4, "llama4", "llama4_text")
apply_liger_kernel_to_qwen2_vl = _like(_qwen2_vl, "qwen2_vl", "qwen2_vl_text")
apply_liger_kernel_to_pixtral = _like(_pixtral, "pixtral")
apply_liger_kernel_to_nemotron = _like(_nemotron, "nemotron")
apply_liger_kernel_to_llava = _like(_of_models, "llava")
apply_liger_kernel_to_internvl = _like(_of_models_and_norms, "internvl")
apply_liger_kernel_to_smolvlm = _like(_of_models_and_norms, "smolvlm")
# LLaMA-Factory asks for these.
apply_liger_kernel_to_qwen3_5_text = apply_liger_kernel_to_qwen3_5
apply_liger_kernel_to_qwen3_5_moe_text = apply_liger_kernel_to_qwen3_5_moe


def _of_parts(model) -> dict[str, bool]:
    """The defaults of the functions for a model's text and vision models, which Liger runs too."""
    parts = [getattr(getattr(model, "config", None), f"{name}_config", None) for name in ("text", "vision")]
    types = [part.model_type for part in parts if part is not None]
    if types and types[0] not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return dict(_SWITCHES)
    known = [MODEL_TYPE_TO_APPLY_LIGER_FN[name] for name in types if name in MODEL_TYPE_TO_APPLY_LIGER_FN]
    parameters = [p for function in known for p in inspect.signature(function).parameters.values()]
    return {p.name: True for p in parameters if p.default is True}


def _slots(options: dict, given: dict) -> tuple[dict, bool]:
    """(keywords of tigon.apply, whether the loss of given logits is requested)."""
    on = {name for name, value in options.items() if value}
    losses = ("cross_entropy", "fused_linear_cross_entropy")
    default = "".join(f" ({name} by default: pass {name}=False)" for name in losses if name not in given)
    check(not on.issuperset(losses), "{} and {} must not both be True, got both{}", *losses, default)
    slots = dict.fromkeys(("mlp", "experts", "router"), bool(on & {"swiglu", "geglu", "relu_squared"}))
    slots |= {"norm": bool(on & {"rms_norm", "layer_norm"}), "rope": "rope" in on}
    slots |= {"loss": "fused_linear_cross_entropy" in on}
    slots |= {name: name in on for name in _OWN if name in options}
    return slots, "cross_entropy" in on


def _patch(model, slots: dict, logits_loss: bool) -> None:
    impl = os.environ.get("LIGER_KERNEL_IMPL")  # Axolotl's liger_kernel_impl
    if impl:
        log.warning(
            "[compat.liger] LIGER_KERNEL_IMPL=%s chooses nothing: each op has one implementation", impl
        )
    model = unwrapped(model)
    if logits_loss:
        _use_logits_loss(model)
    if any(slots.values()):
        try:
            # A slot that is on is only searched for; the report need not say that a model has no experts.
            report = tigon.apply(model, **{slot: on for slot, on in slots.items() if not on or slot in _OWN})
        except Error as error:
            log.warning("%s: it stays as it is", error)
            return
        log.info("%s", report)
        forward = model_forward(model)
        if forward is not None and forward.function is not watched_forward:
            forward.function = _forward
            model.__dict__[_SETTINGS] = functional.loss_settings()


_SETTINGS = "_tigon_liger_settings"  # on the model: options that its program adds to Liger's loss


def _forward(model, head, *args, **kwargs):
    labels = any(kwargs.get(name) is not None for name in ("labels", "shift_labels")) or len(args) > 1
    words = "labels or shift_labels must be given where skip_logits is True, got {}"
    check(labels or not kwargs.get("skip_logits"), words, sorted(kwargs))
    if labels and kwargs.get("skip_logits", model.training):
        kwargs = {**model.__dict__[_SETTINGS], **kwargs}
    output = forward_of_model(model, head, *args, **kwargs)
    return with_counts(output) if isinstance(output, ModelOutput) else output


def _use_logits_loss(model) -> None:
    """Compute the causal loss of ``model`` with :func:`tigon.cross_entropy`; other models do not change."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is ForCausalLMLoss:
        model.loss_function = logits_causal_lm_loss
        look = _OtherLosses()
        look.handle = model.register_forward_pre_hook(look, with_kwargs=True)
    else:
        log.warning("[compat.liger] %s has a loss of its own: cross_entropy leaves it", type(model).__name__)


class _OtherLosses:
    """Checks the first training forward: a program that passes no labels computes its own loss."""

    def __call__(self, model, args, kwargs):
        if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        self.handle.remove()
        labels = any("labels" in name and value is not None for name, value in kwargs.items())
        if not (labels or len(args) > 1):
            log.warning(
                "[compat.liger] cross_entropy is the loss of a model that is given labels: "
                "a loss of yours on output.logits stays PyTorch's (tigon.apply(model, lazy_logits=True) "
                "keeps nn.CrossEntropyLoss and F.cross_entropy of them fused, without logits)"
            )


def logits_causal_lm_loss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs
):
    """transformers' ForCausalLMLoss with :func:`tigon.cross_entropy`: no float32 copy of the logits.

    As in Liger, accuracy and predictions are not computed: the output has no field for them.
    """
    if isinstance(logits, LazyLogits):
        return causal_loss.causal_lm_loss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    options = causal_loss.loss_options(kwargs)
    if shift_labels is None:
        shift_labels = causal_loss.next_labels(labels, ignore_index)
    return causal_loss.loss_of_logits(
        logits.view(-1, vocab_size), shift_labels, num_items_in_batch, ignore_index, **options
    )


def _switches(function: Callable[..., None] | None, options: dict) -> dict:
    """The options that the function of a model type knows; without a function, those that one may know."""
    if unknown := sorted(options.keys() - {*_SWITCHES, *_OWN}):
        log.warning("[compat.liger] no switch is called %s: ignored", " or ".join(unknown))
    parameters = _SWITCHES if function is None else inspect.signature(function).parameters
    known = (*(_SWITCHES if "kwargs" in parameters else parameters), *_OWN)
    return {name: value for name, value in options.items() if name in known}


def _apply_liger_kernel(model_type: str, **kwargs: bool | None) -> None:
    """Patch every model of this type, now and later; types not in the table are left, with a log message."""
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    options = _switches(function, kwargs)
    if function is None:
        log.info("[compat.liger] no patch for new models of type %s", model_type)
    else:
        function(**options)


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: bool | None) -> None:
    """Patch this model. Tigon recognises structures, so types outside the table are tried too."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    options = _switches(function, kwargs)
    if function is None:
        _patch(model, *_slots({**_SWITCHES, **options}, options))
    else:
        function(model=model, **options)


class AutoLigerKernelForCausalLM(AutoTigonForCausalLM):
    """``AutoModelForCausalLM`` with the patch of the model's type; others load with the parts that fit."""

    @staticmethod
    def _applied(load, kwargs):
        switches = {name: value for name, value in kwargs.items() if name in (*_SWITCHES, *_OWN)}
        loaded = load(**{name: value for name, value in kwargs.items() if name not in switches})
        _apply_liger_kernel_to_instance(loaded[0] if isinstance(loaded, tuple) else loaded, **switches)
        return loaded
