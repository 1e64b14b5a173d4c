"""Cases of layer_norm: y = (x - mean) / sqrt(var + eps) * weight + bias."""

import torch
import torch.nn.functional as F

from .case import (
    Case,
    Inputs,
    Maker,
    liger,
    memory_bound,
    norm_bench_cases,
    ours,
    params,
    stock,
    test_case,
    weighted_norm_cases,
)

NAME = "layer_norm"
tigon_fn = ours(NAME)

DEFAULTS = {
    "fill": None  # "nan": one row holds a NaN; "inf": an infinity; "constant": one row of equal numbers
}
DEFAULTS |= {"shape": (4, 64), "weight": True, "bias": True, "eps": 1e-5, "layout": "contiguous"}
DEFAULTS |= {"weight_layout": "contiguous", "grad_layout": "contiguous", "scale": 1.0, "mean": 0.5}
DEFAULTS |= {"grads": (0, 1, 2)}

CASES = [
    *weighted_norm_cases(),
    test_case("one_column", shape=(5, 1)),
    test_case("heads", shape=(2, 4, 31, 128), layout="heads", grad_layout="heads"),
    test_case("tall", shape=(531, 64)),
    test_case("129x384", shape=(129, 384)),
    test_case("9x2048", shape=(9, 2048)),
    test_case("5x4096", shape=(5, 4096)),
    test_case("3x8192", shape=(3, 8192)),
    test_case("3x16384", shape=(3, 16384)),
    test_case("2x24576", shape=(2, 24576)),
    test_case("no_bias", small=True, shape=(9, 257), bias=False),
    test_case("no_weight", shape=(9, 257), weight=False),
    test_case("plain", small=True, shape=(9, 257), weight=False, bias=False),
    test_case("frozen_weight", shape=(9, 257), grads=(0, 2)),
    test_case("frozen_input", shape=(9, 257), grads=(1, 2)),
    test_case("only_bias", shape=(9, 257), grads=(2,)),
    # Where E[x^2] - E[x]^2 would have no digits left.
    test_case("far_from_zero", shape=(9, 257), mean=1000.0),
    test_case("far_from_zero_long", shape=(2, 70001), mean=1000.0),
    test_case("small_values", shape=(9, 257), scale=1e-3, mean=0.0),
    test_case("constant_row", shape=(5, 130), fill="constant"),
    *norm_bench_cases(),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    x = draw.randn(*p["shape"], layout=p["layout"], scale=p["scale"], mean=p["mean"])
    if p["fill"] is not None:
        row = x.view(-1, x.shape[-1])[1]
        if p["fill"] == "constant":
            row.fill_(0.75)
        else:
            row[3] = float(p["fill"])
    weight = bias = None
    if p["weight"]:
        weight = draw.randn(p["shape"][-1], layout=p["weight_layout"], scale=0.3, mean=1.0)
    if p["bias"]:
        bias = draw.randn(p["shape"][-1], layout=p["weight_layout"], scale=0.3)
    grad = draw.randn(*p["shape"], layout=p["grad_layout"])
    args = (x, weight, bias)
    return Inputs(
        args=args,
        kwargs={"eps": p["eps"]},
        grads=tuple(i for i in p["grads"] if args[i] is not None),
        grad_outputs=(grad,),
    )


def eager_fn(x, weight, bias, *, eps):
    """torch's own."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


# x to y; x and dy to dx, the gradients of weight and bias are rows
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)


def _quack(case, inputs):
    from quack import layernorm

    if inputs.args[1] is None:
        return None

    def fn(x, weight, bias, *, eps):
        return layernorm(x, weight.float(), None if bias is None else bias.float(), eps)

    return fn


PEERS = {
    "aten": stock(eager_fn),
    "liger": liger("layer_norm", "LigerLayerNormFunction", lambda f, *args, eps: f(*args, eps), whole=True),
    "quack": _quack,
}
