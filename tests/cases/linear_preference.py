"""Cases of linear_preference and linear_kto: losses of preferences under a linear head, without logits."""

import functools
import math

import torch
import torch.nn.functional as F

from . import liger_losses, preference
from .case import Case, Inputs, Maker, bench_case, itemsize, lay_out, nothing, params, test_case, upcast
from .heads import adapter, altered, as_tigon, gradient_matmuls, linear, loss_gradient, shifted, trained
from .linear_log_prob import trl_log_prob

NAME = "linear_preference"
LOSS = True

DEFAULTS = {
    "lora": 0,  # rank
    "layout": "contiguous",  # of hidden
    "ref": None,  # "sums", "head"
    "scale": 2.0,  # spread of the logits
}
DEFAULTS |= {"kind": "sigmoid", "answers": 4, "T": 7, "H": 32, "V": 67, "bias": False, "masked": 0.3}
DEFAULTS |= {"empty": (), "nll_target": False, "softcap": None, "logit_scale": 1.0, "temperature": 1.0}
DEFAULTS |= {"shift": False, "chunk_rows": None, "grads": (0, 1), "options": {}}
KINDS = (*preference.KINDS, *preference.SINGLE)


def _of(kind: str, **more) -> dict:
    options = preference._options(kind) | more.pop("options", {})
    ref = None if kind in preference.NO_REF else "sums"
    return {"kind": kind, "options": options, "ref": ref} | more


