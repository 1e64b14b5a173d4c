"""Cases of linear_kl_div, linear_jsd and linear_tvd: a student's head against a teacher's, without logits."""

import functools
import math

import torch
import torch.nn.functional as F

from . import liger_losses
from .case import Case, Inputs, Maker, bench_case, lay_out, params, test_case, upcast, upstream
from .cross_entropy import make_denominator
from .divergence import exact_terms, row_terms
from .heads import LORA_SCALE, adapter, altered, as_tigon, costs, gradient_matmuls, shifted, trained

NAME = "linear_divergence"
LOSS = True

DEFAULTS = {
    "lead": (13,),  # leading shape of the hidden states
    "Vt": None,  # as V
    "teacher": "head",  # or "logits"
    "teacher_dtype": None,  # as hidden
    "near": None,  # spread of the teacher's logits about the student's
    "bias": False,  # of both
    "layout": "contiguous",  # of both hidden states, or the teacher's logits
    "masked": None,  # None: no labels
    "known": False,  # the number of rows that count is said
    "lora": 0,  # rank
    "scale": 2.0,  # spread of the logits
}
DEFAULTS |= {"op": "linear_kl_div", "H": 32, "Ht": 48, "V": 67, "weight_layout": "contiguous"}
DEFAULTS |= {"token_weight": False, "denominator": None, "fill": None, "grads": (0, 1), "upstream": None}
DEFAULTS |= {"options": {}}
FORMS = {
    "kl": ("linear_kl_div", {}),
    "reverse": ("linear_kl_div", {"reverse": True}),
    "jsd": ("linear_jsd", {}),
    "jsd_0.1": ("linear_jsd", {"beta": 0.1}),
    "jsd_0": ("linear_jsd", {"beta": 0.0}),
    "jsd_1": ("linear_jsd", {"beta": 1.0}),
    "tvd": ("linear_tvd", {}),
}
OPTIONS = {"softcap": 6.0, "logit_scale": 0.7, "teacher_softcap": 9.0, "teacher_logit_scale": 1.3}
OPTIONS |= {"temperature": 1.5, "hard": 0.4, "soft": 0.8, "chunk_rows": 10}
OPTIONS["outputs"] = ("loss", "soft", "hard", "entropy")
EVERYTHING = {"lead": (2, 23), "V": 517, "bias": True, "masked": 0.2, "token_weight": True, "layout": "rows"}
EVERYTHING["options"] = OPTIONS


def _case(form: str, name: str, *, small=False, grad=True, options=None, **others) -> Case:
    op, own = FORMS[form]
    options = {**own, **(options or {})}
    return test_case(f"{form}_{name}", small=small, grad=grad, op=op, options=options, **others)


def _of_every_form(form: str) -> list[Case]:
    return [
        _case(form, "13x32x67", small=True),
        _case(form, "odd", lead=(7,), H=33, Ht=9, V=51, masked=0.3),
        _case(form, "near", lead=(9,), V=1031, near=0.03),
        _case(form, "near_chunks", lead=(37,), V=1031, near=0.03, options={"chunk_rows": 16}),
        _case(form, "none", lead=(2, 9), masked=0.3, options={"reduction": "none", "chunk_rows": 5}),
        _case(form, "everything", **EVERYTHING),
        _case(form, "logits", teacher="logits", lead=(2, 9), masked=0.4, layout="rows"),
        _case(form, "far", scale=15.0, lead=(9,)),
        _case(form, "long", lead=(2,), H=8, Ht=8, V=9001, masked=0.0, options={"hard": 1.0}),
    ]


