"""What the case modules of activations share: parameters, cases, inputs, traffic."""

import torch

from .case import Case, Inputs, Maker, bench_case, memory_bound, params, pointwise_cases, test_case

DEFAULTS = {"shape": (4, 64), "layout": "contiguous", "grad_layout": "contiguous", "scale": 2.0, "mean": 0.0}
DEFAULTS |= {"fill": None}

bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)  # x to y; x and dy to dx
PEERS = {}

CASES = [
    *pointwise_cases(),
    test_case("rank3", small=True, shape=(2, 5, 33)),
    test_case("rows", small=True, shape=(9, 130), layout="rows", grad_layout="rows"),
    test_case("mixed_layouts", shape=(9, 130), layout="transposed", grad_layout="rows"),
    test_case("misaligned_x", shape=(7, 256), layout="offset1"),
    test_case("expanded", shape=(7, 96), layout="expanded", grad=False),
    test_case("all_negative", shape=(7, 256), mean=-20.0),
    test_case("all_positive", shape=(7, 256), mean=20.0),
    test_case("tiny", shape=(7, 256), scale=1e-3),
    test_case("large", shape=(7, 256), scale=300.0),
    test_case("inf_row", shape=(5, 130), fill="inf"),
    test_case("negative_inf_row", shape=(5, 130), fill="-inf"),
    bench_case("16384x14336", shape=(16384, 14336)),
    bench_case("16384x4096", shape=(16384, 4096)),
    bench_case("4096x1536", "bench_cpu", shape=(4096, 1536)),
    bench_case("1024x8192", "bench_cpu", shape=(1024, 8192)),
    bench_case("128x1024", "smoke", shape=(128, 1024)),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    shape = p["shape"]
    x = draw.randn(*shape, layout=p["layout"], scale=p["scale"], mean=p["mean"])
    if p["fill"] == "zero":
        x.view(-1, shape[-1])[1].zero_()
    elif p["fill"] is not None:
        x.view(-1, shape[-1])[1, 3] = float(p["fill"])
    grad = draw.randn(*shape, layout=p["grad_layout"])
    return Inputs(args=(x,), grads=(0,), grad_outputs=(grad,))
