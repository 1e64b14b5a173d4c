"""The rows of tigon.parallel, all shards in one process: losses and gradients on every device."""

import functools
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from checks import check_close, same_bits

import tigon
from conftest import poisoned
from tigon.ops.agreement import Shards
from tigon.parallel.rows import NUMBERS, LabelFormula, make_rows

ROWS = 13
COLUMNS = {  # of every shard
    "small": (40, 0, 17),
    "vectors": (1024, 1024),
    "odd": (4001, 4099),
    "long": (40000, 36001),
    "longest": (600011, 9),
}
OPTIONS = {
    "plain": {},
    "rows": {"z_loss": 0.02, "class_weight": True},
    "general": {"label_smoothing": 0.1, "softcap": 6.0, "logit_scale": 1.2, "temperature": 0.8, "bias": True},
    "capped": {"softcap": 6.0, "logit_scale": 1.2, "temperature": 0.8, "z_loss": 0.02, "class_weight": True},
    "entropy": {"logit_scale": 1.2, "entropy": True},
    "capped_entropy": {"softcap": 6.0, "class_weight": True, "entropy": True},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "class_weight": True, "bias": True, "entropy": True},
}
IN_ONE_PASS = {
    "plain": {},
    "scaled": {"logit_scale": 1.2, "temperature": 0.8, "class_weight": True},
    "biased": {"bias": True},
}


def problem(columns, dtype, device):
    g = torch.Generator().manual_seed(3)
    vocab = sum(columns)
    target = torch.randint(0, vocab, (ROWS,), generator=g)
    target[2], target[5] = -100, vocab - 1
    logits = 3 * torch.randn(ROWS, vocab, generator=g)
    logits[7, target[7]] = 30.0  # a confident row
    p = {"logits": logits.to(dtype), "bias": torch.randn(vocab, generator=g), "target": target}
    p |= {"class_weight": torch.rand(vocab, generator=g) + 0.5, "upstream": torch.randn(ROWS, generator=g)}
    p |= {"entropy_grad": torch.randn(ROWS, generator=g)}
    return {name: t.to(device) for name, t in p.items()}


def plain(p, options, dtype):
    """Losses, log-probabilities, lse, entropies, and the gradient of the logits."""
    logits = p["logits"].detach().to(dtype or p["logits"].dtype).requires_grad_()
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options.get("bias"):
        z = z + p["bias"].to(z.dtype)
    z = z * options.get("logit_scale", 1.0)
    if "softcap" in options:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    z = z / options.get("temperature", 1.0)
    weight = p["class_weight"].to(z.dtype) if options.get("class_weight") else None
    smoothing = options.get("label_smoothing", 0.0)
    rows = F.cross_entropy(z, p["target"], weight=weight, label_smoothing=smoothing, reduction="none")
    counts = p["target"] != -100
    lse = z.logsumexp(-1)
    rows = rows + torch.where(counts, options.get("z_loss", 0.0) * lse.square(), 0.0)
    log_p = z.log_softmax(-1)
    entropy = torch.where(counts, -(log_p.exp() * log_p).sum(-1), 0.0)
    total = (rows * p["upstream"].to(z.dtype)).sum()
    if options.get("entropy"):
        total = total + (entropy * p["entropy_grad"].to(z.dtype)).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    picked = log_p.gather(-1, torch.where(counts, p["target"], 0)[:, None])[:, 0]
    numbers = [rows, torch.where(counts, picked, 0.0), torch.where(counts, lse, 0.0), entropy]
    return [t.detach() for t in numbers], gradient, z.detach().argmax(-1)


