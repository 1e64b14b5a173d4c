"""The liger_kernel interface's divergences from hidden states against their formulas."""

import pytest
import torch
import torch.nn.functional as F

from tigon.integrations.liger import chunked_loss, divergences


def heads(v=50, vt=None):
    student = [torch.randn(37, 16).requires_grad_(), torch.randn(v, 16).requires_grad_()]
    teacher = [torch.randn(37, 24), torch.randn(vt or v, 24)]
    labels = torch.randint(0, v, (37,))
    labels[::5] = -100
    return student, teacher, labels


def divergence(s, t, beta):
    """JSD of logits, a row each; 0 and 1 are the KLs."""
    lq, lp = F.log_softmax(s, -1), F.log_softmax(t, -1)
    if beta in (0.0, 1.0):
        x, y = (lp, lq) if beta == 0.0 else (lq, lp)
        return (x.exp() * (x - y)).sum(-1)
    lm = (beta * lp.exp() + (1 - beta) * lq.exp()).log()
    return (beta * lp.exp() * (lp - lm) + (1 - beta) * lq.exp() * (lq - lm)).sum(-1)


def assert_same(got, wanted, leaves):
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(loss * 1.5, leaves) for loss in (got, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_fused_linear_jsd(beta):
    (x, w), (y, u), labels = heads()
    for given in (labels, None):
        kept = torch.ones(37, dtype=torch.bool) if given is None else given != -100
        module = divergences.LigerFusedLinearJSD(jsd_beta=beta, temperature=2.0)
        wanted = divergence(x @ w.t() / 2, y @ u.t() / 2, beta)[kept].sum() / kept.sum()
        assert_same(module(x, w, y, u, given), wanted, (x, w))
    got = divergences.liger_fused_linear_jsd(x, w, y, u, labels, beta)
    kept = labels != -100
    assert_same(got, divergence(x @ w.t(), y @ u.t(), beta)[kept].sum() / kept.sum(), (x, w))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.0, 1.0), (1.0, 0.0)])
def test_chunked_jsd(beta, weights):
    (x, w), (y, u), labels = heads()
    b, c = torch.randn(50, requires_grad=True), torch.randn(50)
    hard, soft = weights
    kept = labels != -100
    s, t = x @ w.t() + b, y @ u.t() + c
    rows = divergence(s / 0.7, t / 0.7, beta)[kept].sum() / kept.sum()
    labelled = F.cross_entropy(s, labels, ignore_index=-100)
    options = {"weight_hard_loss": hard, "weight_soft_loss": soft, "beta": beta, "temperature": 0.7}
    module = chunked_loss.LigerFusedLinearJSDLoss(**options, compiled=False, return_soft_hard_loss=True)
    loss, soft_part, hard_part = module(x, w, y, u, labels, b, c)
    assert_same(loss, hard * labelled + soft * rows, (x, w, b))
    torch.testing.assert_close(soft_part, rows.detach())
    torch.testing.assert_close(hard_part, labelled.detach())
    assert torch.equal(chunked_loss.LigerFusedLinearJSDLoss(**options)(x, w, y, u, labels, b, c), loss)


def test_no_row_counts():
    (x, w), (y, u), labels = heads()
    none = torch.full_like(labels, -100)
    for loss in (
        divergences.LigerFusedLinearJSD()(x, w, y, u, none),
        chunked_loss.LigerFusedLinearJSDLoss()(x, w, y, u, none),
    ):
        assert loss == 0.0
        assert not any(g.any() for g in torch.autograd.grad(loss, (x, w)))


def test_errors_are_those_of_liger():
    (x, w), (y, u), labels = heads()
    for kind in (divergences.LigerFusedLinearJSD, chunked_loss.LigerFusedLinearJSDLoss):
        with pytest.raises(AssertionError, match=r"emperature cannot be 0\."):
            kind(temperature=0)
    with pytest.raises(AssertionError, match="the shape of shift_labels must be"):
        divergences.liger_fused_linear_jsd(x, w, y, u, labels[:5])
