"""linear_preference, linear_kto and linear_policy: chunks, graphs, references, masks, refusals."""

from __future__ import annotations

import pytest
import torch
from checks import same_bits
from torch.utils.checkpoint import checkpoint

import tigon

PAIRS, TOKENS, SIZE, VOCAB = 4, 11, 24, 60


@pytest.fixture
def batch(device):
    draw = torch.Generator().manual_seed(11)

    def randn(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=draw)).to(device)

    target = torch.randint(0, VOCAB, (2 * PAIRS, TOKENS), generator=draw)
    target[torch.rand(target.shape, generator=draw) < 0.3] = -100
    return {
        "hidden": randn(2 * PAIRS, TOKENS, SIZE).requires_grad_(),
        "weight": randn(VOCAB, SIZE, scale=0.4).requires_grad_(),
        "target": target.to(device),
        "ref": randn(2 * PAIRS) - 30,
        "advantage": randn(2 * PAIRS),
        "old": randn(2 * PAIRS, TOKENS, scale=0.1) - 4,
    }


def _operands(batch):
    return batch["hidden"], batch["weight"], batch["target"]


def _losses(batch):
    """A call of each function, by its name."""
    x = _operands(batch)
    desirable = torch.arange(2 * PAIRS, device=x[0].device) % 3 == 0
    return {
        "preference": lambda **o: tigon.linear_preference(*x, ref=batch["ref"], nll=0.3, **o),
        "kto": lambda **o: tigon.linear_kto(*x, desirable, ref=batch["ref"], kl=0.1, **o),
        "policy": lambda **o: tigon.linear_policy(*x, batch["advantage"], old=batch["old"], entropy=0.1, **o),
        "sequences": lambda **o: tigon.linear_policy(
            *x, batch["advantage"], old=batch["old"], level="sequence", normalise="sequence", **o
        ),
    }


FUNCTIONS = ("preference", "kto", "policy", "sequences")


