"""Cases of the experts of a mixture: tigon.experts, and tigon.grouped_mlp of sorted rows."""

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, itemsize, params, test_case, upcast

NAME = "experts"

DEFAULTS = {
    "limit": 1.5,  # of the clamped units: inputs on both sides
    "weights": "float32",  # dtype of the routing weights, "storage", or None
    "routing": "balanced",  # "one": all tokens to one expert; "twice"; "rest": some ids not here; "zipf"
    "layout": "contiguous",  # of x
    "leading": (),  # tokens in more dimensions
    "sorted": False,  # grouped_mlp
    "rank": 0,  # of adapters of the frozen matrices
    "adapted": ("gate_up_a", "gate_up_b", "down_a", "down_b"),  # an adapter has both of its parts
    "shared": (),  # parts that all experts have in common
    "wide_adapters": True,  # float32
}
DEFAULTS |= {"tokens": 12, "hidden": 32, "inner": 24, "experts": 4, "choices": 2, "activation": "silu"}
DEFAULTS |= {"gated": True, "interleaved": False, "transposed": False, "bias": False}
DEFAULTS |= {"grad_layout": "contiguous", "grads": (0, 1, 2)}
DEFAULTS |= {"trained": ("gate_up_a", "gate_up_b", "down_a", "down_b")}

OAI = {"activation": "swiglu_oai", "interleaved": True, "transposed": True, "bias": True}

# tokens, and sizes of models (hidden, inner, experts, choices)
QWEN = {"hidden": 2048, "inner": 768, "experts": 128, "choices": 8}
MIXTRAL = {"hidden": 4096, "inner": 14336, "experts": 8, "choices": 2}
GPT_OSS = {"hidden": 2880, "inner": 2880, "experts": 32, "choices": 4} | OAI
DEEPSEEK = {"hidden": 7168, "inner": 2048, "experts": 8, "choices": 1}  # eight local experts

