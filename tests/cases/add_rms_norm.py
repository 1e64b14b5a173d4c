"""Cases of add_rms_norm: h = x + residual, y = rms_norm(h)."""

import torch
import torch.nn.functional as F

from . import rms_norm
from .case import Case, Inputs, Maker, memory_bound, norm_bench_cases, norm_cases, ours, params, test_case

NAME = "add_rms_norm"
tigon_fn = ours(NAME)

DEFAULTS = {"shape": (4, 64), "weight": True, "eps": 1e-6, "offset": 0.0, "rounding": "llama"}
DEFAULTS |= {"layout": "contiguous", "residual_layout": "contiguous", "grad_layout": "contiguous"}
DEFAULTS |= {"fill": None, "grads": (0, 1, 2)}

CASES = [
    *norm_cases(),
    test_case("one_column", shape=(5, 1), eps=0.5),
    test_case("tall", shape=(531, 64)),
    test_case("65x384", shape=(65, 384)),
    test_case("5x2048", shape=(5, 2048)),
    test_case("3x8192", shape=(3, 8192)),
    test_case("3x16384", shape=(3, 16384)),
    test_case("2x20480", shape=(2, 20480)),
    test_case("rows", shape=(9, 130), layout="rows", residual_layout="rows", grad_layout="rows"),
    test_case("columns", shape=(9, 130), layout="columns", residual_layout="transposed"),
    test_case("misaligned_residual", shape=(7, 256), residual_layout="offset1"),
    test_case("gemma_offset", small=True, shape=(9, 257), rounding="gemma", offset=1.0),
    test_case("none_offset", shape=(9, 257), rounding="none", offset=0.5),
    test_case("weightless", small=True, shape=(9, 257), weight=False),
    test_case("frozen_weight", shape=(9, 257), grads=(0, 1)),
    test_case("frozen_input", shape=(9, 257), grads=(1, 2)),
    test_case("only_weight", shape=(9, 257), grads=(2,)),
    *norm_bench_cases(),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    x = draw.randn(*p["shape"], layout=p["layout"])
    residual = draw.randn(*p["shape"], layout=p["residual_layout"])
    if p["fill"] is not None:
        x.view(-1, x.shape[-1])[1, 3] = float(p["fill"])
    weight = draw.randn(p["shape"][-1], scale=0.3, mean=1.0 - p["offset"]) if p["weight"] else None
    args = (x, residual, weight)
    return Inputs(
        args=args,
        kwargs={name: p[name] for name in ("eps", "offset", "rounding")},
        grads=tuple(i for i in p["grads"] if args[i] is not None),
        grad_outputs=tuple(draw.randn(*p["shape"], layout=p["grad_layout"]) for _ in range(2)),
    )


def eager_fn(x, residual, weight, **options):
    """Addition, then the norm as Hugging Face has it."""
    h = x + residual
    return rms_norm.eager_fn(h, weight, **options), h


# x and residual to h and y; h, dy and dh to dx, the weight's gradient is a row
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(4, 4)


def _aten(case, inputs):
    if inputs.kwargs["offset"]:
        return None

    def fn(x, residual, weight, *, eps, **_):
        h = x + residual
        return F.rms_norm(h, h.shape[-1:], weight, eps), h

    return fn


def _liger(case, inputs):
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    if inputs.args[2] is None:
        return None

    def fn(x, residual, weight, *, eps, offset, rounding):
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, rounding, False)

    return fn


def _quack(case, inputs):
    from quack import rmsnorm

    if inputs.args[2] is None:
        return None

    def fn(x, residual, weight, *, eps, offset, **_):
        return rmsnorm(x, weight, residual=residual, eps=eps, weight_offset=offset, prenorm=True)

    return fn


PEERS = {"aten": _aten, "liger": _liger, "quack": _quack}
