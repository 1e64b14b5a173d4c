"""The reference route (float64, what has no kernel) keeps the contract of the kernels' route."""

import pytest
import torch
import torch.nn.functional as F

import tigon

HEADS = {
    "linear_cross_entropy": tigon.linear_cross_entropy,
    "linear_log_prob": tigon.linear_log_prob,
    "linear_loss": lambda *args, **options: tigon.linear_loss(*args, torch.neg, **options),
}
LABELS = torch.tensor([3, -100, 0, 10])


def _head(*, v=11, dtype=torch.float64):
    return torch.randn(4, 8, dtype=dtype, requires_grad=True), torch.randn(
        v, 8, dtype=dtype, requires_grad=True
    )


@pytest.mark.parametrize("name", HEADS)
def test_operands_of_a_head_in_other_dtypes(name):
    """Weight and bias are converted to the dtype of hidden; gradients come in their own."""
    hidden, weight = _head()
    narrow = weight.detach().float().requires_grad_()
    bias = torch.randn(11, requires_grad=True)
    want = HEADS[name](hidden, narrow.detach().double(), LABELS, bias=bias.detach().double())
    got = HEADS[name](hidden, narrow, LABELS, bias=bias)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
    assert [g.dtype for g in torch.autograd.grad(got.sum(), (narrow, bias))] == [torch.float32] * 2


def test_denominators_of_any_shape():
    """One element, any number of dimensions: the loss is a scalar, on both routes."""
    for dtype in (torch.float32, torch.float64):
        hidden, weight = (t.detach() for t in _head(dtype=dtype))
        rows = tigon.linear_cross_entropy(hidden, weight, LABELS, reduction="none")
        for denominator in (
            3.0,
            torch.tensor(3),
            torch.tensor([3.0]),
            torch.tensor([[3.0]], dtype=torch.float64),
        ):
            losses = [tigon.cross_entropy(hidden @ weight.t(), LABELS, denominator=denominator)]
            losses += [
                HEADS[n](hidden, weight, LABELS, denominator=denominator)
                for n in ("linear_cross_entropy", "linear_loss")
            ]
            losses += [
                tigon.linear_cross_entropy(
                    hidden, weight, LABELS, denominator=denominator, token_weight=torch.ones(4)
                )
            ]
            for loss in losses:
                assert loss.shape == ()
                torch.testing.assert_close(loss, rows.sum() / 3, rtol=1e-6, atol=0)
        with pytest.raises(tigon.Error, match="denominator must have one element, got 4"):
            tigon.cross_entropy(hidden, LABELS.clamp(max=7), denominator=hidden[:, 0])


def test_class_weights_are_widened():
    """Float32 class weights beside float64 logits: the mean divides by their sum in float64."""
    hidden, weight = (t.detach() for t in _head())
    class_weight, ones = torch.rand(11) + 0.1, torch.ones(4)
    got = tigon.linear_cross_entropy(hidden, weight, LABELS, class_weight=class_weight, token_weight=ones)
    want = F.cross_entropy(hidden @ weight.t(), LABELS, class_weight.double())
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.float64,) * 2, (torch.float32, torch.float64)]
)
def test_alpha_of_any_shape(shape, dtypes):
    """One element, any number of dimensions: the result has x's shape, alpha's gradient alpha's."""
    x, weight = torch.randn(4, 8, dtype=dtypes[0]), torch.randn(8, dtype=dtypes[1])
    alpha = torch.full(shape, 0.5, dtype=dtypes[0], requires_grad=True)
    y = tigon.dyt(x, alpha, weight)
    assert y.shape == x.shape
    torch.testing.assert_close(y.detach(), (torch.tanh(0.5 * x) * weight).to(x.dtype))
    assert torch.autograd.grad(y.sum(), alpha)[0].shape == shape


DIVERGENCES = {
    "kl": tigon.kl_div,
    "reverse": lambda *args, **options: tigon.kl_div(*args, reverse=True, **options),
    "jsd": lambda *args, **options: tigon.jsd(*args, beta=0.3, **options),
    "tvd": tigon.tvd,
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_class_that_is_excluded(name):
    """By the student, by the teacher or by both: gradients are numbers, and those of the kernels."""
    inf = torch.inf
    student = torch.tensor([[0.3, -inf, 1.0, -1.0], [0.1, 0.2, 0.4, -inf]], dtype=torch.float64)
    teacher = torch.tensor([[0.2, -inf, -inf, 0.4], [0.1, -inf, 0.2, -inf]], dtype=torch.float64)
    if name == "reverse":
        student, teacher = teacher, student
    found = []
    for dtype in (torch.float64, torch.float32):
        leaf = student.to(dtype).requires_grad_()
        loss = DIVERGENCES[name](leaf, teacher.to(dtype))
        found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    for exact, narrow in zip(*found, strict=True):
        assert exact.isfinite().all()
        torch.testing.assert_close(narrow.double(), exact.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_group_norm_of_no_elements(dtype):
    leaves = [torch.randn(s, dtype=dtype, requires_grad=True) for s in ((2, 4, 0, 3), 4, 4)]
    y = tigon.group_norm(leaves[0], 2, *leaves[1:])
    assert y.shape == leaves[0].shape
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), leaves))


@pytest.mark.parametrize("shape, dtype", [((2, 4, 3), torch.float64), ((0, 4, 3), torch.float32)])
def test_group_norm_with_a_bias_alone(shape, dtype):
    x, bias = torch.randn(shape, dtype=dtype), torch.randn(4, dtype=dtype, requires_grad=True)
    y = tigon.group_norm(x, 2, None, bias)
    want = F.group_norm(x, 2, torch.ones(4, dtype=dtype), bias)
    torch.testing.assert_close(y, want)
    (grad,) = torch.autograd.grad(y.sum(), bias)
    assert torch.equal(grad, torch.full_like(bias, shape[0] * shape[2]))
