"""Cases of modulated_rms_norm: rms_norm(x) * (1 + scale) + shift."""

import math

import torch

from .case import Case, Inputs, Maker, bench_case, itemsize, liger, nothing, ours, params, test_case, upcast

NAME = "modulated_rms_norm"
tigon_fn = ours(NAME)

DEFAULTS = {
    "modulation": (2,),  # leading sizes of scale and shift
    "wide": False,  # weight, scale and shift in float32
}
DEFAULTS |= {"shape": (2, 5, 64), "weight": True, "shift": True, "eps": 1e-6, "offset": 0.0}
DEFAULTS |= {"rounding": "llama", "layout": "contiguous", "modulation_layout": "contiguous"}
DEFAULTS |= {"grad_layout": "contiguous", "fill": None, "grads": (0, 1, 2, 3)}

CASES = [
    test_case("per_sample"),
    test_case("per_sample_kept_dim", small=True, shape=(3, 7, 33), modulation=(3, 1)),
    test_case("shared", shape=(5, 257), modulation=()),
    test_case("shared_row", shape=(2, 9, 128), modulation=(1,)),
    test_case("per_token", small=True, shape=(9, 57), modulation=(9,)),
    test_case("per_token_3d", shape=(2, 9, 256), modulation=(2, 9)),
    test_case("per_token_wide", shape=(2, 9, 256), modulation=(2, 9), wide=True),
    test_case("per_token_bare", shape=(40, 3072), modulation=(40,), weight=False, shift=False),
    test_case("per_token_gemma", shape=(9, 512), modulation=(9,), rounding="gemma", offset=1.0),
    test_case("per_token_misaligned", shape=(9, 256), modulation=(9,), layout="offset1"),
    test_case("per_token_long", shape=(3, 20001), modulation=(3,), modulation_layout="rows"),
    test_case("per_token_6144", shape=(9, 6144), modulation=(9,)),
    test_case("per_token_tall", shape=(2500, 264), modulation=(2500,)),
    test_case("per_token_only_scale", shape=(9, 256), modulation=(9,), grads=(2,)),
    test_case("per_token_only_weight", shape=(9, 257), modulation=(9,), grads=(1,)),
    test_case("vector", shape=(96,), modulation=()),
    test_case("one_column", shape=(4, 3, 1), modulation=(4,), eps=0.5),
    test_case("flat", shape=(12, 64), modulation=(3,)),
    test_case("empty", shape=(0, 64), modulation=(3,)),
    test_case("empty_samples", shape=(0, 4, 64), modulation=(0,)),
    # Groups of rows that fill no block, and more of them than there are blocks.
    test_case("many_groups", shape=(700, 3, 64), modulation=(700,)),
    test_case("many_short", shape=(3, 331, 40), modulation=(3,)),
    test_case("tall", shape=(2, 517, 128), modulation=(2,)),
    # Rows that share scale and shift: too few to keep them, few, more of them than a device holds, all.
    test_case("shared_by_7", shape=(6, 7, 1152), modulation=(6,)),
    test_case("shared_by_8", shape=(5, 8, 1152), modulation=(5,)),
    test_case("shared_by_64", shape=(3, 64, 1544), modulation=(3,)),
    test_case("shared_unshifted", shape=(3, 64, 1544), modulation=(3,), shift=False),
    test_case("shared_by_all_264", shape=(6500, 264), modulation=()),
    test_case("shared_by_all_1032", shape=(2500, 1032), modulation=(1,)),
    test_case("shared_by_all_wide", shape=(2500, 1032), modulation=(), wide=True, weight=False),
    test_case("shared_gemma", shape=(2, 9, 2056), modulation=(2,), rounding="gemma", offset=1.0),
    test_case("shared_chunk", shape=(2, 9, 4104), modulation=(2,), modulation_layout="rows"),
    test_case("shared_12288", shape=(2, 9, 12288), modulation=(2,)),
    test_case("shared_12296", shape=(2, 9, 12296), modulation=(2,)),
    test_case("one_row_of_each", shape=(2, 1, 3072), modulation=(2,)),
    test_case("512", shape=(3, 41, 512), modulation=(3,)),
    test_case("1152", shape=(2, 65, 1152), modulation=(2,)),
    test_case("3072", shape=(2, 40, 3072), modulation=(2,)),
    test_case("6144", shape=(2, 3, 6144), modulation=(2, 1)),
    test_case("odd_wide", shape=(2, 5, 4097), modulation=(2,)),
    test_case("long", shape=(2, 3, 20000), modulation=(2,)),
    test_case("longer", shape=(2, 2, 70001), modulation=(2,)),
    test_case("chunk_of_projection", shape=(3, 7, 64), modulation=(3,), modulation_layout="rows"),
    test_case("misaligned_modulation", shape=(3, 7, 64), modulation=(3,), modulation_layout="offset1"),
    test_case("strided_modulation", shape=(3, 7, 64), modulation=(3,), modulation_layout="columns"),
    test_case("rows", shape=(9, 130), modulation=(3,), layout="rows", grad_layout="rows"),
    test_case("misaligned", shape=(6, 256), modulation=(2,), layout="offset1", grad_layout="offset1"),
    test_case("grad_expanded", shape=(6, 256), modulation=(2,), grad_layout="expanded"),
    test_case("wide_modulation", small=True, shape=(2, 9, 57), wide=True),
    test_case("wide_3072", shape=(2, 9, 3072), wide=True, weight=False),
    test_case("weightless", shape=(2, 9, 257), weight=False),
    test_case("unshifted", small=True, shape=(2, 9, 57), shift=False),
    test_case("bare", shape=(2, 9, 256), weight=False, shift=False),
    test_case("gemma", shape=(2, 9, 257), rounding="gemma"),
    test_case("gemma_offset", small=True, shape=(2, 9, 57), rounding="gemma", offset=1.0),
    test_case("llama_offset", shape=(2, 9, 256), offset=1.0),
    test_case("none", shape=(2, 9, 257), rounding="none", offset=0.5),
    test_case("frozen_modulation", shape=(2, 9, 256), grads=(0, 1)),
    test_case("frozen_input", shape=(2, 9, 256), grads=(2, 3)),
    test_case("only_shift", shape=(2, 9, 256), grads=(3,)),
    test_case("only_weight", shape=(2, 9, 256), grads=(1,)),
    test_case("nan_row", shape=(5, 130), modulation=(5,), fill="nan"),
    test_case("inf_row", shape=(5, 130), modulation=(5,), fill="inf"),
    # DiT-XL, and video models: a modulation per sample; per frame; per token.
    bench_case("64x256x1152", shape=(64, 256, 1152), modulation=(64,)),
    bench_case("4x4096x3072", shape=(4, 4096, 3072), modulation=(4,)),
    bench_case("4x4096x3072_bare", shape=(4, 4096, 3072), modulation=(4,), weight=False),
    bench_case("2x8192x5120_wide", shape=(2, 8192, 5120), modulation=(2,), wide=True, weight=False),
    bench_case("16384x3072_by_256", shape=(16384, 3072), modulation=(64,)),
    bench_case("16384x3072_by_1", shape=(16384, 3072), modulation=(16384,)),
    bench_case("4x1024x4096", "bench_cpu", shape=(4, 1024, 4096), modulation=(4,)),
    bench_case("4x32x1024", "smoke", shape=(4, 32, 1024), modulation=(4,)),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    columns, wide = p["shape"][-1], torch.promote_types(dtype, torch.float32) if p["wide"] else dtype
    x = draw.randn(*p["shape"], layout=p["layout"])
    if p["fill"] is not None:
        x.view(-1, columns)[1, 3] = float(p["fill"])
    weight = draw.randn(columns, scale=0.3, mean=1.0 - p["offset"], dtype=wide) if p["weight"] else None

    def modulation():
        layout = p["modulation_layout"]
        return draw.randn(*p["modulation"], columns, layout=layout, scale=0.3, dtype=wide)

    args = (x, weight, modulation(), modulation() if p["shift"] else None)
    return Inputs(
        args=args,
        kwargs={"eps": p["eps"], "offset": p["offset"], "rounding": p["rounding"]},
        grads=tuple(i for i in p["grads"] if args[i] is not None),
        grad_outputs=(draw.randn(*p["shape"], layout=p["grad_layout"]),),
    )


def _modulated(h, scale, shift):
    """Rows that share a row of scale are adjacent."""
    columns = h.shape[-1]
    groups = scale.numel() // columns
    share = h.numel() // columns // max(groups, 1)
    y = h.reshape(groups, share, columns) * (1 + scale.reshape(groups, 1, columns))
    if shift is not None:
        y = y + shift.reshape(groups, 1, columns)
    return y.reshape(h.shape)


def eager_fn(x, weight, scale, shift, *, eps, offset, rounding):
    """A DiT block's norm and modulation, each in the dtype that PyTorch gives it."""
    h = upcast(x) * torch.rsqrt(upcast(x).pow(2).mean(-1, keepdim=True) + eps)
    if rounding == "llama":
        h = h.to(x.dtype)
        h = h if weight is None else h * (offset + weight)
    else:
        h = (h if weight is None else h * (offset + upcast(weight))).to(x.dtype)
    return _modulated(h, scale, shift).to(x.dtype)


def _bytes(case, dtype, rows, modulations):
    p = params(case, DEFAULTS)
    size = 4 if p["wide"] else itemsize(dtype)
    modulation = math.prod(p["modulation"]) * p["shape"][-1] * size
    return rows * math.prod(p["shape"]) * itemsize(dtype) + modulations * (1 + p["shift"]) * modulation


def bytes_fwd(case, dtype):
    """x to y, with scale and shift."""
    return _bytes(case, dtype, 2, 1)


def bytes_bwd(case, dtype):
    """x and dy to dx; scale to the gradients of scale and shift."""
    return _bytes(case, dtype, 3, 1.5)


flops_fwd = flops_bwd = nothing


def _as_liger(fn, *tensors, eps, offset, rounding):
    return fn(*tensors, eps, offset, rounding, False)


PEERS = {"liger": liger("modulated_rms_norm", "LigerModulatedRMSNormFunction", _as_liger)}
