"""``apply_liger_kernel_to_*`` and their relatives: that interface, :func:`tigon.apply` behind it.

Their switches choose slots: ``rms_norm`` and ``layer_norm`` the norms, ``swiglu``, ``geglu`` and
``relu_squared`` the MLPs, experts and routers, ``rope`` the rotary function,
``fused_linear_cross_entropy`` the loss head, ``cross_entropy`` the loss of logits that exist. An unset one
(``None``) is off. Slots that Liger does not have are taken by their own names (``lora=False``).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os

import torch
from transformers import AutoConfig
from transformers.utils import ModelOutput

import tigon
from tigon.error import Error
from tigon.integrations.liger import functional
from tigon.integrations.liger.names import check
from tigon.integrations.liger.outputs import with_counts
from tigon.integrations.source import made
from tigon.integrations.transformers.causal_loss import (
    COUNTS,
    causal_lm_loss,
    loss_of_logits,
    loss_options,
    next_labels,
)
from tigon.integrations.transformers.forward import model_forward
from tigon.integrations.transformers.head import forward_of_model, watched_forward
from tigon.integrations.transformers.lazy_logits import LazyLogits
from tigon.integrations.transformers.modules import AutoTigonForCausalLM, split_options
from tigon.integrations.transformers.patch import unwrapped

log = logging.getLogger("tigon")

_DEFAULTS = {
    "rope": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
    "rms_norm": True,
    "layer_norm": True,
    "swiglu": True,
    "geglu": True,
    "relu_squared": True,
}
_OWN = ("qkv", "qk_norm", "hyper", "lora")  # slots of tigon.apply that no switch of Liger's stands for
_LOSS = "cross_entropy fused_linear_cross_entropy"
_TEXT = f"rope {_LOSS} rms_norm swiglu model"
_GEMMA = f"rope {_LOSS} rms_norm geglu model"

# Name -> (parameters in their order, defaults that differ, model types it serves if not its own name).
_FUNCTIONS: dict[str, tuple[str, dict, tuple[str, ...]]] = {
    **{
        name: (_TEXT, {}, ())
        for name in (
            "llama",
            "smollm3",
            "ministral",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "phi3",
            "olmo2",
            "olmo3",
            "falcon_h1",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "exaone4",
        )
    },
    **{
        name: (_TEXT, {"rope": False}, ())
        for name in ("glm4", "glm4v", "glm4v_moe", "qwen3_next", "deepseek_v2", "deepseek_v3")
    },
    **{name: (_GEMMA, {}, ()) for name in ("gemma", "gemma2", "gemma3_text")},
    **{name: (f"rope {_LOSS} layer_norm rms_norm geglu model", {}, ()) for name in ("gemma3", "paligemma")},
    **{name: (f"{_LOSS} rms_norm layer_norm model **kwargs", {}, ()) for name in ("internvl", "smolvlm")},
    "deepseek_v4": (_TEXT, {"rope": False, "swiglu": False}, ()),
    "gemma4_text": (_GEMMA, {"rope": False}, ()),
    "gemma4": (f"rope {_LOSS} layer_norm rms_norm geglu model", {"rope": False, "layer_norm": False}, ()),
    "gpt_oss": (_TEXT, {"swiglu": False}, ()),
    "granite": (_TEXT, {"cross_entropy": True, "fused_linear_cross_entropy": False}, ()),
    "llama4": (f"{_TEXT} layer_norm", {}, ("llama4", "llama4_text")),
    "llava": (f"{_LOSS} model **kwargs", {}, ()),
    "mllama": (f"rope {_LOSS} layer_norm rms_norm swiglu model", {}, ("mllama", "mllama_text_model")),
    "muse_glimmer": (f"rope {_LOSS} layer_norm rms_norm swiglu model", {}, ()),
    "nemotron": (f"relu_squared {_LOSS} model **kwargs", {}, ()),
    "pixtral": ("rope rms_norm swiglu model", {}, ()),
    "qwen2_vl": (f"rope {_LOSS} rms_norm layer_norm swiglu model", {}, ("qwen2_vl", "qwen2_vl_text")),
    "qwen2_5_vl": (_TEXT, {}, ("qwen2_5_vl", "qwen2_5_vl_text")),
    "qwen3_vl": (_TEXT, {"swiglu": False}, ("qwen3_vl", "qwen3_vl_text")),
    "qwen3_vl_moe": (_TEXT, {}, ("qwen3_vl_moe", "qwen3_vl_moe_text")),
    "qwen3_5": (_TEXT, {"rope": False}, ("qwen3_5", "qwen3_5_text")),
    "qwen3_5_moe": (_TEXT, {"rope": False}, ("qwen3_5_moe", "qwen3_5_moe_text")),
}
# Names that LLaMA-Factory asks for beside them.
_ALIASES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}


def _make(name: str, names: str, defaults: dict, types: tuple[str, ...]):
    defaults = {"model": None, **_DEFAULTS, **defaults}
    parameters = (word if "*" in word else f"{word}={defaults[word]}" for word in names.split())
    signature = inspect.signature(made(f"apply({', '.join(parameters)})", "..."))

    def apply_function(*args, **kwargs):
        own = {name: kwargs.pop(name) for name in _OWN if name in kwargs}
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{apply_function.__name__}() {error}") from None
        given = bound.arguments | bound.arguments.get("kwargs", {}) | own
        bound.apply_defaults()
        model = bound.arguments.pop("model", None)
        options = bound.arguments | given
        if "kwargs" in options:  # the function of a model made of others
            options = _of_parts(model) | options.pop("kwargs") | options
        slots, logits_loss = _slots(options, given)
        if model is not None:
            _patch(model, slots, logits_loss)
        else:
            _patch_later(types or (name,), slots, logits_loss)

    apply_function.__name__ = apply_function.__qualname__ = f"apply_liger_kernel_to_{name}"
    apply_function.__signature__ = signature
    apply_function.__doc__ = (
        f"Tigon into {name} models: into ``model``, or without one into every such model, now and later."
    )
    return apply_function


def _of_parts(model) -> dict[str, bool]:
    """What the functions of a model's text and vision models do by default: theirs run with it, there."""
    parts = [getattr(getattr(model, "config", None), f"{name}_config", None) for name in ("text", "vision")]
    types = [part.model_type for part in parts if part is not None]
    if types and types[0] not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return dict(_DEFAULTS)
    known = [MODEL_TYPE_TO_APPLY_LIGER_FN[name] for name in types if name in MODEL_TYPE_TO_APPLY_LIGER_FN]
    defaults = (
        parameter for function in known for parameter in inspect.signature(function).parameters.values()
    )
    return {parameter.name: True for parameter in defaults if parameter.default is True}


