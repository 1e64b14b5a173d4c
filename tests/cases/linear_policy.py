"""Cases of linear_policy: policy-gradient losses under a linear head, without logits."""

import math

import torch

from . import liger_losses, linear_preference, policy
from .case import Case, Inputs, Maker, bench_case, nothing, params, test_case
from .heads import adapter, as_tigon, shifted, trained
from .linear_log_prob import trl_log_prob
from .linear_preference import log_probs

NAME = "linear_policy"
LOSS = True

DEFAULTS = {
    "lora": 0  # rank
}
DEFAULTS |= {"answers": 3, "T": 7, "H": 32, "V": 67, "bias": False, "masked": 0.3, "empty": (), "old": 0.2}
DEFAULTS |= {"ref": None, "importance": None, "per_token": False, "softcap": None, "logit_scale": 1.0}
DEFAULTS |= {"temperature": 1.0, "shift": False, "chunk_rows": None, "scale": 2.0, "grads": (0, 1)}
DEFAULTS |= {"options": {}}
KL = {"kl": 0.1, "entropy": 0.05}
SEVERAL = {"level": "sequence", "kl_corrected": True, **KL}
BY_ANSWER = {"level": "sequence", "normalise": "sequence"}
SMALL = {"answers": 2, "T": 5, "H": 9, "V": 17}
OF_BENCH = {"answers": 8, "T": 1024, "H": 4096, "V": 128256, "masked": 0.0, "scale": 0.2}


def _of_every_kind(kind: str) -> list[Case]:
    def case(name, **more):
        options = {"kind": kind} | more.pop("options", {})
        return test_case(f"{kind}_{name}", options=options, **more)

    # All gradients of an answer share the error of one factor: many answers, else one draw says little.
    few = 32 if kind == "vespo" else 5
    return [
        case("3x7", answers=32 if kind == "vespo" else 3),
        case("on_policy", answers=few, old=None),
        case("chunks", answers=few, T=11, chunk_rows=8),
        case("everything", ref=0.3, importance="token", options=KL, answers=few, T=9, chunk_rows=20),
        case("sequence", answers=few, T=9, chunk_rows=20, options=BY_ANSWER),
        case("sequence_of_several_chunks", answers=few, T=20, chunk_rows=7, ref=0.3, options=SEVERAL),
    ]


