"""Losses of rows: what they keep from forward to backward, what that costs, what it must not change."""

import functools

import pytest
import torch
from checks import same_bits
from heads import head_inputs, leaves_of
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import tigon
from tigon.ops.loss_head.linear_log_prob import reference

FN = tigon.linear_log_prob
LOSS = functools.partial(tigon.linear_cross_entropy, reduction="none")
BOTH = lambda *args, **options: sum(FN(*args, entropy=True, **options))  # noqa: E731
ROW = 64 * 4 / 2**20  # MiB of the logits of a row in float32, up to 64 classes
KEEPS = [None, 0, 5 * ROW, 1e6]


def _keep(keep_mb):
    """Options; with 5 * ROW one chunk of four rows is kept, and the others are computed again."""
    return {"keep_mb": keep_mb, "chunk_rows": 4 if keep_mb == 5 * ROW else None}


def _matmuls(step, least):
    """Matmuls of a step with at least so many multiplications."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        step()
    work = 0.0
    for event in prof.events():
        if event.name == "aten::mm":
            (m, k), (_, n), *_ = event.input_shapes
            work += m * k * n / least if m * k * n * 16 >= least else 0.0
    return work


@pytest.mark.parametrize("fn", [FN, LOSS, BOTH])
@pytest.mark.parametrize(
    "trained, keep_mb, matmuls",
    [
        ("", None, 1),
        ("x", None, 2),
        ("x", 0, 3),
        ("xw", None, 3),
        ("xw", 0, 4),
        ("w", None, 2),
        ("w", 0, 3),
        ("xw", 10 * ROW, 3.75),
        ("xab", None, 2),
        ("xb", None, 2),
        ("xw", 1e6, 3),
    ],
)
def test_number_of_matmuls(fn, trained, keep_mb, matmuls):
    """In units of rows * hidden size * vocabulary; the rank of the LoRA is too small to count."""
    rows, size, vocab = 40, 32, 64
    hidden, weight, target = (t.detach() for t in head_inputs(rows, size, vocab, masked=0.0))
    hidden.requires_grad_("x" in trained), weight.requires_grad_("w" in trained)
    options = {"keep_mb": keep_mb, "chunk_rows": 10 if matmuls == 3.75 else None}
    if "b" in trained:
        options["bias" if trained == "xb" else "lora"] = (
            torch.randn(vocab, requires_grad=True)
            if trained == "xb"
            else (torch.randn(1, size, requires_grad=True), torch.randn(vocab, 1, requires_grad=True), 1.0)
        )

    def step():
        result = fn(hidden, weight, target, **options)
        if result.requires_grad:
            result.sum().backward()

    if fn is BOTH and (trained, keep_mb) == ("x", None):
        matmuls = 4  # with a frozen head a gradient of the entropies computes all logits again
    assert _matmuls(step, rows * size * vocab) == pytest.approx(matmuls, abs=0.15)


@pytest.mark.parametrize(
    "options, saves",
    [
        ({}, False),
        ({"keep_mb": 0}, True),
        ({"keep_mb": 5 * ROW}, True),
        ({"keep_mb": 20 * ROW}, False),
        ({"chunk_rows": 5}, True),
        ({"chunk_rows": 12}, False),
        ({"entropy": True}, True),
    ],
    ids=str,
)
def test_when_the_weight_is_saved(options, saves):
    hidden, weight, target = head_inputs(masked=0.0)
    for frozen in (False, True):
        w = weight.detach().requires_grad_(not frozen)
        found = []
        with saved_tensors_hooks(lambda t, found=found: found.append(t) or t, lambda t: t):
            FN(hidden, w, target, **options)
        kept = any(t.numel() and t.data_ptr() == w.data_ptr() for t in found)
        whole = frozen and options.get("keep_mb") != 0 and "entropy" not in options
        assert kept == (saves and not whole)


@pytest.mark.parametrize("keep_mb", KEEPS, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fn", [FN, LOSS])
def test_a_second_backward(fn, frozen, keep_mb, device):
    hidden, weight, target = head_inputs(30, device=device)
    weight = weight.detach() if frozen else weight
    upstream = torch.randn(30, device=device)
    upstream[target == -100] = float("inf")  # of rows that do not count
    wrt = (hidden,) if frozen else (hidden, weight)
    result = fn(hidden, weight, target, **_keep(keep_mb))
    all_three = [
        torch.autograd.grad(result, wrt, upstream, retain_graph=retained) for retained in (True, True, False)
    ]
    for gradients in zip(*all_three, strict=True):
        assert all(same_bits(g, gradients[0]) and g.isfinite().all() for g in gradients)
    doubled = torch.autograd.grad(fn(hidden, weight, target, **_keep(keep_mb)), wrt, 2 * upstream)
    assert all(same_bits(d, 2 * g) for d, g in zip(doubled, all_three[0], strict=True))


@pytest.mark.parametrize("keep_mb", KEEPS, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("parts", ["entropy", "both", "apart"])
def test_a_late_gradient_of_the_entropies(parts, frozen, keep_mb, device):
    hidden, weight, target = head_inputs(14, device=device)
    weight = weight.detach() if frozen else weight
    wrt = (hidden,) if frozen else (hidden, weight)
    results = []
    for fn in (FN, reference):
        log_prob, entropy = fn(hidden, weight, target, entropy=True, **_keep(keep_mb))
        if parts == "apart":
            first = torch.autograd.grad(log_prob.sum(), wrt, retain_graph=True)
            second = torch.autograd.grad(entropy.sum(), wrt)
            results.append((*first, *second))
        else:
            total = entropy.square().sum() + (3 * log_prob.sum() if parts == "both" else 0)
            results.append(torch.autograd.grad(total, wrt))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"bias": True}, {"valid_rows": True}], ids=str)
def test_gradients_from_kept_logits(options, dtype, device):
    """Bit for bit those of logits that are computed again, in the memory of what was kept or not."""
    hidden, weight, target = head_inputs(30, dtype=dtype, device=device)
    if "bias" in options:
        options = {"bias": torch.linspace(-1, 1, len(weight), device=device, requires_grad=True)}
    if "valid_rows" in options:
        options = {"valid_rows": int((target != -100).sum())}
    leaves = leaves_of([hidden, weight, options])

    def gradients(keep_mb, retain_graph):
        found = FN(hidden, weight, target, entropy=True, keep_mb=keep_mb, **options)
        return torch.autograd.grad(found, leaves, [f.detach() for f in found], retain_graph=retain_graph)

    want = gradients(0, False)
    for keep_mb in (None, 1e6):
        for retained in (False, True):
            assert all(map(same_bits, gradients(keep_mb, retained), want))


@pytest.mark.parametrize("keep_mb", KEEPS, ids=str)
@pytest.mark.parametrize("trained", ["x", "w", "xw"])
@pytest.mark.parametrize("rows", [0, 6])
def test_nothing_to_do(rows, trained, keep_mb, device):
    hidden, weight, target = head_inputs(rows, device=device, masked=1.0)
    hidden = hidden.detach().requires_grad_("x" in trained)
    weight = weight.detach().requires_grad_("w" in trained)
    for valid_rows in (None, 0):
        log_prob = FN(hidden, weight, target, **_keep(keep_mb), valid_rows=valid_rows)
        gradients = torch.autograd.grad(log_prob.sum(), leaves_of((hidden, weight)))
        assert all(torch.count_nonzero(t) == 0 for t in (log_prob, *gradients))


def test_late_scaling_keeps_small_gradients_in_float16(device):
    """An upstream gradient that would leave float16's range in the gradient of the logits."""
    hidden, weight, target = head_inputs(16, 8, 400, dtype=torch.float16, device=device, masked=0.0)
    with torch.no_grad():
        weight.mul_(30)
    factor = 2.0**-12
    (got,) = torch.autograd.grad(
        FN(hidden, weight.detach(), target), hidden, torch.full((16,), factor).to(device)
    )
    (one,) = torch.autograd.grad(FN(hidden, weight.detach(), target), hidden, torch.ones(16).to(device))
    assert same_bits(got, (one.float() * factor).half())