def sharded(p, options, columns, in_one_pass=False, argmax=True, known=False):
    """Every shard's numbers, predicted classes and gradient, of logits that begin anywhere.

    ``in_one_pass``: the gradient is formed with the statistics, in place; it is multiplied out in float64.
    ``known``: the gradient gets the statistics, and overwrites the logits if it is "in place".
    """
    vocab, device = sum(columns), p["logits"].device
    firsts = tuple(accumulate((0, *columns[:-1])))
    numbers_of = {k: v for k, v in options.items() if k in LabelFormula._fields}
    weight = p["class_weight"] if options.get("class_weight") else None
    calls, parts, pieces = [], [], []
    for rank, (first, n) in enumerate(zip(firsts, columns, strict=True)):
        shards = Shards(None, rank, firsts, tuple(columns), max(columns), vocab)
        bias = p["bias"][first : first + n] if options.get("bias") else None
        calls.append(
            make_rows(
                shards, LabelFormula(**numbers_of), weight, device, entropy=argmax, predicted=argmax
            )._replace(bias=bias)
        )
        pieces.append(p["logits"][:, first : first + n])
        if in_one_pass:
            pieces[-1] = pieces[-1].clone(memory_format=torch.preserve_format)
        parts.append(calls[-1].statistics(pieces[-1], p["target"], None, pieces[-1] if in_one_pass else None))
    results = []
    for rows, logits, own in zip(calls, pieces, parts, strict=True):
        numbers, predicted = rows.combined(torch.cat(parts), p["target"], None)
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        if known == "in place":
            dlogits = logits = logits.clone(memory_format=torch.preserve_format)
        if in_one_pass and logits.shape[1]:
            factor = rows.renormalize(logits, p["target"], numbers, p["upstream"])
            dlogits = logits.double() * factor.double()[:, None]
        elif logits.shape[1]:
            entropy_grad = (p["entropy_grad"], numbers[4]) if options.get("entropy") else (None, None)
            given = (*own[:2], numbers[NUMBERS.index("log_prob")]) if known else None
            log_mass = numbers[NUMBERS.index("log_mass")]
            rows.gradient(logits, dlogits, p["target"], log_mass, p["upstream"], *entropy_grad, known=given)
        results.append((numbers, predicted, dlogits))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_shards_of_rows(device, columns, options, dtype):
    if columns in ("long", "longest") and device == "cpu" and dtype != torch.bfloat16:
        pytest.skip("long rows on the CPU: one dtype")
    columns, options = COLUMNS[columns], OPTIONS[options]
    p = problem(columns, dtype, device)
    with poisoned():
        got = sharded(p, options, columns)
    for one, other in zip(got, sharded(p, options, columns), strict=True):
        assert all(map(same_bits, one, other)), "two runs differ"
    eager, eager_grads, predicted = plain(p, options, None)
    exact, exact_grads, _ = plain(p, options, torch.float64)
    for known in (True, "in place"):
        with poisoned():
            gradients = [g for *_, g in sharded(p, options, columns, known=known)]
        check_close("dlogits of known statistics", torch.cat(gradients, 1), eager_grads, exact_grads)
    counts = p["target"] != -100
    for numbers, classes, _ in got:
        assert all(same_bits(a, b) for a, b in zip(numbers[:5], got[0][0][:5], strict=True))
        assert torch.equal(classes, torch.where(counts, predicted, -1))
        for name, at, e, x in zip(
            ("loss", "log_prob", "lse", "entropy"), (0, 2, 3, 4), eager, exact, strict=True
        ):
            check_close(name, numbers[at], e.float(), x)
    check_close("dlogits", torch.cat([g for *_, g in got], 1), eager_grads, exact_grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", IN_ONE_PASS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_statistics_and_gradient_in_one_pass(device, columns, options, dtype):
    if columns in ("long", "longest") and device == "cpu" and dtype != torch.bfloat16:
        pytest.skip("long rows on the CPU: one dtype")
    columns, options = COLUMNS[columns], IN_ONE_PASS[options]
    p = problem(columns, dtype, device)
    p["logits"][9, : columns[0]] += 200.0  # another shard has no share of the row, not even of its label
    p["target"][9] = sum(columns) - 1
    eager, eager_grads, _ = plain(p, options, None)
    exact, exact_grads, _ = plain(p, options, torch.float64)
    for argmax in (False, True):
        with poisoned():
            got = sharded(p, options, columns, True, argmax)
        for numbers, *_ in got:
            check_close("loss", numbers[0], eager[0].float(), exact[0])
        found = torch.cat([g for *_, g in got], 1)
        check_close("dlogits", found.to(dtype), eager_grads, exact_grads)
        # Row by row as exact as two passes: of a confident row, too.
        sizes = exact_grads.norm(dim=1)
        two = torch.cat([g for *_, g in sharded(p, options, columns, False, argmax)], 1)
        one, two = ((g.double() - exact_grads).norm(dim=1) for g in (found, two))
        # Stored elements, the factor and a shard's 1 / s are rounded by themselves here, where two passes
        # round their product. In float32 that is no longer small beside two passes of little error. A pass
        # for the argmax rounds z before it subtracts the maximum, as PyTorch does; the gradient's does not.
        roundings = 3 if dtype == torch.float32 else 1
        if argmax and dtype == torch.float32:
            z = p["logits"] * options.get("logit_scale", 1.0) / options.get("temperature", 1.0)
            roundings = roundings + z.abs().amax(1) / 2
        assert (one <= 2 * two + roundings * torch.finfo(dtype).eps * sizes).all()


@pytest.mark.parametrize("way", [{}, {"in_one_pass": True}, {"known": True}], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_shard_at_minus_infinity(device, options, way):
    """It has no share of the row; a label in it has an infinite loss and the gradient of p = 0."""
    columns, left = (40, 17), ("label_smoothing", "z_loss", "entropy", "softcap")
    options = {k: v for k, v in OPTIONS[options].items() if k not in left}
    p = problem(columns, torch.float32, device)
    p["logits"][:, :40] = -torch.inf
    p["target"][:] = torch.arange(ROWS) % 17 + 40
    p["target"][3] = 5
    got = sharded(p, options, columns, **way)
    exact, exact_grads, _ = plain(p, options, torch.float64)
    for numbers, *_ in got:
        torch.testing.assert_close(numbers[0].double(), exact[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(numbers[2].double(), exact[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([g for *_, g in got], 1).double(), exact_grads, rtol=1e-5, atol=1e-6)


def test_labels_of_no_class(device):
    columns = (40, 17)
    p = problem(columns, torch.float32, device)
    p["target"][4], p["target"][6] = 57, -1
    broken = torch.zeros(ROWS, dtype=torch.bool, device=device)
    broken[4] = broken[6] = True
    calls = [(options, {"known": known}) for options in OPTIONS.values() for known in (False, True)]
    for options, way in (*calls, ({}, {"in_one_pass": True})):
        for numbers, _, gradient in sharded(p, options, columns, **way):
            assert torch.equal(numbers[0].isnan(), broken) and torch.equal(numbers[2].isnan(), broken)
            assert torch.equal(gradient.isnan().all(1), broken)
            assert torch.equal(gradient.isnan().any(1), broken)


def test_losses_of_rows_change_in_place(one_process):
    """As those of `tigon.cross_entropy` do, and the gradient is that of the changed losses."""
    logits, target = torch.randn(5, 11), torch.tensor([3, -100, 0, 10, 7])
    sharded_loss = functools.partial(tigon.parallel.cross_entropy, group=one_process, vocab=11)
    found = []
    for fn in (tigon.cross_entropy, sharded_loss):
        leaf = logits.clone().requires_grad_()
        loss = fn(leaf, target, reduction="none")
        loss.mul_(2.0)
        loss.sum().backward()
        found.append((loss.detach(), leaf.grad))
    for ours, whole in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, whole)