CASES = [
    test_case("balanced", small=True),
    test_case("one_token", tokens=1),
    test_case("all_choices", experts=4, choices=4),
    test_case("one_choice", choices=1),
    test_case("one_expert", experts=1, choices=1),
    test_case("one_for_all", routing="one"),
    test_case("twice", routing="twice"),
    test_case("not_here", small=True, routing="rest"),
    test_case("none_here", routing="none"),
    test_case("zipf", tokens=70, experts=16, choices=3, routing="zipf"),
    test_case("many_empty", tokens=3, experts=33),
    test_case("empty", tokens=0),
    test_case("odd", tokens=7, hidden=31, inner=13, experts=3),
    test_case("odd_interleaved", tokens=7, hidden=31, inner=13, experts=3, interleaved=True, bias=True),
    test_case("wide", tokens=5, hidden=1100, inner=40),
    test_case("long", tokens=200, hidden=24, inner=1040, experts=2),
    test_case("rank3", tokens=12, leading=(3, 4)),
    test_case("rows", layout="rows", grad_layout="rows"),
    test_case("columns", layout="columns", grad_layout="columns"),
    test_case("misaligned", layout="offset1", grad_layout="offset1"),
    test_case("grad_expanded", grad_layout="expanded"),
    test_case("storage_weights", weights="storage"),
    test_case("no_weights", weights=None),
    test_case("x_only", grads=(0,)),
    test_case("gate_up_only", grads=(1,)),
    test_case("frozen", grads=(0, 4)),
    test_case("bias", bias=True, routing="rest"),
    test_case("transposed", transposed=True),
    test_case("interleaved", interleaved=True),
    test_case("oai", small=True, **OAI),
    test_case("oai_zipf", tokens=70, experts=16, choices=3, routing="zipf", **OAI),
    test_case("oai_halves", activation="swiglu_oai", bias=True),
    test_case("clamped", small=True, activation="swiglu_clamped"),
    test_case("clamped_bias", activation="swiglu_clamped", bias=True, interleaved=True, routing="rest"),
    test_case("clamped_sorted", activation="swiglu_clamped", sorted=True, choices=1, transposed=True),
    *(test_case(a, activation=a) for a in ("gelu", "gelu_tanh", "relu", "relu_squared")),
    *(test_case(f"{a}_alone", activation=a, gated=False) for a in ("silu", "gelu", "gelu_tanh", "relu")),
    test_case("relu_squared_alone", activation="relu_squared", gated=False, bias=True, transposed=True),
    test_case("lora", small=True, rank=8, grads=(0, 4)),
    test_case("lora_oai", small=True, rank=5, routing="rest", **OAI),
    test_case("lora_odd", tokens=7, hidden=31, inner=13, experts=3, rank=3, interleaved=True, grads=(0,)),
    test_case("lora_storage", rank=16, wide_adapters=False, weights="storage", routing="twice", grads=(0, 4)),
    test_case("lora_rank_72", rank=72, transposed=True, routing="zipf", grads=(0, 4)),
    test_case("lora_tiles", tokens=300, hidden=136, inner=72, experts=3, rank=24, grads=(0, 4)),
    test_case("lora_gate_up", rank=8, adapted=("gate_up_a", "gate_up_b"), trained=("gate_up_a",), grads=(0,)),
    test_case("lora_down", rank=8, adapted=("down_a", "down_b"), trained=("down_b",), bias=True, grads=(4,)),
    test_case("lora_b_only", rank=4, trained=("gate_up_b",), weights=None, grads=()),
    test_case("lora_a_only", rank=4, trained=("down_a",), weights=None, grads=()),
    test_case("lora_shared", rank=8, shared=("gate_up_a", "down_b"), grads=(0, 4)),
    test_case("lora_alone", rank=8, activation="relu_squared", gated=False, grads=(0, 4)),
    test_case("lora_many_empty", tokens=3, experts=33, rank=8, grads=(0, 4)),
    test_case("lora_none_here", rank=8, routing="none", grads=(0, 4)),
    test_case("lora_empty", rank=8, tokens=0, grads=(0, 4)),
    test_case("lora_sorted", small=True, rank=6, sorted=True, choices=1, routing="rest", grads=(0, 4)),
    test_case("sorted", small=True, sorted=True, choices=1),
    test_case("sorted_bias", sorted=True, choices=1, bias=True, routing="rest"),
    test_case("sorted_rest", sorted=True, choices=1, weights=None, routing="rest"),
    test_case("sorted_rows", sorted=True, choices=1, layout="rows", grad_layout="expanded"),
    test_case("sorted_empty", sorted=True, choices=1, tokens=0),
    *(bench_case(f"qwen3_30b_{t}", tokens=t, **QWEN) for t in (8192, 16384, 32768)),
    bench_case("qwen3_30b_8192_zipf", tokens=8192, routing="zipf", **QWEN),
    bench_case("mixtral_8x7b_8192", tokens=8192, **MIXTRAL),
    bench_case("gpt_oss_20b_8192", tokens=8192, limit=7.0, **GPT_OSS),
    bench_case("deepseek_v3_local_65536", tokens=65536, **DEEPSEEK),
    bench_case("qwen3_30b_8192_r16", tokens=8192, rank=16, grads=(0, 4), **QWEN),
    bench_case("qwen3_30b_512_r16", tokens=512, rank=16, grads=(0, 4), **QWEN),
    bench_case("cpu_1024", "bench_cpu", tokens=1024, hidden=512, inner=256, experts=32, choices=4),
    bench_case("128", "smoke", tokens=128, hidden=64, inner=64, experts=8, choices=2),
]


