"""Modules for hand-made models, and two ways to use Tigon in a training script with one line.

The modules take a Hugging Face configuration and keep the names of its checkpoints. They hold ordinary
``nn.Linear`` and ``nn.Parameter``, so PEFT, quantisation and sharding work with them.
"""

from __future__ import annotations

import functools
import inspect
import logging

import torch
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

import tigon
from tigon.error import Error, check
from tigon.integrations.transformers import apply
from tigon.nn import (
    AddRMSNorm,
    CrossEntropyLoss,
    GatedRMSNorm,
    LayerNorm,
    LinearCrossEntropyLoss,
    QKNormRotaryEmbedding,
    RotaryEmbedding,
)
from tigon.nn import RMSNorm as _RMSNorm

__all__ = [
    "AddRMSNorm",
    "AutoTigonForCausalLM",
    "CrossEntropyLoss",
    "FusedGatedMLP",
    "GatedMLP",
    "GatedRMSNorm",
    "GemmaRMSNorm",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "QKNormRotaryEmbedding",
    "RMSNorm",
    "RotaryEmbedding",
    "TigonTrainerCallback",
    "apply_rotary_pos_emb",
    "causal_lm_loss",
]

log = logging.getLogger("tigon")


def split_options(options: dict) -> tuple[dict, dict]:
    """Split options into (keywords of :func:`tigon.apply`, the rest)."""
    names = [n for n, p in inspect.signature(apply).parameters.items() if p.kind is p.KEYWORD_ONLY]
    ours = {name: value for name, value in options.items() if name in names}
    return ours, {name: value for name, value in options.items() if name not in names}


class AutoTigonForCausalLM(AutoModelForCausalLM):
    """``AutoModelForCausalLM`` that calls :func:`tigon.apply` on its models.

    Keywords of ``tigon.apply`` (``norm``, ``mlp``, ``rope``, ``loss``, ``strict``, ...) are passed to it, all
    others to transformers. ``model.tigon_report`` says what was replaced.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load, then apply."""
        load = functools.partial(super().from_pretrained, pretrained_model_name_or_path, *args)
        return cls._applied(load, kwargs)

    @classmethod
    def from_config(cls, config, **kwargs):
        """Build with random weights, then apply."""
        return cls._applied(functools.partial(super().from_config, config), kwargs)

    @staticmethod
    def _applied(load, kwargs):
        options, rest = split_options(kwargs)
        loaded = load(**rest)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
        model.tigon_report = apply(model, **options)
        return loaded


class TigonTrainerCallback(TrainerCallback):
    """:func:`tigon.apply` inside ``Trainer`` and every trainer derived from it, such as TRL's.

    Use it as ``Trainer(..., callbacks=[TigonTrainerCallback()])``. It calls ``tigon.apply`` when the trainer
    is made, before accelerate, FSDP, DeepSpeed or ``torch.compile`` wrap the model. It calls it again when
    training starts, for models that ``model_init`` makes only then. After the first step it warns if the
    patched loss head has computed no loss. Options are those of ``tigon.apply``; ``report`` is its result.

    ``optimizer=True``, or a dictionary of options of :class:`tigon.optim.AdamW`, replaces PyTorch's AdamW
    (``optim="adamw_torch"`` or ``"adamw_torch_fused"``, transformers' default). The learning rate, betas, eps
    and weight decay come from the training arguments. ``max_grad_norm`` then clips without another read of
    the gradients. Alternatively pass ``optimizer_cls_and_kwargs=(tigon.optim.AdamW, {...})`` to the trainer.
    """

    def __init__(self, optimizer: bool | dict = False, **options):
        _, unknown = split_options(options)
        self.optimizer = optimizer
        check("TigonTrainerCallback", not unknown, "options must be those of tigon.apply, got {}", [*unknown])
        self.options = options
        self.report = None
        self._looked = False

    def on_init_end(self, args, state, control, model=None, **kwargs):
        """Apply; at this point the trainer has its unwrapped model and no optimizer."""
        if self.optimizer:
            from tigon.integrations.transformers.optimizer import use

            use(args, self.optimizer if isinstance(self.optimizer, dict) else {})
        if model is not None:
            self._apply(model)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Apply again, since ``model_init`` may have made another model."""
        self._looked = False
        if model is not None:
            self._apply(model)

    def on_step_end(self, args, state, control, **kwargs):
        """Check once whether the patched head computed the loss."""
        if self._looked or self.report is None:
            return
        self._looked = True
        if self.report.head_calls.said:  # the head has already given the reason
            return
        try:
            self.report.check()
        except Error as error:
            log.warning("%s", error)

    def _apply(self, model):
        report = apply(model, **self.options)
        if report is not self.report:
            log.info("%s", report)
        self.report = report


class RMSNorm(_RMSNorm):
    """Llama's RMSNorm: weight of ones, normalised values rounded before the weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps)

    @property
    def variance_epsilon(self) -> float:
        """transformers' name of eps."""
        return self.eps