CASES = [case for kind in policy.CASES_OF for case in _of_every_kind(kind)]
CASES += [
    # On the policy the ratio is a constant to finite differences.
    test_case("small", small=True, **SMALL, options={"entropy": 0.1}),
    test_case("small_sequence", small=True, **SMALL, ref=0.3, options={"level": "sequence", "kl": 0.1}),
    test_case("entropy", options={"entropy": 0.3}),
    test_case("entropy_frozen", grads=(0,), options={"entropy": 0.3}),
    test_case("entropy_mean", options={"entropy": 0.3, "entropy_denominator": 5.0}),
    test_case("sum", answers=32, old=0.05, options={"level": "sum", "normalise": "sequence"}),
    test_case("length", options={"normalise": "length"}),
    test_case("denominator", options={"denominator": 30.0}),
    test_case("delta", old=0.8, options={"delta": 1.3}),
    test_case("per_token", per_token=True, importance="answer"),
    test_case("bias", bias=True, chunk_rows=8),
    test_case("lora", lora=4, options={"entropy": 0.1}),
    test_case("lora_chunks", lora=4, chunk_rows=8, bias=True),
    test_case("frozen", grads=(0,), chunk_rows=8),
    test_case("hidden_frozen", grads=(1,), chunk_rows=8),
    test_case("softcap", softcap=5.0, temperature=0.7, logit_scale=1.3, options={"entropy": 0.1}),
    test_case("shift", shift=True),
    test_case("unmasked", masked=0.0, answers=5, T=11, chunk_rows=16),
    test_case("all_masked", masked=1.0, options=BY_ANSWER),
    test_case("no_answers", answers=0),
    test_case("no_tokens", T=0),
    test_case("many", answers=20, T=120, H=33, V=51),
    bench_case("8x1024x4096x128256", **OF_BENCH),
    bench_case("8x1024_sequence", **OF_BENCH, options=BY_ANSWER),
    bench_case("8x1024_entropy", **OF_BENCH, options={"entropy": 0.01}),
    bench_case("8x1024_kl", **OF_BENCH, ref=0.3, options={"kl": 0.04}),
    bench_case("4x128x256x4096", "bench_cpu", answers=4, T=128, H=256, V=4096, masked=0.0),
    bench_case("4x16x32x512", "smoke", answers=4, T=16, H=32, V=512, masked=0.0),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    answers, tokens, size, vocab = p["answers"], p["T"], p["H"], p["V"]
    hidden = draw.randn(answers, tokens, size)
    weight = draw.randn(vocab, size, scale=p["scale"] / math.sqrt(size))
    target = draw.labels(vocab, answers, tokens, masked=p["masked"])
    kwargs = {"chunk_rows": p["chunk_rows"], "shift": p["shift"], **p["options"]}
    kwargs |= {"softcap": p["softcap"], "temperature": p["temperature"], "logit_scale": p["logit_scale"]}
    if p["bias"]:
        kwargs["bias"] = draw.randn(vocab)
    kwargs |= adapter(draw, p["lora"], size, vocab) if p["lora"] else {}
    # Near the log-probabilities that the head will find.
    labels = shifted(target) if p["shift"] else target
    form = {name: kwargs[name] for name in ("softcap", "temperature", "logit_scale")}
    tensors = {name: kwargs[name].double() for name in ("bias", "lora_a", "lora_b") if name in kwargs}
    near, _ = log_probs(hidden.double(), weight.double(), labels, **form, **tensors)
    for name in ("old", "ref"):
        if p[name] is not None:
            kwargs[name] = (near + draw.randn(answers, tokens, scale=p[name], dtype=torch.float64)).float()
    if p["importance"] is not None:
        sizes = (answers, tokens) if p["importance"] == "token" else (answers,)
        kwargs["importance"] = draw.randn(*sizes, scale=0.3, dtype=torch.float32).exp()
    advantage = draw.randn(*((answers, tokens) if p["per_token"] else (answers,)), dtype=torch.float32)
    args = (hidden, weight, target, advantage)
    return Inputs(args=args, kwargs=kwargs, grads=p["grads"], grad_kwargs=trained(p))


def tigon_fn(hidden, weight, target, advantage, **options):
    """Tigon's own."""
    import tigon

    result = tigon.linear_policy(hidden, weight, target, advantage, **as_tigon(options))
    return tuple(t for t in result if t is not None)


def eager_fn(hidden, weight, target, advantage, *, shift, chunk_rows, **options):
    """The logits, then the trainers' formulas; also the oracle, on fp64 copies."""
    del chunk_rows
    names = ("bias", "lora_a", "lora_b", "softcap", "temperature", "logit_scale")
    head = {name: options.pop(name) for name in names if name in options}
    target = shifted(target) if shift else target
    log_prob, entropies = log_probs(hidden, weight, target, **head)
    mask = target != -100
    loss, *rest = policy.eager_fn(log_prob, advantage, mask=mask, entropies=entropies, **options)
    return loss, *(t.masked_fill(~mask, 0.0).detach() for t in (log_prob, entropies)), *rest


def bytes_fwd(case: Case, dtype: torch.dtype) -> int:
    """Compute bound: operands and gradients."""
    return linear_preference.bytes_fwd(_as_preference(case), dtype)


def flops_fwd(case: Case) -> int:
    """The matmuls of a step, of rows that count."""
    return linear_preference.flops_fwd(_as_preference(case))


bytes_bwd = flops_bwd = nothing


def gemms(inputs: Inputs, step: bool) -> list:
    """The bare matmuls."""
    three = Inputs(args=inputs.args[:3], grads=inputs.grads)
    return linear_preference.gemms(three, step)


def _as_preference(case: Case) -> Case:
    same = {name: value for name, value in case.params.items() if name in linear_preference.DEFAULTS}
    return Case(case.name, {"answers": DEFAULTS["answers"]} | same, case.tags)


def _trl(case, inputs):
    """TRL's chunked head and its trainer's formula."""
    import trl.trainer.utils  # noqa: F401

    if inputs.kwargs["shift"] or "lora_a" in inputs.kwargs:
        return None

    def fn(hidden, weight, target, advantage, *, shift, chunk_rows, **options):
        names = ("bias", "softcap", "temperature", "logit_scale")
        form = {name: options.pop(name) for name in names if name in options}
        entropy = bool(options.get("entropy"))
        found = trl_log_prob(hidden, weight, target.clamp(min=0), entropy=entropy, **form)
        log_prob, entropies = found if entropy else (found, None)
        return policy.eager_fn(log_prob, advantage, mask=target != -100, entropies=entropies, **options)[0]

    return fn


PEERS = {"trl": _trl, "liger": liger_losses.policy}
