"""qk_norm_rope beyond the cases: it is the two ops in turn, refusals, gradients wanted."""

import pytest
import torch
from checks import refusals, refused, same_bits

import tigon
from tigon.ops.qk_norm_rope import reference
from tigon.ops.rope_tables import Form

FORMS = [
    {},
    {"rounding": "gemma", "offset": 1.0},
    {"rounding": "none", "interleaved": True},
    {"tail": True},
    {"interleaved": True, "rotary_dim": 16},
]


def _inputs(B=2, T=5, Hq=4, Hk=2, D=64, R=None, *, device="cpu", dtype=torch.float32):
    """q, k, their weights, cos and sin: heads as Hugging Face has them."""
    q, k = (torch.randn(B, T, H, D, device=device, dtype=dtype) for H in (Hq, Hk))
    weights = [torch.randn(D, device=device, dtype=dtype) for _ in range(2)]
    tables = [torch.randn(1, T, R or D, device=device, dtype=dtype) for _ in range(2)]
    return [x.transpose(1, 2) for x in (q, k)] + weights + tables


def _in_turn(q, k, q_weight, k_weight, cos, sin, *, offset=0.0, rounding="llama", **options):
    norm = {"offset": offset, "rounding": rounding}
    q, k = tigon.rms_norm(q, q_weight, **norm), tigon.rms_norm(k, k_weight, **norm)
    return tigon.rope(q, k, cos, sin, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("D, R", [(64, None), (40, 20), (23, 16), (128, 32)])
def test_forward_is_the_two_ops_in_turn(options, dtype, D, R):
    """The same roundings at the same places: bit for bit on the CPU, where both sum a row by one tree."""
    options = dict(options)
    columns = options.get("rotary_dim", 2 * (R or D)) // 2 if "rotary_dim" in options else R
    inputs = _inputs(D=D, R=columns, dtype=dtype)
    got, want = tigon.qk_norm_rope(*inputs, **options), _in_turn(*inputs, **options)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


BAD = """
qk_norm_rope(q, k, u, None, c, s) -> k_weight must be given exactly when q_weight is
qk_norm_rope(q, None, u, v, c, s) -> k_weight must be None without its tensor
qk_norm_rope(q, k, u, v, c[:, :4], s[:, :4]) -> cos must be [1 or 2, 5, R]
_raw(q, k, u[:8], v, c, s) -> q_weight must be [64], got [8]
_raw(q, k, u, v.half(), c, s) -> k_weight must be float32
_raw(*a, pairs=2) -> results must have the pairs of q
_raw(q, k[:, :, :4], *r) -> k must be [2, H, 5, 64]
_raw(q, k.half(), *r) -> k must be float32, got float16
_raw(*a, eps=-1.0) -> eps must be >= 0
"""


def _raw(q, k, q_weight, k_weight, cos, sin, eps=1e-6, **options):
    form = Form(1, **options)
    torch.ops.tigon.qk_norm_rope_fwd(q, k, q_weight, k_weight, cos, sin, None, eps, 0.0, 0, *form)


@pytest.mark.parametrize("call, message", refusals(BAD))
def test_refusals(call, message, device):
    inputs = _inputs(device=device)
    names = dict(zip("qkuvcs", inputs, strict=True))
    refused(call, message, _raw=_raw, a=inputs, r=inputs[2:], **names)


def test_more_than_1024_columns_run_the_reference(device):
    inputs = _inputs(D=1040, R=16, device=device)
    got, want = tigon.qk_norm_rope(*inputs), reference(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_results_of_constants_are_constant():
    q, k, cos = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(3, 8)
    for place in range(2):
        weights = [torch.ones(8), torch.ones(8)]
        weights[place].requires_grad_()
        results = tigon.qk_norm_rope(q, k, *weights, cos, cos)
        assert [y.requires_grad for y in results] == [place == 0, place == 1]
