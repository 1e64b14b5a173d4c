"""Cases of kl_div, jsd and tvd: divergences of a student's and a teacher's rows."""

import functools
import math

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, itemsize, nothing, params, test_case, upcast

NAME = "divergence"
LOSS = True

DEFAULTS = {
    "teacher_layout": None,  # as student
    "labels": None,  # the fraction that is masked
}
DEFAULTS |= {"op": "kl_div", "options": {}, "shape": (6, 64), "layout": "contiguous", "scale": 2.0}
DEFAULTS |= {"fill": None, "fill_teacher": None}

FORMS = {
    "kl": {"op": "kl_div"},
    "reverse": {"op": "kl_div", "options": {"reverse": True}},
    "jsd": {"op": "jsd"},
    "jsd_0.1": {"op": "jsd", "options": {"beta": 0.1}},
    "jsd_0": {"op": "jsd", "options": {"beta": 0.0}},
    "jsd_1": {"op": "jsd", "options": {"beta": 1.0}},
    "tvd": {"op": "tvd"},
}


def _with(form: str, **options) -> dict:
    own = FORMS[form]
    return {**own, "options": {**own.get("options", {}), **options}}


def _of_every_form(form: str) -> list[Case]:
    """The edges of one formula, and the ways through the kernels."""
    own = _with(form)
    log_probs, none = _with(form, log_probs=True), _with(form, reduction="none")
    return [
        test_case(f"{form}_odd_3x7", small=True, shape=(3, 7), **own),
        test_case(f"{form}_log_probs", small=True, shape=(4, 33), **log_probs),
        test_case(f"{form}_none", small=True, shape=(2, 3, 40), **none),
        test_case(f"{form}_5x1031", shape=(5, 1031), **own),
        test_case(f"{form}_2x9001", shape=(2, 9001), **own),
        test_case(f"{form}_masked", shape=(3, 5, 130), labels=0.4, **_with(form, temperature=2.0)),
        test_case(f"{form}_mean", shape=(9, 130), labels=0.4, **_with(form, reduction="mean")),
        test_case(f"{form}_sum_rows", shape=(9, 130), layout="rows", **_with(form, reduction="sum")),
        test_case(f"{form}_misaligned", shape=(3, 256), teacher_layout="offset1", **own),
        test_case(f"{form}_nan", shape=(5, 130), fill="nan", **none),
        test_case(f"{form}_far", shape=(5, 130), scale=15.0, **own),
        test_case(f"{form}_all_masked", shape=(4, 65), labels=1.0, **own),
    ]


CASES = [case for form in FORMS for case in _of_every_form(form)]
CASES += [
    test_case("one_column", shape=(5, 1)),
    test_case("one_row", shape=(1, 1000)),
    test_case("vector", shape=(97,)),
    test_case("none_vector", shape=(97,), **_with("kl", reduction="none")),
    test_case("empty", shape=(0, 64), **_with("kl", reduction="sum")),
    test_case("all_masked", shape=(4, 65), labels=1.0, **_with("jsd", reduction="sum")),
    test_case("transposed", shape=(9, 130), layout="transposed", **_with("jsd")),
    test_case("heads", shape=(2, 3, 5, 16), layout="heads", **_with("tvd")),
    test_case("misaligned", shape=(5, 300), layout="offset1", **_with("jsd")),
    test_case("wide", shape=(2, 70001), **_with("jsd")),
    *(
        test_case(f"{form}_far_long", shape=(3, 40000), scale=15.0, **_with(form))
        for form in ("kl", "jsd", "tvd")
    ),
    *(
        test_case(
            f"{form}_teacher_excludes", shape=(5, 130), fill_teacher="-inf", **_with(form, reduction="none")
        )
        for form in ("kl", "reverse", "jsd", "tvd")
    ),
    *(
        test_case(
            f"{form}_student_excludes",
            shape=(5, 130),
            fill="-inf",
            grad=False,
            **_with(form, reduction="none"),
        )
        for form in ("kl", "reverse", "jsd", "tvd")
    ),
]
for _op in ("kl", "jsd", "tvd"):
    CASES += [
        bench_case(f"{_op}_8192x128256", shape=(8192, 128256), **_with(_op)),
        bench_case(f"{_op}_8192x32000", shape=(8192, 32000), **_with(_op)),
        bench_case(f"{_op}_4096x151936_masked", shape=(4096, 151936), labels=0.5, **_with(_op)),
        bench_case(f"{_op}_256x32000", "bench_cpu", shape=(256, 32000), **_with(_op)),
        bench_case(f"{_op}_64x1024", "smoke", shape=(64, 1024), **_with(_op)),
    ]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    shape, options = p["shape"], p["options"]
    student = draw.randn(*shape, layout=p["layout"], scale=p["scale"])
    teacher = draw.randn(*shape, layout=p["teacher_layout"] or p["layout"], scale=p["scale"])
    for value, fill in ((student, p["fill"]), (teacher, p["fill_teacher"])):
        if fill is not None:
            value[1, 3] = float(fill)
    if options.get("log_probs"):
        student, teacher = (F.log_softmax(x.double(), -1).to(dtype) for x in (student, teacher))
    kwargs = {"op": p["op"], **options}
    if p["labels"] is not None:
        kwargs["labels"] = draw.labels(10, *shape[:-1], masked=p["labels"])
    grad = None
    if options.get("reduction") == "none":
        grad = (draw.randn(*shape[:-1], dtype=torch.promote_types(dtype, torch.float32)),)
    return Inputs(args=(student, teacher), kwargs=kwargs, grads=(0,), grad_outputs=grad)


