"""Cases of the gated linear units: swiglu, geglu, reglu, swiglu_oai."""

import torch
import torch.nn.functional as F

from .case import (
    PAPER_LENGTHS,
    Case,
    Inputs,
    Maker,
    bench_case,
    liger,
    memory_bound,
    params,
    pointwise_cases,
    test_case,
)

NAME = "glu"

DEFAULTS = {
    "shape": (4, 64),  # of the result
    "layout": "contiguous",  # of gate; "halves": gate and up are the halves of one tensor
    "packed": False,  # one tensor holds both and is passed as it is; swiglu_oai always
    "up_layout": None,  # as gate
}
DEFAULTS |= {"kind": "swiglu", "options": {}, "grad_layout": "contiguous", "scale": 2.0, "fill": None}
DEFAULTS |= {"fill_up": None, "grads": (0, 1)}


def _of_every_kind(kind: str, *, finite: bool = True, **options) -> list[Case]:
    """The edges of one formula, and the ways through the kernels that depend on it."""
    own = {"kind": kind, "options": options}
    name = "_".join((kind, *map(str, options.values())))
    packed = {"packed": True} | own
    cases = [
        test_case(f"{name}_odd", small=True, shape=(3, 7), **own),
        test_case(f"{name}_17x1031", shape=(17, 1031), **own),
        test_case(f"{name}_rows", shape=(9, 130), layout="rows", grad_layout="rows", **own),
        test_case(f"{name}_misaligned", shape=(7, 256), layout="offset1", grad_layout="offset1", **own),
        test_case(f"{name}_packed", small=True, shape=(2, 3, 40), **packed),
        test_case(f"{name}_packed_odd", shape=(5, 33), **packed),
        test_case(f"{name}_saturated", shape=(7, 256), scale=60.0, **own),
        test_case(f"{name}_tiny", shape=(7, 256), scale=1e-3, **own),
        test_case(f"{name}_nan_gate", shape=(5, 130), fill="nan", **own),
        test_case(f"{name}_nan_up", shape=(5, 130), fill_up="nan", **own),
        test_case(f"{name}_inf_gate", shape=(5, 130), fill="inf", grad=finite, **own),
        test_case(f"{name}_inf_up", shape=(5, 130), fill_up="-inf", grad=False, **own),
        test_case(f"{name}_zeros", shape=(5, 130), fill="zero", **own),
    ]
    if kind == "swiglu_oai" or "limit" in options:
        at = str(options.get("limit", 7))
        cases += [test_case(f"{name}_at_limits", shape=(5, 33), fill=at, fill_up=f"-{at}", **own)]
        cases += [test_case(f"{name}_up_only", shape=(7, 33), grads=(1,), **own)] * ("limit" in options)
    return cases


