"""Draws from logits and from hidden states: the tokens of the plain formula, their distribution, edges."""

import math

import pytest
import torch

import tigon
from tigon.ops import sample

OPTIONS = {"plain": {}, "greedy": {"temperature": 0.0}, "cold": {"temperature": 0.3}}
OPTIONS |= {"hot": {"temperature": 4.0}, "top_k": {"top_k": 5}, "one": {"top_k": 1}}
OPTIONS |= {"more than there are": {"top_k": 10**9}, "top_p": {"top_p": 0.6, "temperature": 1.3}}
OPTIONS |= {"tiny top_p": {"top_p": 1e-9}, "min_p": {"min_p": 0.1}}
OPTIONS |= {"all": {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9}}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 2, 5, 67, 1000, 32003)


def agree(got, want, least=1.0):
    """Tokens are the same but for a share of rows whose best scores are a rounding apart."""
    (ids, log_prob), (wanted_ids, wanted) = got, want
    same = ids == wanted_ids
    assert same.double().mean() >= least
    assert ids.dtype == torch.int64 and log_prob.dtype == torch.float32
    # Where the first pick of two draws differs nothing is said of its probability.
    torch.testing.assert_close(log_prob[same].double(), wanted[same].double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_draws_of_the_formula(name, dtype, device):
    """On every device the seed's own, those of the formula in float64."""
    generator = torch.Generator().manual_seed(len(name))
    for columns in COLUMNS:
        logits = (3 * torch.randn(9, columns, generator=generator)).to(device, dtype)
        options = OPTIONS[name] | {"seed": 1000 + columns, "log_prob": True}
        got = tigon.sample(logits, **options)
        agree(got, sample.reference(logits.double(), **options), 8 / 9 if columns > 67 else 1.0)
        again = tigon.sample(logits, **options)
        assert torch.equal(got[0], again[0]) and torch.equal(got[1], again[1])
        assert torch.equal(tigon.sample(logits, **options | {"log_prob": False}), got[0])


@pytest.mark.parametrize("layout", ["rows apart", "misaligned", "transposed"])
def test_layouts(layout, device):
    logits = torch.randn(7, 130).to(device)
    given = {
        "rows apart": lambda: torch.cat((logits, logits.new_full((7, 3), torch.nan)), 1)[:, :130],
        "misaligned": lambda: torch.cat((logits.new_zeros(1), logits.flatten()))[1:].view(7, 130),
        "transposed": lambda: logits.t().contiguous().t(),
    }[layout]()
    for options in OPTIONS.values():
        got, want = (tigon.sample(x, seed=3, log_prob=True, **options) for x in (given, logits))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_distribution(device):
    """Frequencies within five standard deviations of what the options leave."""
    p = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    draws = 200_000
    logits = p.log().expand(draws, -1).to(device)
    for options, kept in (
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"top_k": 2}, [1, 1, 0, 0, 0, 0]),
        ({"top_p": 0.75}, [1, 1, 1, 0, 0, 0]),  # 0.4 + 0.25 is less
        ({"min_p": 0.2}, [1, 1, 1, 1, 0, 0]),
        ({"top_k": 4, "top_p": 0.7}, [1, 1, 0, 0, 0, 0]),  # of 0.9: 0.65 / 0.9 is enough
    ):
        counts = tigon.sample(logits, seed=11, **options).bincount(minlength=6).cpu()
        want = p * torch.tensor(kept)
        want = want / want.sum()
        slack = 5 * (want * (1 - want) / draws).sqrt()
        assert ((counts / draws - want).abs() <= slack).all(), (options, counts / draws, want)


def test_equal_logits_stay_together(device):
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0]).expand(4000, -1).to(device)
    for options in ({"top_k": 2}, {"top_p": 0.5}):
        assert set(tigon.sample(logits, seed=2, **options).tolist()) == {0, 1, 2, 3}
    assert tigon.sample(logits[:, 1:], temperature=0.0).eq(0).all()  # the lower column


def test_rows_by_themselves(device):
    """Options by row are those of a call of that row; with seeds by row, wherever it stands."""
    n, v = 37, 301
    logits = (2 * torch.randn(n, v)).to(device)
    by_row = {"temperature": torch.rand(n) * 2, "top_k": torch.randint(0, 40, (n,))}
    by_row |= {"top_p": torch.rand(n) * 1.2, "min_p": torch.rand(n) * 0.2, "seed": torch.arange(n) * 7919}
    by_row["temperature"][::5] = 0.0
    by_row = {name: value.to(device) for name, value in by_row.items()}
    ids, log_prob = tigon.sample(logits, **by_row, log_prob=True)
    agree((ids, log_prob), sample.reference(logits.double(), **by_row, log_prob=True), 0.97)
    order = torch.randperm(n, device=device)
    moved = tigon.sample(logits[order], **{k: t[order] for k, t in by_row.items()}, log_prob=True)
    assert torch.equal(moved[0], ids[order]) and torch.equal(moved[1], log_prob[order])
    for i in (0, 1, 6, 36):
        numbers = {name: value[i].item() for name, value in by_row.items()}
        numbers |= {"top_k": numbers["top_k"] or None, "top_p": min(numbers["top_p"], 1.0)}
        assert tigon.sample(logits[i], **numbers) == ids[i]


