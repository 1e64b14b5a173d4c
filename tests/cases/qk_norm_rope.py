"""Cases of qk_norm_rope: RMSNorm of every head of q and k, then rotary embedding."""

import torch

from . import rms_norm, rope
from .case import Case, Inputs, Maker, bench_case, memory_bound, ours, params, test_case

NAME = "qk_norm_rope"
tigon_fn = ours(NAME)

DEFAULTS = {**rope.DEFAULTS, "weights": True, "weight_dtype": None, "eps": 1e-6, "offset": 0.0}
DEFAULTS |= {"rounding": "llama", "grads": (0, 1, 2, 3)}

QWEN3 = {"Hq": 32, "Hk": 8, "D": 128}
GEMMA3 = {"Hq": 8, "Hk": 4, "D": 256, "rounding": "gemma", "offset": 1.0}
CASES = [
    test_case("qwen3", B=1, T=5, **QWEN3),
    test_case("gemma3", B=1, T=5, **GEMMA3),
    test_case("heads_inside", T=9, D=64, unsqueeze_dim=2, layout="contiguous", grad_layout="contiguous"),
    test_case("tokens_inside", T=9, D=64, layout="contiguous", grad_layout="contiguous"),
    test_case("none", T=9, D=64, rounding="none", offset=0.5),
    test_case("head_dim_96", T=5, D=96, tables="random"),
    test_case("head_dim_80_rows", T=5, D=80, tables="random", layout="rows", grad_layout="rows"),
    test_case("odd", small=True, D=13, R=6, T=3, tables="random"),
    test_case(
        "odd_gemma", small=True, D=10, T=3, rounding="gemma", offset=1.0, options={"interleaved": True}
    ),
    test_case("wide_head", B=1, D=1000, R=512, T=3, tables="random"),
    test_case("partial", D=128, R=32, T=5, rounding="gemma", offset=1.0, tables="random"),
    test_case("tail", D=64, R=32, T=5, tables="random", options={"tail": True}),
    test_case("pairs", D=64, T=5, tables="random", options={"interleaved": True}),
    test_case("pairs_narrow", D=64, T=5, narrow=True, tables="random", options={"interleaved": True}),
    test_case(
        "mrope_mixed",
        D=128,
        T=5,
        batched=True,
        tables="random",
        options={"mrope_section": (24, 20, 20), "mrope_interleaved": True},
    ),
    test_case("positions", D=64, T=9, positions=torch.int64, batched=True, tables="random"),
    test_case("complex", D=64, T=5, complex=True, options={"interleaved": True, "keep_dtype": True}),
    test_case("packed", packed=True, T=67, D=64, layout="contiguous", grad_layout="contiguous"),
    test_case("one_tensor", Hk=None, D=64, T=5, grads=(0, 2)),
    test_case("weightless", D=64, T=5, weights=False, grads=(0, 1)),
    test_case("float_weights", D=64, T=5, weight_dtype=torch.float32),
    test_case("float_weights_gemma", D=64, T=5, weight_dtype=torch.float32, rounding="gemma"),
    test_case("float_tables", D=64, T=5, table_dtype=torch.float32),
    test_case(
        "float_all_kept",
        D=64,
        T=5,
        table_dtype=torch.float32,
        weight_dtype=torch.float32,
        options={"keep_dtype": True},
    ),
    test_case("misaligned", D=64, T=5, layout="offset1", grad_layout="offset1"),
    test_case("columns", D=64, T=5, layout="columns", grad_layout="columns"),
    test_case("grad_expanded", D=64, T=5, grad_layout="expanded"),
    test_case("long", B=1, T=523, Hq=3, Hk=1, D=64),
    test_case("frozen_weights", D=64, T=5, grads=(0, 1)),
    test_case("frozen_inputs", D=64, T=5, grads=(2, 3)),
    test_case("empty_time", T=0, D=64),
    test_case("eps", D=64, T=5, eps=0.5),
    test_case("nan_row", D=64, T=5, fill="nan"),
    bench_case("B8_T4096_32+8x128", B=8, T=4096, **QWEN3),
    bench_case("B8_T4096_16+8x256_gemma", B=8, T=4096, **{**GEMMA3, "Hq": 16, "Hk": 8}),
    bench_case("B8_T4096_32+8x64", B=8, T=4096, **{**QWEN3, "D": 64}),
    bench_case("B1_T16384_64+8x128", B=1, T=16384, **{**QWEN3, "Hq": 64}),
    bench_case("B4_T512_16+8x128", "bench_cpu", B=4, T=512, Hq=16, Hk=8, D=128),
    bench_case("B1_T64_4+2x64", "smoke", B=1, T=64, D=64),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case: rope's, and two weights."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed + 1)
    inner = rope.make(
        Case(case.name, {k: v for k, v in case.params.items() if k in rope.DEFAULTS}), device, dtype, seed
    )
    q, k, cos, sin = inner.args
    of = p["weight_dtype"]
    of = torch.promote_types(of, dtype) if of else dtype
    mean = 1.0 - p["offset"]
    weights = [draw.randn(p["D"], dtype=of, mean=mean, scale=0.5) if p["weights"] else None for _ in range(2)]
    norm = {"eps": p["eps"], "offset": p["offset"], "rounding": p["rounding"]}
    normed = of if p["weights"] and p["rounding"] != "gemma" else dtype
    kept = p["options"].get("keep_dtype")
    grads = tuple(g if kept else _like(g, torch.promote_types(normed, g.dtype)) for g in inner.grad_outputs)
    return Inputs(
        args=(q, k, weights[0], weights[1] if k is not None else None, cos, sin),
        kwargs={**norm, **inner.kwargs},
        grads=p["grads"],
        grad_outputs=grads,
    )


def _like(x, dtype):
    return x if x.dtype == dtype else x.to(dtype)


def _composed(norm_fn, rope_fn, q, k, q_weight, k_weight, cos, sin, eps, offset, rounding, **options):
    norm = {"eps": eps, "offset": offset, "rounding": rounding}
    n = [None if x is None else norm_fn(x, w, **norm) for x, w in ((q, q_weight), (k, k_weight))]
    y = rope_fn(*n, cos, sin, **options)
    if not options.get("keep_dtype"):
        return y
    return y.to(q.dtype) if k is None else tuple(x.to(q.dtype) for x in y)


def eager_fn(*args, **options):
    """The modules of Qwen3 and Gemma 3, one after the other."""
    return _composed(rms_norm.eager_fn, rope.eager_fn, *args, **options)


# q and k to results; x and dy to dx
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3, rope.elements_of)


PEERS = {}