CASES = [case for form in FORMS for case in _of_every_form(form)]
CASES += [
    _case("kl", "one_row", lead=(1,), V=1000),
    _case("kl", "one_class", V=1),
    _case("kl", "one_hidden", H=1, Ht=1),
    _case("jsd", "empty", lead=(0,)),
    _case("jsd", "empty_sum", lead=(2, 0), options={"reduction": "sum"}),
    _case("kl", "all_masked", masked=1.0),
    _case("kl", "all_masked_sum", masked=1.0, bias=True, options={"reduction": "sum", "hard": 1.0}),
    _case("jsd", "all_masked_none", masked=1.0, options={"reduction": "none"}),
    _case("kl", "mean", masked=0.3, options={"reduction": "mean", "hard": 0.5}),
    _case("kl", "sum", masked=0.3, options={"reduction": "sum"}),
    _case("jsd", "denominator", masked=0.3, denominator=7.5),
    _case("jsd", "denominator_tensor", masked=0.3, denominator="tensor", options={"chunk_rows": 4}),
    _case("kl", "teacher_longer", Vt=71, masked=0.2, bias=True),
    _case("kl", "teacher_shorter", Vt=60, masked=0.2, bias=True, lora=4, options={"hard": 0.5}),
    _case("jsd", "logits_longer", Vt=80, teacher="logits", masked=0.5, known=True),
    _case("tvd", "logits_shorter", Vt=61, teacher="logits"),
    _case("kl", "teacher_f32", teacher_dtype=torch.float32),
    _case("kl", "teacher_bf16", teacher_dtype=torch.bfloat16),
    _case("kl", "logits_f32", teacher="logits", teacher_dtype=torch.float32, masked=0.3),
    _case("kl", "logits_f16", teacher="logits", teacher_dtype=torch.float16, layout="offset1"),
    _case("jsd", "columns", lead=(2, 9), layout="columns"),
    _case("jsd", "weight_transposed", weight_layout="transposed"),
    _case("jsd", "misaligned", H=64, layout="offset1", weight_layout="offset1"),
    _case("kl", "hidden_only", grads=(0,), masked=0.2),
    _case("kl", "weight_only", grads=(1,), masked=0.2),
    _case("jsd", "no_grad", grads=(), grad=False, options={"outputs": ("loss", "entropy")}),
    _case("jsd", "known", lead=(37,), masked=0.6, known=True, bias=True, options={"chunk_rows": 4}),
    _case("jsd", "known_none", lead=(37,), masked=0.6, known=True, options={"reduction": "none"}),
    _case("kl", "known_teacher_rows", lead=(37,), masked=0.6, known=True, layout="columns"),
    _case("kl", "shift", lead=(3, 8), masked=0.3, options={"shift": True, "hard": 1.0}),
    _case("kl", "temperature", options={"temperature": 2.0, "hard": 0.5}, masked=0.0),
    _case("kl", "hard_only", options={"soft": 0.0, "hard": 1.0}, masked=0.2),
    _case("kl", "lora", lora=4, masked=0.2, options={"chunk_rows": 4}),
    _case("jsd", "lora_none", lora=3, H=33, V=51, grads=(0,), options={"reduction": "none"}),
    _case("kl", "nan_row", fill="nan", grads=(0,), options={"reduction": "none"}),
    _case("jsd", "nan_mean", fill="nan"),
]
for _form in ("kl", "jsd", "tvd"):
    _op, _own = FORMS[_form]
    CASES += [
        bench_case(f"{_form}_{rows}x{h}+{ht}x{v}", lead=(rows,), H=h, Ht=ht, V=v, op=_op, options=_own)
        for rows, h, ht, v in ((8192, 2048, 4096, 128256), (4096, 2048, 2048, 151936))
    ]
