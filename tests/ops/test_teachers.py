"""Teachers and labels that cannot be what they are given for; what no kernel is there to see is NaN."""

import pytest
import torch

import tigon

ROWS, H, V = 6, 16, 64
HIDDEN, WEIGHT = torch.randn(ROWS, H), torch.randn(V, H)
DIVERGENCES = {name: getattr(tigon, name) for name in ("linear_kl_div", "linear_jsd", "linear_tvd")}
every_divergence = pytest.mark.parametrize("op", DIVERGENCES)


@every_divergence
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [H, 24, 3 * V])
def test_hidden_states_are_no_logits(op, dtype, columns):
    """Without their weight they were logits cut to as many classes as they have columns."""
    states = torch.randn(ROWS, columns, dtype=dtype)
    with pytest.raises(
        tigon.Error, match=rf"^\[{op}\] teacher must be logits of about weight's 64 classes, or"
    ):
        DIVERGENCES[op](HIDDEN.to(dtype), WEIGHT.to(dtype), states)


@every_divergence
def test_padded_logits_are_logits(op):
    for columns in (V - 3, V, V + 5):
        assert DIVERGENCES[op](HIDDEN, WEIGHT, torch.randn(ROWS, columns)).isfinite()


@every_divergence
@pytest.mark.parametrize("hard", [0.0, 0.5])
def test_lists_that_cannot_be(op, hard):
    indices, log_prob = torch.tensor([[1, 2, 3]] * ROWS), torch.full((ROWS, 3), -2.0)
    for teacher, message in (
        ((indices * 0 + 1, log_prob), "teacher indices must be different classes in each row, got 1 twice"),
        ((indices + V, log_prob), r"teacher indices must be in \[0, 64\), got 65"),
        ((indices, -log_prob), "teacher log_prob must be log-probabilities, got some of probability 22"),
    ):
        with pytest.raises(tigon.Error, match=rf"^\[{op}\] {message}"):
            DIVERGENCES[op](HIDDEN, WEIGHT, teacher, labels=torch.arange(ROWS), hard=hard)
    not_there = log_prob.clone()
    not_there[:, 2] = -torch.inf  # is no candidate, whatever its class
    indices[:, 2] = 2
    assert DIVERGENCES[op](HIDDEN, WEIGHT, (indices, not_there)).isfinite()


@pytest.mark.parametrize("wrong", [4, -1, -7])
@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"ids": (torch.arange(4), torch.arange(4))}])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_contrastive_labels(wrong, options, reduction):
    """Counted as no positive, they were: an error on the CPU, NaN where nobody looks."""
    q, labels = torch.randn(4, 8), torch.tensor([0, wrong, -100, 1])
    with pytest.raises(
        tigon.Error, match=rf"^\[contrastive_loss\] labels must be in \[0, 4\) or -100.*{wrong}"
    ):
        tigon.contrastive_loss(q, q, labels, reduction=reduction, **options)
    if options:
        loss = torch.func.grad_and_value(lambda q: tigon.contrastive_loss(q, q, labels, **options))
        assert loss(q)[1].isnan()


def test_a_draft_without_a_class_of_the_teacher():
    """A finite loss had NaN gradients beside it."""
    h, w, teacher = torch.randn(5, 8), torch.randn(11, 8), (torch.randn(5, 8), torch.randn(30, 8))
    nothing = torch.full((11,), -1)
    for loss in ("ce", "kl", "hard", "tv", "lk"):
        with pytest.raises(tigon.Error, match="draft_ids must hold at least one of the teacher's classes"):
            tigon.drafter_loss(h, w, teacher, nothing, loss=loss, mask_outside=False)
        value = torch.func.grad_and_value(
            lambda h, loss=loss: tigon.drafter_loss(h, w, teacher, nothing, loss=loss, mask_outside=False)
        )(h)[1]
        assert value.isnan()
