"""Cases of dyt: tanh(alpha * x) * weight + bias."""

import torch

from .case import Case, Inputs, Maker, bench_case, layout_cases, liger, memory_bound, ours, params, test_case

NAME = "dyt"
tigon_fn = ours(NAME)

DEFAULTS = {"shape": (4, 64), "weight": True, "bias": True, "alpha": 0.5, "layout": "contiguous"}
DEFAULTS |= {"grad_layout": "contiguous", "weight_layout": "contiguous", "scale": 1.0, "fill": None}
DEFAULTS |= {"grads": (0, 1, 2, 3)}

CASES = [
    test_case("4x64"),
    test_case("odd_3x7", small=True, shape=(3, 7)),
    test_case("one_row", shape=(1, 1000)),
    test_case("one_column", shape=(5, 1)),
    test_case("vector", shape=(96,)),
    test_case("empty", shape=(0, 64)),
    test_case("rank4", shape=(2, 3, 5, 33)),
    test_case("tall", shape=(531, 72)),
    test_case("65x384", shape=(65, 384)),
    test_case("17x2056", shape=(17, 2056)),
    test_case("5x4097", shape=(5, 4097)),
    test_case("wide", shape=(2, 40001)),
    *layout_cases("rows", "columns", shape=(9, 130)),
    test_case("misaligned", shape=(7, 256), layout="offset1", grad_layout="offset1"),
    test_case("misaligned_weight", shape=(7, 256), weight_layout="offset1"),
    test_case("grad_expanded", shape=(7, 256), grad_layout="expanded"),
    test_case("no_bias", small=True, shape=(9, 57), bias=False),
    test_case("plain", shape=(9, 257), weight=False, bias=False),
    test_case("frozen_input", shape=(9, 257), grads=(1, 2, 3)),
    test_case("frozen_weight", shape=(9, 257), grads=(0, 1, 3)),
    test_case("only_alpha", shape=(9, 257), grads=(1,)),
    test_case("saturated", shape=(9, 257), scale=30.0),
    test_case("tiny", shape=(9, 257), scale=1e-3),
    test_case("nan_row", shape=(5, 130), fill="nan"),
    bench_case("16384x1024", shape=(16384, 1024)),
    bench_case("16384x4096", shape=(16384, 4096)),
    bench_case("16384x8192", shape=(16384, 8192)),
    bench_case("16384x5120", shape=(16384, 5120)),
    bench_case("4096x4096", "bench_cpu", shape=(4096, 4096)),
    bench_case("128x1024", "smoke", shape=(128, 1024)),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    columns = p["shape"][-1]
    x = draw.randn(*p["shape"], layout=p["layout"], scale=p["scale"])
    if p["fill"] is not None:
        x[1, 3] = float(p["fill"])
    alpha = torch.full((1,), p["alpha"], device=device, dtype=dtype)
    weight = draw.randn(columns, scale=0.3, mean=1.0, layout=p["weight_layout"]) if p["weight"] else None
    bias = draw.randn(columns, scale=0.3, layout=p["weight_layout"]) if p["bias"] else None
    args = (x, alpha, weight, bias)
    return Inputs(
        args=args,
        grads=tuple(i for i in p["grads"] if args[i] is not None),
        grad_outputs=(draw.randn(*p["shape"], layout=p["grad_layout"]),),
    )


def eager_fn(x, alpha, weight, bias):
    """The paper's module."""
    y = torch.tanh(alpha * x)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


# x to y; x and dy to dx, the other gradients are rows
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)


def _liger(case, inputs):
    return None if inputs.args[2] is None else liger("dyt", "LigerDyTFunction")(case, inputs)


PEERS = {"liger": _liger}