CASES = [
    *pointwise_cases(),
    test_case("rank3", shape=(2, 5, 333)),
    test_case("rows", shape=(9, 130), layout="rows", grad_layout="rows"),
    test_case("mixed_layouts", shape=(9, 130), layout="transposed", up_layout="rows"),
    test_case("misaligned_up", shape=(7, 256), up_layout="offset1"),
    test_case("halves", shape=(7, 256), layout="halves"),
    test_case("halves_odd", small=True, shape=(2, 3, 33), layout="halves"),
    test_case("expanded", shape=(7, 96), layout="expanded", grads=(1,)),
    test_case("gate_only", shape=(7, 33), grads=(0,)),
    test_case("up_only", shape=(7, 33), grads=(1,)),
    test_case("saturated", shape=(7, 256), scale=60.0),
    test_case("tiny", shape=(7, 256), scale=1e-3),
    test_case("inf_row", shape=(5, 130), fill="inf", grad=False),
    test_case("packed", small=True, shape=(2, 5, 33), packed=True),
    test_case("packed_wide", shape=(2, 20008), packed=True),
    test_case("packed_vector", shape=(97,), packed=True),
    test_case("packed_empty", shape=(3, 0), packed=True),
    test_case("packed_rows", shape=(9, 128), packed=True, layout="rows"),
    test_case("packed_transposed", shape=(9, 128), packed=True, layout="transposed"),
    test_case("multipliers_packed", shape=(9, 128), packed=True, options={"gate_multiplier": -1.5}),
    *_of_every_kind("swiglu", finite=False, gate_multiplier=0.75, down_multiplier=1.25),
    *_of_every_kind("geglu", approximate="tanh"),
    *_of_every_kind("geglu", approximate="none"),
    *_of_every_kind("reglu"),
    *_of_every_kind("swiglu_oai"),
    *_of_every_kind("swiglu", limit=1.5),
    test_case("limit_halves", shape=(7, 256), layout="halves", options={"limit": 1.5}),
    test_case("swiglu_oai_wide", shape=(2, 20008), kind="swiglu_oai"),
    test_case("swiglu_oai_vector", shape=(97,), kind="swiglu_oai"),
    test_case("swiglu_oai_strided", shape=(9, 128), layout="rows", kind="swiglu_oai"),
    test_case("swiglu_oai_options", kind="swiglu_oai", options={"alpha": 0.5, "limit": 1.5}),
    bench_case("16384x14336", shape=(16384, 14336)),
    bench_case("16384x4096", shape=(16384, 4096)),
    bench_case("16384x14336_packed", shape=(16384, 14336), packed=True),
    bench_case("16384x4096_packed", shape=(16384, 4096), packed=True),
    bench_case("16384x14336_multipliers", shape=(16384, 14336), options={"gate_multiplier": 0.75}),
    bench_case("16384x14336_geglu_tanh", shape=(16384, 14336), kind="geglu"),
    bench_case("16384x14336_geglu_none", shape=(16384, 14336), kind="geglu", options={"approximate": "none"}),
    bench_case("16384x14336_reglu", shape=(16384, 14336), kind="reglu"),
    bench_case("65536x2880_swiglu_oai", shape=(65536, 2880), kind="swiglu_oai"),
    *(
        bench_case(f"paper_{kind}_4x{t}x11008", "paper", shape=(4 * t, 11008), kind=kind)
        for kind in ("swiglu", "geglu")
        for t in PAPER_LENGTHS
    ),
    bench_case("4096x1536", "bench_cpu", shape=(4096, 1536)),
    bench_case("1024x8192", "bench_cpu", shape=(1024, 8192)),
    bench_case("128x1024", "smoke", shape=(128, 1024)),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    shape, scale = p["shape"], p["scale"]
    interleaved = p["kind"] == "swiglu_oai"
    one = interleaved or p["packed"]
    if one or p["layout"] == "halves":
        layout = "contiguous" if p["layout"] == "halves" else p["layout"]
        both = draw.randn(*shape[:-1], 2 * shape[-1], scale=scale, layout=layout)
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
    else:
        gate = draw.randn(*shape, layout=p["layout"], scale=scale)
        up = draw.randn(*shape, layout=p["up_layout"] or p["layout"])
    for value, fill in ((gate, p["fill"]), (up, p["fill_up"])):
        if fill == "zero":
            value[1] = 0.0
        elif fill is not None:
            value[1, 3] = float(fill)
    grad = draw.randn(*shape, layout=p["grad_layout"])
    args, grads = ((both,), (0,)) if one else ((gate, up), p["grads"])
    kwargs = p["options"] if p["kind"] == "swiglu" else {"kind": p["kind"], **p["options"]}
    return Inputs(args=args, kwargs=kwargs, grads=grads, grad_outputs=(grad,))


def tigon_fn(gate, up=None, *, kind="swiglu", **options):
    """Tigon's own."""
    import tigon

    args = (gate,) if up is None else (gate, up)
    return getattr(tigon, kind)(*args, **options)


def _apart(gate, up, kind):
    if kind == "swiglu_oai":
        return gate[..., ::2], gate[..., 1::2]
    return gate.chunk(2, dim=-1) if up is None else (gate, up)


def _clamped(gate, up, alpha=1.702, limit=7.0, kind="swiglu_oai"):
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if kind == "swiglu":
        return F.silu(gate) * up
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def eager_fn(gate, up=None, *, kind="swiglu", gate_multiplier=1.0, down_multiplier=1.0, **options):
    """As the models of Hugging Face have it between their matmuls."""
    gate, up = _apart(gate, up, kind)
    if kind == "swiglu_oai" or "limit" in options:
        return _clamped(gate, up, **options, kind=kind)
    if kind == "geglu":
        return F.gelu(gate, **{"approximate": "tanh", **options}) * up
    if kind == "reglu":
        return F.relu(gate) * up
    if gate_multiplier == down_multiplier == 1.0:
        return F.silu(gate) * up
    return F.silu(gate * gate_multiplier) * up * down_multiplier


bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(3, 5)  # gate, up to y; gate, up, dy to dgate, dup


def _liger(case, inputs):
    if len(inputs.args) != 2:
        return None
    if not inputs.kwargs:
        fn = liger("swiglu", "LigerSiLUMulFunction")(case, inputs)
    elif inputs.kwargs == {"kind": "geglu"}:
        fn = liger("geglu", "LigerGELUMulFunction")(case, inputs)
    else:
        return None
    return lambda gate, up, **_: fn(gate, up)


PEERS = {"liger": _liger}
