"""A weight that is a head and an embedding's table: the embedding's gradient is added to the head's."""

import pytest
import torch
import torch.nn.functional as F
from heads import run

import tigon
from tigon.ops.loss_head import tied

CLASSES, SIZE = 300, 32


@pytest.fixture
def step(device, monkeypatch):
    """A step of a small tied model; `step.added` counts additions to a head's gradient."""
    ids = torch.randint(0, CLASSES, (2, 40), device=device)
    ids[0, :20] = 7
    target = torch.randint(0, CLASSES, (2, 40), device=device)
    own = tied._add_rows

    def add(*args):
        call.added += 1
        own(*args)

    def call(weight, *, look=tied.lookup, loss=tigon.linear_cross_entropy, padding_idx=None, **options):
        hidden = look(ids, weight, padding_idx).tanh()
        return loss(hidden, weight, target, **options)

    call.added = 0
    monkeypatch.setattr(tied, "_add_rows", add)
    return call


def _weight(dtype, device):
    return torch.randn(CLASSES, SIZE, device=device).to(dtype).requires_grad_()


def _error(got, weight, step, times=1, **options):
    """Its error, as a multiple of that of PyTorch's embedding."""
    exact = weight.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(step(exact, look=F.embedding, **options), exact)
    (plain,) = torch.autograd.grad(step(weight, look=F.embedding, **options), weight)
    norms = [(g.double() - n * want).norm() / n for g, n in ((got, times), (plain, 1))]
    return float(norms[0] / norms[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 7}, {"reduction": "sum"}], ids=str)
def test_one_gradient_of_a_tied_weight(step, device, dtype, options):
    weight = _weight(dtype, device)
    for times in (1, 2):  # the second is accumulated
        step(weight, **options).backward()
        assert step.added == times
        assert _error(weight.grad, weight, step, times, **options) <= 1.3


def test_a_step_in_the_backward(step, device):
    """It comes after both uses, so its bits are those of a step after the backward."""
    one = _weight(torch.bfloat16, device)
    two = one.detach().clone().requires_grad_()
    plain, early = (tigon.optim.AdamW([w], moment_dtype="int8") for w in (one, two))
    tigon.optim.step_in_backward(early)
    for _ in range(2):
        step(one).backward()
        plain.step()
        plain.zero_grad()
        step(two).backward()
    assert step.added == 4 and torch.equal(one, two)


def test_a_gradient_that_others_see_is_not_written(step, device):
    weight = _weight(torch.float32, device)
    kept = []
    hook = weight.register_hook(lambda g: kept.append(g.clone()))
    step(weight).backward()
    hook.remove()
    assert step.added == 0 and _error(kept[0], weight, step) <= 1.3

    # A second use of the weight, a graph that is kept and differentiated, a gradient that a program holds
    weight.grad = None
    held = []
    returned = tied.returned

    def hold(w, g):
        held.append(g)
        returned(w, g)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tied, "returned", hold)
        step(weight).backward()
    assert step.added == 0 and _error(weight.grad, weight, step) <= 1.3
    weight.grad = None
    (step(weight) + (weight * weight).sum()).backward()
    (want,) = torch.autograd.grad(step(weight, look=F.embedding) + (weight * weight).sum(), weight)
    torch.testing.assert_close(weight.grad, want, rtol=1e-5, atol=1e-5)


def test_backward_passes_of_their_own(step, device):
    """A head whose backward has ended does not get the embedding's rows."""
    weight = _weight(torch.float32, device)
    ids = torch.arange(40, device=device)
    rows = tied.lookup(ids, weight, None)
    hidden = rows.detach().tanh().requires_grad_()
    tigon.linear_cross_entropy(hidden, weight, ids).backward()
    head = weight.grad.clone()
    seen = weight.grad
    weight.grad = None
    rows.backward(torch.ones_like(rows))
    assert step.added == 0
    assert torch.equal(seen, head)
    (want,) = run(lambda w: F.embedding(ids, w).sum(), (weight,), {}, [torch.tensor(1.0)])[1:]
    torch.testing.assert_close(weight.grad, want)
    loss = step(weight)
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (again,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(first, again)
    assert step.added == 2