def _slots(options: dict, given: dict) -> tuple[dict, bool]:
    """(keywords of tigon.apply, whether the loss of existing logits is asked for)."""
    on = {name for name, value in options.items() if value}
    losses = ("cross_entropy", "fused_linear_cross_entropy")
    default = "".join(f" ({name} by default: pass {name}=False)" for name in losses if name not in given)
    check(not on.issuperset(losses), "{} and {} must not both be True, got both{}", *losses, default)
    mlp = bool(on & {"swiglu", "geglu", "relu_squared"})
    wanted = dict.fromkeys(("mlp", "experts", "router"), mlp)
    wanted |= {"norm": bool(on & {"rms_norm", "layer_norm"}), "rope": "rope" in on}
    wanted |= {"loss": "fused_linear_cross_entropy" in on}
    wanted |= {name: name in on for name in _OWN if name in options}
    return split_options(wanted)[0], "cross_entropy" in on


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
            # What is on is looked for; the report need not say that a model has no experts.
            report = tigon.apply(model, **{slot: on for slot, on in slots.items() if not on or slot in _OWN})
        except Error as error:
            log.warning("%s: it stays as it is", error)
            return
        log.info("%s", report)
        for entry in report.replaced:
            if entry.slot == "norm":
                _take_choices(model.get_submodule(entry.path))
        forward = model_forward(model)
        if forward is not None and forward.function is not watched_forward:
            forward.function = _forward
            model.__dict__[_SETTINGS] = functional.loss_settings()


_SETTINGS = "_tigon_liger_settings"  # on the model: options that its program adds to Liger's loss


def _forward(model, head, *args, **kwargs):
    labels = any(kwargs.get(name) is not None for name in ("labels", "shift_labels")) or len(args) > 1
    check(
        labels or not kwargs.get("skip_logits"),
        "labels or shift_labels must be given where skip_logits is True, got {}",
        sorted(kwargs),
    )
    if labels and kwargs.get("skip_logits", model.training):
        kwargs = {**model.__dict__[_SETTINGS], **kwargs}
    output = forward_of_model(model, head, *args, **kwargs)
    return with_counts(output) if isinstance(output, ModelOutput) else output


def _take_choices(norm) -> None:
    """The attributes by which callers choose an implementation; they choose nothing."""
    norm.impl = norm.mode = norm.backend = None


def _patch_later(types, slots, logits_loss) -> None:
    from tigon.integrations.liger.construction import on_construction

    if _loading is not None:
        _loading.append((slots, logits_loss))
        return
    for model_type in types:
        if not on_construction(model_type, lambda model: _patch(model, slots, logits_loss)):
            log.warning("[compat.liger] this transformers has no model type %s: nothing to do", model_type)


_loading: list | None = None


@contextlib.contextmanager
def _one_model():
    """What apply functions ask for without a model is for the one that is being loaded: a list of it."""
    global _loading
    before, _loading = _loading, []
    try:
        yield _loading
    finally:
        _loading = before


