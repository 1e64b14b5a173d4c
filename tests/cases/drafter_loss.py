"""Cases of drafter_loss: a draft model's head against its teacher's, in one or several steps."""

import math

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, params, test_case, upcast, upstream
from .heads import costs, gradient_matmuls

NAME = "drafter_loss"
LOSS = True

DEFAULTS = {
    "lead": (2, 9),  # leading shape of the hidden states
    "steps": 1,  # 0: hidden states without a dimension of steps
    "map": "random",  # of draft ids: also None (the same classes), "holes"
    "masked": None,  # share of positions that do not count
    "known": False,  # their number is said
    "scale": 2.0,  # spread of the logits
}
DEFAULTS |= {"H": 32, "Ht": 48, "V": 51, "Vt": 131, "token_weight": False, "grads": (0, 1), "upstream": None}
DEFAULTS |= {"options": {}}
LOSSES = ("ce", "kl", "hard", "tv", "lk")
COUNT = {"outside": "count", "mask_outside": False}
OF_BENCH = {"lead": (8192,), "H": 4096, "Ht": 4096, "V": 32000, "Vt": 128256}
SPECULATORS = {"outside": "renormalize", "mask_outside": False}


def _of_every_loss(loss: str) -> list[Case]:
    options = {"loss": loss}
    everything = {**options, "shifts": (0, 1, 3), "step_weights": (1.0, 0.8, 0.5), "chunk_rows": 12}
    return [
        test_case(f"{loss}_2x9x51", small=loss in ("ce", "kl"), steps=0, options=options),
        test_case(f"{loss}_same_classes", lead=(13,), H=33, Ht=9, Vt=51, map=None, options=options),
        test_case(f"{loss}_steps", steps=3, masked=0.3, token_weight=True, map="holes", options=everything),
        test_case(f"{loss}_count", steps=2, masked=0.3, options={**options, **COUNT, "chunk_rows": 7}),
        test_case(f"{loss}_keep", steps=2, map="holes", options={**options, **SPECULATORS}),
        test_case(f"{loss}_none", steps=2, masked=0.3, options={**options, "reduction": "none"}),
        test_case(f"{loss}_long", lead=(3,), H=8, Ht=8, V=9001, Vt=20003, steps=2, options=options),
    ]


