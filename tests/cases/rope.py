"""Cases of rope: rotary position embedding of q and k together, Hugging Face's half-split form."""

from __future__ import annotations

import torch

from .case import Case, Inputs, Maker, bench_case, itemsize, lay_out, params, test_case

NAME = "rope"

DEFAULTS = {
    "B": 2,
    "T": 5,
    "Hq": 4,
    "Hk": 2,
    "D": 16,
    "R": None,  # rotary columns; None: all of D
    "unsqueeze_dim": 1,  # 1: [B, H, T, D], 2: [B, T, H, D]
    "batched": False,  # cos and sin of [B, T, R] rather than [1, T, R]
    "layout": "heads",  # what Hugging Face passes: a transposed view of [B, T, H, D]
    "grad_layout": "heads",
    "table_layout": "contiguous",
    "tables": "angles",  # "random": left and right half of cos and sin differ
    "fill": None,
    "grads": (0, 1),
}

CASES = [
    test_case("small"),
    test_case("contiguous", layout="contiguous", grad_layout="contiguous"),
    test_case("batched_tables", batched=True),
    test_case("heads_32_8", T=33, Hq=32, Hk=8, D=64),
    test_case("one_token", T=1),
    test_case("one_head", Hq=1, Hk=1, T=7),
    test_case("more_k_heads", Hq=2, Hk=6),
    test_case("odd_half", small=True, D=6, T=3),
    test_case("two_columns", D=2, T=9),
    test_case("head_dim_128", T=65, D=128),
    test_case("head_dim_256", T=9, D=256),
    test_case("head_dim_80", T=17, D=80),
    test_case("long", B=1, T=1031, Hq=2, Hk=1, D=32),
    test_case("empty_batch", B=0),
    test_case("empty_time", T=0),
    test_case("partial_half", D=32, R=16),
    test_case("partial_odd", small=True, D=33, R=10, T=7),
    test_case("partial_strided", D=80, R=32, T=7, layout="rows", grad_layout="rows"),
    test_case("unsqueeze_2", unsqueeze_dim=2, layout="contiguous", grad_layout="contiguous"),
    test_case("unsqueeze_2_partial_batched", unsqueeze_dim=2, D=24, R=12, batched=True),
    test_case("rows", layout="rows", grad_layout="rows"),
    test_case("columns", layout="columns", grad_layout="columns"),
    test_case("transposed", layout="transposed", grad_layout="transposed"),
    test_case("misaligned", D=64, layout="offset1", grad_layout="offset1"),
    test_case("misaligned_tables", D=64, table_layout="offset1"),
    test_case("strided_tables", D=64, table_layout="columns", batched=True),
    test_case("expanded_tables", D=64, table_layout="expanded", batched=True),
    test_case("grad_expanded", grad_layout="expanded"),
    test_case("random_tables", D=64, T=9, tables="random"),
    test_case("random_tables_partial", small=True, D=24, R=16, tables="random", batched=True),
    test_case("q_only", grads=(0,)),
    test_case("k_only", grads=(1,)),
    test_case("nan_row", fill="nan"),
    test_case("inf_row", fill="inf", grad=False),
    bench_case("B4_T4096_32+8x128", B=4, T=4096, Hq=32, Hk=8, D=128),
    bench_case("B1_T16384_64+8x128", B=1, T=16384, Hq=64, Hk=8, D=128),
    bench_case("B8_T512_8+8x64", "bench_cpu", B=8, T=512, Hq=8, Hk=8, D=64),
    bench_case("B1_T64_4+2x64", "smoke", B=1, T=64, Hq=4, Hk=2, D=64),
]


