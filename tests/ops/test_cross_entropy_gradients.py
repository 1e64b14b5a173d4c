"""Gradients of the loss of given logits: in place, called twice, odd upstreams, hooks."""

import itertools

import pytest
import torch
from checks import same_bits
from test_cross_entropy import _all, _inputs

import tigon

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v", [40, 4101])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothed"])
def test_in_place(options, v, dtype, device):
    logits, target = _inputs(12, v, dtype=dtype, device=device)
    views = {
        "whole": lambda x: x * 1,
        "rows": lambda x: torch.cat((x, x.detach()), 1)[:, :v],
        "3-d": lambda x: (x * 1).view(3, 4, -1),
    }
    for upstream, view in itertools.product((None, torch.tensor(0.3, device=device)), views.values()):
        results = []  # of the same layout: on a GPU the alignment of a row decides which thread adds what
        for inplace in (False, True):
            leaf = logits.detach().requires_grad_()
            given = view(leaf)
            labels = target.view(given.shape[:-1])
            loss = tigon.cross_entropy(given, labels, inplace=inplace, **options)
            results.append((loss, torch.autograd.grad(loss, leaf, upstream)[0]))
        want, (loss, grad) = results
        assert same_bits(loss, want[0]) and same_bits(grad, want[1])
        assert same_bits(given.detach().reshape(12, v), want[1])


def test_in_place_only_where_a_gradient_is_needed(device):
    logits, target = _inputs(6, 40, device=device)
    before = logits.detach().clone()
    with torch.no_grad():
        tigon.cross_entropy(logits, target, inplace=True)
    tigon.cross_entropy(logits.detach(), target, inplace=True)
    tigon.cross_entropy(logits * 1, target, inplace=True, reduction="none").sum().backward()
    assert torch.equal(logits, before)


def test_touching_the_kept_gradient_is_noticed(device):
    leaf, target = _inputs(6, 40, device=device)
    logits = leaf * 1
    loss = tigon.cross_entropy(logits, target, inplace=True)
    logits.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_backward_twice(inplace, device):
    """A backward that keeps its graph hands out a copy; the last one hands the kept gradient out."""
    leaf, target = _inputs(6, 40, device=device)
    loss = tigon.cross_entropy(leaf * 1, target, inplace=inplace)
    doubled = 2 * loss
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    kept = first.clone()
    (twice,) = torch.autograd.grad(doubled, leaf, retain_graph=True)
    assert same_bits(twice, 2 * kept)
    assert same_bits(torch.autograd.grad(loss, leaf)[0], kept) and same_bits(first, kept)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, leaf)


def test_backward_twice_of_rows(device):
    leaf, target = _inputs(6, 40, device=device)
    loss = tigon.cross_entropy(leaf, target, reduction="none")
    first = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0]
    second = torch.autograd.grad(loss.sum(), leaf)[0]
    assert same_bits(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_upstream_gradients(dtype, device):
    logits, target = _inputs(6, 40, dtype=dtype, device=device)
    one = torch.randn(1, device=device)
    strided = torch.randn(12, device=device)[::2]
    for upstream in (one.expand(6), strided):
        got = _all(tigon.cross_entropy, logits, target, upstream, reduction="none")
        want = _all(tigon.cross_entropy, logits, target, upstream.contiguous(), reduction="none")
        assert same_bits(got[1], want[1])
    # A scalar: 1 leaves the kept gradient as it is, anything else scales it with one more rounding.
    _, unit = _all(tigon.cross_entropy, logits, target)
    for factor in (0.0, -3.0, 0.37, NAN):
        _, grad = _all(tigon.cross_entropy, logits, target, torch.tensor(factor, device=device))
        assert same_bits(grad.nan_to_num(7), (unit.float() * factor).to(dtype).nan_to_num(7))


def test_hooks_on_saved_tensors_and_checkpoint(device):
    from torch.utils.checkpoint import checkpoint

    leaf, target = _inputs(6, 40, device=device)
    _, want = _all(tigon.cross_entropy, leaf, target, torch.tensor(0.5, device=device))
    for inplace in (False, True):
        with torch.autograd.graph.save_on_cpu():
            loss = tigon.cross_entropy(leaf * 1, target, inplace=inplace)
        assert same_bits(torch.autograd.grad(0.5 * loss, leaf)[0], want)

        def head(x, inplace=inplace):
            return tigon.cross_entropy(x * 1, target, inplace=inplace)

        loss = checkpoint(head, leaf, use_reentrant=False)
        assert same_bits(torch.autograd.grad(0.5 * loss, leaf)[0], want)


def test_denominators(device):
    logits, target = _inputs(6, 40, device=device)
    want = _all(tigon.cross_entropy, logits, target, denominator=5)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.float16):
        for where in {"cpu", device}:
            for shape in ((), (1,)):
                divisor = torch.full(shape, 5, dtype=dtype, device=where)
                got = _all(tigon.cross_entropy, logits, target, denominator=divisor)
                assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
