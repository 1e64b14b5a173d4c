"""Cases of preference_loss and kto_loss: losses of pairs of answers, and of single ones."""

import math

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, itemsize, lay_out, nothing, params, test_case, upcast

NAME = "preference"
LOSS = True

DEFAULTS = {
    "shape": (6, 9),  # answers, tokens
    "empty": (),  # answers without tokens
}
DEFAULTS |= {"kind": "sigmoid", "layout": "contiguous", "masked": 0.3, "ref": True, "nll_mask": False}
DEFAULTS |= {"scale": 1.0, "fill": None, "options": {}}
SMOOTH = {"cdpo": 0.1, "cpo": 0.2, "simpo": 0.1, "robust": 0.2, "exo_pair": 0.1}
MARGIN = {"sigmoid": 0.3, "simpo": 0.5, "hinge": 0.2}
NO_REF = ("cpo", "simpo", "orpo")
AVERAGED = ("ipo", "simpo", "orpo")
NLL = ("cpo", "orpo")
PAIRED = """
sigmoid cdpo cpo simpo hinge ipo robust exo_pair nca_pair bco_pair sppo_hard apo_zero apo_down discopop
orpo
"""
KINDS = tuple(PAIRED.split())
SINGLE = ("kto", "apo_zero_unpaired")


def _options(kind: str) -> dict:
    found = {"label_smoothing": SMOOTH[kind]} if kind in SMOOTH else {}
    return found | ({"gamma": MARGIN[kind]} if kind in MARGIN else {})


def _of(kind: str, **options) -> dict:
    return {"kind": kind, "options": _options(kind) | options}


def _of_every_kind(kind: str) -> list[Case]:
    single = kind in SINGLE
    own = {"kind": kind, "options": {"weights": (1.0, 1.5)}} if single else _of(kind)
    more = [] if single else [test_case(f"{kind}_nll", shape=(8, 17), nll_mask=True, **_of(kind, nll=0.7))]
    return [
        test_case(f"{kind}_6x9", small=True, **own),
        test_case(f"{kind}_empty", shape=(8, 5), empty=(0, 5, 3, 7), **own),
        test_case(f"{kind}_whole", shape=(4, 700), masked=None, **own),
        test_case(f"{kind}_far", shape=(8, 64), scale=8.0, **own),
        *more,
    ]


