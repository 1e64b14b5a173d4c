"""Tigon: fused, exact, memory-lean kernels for training large language models.

Functions take and return plain tensors; :mod:`tigon.nn` wraps them in modules; :func:`tigon.apply` puts them
into a Hugging Face model. Everything refused raises :class:`tigon.Error` before anything is modified.
"""

import functools
import importlib

from tigon import _requirements as _requirements, nn, optim  # isort: skip  the first says what is missing
from tigon._deterministic import deterministic
from tigon.checkpoint import checkpoint_policy
from tigon.environment import env
from tigon.error import Error
from tigon.graphs import graph_step
from tigon.ops.add_rms_norm import add_rms_norm
from tigon.ops.attention_residual import attention_residual
from tigon.ops.cross_entropy import cross_entropy
from tigon.ops.dequantize import dequantize
from tigon.ops.divergence import jsd, kl_div, tvd
from tigon.ops.dyt import dyt
from tigon.ops.embedding import embedding
from tigon.ops.experts import experts, grouped_mlp
from tigon.ops.fp8_linear import fp8_linear
from tigon.ops.gated_rms_norm import gated_rms_norm
from tigon.ops.glu import geglu, reglu, swiglu, swiglu_oai
from tigon.ops.grad_norm import clip_grad_norm_
from tigon.ops.group_norm import group_norm
from tigon.ops.hyper_connection import hyper_connection_post, hyper_connection_pre
from tigon.ops.layer_norm import layer_norm
from tigon.ops.lora_linear import lora_linear, lora_linears
from tigon.ops.loss_head.contrastive import contrastive_loss
from tigon.ops.loss_head.drafter_loss import drafter_loss
from tigon.ops.loss_head.labels import count_labels
from tigon.ops.loss_head.linear_cross_entropy import linear_cross_entropy
from tigon.ops.loss_head.linear_divergence import linear_jsd, linear_kl_div, linear_tvd
from tigon.ops.loss_head.linear_log_prob import linear_log_prob
from tigon.ops.loss_head.linear_loss import linear_loss
from tigon.ops.loss_head.linear_preference import linear_kto, linear_policy, linear_preference
from tigon.ops.loss_head.multi_token import multi_token_loss
from tigon.ops.loss_head.plan import (
    drafter_loss_memory,
    linear_cross_entropy_memory,
    linear_divergence_memory,
    linear_log_prob_memory,
    linear_loss_memory,
    linear_preference_memory,
)
from tigon.ops.mish import mish
from tigon.ops.modulated_rms_norm import modulated_rms_norm
from tigon.ops.policy import policy_loss
from tigon.ops.poly_norm import poly_norm
from tigon.ops.preference import kto_loss, preference_loss
from tigon.ops.qk_norm_rope import qk_norm_rope
from tigon.ops.relu_squared import relu_squared
from tigon.ops.rms_norm import rms_norm
from tigon.ops.rope import rope
from tigon.ops.route import route
from tigon.ops.sample import linear_sample, sample
from tigon.ops.silu import silu
from tigon.ops.softmax import softmax
from tigon.ops.sparsemax import sparsemax

__version__ = "0.1.0"

__all__ = [
    "AutoTigonForCausalLM",
    "Error",
    "TigonTrainerCallback",
    "add_rms_norm",
    "apply",
    "attention_residual",
    "checkpoint_policy",
    "clip_grad_norm_",
    "contrastive_loss",
    "count_labels",
    "cross_entropy",
    "dequantize",
    "deterministic",
    "drafter_loss",
    "drafter_loss_memory",
    "dyt",
    "embedding",
    "env",
    "experts",
    "fp8_linear",
    "gated_rms_norm",
    "geglu",
    "graph_step",
    "group_norm",
    "grouped_mlp",
    "hyper_connection_post",
    "hyper_connection_pre",
    "jsd",
    "kl_div",
    "kto_loss",
    "layer_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_memory",
    "linear_divergence_memory",
    "linear_jsd",
    "linear_kl_div",
    "linear_kto",
    "linear_log_prob",
    "linear_log_prob_memory",
    "linear_loss",
    "linear_loss_memory",
    "linear_policy",
    "linear_preference",
    "linear_preference_memory",
    "linear_sample",
    "linear_tvd",
    "lora_linear",
    "lora_linears",
    "mish",
    "modulated_rms_norm",
    "multi_token_loss",
    "nn",
    "optim",
    "policy_loss",
    "poly_norm",
    "preference_loss",
    "qk_norm_rope",
    "record_routing",
    "reglu",
    "relu_squared",
    "replay_routing",
    "rms_norm",
    "rope",
    "route",
    "sample",
    "silu",
    "softmax",
    "sparsemax",
    "swiglu",
    "swiglu_oai",
    "tvd",
    "undo",
]


def __getattr__(name: str):
    """Import what needs another library when it is first used: the ops need none of them."""
    if name in ("compat", "doctor", "integrations", "megatron", "parallel", "transformers"):
        return importlib.import_module(f"tigon.{name}")
    if name in ("apply", "undo"):
        from tigon.integrations import transformers
    elif name in ("record_routing", "replay_routing"):
        from tigon.integrations.transformers import routing as transformers
    elif name in ("AutoTigonForCausalLM", "TigonTrainerCallback"):
        from tigon.integrations.transformers import modules as transformers
    else:
        raise AttributeError(f"module 'tigon' has no attribute {name!r}")
    _look_at_transformers()
    return getattr(transformers, name)


@functools.cache
def _look_at_transformers() -> None:
    """Warn, once, about a transformers that nobody has tested Tigon with."""
    import warnings

    import transformers

    from tigon.environment import transformers_note

    note = transformers_note(transformers.__version__)
    if note:
        warnings.warn(note, stacklevel=3)
