"""Preference losses: TRL's own trainers, refusals, invariants."""

import math

import pytest
import torch
import trl_losses
from checks import refusals, refused

import tigon
from cases.preference import KINDS

PAIRS, TOKENS = 4, 13


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(3)
    log_prob = -torch.randn(2 * PAIRS, TOKENS, generator=draw, dtype=torch.float64).abs()
    mask = torch.rand(2 * PAIRS, TOKENS, generator=draw) < 0.7
    ref = (log_prob * mask).sum(-1) + torch.randn(2 * PAIRS, generator=draw, dtype=torch.float64)
    return log_prob, mask, ref


def _run(fn, log_prob):
    """Loss, gradient, the rest."""
    leaf = log_prob.clone().requires_grad_()
    result = fn(leaf)
    (grad,) = torch.autograd.grad(result[0], leaf)
    return result[0].detach(), grad, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "theirs, options",
    [
        ("sigmoid", {}),
        ("hinge", {}),
        ("ipo", {}),
        ("exo_pair", {"label_smoothing": 0.1}),
        ("robust", {"label_smoothing": 0.1}),
        ("nca_pair", {}),
        ("bco_pair", {}),
        ("sppo_hard", {}),
        ("apo_zero", {}),
        ("apo_down", {}),
        ("discopop", {"tau": 0.07}),
        ("sigmoid_norm", {"kind": "sigmoid", "average": True}),
    ],
)
def test_dpo_trainer(batch, dtype, theirs, options):
    log_prob, mask, ref = batch
    kind = options.get("kind", theirs)
    given = {key: value for key, value in options.items() if key not in ("kind", "average")}
    want, dwant, (_, metrics) = _run(
        lambda x: trl_losses.dpo(torch.where(mask, x, 0.0), mask, ref, theirs, beta=0.3, **given), log_prob
    )
    ours = {"average": options.get("average"), **given}
    loss, grad, got = _run(
        lambda x: tigon.preference_loss(x, mask, kind=kind, beta=0.3, ref=ref.to(dtype), **ours),
        log_prob.to(dtype),
    )
    tolerance = {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(loss.double(), want, **tolerance)
    torch.testing.assert_close(grad.double(), dwant, **tolerance)
    if kind != "ipo" and not options.get("average"):  # TRL's rewards are of sums
        margins = torch.tensor(metrics["rewards/margins"][0], dtype=torch.float64)
        torch.testing.assert_close(got.margin.mean().double(), margins, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto_trainer(batch, loss_type):
    log_prob, mask, ref = batch
    desirable = torch.tensor([True, False, True, True, False, False, True, False])
    kl = (torch.tensor([-1.0, -2.0, 0.5]), torch.tensor([-1.5, -2.1, 0.2]))
    options = {"beta": 0.2, "weights": (1.0, 1.3)}
    want, dwant, _ = _run(
        lambda x: trl_losses.kto(
            torch.where(mask, x, 0.0), mask, ref, desirable, loss_type, kl=kl, **options
        ),
        log_prob,
    )
    point = (kl[0] - kl[1]).mean().clamp(min=0) if loss_type == "kto" else 0.0
    for dtype in (torch.float32, torch.float64):
        loss, grad, _ = _run(
            lambda x: tigon.kto_loss(
                x, desirable, mask, kind=loss_type, kl=point, ref=ref.to(x.dtype).detach(), **options
            ),
            log_prob.to(dtype),
        )
        torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(grad.double(), dwant, rtol=1e-5, atol=1e-8)


def _formula_of_orpo(c, r):
    odds = [x - math.log(-math.expm1(x)) for x in (c, r)]
    return math.log1p(math.exp(odds[1] - odds[0]))


def test_orpo_when_sure(device):
    """Where log(1 - exp) of a mean near 0 has no digits left."""
    for c, r in ((-1e-6, -0.5), (-1e-12, -2.0), (-3.0, -1e-4)):
        x = torch.tensor([c, r], device=device, requires_grad=True)
        loss = tigon.preference_loss(x, kind="orpo", beta=1.0, nll=0.0).loss
        loss.backward()
        c, r = x.detach().double().tolist()
        assert loss.item() == pytest.approx(_formula_of_orpo(c, r), rel=1e-5)
        step = 1e-3
        slopes = [
            (_formula_of_orpo(c * (1 + step), r) - _formula_of_orpo(c * (1 - step), r)) / (2 * step * c),
            (_formula_of_orpo(c, r * (1 + step)) - _formula_of_orpo(c, r * (1 - step))) / (2 * step * r),
        ]
        assert x.grad.tolist() == pytest.approx(slopes, rel=1e-4)


@pytest.mark.parametrize("scores", [(0.0, -1.0), (-1.0, 0.0), (0.0, 0.0)])
def test_orpo_when_certain(scores, device):
    """Log-probability exactly 0: finite slopes, those of the plain formula."""
    grads = []
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(scores, dtype=dtype, device=device, requires_grad=True)
        tigon.preference_loss(x, kind="orpo", beta=0.7, nll=0.0).loss.backward()
        grads.append(x.grad.double())
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-30)
    assert grads[0].abs().max() <= 0.7 / (1 - math.exp(-1.0)) + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_empty_answers(kind, batch, device):
    """Finite, without a gradient where there is no token."""
    log_prob, mask, _ = batch
    mask = mask.clone()
    mask[0], mask[PAIRS + 1], mask[2], mask[PAIRS + 2] = False, False, False, False
    x = log_prob.float().to(device).requires_grad_()
    options = {"label_smoothing": 0.1} if kind in ("exo_pair", "robust") else {}
    for average in (False, True):
        result = tigon.preference_loss(x, mask.to(device), kind=kind, average=average, nll=0.5, **options)
        (grad,) = torch.autograd.grad(result.loss, x)
        assert all(t.isfinite().all() for t in (*result, grad))
        assert (grad[~mask.to(device)] == 0).all() and (grad[mask.to(device)] != 0).any()
    nothing = torch.zeros_like(mask).to(device)
    result = tigon.preference_loss(x, nothing, kind=kind, nll=0.5, **options)
    (grad,) = torch.autograd.grad(result.loss, x)
    assert result.loss.isfinite() and result.nll == 0 and (grad == 0).all()


def test_masked_tokens_may_be_anything(batch, device):
    log_prob, mask, ref = (t.float().to(device) if t.is_floating_point() else t.to(device) for t in batch)
    bad = torch.where(mask, log_prob, torch.nan).requires_grad_()
    good = log_prob.clone().requires_grad_()
    results = [tigon.preference_loss(x, mask, ref=ref, nll=1.0) for x in (bad, good)]
    grads = [torch.autograd.grad(r.loss, x)[0] for r, x in zip(results, (bad, good), strict=True)]
    assert torch.equal(*grads) and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_masks_of_any_integer_type(batch, device):
    log_prob, mask, _ = (t.float().to(device) if t.is_floating_point() else t.to(device) for t in batch)
    want = tigon.preference_loss(log_prob, mask, nll=1.0)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        got = tigon.preference_loss(log_prob, 3 * mask.to(dtype), nll=1.0)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_aliases_of_formulas(batch):
    log_prob, mask, ref = batch
    x = log_prob.float()
    ref = ref.float()

    def loss(**options):
        return tigon.preference_loss(x, mask, **options).loss

    assert torch.equal(loss(kind="sigmoid", ref=ref), loss(kind="cdpo", ref=ref))
    assert torch.equal(loss(kind="cpo", nll=0.0), loss(kind="sigmoid"))
    assert torch.equal(loss(kind="simpo", gamma=0.4), loss(kind="sigmoid", gamma=0.4, average=True))
    assert torch.equal(loss(kind="robust", ref=ref), loss(kind="sigmoid", ref=ref))
    both = loss(kind="orpo")
    nll = tigon.preference_loss(x, mask, kind="orpo").nll
    torch.testing.assert_close(both, loss(kind="orpo", nll=0.0) + nll)


def test_upstream_and_denominator(batch, device):
    log_prob, mask, ref = (t.float().to(device) if t.is_floating_point() else t.to(device) for t in batch)
    leaf = log_prob.requires_grad_()

    def run(denominator):
        loss, *metrics = tigon.preference_loss(leaf, mask, ref=ref, denominator=denominator)
        assert not any(t.requires_grad for t in metrics)
        first = torch.autograd.grad(3.0 * loss, leaf, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(3.0 * loss, leaf)[0])
        return loss, first

    loss, grad = run(None)
    for denominator in (float(PAIRS), torch.tensor(PAIRS, device=device), torch.tensor(float(PAIRS))):
        again, dagain = run(denominator)
        assert torch.equal(loss, again) and torch.equal(grad, dagain)
    half, dhalf = run(2.0 * PAIRS)
    torch.testing.assert_close(half, loss / 2)
    torch.testing.assert_close(dhalf, grad / 2)


REFUSED = """
preference_loss(x[:3]) -> log_prob must have an even number of rows ..., got 3
preference_loss(x[None]) -> log_prob must be [answers] or [answers, T], got
preference_loss(x, beta=0.0) -> beta must be > 0 and finite, got 0.0
preference_loss(x, kind='robust', label_smoothing=0.5)
    -> label_smoothing must be in [0, 0.5) with kind 'robust', got 0.5
preference_loss(x, kind='exo_pair') -> label_smoothing must be in (0, 0.5] with kind 'exo_pair'
preference_loss(x, kind='cdpo', label_smoothing=0.6)
    -> label_smoothing must be in [0, 0.5] with kind 'cdpo', got 0.6
preference_loss(x, kind='ipo', gamma=0.1) -> gamma must be 0 with kind 'ipo', got 0.1
preference_loss(x, kind='simpo', ref=x[:, 0]) -> ref must be None with kind 'simpo'
kto_loss(x, x[:, 0] > 0, kind='apo_zero_unpaired', kl=0.1) -> kl must be 0 with kind
kto_loss(x, x[:, 0] > 0, weights=1.0) -> weights must be ..., got 1.0
kto_loss(x, x[:, 0] > 0, beta=0) -> beta must be > 0 and finite, got 0
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call, message", refusals(REFUSED))
def test_refusals(call, message, dtype):
    refused(call, message.replace("torch.float32", str(dtype)), x=-torch.rand(4, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (4, 0), (0,)])
def test_an_empty_batch(shape, dtype):
    """A micro-batch without answers, or with empty ones, has a loss."""
    x = torch.zeros(shape, dtype=dtype, requires_grad=True)
    mask = torch.ones(shape[0] // 2, *shape[1:], dtype=torch.bool)
    out = tigon.preference_loss(x, nll=1.0, nll_mask=mask)
    assert out.nll == 0 and out.loss.isfinite() and (shape[0] or out.loss == 0)
    out.loss.backward()
    assert x.grad.shape == shape