def _grads(result, batch, **options):
    return torch.autograd.grad(result.loss, (batch["hidden"], batch["weight"]), **options)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_composition(batch, name, device):
    """linear_log_prob, then the loss of the log-probabilities."""
    x = _operands(batch)
    log_prob, entropies = tigon.linear_log_prob(*x, entropy=True)
    mask = x[2] != -100
    desirable = torch.arange(2 * PAIRS, device=device) % 3 == 0
    composed = {
        "preference": lambda: tigon.preference_loss(log_prob, mask, ref=batch["ref"], nll=0.3),
        "kto": lambda: tigon.kto_loss(log_prob, desirable, mask, ref=batch["ref"], kl=0.1),
        "policy": lambda: tigon.policy_loss(
            log_prob, batch["advantage"], mask, old=batch["old"], entropies=entropies, entropy=0.1
        ),
        "sequences": lambda: tigon.policy_loss(
            log_prob, batch["advantage"], mask, old=batch["old"], level="sequence", normalise="sequence"
        ),
    }[name]()
    got = _losses(batch)[name]()
    torch.testing.assert_close(got.loss, composed.loss)
    for a, b in zip(_grads(got, batch), _grads(composed, batch), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rows", [None, 8])
def test_upstream_gradients(batch, name, rows):
    """Other than 1, and a graph used twice."""
    fn = _losses(batch)[name]
    once = _grads(fn(chunk_rows=rows), batch)
    result = fn(chunk_rows=rows)
    twice = [torch.autograd.grad(4.0 * result.loss, batch["hidden"], retain_graph=True)[0] for _ in range(2)]
    last = torch.autograd.grad(4.0 * result.loss, batch["hidden"])[0]
    assert same_bits(twice[0], twice[1]) and same_bits(twice[0], last)
    assert torch.equal(twice[0], 4.0 * once[0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_valid_rows(batch, name, device):
    count = int((batch["target"] != -100).sum())
    fn = _losses(batch)[name]
    want, got = fn(), fn(valid_rows=count)
    for a, b in zip(got, want, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(_grads(got, batch), _grads(want, batch), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for wrong in (count - 1, count + 1, 0):
        if device == "cpu":
            with pytest.raises(tigon.Error, match="valid_rows must be the number of labels"):
                fn(valid_rows=wrong)
        else:
            assert fn(valid_rows=wrong).loss.isnan()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rows", [None, 8])
def test_compiled(batch, name, rows):
    torch._dynamo.reset()

    def step(hidden, weight):
        result = _losses({**batch, "hidden": hidden, "weight": weight})[name](chunk_rows=rows)
        return [t for t in result if t is not None]

    eager = step(batch["hidden"], batch["weight"])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(batch["hidden"], batch["weight"])
    assert all(same_bits(a, b) for a, b in zip(eager, compiled, strict=True))
    for a, b in zip(
        *(torch.autograd.grad(r[0], (batch["hidden"], batch["weight"])) for r in (eager, compiled)),
        strict=True,
    ):
        assert same_bits(a, b)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms(batch, name):
    """torch.func takes the composition."""

    def loss(hidden, weight):
        return _losses({**batch, "hidden": hidden, "weight": weight})[name]().loss

    got = torch.func.grad(loss, argnums=(0, 1))(batch["hidden"].detach(), batch["weight"].detach())
    for a, b in zip(got, _grads(_losses(batch)[name](), batch), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6)


def test_reference_head_is_its_sums(batch, device):
    hidden, weight, target = _operands(batch)
    states = torch.randn(2 * PAIRS, TOKENS, 40, device=device)
    ref_weight, bias = 0.3 * torch.randn(VOCAB, 40, device=device), torch.randn(VOCAB, device=device)
    sums = tigon.linear_log_prob(states, ref_weight, target, bias=bias).sum(-1)
    for rows in (None, 8, 30):
        streamed = tigon.linear_preference(
            hidden, weight, target, ref=(states, ref_weight, bias), chunk_rows=rows
        )
        given = tigon.linear_preference(hidden, weight, target, ref=sums, chunk_rows=rows)
        for a, b in zip(streamed, given, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        for a, b in zip(_grads(streamed, batch), _grads(given, batch), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    own = tigon.linear_preference(hidden, weight, target, ref=(hidden, weight))
    assert torch.equal(own.rewards, torch.zeros_like(own.rewards))


def test_on_policy_it_is_cross_entropy(batch):
    """Ratio 1 and no divergence: the token-weighted cross-entropy."""
    hidden, weight, target = _operands(batch)
    advantage = batch["advantage"]
    got = _grads(tigon.linear_policy(hidden, weight, target, advantage), batch)
    by_token = advantage[:, None].expand(target.shape)
    loss = tigon.linear_cross_entropy(hidden, weight, target, token_weight=by_token)
    for a, b in zip(got, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_metrics_are_bounded(batch):
    result = tigon.linear_policy(*_operands(batch), batch["advantage"])
    assert (result.log_prob <= 0).all()
    assert (result.entropy >= 0).all() and (result.entropy <= torch.tensor(VOCAB).log() + 1e-5).all()


def test_shift_is_the_next_label(batch):
    hidden, weight, target = _operands(batch)
    moved = torch.nn.functional.pad(target[:, 1:], (0, 1), value=-100)
    for kind in ("sigmoid", "orpo"):
        a = tigon.linear_preference(hidden, weight, target, kind=kind, shift=True)
        b = tigon.linear_preference(hidden, weight, moved, kind=kind)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_dtypes_of_weight(batch):
    """A weight of another dtype keeps the dtype of its gradient."""
    hidden, weight, target = _operands(batch)
    hidden = hidden.detach().bfloat16().requires_grad_()
    result = tigon.linear_preference(hidden, weight, target, ref=batch["ref"])
    dhidden, dweight = torch.autograd.grad(result.loss, (hidden, weight))
    assert dhidden.dtype == torch.bfloat16 and dweight.dtype == torch.float32
    with torch.autocast(hidden.device.type, torch.bfloat16):
        under = tigon.linear_preference(hidden.float(), weight, target, ref=batch["ref"])
    assert torch.equal(under.loss, result.loss)


def test_modules(batch, device):
    x = _operands(batch)
    desirable = torch.arange(2 * PAIRS, device=device) % 3 == 0
    pairs = tigon.nn.LinearPreferenceLoss(kind="ipo", beta=0.3)
    assert torch.equal(
        pairs(*x, batch["ref"]).loss, tigon.linear_preference(*x, kind="ipo", beta=0.3, ref=batch["ref"]).loss
    )
    single = tigon.nn.LinearKTOLoss(weights=(1.0, 2.0))
    assert torch.equal(
        single(*x, desirable, kl=0.1).loss, tigon.linear_kto(*x, desirable, weights=(1.0, 2.0), kl=0.1).loss
    )
    policy = tigon.nn.LinearPolicyLoss(normalise="sequence", temperature=0.8)
    got = policy(*x, batch["advantage"], batch["old"], denominator=7.0)
    want = tigon.linear_policy(
        *x, batch["advantage"], old=batch["old"], normalise="sequence", temperature=0.8, denominator=7.0
    )
    assert torch.equal(got.loss, want.loss)
    assert "kind='ipo'" in repr(pairs)
    with pytest.raises(TypeError):
        tigon.nn.LinearPolicyLoss(normalize="sequence")


def test_workspace_is_bounded(batch):
    fn = _losses(batch)["preference"]
    torch.testing.assert_close(fn(max_workspace_mb=64.0).loss, fn().loss)
    with pytest.raises(tigon.Error, match="max_workspace_mb must be at least"):
        fn(max_workspace_mb=0.0)


REFUSED = [
    (
        lambda h, w, y: tigon.linear_preference(h[:3], w, y[:3]),
        "target must have an even number of rows .*, got 3",
    ),
    (lambda h, w, y: tigon.linear_preference(h[0], w, y[0]), r"target must be \[answers, T\], got \[11\]"),
    (lambda h, w, y: tigon.linear_preference(h, w, y, kind="dpo"), "kind must be one of"),
    (lambda h, w, y: tigon.linear_preference(h, w, y, beta=0), "beta must be > 0 and finite, got 0"),
    (
        lambda h, w, y: tigon.linear_preference(h, w, y, label_smoothing=0.2),
        "label_smoothing must be 0 with kind",
    ),
    (lambda h, w, y: tigon.linear_preference(h, w, y, ref=h[:, 0]), r"ref must be \[8\], got \[8, 24\]"),
    (
        lambda h, w, y: tigon.linear_preference(h, w, y, ref=(h,)),
        r"ref must be .* \(hidden, weight\[, bias\]\)",
    ),
    (lambda h, w, y: tigon.linear_preference(h, w, y, ref=(h[:2], w)), "ref must have rows"),
    (lambda h, w, y: tigon.linear_preference(h, w, y, ref=(h, w[:5])), "ref must have a weight"),
    (lambda h, w, y: tigon.linear_preference(h, w, y, ref=(h, w, w[0])), "ref must have a bias"),
    (
        lambda h, w, y: tigon.linear_preference(h, w, y, nll_target=y),
        r"nll_target must be \[4, 11\], got \[8, 11\]",
    ),
    (lambda h, w, y: tigon.linear_preference(h, w, y, lora=(h, w)), "lora must be"),
    (lambda h, w, y: tigon.linear_preference(h, w, y, chunk_rows=0), "chunk_rows must be >= 1"),
    (lambda h, w, y: tigon.linear_preference(h, w[:, :5], y), "weight must be"),
    (lambda h, w, y: tigon.linear_kto(h, w, y, h[:, 0, 0]), "desirable must be a bool tensor"),
    (
        lambda h, w, y: tigon.linear_policy(h, w, y, h[:3, 0, 0]),
        r"advantage must be \[8, 11\] or \[8\], got \[3\]",
    ),
    (lambda h, w, y: tigon.linear_policy(h, w, y, h[:, 0, 0], kl=0.1), "ref must be given with kl"),
    (lambda h, w, y: tigon.linear_policy(h, w, y, h[:, 0, 0], old=h[:, 0]), "old must be"),
    (lambda h, w, y: tigon.linear_policy(h, w, y, h[:, 0, 0], normalise="grpo"), "normalise must be one of"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_refusals(batch, call, message):
    hidden, weight, target = _operands(batch)
    with pytest.raises(tigon.Error, match=rf"^\[linear_(preference|kto|policy)\] {message}"):
        call(hidden, weight, target)


def test_labels_out_of_range(batch, device):
    hidden, weight, target = _operands(batch)
    target = target.clone()
    target[0, 0] = VOCAB
    if device == "cpu":
        with pytest.raises(tigon.Error, match="target must be in"):
            tigon.linear_preference(hidden, weight, target)
    else:
        assert tigon.linear_preference(hidden, weight, target).loss.isnan()


def test_nll_target_that_differs(batch, device):
    hidden, weight, target = _operands(batch)
    target = target.clamp(min=0)
    other = (target[:PAIRS] + 1) % VOCAB
    if device == "cpu":
        with pytest.raises(tigon.Error, match="nll_target must be target where both count"):
            tigon.linear_preference(hidden, weight, target, nll=1.0, nll_target=other)
    else:
        assert tigon.linear_preference(hidden, weight, target, nll=1.0, nll_target=other).loss.isnan()


@pytest.mark.parametrize("name", ["preference", "kto", "policy"])
def test_main_grad(name, device):
    torch.manual_seed(0)
    hidden = torch.randn(4, 5, 16, device=device)
    weight = torch.randn(40, 16, device=device, requires_grad=True)
    target = torch.randint(0, 40, (4, 5), device=device)
    more = {"preference": (), "kto": (target[:, 0] > 20,), "policy": (torch.randn(4, device=device),)}[name]
    fn = getattr(tigon, f"linear_{name}")
    (wanted,) = torch.autograd.grad(fn(hidden, weight, target, *more).loss, weight)
    weight.main_grad, weight.tigon_main_grad = torch.ones_like(weight), True
    fn(hidden, weight, target, *more).loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad - 1, wanted, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        fn(hidden, weight, target, *more)


_UNDER_A_CHECKPOINT = {
    "policy": lambda h, w, t: tigon.linear_policy(h, w, t, torch.tensor([0.5, -1.0], device=h.device))[0],
    "preference": lambda h, w, t: tigon.linear_preference(h, w, t, kind="simpo")[0],
    "log_prob": lambda h, w, t: tigon.linear_log_prob(h, w, t).sum(),
    "entropies": lambda h, w, t: tigon.linear_log_prob(h, w, t, entropy=True)[1].sum(),
}


@pytest.mark.parametrize("name", _UNDER_A_CHECKPOINT)
def test_under_a_checkpoint(name, device):
    """A checkpoint hands every saved tensor out once; the gradients are those without it."""
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 3, 16), (40, 16)
    leaves = [torch.randn(s, generator=draw).to(device).requires_grad_() for s in shapes]
    target = torch.randint(0, 40, (2, 3), generator=draw).to(device)
    function = _UNDER_A_CHECKPOINT[name]
    want = torch.autograd.grad(function(*leaves, target), leaves)
    got = torch.autograd.grad(checkpoint(function, *leaves, target, use_reentrant=False), leaves)
    assert all(map(same_bits, got, want))
