"""Log-probabilities and entropies of a linear head, differentiable."""

import pytest
import torch
from checks import same_bits
from heads import compare, head_inputs

import tigon
from tigon.ops.loss_head.linear_log_prob import reference

FN = tigon.linear_log_prob


def test_ignored_rows_are_zero_with_zero_gradients(device):
    hidden, weight, target = head_inputs(30, device=device, masked=0.5)
    for valid in (None, int((target != -100).sum())):
        lp, entropy = FN(hidden, weight, target, entropy=True, valid_rows=valid)
        (dh,) = torch.autograd.grad(lp.sum() + entropy.sum(), hidden)
        ignored = target == -100
        assert all(torch.count_nonzero(x[ignored]) == 0 for x in (lp, entropy, dh))


def test_log_prob_of_sharp_distributions_is_exact(device):
    for p in (0.9, 0.99, 0.999, 0.9999, 1 - 1e-6):
        gap = torch.tensor(p).double().logit()
        weight = torch.tensor([[80.0 + float(gap)], [80.0]], device=device)
        hidden = torch.ones(1, 1, device=device, requires_grad=True)
        weight.requires_grad_()
        target = torch.zeros(1, dtype=torch.long, device=device)
        compare(
            FN, reference, (hidden, weight, target), {"entropy": True}, noise=2e-5
        )  # +-80 cancel in dhidden


@pytest.mark.parametrize(
    "scale, temperature, dtype",
    [
        (1e30, 1.0, torch.float32),
        (1.0, 1e-3, torch.float32),
        (1e-39, 1.0, torch.bfloat16),
        (1e-7, 1.0, torch.float16),
    ],
)
def test_extreme_operands(scale, temperature, dtype, device):
    """Huge logits, a temperature near 0, denormal hidden states: finite, and no probability above 1."""
    hidden, weight, target = head_inputs(12, 16, 29, device=device)
    hidden = (hidden.detach() * scale).to(dtype).requires_grad_()
    weight = weight.detach().to(dtype).requires_grad_()
    result = FN(hidden, weight, target, temperature=temperature)
    result.sum().backward()
    assert result.isfinite().all() and (result <= 0).all()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("ignored", [-100, 0, 39])
def test_labels_of_a_row(ignored, device):
    """Each of K labels has the log-probability that it has alone; the same label twice adds its gradients."""
    hidden, weight, _ = head_inputs(9, h=16, v=40, device=device)
    labels = torch.randint(1, 39, (9, 4), device=device)
    labels[:, 3] = labels[:, 0]
    labels[2, 1], labels[4] = ignored, ignored
    given = {"ignore_index": ignored}
    got = FN(hidden, weight, labels, **given)
    for k in range(4):
        alone = FN(hidden, weight, labels[:, k], **given)
        torch.testing.assert_close(got[:, k], alone, rtol=1e-6, atol=1e-6)
    assert same_bits(got[:, 0], got[:, 3])
    grads = torch.autograd.grad(got[:, [0, 3]].sum(), (hidden, weight))
    single = torch.autograd.grad(2 * FN(hidden, weight, labels[:, 0], **given).sum(), (hidden, weight))
    for a, b in zip(grads, single, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for count in (None, 8):
        again = FN(hidden, weight, labels, valid_rows=count, **given)
        assert same_bits(again, got)


def test_labels_of_confident_rows_are_exact(device):
    """A label of probability near 1 keeps its gradient, though its neighbours stand beside it."""
    gaps = torch.tensor([0.0, 8.0, 14.0, 30.0], device=device)
    weight = torch.cat((gaps.new_full((1,), 60.0), 60.0 - gaps[1:])).unsqueeze(1).requires_grad_()
    hidden = torch.ones(3, 1, device=device, requires_grad=True)
    labels = torch.tensor([[0, 1, 2], [0, 3, 3], [1, 2, 3]], device=device)
    grad = torch.tensor([[1.0, 0.5, -0.5], [1.0, 0.0, 0.0], [0.3, 0.2, 0.1]], device=device)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    got = FN(hidden, weight, labels)
    torch.testing.assert_close(got.double(), reference(*wide, labels), rtol=1e-6, atol=0)
    (mine,) = torch.autograd.grad(got, weight, grad)
    (exact,) = torch.autograd.grad(reference(*wide, labels), wide[1], grad.double())
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=0)


def test_bad_labels_of_a_row(device):
    hidden, weight, _ = head_inputs(6, h=16, v=40, device=device)
    labels = torch.randint(0, 40, (6, 3), device=device)
    labels[2, 1] = 40
    if device == "cpu":
        with pytest.raises(
            tigon.Error, match=r"target must be in \[0, 40\) or -100 \(ignored\), got 40 in row 2"
        ):
            FN(hidden, weight, labels)
        with pytest.raises(tigon.Error, match="valid_rows must be the number of labels"):
            FN(hidden, weight, labels.clamp(max=39), valid_rows=5)
    else:
        got = FN(hidden, weight, labels)
        (dh,) = torch.autograd.grad(got.sum(), hidden)
        for t in (got, dh):
            assert t[2].isnan().all() and t[[0, 1, 3, 4, 5]].isfinite().all()
        assert FN(hidden, weight, labels.clamp(max=39), valid_rows=5).isnan().all()
    for wrong in (labels[:5], labels[:, :0], labels.unsqueeze(0)):
        with pytest.raises(tigon.Error, match="target must be"):
            FN(hidden, weight, wrong)


def test_match_under_transforms():
    """Gradients are those of the call as it is."""
    hidden, weight, target = torch.randn(5, 8), torch.randn(11, 8), torch.arange(5)

    def loss(h, entropy=False):
        found = tigon.linear_log_prob(h, weight, target, match="vllm", entropy=entropy)
        return (found[0] - found[1] if entropy else found).sum()

    for entropy in (False, True):
        h = hidden.clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(h, entropy), h)
        assert torch.equal(torch.func.grad(loss)(hidden, entropy), want)
        rows = torch.func.vmap(
            torch.func.grad(lambda h, t: tigon.linear_log_prob(h[None], weight, t[None], match="vllm").sum())
        )(hidden, target)
        if not entropy:
            torch.testing.assert_close(rows, want)