class GemmaRMSNorm(_RMSNorm):
    """Gemma's RMSNorm: ``1 + weight``, weight of zeros, rounded once."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps, offset=1.0, rounding="gemma")


# Activation names of Hugging Face configurations -> (exported function, its options).
_PRODUCTS = {
    "silu": ("swiglu", {}),
    "swish": ("swiglu", {}),
    "gelu": ("geglu", {"approximate": "none"}),
    "gelu_pytorch_tanh": ("geglu", {"approximate": "tanh"}),
    "gelu_new": ("geglu", {"approximate": "tanh"}),
}


def gated_product(op: str, activation: str):
    """The fused ``act(gate) * up`` for an activation's name, for two tensors or one that holds both."""
    known = activation in _PRODUCTS
    check(op, known, "hidden_act must be one of {}, got {!r}", (*_PRODUCTS,), activation)
    name, options = _PRODUCTS[activation]
    return functools.partial(getattr(tigon, name), **options)


def activation_of(config) -> str:
    """The activation a configuration names; Gemma's newer key first."""
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "silu"


class GatedMLP(nn.Module):
    """``down_proj(act(gate_proj(x)) * up_proj(x))`` from a configuration: Llama, Mistral, Qwen, Gemma, ...

    Args:
        config: ``hidden_size``, ``intermediate_size``, ``hidden_act`` (or ``hidden_activation``) and
            optionally ``mlp_bias``.
        intermediate_size: replaces that of the configuration.
    """

    activation_in = staticmethod(activation_of)

    def __init__(self, config, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.intermediate_size = intermediate_size or config.intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        self.activation = self.activation_in(config)
        gated_product(type(self).__name__, self.activation)  # raises an error now if unknown

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., hidden_size] -> [..., hidden_size]``."""
        product = gated_product(type(self).__name__, self.activation)
        return self.down_proj(product(self.gate_proj(x), self.up_proj(x)))


class FusedGatedMLP(nn.Module):
    """:class:`GatedMLP` with gate and up as halves of one ``gate_up_proj``: Phi-3, GLM-4."""

    def __init__(self, config) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        self.activation = activation_of(config)
        gated_product(type(self).__name__, self.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., hidden_size] -> [..., hidden_size]``."""
        product = gated_product(type(self).__name__, self.activation)
        return self.down_proj(product(self.gate_up_proj(x)))


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """transformers' function of this name, both tensors in one pass (:func:`tigon.rope`)."""
    return tigon.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def causal_lm_loss(
    hidden_states,
    lm_head_weight,
    labels,
    *,
    bias=None,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    softcap=None,
    logit_scale=1.0,
):
    """The loss of transformers' causal models, from the hidden states before the head.

    The function shifts the labels; if they are already shifted, pass ``shift_labels``. ``num_items_in_batch``
    is the denominator of gradient accumulation (number or tensor).
    """
    target = labels if shift_labels is None else shift_labels
    return tigon.linear_cross_entropy(
        hidden_states,
        lm_head_weight,
        target.to(hidden_states.device),
        bias=bias,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        shift=shift_labels is None,
        denominator=num_items_in_batch,
    )
