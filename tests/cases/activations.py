"""What the case modules of activations share: parameters, cases, inputs, traffic."""

import torch

from .case import Case, Inputs, Maker, bench_case, memory_bound, params, test_case

DEFAULTS = {"shape": (4, 64), "layout": "contiguous", "grad_layout": "contiguous", "scale": 2.0, "mean": 0.0}
DEFAULTS |= {"fill": None}

bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)  # x to y; x and dy to dx
PEERS = {}

CASES = [
    test_case("4x64"),
    test_case("odd_3x7", small=True, shape=(3, 7)),
    test_case("one_row", shape=(1, 1000)),
    test_case("one_column", shape=(5, 1)),
    test_case("one_element", shape=(1, 1)),
    test_case("scalar", shape=()),
    test_case("vector", shape=(97,)),
    test_case("empty", shape=(0, 64)),
    test_case("empty_columns", shape=(3, 0)),
    test_case("rank3", small=True, shape=(2, 5, 33)),
    test_case("rank5", shape=(2, 1, 3, 2, 9)),
    test_case("129x1031", shape=(129, 1031)),
    test_case("wide", shape=(2, 70001)),
    test_case("rows", small=True, shape=(9, 130), layout="rows", grad_layout="rows"),
    test_case("columns", shape=(9, 130), layout="columns", grad_layout="columns"),
    test_case("transposed", shape=(9, 130), layout="transposed", grad_layout="transposed"),
    test_case("mixed_layouts", shape=(9, 130), layout="transposed", grad_layout="rows"),
    test_case("heads", shape=(2, 3, 5, 16), layout="heads"),
    test_case("misaligned", shape=(7, 256), layout="offset1", grad_layout="offset1"),
    test_case("misaligned_x", shape=(7, 256), layout="offset1"),
    test_case("expanded", shape=(7, 96), layout="expanded", grad=False),
    test_case("grad_expanded", shape=(7, 256), grad_layout="expanded"),
    test_case("all_negative", shape=(7, 256), mean=-20.0),
    test_case("all_positive", shape=(7, 256), mean=20.0),
    test_case("tiny", shape=(7, 256), scale=1e-3),
    test_case("large", shape=(7, 256), scale=300.0),
    test_case("nan_row", shape=(5, 130), fill="nan"),
    test_case("inf_row", shape=(5, 130), fill="inf"),
    test_case("negative_inf_row", shape=(5, 130), fill="-inf"),
    test_case("zeros", shape=(5, 130), fill="zero"),
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
