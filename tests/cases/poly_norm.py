"""Cases of poly_norm: w0 n(x^3) + w1 n(x^2) + w2 n(x) + b."""

import torch

from .case import (
    Case,
    Inputs,
    Maker,
    layout_cases,
    liger,
    memory_bound,
    norm_bench_cases,
    norm_cases,
    ours,
    params,
    test_case,
    turn_cases,
)

NAME = "poly_norm"
tigon_fn = ours(NAME)

DEFAULTS = {"shape": (4, 64), "layout": "contiguous", "grad_layout": "contiguous", "scale": 1.0, "mean": 0.0}
DEFAULTS |= {"eps": 1e-6, "parameters": None, "fill": None, "grads": (0, 1, 2)}

CASES = [
    *norm_cases(),
    # n(u) is all but 1: dx is a difference of nearly equal numbers unless eps is large.
    test_case("one_column", shape=(5, 1), eps=0.5),
    test_case("tall", shape=(331, 64)),
    test_case("33x384", small=True, shape=(33, 384)),
    test_case("many_rows", shape=(2500, 33)),
    test_case("swept", shape=(1, 1100001)),
    test_case("misaligned_swept", shape=(2, 1100003), layout="offset1", grad_layout="rows"),
    *layout_cases("rows", "columns", "transposed", shape=(9, 130)),
    test_case("misaligned_x", shape=(7, 257), layout="offset1"),
    test_case("misaligned_grad", shape=(7, 256), grad_layout="offset1"),
    test_case("wide_parameters", shape=(9, 257), parameters=torch.float32),
    test_case("frozen_input", shape=(9, 257), grads=(1, 2)),
    test_case("frozen_parameters", shape=(9, 257), grads=(0,)),
    test_case("only_bias", shape=(9, 257), grads=(2,)),
    test_case("tiny", shape=(9, 257), scale=1e-3),
    test_case("large", shape=(9, 257), scale=1e4),
    test_case("far_from_zero", shape=(9, 257), mean=10.0),
    test_case("large_eps", shape=(9, 257), eps=0.5),
    *turn_cases(),
    test_case("turns_frozen_parameters", shape=(2200, 1032), grads=(0,)),
    *norm_bench_cases(),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    x = draw.randn(*p["shape"], layout=p["layout"], scale=p["scale"], mean=p["mean"])
    if p["fill"] is not None:
        x[1, 3] = float(p["fill"])
    weight = draw.randn(3, scale=0.3, mean=0.5, dtype=p["parameters"])
    bias = draw.randn(1, dtype=p["parameters"])
    return Inputs(
        args=(x, weight, bias, p["eps"]),
        grads=p["grads"],
        grad_outputs=(draw.randn(*p["shape"], layout=p["grad_layout"]),),
    )


def eager_fn(x, weight, bias, eps):
    """The paper's module, in float32 inside."""
    from tigon.ops.poly_norm import reference

    return reference(x, weight, bias, eps)


def oracle_fn(x, weight, bias, eps):
    """The formula, for fp64."""
    powers = torch.stack((x**3, x**2, x), -1)
    normalised = powers / (powers.square().mean(-2, keepdim=True) + eps).sqrt()
    return normalised @ weight + bias


# x to y; x and dy to dx, the other gradients are small
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)


def _liger(case, inputs):
    apply = liger("poly_norm", "LigerPolyNormFunction")(case, inputs)
    return lambda x, weight, bias, eps: apply(x, weight, bias.view(()), eps, False)  # as its module has it


PEERS = {"liger": _liger}
