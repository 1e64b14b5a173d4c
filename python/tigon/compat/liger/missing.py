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
    ("Experts", "transformers' own experts stay in place; tigon.apply reports them"),
    ("FusedMoE", "transformers' own experts stay in place; tigon.apply reports them"),
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


def op(name: str, caller: str):
    """``tigon.<name>``, or an error in the caller's name where this version has no such op."""
    function = getattr(tigon, name, None)
    if function is None:
        raise Error(f"[compat.liger] {caller} needs tigon.{name}, which tigon {tigon.__version__} lacks")
    return function
