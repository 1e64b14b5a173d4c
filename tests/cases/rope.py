"""Cases of rope: rotary position embedding of q and k together, in the forms of Hugging Face's models."""

import torch

from .case import (
    PAPER_HIDDEN,
    Case,
    Inputs,
    Maker,
    bench_case,
    lay_out,
    memory_bound,
    ours,
    params,
    test_case,
    upcast,
)

NAME = "rope"
tigon_fn = ours(NAME)

DEFAULTS = {
    "R": None,  # rotary columns; None: all of D
    "unsqueeze_dim": 1,  # 1: [B, H, T, D], 2: [B, T, H, D]
    "batched": False,  # cos and sin of [B, T, R] rather than [1, T, R]
    "layout": "heads",  # what Hugging Face passes: a transposed view of [B, T, H, D]
    "tables": "angles",  # "random": left and right half of cos and sin differ
    "packed": False,  # [T, H, D] (unsqueeze_dim 1) or [H, T, D] (0), cos and sin [T, R]
    "positions": None,  # dtype of position ids into a table of 2 T + 3 rows
    "narrow": False,  # cos and sin of R/2 columns
    "complex": False,  # freqs_cis
    "options": {},  # of tigon.rope
}
DEFAULTS |= {"B": 2, "T": 5, "Hq": 4, "Hk": 2, "D": 16, "grad_layout": "heads", "table_layout": "contiguous"}
DEFAULTS |= {"fill": None, "grads": (0, 1), "table_dtype": None}

# What several cases have in common.
DENSE = {"layout": "contiguous", "grad_layout": "contiguous"}
ROWS = {"layout": "rows", "grad_layout": "rows"}
MISALIGNED = {"layout": "offset1", "grad_layout": "offset1"}
LLAMA = {"T": 4096, "Hq": 32, "Hk": 8, "D": 128}
PAIRS = {"interleaved": True}
DEINTERLEAVE = {"interleaved": True, "deinterleave": True}
LLAMA4 = {"interleaved": True, "keep_dtype": True}
VISION = {"packed": True, "table_dtype": torch.float32, "options": {"keep_dtype": True, "unsqueeze_dim": -2}}
MIXED = {"mrope_interleaved": True}


def _mrope(name: str, section: tuple[int, ...], options: dict | None = None, **more) -> Case:
    options = {"mrope_section": section, **(options or {})}
    return test_case(name, tables="random", options=options, **more)