def _use_logits_loss(model) -> None:
    """The causal loss of ``model`` by :func:`tigon.cross_entropy`; nobody else's is touched."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is ForCausalLMLoss:
        model.loss_function = logits_causal_lm_loss
        look = _OtherLosses()
        look.handle = model.register_forward_pre_hook(look, with_kwargs=True)
    else:
        log.warning("[compat.liger] %s has a loss of its own: cross_entropy leaves it", type(model).__name__)


class _OtherLosses:
    """Looks at the first training forward: a program that gives no labels has a loss of its own."""

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
    """transformers' ForCausalLMLoss by :func:`tigon.cross_entropy`: no float32 copy of the logits.

    Accuracy and predictions are not counted here, as in Liger: the output has no place for them.
    """
    if isinstance(logits, LazyLogits):
        return causal_lm_loss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    options = loss_options({name: v for name, v in kwargs.items() if name not in COUNTS})
    if shift_labels is None:
        shift_labels = next_labels(labels, ignore_index)
    return loss_of_logits(
        logits.view(-1, vocab_size), shift_labels, num_items_in_batch, ignore_index, **options
    )


APPLY = {f"apply_liger_kernel_to_{name}": _make(name, *row) for name, row in _FUNCTIONS.items()}
APPLY |= {
    f"apply_liger_kernel_to_{alias}": APPLY[f"apply_liger_kernel_to_{name}"]
    for alias, name in _ALIASES.items()
}
globals().update(APPLY)
MODEL_TYPE_TO_APPLY_LIGER_FN = {
    model_type: APPLY[f"apply_liger_kernel_to_{name}"]
    for name, (_, _, types) in _FUNCTIONS.items()
    for model_type in types or (name,)
}


def _chosen(model_type: str, options: dict):
    """The function of a model type and the options it knows, or None."""
    if unknown := sorted(options.keys() - {*_DEFAULTS, *_OWN}):
        log.warning("[compat.liger] no switch is called %s: ignored", " or ".join(unknown))
    if not model_type:
        log.info("[compat.liger] the model has no model_type: nothing is applied")
        return None
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is None:
        return None
    parameters = inspect.signature(function).parameters
    known = (*(_DEFAULTS if "kwargs" in parameters else parameters), *_OWN)
    return function, {name: value for name, value in options.items() if name in known}


def _apply_liger_kernel(model_type: str, **kwargs) -> None:
    """Into every model of this type, now and later; types not in the table are left, and it is logged."""
    chosen = _chosen(model_type, kwargs)
    if chosen is None:
        log.info("[compat.liger] no patch for new models of type %s", model_type)
        return
    chosen[0](**chosen[1])


def _apply_liger_kernel_to_instance(model, **kwargs) -> None:
    """Into this model. Tigon recognises structures, so types outside the table are tried too."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    chosen = _chosen(model_type, kwargs)
    if chosen is None:
        known = {name: value for name, value in kwargs.items() if name in (*_DEFAULTS, *_OWN)}
        _patch(model, *_slots({**_DEFAULTS, **known}, known))
        return
    chosen[0](model=model, **chosen[1])


class AutoLigerKernelForCausalLM(AutoTigonForCausalLM):
    """``AutoModelForCausalLM`` with the patch of the model's type; other types load with what fits."""

    @staticmethod
    def _applied(load, source, kwargs):
        """The type's function is called first, as there, and what it asks for is done to the loaded model."""
        model_type = _model_type(source, kwargs)
        function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
        known = (*_OWN, *(_DEFAULTS if function is None else inspect.signature(function).parameters))
        options = {name: value for name, value in kwargs.items() if name in known}
        with _one_model() as patches:
            _apply_liger_kernel(model_type, **options)
        loaded = load(**{name: value for name, value in kwargs.items() if name not in known})
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if function is None:
            _apply_liger_kernel_to_instance(model, **options)
        for patch in patches:
            _patch(model, *patch)
        return loaded


def _model_type(source, kwargs) -> str | None:
    """Of a configuration, or as the one on disk names it; None where there is none (an adapter's folder)."""
    config = kwargs.get("config", source)
    if not hasattr(config, "model_type"):
        try:
            config = AutoConfig.from_pretrained(source, **kwargs)
        except (OSError, ValueError):
            return None
    return config.model_type


def _bind_method_to_module(module, method_name: str, new_method) -> None:
    module.__dict__[method_name] = new_method.__get__(module, type(module))


_NONE = {"norm": False, "mlp": False, "rope": False, "loss": False}


def _patch_rms_norm_module(module, *args, **kwargs) -> None:
    """The norm's own formula decides, not the arguments."""
    _patch(module, {**_NONE, "norm": True}, False)
    _take_choices(module)


def _patch_swiglu_module(module, liger_module=None) -> None:
    """The gated MLP's own formula decides."""
    _patch(module, {**_NONE, "mlp": True}, False)


_patch_geglu_module = _patch_swiglu_module
_patch_layer_norm_module = _patch_rms_norm_module


def apply_liger_llama4_rope_full(modeling_module) -> None:
    """Tigon's rotary functions in the place of this modelling module's."""
    modeling_module.apply_rotary_emb = functional.liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = functional.liger_llama4_vision_rotary_pos_emb
