"""Cases of the router of a mixture of experts."""

import functools
import math

import torch
import torch._functorch.config
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, itemsize, layout_cases, nothing, params, test_case, upcast

NAME = "route"

DEFAULTS = {
    "shape": (7, 16),  # tokens, experts
    "wide": True,  # weights in float32, else in the dtype of logits
    "token_weights": None,  # "mask", "numbers", "none"
    "forced": None,  # a dtype: some tokens' experts are given
}
DEFAULTS |= {"top_k": 2, "score": "softmax", "normalize": True, "bias": False, "groups": (1, 1)}
DEFAULTS |= {"group_score": "max", "scale": 1.0, "wide_ids": True, "losses": False, "spread": 2.0}
DEFAULTS |= {"fill": None, "layout": "contiguous", "grad_layout": "contiguous"}

_V3 = {"score": "sigmoid", "bias": True, "group_score": "sum_of_two", "scale": 2.5}
_V2 = {"normalize": False, "scale": 16.0}

CASES = [
    test_case("7x16", small=True),
    test_case("mixtral", shape=(33, 8)),
    test_case("qwen3", shape=(65, 128), top_k=8, wide=False),
    test_case("olmoe", shape=(20, 64), top_k=8, normalize=False, wide=False),
    test_case("gpt_oss", shape=(17, 32), top_k=4, wide=False, wide_ids=False),
    test_case("deepseek_v2", small=True, shape=(19, 160), top_k=6, groups=(8, 3), **_V2),
    test_case("deepseek_v3", small=True, shape=(19, 256), top_k=8, groups=(8, 4), **_V3),
    test_case("glm4_moe", shape=(9, 128), top_k=8, **_V3),
    test_case("switch", shape=(9, 32), top_k=1, normalize=False, losses=True),
    test_case("sigmoid_one", shape=(9, 16), top_k=1, normalize=False, score="sigmoid"),
    test_case("softmax_bias", shape=(9, 33), top_k=3, bias=True),
    test_case("softmax_two", shape=(9, 32), top_k=3, groups=(4, 2), group_score="sum_of_two"),
    test_case("odd_groups", shape=(9, 105), top_k=5, groups=(15, 4), **_V2),
    test_case("many_groups", shape=(9, 132), top_k=5, groups=(66, 40), **_V3),
    test_case("groups_of_one", shape=(9, 40), top_k=5, groups=(40, 5)),
    test_case("one_group_left", shape=(9, 40), top_k=10, groups=(4, 1)),
    test_case("one_expert", shape=(5, 1), top_k=1, losses=True),
    test_case("one_token", shape=(1, 20), top_k=3),
    test_case("all", shape=(5, 37), top_k=37),
    test_case("all_unnormalized", shape=(5, 64), top_k=64, normalize=False),
    test_case("most", shape=(3, 1024), top_k=100),
    test_case("most_sigmoid", shape=(3, 1000), top_k=8, score="sigmoid", losses=True),
    test_case("most_all", shape=(3, 700), top_k=700, losses=True),
    test_case("rank4", shape=(2, 3, 5, 24), losses=True),
    test_case("vector", shape=(24,)),
    test_case("empty", shape=(0, 16)),
    test_case("empty_losses", shape=(0, 16), losses=True),
    test_case("losses", small=True, shape=(33, 16), losses=True),
    test_case("losses_mask", shape=(4, 11, 24), top_k=4, losses=True, token_weights="mask"),
    test_case("losses_weights", small=True, shape=(50, 24), losses=True, token_weights="numbers"),
    test_case("losses_none", shape=(9, 24), losses=True, token_weights="none"),
    test_case("losses_masked_nan", shape=(9, 24), losses=True, token_weights="mask", fill="masked_nan"),
    test_case("losses_sigmoid", shape=(33, 16), losses=True, token_weights="mask", **_V3),
    test_case("losses_many", shape=(5001, 16), top_k=4, losses=True),
    test_case("losses_many_odd", shape=(2077, 60), top_k=4, losses=True, token_weights="mask"),
    test_case("ties", shape=(40, 64), top_k=8, fill="ties"),
    test_case("ties_of_groups", shape=(40, 64), top_k=8, fill="ties", groups=(8, 3)),
    test_case("equal", shape=(5, 64), top_k=8, fill="equal", losses=True),
    test_case("zeros", shape=(5, 64), top_k=8, fill="zeros"),
    test_case("nan", shape=(5, 64), top_k=8, fill="nan"),
    test_case("nan_losses", shape=(5, 64), top_k=8, fill="nan", losses=True),
    test_case("nan_unnormalized", shape=(5, 64), top_k=8, fill="nan", normalize=False),
    test_case("nan_groups", shape=(5, 64), top_k=8, fill="nan", groups=(8, 3)),
    test_case("nan_sigmoid", shape=(5, 64), top_k=8, fill="nan", score="sigmoid"),
    test_case("nan_bias", shape=(5, 64), top_k=8, fill="nan", bias=True),
    test_case("nan_v3", shape=(5, 64), top_k=8, fill="nan", groups=(8, 3), **_V3),
    test_case("nothing_left", shape=(5, 64), top_k=8, fill="nothing"),
    test_case("inf", shape=(5, 64), top_k=8, fill="inf"),
    test_case("closed", shape=(9, 64), top_k=8, fill="-inf", losses=True),
    test_case("closed_sigmoid", shape=(9, 64), top_k=8, fill="-inf", score="sigmoid"),
    test_case("tiny_sigmoid", shape=(9, 64), top_k=4, fill="tiny", score="sigmoid", losses=True),
    test_case("sharp", shape=(9, 64), top_k=8, spread=60.0),
    test_case("flat", shape=(9, 64), top_k=8, spread=1e-3, normalize=False),
    *layout_cases("rows", "columns", shape=(9, 30), top_k=4),
    test_case("misaligned", shape=(9, 64), top_k=4, layout="offset1", grad_layout="offset1"),
    test_case("grad_expanded", shape=(9, 64), top_k=4, grad_layout="expanded"),
    test_case("forced", small=True, shape=(41, 24), top_k=4, forced="int64"),
    test_case("forced_int32", small=True, shape=(41, 24), top_k=4, forced="int32", normalize=False),
    test_case("forced_one", shape=(41, 24), top_k=1, forced="int16", score="sigmoid", normalize=False),
    test_case("forced_all", shape=(17, 40), top_k=40, forced="uint8"),
    test_case("forced_most", shape=(17, 1000), top_k=70, forced="uint16", losses=True),
    test_case("forced_v3", shape=(41, 64), top_k=8, forced="uint8", groups=(8, 4), losses=True, **_V3),
    test_case("forced_v2", shape=(3, 17, 64), top_k=6, forced="int64", groups=(8, 3), **_V2),
    test_case("forced_losses", shape=(50, 24), top_k=4, forced="int8", losses=True, token_weights="mask"),
    test_case("forced_far", shape=(50, 24), top_k=2, forced="int64", spread=300.0, fill="clamped"),
    test_case("forced_rows", shape=(9, 30), top_k=4, forced="int32", layout="rows", grad_layout="rows"),
    test_case("forced_empty", shape=(0, 16), forced="int64"),
    bench_case("8192x128_k8_forced", shape=(8192, 128), top_k=8, wide=False, forced="int32"),
    bench_case("8192x128_k8", shape=(8192, 128), top_k=8, wide=False),
    bench_case("32768x128_k8", shape=(32768, 128), top_k=8, wide=False),
    bench_case("32768x128_k8_losses", shape=(32768, 128), top_k=8, wide=False, losses=True),
    bench_case("32768x8_k2", shape=(32768, 8), top_k=2),
    bench_case("8192x256_k8_v3", shape=(8192, 256), top_k=8, groups=(8, 4), **_V3),
    bench_case("32768x256_k8_v3", shape=(32768, 256), top_k=8, groups=(8, 4), **_V3),
    bench_case("2048x128_k8", "bench_cpu", shape=(2048, 128), top_k=8),
    bench_case("2048x256_k8_v3", "bench_cpu", shape=(2048, 256), top_k=8, groups=(8, 4), **_V3),
    bench_case("512x64_k4", "smoke", shape=(512, 64), top_k=4, losses=True),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    *lead, experts = p["shape"]
    logits = draw.randn(*p["shape"], layout=p["layout"], scale=p["spread"])
    weights = torch.promote_types(dtype, torch.float32) if p["wide"] else dtype
    upstream = [draw.randn(*lead, p["top_k"], layout=p["grad_layout"], dtype=weights)]
    kwargs = {n: p[n] for n in ("top_k", "score", "normalize", "group_score", "scale", "losses")}
    kwargs |= {"num_groups": p["groups"][0], "top_groups": p["groups"][1]}
    kwargs |= {"wide": p["wide"], "ids_dtype": torch.int64 if p["wide_ids"] else torch.int32}
    if p["bias"]:
        kwargs["correction_bias"] = draw.randn(experts, scale=0.3, dtype=_wide(dtype))
    if p["losses"]:
        upstream += [draw.randn(dtype=_wide(dtype)), draw.randn(dtype=_wide(dtype))]
        kwargs["token_weights"] = _token_weights(p["token_weights"], draw, lead, dtype)
    if p["forced"] is not None:
        kwargs["ids"] = _forced(draw, lead, experts, p["top_k"], getattr(torch, p["forced"]))
    upstream.append(torch.ones(*lead, p["top_k"], device=device))  # of ids
    _fill(logits, p["fill"], kwargs)
    return Inputs(args=(logits,), kwargs=kwargs, grads=(0,), grad_outputs=tuple(upstream))


def _wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def _token_weights(kind, draw, lead, dtype):
    if kind is None:
        return None
    if kind == "numbers":
        return draw.randn(*lead, dtype=_wide(dtype)).abs()
    mask = draw.integers(0, 3, *lead) > 0
    return torch.zeros_like(mask) if kind == "none" else mask


def _forced(draw, lead, experts, top_k, dtype):
    """Any experts in any order; every fifth token begins with -1, every seventh names one twice."""
    ids = draw.randn(*lead, experts, dtype=torch.float32).argsort(-1)[..., :top_k].contiguous()
    rows = ids.view(-1, top_k)
    if dtype not in (torch.uint8, torch.uint16):
        rows[::5, 0] = -1
    if top_k > 1:
        rows[3::7, 1] = rows[3::7, 0]
    return ids.to(dtype)


def _fill(logits, fill, kwargs):
    if fill == "ties":
        logits.copy_(logits.round())
    elif fill == "equal":
        logits.fill_(1.5)
    elif fill == "zeros":  # 0 and -0 are equal
        logits.copy_(torch.where(logits > 0, 0.0, -0.0))
    elif (
        fill == "clamped"
    ):  # what float32 holds of exponentials of differences is exceeded, in float64 it is not
        logits.clamp_(-300, 300)
    elif fill == "masked_nan":
        kwargs["token_weights"][1] = False
        logits[1] = math.nan
    elif fill == "-inf":  # experts that no token may choose
        logits[..., 5::7] = -math.inf
    elif fill == "nothing":
        logits[1] = -math.inf
    elif fill == "tiny":  # sigmoids near the number that is added to their sum
        logits.sub_(46.0)
    elif fill is not None:
        logits[1, 3] = float(fill)


def _float(ids):
    """Ids up to 1024 are exact in float32."""
    return ids.to(torch.float32)


def tigon_fn(logits, *, wide, **options):
    """Tigon's own."""
    import tigon

    weights, ids, *losses = tigon.route(logits, dtype=torch.float32 if wide else None, **options)
    assert ids.dtype == options["ids_dtype"]
    return weights, *losses, _float(ids)


def eager_fn(logits, *, wide, **options):
    """As transformers' routers have it; also the oracle, on fp64 copies."""
    weights, ids, *losses = _plain(logits, **options)
    return weights.to(_wide(logits.dtype) if wide else logits.dtype), *losses, _float(ids)


def _best(c, top_k, num_groups, top_groups, group_score):
    """The order of c, descending, ties by index, NaN first."""
    rank = c.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    if num_groups > 1:
        groups = c.unflatten(-1, (num_groups, -1)).sort(-1, descending=True).values
        best = groups[..., 0] if group_score == "max" else groups[..., 0] + groups[..., 1]
        place = best.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        closed = (place >= top_groups).repeat_interleave(c.shape[-1] // num_groups, -1)
        rank = rank + closed * c.shape[-1]
    return rank.argsort(-1)[..., :top_k]


def topk_best(c, top_k, num_groups, top_groups, group_score):
    """As transformers chooses."""
    if num_groups > 1:
        groups = c.unflatten(-1, (num_groups, -1))
        best = groups.amax(-1) if group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
        chosen = torch.zeros_like(best).scatter_(-1, best.topk(top_groups, dim=-1, sorted=False).indices, 1)
        c = c.masked_fill(chosen.repeat_interleave(groups.shape[-1], -1) == 0, float("-inf"))
    return c.topk(top_k, dim=-1).indices


def _plain(
    logits,
    *,
    top_k,
    score,
    normalize,
    num_groups,
    top_groups,
    group_score,
    scale,
    ids_dtype,
    losses,
    correction_bias=None,
    token_weights=None,
    best=_best,
    ids=None,
):
    forced, z = ids, upcast(logits)
    p = z.sigmoid() if score == "sigmoid" else z.softmax(-1)
    biased = correction_bias is not None or (num_groups > 1 and group_score != "max")
    with torch.no_grad():
        c = p + (0.0 if correction_bias is None else correction_bias) if biased else z
        ids = best(c, top_k, num_groups, top_groups, group_score)
        if forced is not None:
            forced = forced.to(torch.int64)
            named = F.one_hot(forced.clamp(0), z.shape[-1]).sum(-2)
            keeps = (forced[..., :1] < 0) | (named > 1).any(-1, keepdim=True)
            ids = torch.where(keeps, ids, forced)
    weights = p.gather(-1, ids)
    if normalize and score == "softmax" and forced is not None:
        weights = torch.softmax(z.gather(-1, ids), -1)
    elif normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if score == "sigmoid" else 0.0))
    weights = weights * scale
    if not losses:
        return weights, ids
    rows = z.reshape(-1, z.shape[-1])
    q = p / (p.sum(-1, keepdim=True) + 1e-20) if score == "sigmoid" else p
    q, chosen = q.reshape(rows.shape), ids.reshape(-1, top_k)
    lse = torch.logsumexp(rows, -1)
    v = rows.new_ones(len(rows)) if token_weights is None else token_weights.reshape(-1).to(rows.dtype)
    q, chosen, lse, v = q[v != 0], chosen[v != 0], lse[v != 0], v[v != 0]
    if not len(v):
        zero = rows[:0].sum()
        return weights, ids, zero, zero
    count = rows.new_zeros(rows.shape[-1]).index_add(0, chosen.flatten(), v.repeat_interleave(top_k))
    mean = (q * v[:, None]).sum(0) / v.sum()
    aux = rows.shape[-1] * (count / v.sum() * mean).sum()
    return weights, ids, aux, (v * lse**2).sum() / v.sum()


def _tokens(case: Case) -> int:
    return math.prod(case.params["shape"][:-1])


def _chosen(case: Case, dtype: torch.dtype) -> int:
    """Bytes of weights and ids."""
    width = itemsize(dtype) if not case.params.get("wide", True) else 4
    return _tokens(case) * case.params.get("top_k", 2) * (width + 8)


def bytes_fwd(case: Case, dtype: torch.dtype) -> int:
    """Logits to weights and ids."""
    return math.prod(case.params["shape"]) * itemsize(dtype) + _chosen(case, dtype)


def bytes_bwd(case: Case, dtype: torch.dtype) -> int:
    """Logits, ids and upstream gradients to the gradient."""
    return 2 * math.prod(case.params["shape"]) * itemsize(dtype) + _chosen(case, dtype)


flops_fwd = flops_bwd = nothing


def _topk(case: Case, inputs: Inputs):
    """torch.compile of the formula with `torch.topk`, which orders ties as it likes: 16 bits have many."""
    if inputs.args[0].dtype != torch.float32:
        return None
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False
    return torch.compile(functools.partial(eager_fn, best=topk_best), dynamic=False)


PEERS = {"topk": _topk}
