"""verl's fused heads by Tigon, on stand-ins with verl 0.9's interfaces."""

import sys
import types

import pytest
import torch

import tigon
from tigon.integrations import verl as ours


class LinearCrossEntropy(torch.autograd.Function):
    """The interface of verl's autograd function, in plain operations."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
        raise AssertionError("verl's own function ran")


class FusedLinearForPPO(torch.nn.Module):
    """verl's module of the torch backend: its interface and its formula."""

    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
        logits = (hidden_states @ vocab_weights.t()) / temperature
        log_probs = logits.float().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, input_ids.unsqueeze(-1)).squeeze(-1), entropy.to(logits.dtype)


@pytest.fixture
def verl(monkeypatch):
    """The modules of verl that are touched, and one that imported the function at its top."""
    kernel = types.ModuleType(ours.KERNEL)
    kernel.LinearCrossEntropy, kernel.linear_cross_entropy = LinearCrossEntropy, LinearCrossEntropy.apply
    fused = types.ModuleType(ours.TORCH)
    fused.FusedLinearForPPO = type("FusedLinearForPPO", (FusedLinearForPPO,), {})
    fused.FusedLinearForPPO.forward = FusedLinearForPPO.forward
    early = types.ModuleType("verl.models.mcore.model_forward_fused")
    early.linear_cross_entropy = kernel.linear_cross_entropy
    for module in (kernel, fused, early):
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            name = ".".join(parts[:i])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(kernel=kernel, fused=fused, early=early)


def operands(device, temperature_rows=(2, 5)):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=generator) for s in ((*temperature_rows, 16), (37, 16)))
    labels = torch.randint(0, 37, temperature_rows, generator=generator)
    return [x.to(device) for x in (hidden, weight, labels)]


def results(function, device):
    hidden, weight, labels = operands(device)
    hidden.requires_grad_(), weight.requires_grad_()
    log_prob, entropy = function(hidden, weight, labels, 0.7)
    (log_prob.sum() + 0.3 * entropy.square().sum()).backward()
    return log_prob.reshape(-1), entropy.reshape(-1), hidden.grad, weight.grad


def test_both_heads(verl, device):
    stock = verl.fused.FusedLinearForPPO()
    wanted = results(stock, device)
    original = verl.kernel.linear_cross_entropy
    ours.install()
    ours.install()  # a second time changes nothing
    try:
        assert verl.early.linear_cross_entropy is verl.kernel.linear_cross_entropy is not original
        for head in (verl.kernel.linear_cross_entropy, verl.fused.FusedLinearForPPO()):
            torch.testing.assert_close(results(head, device), wanted, rtol=2e-5, atol=2e-5)
        hidden, weight, labels = operands(device)
        with pytest.raises(AssertionError, match="verl's own"):
            verl.kernel.linear_cross_entropy(hidden, weight, labels, 1.0, "mean")
    finally:
        ours.uninstall()
    assert verl.early.linear_cross_entropy is verl.kernel.linear_cross_entropy is original
    assert verl.fused.FusedLinearForPPO.forward is FusedLinearForPPO.forward


def test_another_interface_is_refused(verl):
    verl.kernel.LinearCrossEntropy = type("Other", (), {"forward": staticmethod(lambda ctx, x: x)})
    before = verl.kernel.linear_cross_entropy
    with pytest.raises(tigon.Error, match=r"LinearCrossEntropy must take .*got \['x'\]"):
        ours.install()
    assert verl.kernel.linear_cross_entropy is before
