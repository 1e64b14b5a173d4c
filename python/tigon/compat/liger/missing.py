"""Names of the ``liger_kernel`` interface that Tigon does not (yet) stand behind."""

from __future__ import annotations

import tigon
from tigon.error import Error

# What to use instead, by the part of a name that says what it is; the first that fits is taken.
_INSTEAD = (
    ("DPO", "tigon.linear_log_prob gives the log-probabilities that the DPO loss needs, without logits"),
    ("KTO", "tigon.linear_log_prob gives the log-probabilities that the KTO loss needs, without logits"),
    ("GRPO", "tigon.linear_log_prob gives the per-token log-probabilities and entropies that GRPO needs"),
    ("Grpo", "tigon.linear_log_prob gives the per-token log-probabilities and entropies that GRPO needs"),
    ("PPO", "tigon.linear_log_prob gives the per-token log-probabilities and entropies"),
    ("ORPO", "tigon.linear_log_prob gives the log-probabilities of both answers"),
    ("CPO", "tigon.linear_log_prob gives the log-probabilities of both answers"),
    ("SimPO", "tigon.linear_log_prob gives the log-probabilities of both answers"),
    ("Preference", "tigon.linear_log_prob, or tigon.linear_loss with a loss of your own"),
    ("ScaledCrossEntropy", "tigon.linear_log_prob(temperature=..., entropy=True)"),
    ("FusedLinearJSD", "tigon.jsd of both models' logits; a head that never forms them is not there yet"),
    ("linear_jsd", "tigon.jsd of both models' logits; a head that never forms them is not there yet"),
    ("FusedLinearKL", "tigon.kl_div of the logits; a head that never forms them is not there yet"),
    ("linear_kl", "tigon.kl_div of the logits; a head that never forms them is not there yet"),
    ("Cosine", "a loss of two hidden states needs no head: torch.nn.functional.cosine_similarity"),
    ("cosine", "a loss of two hidden states needs no head: torch.nn.functional.cosine_similarity"),
    ("Distillation", "tigon.kl_div, jsd or tvd of both models' logits"),
    ("_dpo", "tigon.linear_log_prob gives the log-probabilities that the DPO loss needs, without logits"),
    ("_kto", "tigon.linear_log_prob gives the log-probabilities that the KTO loss needs, without logits"),
    ("grpo", "tigon.linear_log_prob gives the per-token log-probabilities and entropies that GRPO needs"),
    ("orpo", "tigon.linear_log_prob gives the log-probabilities of both answers"),
    ("_cpo", "tigon.linear_log_prob gives the log-probabilities of both answers"),
    ("simpo", "tigon.linear_log_prob gives the log-probabilities of both answers"),
    ("selective_log_softmax", "tigon.linear_log_prob, from hidden states and without logits"),
    ("scaled_cross_entropy", "tigon.linear_log_prob(temperature=..., entropy=True)"),
    ("_forward", "the function of the op itself: these are the halves of one autograd function there"),
    ("_backward", "the function of the op itself: these are the halves of one autograd function there"),
    ("FusedMoE", "tigon.apply(model): transformers' experts keep their products, the gate is Tigon's"),
    ("fused_moe", "tigon.apply(model): transformers' experts keep their products, the gate is Tigon's"),
    ("LigerMLP", "tigon.transformers.GatedMLP"),
    ("FalconH1MLP", "LigerFalconH1SwiGLUMLP"),
    ("ORPOTrainer", "trl.experimental's ORPOTrainer with tigon.TigonTrainerCallback"),
)


def instead_of(name: str) -> str:
    """The advice for one name, or an empty string."""
    return next((text for part, text in _INSTEAD if part in name), "")


def missing(name: str) -> type:
    """A class by this name that can be imported and subclassed; using it raises :class:`tigon.Error`.

    Callers import such names behind an availability check long before they know whether they need them,
    so the import must work and the use must say what is the matter.
    """

    def refuse(*args, **kwargs):
        raise Error(refusal(name))

    return type(name, (), {
        "__new__": refuse,
        "apply": staticmethod(refuse),
        "__doc__": f"{name} of the liger_kernel interface: not there in this version of Tigon.",
    })  # fmt: skip


def refusal(name: str) -> str:
    """The sentence for a name without an implementation."""
    advice = instead_of(name)
    return f"[compat.liger] {name} is not there in tigon {tigon.__version__}" + (
        f": {advice}" if advice else ""
    )


def function_class(name: str, function, doc: str) -> type:
    """A class whose ``apply`` is ``function``: how the autograd functions of that package are called."""
    return type(name, (), {"apply": staticmethod(function), "__doc__": doc})
