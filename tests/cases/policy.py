"""Cases of policy_loss: policy-gradient losses of sampled tokens."""

import math

import torch

from .case import Case, Inputs, Maker, bench_case, itemsize, lay_out, nothing, params, test_case, upcast

NAME = "policy"
LOSS = True

DEFAULTS = {
    "old": 0.2,  # spread of old - log_prob; None: not given
    "importance": None,  # "token", "answer"
    "per_token": False,  # advantages
}
DEFAULTS |= {"shape": (4, 37), "layout": "contiguous", "masked": 0.3, "empty": (), "ref": None}
DEFAULTS |= {"entropies": False, "fill": None, "options": {}}
EVERYTHING = {"ref": 0.3, "importance": "token", "entropies": True}
KL = {"kl": 0.1, "entropy": 0.05}


def _of_every_kind(kind: str) -> list[Case]:
    def options(**more):
        return {"kind": kind, **more}

    # Finite differences see what is a constant in the gradient: the factor of cispo and vespo off the policy.
    weighted = kind in ("cispo", "vespo")
    return [
        test_case(f"{kind}_4x37", small=not weighted, options=options()),
        test_case(f"{kind}_on_policy", small=weighted, old=None, options=options(normalise="sequence")),
        test_case(f"{kind}_everything", small=not weighted, empty=(1,), options=options(**KL), **EVERYTHING),
        test_case(
            f"{kind}_sequence",
            small=not weighted,
            shape=(3, 5),
            options=options(level="sequence", normalise="sequence"),
        ),
        test_case(
            f"{kind}_sequence_all",
            shape=(3, 600),
            per_token=True,
            options=options(level="sequence", kl_corrected=True, **KL),
            **EVERYTHING,
        ),
        test_case(f"{kind}_sum", shape=(5, 9), old=0.05, options=options(level="sum", normalise="sequence")),
        test_case(f"{kind}_length", shape=(2, 5000), masked=None, options=options(normalise="length")),
        test_case(f"{kind}_corrected", shape=(3, 130), options=options(kl_corrected=True, kl=0.2), ref=0.3),
    ]