CASES = [
    test_case("small"),
    test_case("contiguous", **DENSE),
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
    test_case("partial_strided", D=80, R=32, T=7, **ROWS),
    test_case("unsqueeze_2", unsqueeze_dim=2, **DENSE),
    test_case("unsqueeze_2_partial_batched", unsqueeze_dim=2, D=24, R=12, batched=True),
    test_case("rows", **ROWS),
    test_case("columns", layout="columns", grad_layout="columns"),
    test_case("transposed", layout="transposed", grad_layout="transposed"),
    test_case("misaligned", D=64, **MISALIGNED),
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
    test_case("one_tensor", Hk=None, grads=(0,)),
    test_case(
        "one_tensor_partial", Hk=None, grads=(0,), D=128, R=64, T=9, unsqueeze_dim=2, layout="contiguous"
    ),
    test_case("packed", packed=True, T=37, D=64, **DENSE),
    test_case("packed_heads_first", packed=True, unsqueeze_dim=0, layout="contiguous", grad_layout="rows"),
    test_case("vision", T=37, Hk=4, D=80, layout="rows", grad_layout="contiguous", **VISION),
    test_case("keep_dtype", D=64, T=9, table_dtype=torch.float32, options={"keep_dtype": True}),
    test_case("wide_head", D=512, T=3, tables="random"),
    test_case("head_dim_96_partial", D=96, R=48, T=5, tables="random"),
    test_case("positions", D=64, T=9, positions=torch.int64, batched=True, tables="random"),
    test_case("positions_one_row", T=9, positions=torch.int32, tables="random"),
    test_case("pairs", D=64, T=9, tables="random", options=PAIRS),
    test_case("pairs_small", small=True, D=12, R=10, T=3, tables="random", options=PAIRS),
    test_case("pairs_partial_batched", D=128, R=64, T=5, batched=True, tables="random", options=PAIRS),
    test_case("pairs_narrow", D=128, R=64, narrow=True, T=5, tables="random", options=PAIRS),
    test_case("pairs_narrow_odd", D=70, R=42, narrow=True, T=5, tables="random", options=PAIRS),
    test_case("pairs_misaligned", D=64, **MISALIGNED, options=PAIRS),
    test_case("pairs_tail", D=96, R=32, T=5, narrow=True, tables="random", options={**LLAMA4, "tail": True}),
    test_case("halves_narrow", D=64, T=9, narrow=True, tables="random"),
    test_case("halves_narrow_wide_head", D=320, R=320, T=3, narrow=True, tables="random"),
    test_case("pairs_wide_head", D=320, R=320, T=3, tables="random", options=PAIRS),
    test_case("halves_tail", small=True, D=20, R=12, T=3, tables="random", options={"tail": True}),
    test_case("deinterleave", D=64, T=9, narrow=True, tables="random", options=DEINTERLEAVE),
    test_case("deinterleave_full", small=True, D=26, R=20, T=3, tables="random", options=DEINTERLEAVE),
    test_case("deinterleave_slice", D=64, T=5, Hk=1, **ROWS, batched=True, options=DEINTERLEAVE),
    _mrope("mrope", (8, 12, 12), D=64, T=9, batched=True),
    _mrope("mrope_packs", (16, 8, 8), D=64, T=5),
    _mrope("mrope_small", (2, 3, 1), small=True, D=12, T=3),
    _mrope("mrope_128", (16, 24, 24), D=128, T=5, narrow=True),
    _mrope("mrope_mixed", (24, 20, 20), MIXED, D=128, T=9, batched=True),
    _mrope(
        "mrope_mixed_partial_positions",
        (6, 5, 5),
        MIXED,
        D=64,
        R=32,
        T=9,
        positions=torch.int64,
        batched=True,
    ),
    _mrope("mrope_pairs", (8, 8, 8), PAIRS, D=64, T=9, R=48, narrow=True),
    _mrope("mrope_pairs_full", (7, 12, 13), PAIRS, D=64, T=9),
    _mrope("mrope_deinterleave", (8, 12, 12), DEINTERLEAVE, D=64, T=5),
    test_case("complex", D=64, T=9, complex=True, batched=True, unsqueeze_dim=2, **DENSE, options=LLAMA4),
    test_case("complex_odd", D=6, T=9, complex=True, options=PAIRS),
    bench_case("B8_T4096_32+8x128", B=8, **LLAMA),
    bench_case("B8_T4096_32+8x128_pairs", B=8, **LLAMA, options=PAIRS),
    bench_case(
        "B8_T4096_32+8x128_mrope", B=8, **LLAMA, batched=True, options={"mrope_section": (16, 24, 24)}
    ),
    bench_case(
        "B8_T4096_32+8x128_complex", B=8, **LLAMA, complex=True, unsqueeze_dim=2, **DENSE, options=LLAMA4
    ),
    bench_case("packed_T32768_32+8x128", packed=True, B=1, T=32768, Hq=32, Hk=8, D=128, **DENSE),
    bench_case("B4_T4096_32+32x64_mla", B=4, T=4096, Hq=32, Hk=32, D=64, narrow=True, options=DEINTERLEAVE),
    bench_case("B8_T4096_16+8x256", B=8, T=4096, Hq=16, Hk=8, D=256),
    bench_case("B4_T4096_32+8x128", B=4, **LLAMA),
    bench_case("B1_T16384_64+8x128", B=1, T=16384, Hq=64, Hk=8, D=128),
    *(
        bench_case(f"paper_B4_T2048_H{h}", "paper", B=4, T=2048, Hq=h // 128, Hk=h // 128, D=128)
        for h in PAPER_HIDDEN
    ),
    bench_case("B8_T512_8+8x64", "bench_cpu", B=8, T=512, Hq=8, Hk=8, D=64),
    bench_case("B1_T64_4+2x64", "smoke", B=1, T=64, Hq=4, Hk=2, D=64),
]


def _tables(draw: Maker, p: dict) -> tuple:
    """cos and sin of [axes, B or 1, T, R]: axes only for M-RoPE, no batch when packed; position ids."""
    batch, width = (p["B"] if p["batched"] else 1), p["R"] or p["D"]
    axes = (3,) if "mrope_section" in p["options"] else ()
    rows, lead, ids = p["T"], (*axes, batch), None
    if p["positions"] is not None:
        rows, lead, batch = 2 * p["T"] + 3, (), 1
        ids = (
            draw.integers(0, rows, *axes, p["B"], p["T"]) if p["batched"] else draw.integers(0, rows, p["T"])
        )
        ids = ids.to(p["positions"])
    if p["tables"] == "random":
        columns = width // 2 if p["narrow"] else width
        cos, sin = (draw.randn(*lead, rows, columns, dtype=p["table_dtype"]) for _ in range(2))
    else:
        inv = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        start = draw.integers(0, 100, *lead, 1).cpu() if p["batched"] else torch.zeros(*lead, 1)
        angles = (start + torch.arange(rows, dtype=torch.float64)).unsqueeze(-1) * inv
        if p["complex"]:
            kind = torch.complex128 if draw.dtype == torch.float64 else torch.complex64
            return torch.polar(torch.ones_like(angles), angles).to(draw.device, kind), None, None
        if not p["narrow"]:
            pairwise = p["options"].get("interleaved") and not p["options"].get("deinterleave")
            angles = angles.repeat_interleave(2, -1) if pairwise else torch.cat((angles, angles), dim=-1)
        cos, sin = (f(angles).to(draw.device, p["table_dtype"] or draw.dtype) for f in (torch.cos, torch.sin))
    if p["packed"]:
        cos, sin = cos[0], sin[0]
    return lay_out(cos, p["table_layout"]), lay_out(sin, p["table_layout"]), ids


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)

    def states(heads: int | None, layout: str, of: torch.dtype | None = None) -> torch.Tensor | None:
        if heads is None:
            return None
        lead = () if p["packed"] else (p["B"],)
        heads_first = p["unsqueeze_dim"] == len(lead)
        inner = (heads, p["T"]) if heads_first else (p["T"], heads)
        return draw.randn(*lead, *inner, p["D"], layout=layout, dtype=of)

    q, k = states(p["Hq"], p["layout"]), states(p["Hk"], p["layout"])
    cos, sin, ids = _tables(draw, p)
    if p["fill"] is not None:
        q[0, 0, 1, 3] = float(p["fill"])
        k[-1, -1, -1, 0] = float(p["fill"])
    real = torch.promote_types(dtype, cos.real.dtype)
    wide = dtype if p["options"].get("keep_dtype") else real
    grads = [states(heads, p["grad_layout"], wide) for heads in (p["Hq"], p["Hk"]) if heads is not None]
    options = {"unsqueeze_dim": p["unsqueeze_dim"], **p["options"]}
    if p["narrow"]:
        options["rotary_dim"] = p["R"] or p["D"]
    if ids is not None:
        options["position_ids"] = ids
    return Inputs(args=(q, k, cos, sin), kwargs=options, grads=p["grads"], grad_outputs=tuple(grads))