OF_BENCH = {"answers": 8, "T": 1024, "H": 4096, "V": 128256, "masked": 0.0, "scale": 0.2}
CASES = [test_case(f"{kind}_4x7", **_of(kind)) for kind in KINDS]
CASES += [
    test_case("small", small=True, answers=2, T=5, H=9, V=17, **_of("sigmoid")),
    test_case("small_kto", small=True, answers=3, T=5, H=9, V=17, **_of("kto")),
    test_case("small_orpo", small=True, T=5, H=9, V=17, **_of("orpo")),
    test_case("pairs_by_chunk", answers=8, T=9, chunk_rows=20, **_of("sigmoid")),
    test_case("pair_of_several_chunks", answers=6, T=13, chunk_rows=8, **_of("sigmoid")),
    test_case("answers_by_chunk", answers=7, T=9, chunk_rows=20, **_of("kto")),
    test_case("answer_of_several_chunks", answers=3, T=30, chunk_rows=8, **_of("kto")),
    test_case("unmasked_chunks", answers=8, T=9, masked=0.0, chunk_rows=40, **_of("ipo")),
    test_case("chunks_of_one", answers=4, T=3, chunk_rows=1, **_of("simpo")),
    test_case("many", answers=40, T=60, H=33, V=51, **_of("sigmoid")),
    test_case("reference_head", **_of("sigmoid", ref="head")),
    test_case("reference_head_chunks", answers=8, chunk_rows=16, **_of("apo_zero", ref="head")),
    test_case("reference_head_forth_and_back", answers=4, chunk_rows=5, **_of("cdpo", ref="head", bias=True)),
    test_case("no_reference", **_of("sigmoid", ref=None)),
    test_case("nll_target", nll_target=True, **_of("orpo")),
    test_case(
        "nll_target_chunks", answers=8, nll_target=True, chunk_rows=20, **_of("sigmoid", options={"nll": 0.7})
    ),
    test_case("bias", bias=True, **_of("sigmoid")),
    test_case("bias_chunks", answers=8, bias=True, chunk_rows=20, **_of("sigmoid")),
    test_case("lora", lora=4, **_of("sigmoid")),
    test_case("lora_chunks", answers=8, lora=3, chunk_rows=20, **_of("simpo")),
    test_case("lora_frozen", lora=4, grads=(0,), **_of("sigmoid")),
    test_case("frozen", grads=(0,), **_of("sigmoid")),
    test_case("frozen_chunks", answers=8, grads=(0,), chunk_rows=20, **_of("sigmoid")),
    test_case("hidden_frozen", grads=(1,), **_of("sigmoid")),
    test_case("hidden_frozen_chunks", answers=8, grads=(1,), chunk_rows=20, **_of("sigmoid")),
    test_case("softcap", softcap=5.0, temperature=0.7, logit_scale=1.3, **_of("sigmoid")),
    test_case("shift", shift=True, **_of("sigmoid")),
    test_case("shift_nll", shift=True, nll_target=True, **_of("cpo")),
    test_case("empty_answers", answers=8, empty=(0, 5, 3, 7), chunk_rows=16, **_of("sigmoid")),
    test_case("all_masked", masked=1.0, **_of("sigmoid", options={"nll": 1.0})),
    test_case("all_masked_kto", masked=1.0, **_of("kto")),
    test_case("no_pairs", answers=0, **_of("sigmoid")),
    test_case("no_tokens", T=0, **_of("sigmoid")),
    test_case("strided", layout="rows", H=33, **_of("sigmoid")),
    test_case("transposed", layout="heads3", **_of("sigmoid")),
    test_case("denominator", **_of("sigmoid", options={"denominator": 9.0})),
    bench_case("1x2x4096x4096x128256", answers=2, T=4096, H=4096, V=128256, masked=0.0, scale=0.2),
    bench_case("4x2x1024x4096x128256", **OF_BENCH),
    bench_case("4x2x1024x2048x151936", answers=8, T=1024, H=2048, V=151936, masked=0.0, scale=0.2),
    bench_case("4x2x1024_frozen", grads=(0,), **OF_BENCH),
    *(bench_case(f"4x2x1024_{kind}", **_of(kind, ref=None), **OF_BENCH) for kind in ("cpo", "simpo", "orpo")),
    bench_case("4x2x1024_reference", ref="head", **OF_BENCH),
    bench_case("8x1024_kto_reference", **_of("kto", ref="head"), **OF_BENCH),
    bench_case("2x2x128x256x4096", "bench_cpu", answers=4, T=128, H=256, V=4096, masked=0.0),
    bench_case("2x2x16x32x512", "smoke", answers=4, T=16, H=32, V=512, masked=0.0),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    answers, tokens, size, vocab, kind = p["answers"], p["T"], p["H"], p["V"], p["kind"]
    hidden = draw.randn(answers, tokens, size)
    if p["layout"] == "heads3":
        hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        hidden = lay_out(hidden, p["layout"])
    weight = draw.randn(vocab, size, scale=p["scale"] / math.sqrt(size))
    target = draw.labels(vocab, answers, tokens, masked=p["masked"])
    target[list(p["empty"])] = -100
    kwargs = {"kind": kind, "chunk_rows": p["chunk_rows"], "shift": p["shift"], **p["options"]}
    kwargs |= {"softcap": p["softcap"], "temperature": p["temperature"], "logit_scale": p["logit_scale"]}
    if p["bias"]:
        kwargs["bias"] = draw.randn(vocab)
    if p["ref"] == "sums":
        counts = (target[:, 1:] if p["shift"] else target) != -100
        kwargs["ref"] = draw.randn(answers, dtype=torch.float32) - counts.sum(-1) * math.log(vocab)
    elif p["ref"] == "head":
        kwargs["ref_hidden"] = draw.randn(answers, tokens, size + 8)
        kwargs["ref_weight"] = draw.randn(vocab, size + 8, scale=p["scale"] / math.sqrt(size))
    kwargs |= adapter(draw, p["lora"], size, vocab) if p["lora"] else {}
    if p["nll_target"]:
        more = draw.labels(vocab, answers // 2, tokens, masked=0.3)
        kwargs["nll_target"] = torch.where(target[: answers // 2] != -100, target[: answers // 2], more)
    if kind in preference.SINGLE:
        kwargs["desirable"] = draw.integers(0, 2, answers) == 1
    return Inputs(args=(hidden, weight, target), kwargs=kwargs, grads=p["grads"], grad_kwargs=trained(p))


def tigon_fn(hidden, weight, target, *, kind, desirable=None, ref_hidden=None, ref_weight=None, **options):
    """Tigon's own."""
    import tigon

    options = as_tigon(options)
    if ref_hidden is not None:
        options["ref"] = (ref_hidden, ref_weight)
    if desirable is None:
        return tigon.linear_preference(hidden, weight, target, kind=kind, **options)
    return tigon.linear_kto(hidden, weight, target, desirable, kind=kind, **options)


def log_probs(hidden, weight, target, *, bias=None, lora_a=None, lora_b=None, **form):
    """Of the labels, and the entropies, from the logits; the bias is added in float32."""
    z = upcast(linear(hidden, weight, None, lora_a, lora_b))
    log_p = F.log_softmax(altered(z if bias is None else z + bias, **form), dim=-1)
    picked = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked, -(log_p.exp() * log_p).sum(-1)


def _with(losses, hidden, weight, target, *, of=log_probs, ref=None, nll_target=None, **options):
    options.pop("chunk_rows")
    names = ("bias", "lora_a", "lora_b", "softcap", "temperature", "logit_scale")
    head = {name: options.pop(name) for name in names if name in options}
    ref_hidden, ref_weight = options.pop("ref_hidden", None), options.pop("ref_weight", None)
    if options.pop("shift"):
        target, nll_target = shifted(target), None if nll_target is None else shifted(nll_target)
    labels = target
    if nll_target is not None:
        pairs = len(target) // 2
        labels = torch.cat((torch.where(nll_target != -100, nll_target, target[:pairs]), target[pairs:]))
        options["nll_mask"] = nll_target != -100
    log_prob, _ = of(hidden, weight, labels, **head)
    mask = target != -100
    if ref_hidden is not None:
        theirs, _ = of(ref_hidden, ref_weight, labels, **{name: head[name] for name in names[3:]})
        ref = theirs.masked_fill(~mask, 0.0).sum(-1)
    return losses(log_prob, mask=mask, ref=ref, **options)


eager_fn = functools.partial(_with, preference.eager_fn)  # the logits, then the trainers' formulas
oracle_fn = functools.partial(_with, preference.oracle_fn)


def _sizes(case: Case) -> tuple[int, int, int, float]:
    p = params(case, DEFAULTS)
    return p["answers"] * p["T"], p["H"], p["V"], 1.0 - p["masked"]


def bytes_fwd(case: Case, dtype: torch.dtype) -> int:
    """Compute bound: operands and gradients."""
    rows, size, vocab, _ = _sizes(case)
    return 2 * (rows + vocab) * size * itemsize(dtype)


def flops_fwd(case: Case) -> int:
    """The matmuls of a step, of rows that count."""
    rows, size, vocab, counted = _sizes(case)
    heads = 1 + (case.params.get("ref") == "head")
    return int(2 * rows * size * vocab * counted * (heads + len(case.params.get("grads", (0, 1)))))


bytes_bwd = flops_bwd = nothing


def gemms(inputs: Inputs, step: bool) -> list:
    """The bare matmuls on the same operands: logits,
    and for a step those of the gradients that are wanted."""
    hidden, weight, target = (value.detach() for value in inputs.args)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    matmuls = [lambda: hidden @ weight.t()]
    if "ref_hidden" in inputs.kwargs:
        ref_head = inputs.kwargs["ref_hidden"].flatten(0, -2), inputs.kwargs["ref_weight"].t()
        matmuls.append(lambda: ref_head[0] @ ref_head[1])
    if step:
        matmuls += gradient_matmuls(loss_gradient(hidden, weight, target), hidden, weight, inputs.grads)
    return matmuls


def _trl(case, inputs):
    """TRL's chunked head and its trainers' formulas."""
    import trl.trainer.utils  # noqa: F401

    if inputs.kwargs["shift"] or "lora_a" in inputs.kwargs:
        return None

    def of(hidden, weight, target, **form):
        return trl_log_prob(hidden, weight, target.clamp(min=0), **form), None

    return lambda *args, **options: _with(preference.eager_fn, *args, of=of, **options)[0]


PEERS = {"trl": _trl, "liger": liger_losses.preference}
