"""``liger_kernel.chunked_loss`` by Tigon against plain formulas."""

import math

import pytest
import torch
import torch.nn.functional as F

import tigon
from tigon.integrations.liger.chunked_loss import (
    LigerFusedLinearDistillationBase,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
)

P, T, H, V = 3, 7, 16, 37


def drawn(device, answers=2 * P):
    generator = torch.Generator().manual_seed(0)
    x, ref_x, weight, ref_weight = (
        torch.randn(*shape, generator=generator) for shape in ((answers, T, H), (V, H)) for _ in range(2)
    )
    bias = torch.randn(V, generator=generator)
    target = torch.randint(0, V, (answers, T), generator=generator)
    target[torch.rand(answers, T, generator=generator) < 0.3] = -100
    return [t.to(device) for t in (x, weight, bias, ref_x, ref_weight, target)]


def sums(x, weight, bias, target, average=False):
    """The log-probability of each answer, in plain operations."""
    log_p = F.linear(x, weight, bias).log_softmax(-1)
    counts = target != -100
    picked = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * counts
    return picked.sum(-1) / (counts.sum(-1) if average else 1), picked, counts


def plain_dpo(x, weight, bias, ref_x, ref_weight, target, nll):
    (log_p, picked, counts), (ref, _, _) = (
        sums(x, weight, bias, target),
        sums(ref_x, ref_weight, None, target),
    )
    chosen, rejected = (log_p - ref).split(P)
    loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    return loss - nll * picked[:P].sum() / counts[:P].sum()


@pytest.mark.parametrize("nll", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_dpo(nll, frozen, device):
    x, weight, bias, ref_x, ref_weight, target = drawn(device)
    leaves = [x.requires_grad_(), weight.requires_grad_(not frozen), bias.requires_grad_()]
    loss, results = LigerFusedLinearDPOLoss(compute_nll_loss=nll, alpha=0.5)(
        weight, x, target, bias, ref_x, ref_weight, None
    )
    (3 * loss).backward()
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wanted = plain_dpo(*exact, ref_x.double(), ref_weight.double(), target, 0.5 * nll)
    (3 * wanted).backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    assert weight.grad is None or not frozen
    for leaf, other in zip(leaves, exact, strict=True):
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=1e-4, atol=1e-5)
    logits = F.linear(exact[0], exact[1], exact[2])
    log_p, _, _ = sums(*exact, target)
    for got, value in zip(results[:4], (*log_p.split(P), logits[:P].mean(), logits[P:].mean()), strict=True):
        torch.testing.assert_close(got.double(), value.detach(), rtol=1e-4, atol=1e-5)


def test_kto_with_a_reference_point_for_each_answer(device):
    """Liger broadcasts such a kl over chunks of answers; here each answer has its own."""
    x, weight, bias, ref_x, ref_weight, target = drawn(device)
    kl = torch.linspace(-1, 1, 2 * P, device=device)
    labels = torch.arange(2 * P, device=device) % 2 == 0
    loss, results = LigerFusedLinearKTOLoss(use_ref_model=True)(
        x, weight, target, bias, labels, ref_x, ref_weight, None, kl
    )
    ratio = sums(x, weight, bias, target)[0] - sums(ref_x, ref_weight, None, target)[0]
    sign = torch.where(labels, 1.0, -1.0)
    torch.testing.assert_close(loss, (1 - (0.1 * sign * (ratio - kl)).sigmoid()).mean(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[4], (0.1 * ratio * labels).sum(), rtol=1e-4, atol=1e-4)


def plain_grpo(loss_type, log_p, old, ref, advantages, mask, importance=None):
    """The defaults of the class, in plain operations."""
    ratio, advantage = (log_p - old).exp(), advantages[:, None]
    if loss_type == "cispo":
        losses = -ratio.clamp(max=0.2).detach() * advantage * log_p
    elif loss_type == "sapo":
        tau = torch.where(advantage > 0, 1.0, 1.05)
        losses = -4 / tau * (tau * (ratio - 1)).sigmoid() * advantage
    elif loss_type == "vespo":
        log_w = ((log_p - old) * mask).sum(-1, keepdim=True)
        log_w = (log_w if importance is None else log_w + importance.log()).clamp(math.log(1e-8), 20)
        k, rate = (torch.where(advantage >= 0, *of_signs) for of_signs in ((2.0, 3.0), (3.0, 2.0)))
        losses = -(rate + k * log_w - rate * log_w.exp()).exp().detach() * advantage * log_p
    else:
        losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    if ref is not None:
        losses = losses + 0.04 * ((ref - log_p).expm1() - (ref - log_p))
    losses = losses * mask
    if loss_type in ("grpo", "sapo"):
        return (losses.sum(-1) / mask.sum(-1)).mean()
    return losses.sum() / (mask.numel() if loss_type == "dr_grpo" else mask.sum())


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"])
def test_grpo(loss_type, device):
    x, weight, bias, *_, target = drawn(device)
    mask, ids = (target != -100).long(), target.clamp(min=0)
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(2 * P, generator=generator).to(device)
    old, ref = (
        (sums(x, weight, bias, ids)[1] + 0.3 * torch.randn(2 * P, T, generator=generator).to(device)).detach()
        for _ in range(2)
    )
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss, metrics = LigerFusedLinearGRPOLoss(loss_type=loss_type, max_completion_length=T)(
        x, weight, ids, mask, advantages, bias, ref, old
    )
    log_p = sums(x, weight, bias, ids)[1]
    wanted = plain_grpo(loss_type, log_p, old, ref, advantages, mask)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
    divergence = (((ref - log_p).expm1() - (ref - log_p)) * mask).sum() / mask.sum()
    torch.testing.assert_close(metrics[0], divergence.detach(), rtol=1e-4, atol=1e-5)
    got, want = (torch.autograd.grad(value, leaves) for value in (loss, wanted))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_vespo_has_the_ratio_of_an_answer_once(device):
    """An importance ratio [B, 1] is a factor of the answer's weight, not of each of its tokens'."""
    x, weight, bias, *_, target = drawn(device)
    mask, ids = (target != -100).long(), target.clamp(min=0)
    advantages, ratio = (torch.linspace(*ends, 2 * P, device=device) for ends in ((-1, 1), (0.5, 1.6)))
    log_p = sums(x, weight, bias, ids)[1].detach()
    loss, _ = LigerFusedLinearGRPOLoss(loss_type="vespo", beta=0.0, use_ref_model=False)(
        x, weight, ids, mask, advantages, bias, None, log_p + 0.1, vllm_is_ratio=ratio.unsqueeze(1)
    )
    wanted = plain_grpo("vespo", log_p, log_p + 0.1, None, advantages, mask, ratio.unsqueeze(1))
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)


def test_a_subclass_of_the_base_brings_its_passes():
    """Axolotl's distillation does; the base itself has no formula."""

    class Double(LigerFusedLinearDistillationBase):
        @classmethod
        def forward(cls, ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad_output):
            return 2 * grad_output

    x = torch.ones(3, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    with pytest.raises(tigon.Error, match=r"must bring its own forward, .* use tigon\.linear_loss"):
        LigerFusedLinearDistillationBase.apply(x)