def _rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _sections(table, section, mixed, pairwise):
    """One table of three, as Qwen2-VL (cat) and Qwen3-VL (strided copies) make it; `pairwise`: GLM-4V."""
    if pairwise:
        return torch.stack([_sections(table[..., i::2], section, mixed, False) for i in (0, 1)], -1).flatten(
            -2
        )
    if sum(section) < table.shape[-1]:
        halves = table.tensor_split(2, dim=-1)
        return torch.cat([_sections(half, section, mixed, False) for half in halves], dim=-1)
    if not mixed:
        return torch.cat([part[i] for i, part in enumerate(table.split(list(section), dim=-1))], dim=-1)
    merged = table[0].clone()
    for axis in (1, 2):
        turn = slice(axis, 3 * section[axis], 3)
        merged[..., turn] = table[axis][..., turn]
    return merged


def eager_fn(
    q,
    k,
    cos,
    sin,
    *,
    unsqueeze_dim=1,
    interleaved=False,
    deinterleave=False,
    rotary_dim=None,
    tail=False,
    position_ids=None,
    mrope_section=None,
    mrope_interleaved=False,
    keep_dtype=False,
):
    """The functions of Hugging Face's models: llama's, and what others do before and after it."""
    if sin is None:
        return _eager_complex(q, k, cos, unsqueeze_dim, keep_dtype)
    narrow = rotary_dim is not None and rotary_dim > cos.shape[-1]
    if position_ids is not None:
        cos, sin = cos[position_ids.long()], sin[position_ids.long()]
    if mrope_section is not None:
        pairwise = interleaved and not deinterleave and not narrow
        cos, sin = (_sections(x, mrope_section, mrope_interleaved, pairwise) for x in (cos, sin))
    if narrow:
        pairwise = interleaved and not deinterleave
        cos, sin = (x.repeat_interleave(2, -1) if pairwise else torch.cat((x, x), -1) for x in (cos, sin))
    if cos.dim() == q.dim() - 2:
        cos, sin = cos[None], sin[None]
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]

    def turn(x):
        if deinterleave:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return x * cos + (_rotate_pairs if interleaved and not deinterleave else _rotate_half)(x) * sin

    def one(x):
        if x is None:
            return None
        start = x.shape[-1] - width if tail else 0
        before, turned, after = x[..., :start], x[..., start : start + width], x[..., start + width :]
        y = turn(turned)
        y = y if width == x.shape[-1] else torch.cat((before, y, after), dim=-1)
        return y.to(x.dtype) if keep_dtype else y

    return one(q) if k is None else (one(q), one(k))