def _routing(p, maker: Maker) -> torch.Tensor:
    tokens, experts, choices = p["tokens"], p["experts"], p["choices"]
    if p["routing"] in ("one", "twice"):
        ids = maker.integers(0, experts, tokens, choices)
        return (
            ids[:, :1].expand(-1, choices).contiguous() if p["routing"] == "twice" else ids * 0 + experts - 1
        )
    if p["routing"] == "none":
        return maker.integers(experts, experts + 3, tokens, choices)
    scores = maker.randn(tokens, experts, dtype=torch.float32)
    if p["routing"] == "zipf":
        scores += 2 * torch.arange(1, experts + 1, device=scores.device).float().reciprocal().log()
    ids = scores.topk(choices, dim=-1).indices
    if p["routing"] == "rest":
        away = maker.integers(0, 3, tokens, choices)
        ids = torch.where(away == 0, experts + away, ids)
    return ids


def make(case: Case, device, dtype, seed: int) -> Inputs:
    """Arguments of one call."""
    p = params(case, DEFAULTS)
    maker = Maker(case, device, dtype, seed)
    tokens, hidden, inner, experts = (p[n] for n in ("tokens", "hidden", "inner", "experts"))
    wide = 2 * inner if p["gated"] else inner
    first, second = (experts, wide, hidden), (experts, hidden, inner)
    if p["transposed"]:
        first, second = (experts, hidden, wide), (experts, inner, hidden)
    shape = (*(p["leading"] or (tokens,)), hidden)
    x = maker.randn(*shape, layout=p["layout"])
    gate_up, down = maker.randn(*first, scale=hidden**-0.5), maker.randn(*second, scale=inner**-0.5)
    ids = _routing(p, maker)
    weights = None
    if p["weights"] is not None:
        of = dtype if p["weights"] == "storage" or dtype == torch.float64 else torch.float32
        weights = maker.randn(*ids.shape, dtype=torch.float32).sigmoid().to(of)
    kwargs = {n: p[n] for n in ("activation", "gated", "interleaved", "transposed", "limit")}
    names = ("gate_up_bias", "down_bias") if p["bias"] else ()
    kwargs |= {
        n: maker.randn(experts, size, scale=0.5) for n, size in zip(names, (wide, hidden), strict=False)
    }
    if p["rank"]:
        kwargs["scale"], of = 1.7, torch.float32 if p["wide_adapters"] and dtype != torch.float64 else dtype
        for name, cols, rows in (("gate_up", hidden, wide), ("down", inner, hidden)):
            for part, size, by in (("a", (p["rank"], cols), cols), ("b", (rows, p["rank"]), p["rank"])):
                size = size if f"{name}_{part}" in p["shared"] else (experts, *size)
                if f"{name}_{part}" in p["adapted"]:
                    kwargs[f"{name}_{part}"] = maker.randn(*size, scale=0.5 * by**-0.5, dtype=of)
    if p["sorted"]:
        counts = torch.bincount(ids[ids < experts], minlength=experts)
        ids, weights = counts.cumsum(0).int(), None if weights is None else weights.reshape(-1)
    elif p["leading"]:
        ids = ids.reshape(*p["leading"], -1)
        weights = weights.reshape(ids.shape)
    grads = p["grads"] + ((4,) if weights is not None and p["grads"] == DEFAULTS["grads"] else ())
    grad_kwargs = names if p["grads"] == DEFAULTS["grads"] else ()
    grad_kwargs += tuple(n for n in p["trained"] if n in kwargs)
    dy = maker.randn(*shape, layout=p["grad_layout"])
    return Inputs((x, gate_up, down, ids, weights), kwargs, grads, (dy,), grad_kwargs)


def tigon_fn(x, gate_up, down, ids, weights, **options) -> torch.Tensor:
    """Tigon's op: offsets have one dimension."""
    import tigon

    scale = options.pop("scale", None)
    for name in ("gate_up", "down"):
        if f"{name}_a" in options:
            options[f"{name}_lora"] = options.pop(f"{name}_a"), options.pop(f"{name}_b"), scale
    in_order = getattr(ids, "ndim", 2) == 1
    return (tigon.grouped_mlp if in_order else tigon.experts)(x, gate_up, down, ids, weights, **options)


