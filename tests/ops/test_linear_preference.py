"""linear_preference, linear_kto and linear_policy: chunks, graphs, references, masks, refusals."""

import pytest
import torch

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


def _grads(result, batch, **options):
    return torch.autograd.grad(result.loss, (batch["hidden"], batch["weight"]), **options)


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


REFUSED = [
    (
        lambda h, w, y: tigon.linear_preference(h[:3], w, y[:3]),
        "target must have an even number of rows .*, got 3",
    ),
    (lambda h, w, y: tigon.linear_preference(h[0], w, y[0]), r"target must be \[answers, T\], got \[11\]"),
    (
        lambda h, w, y: tigon.linear_preference(h, w, y, ref=(h,)),
        r"ref must be .* \(hidden, weight\[, bias\]\)",
    ),
    (lambda h, w, y: tigon.linear_preference(h, w, y, ref=(h[:2], w)), "ref must have rows"),
    (lambda h, w, y: tigon.linear_preference(h, w, y, ref=(h, w[:5])), "ref must have a weight"),
    (lambda h, w, y: tigon.linear_preference(h, w, y, ref=(h, w, w[0])), "ref must have a bias"),
    (lambda h, w, y: tigon.linear_policy(h, w, y, h[:, 0, 0], kl=0.1), "ref must be given with kl"),
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
