"""``liger_kernel.chunked_loss`` by Tigon against plain formulas in float64, and its base classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tigon.integrations.liger import bases, names, policies

P, T, H, V = 3, 7, 16, 37


def get(name):
    return names.resolve(name, "chunked_loss")


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
    loss, results = get("LigerFusedLinearDPOLoss")(compute_nll_loss=nll, alpha=0.5)(
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
    loss, results = get("LigerFusedLinearKTOLoss")(use_ref_model=True)(
        x, weight, target, bias, labels, ref_x, ref_weight, None, kl
    )
    ratio = sums(x, weight, bias, target)[0] - sums(ref_x, ref_weight, None, target)[0]
    sign = torch.where(labels, 1.0, -1.0)
    torch.testing.assert_close(loss, (1 - (0.1 * sign * (ratio - kl)).sigmoid()).mean(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[4], (0.1 * ratio * labels).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"])
def test_grpo_of_hidden_states_and_of_logits_agree(loss_type, device):
    x, weight, bias, *_, target = drawn(device)
    mask, ids = (target != -100).long(), target.clamp(min=0)
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(2 * P, generator=generator).to(device)
    old, ref = (
        (sums(x, weight, bias, ids)[1] + 0.3 * torch.randn(2 * P, T, generator=generator).to(device)).detach()
        for _ in range(2)
    )
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss, metrics = get("LigerFusedLinearGRPOLoss")(loss_type=loss_type, max_completion_length=T)(
        x, weight, ids, mask, advantages, bias, ref, old
    )
    wanted = torch.autograd.grad(loss, leaves)
    logits = F.pad(F.linear(x, weight, bias), (0, 0, 0, 1))
    options = {"temperature": 1.0, "eps_high": 0.2, "loss_type": loss_type, "max_completion_length": T}
    triton = names.resolve("triton_grpo_loss")
    reduced, others = triton(logits, old, ref, ids, advantages, mask, reduce=True, **options)
    torch.testing.assert_close(reduced, loss, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(metrics, others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    losses, _, clipped = triton(logits, old, ref, ids, advantages, mask, **options)
    total = policies._reduce_grpo_loss
    again = total(losses, mask, loss_type, T)
    torch.testing.assert_close(again, loss, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(again, leaves), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(clipped.sum() / mask.sum(), metrics[-1], rtol=1e-5, atol=1e-6)


def test_vespo_has_the_ratio_of_an_answer_once(device):
    """An importance ratio [B, 1] is a factor of the answer's weight, not of each of its tokens'."""
    x, weight, bias, *_, target = drawn(device)
    mask, ids = (target != -100).long(), target.clamp(min=0)
    advantages, ratio = (
        torch.linspace(-1, 1, 2 * P, device=device),
        torch.linspace(0.5, 1.6, 2 * P, device=device),
    )
    log_prob = sums(x, weight, bias, ids)[1].detach()
    old = log_prob + 0.1
    loss, _ = get("LigerFusedLinearGRPOLoss")(loss_type="vespo", beta=0.0, use_ref_model=False)(
        x, weight, ids, mask, advantages, bias, None, old, vllm_is_ratio=ratio.unsqueeze(1)
    )
    phi = policies.get_gamma_weights(advantages, log_prob - old, mask, ratio.unsqueeze(1))
    wanted = (-phi * advantages.unsqueeze(1) * log_prob * mask).sum() / mask.sum()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)


def test_a_subclass_brings_its_formula(device):
    """The base classes differentiate what a subclass returns."""

    class Hinge(bases.LigerFusedLinearPreferenceBase):
        @staticmethod
        def preference_loss_fn(chosen, rejected, full_target, beta=0.1):
            return torch.relu(1 - beta * (chosen - rejected)).sum() / (full_target.shape[0] // 2)

        @classmethod
        def forward(cls, ctx, x, weight, target, bias):
            return super().forward(
                cls, ctx, x, weight, target, bias, compute_nll_loss=False, average_log_prob=False
            )

        @staticmethod
        def backward(ctx, *grad_output):
            return bases.LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4]

    class Squares(bases.LigerFusedLinearDistillationBase):
        @staticmethod
        def distillation_loss_fn(student, teacher, target=None, ignore_index=None, beta=0.5):
            return (student - teacher).square().sum()

        @classmethod
        def forward(cls, ctx, x, weight, teacher, teacher_weight, target):
            return super().forward(cls, ctx, x, weight, teacher, teacher_weight, target, chunk_size=4)

        @staticmethod
        def backward(ctx, grad_output):
            return bases.LigerFusedLinearDistillationBase.backward(ctx, grad_output)[:5]

    x, weight, bias, ref_x, ref_weight, target = drawn(device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss, _ = Hinge.apply(x, weight, target, bias)
    got = torch.autograd.grad(2 * loss, leaves)
    chosen, rejected = sums(*leaves, target)[0].split(P)
    wanted = torch.autograd.grad(2 * torch.relu(1 - 0.1 * (chosen - rejected)).mean(), leaves)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)

    rows, labels = x.flatten(0, 1), target.flatten()
    loss = Squares.apply(rows, weight, ref_x.flatten(0, 1), ref_weight, labels)
    got = torch.autograd.grad(2 * loss, leaves[:2])
    logits, teacher = F.linear(rows, weight), F.linear(ref_x.flatten(0, 1), ref_weight)
    hard = F.cross_entropy(logits, labels)
    wanted = hard / 2 + (logits - teacher).square().sum() / (labels != -100).sum() / 2
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(got, torch.autograd.grad(2 * wanted, leaves[:2]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