def test_rows_without_a_token(device):
    good = torch.tensor([0.0, 1.0, -math.inf, 2.0])
    bad = [[math.nan] + [0.0] * 3, [math.inf] + [0.0] * 3, [-math.inf] * 4, [0.0, 0.0, 0.0, -math.nan]]
    logits = torch.stack([good, *map(torch.tensor, bad)]).to(device)
    for options in OPTIONS.values():
        for x in (logits, logits.double()):
            ids, log_prob = tigon.sample(x, seed=1, log_prob=True, **options)
            assert ids[1:].eq(-1).all() and log_prob[1:].isnan().all()
            assert ids[0] in (0, 1, 3) and log_prob[0] <= 0


def test_far_logits(device):
    """Neither large logits nor small temperatures make another token than the largest."""
    logits = torch.tensor([[-3e38, 3e38, 0.0], [1e30, 1.1e30, -1e30]]).to(device)
    for options in ({}, {"temperature": 1e-30}, {"temperature": 1e-45}, {"top_p": 0.9}, {"min_p": 0.5}):
        assert tigon.sample(logits, seed=4, **options).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_linear_sample(dtype, device, monkeypatch):
    """The head's options; log-probabilities are those of linear_log_prob; chunks change no draw."""
    hidden, weight = torch.randn(5, 13, 32).to(device, dtype), torch.randn(203, 32).to(device, dtype)
    head = {"bias": torch.randn(203).to(device), "softcap": 4.0, "logit_scale": 0.6}
    head |= {"lora": (torch.randn(3, 32).to(device, dtype), torch.randn(203, 3).to(device, dtype), 0.3)}
    for options in (head, head | {"logit_dtype": torch.float32}, {}):
        drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
        ids, log_prob = tigon.linear_sample(hidden, weight, **options, **drawn, log_prob=True)
        assert ids.shape == log_prob.shape == (5, 13)
        want = tigon.linear_log_prob(hidden, weight, ids, shift=False, temperature=0.8, **options)
        torch.testing.assert_close(log_prob, want, rtol=1e-4, atol=1e-4)
        monkeypatch.setattr(sample, "_LOGITS_BYTES", 7 * 256 * 4)  # several chunks
        chunked = tigon.linear_sample(hidden, weight, **options, **drawn, log_prob=True)
        monkeypatch.undo()
        assert (ids == chunked[0]).double().mean() > 0.95  # a matmul's rounding may depend on its rows
        exact = tigon.linear_sample(hidden.double(), weight.double(), **options, **drawn)
        assert (ids == exact).double().mean() > (0.95 if dtype == torch.float32 else 0.8)


def test_empty(device):
    assert tigon.sample(torch.zeros(0, 5, device=device)).shape == (0,)
    ids, log_prob = tigon.linear_sample(
        torch.zeros(2, 0, 8, device=device), torch.zeros(5, 8, device=device), log_prob=True
    )
    assert ids.shape == log_prob.shape == (2, 0) and ids.dtype == torch.int64


def test_without_a_seed(device):
    """PyTorch's generator draws it; nothing gets a gradient."""
    logits = torch.zeros(64, 50, device=device, requires_grad=True)
    torch.manual_seed(3)
    first, second = tigon.sample(logits), tigon.sample(logits)
    torch.manual_seed(3)
    assert torch.equal(first, tigon.sample(logits)) and not torch.equal(first, second)
    assert not tigon.sample(logits, log_prob=True)[1].requires_grad


@pytest.mark.parametrize("seed", ["one", "rows"])
def test_vmap(seed):
    """Of each sample what a call of its own draws."""
    hidden, weight, lora = (
        torch.randn(4, 7, 16),
        torch.randn(40, 16),
        (torch.randn(2, 16), torch.randn(40, 2)),
    )
    seeds = torch.arange(28).view(4, 7) if seed == "rows" else torch.full((4,), 5)
    temperatures = torch.rand(4, 7)

    def linear(x, seed, temperature):
        options = {"temperature": temperature, "top_p": 0.9, "lora": (*lora, 0.5), "bias": weight[:, 0]}
        return tigon.linear_sample(x, weight, seed=seed, **options)

    def plain(x, seed, temperature):
        return tigon.sample(x, seed=seed, temperature=temperature, top_k=5)

    for call in (linear, plain):
        want = [call(*one) for one in zip(hidden, seeds, temperatures, strict=True)]
        assert torch.equal(torch.vmap(call)(hidden, seeds, temperatures), torch.stack(want))


def test_compiles(device):
    def step(hidden, weight, temperature):
        return tigon.linear_sample(hidden, weight, temperature=temperature, top_k=3, seed=1, log_prob=True)

    hidden, weight = torch.randn(6, 16).to(device), torch.randn(40, 16).to(device)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for temperature in (0.5, torch.rand(6).to(device)):
        got, want = compiled(hidden, weight, temperature), step(hidden, weight, temperature)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_seeds_of_another_number_of_rows_are_refused():
    with pytest.raises(tigon.Error, match="seed must be an int, one int64, or int64"):
        tigon.sample(torch.zeros(3, 4), seed=torch.zeros(2, dtype=torch.int64))
