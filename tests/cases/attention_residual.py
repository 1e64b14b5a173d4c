"""Cases of attention_residual: softmax over n of query . rms_norm(v_n), and the sum of values by it."""

import math

import torch

from .case import Case, Inputs, Maker, bench_case, itemsize, liger, nothing, ours, params, test_case, upcast

NAME = "attention_residual"
tigon_fn = ours(NAME)

DEFAULTS = {
    "shape": (4, 2, 5, 64),  # of all values
    "wide": False,  # query and norm_weight in float32
    "spread": 1.0,  # of the scores
}
DEFAULTS |= {"eps": 1e-6, "layout": "contiguous", "grad_layout": "contiguous", "fill": None}
DEFAULTS |= {"grads": (0, 1, 2)}

CASES = [
    test_case("4x2x5x64"),
    test_case("odd", small=True, shape=(3, 5, 7, 33)),
    test_case("one_value", shape=(1, 3, 40)),
    test_case("two_values", small=True, shape=(2, 9, 57)),
    test_case("one_row", shape=(5, 100)),
    test_case("one_column", shape=(3, 4, 1), eps=0.5),
    test_case("empty", shape=(3, 0, 64)),
    test_case("many_values", shape=(40, 1, 32, 128)),
    test_case("very_many_values", shape=(300, 3, 24)),
    test_case("tall", shape=(3, 1031, 40)),
    test_case("tall_odd", shape=(3, 1031, 33)),
    test_case("8x4x4096", shape=(8, 4, 4096)),
    test_case("4x3x8192", shape=(4, 3, 8192)),
    # More than fits in shared memory, aligned and not.
    test_case("long", shape=(16, 2, 16384)),
    test_case("long_odd", shape=(7, 2, 20001)),
    test_case("longer", shape=(3, 2, 70000)),
    test_case("misaligned", shape=(3, 7, 64), layout="offset1", grad_layout="offset1"),
    test_case("rows", shape=(3, 9, 130), layout="rows", grad_layout="rows"),
    test_case("columns", shape=(3, 9, 130), layout="columns", grad_layout="columns"),
    test_case("transposed", shape=(3, 9, 130), layout="transposed"),
    test_case("grad_expanded", shape=(3, 7, 64), grad_layout="expanded"),
    test_case("wide_parameters", small=True, shape=(3, 9, 57), wide=True),
    test_case("sharp", shape=(5, 9, 64), spread=20.0),
    test_case("frozen_values", shape=(3, 9, 64), grads=(1, 2)),
    test_case("only_values", shape=(3, 9, 64), grads=(0,)),
    test_case("only_query", shape=(3, 9, 64), grads=(1,)),
    test_case("only_norm_weight", shape=(3, 9, 64), grads=(2,)),
    test_case("zero_row", shape=(3, 5, 64), fill="zero"),
    test_case("nan_row", shape=(3, 5, 64), fill="nan"),
    bench_case("8x8192x4096", shape=(8, 8192, 4096)),
    bench_case("4x8192x4096", shape=(4, 8192, 4096)),
    bench_case("16x4096x2048", shape=(16, 4096, 2048)),
    bench_case("8x4096x7168", shape=(8, 4096, 7168)),
    bench_case("8x512x2048", "bench_cpu", shape=(8, 512, 2048)),
    bench_case("4x64x1024", "smoke", shape=(4, 64, 1024)),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    shape, wide = p["shape"], torch.promote_types(dtype, torch.float32) if p["wide"] else dtype
    values = draw.randn(*shape, layout=p["layout"])
    if p["fill"] is not None:
        values[1, 2] = 0.0 if p["fill"] == "zero" else float(p["fill"])
    # Scores of about `spread`: h is of size one.
    query = draw.randn(shape[-1], scale=p["spread"] / math.sqrt(shape[-1]), dtype=wide)
    weight = draw.randn(shape[-1], scale=0.3, mean=1.0, dtype=wide)
    return Inputs(
        args=(values, query, weight),
        kwargs={"eps": p["eps"]},
        grads=p["grads"],
        grad_outputs=(draw.randn(*shape[1:], layout=p["grad_layout"]),),
    )


def eager_fn(values, query, norm_weight, *, eps):
    """The paper's formula as a model would have it: a norm in the values' dtype, attention in fp32."""
    h = upcast(values) * torch.rsqrt(upcast(values).pow(2).mean(-1, keepdim=True) + eps)
    keys = h.to(values.dtype) * norm_weight
    scores = (upcast(keys) * upcast(query)).sum(-1)
    return (scores.softmax(0)[..., None] * upcast(values)).sum(0).to(values.dtype)


def _bytes(case, dtype, value_passes, row_passes):
    count, *row = case.params["shape"]
    return (value_passes * count + row_passes) * math.prod(row) * itemsize(dtype)


def bytes_fwd(case, dtype):
    """Values to y."""
    return _bytes(case, dtype, 1, 1)


def bytes_bwd(case, dtype):
    """Values and dy to the gradient of values."""
    return _bytes(case, dtype, 2, 1)


flops_fwd = flops_bwd = nothing


PEERS = {"liger": liger("attn_res", "LigerAttnResFunction", lambda fn, *args, eps: fn(*args, eps))}