def _eager_complex(q, k, freqs, unsqueeze_dim, keep_dtype):
    """Llama 4's."""
    freqs = freqs.unsqueeze(unsqueeze_dim)

    def one(x):
        z = torch.view_as_complex(upcast(x).reshape(*x.shape[:-1], -1, 2))
        y = torch.view_as_real(z * freqs).flatten(-2)
        return y.type_as(x) if keep_dtype else y

    return one(q), one(k)


def elements_of(case: Case) -> int:
    """q and k; the tables are small."""
    p = DEFAULTS | case.params
    return p["B"] * p["T"] * (p["Hq"] + (p["Hk"] or 0)) * p["D"]


# q and k to results, their gradients likewise
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 2, elements_of)


def _liger(case, inputs):
    from liger_kernel.ops import llama4_rope, qwen2vl_mrope, rope

    # Without a gradient to make this peer turns q and k in place; each call takes them as they are.
    q, k, cos, _ = inputs.args
    options = {name: value for name, value in inputs.kwargs.items() if value}
    sections = options.pop("mrope_section", None)
    if k is None or q.dim() != 4:
        return None
    if cos.is_complex():
        if options.pop("keep_dtype", False) and options == {"unsqueeze_dim": 2, "interleaved": True}:
            return lambda q, k, freqs, *_, **__: llama4_rope.LigerLlama4RopeFunction.apply(q, k, freqs)
        return None
    if options != {"unsqueeze_dim": 1}:
        return None
    if sections is None:
        return lambda q, k, cos, sin, **_: rope.LigerRopeFunction.apply(q, k, cos, sin)
    of = qwen2vl_mrope.LigerQwen2VLMRopeFunction if cos.shape[1] == q.shape[0] else None
    return of and (lambda q, k, cos, sin, **_: of.apply(q, k, cos, sin, sections))


def _quack(case, inputs):
    from quack.rotary import apply_rotary_emb

    p = params(case, DEFAULTS)
    if p["batched"] or p["packed"] or inputs.kwargs != {"unsqueeze_dim": 1} or inputs.args[1] is None:
        return None
    # It wants [B, T, H, D] and the left half of [T, R] tables: views, so no time is added.
    half = (p["R"] or p["D"]) // 2

    def fn(q, k, cos, sin, **_):
        cos, sin = cos[0, :, :half], sin[0, :, :half]
        q, k = (apply_rotary_emb(x.transpose(1, 2), cos, sin) for x in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2)

    return fn


class _Alias(torch.autograd.Function):
    """The same memory as a tensor of its own: a leaf may not be rotated in place."""

    @staticmethod
    def forward(ctx, x):
        return x.new_empty(0).set_(x.detach())

    @staticmethod
    def backward(ctx, dx):
        return dx


def _inplace(case, inputs):
    import tigon

    if inputs.kwargs != {"unsqueeze_dim": 1} or inputs.args[1] is None:
        return None
    return lambda q, k, cos, sin, **_: tigon.rope(_Alias.apply(q), _Alias.apply(k), cos, sin, inplace=True)


PEERS = {"tigon_inplace": _inplace, "liger": _liger, "quack": _quack}