CASES += [
    bench_case(f"kl_8192x2048+4096x128256_{name}", lead=(8192,), H=2048, Ht=4096, V=128256, **options)
    for name, options in {
        "hard": {"masked": 0.0, "options": {"hard": 0.5}},
        "masked80": {"masked": 0.8, "known": True},
        "frozen": {"grads": (0,)},
        "logits": {"teacher": "logits"},
        "none": {"options": {"reduction": "none"}},
    }.items()
]
CASES += [
    bench_case("kl_1024x512+512x32000", "bench_cpu", lead=(1024,), H=512, Ht=512, V=32000),
    bench_case("kl_256x128+128x1024", "smoke", lead=(256,), H=128, Ht=128, V=1024),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case; both sides' logits have the spread `scale`."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    lead, h, v, options = p["lead"], p["H"], p["V"], p["options"]
    ht, vt, teacher_type = p["Ht"], p["Vt"] or v, p["teacher_dtype"] or dtype
    hidden = draw.randn(*lead, h, layout=p["layout"])
    weight = lay_out(draw.randn(v, h, scale=p["scale"] / math.sqrt(h)), p["weight_layout"])
    if p["near"] is not None:  # in more digits than bf16 has, where the student's are bf16
        wide = torch.promote_types(dtype, torch.float32)
        noise = draw.randn(v, h, scale=p["near"] / math.sqrt(h), dtype=wide)
        teacher, teacher_weight = hidden.to(wide), weight.to(wide) + noise
    elif p["teacher"] == "logits":
        teacher = draw.randn(*lead, vt, layout=p["layout"], scale=p["scale"], dtype=teacher_type)
        teacher_weight = None
    else:
        teacher = draw.randn(*lead, ht, layout=p["layout"], dtype=teacher_type)
        teacher_weight = draw.randn(vt, ht, scale=p["scale"] / math.sqrt(ht), dtype=teacher_type)
    both = teacher_weight is not None
    bias = draw.randn(v) if p["bias"] else None
    teacher_bias = draw.randn(vt, dtype=teacher_type) if p["bias"] and both else None
    labels = None if p["masked"] is None else draw.labels(min(v, vt), *lead, masked=p["masked"])
    if p["fill"] is not None:
        hidden.view(-1, h)[1, 3] = float(p["fill"])
    wide = torch.promote_types(dtype, torch.float32)
    weights = draw.randn(*lead, dtype=wide).abs() if p["token_weight"] else None
    none = options.get("reduction") == "none"
    grad = draw.randn(*lead, dtype=wide) if none else upstream(case, dtype, device)
    counted = labels[..., 1:] if options.get("shift") else labels
    return Inputs(
        args=(hidden, weight, teacher, teacher_weight, labels),
        kwargs={
            "op": p["op"],
            "bias": bias,
            "teacher_bias": teacher_bias,
            "token_weight": weights,
            "denominator": make_denominator(p["denominator"], device),
            "valid_rows": int((counted != -100).sum()) if p["known"] else None,
            **adapter(draw, p["lora"], h, v),
            **options,
        },
        grads=p["grads"],
        grad_outputs=(grad, *(torch.zeros(()) for _ in options.get("outputs", ("loss",))[1:])),
        grad_kwargs=trained(p),
    )


def tigon_fn(hidden, weight, teacher, teacher_weight, labels, *, op, teacher_bias, **options):
    """Tigon's own."""
    import tigon

    if teacher_weight is not None:
        teacher = (teacher, teacher_weight, *(() if teacher_bias is None else (teacher_bias,)))
    return getattr(tigon, op)(hidden, weight, teacher, labels, **as_tigon(options))


class _Matmul(torch.autograd.Function):
    """x W^T in float32, its gradient rounded to the operands' dtype before the matmuls: one rounding, as
    in TRL's and Tigon's own.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return upcast(x) @ upcast(weight).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = upcast(dy.to(x.dtype))
        flat = dy.reshape(-1, dy.shape[-1])
        dweight = flat.t() @ upcast(x).reshape(-1, x.shape[-1])
        return (dy @ upcast(weight)).to(x.dtype), dweight.to(weight.dtype)


def _with_bias(logits, bias):
    return logits if bias is None else logits + upcast(bias)[: logits.shape[-1]]


def _loss(
    terms,
    hidden,
    weight,
    teacher,
    teacher_weight,
    labels,
    *,
    op,
    bias,
    teacher_bias,
    lora_a,
    lora_b,
    token_weight,
    denominator,
    valid_rows,
    reverse=False,
    beta=0.5,
    soft=1.0,
    hard=0.0,
    temperature=1.0,
    softcap=None,
    logit_scale=1.0,
    teacher_softcap=None,
    teacher_logit_scale=1.0,
    reduction="batchmean",
    shift=False,
    chunk_rows=None,
    outputs=("loss",),
):
    """Logits of both heads in fp32 or fp64, then the losses."""
    del valid_rows, chunk_rows
    if labels is None:
        labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    elif shift:
        labels = shifted(labels)
    logits = _Matmul.apply(hidden, weight)
    if lora_a is not None:
        logits = logits + LORA_SCALE * _Matmul.apply(_Matmul.apply(hidden, lora_a).to(hidden.dtype), lora_b)
    with torch.no_grad():
        other = upcast(teacher) if teacher_weight is None else _Matmul.apply(teacher, teacher_weight)
        classes = min(weight.shape[0], other.shape[-1])
        t = altered(_with_bias(other[..., :classes], teacher_bias), teacher_softcap, teacher_logit_scale)
    s = altered(_with_bias(logits[..., :classes], bias), softcap, logit_scale)
    lq, lp = F.log_softmax(s / temperature, -1), F.log_softmax(t / temperature, -1)
    counts = labels != -100
    soft_rows = torch.where(counts, terms(lq, lp, op.removeprefix("linear_"), reverse, beta), 0.0)
    flat = F.cross_entropy(s.reshape(-1, classes), labels.reshape(-1), ignore_index=-100, reduction="none")
    hard_rows = flat.view(labels.shape)
    rows = soft * soft_rows + (hard * hard_rows if hard else 0.0)
    rows = rows if token_weight is None else rows * token_weight
    if denominator is not None:
        loss = rows.sum() / denominator
    elif reduction == "none":
        loss = rows
    else:
        loss = rows.sum() / {"sum": 1, "batchmean": counts.sum(), "mean": counts.sum() * classes}[reduction]
    entropy = torch.where(counts, -(lq.exp() * lq).sum(-1), 0.0)
    values = {"soft": soft_rows, "hard": hard_rows, "entropy": entropy}
    return (loss, *(values[name].detach() for name in outputs[1:])) if outputs != ("loss",) else loss


eager_fn = functools.partial(_loss, row_terms)  # log_softmax, torch's kl_div and cross_entropy
oracle_fn = functools.partial(_loss, exact_terms)  # the formula, for fp64


def _matmuls(case: Case) -> list[tuple[int, int, int]]:
    """The student's head, and the teacher's if it is one."""
    p = params(case, DEFAULTS)
    rows, v = math.prod(p["lead"]), p["V"]
    return [(rows, p["H"], v), (rows, p["Ht"] if p["teacher"] == "head" else 0, v)]


bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = costs(_matmuls)


def gemms(inputs: Inputs, step: bool) -> list:
    """The bare matmuls on the same operands, results in their dtype: both heads' logits, both gradients."""
    hidden, weight, teacher, teacher_weight, labels = inputs.args
    hidden, teacher = hidden.detach().reshape(-1, hidden.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
    if inputs.kwargs["valid_rows"] is not None:
        counts = labels.reshape(-1) != -100
        hidden, teacher = hidden[counts], teacher[counts]
    weight = weight.detach()
    matmuls = [lambda: hidden @ weight.t()]
    if teacher_weight is not None:
        matmuls.append(lambda: teacher @ teacher_weight.t())
    if step:
        given = teacher if teacher_weight is None else teacher @ teacher_weight.t()
        grad = torch.softmax(hidden @ weight.t(), dim=-1) - torch.softmax(given[:, : len(weight)], dim=-1)
        grad /= len(grad)
        if inputs.kwargs.get("reduction") == "none":
            matmuls *= 2
        matmuls += gradient_matmuls(grad, hidden, weight, inputs.grads)
    return matmuls


def _trl(case, inputs):
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    kwargs = inputs.kwargs
    _, _, _, teacher_weight, labels = inputs.args
    if teacher_weight is None or labels is not None or kwargs["op"] == "linear_tvd":
        return None
    beta = kwargs.get("beta", 0.5) if kwargs["op"] == "linear_jsd" else float(kwargs.get("reverse", False))

    def fn(hidden, weight, teacher, teacher_weight, labels, **_):
        rows, _ = ChunkedDivergenceFunction.apply(
            hidden, weight, None, teacher, teacher_weight, None, beta, kwargs.get("temperature", 1.0)
        )
        return rows if kwargs.get("reduction") == "none" else rows.sum() / len(rows)

    return fn


PEERS = {"trl": _trl, "liger": liger_losses.divergence, "liger_fused": liger_losses.fused_divergence}
