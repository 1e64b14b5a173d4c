"""Policy losses: TRL's own trainer, refusals, invariants."""

import pytest
import torch
import trl_losses
from checks import refusals, refused

import tigon

B, T = 5, 11


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(5)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    log_prob = -randn(B, T).abs()
    mask = torch.rand(B, T, generator=draw) < 0.7
    mask[:, 0] = True
    return {
        "log_prob": log_prob,
        "mask": mask,
        "advantage": randn(B),
        "old": log_prob + 0.3 * randn(B, T),
        "ref": log_prob + 0.4 * randn(B, T),
        "entropies": randn(B, T).abs(),
        "importance": torch.where(mask, (0.3 * randn(B, T)).exp(), 1.0),
    }


# TRL's name -> ours: kind, normalise, denominator by items and maximal length.
TYPES = {"grpo": ("clip", "sequence", None), "bnpo": ("clip", "token", None)}
TYPES |= {"dr_grpo": ("clip", "token", B * 32.0), "dapo": ("clip", "token", 77.0)}
TYPES |= {"luspo": ("clip", "length", None), "cispo": ("cispo", "token", 77.0)}
TYPES |= {"sapo": ("sapo", "sequence", None), "vespo": ("vespo", "token", 77.0)}
OPTIONS = {"plain": {}, "on_policy": {"old": None}, "kl": {"kl": 0.1}}
OPTIONS |= {"corrected": {"kl": 0.1, "kl_corrected": True}, "importance": {"importance": True}}
OPTIONS |= {"entropy": {"entropy": 0.05}, "delta": {"delta": 1.25}}
OPTIONS |= {"all": {"kl": 0.1, "kl_corrected": True, "importance": True, "entropy": 0.05, "delta": 1.4}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", TYPES)
def test_grpo_trainer(batch, loss_type, level, options):
    kind, normalise, denominator = TYPES[loss_type]
    options = dict(options)
    if kind != "clip":
        options.pop("delta", None)
    given = {"old": batch["old"], "ref": batch["ref"] if options.get("kl") else None} | options
    given["importance"] = batch["importance"] if options.get("importance") else None
    mask, advantage = batch["mask"], batch["advantage"]

    def leaves(dtype):
        return [batch[name].to(dtype).requires_grad_() for name in ("log_prob", "entropies")]

    log_prob, entropies = leaves(torch.float64)
    want, _ = trl_losses.grpo(
        log_prob, mask, advantage, loss_type, entropies=entropies, level=level, items=77, length=32, **given
    )
    dwant = torch.autograd.grad(want, (log_prob, entropies), allow_unused=True)
    for dtype in (torch.float64, torch.float32):
        log_prob, entropies = leaves(dtype)
        ours = {name: t.to(dtype) if torch.is_tensor(t) else t for name, t in given.items()}
        result = tigon.policy_loss(
            log_prob,
            advantage.to(dtype),
            mask,
            kind=kind,
            level=level,
            normalise=normalise,
            entropies=entropies,
            denominator=denominator,
            entropy_denominator=mask.sum(),
            **ours,
        )
        grads = torch.autograd.grad(result.loss, (log_prob, entropies), allow_unused=True)
        tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-7, "atol": 1e-9}
        torch.testing.assert_close(result.loss.double(), want.double(), **tolerance)
        for got, expected in zip(grads, dwant, strict=True):
            expected = torch.zeros(B, T) if expected is None else expected
            got = torch.zeros(B, T) if got is None else got
            torch.testing.assert_close(got.double(), expected.double(), **tolerance)


def test_metrics_are_trls(batch):
    given = {name: batch[name] for name in ("old", "ref")}
    log_prob, mask, advantage = batch["log_prob"], batch["mask"], batch["advantage"]
    _, metrics = trl_losses.grpo(
        log_prob, mask, advantage, "bnpo", entropies=batch["entropies"], kl=0.1, **given
    )
    for dtype in (torch.float32, torch.float64):
        got = tigon.policy_loss(
            log_prob.to(dtype),
            advantage.to(dtype),
            mask,
            kl=0.1,
            **{k: t.to(dtype) for k, t in given.items()},
        )
        count = mask.sum()
        assert (got.kl.sum() / count).item() == pytest.approx(metrics["kl"][0], rel=1e-5)
        assert ((got.clipped < 0).sum() / count).item() == pytest.approx(metrics["clip_ratio/low_mean"][0])
        assert ((got.clipped > 0).sum() / count).item() == pytest.approx(metrics["clip_ratio/high_mean"][0])


