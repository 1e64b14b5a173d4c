"""Cases of softmax over the last dimension."""

import math

import torch
import torch.nn.functional as F

from .case import (
    Case,
    Inputs,
    Maker,
    bench_case,
    layout_cases,
    liger,
    memory_bound,
    norm_bench_cases,
    ours,
    params,
    stock,
    test_case,
)

NAME = "softmax"
tigon_fn = ours(NAME)

DEFAULTS = {"shape": (4, 64), "layout": "contiguous", "grad_layout": "contiguous", "scale": 2.0, "mean": 0.0}
DEFAULTS |= {"fill": None}

ROWS = [
    test_case("4x64", small=True),
    test_case("odd_3x7", small=True, shape=(3, 7)),
    test_case("one_row", shape=(1, 1000)),
    test_case("one_column", shape=(5, 1)),
    test_case("scalar", shape=()),
    test_case("vector", shape=(97,)),
    test_case("empty", shape=(0, 64)),
    test_case("empty_columns", shape=(3, 0)),
    test_case("rank4", shape=(2, 3, 5, 33)),
    test_case("tall", shape=(331, 64)),
    test_case("33x384", shape=(33, 384)),
    test_case("5x4097", shape=(5, 4097)),
    test_case("3x16384", shape=(3, 16384)),
    test_case("2x30001", shape=(2, 30001)),
    test_case("cluster", shape=(3, 70001)),
    test_case("cluster_in_turns", shape=(70, 33001)),
    test_case("longest", shape=(1, 270001)),
    test_case("swept", shape=(1, 1100001)),
    *layout_cases("rows", "columns", "transposed", shape=(9, 130)),
    test_case("misaligned", shape=(7, 256), layout="offset1", grad_layout="offset1"),
    test_case("misaligned_x", shape=(7, 257), layout="offset1"),
    test_case("misaligned_grad", shape=(7, 256), grad_layout="offset1"),
    test_case("misaligned_odd", shape=(5, 4097), layout="offset1", grad_layout="rows"),
    test_case("misaligned_grad_odd", shape=(3, 12289), layout="rows", grad_layout="offset1"),
    test_case("misaligned_cluster", shape=(2, 70003), layout="offset1", grad_layout="rows"),
    test_case("misaligned_swept", shape=(1, 1100003), layout="offset1", grad_layout="offset1"),
    test_case("grad_expanded", shape=(7, 256), grad_layout="expanded"),
    test_case("sharp", shape=(7, 256), scale=40.0),
    test_case("far_from_zero", shape=(7, 256), mean=1000.0),
    test_case("masked", shape=(5, 130), fill="masked"),
    test_case("masked_long", shape=(2, 270001), fill="masked"),
    test_case("masked_swept", shape=(2, 1100003), fill="masked"),
    test_case("nothing_left", shape=(5, 130), fill="-inf"),
    test_case("nothing_left_long", shape=(3, 70001), fill="-inf"),
    test_case("nan_row", shape=(5, 130), fill="nan"),
    test_case("nan_row_long", shape=(3, 70001), fill="nan"),
    test_case("inf_row", shape=(5, 130), fill="inf"),
    *norm_bench_cases(),
]
CASES = [*ROWS, bench_case("64x1048576", shape=(64, 1048576))]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    shape = p["shape"]
    x = draw.randn(*shape, layout=p["layout"], scale=p["scale"], mean=p["mean"])
    if p["fill"] == "masked":  # a causal mask's triangle
        x.masked_fill_(torch.ones_like(x, dtype=torch.bool).triu(x.shape[-1] - 20), -math.inf)
        x[-1, :100] = -math.inf
    elif p["fill"] == "-inf":
        x[1].fill_(-math.inf)
    elif p["fill"] is not None:
        x[1, 3] = float(p["fill"])
    return Inputs(args=(x,), grads=(0,), grad_outputs=(draw.randn(*shape, layout=p["grad_layout"]),))


def eager_fn(x):
    """torch's own."""
    return F.softmax(x, -1)


# x to y; y and dy to dx
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)


def _quack(case, inputs):
    from quack import softmax

    return softmax


PEERS = {"aten": stock(eager_fn), "liger": liger("softmax", "LigerSoftmaxFunction"), "quack": _quack}
