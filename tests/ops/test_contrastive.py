"""tigon.contrastive_loss: what the cases of tests/cases/contrastive.py leave out."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

import tigon
from cases.contrastive import eager_fn
from conftest import allocations


def pair(n=37, m=53, size=24, device="cpu", dtype=torch.float32, seed=0):
    """Queries and documents of which the first are near the queries."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(n, size, generator=generator)
    d = torch.randn(m, size, generator=generator)
    d[:n] += q
    return tuple(x.to(device, dtype).requires_grad_() for x in (q, d))


def step(loss, q, d, *args, **options):
    """The loss and the gradients of both."""
    value = loss(q, d, *args, **options)
    return value.detach(), *torch.autograd.grad(value, (q, d))


both = functools.partial(eager_fn, symmetric=True)


def labels_of(n, m, device, picks=2):
    """Several positives, of some queries fewer or none."""
    found = torch.stack([torch.arange(n), torch.arange(n) + m // 2], 1) % m
    found[::5, 1], found[::7] = -100, -100
    return found[:, :picks].to(device)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"margin": 0.2},
        {"margin": 0.2, "relative_margin": True},
        {"margin": -0.3, "ids": True},
        {"guide": True},
        {"guide": True, "margin": 0.1, "chunk_rows": 7},
        {"ids": True, "chunk_rows": 1},
    ],
    ids=str,
)
def test_what_is_left_out(options, several, device):
    q, d = pair(device=device)
    options = dict(options)
    rows = options.pop("chunk_rows", None)
    if options.pop("ids", None):
        options["ids"] = tuple(torch.arange(len(x), device=device) % 11 for x in (q, d))
    if options.pop("guide", None):
        options["guide"] = tuple(x.detach() for x in pair(size=9, device=device, seed=5))
    labels = labels_of(len(q), len(d), device) if several else None
    got = step(tigon.contrastive_loss, q, d, labels, symmetric=True, chunk_rows=rows, **options)
    if "guide" in options:
        options["guide"] = tuple(x.double() for x in options["guide"])
    options["q_ids"], options["d_ids"] = options.pop("ids", (None, None))
    doubles = [x.detach().double().requires_grad_() for x in (q, d)]
    want = step(both, *doubles, labels, temperature=0.05, **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_from_run_to_run_and_chunks_agree(dtype, device):
    q, d = pair(300, 411, 40, device, dtype)
    options = {"symmetric": True, "margin": 0.5}
    first = step(tigon.contrastive_loss, q, d, **options)
    for a, b in zip(step(tigon.contrastive_loss, q, d, **options), first, strict=True):
        assert torch.equal(a, b)
    ulp = torch.finfo(dtype).eps
    for rows in (1, 127, 128, 299, 1000):
        for a, b in zip(step(tigon.contrastive_loss, q, d, chunk_rows=rows, **options), first, strict=True):
            # Similarities are as large as 1 / temperature; each of two chunkings has its roundings of them.
            largest = 2 * (1.0 if b.dim() == 0 else b.abs().max().item()) / 0.05
            torch.testing.assert_close(a, b, rtol=4 * ulp, atol=4 * ulp * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_similarities_far_apart(dtype, device):
    """Exponentials relative to one similarity of a tile would lose those of a whole column."""
    q, d = pair(130, 300, 40, device, dtype)
    with torch.no_grad():
        q[7], d[:9] = 0.0, -q[8]
        q[7, 0] = d[5, 0] = 1.0
        q[:, 1] = d[:, 1] = 0.0
    options = {"temperature": 0.004, "symmetric": True}
    want = step(both, q.double(), d.double(), temperature=0.004)
    eager = step(both, q, d, temperature=0.004)
    for got, of_eager, exact in zip(step(tigon.contrastive_loss, q, d, **options), eager, want, strict=True):
        error, bound = (got - exact).norm(), (of_eager - exact).norm()
        assert error <= 2 * bound + 4 * torch.finfo(dtype).eps * exact.norm()


def test_gradient_of_the_temperature(device):
    q, d = pair(device=device)
    temperature = torch.tensor(0.3, device=device, requires_grad=True)
    tigon.contrastive_loss(q, d, temperature=temperature, symmetric=True).backward()
    exact = temperature.detach().double().requires_grad_()
    both(q.detach().double(), d.detach().double(), temperature=exact).backward()
    torch.testing.assert_close(temperature.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_of_the_temperatures_gradient(dtype, symmetric, device):
    """It is a sum of differences: over many draws no worse than eager's, which sums them before rounding."""
    errors = []
    for seed in range(12):
        q, d = pair(300, 300, 256, device, dtype, seed)

        def slope(loss, q, d):
            q, d = (x.detach().requires_grad_() for x in (q, d))
            temperature = torch.tensor(0.05, device=device, requires_grad=True)
            loss(q, d, temperature=temperature).backward()
            return temperature.grad.double()

        ours, formula = (
            functools.partial(f, symmetric=symmetric) for f in (tigon.contrastive_loss, eager_fn)
        )
        exact = slope(formula, q.double(), d.double())
        errors.append([(slope(loss, q, d) - exact) / exact for loss in (ours, formula)])
    ours, eager = torch.tensor(errors).pow(2).mean(0).sqrt()
    assert ours <= 2 * eager


@pytest.mark.parametrize("margin", [None, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_document_that_equals_the_positive_counts(dtype, margin, device):
    q, d = pair(40, 40, 96, device, dtype)
    g = [x.detach().float() for x in pair(40, 40, 70, device, seed=5)]
    options = {"margin": margin} if margin is not None else {"guide": g}

    def twice(x):
        return torch.cat([x, x])

    if "guide" in options:
        options["guide"] = g[0], twice(g[1])
    got = tigon.contrastive_loss(q, twice(d), reduction="none", temperature=1e5, **options)
    # Nothing counts but what is as similar or less: at this temperature the loss tells how many.
    t = plain_similarities(*(g if margin is None else (q.float(), d.float())))
    count = 2 * (t <= t.diagonal()[:, None] + 1e-6).sum(1)
    assert (got.exp().round() - count).abs().sum() <= (0 if margin is None else 6)  # q . d is rounded


def plain_similarities(q, d):
    return F.normalize(q.detach(), dim=-1) @ F.normalize(d.detach(), dim=-1).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_guide_has_its_own_dtype(dtype, device):
    q, d = pair(64, 90, 40, device, torch.bfloat16)
    guide = [x.detach().to(dtype) for x in pair(64, 90, 96, device, seed=5)]
    got = tigon.contrastive_loss(q, d, guide=guide, margin=0.1, reduction="none")
    doubles = [x.detach().double() for x in (q, d)]
    want = tigon.contrastive_loss(*doubles, guide=[x.double() for x in guide], margin=0.1, reduction="none")
    error = (got.double() - want).abs()
    # A pair within rounding of the limit may count here and not there.
    assert error.median() < 0.05 and (error > 0.3).sum() <= (0 if dtype.itemsize > 2 else 6)


@pytest.mark.parametrize("symmetric", [False, True])
def test_no_matrix_of_similarities(symmetric):
    n = 3000
    q, d = pair(n, n, 16)

    def call():
        q.grad = d.grad = None
        tigon.contrastive_loss(q, d, symmetric=symmetric, chunk_rows=100, margin=0.1).backward()

    call()
    assert max(itertools.accumulate(allocations(call))) < n * n  # a quarter of the matrix


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_deterministic_rows_between_vectors(dtype, device):
    """Their gradient is a copy whose rows lie apart, and of several chunks it is rounded at the end."""
    q, d = pair(20, 30, 12, device, dtype)
    options = {"margin": 0.2, "chunk_rows": 7}
    want = step(tigon.contrastive_loss, q, d, **options)
    with tigon.deterministic():
        got = step(tigon.contrastive_loss, q, d, **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    "temperature, chunk_rows, size",
    [
        (0.05, None, 72),
        (0.05, 128, 72),
        (0.05, 131, 72),
        (0.017, None, 72),
        (0.05, None, 1032),
        (0.05, 128, 1032),
    ],
)
def test_a_temperature_of_python_and_a_tensor(symmetric, temperature, chunk_rows, size, device):
    """On a GPU of our own matmuls one operator has the loss of the first, in bfloat16."""
    q, d = (x.detach()[:, 3:] for x in pair(300, 512, size + 3, device, torch.bfloat16))
    if temperature < 0.05:
        d[: len(q)] -= 0.75 * q  # many pairs count: a loss of one has the luck of one rounding of z
    weight = torch.rand(len(q), device=device)

    def of_copies(loss, dtype=torch.bfloat16, **options):
        return step(loss, *(x.to(dtype).requires_grad_() for x in (q, d)), **options)

    options = {"symmetric": symmetric, "weight": weight, "reduction": "sum", "chunk_rows": chunk_rows}
    want, eager = (
        of_copies(eager_fn, dtype, temperature=temperature, **options)
        for dtype in (torch.float64, torch.bfloat16)
    )
    for given in (temperature, torch.tensor(temperature, device=device)):
        got = of_copies(tigon.contrastive_loss, temperature=given, **options)
        with torch.no_grad():
            alone = tigon.contrastive_loss(q, d, temperature=given, **options)
        torch.testing.assert_close(alone, got[0])
        for ours, of_eager, exact in zip(got, eager, want, strict=True):
            error, bound = (ours - exact).norm(), (of_eager - exact).norm()
            assert error <= 2 * bound + torch.finfo(torch.bfloat16).eps * exact.norm()


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_side_is_frozen(frozen, device):
    pairs = pair(64, 80, 40, device, torch.bfloat16)
    whole = step(tigon.contrastive_loss, *pairs)[1 + (1 - frozen)]
    pairs[frozen].requires_grad_(False)
    tigon.contrastive_loss(*pairs).backward()
    assert pairs[frozen].grad is None and torch.equal(pairs[1 - frozen].grad, whole)


def test_all_masked(device):
    q, d = pair(device=device)
    labels = torch.full((len(q),), -100, device=device)
    assert tigon.contrastive_loss(q, d, labels, symmetric=True).isnan()


def test_strided_rows_are_those_of_copies(device):
    q, d = pair(size=48, device=device)
    views = q.detach()[:, 3:43], d.detach()[:, 1:41]
    copies = [x.detach().clone().requires_grad_() for x in views]
    with tigon.deterministic():  # otherwise a matmul's kernel goes by its operands' strides
        got = step(tigon.contrastive_loss, *(x.requires_grad_() for x in views), symmetric=True)
        want = step(tigon.contrastive_loss, *copies, symmetric=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def call(**changes):
    """Arguments, changed; labels where given."""
    q, d = pair()
    given = {"q": q, "d": d} | changes
    return tigon.contrastive_loss(**given)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": torch.zeros(3)}, r"q must be \[n, H\]"),
        ({"d": torch.zeros(4, 7)}, r"d must be \[m, 24\] with m > 0"),
        ({"d": torch.zeros(0, 24)}, r"d must be \[m, 24\] with m > 0"),
        ({"d": torch.zeros(53, 24, dtype=torch.float16)}, "d must be torch.float32, got torch.float16"),
        ({"d": torch.zeros(4, 24)}, "at least q's 37 rows without labels, got 4"),
        ({"ids": torch.zeros(4)}, "ids must be a pair of tensors"),
        ({"ids": (torch.zeros(4), torch.zeros(4))}, "q_ids must be an int64 or int32 tensor"),
        ({"ids": (torch.arange(4), torch.arange(4))}, "ids must be of 37 queries and 53 documents"),
        ({"sizes": 8}, "sizes must be a tuple of numbers"),
        ({"guide": (torch.zeros(37, 2), torch.zeros(53, 3))}, "guide must be of 37 queries"),
        ({"sizes": [25]}, r"sizes must be in \[1, 24\], got 25"),
        ({"sizes": [8], "size_weights": [1, 2]}, "size_weights must have one number for each of 1 sizes"),
    ],
)
def test_bad_calls(changes, message):
    with pytest.raises(tigon.Error, match=message):
        call(**changes)