CASES_OF = ("clip", "cispo", "sapo", "vespo")
CASES = [case for kind in CASES_OF for case in _of_every_kind(kind)]
CASES += [
    *(
        test_case(f"{estimator}", small=True, ref=0.5, options={"kl": 0.3, "kl_estimator": estimator})
        for estimator in ("k1", "k2", "k3")
    ),
    test_case("k3_near", ref=1e-3, old=None, options={"kl": 10.0}),
    test_case("delta", old=0.8, options={"delta": 1.4}),
    test_case("delta_sequence", old=0.8, options={"delta": 1.1, "level": "sequence", "clip": (0.01, 0.02)}),
    test_case("clip_wide", old=0.8, options={"clip": (0.3, 0.5)}),
    test_case("vespo_answer", importance="answer", options={"kind": "vespo"}),
    test_case("importance_answer", importance="answer"),
    test_case("entropy_mean", entropies=True, options={"entropy": 0.1, "entropy_denominator": 11.0}),
    test_case("denominator", options={"denominator": 100.0}),
    test_case("metric_only", ref=0.3),
    test_case("one_token", shape=(1, 1), masked=None, small=True),
    test_case("no_answers", shape=(0, 9)),
    test_case("no_tokens", shape=(3, 0)),
    test_case("all_masked", masked=1.0, options=KL, **EVERYTHING),
    test_case("all_masked_sequence", masked=1.0, options={"level": "sequence", "normalise": "sequence"}),
    test_case("rows", shape=(6, 33), layout="rows"),
    test_case("columns", shape=(6, 33), layout="columns"),
    test_case("offset", shape=(6, 33), layout="offset1"),
    test_case("nan", masked=None, fill=float("nan"), options={"normalise": "length"}),
    bench_case("64x4096", shape=(64, 4096)),
    bench_case("64x4096_sequence", shape=(64, 4096), options={"level": "sequence", "normalise": "sequence"}),
    bench_case("8x1024", "bench_cpu", "smoke", shape=(8, 1024)),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    shape = p["shape"]
    log_prob = -draw.randn(*shape).abs()
    kwargs = dict(p["options"])

    def shifted(spread):
        return (log_prob.float() + draw.randn(*shape, scale=spread, dtype=torch.float32)).float()

    for name in ("old", "ref"):
        if p[name] is not None:
            kwargs[name] = shifted(p[name])
    if p["fill"] is not None:
        log_prob[1, 3] = p["fill"]
    advantage = draw.randn(*(shape if p["per_token"] else shape[:1]), dtype=torch.float32)
    if p["importance"] is not None:
        sizes = shape if p["importance"] == "token" else shape[:1]
        kwargs["importance"] = draw.randn(*sizes, scale=0.3, dtype=torch.float32).exp()
    if p["masked"] is not None:
        mask = draw.labels(2, *shape, masked=p["masked"], ignore_index=-1) >= 0
        mask[list(p["empty"])] = False
        kwargs["mask"] = mask
    grad_kwargs = ()
    if p["entropies"]:
        kwargs["entropies"], grad_kwargs = draw.randn(*shape).abs(), ("entropies",)
    args = (lay_out(log_prob, p["layout"]), advantage)
    return Inputs(args=args, kwargs=kwargs, grads=(0,), grad_kwargs=grad_kwargs)


def _tensors(result):
    return tuple(t for t in result if t is not None)


def tigon_fn(log_prob, advantage, **options):
    """Tigon's own."""
    import tigon

    return _tensors(tigon.policy_loss(log_prob, advantage, **options))


def eager_fn(
    log_prob,
    advantage,
    *,
    mask=None,
    kind="clip",
    level="token",
    old=None,
    ref=None,
    entropies=None,
    importance=None,
    clip=(0.2, 0.2),
    delta=None,
    kl=0.0,
    kl_estimator="k3",
    kl_corrected=False,
    entropy=0.0,
    entropy_denominator=None,
    normalise="token",
    denominator=None,
):
    """As TRL's GRPO trainer has it, where it has it; also the oracle, on fp64 copies."""
    log_prob = upcast(log_prob)
    mask = torch.ones_like(log_prob, dtype=torch.bool) if mask is None else mask
    advantage, importance = (
        t.unsqueeze(-1) if t is not None and t.dim() == 1 else t for t in (advantage, importance)
    )
    old = log_prob.detach() if old is None else old
    log_ratio = log_prob - old
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    weights = log_ratio
    if level != "token":
        weights = log_ratio.masked_fill(~mask, 0.0).sum(-1, keepdim=True) / (
            length if level == "sequence" else 1
        )
    rho = torch.exp(weights)
    if kind == "clip":
        capped = rho if delta is None else rho.clamp(max=delta)
        loss = -torch.min(capped * advantage, rho.clamp(1 - clip[0], 1 + clip[1]) * advantage)
        clipped = 1.0 * ((rho > 1 + clip[1]) & (advantage > 0)) - 1.0 * (
            (rho < 1 - clip[0]) & (advantage < 0)
        )
    elif kind == "cispo":
        loss = -rho.clamp(max=clip[1]).detach() * advantage * log_prob
        clipped = 1.0 * ((rho > clip[1]) & (advantage > 0))
    elif kind == "sapo":
        tau = torch.where(advantage > 0, 1.0, 1.05)
        loss = -(tau * (rho - 1)).sigmoid() * 4 / tau * advantage
        clipped = torch.zeros_like(rho)
    else:
        with torch.no_grad():
            total = log_ratio.clamp(-20, 20).masked_fill(~mask, 0.0).sum(-1, keepdim=True)
            if importance is not None:
                logs = importance.log().clamp(math.log(1e-8), 20).expand_as(mask)
                total = total + logs.masked_fill(~mask, 0.0).sum(-1, keepdim=True)
            total = total.clamp(math.log(1e-8), 20)
            good = advantage >= 0
            k, rate = torch.where(good, 2.0, 3.0), torch.where(good, 3.0, 2.0)
            phi = torch.exp(rate + k * total - rate * total.exp())
        loss = -phi * advantage * log_prob
        clipped = torch.zeros_like(rho)
    if importance is not None and kind != "vespo":
        loss = loss * importance
    results = []
    if ref is not None:
        q = ref - log_prob
        estimate = {
            "k1": lambda: -q,
            "k2": lambda: q**2 / 2,
            "k3": lambda: q.exp() - q - 1 if q.dtype == torch.float32 else torch.expm1(q) - q,
        }[kl_estimator]()
        loss = loss + kl * (estimate * rho if kl_corrected else estimate)
        results.append(estimate.masked_fill(~mask, 0.0).detach())

    def weighted(x):
        x = x.expand_as(mask).masked_fill(~mask, 0.0)
        if normalise == "sequence":
            return (x.sum(-1) / length.squeeze(-1)).sum() / (denominator or max(len(x), 1))
        count = mask.sum().clamp(min=1) if normalise == "token" else max(len(x), 1)
        return x.sum() / (count if denominator is None else denominator)

    total = weighted(loss)
    if entropies is not None and entropy:
        entropies = upcast(entropies)
        by = entropy_denominator
        bonus = weighted(entropies) if by is None else entropies.masked_fill(~mask, 0.0).sum() / by
        total = total - entropy * bonus
    return total, *results, clipped.expand_as(mask).masked_fill(~mask, 0.0).to(total.dtype)


def bytes_fwd(case: Case, dtype: torch.dtype) -> int:
    """Log-probabilities, old ones, mask; the gradient and what was clipped."""
    return (itemsize(dtype) + 4 + 8 + 4 + 4) * math.prod(case.params["shape"])


def bytes_bwd(case: Case, dtype: torch.dtype) -> int:
    """The gradient times the upstream one."""
    return 8 * math.prod(case.params["shape"])


flops_fwd = flops_bwd = nothing


PEERS = {}