@pytest.mark.parametrize("level", ["token", "sequence", "sum"])
def test_ratio_one_is_no_tie(batch, level, device):
    """Where both branches of the clipped objective are equal the gradient is that of -A log_prob."""
    log_prob = batch["log_prob"].float().to(device).requires_grad_()
    advantage, mask = batch["advantage"].float().to(device), batch["mask"].to(device)
    for old in (None, log_prob.detach().clone()):
        for delta in (None, 1.0, 5.0):
            loss = tigon.policy_loss(
                log_prob, advantage, mask, old=old, level=level, delta=delta, denominator=1.0
            ).loss
            (grad,) = torch.autograd.grad(loss, log_prob)
            count = mask.sum(-1) if level == "sum" else torch.ones(B, device=device)
            want = torch.where(mask, -(advantage * count)[:, None], 0.0)
            torch.testing.assert_close(grad, want, rtol=1e-6, atol=0)


def test_one_token_answers_have_one_level(batch, device):
    log_prob, old = (batch[name][:, :1].float().to(device) for name in ("log_prob", "old"))
    advantage = batch["advantage"].float().to(device)
    results = []
    for level in ("token", "sequence", "sum"):
        for normalise in ("token", "sequence", "length"):
            x = log_prob.clone().requires_grad_()
            loss = tigon.policy_loss(
                x, advantage, old=old, level=level, normalise=normalise, denominator=3.0
            ).loss
            results.append((loss, *torch.autograd.grad(loss, x)))
    for loss, grad in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(grad, results[0][1])


def test_masked_tokens_may_be_anything(batch, device):
    mask = batch["mask"].to(device)
    tensors = {name: t.float().to(device) for name, t in batch.items() if name not in ("mask", "advantage")}
    advantage = batch["advantage"].float().to(device)
    runs = []
    for fill in (0.0, float("nan"), float("inf")):
        given = {name: torch.where(mask, t, fill) for name, t in tensors.items()}
        log_prob, entropies = given.pop("log_prob").requires_grad_(), given.pop("entropies").requires_grad_()
        for level in ("token", "sequence"):
            result = tigon.policy_loss(
                log_prob, advantage, mask, entropies=entropies, kl=0.1, entropy=0.1, level=level, **given
            )
            runs.append((level, *result, *torch.autograd.grad(result.loss, (log_prob, entropies))))
    for level, *run in runs:
        first = next(r for other, *r in runs if other == level)
        assert all(torch.equal(a, b) for a, b in zip(run, first, strict=True))


def test_importance_zero_is_a_mask_of_the_surrogate(batch):
    """Divergence and entropy still count."""
    mask = batch["mask"]
    x = batch["log_prob"].float().requires_grad_()
    off = torch.zeros(B)
    loss = tigon.policy_loss(x, batch["advantage"].float(), mask, importance=off).loss
    (grad,) = torch.autograd.grad(loss, x)
    assert loss == 0 and (grad == 0).all()
    ref = batch["ref"].float()
    loss = tigon.policy_loss(x, batch["advantage"].float(), mask, importance=off, ref=ref, kl=1.0).loss
    assert loss > 0


def test_k3_keeps_its_digits(device):
    """exp(q) - q - 1 of a policy that has hardly moved."""
    log_prob = torch.full((1, 4), -1.0, device=device)
    ref = log_prob + torch.tensor([[1e-4, -1e-3, 1e-2, 0.3]], device=device)
    q = (ref - log_prob).double()
    got = tigon.policy_loss(log_prob, torch.zeros(1, device=device), ref=ref).kl
    torch.testing.assert_close(got.double(), torch.expm1(q) - q, rtol=1e-6, atol=1e-12)
    for estimator, want in (("k1", -q), ("k2", q**2 / 2)):
        got = tigon.policy_loss(log_prob, torch.zeros(1, device=device), ref=ref, kl_estimator=estimator).kl
        torch.testing.assert_close(got.double(), want)


REFUSED = """
policy_loss(x, a, kl=0.1) -> ref must be given with kl, got None
policy_loss(x, a, entropy=0.1) -> entropies must be given with entropy, got None
policy_loss(x, a, clip=0.2) -> clip must be 2 numbers, got 0.2
policy_loss(x, a, clip=(-0.1, 0.2)) -> clip must be two numbers >= 0, got
policy_loss(x, a, kind='sapo', delta=1.5) -> delta must be None with kind 'sapo', got 1.5
policy_loss(x, a, kind='sapo', tau=(1.0, 0.0)) -> tau must be two numbers > 0, got
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call, message", refusals(REFUSED))
def test_refusals(call, message, dtype):
    refused(call, "[policy_loss] " + message, x=-torch.rand(3, 5, dtype=dtype), a=torch.randn(3, dtype=dtype))