def _unit(z, activation, gated, interleaved, alpha, limit):
    if not gated:
        gate, up = z, 1
    elif interleaved:
        gate, up = z[:, ::2], z[:, 1::2]
    else:
        gate, up = z.chunk(2, dim=-1)
    if activation in ("swiglu_oai", "swiglu_clamped"):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if activation == "swiglu_clamped":
            return F.silu(gate) * up
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    if activation == "relu_squared":
        return F.relu(gate).square() * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    return getattr(F, activation)(gate) * up


def _adapted(rows, e, stack, transposed, scale, a, b):
    y = rows @ (stack[e] if transposed else stack[e].t())
    if a is None:
        return y
    a, b = (t[e] if t.dim() == 3 else t for t in (a, b))
    return y + (rows @ a.to(rows.dtype).t() * scale) @ b.to(rows.dtype).t()


def _of_expert(rows, e, gate_up, down, gate_up_bias, down_bias, transposed, unit, scale, adapters):
    z = _adapted(rows, e, gate_up, transposed, scale, *adapters[:2])
    z = z if gate_up_bias is None else z + gate_up_bias[e]
    y = _adapted(_unit(z, *unit), e, down, transposed, scale, *adapters[2:])
    return y if down_bias is None else y + down_bias[e]


def eager_fn(
    x,
    gate_up,
    down,
    ids,
    weights,
    *,
    activation="silu",
    gated=True,
    interleaved=False,
    transposed=False,
    gate_up_bias=None,
    down_bias=None,
    alpha=1.702,
    limit=7.0,
    scale=1.0,
    gate_up_a=None,
    gate_up_b=None,
    down_a=None,
    down_b=None,
) -> torch.Tensor:
    """transformers' loop over experts, the K rows of a token added in float32 as its grouped path does."""
    experts = gate_up.shape[0]
    unit = (activation, gated, interleaved, alpha, limit)
    adapters = gate_up_a, gate_up_b, down_a, down_b
    rows = x.reshape(-1, x.shape[-1])
    if ids.dim() == 1:
        ends = ids.tolist()
        slots = [torch.arange(a, b, device=x.device) for a, b in zip([0, *ends], ends, strict=False)]
        tokens, count, choices = slots, rows.shape[0], 1
    else:
        flat = ids.reshape(-1)
        choices, count = ids.shape[-1], flat.numel()
        slots = [(flat == e).nonzero()[:, 0] for e in range(experts)]
        tokens = [s // choices for s in slots]
    out = torch.zeros(count, rows.shape[-1], dtype=upcast(rows[:0]).dtype, device=x.device)
    for e in range(experts):
        if slots[e].numel() == 0:
            continue
        biases = gate_up_bias, down_bias
        y = _of_expert(rows[tokens[e]], e, gate_up, down, *biases, transposed, unit, scale, adapters)
        if weights is not None:
            y = y * weights.reshape(-1)[slots[e], None]
        out = out.index_copy(0, slots[e], y.to(out.dtype))
    y = out.view(rows.shape[0], choices, rows.shape[1]).sum(1).to(x.dtype).reshape(x.shape)
    # What no token reached has a gradient of zeros.
    unused = (x, gate_up, down, weights, gate_up_bias, down_bias, *adapters)
    return y + sum(t.reshape(-1)[:0].sum() for t in unused if t is not None).to(y.dtype)


def _sizes(case: Case) -> tuple[int, int, int, int, int]:
    """slots, hidden, inner, columns of gate_up, elements of the weights."""
    p = params(case, DEFAULTS)
    wide = p["inner"] * (2 if p["gated"] else 1)
    weights = p["experts"] * p["hidden"] * (wide + p["inner"])
    return p["tokens"] * p["choices"], p["hidden"], p["inner"], wide, weights


def bytes_fwd(case: Case, dtype: torch.dtype) -> int:
    """Operands of the matmuls once, and rows through gather, gate and combine."""
    slots, hidden, inner, wide, weights = _sizes(case)
    tokens = params(case, DEFAULTS)["tokens"]
    rows = slots * (4 * hidden + 2 * wide + 2 * inner) + 2 * tokens * hidden
    return itemsize(dtype) * (rows + weights)


def bytes_bwd(case: Case, dtype: torch.dtype) -> int:
    """The same of the four matmuls and the pieces around them."""
    slots, hidden, inner, wide, weights = _sizes(case)
    rows = slots * (8 * hidden + 4 * wide + 5 * inner)
    return itemsize(dtype) * (rows + 2 * weights)


def flops_fwd(case: Case) -> int:
    """Two matmuls."""
    slots, hidden, inner, wide, _ = _sizes(case)
    return 2 * slots * hidden * (wide + inner)


def flops_bwd(case: Case) -> int:
    """Four matmuls."""
    return 2 * flops_fwd(case)


def gemms(inputs: Inputs, step: bool) -> list:
    """The bare grouped matmuls of a layer, on operands that lie ready."""
    from tigon.ops import grouped_gemm as ops

    x, gate_up, down, ids, _ = inputs.args
    transposed, experts = inputs.kwargs["transposed"], gate_up.shape[0]
    counts = torch.bincount(ids.reshape(-1)[ids.reshape(-1) < experts], minlength=experts)
    offsets = F.pad(counts.cumsum(0), (1, 0)).int()
    wide, inner = (w.shape[2 if transposed else 1] for w in (gate_up, down.transpose(1, 2)))
    # Normal numbers: matmuls of ones draw less power and run at a higher clock.
    like = {"device": x.device, "dtype": x.dtype}
    rows, z, act = (torch.randn(ids.numel(), n, **like) for n in (x.shape[-1], wide, inner))
    found = [
        lambda: ops.matmul(rows, gate_up, offsets, transposed),
        lambda: ops.matmul(act, down, offsets, transposed),
    ]
    if step:
        found += [
            lambda: ops.matmul(rows, down, offsets, not transposed),
            lambda: ops.matmul(z, gate_up, offsets, not transposed),
            lambda: ops.weight_gradient(rows, act, offsets),
            lambda: ops.weight_gradient(z, rows, offsets),
        ]
    return found


def _stock(case: Case, inputs: Inputs):
    """transformers' grouped path, between the very parameters of the case."""
    import types

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if inputs.args[3].dim() == 1 or params(case, DEFAULTS)["rank"]:
        return None
    p = params(case, DEFAULTS)

    def call(x, gate_up, down, ids, weights, gate_up_bias=None, down_bias=None, **options):
        unit = (options["activation"], p["gated"], p["interleaved"], 1.702, options["limit"])
        module = types.SimpleNamespace(
            num_experts=gate_up.shape[0],
            has_gate=True,
            has_bias=p["bias"],
            is_transposed=p["transposed"],
            has_post_expert_norm=False,
            _is_expert_parallel=False,
            gate_up_proj=gate_up,
            down_proj=down,
            gate_up_proj_bias=gate_up_bias,
            down_proj_bias=down_bias,
            _apply_gate=lambda z: _unit(z, *unit),
        )
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, x, ids, weights)

    return call


def _liger(case: Case, inputs: Inputs):
    """Liger's fused layer: SiLU in halves, no biases."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    p = params(case, DEFAULTS)
    if p["activation"] != "silu" or p["bias"] or p["transposed"] or p["sorted"] or p["rank"]:
        return None
    return lambda x, gate_up, down, ids, weights, **_: LigerFusedMoEFunction.apply(
        x, gate_up, down, ids.int(), weights
    )


PEERS = {"transformers": _stock, "liger": _liger}
