"""KL, JSD and TVD beyond the cases: refusals, limits, masks, in place, one backward, bits."""

import math

import pytest
import torch
from checks import check_close, refusals, refused, same_bits

import tigon
from tigon.ops.divergence import reference

OPS = {"kl_div": tigon.kl_div, "jsd": tigon.jsd, "tvd": tigon.tvd}


def _pair(*shape, device="cpu", dtype=torch.float32, scale=2.0):
    student, teacher = ((scale * torch.randn(shape, device=device)).to(dtype) for _ in range(2))
    return student.requires_grad_(), teacher


BAD = """
jsd(s, t.requires_grad_()) -> [jsd] teacher must not require grad
jsd(s[:, :0], t[:, :0]) -> student must have at least one column
tvd(t[0, 0], t[0, 0]) -> student must have at least one dimension
jsd(s, t, beta=1.5) -> beta must be in [0, 1], got 1.5
kl_div(s, t, temperature=2.0, log_probs=True) -> must be 1 with log_probs, got 2
tvd(s, t, inplace=True) -> student must not be a leaf
"""


@pytest.mark.parametrize("call, message", refusals(BAD))
def test_refusals(call, message):
    student, teacher = _pair(4, 8)
    refused(call, message, s=student, t=teacher)


def test_raw_refusals():
    student, teacher = _pair(4, 8)
    with pytest.raises(RuntimeError, match=r"beta must be in \(0, 1\), got 1"):
        torch.ops.tigon.divergence_fwd(student.detach(), teacher, None, 1, 2, 1.0, 1.0, False, -100, False)
    with pytest.raises(RuntimeError, match="kind must be one of 0 to 3, got 7"):
        torch.ops.tigon.divergence_fwd(student.detach(), teacher, None, 1, 7, 0.5, 1.0, False, -100, False)


@pytest.mark.parametrize("beta, reverse", [(0.0, False), (1.0, True)])
def test_limits_of_jsd_are_the_two_kls(beta, reverse, device):
    student, teacher = _pair(6, 50, device=device)
    assert same_bits(tigon.jsd(student, teacher, beta=beta), tigon.kl_div(student, teacher, reverse=reverse))
    small = abs(beta - 1e-4)  # and of the divergence over beta, or 1 - beta
    near = tigon.jsd(student.double(), teacher.double(), beta=small) / 1e-4
    torch.testing.assert_close(near.float(), tigon.jsd(student, teacher, beta=beta), rtol=2e-2, atol=0)


def _mixture_of_logarithms(student, teacher, beta):
    lq, lp = student.log_softmax(-1), teacher.log_softmax(-1)
    lm = torch.logaddexp(lp + math.log(beta), lq + math.log1p(-beta))
    return beta * (lp.exp() * (lp - lm)).sum(-1) + (1 - beta) * (lq.exp() * (lq - lm)).sum(-1)


@pytest.mark.parametrize("beta", [1e-6, 1e-4, 1e-2, 0.7, 1 - 1e-2, 1 - 1e-4, 1 - 1e-6])
def test_beta_near_its_limits(beta, device):
    """No worse than the plain formulation, whose beta is a double: ours is float32 in the kernels."""
    student, teacher = _pair(64, 257, device=device, scale=1.0)
    wide = student.detach().double().requires_grad_()
    exact = _mixture_of_logarithms(wide, teacher.double(), beta)
    runs = [tigon.jsd(student, teacher, beta=beta, reduction="none")]
    runs += [reference(student, teacher, kind="jsd", beta=beta, reduction="none")]
    (want,) = torch.autograd.grad(exact.sum(), wide)
    grads = [torch.autograd.grad(rows.sum(), student)[0] for rows in runs]
    check_close("loss", *(rows.detach() for rows in runs), exact.detach())
    ours, plain = ((grad - want).norm() for grad in grads)
    assert ours <= 2 * plain + 2**-20 * want.norm()


