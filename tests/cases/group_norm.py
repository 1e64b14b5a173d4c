"""Cases of group_norm: [N, C, ...], groups of channels normalised by themselves."""

import math

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, liger, memory_bound, params, stock, test_case

NAME = "group_norm"

DEFAULTS = {"shape": (2, 8, 5, 6), "groups": 4, "weight": True, "bias": True, "eps": 1e-5}
DEFAULTS |= {"layout": "contiguous", "grad_layout": "contiguous", "mean": 0.5, "fill": None}
DEFAULTS |= {"grads": (0, 1, 2)}

CASES = [
    test_case("2x8x5x6", small=True),
    test_case("packs", shape=(3, 8, 8, 8)),
    test_case("one_sample", shape=(1, 6, 33), groups=3),
    test_case("no_places", shape=(5, 24), groups=6),
    test_case("one_group", shape=(3, 12, 7), groups=1),
    test_case("instance", shape=(3, 12, 16), groups=12),
    test_case("one_channel", shape=(4, 1, 9), groups=1),
    test_case("empty", shape=(0, 8, 4)),
    test_case("rank5", shape=(2, 4, 2, 3, 5), groups=2),
    test_case("many_channels", shape=(2, 512, 8), groups=4),
    test_case("long", shape=(1, 4, 9000), groups=2),
    test_case("longer", shape=(1, 2, 264, 264), groups=1),
    test_case("longest", shape=(1, 2, 520, 1000), groups=1),
    test_case("many_groups", shape=(700, 12, 64), groups=3),
    test_case("columns", shape=(2, 8, 9, 10), layout="columns", grad_layout="columns"),
    test_case("misaligned", shape=(2, 8, 64), layout="offset1", grad_layout="offset1"),
    test_case("grad_expanded", shape=(3, 8, 16), grad_layout="expanded"),
    test_case("no_bias", small=True, shape=(2, 6, 7), groups=3, bias=False),
    test_case("plain", shape=(2, 6, 7), groups=3, weight=False, bias=False),
    test_case("frozen_input", shape=(2, 6, 16), groups=3, grads=(1, 2)),
    test_case("frozen_weight", shape=(2, 6, 16), groups=3, grads=(0, 2)),
    test_case("far_from_zero", shape=(2, 6, 130), groups=3, mean=1000.0),
    test_case("nan_group", shape=(2, 6, 16), groups=3, fill="nan"),
    bench_case("16x320x64x64", shape=(16, 320, 64, 64), groups=32),
    bench_case("16x512x32x32", shape=(16, 512, 32, 32), groups=32),
    bench_case("4x128x256x256", shape=(4, 128, 256, 256), groups=32),
    bench_case("4x64x32x32", "bench_cpu", shape=(4, 64, 32, 32), groups=8),
    bench_case("2x32x16x16", "smoke", shape=(2, 32, 16, 16), groups=8),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    x = draw.randn(*p["shape"], layout=p["layout"], mean=p["mean"])
    if p["fill"] is not None:
        x.view(-1)[3] = float(p["fill"])
    channels = p["shape"][1]
    weight = draw.randn(channels, scale=0.3, mean=1.0) if p["weight"] else None
    bias = draw.randn(channels, scale=0.3) if p["bias"] else None
    args = (x, weight, bias)
    return Inputs(
        args=args,
        kwargs={"groups": p["groups"], "eps": p["eps"]},
        grads=tuple(i for i in p["grads"] if args[i] is not None),
        grad_outputs=(draw.randn(*p["shape"], layout=p["grad_layout"]),),
    )


def tigon_fn(x, weight, bias, *, groups, eps):
    """Tigon's own."""
    import tigon

    return tigon.group_norm(x, groups, weight, bias, eps)


def eager_fn(x, weight, bias, *, groups, eps):
    """torch's own."""
    return F.group_norm(x, groups, weight, bias, eps)


def oracle_fn(x, weight, bias, *, groups, eps):
    """The formula, for fp64."""
    places = math.prod(x.shape[2:])
    v = x.reshape(x.shape[0], groups, x.shape[1] // groups * places)
    v = v - v.sum(-1, keepdim=True) / v.shape[-1]
    h = v / torch.sqrt((v * v).sum(-1, keepdim=True) / v.shape[-1] + eps)
    h = h.reshape(x.shape[0], x.shape[1], places)
    h = h if weight is None else h * weight[:, None]
    return (h if bias is None else h + bias[:, None]).reshape(x.shape)


# x to y; x and dy to dx
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)


def _as_liger(fn, x, weight, bias, *, groups, eps):
    return fn(x, weight, bias, x.shape[1], groups, eps)


PEERS = {
    "aten": stock(eager_fn),
    "liger": liger("group_norm", "LigerGroupNormFunction", _as_liger, whole=True),
}