def _tables(draw: Maker, p: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of [1 or B, T, R]."""
    batch, width = (p["B"] if p["batched"] else 1), p["R"] or p["D"]
    if p["tables"] == "random":
        cos, sin = draw.randn(batch, p["T"], width), draw.randn(batch, p["T"], width)
    else:
        inv = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        start = draw.integers(0, 100, batch, 1).cpu() if p["batched"] else torch.zeros(1, 1)
        angles = (start + torch.arange(p["T"], dtype=torch.float64)).unsqueeze(-1) * inv
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = (f(angles).to(draw.device, draw.dtype) for f in (torch.cos, torch.sin))
    return lay_out(cos, p["table_layout"]), lay_out(sin, p["table_layout"])


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)

    def states(heads: int, layout: str) -> torch.Tensor:
        inner = (heads, p["T"]) if p["unsqueeze_dim"] == 1 else (p["T"], heads)
        return draw.randn(p["B"], *inner, p["D"], layout=layout)

    q, k = states(p["Hq"], p["layout"]), states(p["Hk"], p["layout"])
    cos, sin = _tables(draw, p)
    if p["fill"] is not None:
        q[0, 0, 1, 3] = float(p["fill"])
        k[-1, -1, -1, 0] = float(p["fill"])
    grads = (states(p["Hq"], p["grad_layout"]), states(p["Hk"], p["grad_layout"]))
    return Inputs(
        args=(q, k, cos, sin),
        kwargs={"unsqueeze_dim": p["unsqueeze_dim"]},
        grads=p["grads"],
        grad_outputs=grads,
    )


def tigon_fn(q, k, cos, sin, **options):
    """Tigon's own."""
    import tigon

    return tigon.rope(q, k, cos, sin, **options)


def _rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def eager_fn(q, k, cos, sin, *, unsqueeze_dim=1):
    """apply_rotary_pos_emb of Hugging Face, with its split and concatenation where partial."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]

    def one(x):
        if width == x.shape[-1]:
            return x * cos + _rotate_half(x) * sin
        turned, kept = x[..., :width], x[..., width:]
        return torch.cat((turned * cos + _rotate_half(turned) * sin, kept), dim=-1)

    return one(q), one(k)


def oracle_fn(q, k, cos, sin, *, unsqueeze_dim=1):
    """The rotation written out half by half, for fp64."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    half = width // 2

    def one(x):
        a, b, kept = x[..., :half], x[..., half:width], x[..., width:]
        left = a * cos[..., :half] - b * sin[..., :half]
        right = b * cos[..., half:] + a * sin[..., half:]
        return torch.cat((left, right, kept), dim=-1)

    return one(q), one(k)


def bytes_fwd(case: Case, dtype: torch.dtype) -> int:
    """Read and write q and k; the tables are small."""
    p = params(case, DEFAULTS)
    return 2 * p["B"] * p["T"] * (p["Hq"] + p["Hk"]) * p["D"] * itemsize(dtype)


def bytes_bwd(case: Case, dtype: torch.dtype) -> int:
    """As forward, on the gradients."""
    return bytes_fwd(case, dtype)


def flops_fwd(case: Case) -> int:
    """Memory bound."""
    return 0


def flops_bwd(case: Case) -> int:
    """Memory bound."""
    return 0


def _liger(case, inputs):
    from liger_kernel.ops.rope import LigerRopeFunction

    if inputs.kwargs["unsqueeze_dim"] != 1:
        return None
    # Without a gradient to make this peer turns q and k in place; each call takes them as they are.
    return lambda q, k, cos, sin, **_: LigerRopeFunction.apply(q, k, cos, sin)


def _quack(case, inputs):
    from quack.rotary import apply_rotary_emb

    p = params(case, DEFAULTS)
    if p["batched"] or p["unsqueeze_dim"] != 1:
        return None
    # It wants [B, T, H, D] and the left half of [T, R] tables: views, so no time is added.
    half = (p["R"] or p["D"]) // 2

    def fn(q, k, cos, sin, **_):
        cos, sin = cos[0, :, :half], sin[0, :, :half]
        q, k = (apply_rotary_emb(x.transpose(1, 2), cos, sin) for x in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2)

    return fn


PEERS = {"liger": _liger, "quack": _quack}
