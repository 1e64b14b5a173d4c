"""Cases of contrastive_loss: embeddings of queries and documents -> loss, without their similarities."""

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, params, test_case, upcast, upstream
from .heads import costs

NAME = "contrastive"
LOSS = True

DEFAULTS = {
    "positives": None,  # of a query; None: document i
    "masked": 0.0,  # share of labels that are none
    "learned": False,  # temperature
    "ids": 0,  # how many there are; 0: none
}
DEFAULTS |= {"queries": 37, "documents": 53, "H": 40, "symmetric": False, "normalize": True}
DEFAULTS |= {"temperature": 0.1, "weight": False, "sizes": None, "reduction": "mean", "chunk_rows": None}
DEFAULTS |= {"layout": "contiguous", "fill": None, "grads": (0, 1)}


def _both(name, **options):
    return test_case(name, symmetric=True, **options)


CASES = [
    test_case("one_sided", small=True),
    test_case("learned", small=True, learned=True),
    test_case("hard_negatives", documents=300, chunk_rows=16),
    test_case("none", reduction="none", weight=True),
    _both("symmetric", small=True),
    _both("one_query", queries=1, documents=1),
    _both("one_column", H=1, normalize=False),
    _both("chunks", queries=300, documents=517, chunk_rows=130),
    _both("panels", queries=140, documents=2311, H=24),
    _both("positives", small=True, positives=3, masked=0.3, weight=True),
    _both("ids", small=True, positives=2, ids=9, learned=True),
    _both("masked_positives", positives=2, masked=1.0, reduction="sum"),
    test_case("weighted", positives=1, masked=0.3, weight=True),
    test_case("weighted_learned", positives=1, masked=0.3, weight=True, learned=True),
    _both("no_query", queries=0, documents=5, reduction="sum"),
    _both("sum", reduction="sum", temperature=0.5),
    _both("rows_reduced_none", reduction="none", positives=2),
    _both("dots", normalize=False, temperature=9.0),
    _both("sizes", sizes=(40, 16, 7)),
    _both("layout", layout="rows"),
    _both("columns", layout="columns"),
    _both("only_queries", grads=(0,)),
    _both("only_documents", grads=(1,)),
    _both("nan", fill="nan", ids=5),
    _both("nan_row", fill="nan"),
    *(
        bench_case(f"{name}_{n}x{h}", queries=n, documents=n, H=h, symmetric=symmetric, temperature=0.05)
        for name, symmetric in (("one_sided", False), ("symmetric", True))
        for n in (8192, 65536)
        for h in (768, 1024)
    ),
    bench_case("symmetric_1024x256", "bench_cpu", queries=1024, documents=1024, H=256, symmetric=True),
    bench_case("symmetric_256x128", "smoke", queries=256, documents=256, H=128, symmetric=True),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case; document i is near query i."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    n, m, h = p["queries"], p["documents"], p["H"]
    q = draw.randn(n, h, layout=p["layout"])
    d = draw.randn(m, h, layout=p["layout"])
    near = min(n, m)
    d[:near] += q[:near]
    if p["fill"] is not None:
        q[min(2, n - 1), 0] = float(p["fill"])
    labels = None
    if p["positives"]:
        # No document twice in a row.
        labels = draw.labels(m // p["positives"], n, p["positives"], masked=p["masked"])
        shift = torch.arange(p["positives"], device=labels.device) * (m // p["positives"])
        labels = torch.where(labels >= 0, labels + shift, labels)
    wide = torch.promote_types(dtype, torch.float32)
    none = p["reduction"] == "none"
    grad = draw.randn(n, dtype=wide) if none else upstream(case, dtype, device)
    temperature = (
        torch.tensor([p["temperature"]], dtype=wide, device=device) if p["learned"] else p["temperature"]
    )
    ids = (draw.integers(0, p["ids"], n), draw.integers(0, p["ids"], m)) if p["ids"] else (None, None)
    return Inputs(
        args=(q, d, labels),
        kwargs={
            "temperature": temperature,
            "weight": draw.randn(n, dtype=wide).abs() if p["weight"] else None,
            "q_ids": ids[0],
            "d_ids": ids[1],
            **{name: p[name] for name in ("symmetric", "normalize", "sizes", "reduction", "chunk_rows")},
        },
        grads=p["grads"],
        grad_outputs=(grad,),
        grad_kwargs=("temperature",) if p["learned"] else (),
    )


def tigon_fn(q, d, labels, *, q_ids, d_ids, **options):
    """Tigon's own."""
    import tigon

    return tigon.contrastive_loss(q, d, labels, ids=None if q_ids is None else (q_ids, d_ids), **options)


def eager_fn(
    q,
    d,
    labels=None,
    *,
    temperature,
    symmetric=False,
    normalize=True,
    weight=None,
    q_ids=None,
    d_ids=None,
    sizes=None,
    reduction="mean",
    margin=None,
    relative_margin=False,
    guide=None,
    **_,
):
    """Similarities in the embeddings' dtype, upcast; cases have no margin and no guide."""
    if sizes is not None:
        options = {"temperature": temperature, "symmetric": symmetric, "normalize": normalize}
        options |= {"weight": weight, "q_ids": q_ids, "d_ids": d_ids, "reduction": reduction}
        return sum(eager_fn(q[:, :s], d[:, :s], labels, **options) for s in sizes)
    if normalize:
        q, d = F.normalize(q, dim=-1), F.normalize(d, dim=-1)
    z = upcast(q @ d.T)
    counted = margin is not None or guide is not None or q_ids is not None
    if labels is None and not counted and weight is None and reduction != "none":
        of = torch.arange(len(q), device=q.device)
        z = z / temperature
        loss = F.cross_entropy(z, of, reduction=reduction)
        return (loss + F.cross_entropy(z[:, : len(q)].T, of, reduction=reduction)) / 2 if symmetric else loss
    labels = torch.arange(len(q), device=q.device) if labels is None else labels
    labels = labels.reshape(len(q), -1)
    counts, at = labels >= 0, labels.clamp(min=0)
    out = torch.zeros_like(z, dtype=torch.bool)
    if margin is not None or guide is not None:
        t = z if guide is None else F.normalize(guide[0], dim=-1) @ F.normalize(guide[1], dim=-1).T
        best = t.detach().gather(1, at).masked_fill(~counts, -torch.inf).amax(1)
        best = torch.where(counts.any(1), best, torch.inf)
        margin = 0.0 if margin is None else margin
        out |= t > (best * (1 - margin) if relative_margin else best - margin)[:, None]
    if q_ids is not None:
        out |= q_ids[:, None] == d_ids
    z = z / temperature
    if counted:
        positive = torch.zeros_like(z).scatter_add(1, at, counts.to(z)) > 0
        z = z.masked_fill(out & ~positive, -torch.inf)
    picked = z.gather(1, at)
    pairs = z.logsumexp(1)[:, None] - picked
    if symmetric:
        pairs = (pairs + z.logsumexp(0)[at] - picked) / 2
    rows = torch.where(counts, pairs, 0.0).sum(1) / counts.sum(1).clamp(min=1)
    if weight is not None:
        rows = rows * weight
    if reduction == "none":
        return rows
    return rows.sum() / counts.any(1).sum() if reduction == "mean" else rows.sum()


def _similarities(case: Case) -> list[tuple[int, int, int]]:
    p = params(case, DEFAULTS)
    return [(p["queries"], p["H"], p["documents"])]


bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = costs(_similarities)


def gemms(inputs: Inputs, step: bool) -> list:
    """The bare matmuls: similarities, a step's gradients, and for both directions the similarities again."""
    q, d = (F.normalize(x.detach(), dim=-1) for x in inputs.args[:2])
    matmuls = [lambda: q @ d.t()]
    if step:  # of the loss's own numbers: a matmul of zeros takes less power, and less time
        grad = torch.softmax(q @ d.t() / float(inputs.kwargs["temperature"]), dim=-1) / len(q)
        matmuls *= 1 + inputs.kwargs["symmetric"]
        matmuls += [lambda: grad @ d, lambda: grad.t() @ q]
    return matmuls


def _two_calls(case, inputs):
    """Both directions as two calls of one each."""
    import tigon

    if not inputs.kwargs["symmetric"]:
        return None

    def fn(q, d, labels, *, temperature, **_):
        one, other = (tigon.contrastive_loss(*pair, temperature=temperature) for pair in ((q, d), (d, q)))
        return (one + other) / 2

    return fn


def _inf_cl(case, inputs):
    """Inf-CL 1.2: the matmuls in TF32 inside of its kernels, each direction by itself."""
    from inf_cl import cal_flash_loss

    if not inputs.args[0].is_cuda or "bench" not in case.tags:
        return None

    def fn(q, d, labels, *, temperature, symmetric, **_):
        pair = F.normalize(q, dim=-1), F.normalize(d, dim=-1)
        ways = (pair, pair[::-1])[: 1 + symmetric]
        return sum(cal_flash_loss(*way, scale=1 / temperature).mean() for way in ways) / len(ways)

    return fn


PEERS = {"two_calls": _two_calls, "inf_cl": _inf_cl}
