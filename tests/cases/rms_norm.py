"""Cases of rms_norm: y = x / sqrt(mean(x^2) + eps) * (offset + weight)."""

import torch
import torch.nn.functional as F

from .case import (
    Case,
    Inputs,
    Maker,
    bench_case,
    liger,
    memory_bound,
    norm_bench_cases,
    ours,
    params,
    test_case,
    upcast,
    weighted_norm_cases,
)

NAME = "rms_norm"
tigon_fn = ours(NAME)

DEFAULTS = {
    "fill": None  # "nan": one row holds a NaN; "inf": an infinity; "zero": one row of zeros
}
DEFAULTS |= {"shape": (4, 64), "weight": True, "eps": 1e-6, "offset": 0.0, "rounding": "llama"}
DEFAULTS |= {"layout": "contiguous", "weight_layout": "contiguous", "grad_layout": "contiguous", "scale": 1.0}
DEFAULTS |= {"grads": (0, 1)}

CASES = [
    *weighted_norm_cases(),
    # A large eps: of one column and a small one, dx is a difference of nearly equal numbers.
    test_case("one_column", shape=(5, 1), eps=0.5),
    test_case("one_element", shape=(1, 1), eps=0.5),
    test_case("qk_norm", shape=(2, 4, 31, 128), layout="heads", grad_layout="heads"),
    test_case("tall", shape=(1031, 64)),
    test_case("257x384", shape=(257, 384)),
    test_case("33x4096", shape=(33, 4096)),
    test_case("gemma", shape=(9, 257), rounding="gemma"),
    test_case("gemma_offset", small=True, shape=(9, 257), rounding="gemma", offset=1.0),
    test_case("llama_offset", shape=(9, 257), offset=1.0),
    test_case("none", shape=(9, 257), rounding="none"),
    test_case("none_offset", shape=(9, 257), rounding="none", offset=0.5),
    test_case("weightless", small=True, shape=(9, 257), weight=False),
    test_case("weightless_gemma", shape=(9, 257), weight=False, rounding="gemma"),
    test_case("weightless_none_rows", shape=(9, 257), weight=False, rounding="none", layout="rows"),
    test_case("frozen_weight", shape=(9, 257), grads=(0,)),
    test_case("frozen_input", shape=(9, 257), grads=(1,)),
    test_case("small_values", shape=(9, 257), scale=1e-3, eps=1e-5),
    test_case("large_values", shape=(9, 257), scale=50.0),
    test_case("zero_row", shape=(5, 130), fill="zero"),
    *norm_bench_cases(),
    bench_case("262144x64", shape=(262144, 64)),
    bench_case("262144x256", shape=(262144, 256)),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    x = draw.randn(*p["shape"], layout=p["layout"], scale=p["scale"])
    if p["fill"] is not None:
        row = x.view(-1, x.shape[-1])[1]
        if p["fill"] == "zero":
            row.zero_()
        else:
            row[3] = float(p["fill"])
    weight = None
    if p["weight"]:
        layout = p["weight_layout"]
        weight = draw.randn(p["shape"][-1], layout=layout, scale=0.3, mean=1.0 - p["offset"])
    grad = draw.randn(*p["shape"], layout=p["grad_layout"])
    return Inputs(
        args=(x, weight),
        kwargs={"eps": p["eps"], "offset": p["offset"], "rounding": p["rounding"]},
        grads=tuple(i for i in p["grads"] if i == 0 or p["weight"]),
        grad_outputs=(grad,),
    )


def eager_fn(x, weight, *, eps, offset, rounding):
    """LlamaRMSNorm and GemmaRMSNorm of Hugging Face, and the formula in the input's own dtype."""
    if rounding == "none":
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return y if weight is None else y * (offset + weight)
    h = upcast(x)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if rounding == "gemma":
        return (h if weight is None else h * (offset + upcast(weight))).to(x.dtype)
    h = h.to(x.dtype)
    return h if weight is None else (offset + weight if offset else weight) * h


# x to y; x and dy to dx, the weight's gradient is a row
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)


def _aten(case, inputs):
    if inputs.kwargs["offset"]:
        return None

    def fn(x, weight, *, eps, **_):
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    return fn


def _quack(case, inputs):
    from quack import rmsnorm

    if inputs.args[1] is None:
        return None

    def fn(x, weight, *, eps, offset, **_):
        return rmsnorm(x, weight, eps=eps, weight_offset=offset)

    return fn


def _as_liger(fn, x, weight, *, eps, offset, rounding):
    return fn(x, weight, eps, offset, rounding, False, None)


PEERS = {"aten": _aten, "liger": liger("rms_norm", "LigerRMSNormFunction", _as_liger), "quack": _quack}