def tigon_fn(student, teacher, *, op="kl_div", labels=None, **options):
    """Tigon's own."""
    import tigon

    return getattr(tigon, op)(student, teacher, labels, **options)


def _reduce(rows, labels, columns, reduction):
    count = rows.numel()
    if labels is not None:
        kept = labels != -100
        rows, count = torch.where(kept, rows, 0.0), kept.sum()
    if reduction == "none":
        return rows
    return rows.sum() / {"sum": 1, "batchmean": count, "mean": count * columns}[reduction]


def _kl(x, y):
    """KL(x || y) of log-probabilities, as distillation trainers write it."""
    return F.kl_div(y, x, log_target=True, reduction="none").sum(-1)


def row_terms(lq, lp, op, reverse, beta):
    """The divergence of each row of log-probabilities, by torch's kl_div, as in TRL's GKD trainer."""
    if op == "tvd":
        return (lq.exp() - lp.exp()).abs().sum(-1) / 2
    if op == "kl_div" or beta in (0, 1):
        return _kl(lq, lp) if reverse or beta == 1 else _kl(lp, lq)
    lm = torch.logsumexp(torch.stack((lq + math.log1p(-beta), lp + math.log(beta))), dim=0)
    return beta * _kl(lp, lm) + (1 - beta) * _kl(lq, lm)


def exact_terms(lq, lp, op, reverse, beta):
    """The sums of the contract, for fp64."""
    q, p = lq.exp(), lp.exp()
    beta = float(reverse) if op == "kl_div" else beta
    if op == "tvd":
        return (torch.maximum(q, p) - (q + p) / 2).sum(-1)
    if beta == 0:
        return torch.where(p == 0, 0.0, p * (lp - lq)).sum(-1)
    if beta == 1:
        return torch.where(q == 0, 0.0, q * (lq - lp)).sum(-1)
    lm = torch.log(beta * p + (1 - beta) * q)
    teachers, students = torch.where(p == 0, 0.0, p * (lp - lm)), torch.where(q == 0, 0.0, q * (lq - lm))
    return (beta * teachers + (1 - beta) * students).sum(-1)


def _loss(
    terms,
    student,
    teacher,
    *,
    op="kl_div",
    labels=None,
    reverse=False,
    beta=0.5,
    temperature=1.0,
    log_probs=False,
    reduction="batchmean",
):
    """log_softmax in fp32 or fp64, then the terms."""
    lq, lp = upcast(student), upcast(teacher)
    if not log_probs:
        lq, lp = (F.log_softmax(x / temperature, dim=-1) for x in (lq, lp))
    return _reduce(terms(lq, lp, op, reverse, beta), labels, student.shape[-1], reduction)


eager_fn = functools.partial(_loss, row_terms)
oracle_fn = functools.partial(_loss, exact_terms)


def bytes_step(case: Case, dtype: torch.dtype) -> int:
    """Two reads and one write in all; rows that do not count are only cleared."""
    masked = case.params.get("labels") or 0.0
    return int((3 - 2 * masked) * math.prod(case.params["shape"]) * itemsize(dtype))


bytes_fwd = bytes_step  # a forward that keeps its gradient is a step
bytes_bwd = flops_fwd = flops_bwd = nothing


def _liger(case, inputs):
    """Its losses take log-probabilities (TVD: probabilities): the softmaxes are part of the work."""
    options = dict(inputs.kwargs)
    op, labels = options.pop("op"), options.pop("labels", None)
    if options.pop("beta", 0.5) != 0.5 or options:
        return None
    from liger_kernel.transformers.functional import liger_jsd, liger_kl_div, liger_tvd

    def fn(student, teacher, **_):
        lq, lp = (F.log_softmax(x.float(), dim=-1) for x in (student, teacher))
        if op == "kl_div":
            return liger_kl_div(lq, lp, reduction="batchmean", log_target=True)
        if op == "jsd":
            return liger_jsd(lq, lp, labels)
        return liger_tvd(lq.exp(), lp.exp(), reduction="batchmean", shift_labels=labels)

    return None if op == "kl_div" and labels is not None else fn


PEERS = {"liger": _liger}