CASES = [case for kind in (*KINDS, *SINGLE) for case in _of_every_kind(kind)]
CASES += [
    test_case("sums", shape=(6,), masked=None),
    test_case("one_token", shape=(2, 1), masked=None, small=True),
    test_case("no_pairs", shape=(0, 9)),
    test_case("no_tokens", shape=(4, 0)),
    test_case("all_masked", shape=(4, 9), masked=1.0, **_of("sigmoid", nll=1.0)),
    test_case("all_masked_orpo", shape=(4, 9), masked=1.0, **_of("orpo")),
    test_case("normalized_dpo", **_of("sigmoid", average=True)),
    test_case("ipo_of_sums", **_of("ipo", average=False)),
    test_case("no_reference", ref=False),
    test_case("denominator", **_of("sigmoid", denominator=7.0)),
    test_case("certain", shape=(8, 9), scale=1e-6, **_of("orpo", nll=0.0)),
    test_case("certain_odds", shape=(8, 3000), scale=1e-3, masked=None, **_of("orpo")),
    test_case("kto_kl", small=True, kind="kto", options={"kl": 0.3, "weights": (0.5, 2.0)}),
    test_case("kto_average", kind="kto", options={"average": True}),
    test_case("kto_odd", shape=(5, 9), kind="kto"),
    test_case("rows", shape=(6, 33), layout="rows"),
    test_case("columns", shape=(6, 33), layout="columns"),
    test_case("offset", shape=(6, 33), layout="offset1"),
    test_case("nan", shape=(6, 33), masked=None, fill=float("nan")),
    test_case("excluded", shape=(6, 33), masked=None, fill=-math.inf, grad=False),
    bench_case("64x4096", shape=(64, 4096)),
    bench_case("8x1024", "bench_cpu", "smoke", shape=(8, 1024)),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    answers, kind = p["shape"][0], p["kind"]
    log_prob = -draw.randn(*p["shape"], scale=p["scale"]).abs()
    if p["fill"] is not None:
        log_prob[1, 3] = p["fill"]
    log_prob = lay_out(log_prob, p["layout"])
    kwargs = {"kind": kind, **p["options"]}
    if p["masked"] is not None:
        mask = draw.labels(2, *p["shape"], masked=p["masked"], ignore_index=-1) >= 0
        mask[list(p["empty"])] = False
        kwargs["mask"] = mask
    if p["ref"] and kind not in NO_REF:
        total = log_prob.double().flatten(1).sum(-1) if log_prob.dim() > 1 else log_prob.double()
        noise = draw.randn(answers, dtype=torch.float32)
        kwargs["ref"] = (total.nan_to_num(0.0, 0.0, 0.0) * 0.8 + noise).float()
    if p["nll_mask"]:
        kwargs["nll_mask"] = draw.integers(0, 2, answers // 2, *p["shape"][1:])
    if kind in SINGLE:
        kwargs["desirable"] = draw.integers(0, 2, answers) == 1
    return Inputs(args=(log_prob,), kwargs=kwargs, grads=(0,))


def tigon_fn(log_prob, *, kind, desirable=None, **options):
    """Tigon's own."""
    import tigon

    if desirable is None:
        return tigon.preference_loss(log_prob, kind=kind, **options)
    return tigon.kto_loss(log_prob, desirable, kind=kind, **options)


def _pairs(kind, c, r, beta, eps, gamma, tau):
    """As trainers write them (TRL's DPO and CPO trainers, Liger's ORPO)."""
    if kind == "orpo":
        odds = (c - r) - (torch.log1p(-torch.exp(c)) - torch.log1p(-torch.exp(r)))
        return -beta * F.logsigmoid(odds)
    x = beta * (c - r) - gamma
    if kind in ("sigmoid", "cdpo", "cpo", "simpo"):
        return -F.logsigmoid(x) * (1 - eps) - F.logsigmoid(-x) * eps
    if kind == "hinge":
        return torch.relu(1 - x)
    if kind == "ipo":
        return (c - r - 1 / (2 * beta)) ** 2
    if kind == "robust":
        return (-F.logsigmoid(x) * (1 - eps) + F.logsigmoid(-x) * eps) / (1 - 2 * eps)
    if kind == "exo_pair":
        clean = x.sigmoid() * (F.logsigmoid(x) - math.log1p(-eps))
        return clean + (-x).sigmoid() * (F.logsigmoid(-x) - math.log(eps))
    if kind == "nca_pair":
        return -F.logsigmoid(beta * c) - 0.5 * F.logsigmoid(-beta * c) - 0.5 * F.logsigmoid(-beta * r)
    if kind == "bco_pair":
        return -F.logsigmoid(beta * c) - F.logsigmoid(-(beta * r))
    if kind == "sppo_hard":
        return (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2
    if kind == "apo_zero":
        return torch.sigmoid(-beta * c) + torch.sigmoid(beta * r)
    if kind == "apo_down":
        return torch.sigmoid(beta * c) + torch.sigmoid(-x)
    modulation = torch.sigmoid(x / tau)
    return -F.logsigmoid(x) * (1 - modulation) + torch.exp(-x) * modulation


def eager_fn(
    log_prob,
    *,
    kind,
    mask=None,
    desirable=None,
    ref=None,
    beta=0.1,
    average=None,
    label_smoothing=0.0,
    gamma=0.0,
    tau=0.05,
    nll=None,
    nll_mask=None,
    denominator=None,
    kl=0.0,
    weights=(1.0, 1.0),
):
    """Sums over the tokens, then the trainers' formulas."""
    tokens = upcast(log_prob)
    tokens = tokens.unsqueeze(-1) if tokens.dim() == 1 else tokens
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    sums = tokens.masked_fill(~mask, 0.0).sum(-1)
    average = kind in AVERAGED if average is None else average
    length = mask.sum(-1).clamp(min=1) if average else 1
    scores = (sums if ref is None else sums - ref) / length
    rewards = (beta * scores).detach()
    sums = (sums / length).detach()
    if desirable is not None:
        sign = torch.where(desirable, 1.0, -1.0)
        losses = torch.sigmoid(-beta * (sign * (scores - kl))) * torch.where(desirable, *weights)
        return losses.sum() / (denominator or max(len(losses), 1)), sums, rewards
    pairs = len(scores) // 2
    losses = _pairs(kind, scores[:pairs], scores[pairs:], beta, label_smoothing, gamma, tau)
    loss = losses.sum() / (denominator or max(pairs, 1))
    nll_mask = mask[:pairs] if nll_mask is None else nll_mask.bool().view_as(mask[:pairs])
    mean = -tokens[:pairs].masked_fill(~nll_mask, 0.0).sum() / nll_mask.sum().clamp(min=1)
    factor = float(kind in NLL) if nll is None else nll
    loss = loss + factor * mean if factor else loss
    return loss, sums, rewards, mean.detach(), rewards[:pairs] - rewards[pairs:]


def _odds(x):
    """log(e^x / (1 - e^x)); of a certain or an empty answer what the contract says."""
    return x - torch.log(-torch.expm1(x.clamp(max=-1.2e-38)))


def oracle_fn(log_prob, *, kind, **options):
    """The same for fp64, with odds that keep their digits."""
    if kind != "orpo":
        return eager_fn(log_prob, kind=kind, **options)
    options.setdefault("nll", 1.0)
    beta, factor = options.get("beta", 0.1), options["nll"]
    loss, means, rewards, nll, margin = eager_fn(log_prob, kind="simpo", **(options | {"nll": 0.0}))
    tokens, mask = log_prob, options.get("mask")
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    means = tokens.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    pairs = len(means) // 2
    loss = -beta * F.logsigmoid(_odds(means[:pairs]) - _odds(means[pairs:])).mean()
    nll_mask = mask[:pairs] if options.get("nll_mask") is None else options["nll_mask"].bool()
    chosen = -tokens[:pairs].masked_fill(~nll_mask, 0.0).sum() / nll_mask.sum().clamp(min=1)
    return loss + factor * chosen, means.detach(), rewards, nll, margin


def bytes_fwd(case: Case, dtype: torch.dtype) -> int:
    """Log-probabilities and mask once, the gradient in float32."""
    return (itemsize(dtype) + 8 + 4) * math.prod(case.params["shape"])


def bytes_bwd(case: Case, dtype: torch.dtype) -> int:
    """The gradient times the upstream one."""
    return 8 * math.prod(case.params["shape"])


flops_fwd = flops_bwd = nothing


PEERS = {}