CASES = [case for loss in LOSSES for case in _of_every_loss(loss)]
CASES += [
    test_case("one_row", lead=(1,), steps=0),
    test_case("one_class", V=1, Vt=1, map=None),
    test_case("many_rows", lead=(150,), V=1031, Vt=4099, steps=2, options={"loss": "lk"}),
    test_case("empty", lead=(0, 4), steps=2, options={"reduction": "sum"}),
    test_case("all_masked", masked=1.0, steps=2),
    test_case("all_masked_sum", masked=1.0, options={"reduction": "sum", "loss": "lk"}),
    test_case("all_masked_none", masked=1.0, steps=2, options={"reduction": "none"}),
    test_case("known", lead=(37,), masked=0.6, known=True, steps=2, options={"chunk_rows": 8}),
    test_case("known_none", lead=(37,), masked=0.6, known=True, options={"reduction": "none"}),
    test_case("sum", masked=0.3, steps=2, options={"reduction": "sum"}),
    test_case("denominator", masked=0.3, steps=2, options={"denominator": 7.5}),
    test_case("past_the_end", steps=2, options={"shifts": (2, 30)}),
    test_case("packed", lead=(1, 18), steps=3, options={"shifts": (0, 1, 2)}, masked=0.2),
    test_case("eta_0", options={"loss": "lk", "eta": 0.0}),
    test_case("eta_50", options={"loss": "lk", "eta": 50.0}),
    test_case("far", scale=15.0, options={"loss": "lk"}),
    test_case("hidden_only", grads=(0,), masked=0.2),
    test_case("weight_only", grads=(1,), steps=2, options={"reduction": "none"}),
    test_case("no_grad", grads=(), grad=False, steps=2, options={"outputs": ("loss", "acceptance")}),
    *(
        bench_case(f"{loss}_8192x4096x32000+128256_{n}", steps=n, options={"loss": loss}, **OF_BENCH)
        for loss in ("kl", "lk")
        for n in (1, 4)
    ),
    bench_case("kl_8192x4096x32000_truncated_4", steps=4, options=SPECULATORS, **OF_BENCH),
    bench_case("kl_512x256x2048+8192", "bench_cpu", lead=(512,), H=256, Ht=256, V=2048, Vt=8192, steps=2),
    bench_case("kl_256x128x512+1024", "smoke", lead=(256,), H=128, Ht=128, V=512, Vt=1024, steps=2),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case; one class of the teacher's is far above the others, in any rounding."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    lead, h, ht, v, vt, options = p["lead"], p["H"], p["Ht"], p["V"], p["Vt"], p["options"]
    hidden = draw.randn(*lead, *([p["steps"]] if p["steps"] else []), h)
    weight = draw.randn(v, h, scale=p["scale"] / math.sqrt(h))
    teacher_weight = draw.randn(vt, ht, scale=p["scale"] / math.sqrt(ht))
    order = torch.randperm(vt, generator=torch.Generator().manual_seed(seed)).to(device)
    picks = draw.labels(vt, *lead)
    teacher = draw.randn(*lead, ht) + (3.0 * teacher_weight[picks]).to(dtype)
    ids = None
    if p["map"] is not None:
        ids = order[:v].clone()
        if p["map"] == "holes":
            ids[:: max(v // 3, 1)] = -1
    mask = None if p["masked"] is None else draw.labels(2, *lead, masked=p["masked"]) != -100
    wide = torch.promote_types(dtype, torch.float32)
    weights = draw.randn(*lead, dtype=wide).abs() if p["token_weight"] else None
    none = options.get("reduction") == "none"
    grad = draw.randn(*hidden.shape[:-1], dtype=wide) if none else upstream(case, dtype, device)
    packed = torch.cat([torch.arange(5), torch.arange(13)]).to(device) if case.name == "packed" else None
    return Inputs(
        args=(hidden, weight, teacher, teacher_weight, ids),
        kwargs={
            "mask": mask,
            "token_weight": weights,
            "position_ids": packed,
            "valid_rows": int(mask.sum()) if p["known"] else None,
            **options,
        },
        grads=p["grads"],
        grad_outputs=(grad, torch.zeros(())) if "outputs" in options else (grad,),
    )


def tigon_fn(hidden, weight, teacher, teacher_weight, ids, **options):
    """Tigon's own."""
    import tigon

    return tigon.drafter_loss(hidden, weight, (teacher, teacher_weight), ids, **options)


def _rows(log_q, log_p, log_accepted, label, loss, eta):
    """The loss and the overlap of rows."""
    p = log_p.exp()
    overlap = torch.minimum(log_accepted.exp(), log_q.exp()).sum(-1)
    cross = -torch.where(p > 0, p * log_q, 0.0).sum(-1)
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    if loss == "hard":
        return -log_q.gather(-1, label.expand(log_q.shape[:-1]).unsqueeze(-1)).squeeze(-1), overlap
    blend = (-eta * overlap.detach()).exp()
    rows = {"ce": cross, "kl": kl, "tv": 1 - overlap, "lk": blend * kl + (1 - blend) * (1 - overlap)}
    return rows[loss], overlap


def eager_fn(
    hidden,
    weight,
    teacher,
    teacher_weight,
    ids,
    *,
    loss="kl",
    eta=3.0,
    outside="mixed",
    mask_outside=True,
    mask=None,
    token_weight=None,
    shifts=None,
    step_weights=None,
    position_ids=None,
    reduction="mean",
    denominator=None,
    outputs=("loss",),
    **others,
):
    """Logits of both heads, upcast, softmax, step by step; also the oracle, on fp64 copies."""
    one = hidden.dim() == teacher.dim()
    hidden = hidden.unsqueeze(-2) if one else hidden
    lead, steps = teacher.shape[:-1], hidden.shape[-2]
    with torch.no_grad():
        z = upcast(F.linear(teacher, teacher_weight))
        kept = z if ids is None else torch.where(ids >= 0, z[..., ids.clamp(min=0)], -torch.inf)
        own, full = (kept - torch.logsumexp(x, -1, keepdim=True) for x in (kept, z))
        log_p, log_accepted = full if outside == "count" else own, own if outside == "renormalize" else full
        counts = torch.ones(lead, dtype=torch.bool, device=z.device) if mask is None else mask
    label, total, values, accepted = kept.argmax(-1), 0.0, [], []
    inside = kept.amax(-1) == z.amax(-1) if mask_outside else torch.ones_like(counts)
    for i in range(steps):
        shift, factor = shifts[i] if shifts else 0, step_weights[i] if step_weights else 1.0
        states, reaches = hidden[..., i, :], torch.ones_like(counts)
        if shift:  # the state of the position `shift` before
            keep = max(lead[-1] - shift, 0)
            states = F.pad(states[..., :keep, :], (0, 0, lead[-1] - keep, 0))
            reaches[..., : lead[-1] - keep] = False
            reaches = reaches if position_ids is None else reaches & (position_ids >= shift)
        log_q = torch.log_softmax(upcast(F.linear(states, weight)), -1)
        rows, overlap = _rows(log_q, log_p, log_accepted, label, loss, eta)
        here = counts & reaches
        rows = factor * torch.where(here & inside, rows, 0.0)
        rows = rows if token_weight is None else rows * token_weight
        values.append(rows)
        reached = here.sum().clamp(min=1) if counts.any() else counts.sum()
        total = total + rows.sum() / (denominator or (reached if reduction == "mean" else 1))
        accepted.append(torch.where(here & inside, overlap, 0.0).sum() / (here & inside).sum())
    if reduction == "none":
        total = values[0] if one else torch.stack(values, -1)
    return (total, torch.stack(accepted).detach()) if len(outputs) > 1 else total


def _matmuls(case: Case) -> list[tuple[int, int, int]]:
    """The draft's head for every step, the teacher's once."""
    p = params(case, DEFAULTS)
    truncated = p["map"] is not None and not p["options"].get("mask_outside", True)
    truncated = truncated and p["options"].get("outside") == "renormalize"
    rows, v = math.prod(p["lead"]), p["V"]
    return [(rows * max(p["steps"], 1), p["H"], v), (rows, p["Ht"], v if truncated else p["Vt"])]


bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = costs(_matmuls)


def gemms(inputs: Inputs, step: bool) -> list:
    """The bare matmuls on the same operands, results in their dtype."""
    hidden, weight, teacher, teacher_weight, ids = inputs.args
    hidden, teacher = hidden.detach().reshape(-1, hidden.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
    weight = weight.detach()
    truncated = not inputs.kwargs.get("mask_outside", True) and ids is not None
    if truncated and inputs.kwargs.get("outside") == "renormalize":
        teacher_weight = teacher_weight[: len(ids)]
    matmuls = [lambda: teacher @ teacher_weight.t(), lambda: hidden @ weight.t()]
    if step:
        grad = torch.softmax(hidden @ weight.t(), dim=-1) / len(hidden)
        matmuls += gradient_matmuls(grad, hidden, weight, inputs.grads)
    return matmuls


PEERS = {}
