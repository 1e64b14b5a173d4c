"""verl's fused heads with Tigon.

With ``use_fused_kernels`` verl computes per-token log-probabilities and entropies with one of two functions:
``verl.utils.kernel.linear_cross_entropy`` for the Triton backend, and
``verl.utils.experimental.torch_functional.FusedLinearForPPO`` for the torch backend. After :func:`install`
both run :func:`tigon.linear_log_prob`. If the head is sharded over a tensor-parallel group of more than one
rank, the first runs :func:`tigon.parallel.linear_log_prob`, which returns this rank's part of hidden's
gradient, as verl does. verl's own function computes reductions other than ``"none"``. Call :func:`install` in
every worker before the model is built. (verl imports the function when a forward runs; modules that imported
it earlier get the new one too.)
"""

from __future__ import annotations

import importlib
import sys

import torch

import tigon
from tigon._dtensor import PLAIN
from tigon.integrations import replacing
from tigon.integrations.replacing import ForeignReplacement, parameters_of

KERNEL = "verl.utils.kernel.linear_cross_entropy"
TORCH = "verl.utils.experimental.torch_functional"
PARAMETERS = ["hidden", "weight", "labels", "temperature", "reduction", "dist_process_group"]
FORWARD = ["self", "hidden_states", "vocab_weights", "input_ids", "temperature"]


class LogProbHead:
    """Replaces ``LinearCrossEntropy.apply``: it is called in the same way and falls back to it."""

    def __init__(self, original):
        self.original = original

    def __call__(self, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
        """(log-probabilities, entropies), float32, one for each label in order."""
        sharded = dist_process_group is not None and dist_process_group.size() > 1
        plain = type(weight) in PLAIN
        if not plain or reduction.lower() != "none":
            return self.original(hidden, weight, labels, temperature, reduction, dist_process_group)
        operands = (hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1))
        options = {"temperature": temperature, "entropy": True}
        if sharded:
            from tigon import parallel

            vocab = weight.shape[0] * dist_process_group.size()  # equal shards, as in verl
            return parallel.linear_log_prob(
                *operands, dist_process_group, **options, vocab=vocab, partial_hidden_grad=True
            )
        return tigon.linear_log_prob(*operands, **options)


def _ppo_forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
    """``FusedLinearForPPO.forward``: log-probabilities in float32, the entropy in its caller's dtype."""
    ids = input_ids.to(torch.int64)
    plain = type(vocab_weights) in PLAIN
    if not plain or isinstance(temperature, torch.Tensor):
        return _ppo_forward.original(self, hidden_states, vocab_weights, input_ids, temperature)
    log_prob, entropy = tigon.linear_log_prob(
        hidden_states, vocab_weights, ids, temperature=float(temperature), entropy=True
    )
    return log_prob, entropy.to(hidden_states.dtype)


def _replacements() -> list[ForeignReplacement]:
    """One for every module of verl that has the function under its name, one for the module."""
    kernel, fused = (importlib.import_module(name) for name in (KERNEL, TORCH))
    present, ppo = kernel.linear_cross_entropy, fused.FusedLinearForPPO
    head = present if isinstance(present, LogProbHead) else LogProbHead(present)
    names = parameters_of(kernel.LinearCrossEntropy.forward)[1:]
    words = "verl's {} must take {{}} (0.9), got {{}}"
    row = ("linear_cross_entropy", head, names, PARAMETERS, words.format("LinearCrossEntropy"))
    holders = [module for name, module in list(sys.modules.items()) if name.startswith("verl.")]
    replacements = [
        ForeignReplacement(module, *row) for module in holders if vars(module).get(row[0]) is present
    ]
    row = ("forward", _ppo_forward, parameters_of(ppo.forward), FORWARD, words.format("FusedLinearForPPO"))
    return [*replacements, ForeignReplacement(ppo, *row)]


def install() -> None:
    """Make verl's fused heads use Tigon in this process.

    Raises:
        tigon.Error: this verl has no such functions, or calls them in another way. Nothing is modified.
    """
    replacing.install("compat.verl", _replacements())


def uninstall() -> None:
    """Restore verl's own functions."""
    replacing.uninstall(_replacements())