def test_beta_that_rounds_to_one(device):
    """The divergence goes as 1 - beta there."""
    student, teacher = _pair(64, 257, device=device)
    near, limit = (tigon.jsd(student, teacher, beta=beta) for beta in (1 - 1e-9, 1.0))
    got, want = (torch.autograd.grad(loss, student)[0] for loss in (near, limit))
    assert (got - 1e-9 * want).norm() < 0.1 * 1e-9 * want.norm()


@pytest.mark.parametrize("name", OPS)
def test_equal_rows_have_no_divergence(name, device):
    student, _ = _pair(5, 77, device=device)
    loss = OPS[name](student, student.detach().clone(), reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), student)
    assert (loss == 0).all()
    assert grad.abs().max() < 1e-7


@pytest.mark.parametrize("name", ["kl_div", "tvd"])
@pytest.mark.parametrize("columns", [130, 9001])
def test_rows_of_one_huge_number(name, columns, device):
    """Every class far below zero and none below another: a student that knows nothing."""
    student, teacher = _pair(3, columns, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        student[1] = -1e12
        teacher[2] = torch.finfo(torch.bfloat16).min
    loss = OPS[name](student, teacher, reduction="none")
    exact = student.detach().double().requires_grad_()
    want = OPS[name](exact, teacher.double(), reduction="none")
    torch.testing.assert_close(loss, want.float(), rtol=1e-4, atol=0)
    (grad,) = torch.autograd.grad(loss.sum(), student)
    (want_grad,) = torch.autograd.grad(want.sum(), exact)
    assert (grad - want_grad).norm() < 4e-3 * want_grad.norm()


@pytest.mark.parametrize("name", OPS)
def test_masked_rows_may_hold_anything(name, device):
    student, teacher = _pair(6, 40, device=device)
    labels = torch.tensor([0, -100, 5, -100, 3, 1], device=device)
    kept = labels != -100
    want = OPS[name](student[kept], teacher[kept])
    (want_grad,) = torch.autograd.grad(want, student)
    with torch.no_grad():
        student[~kept], teacher[~kept] = float("nan"), float("inf")
    loss = OPS[name](student, teacher, labels)
    (grad,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad[kept], want_grad[kept], rtol=1e-5, atol=1e-9)
    assert (grad[~kept] == 0).all()


@pytest.mark.parametrize("name", OPS)
def test_in_place(name, device):
    """The same bits, over the student's memory; whoever saved it is told: test_checkpoint.py."""
    leaf, teacher = _pair(6, 130, device=device, dtype=torch.bfloat16)
    loss = OPS[name](leaf, teacher)
    (want,) = torch.autograd.grad(loss, leaf)
    student = leaf * 1
    memory = student.data_ptr()
    over = OPS[name](student, teacher, inplace=True)
    (copy,) = torch.autograd.grad(over, student, retain_graph=True)
    (grad,) = torch.autograd.grad(over, student)
    assert same_bits(over, loss) and same_bits(grad, want) and same_bits(copy, want)
    assert grad.data_ptr() == memory != copy.data_ptr() and same_bits(student, want)


def test_nothing_is_written_without_gradient(device):
    student, teacher = _pair(6, 40, device=device)
    with torch.no_grad():
        kept = student.clone()
        loss = tigon.kl_div(student, teacher, inplace=True)
    assert same_bits(student, kept) and same_bits(loss, tigon.kl_div(student, teacher).detach())


@pytest.mark.parametrize("name", OPS)
def test_underflow_makes_no_nan(name, device):
    """Classes that both sides all but exclude, where the probabilities of the mixture underflow."""
    student = torch.tensor([[0.0, -120.0, -300.0, -90.0]], device=device, requires_grad=True)
    teacher = torch.tensor([[0.0, -130.0, -95.0, -1000.0]], device=device)
    for log_probs in (False, True):
        loss = OPS[name](student, teacher, log_probs=log_probs)
        (grad,) = torch.autograd.grad(loss, student)
        assert loss.isfinite() and grad.isfinite().all()
