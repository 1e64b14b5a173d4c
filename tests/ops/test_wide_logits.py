"""``logit_dtype=torch.float32``: logits of 16-bit operands that nothing rounds to 16 bits."""

import functools

import pytest
import torch
from checks import same_bits
from heads import compare, head_inputs, run

import tigon
from tigon.ops.loss_head.linear_cross_entropy import reference as loss_reference
from tigon.ops.loss_head.linear_log_prob import reference

LOSS, LOG_PROB = tigon.linear_cross_entropy, tigon.linear_log_prob
WIDE = {"logit_dtype": torch.float32}


def _plain_loss(hidden, weight, target, fn, reduction="mean", **options):
    rows = fn(reference(hidden, weight, target, **options))
    rows = torch.where(target == -100, 0.0, rows)
    return rows.sum() / (target != -100).sum() if reduction == "mean" else rows


FUNCTIONS = {
    "mean": (LOSS, loss_reference),
    "none": (functools.partial(LOSS, reduction="none"), functools.partial(loss_reference, reduction="none")),
    "log_prob": (LOG_PROB, reference),
    "linear_loss": (
        lambda h, w, y, **o: tigon.linear_loss(h, w, y, lambda p: p.square(), **o),
        lambda h, w, y, **o: _plain_loss(h, w, y, lambda p: p.square(), **o),
    ),
}


@pytest.mark.parametrize("options", [{}, {"chunk_rows": 5}, {"softcap": 3.0, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_float64(name, dtype, options, device):
    fn, plain = FUNCTIONS[name]
    bias = torch.randn(40, device=device).to(dtype).requires_grad_()
    options = {**options, **WIDE, "bias": bias}
    compare(
        fn, plain, head_inputs(30, dtype=dtype, device=device), options, noise=16 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_have_the_error_of_float32(name, dtype, device):
    """The same operands in float64: results to float32's precision, far better than without."""
    fn, plain = FUNCTIONS[name]
    hidden, weight, target = head_inputs(30, 64, 200, dtype=dtype, device=device, scale=5.0)
    exact = plain(hidden.detach().double(), weight.detach().double(), target)
    got, narrow = (fn(hidden, weight, target, **o).detach().double() for o in (WIDE, {}))
    error, narrow_error = ((x - exact).abs().max() / exact.abs().max() for x in (got, narrow))
    assert error <= 2e-6 and narrow_error >= 5 * error


def test_float32_is_as_without(device):
    args = head_inputs(device=device)
    assert all(same_bits(a, b) for a, b in zip(run(LOSS, args, WIDE), run(LOSS, args, {}), strict=True))


def test_several_parts_of_a_chunk(device):
    """More rows than a part with logits in float32 has."""
    hidden, weight, target = head_inputs(2100, 8, 12, dtype=torch.bfloat16, device=device)
    options = {**WIDE, "chunk_rows": 2100, "outputs": ("loss", "lse", "entropy", "predicted")}
    compare(LOSS, loss_reference, (hidden, weight, target), options, noise=2.0**-8)


@pytest.mark.parametrize("fn", [LOSS, LOG_PROB, lambda *a, **o: tigon.linear_loss(*a, torch.neg, **o)])
@pytest.mark.parametrize("logit_dtype", [torch.float64, torch.float16, "float32"])
def test_refusals(logit_dtype, fn):
    args = head_inputs(dtype=torch.bfloat16)
    with pytest.raises(tigon.Error, match="logit_dtype must be float32 or hidden's torch.bfloat16"):
        fn(*args, logit_dtype=logit_dtype)
