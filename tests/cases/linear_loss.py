"""Cases of linear_loss: the objective of policy gradients on a linear head, without logits."""

import math

import torch

from .case import Case, Inputs, Maker, bench_case, params, test_case
from .cross_entropy import make_denominator
from .heads import costs, matmul_of
from .linear_cross_entropy import bare_matmuls
from .linear_log_prob import SIZES, trl_log_prob
from .linear_log_prob import eager_fn as log_prob
from .linear_log_prob import flops_bwd as flops_bwd

NAME = "linear_loss"
LOSS = True

DEFAULTS = {"lead": (13,), "H": 32, "V": 67, "bias": False, "masked": 0.0, "known": False, "softcap": None}
DEFAULTS |= {"temperature": 1.0, "entropy": False, "reduction": "mean", "chunk_rows": None}
DEFAULTS |= {"logit_dtype": None, "scale": 2.0, "grads": (0, 1), "denominator": None}

CASES = [
    test_case("13x32x67"),
    test_case("odd_7x33x51", lead=(7,), H=33, V=51, masked=0.3),
    test_case("sum", lead=(2, 9), masked=0.3, reduction="sum"),
    test_case("none", masked=0.3, reduction="none"),
    test_case("denominator", masked=0.3, denominator=7.5),
    test_case("denominator_tensor", masked=0.3, denominator="int_tensor", reduction="none"),
    test_case("advantage", masked=0.2, grads=(0, 1, 3), chunk_rows=4),
    test_case("entropy", entropy=True, masked=0.2, bias=True),
    test_case("chunks", lead=(37,), masked=0.3, chunk_rows=8),
    test_case("known", lead=(37,), masked=0.6, known=True, chunk_rows=8),
    test_case("frozen", grads=(0,), masked=0.2, temperature=0.7, softcap=3.0),
    test_case("fp32_logits", masked=0.2, logit_dtype=torch.float32, chunk_rows=4),
    *(
        bench_case(f"{rows}x{h}x{v}{name}", lead=(rows,), H=h, V=v, **options | way)
        for rows, h, v, options in SIZES
        for name, way in {"": {}, "_frozen": {"grads": (0,)}, "_entropy": {"entropy": True}}.items()
    ),
    bench_case("2048x512x32000", "bench_cpu", lead=(2048,), H=512, V=32000),
    bench_case("256x128x1024", "smoke", lead=(256,), H=128, V=1024),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case: an advantage for every token."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    lead, size, vocab = p["lead"], p["H"], p["V"]
    hidden = draw.randn(*lead, size)
    weight = draw.randn(vocab, size, scale=p["scale"] / math.sqrt(size))
    target = draw.labels(vocab, *lead, masked=p["masked"], ignore_index=-100)
    wide = torch.promote_types(dtype, torch.float32)
    none = p["reduction"] == "none" and p["denominator"] is None
    names = ("softcap", "temperature", "entropy", "reduction", "chunk_rows", "logit_dtype")
    return Inputs(
        args=(hidden, weight, target, draw.randn(*lead, dtype=wide)),
        kwargs={
            "bias": draw.randn(vocab) if p["bias"] else None,
            "denominator": make_denominator(p["denominator"], device),
            "valid_rows": int((target != -100).sum()) if p["known"] else None,
            **{name: p[name] for name in names},
        },
        grads=p["grads"],
        grad_outputs=(draw.randn(*lead, dtype=wide) if none else torch.ones((), dtype=wide, device=device),),
        grad_kwargs=("bias",) if p["bias"] else (),
    )


def _objective(statistics, advantage):
    """On policy: the ratio is 1, its gradient that of the log-probability."""
    log_prob_, *entropy = statistics
    gain = torch.exp(log_prob_ - log_prob_.detach()) * advantage
    return -gain - 0.01 * entropy[0] if entropy else -gain


def tigon_fn(hidden, weight, target, advantage, **options):
    """Tigon's own."""
    import tigon

    def fn(*tensors):
        *statistics, advantages = tensors
        return _objective(statistics, advantages)

    return tigon.linear_loss(hidden, weight, target, fn, advantage, **options)


def eager_fn(hidden, weight, target, advantage, *, entropy, reduction, denominator, **options):
    """The same from logits in the model's dtype; also the oracle, on fp64 copies."""
    statistics = log_prob(hidden, weight, target, entropy=entropy, **options)
    counts = target != -100
    rows = torch.where(counts, _objective(statistics if entropy else (statistics,), advantage), 0.0)
    if denominator is not None:
        return rows.sum() / denominator
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / counts.sum()


bytes_fwd, bytes_bwd, flops_fwd, _ = costs(matmul_of(DEFAULTS))


def gemms(inputs: Inputs, step: bool) -> list:
    """The bare matmuls on the same operands: of the logits, and for a step of the gradients."""
    hidden, weight, target, _ = inputs.args
    return bare_matmuls(hidden, weight, target, inputs, step, inputs.kwargs["reduction"] == "none")


def _trl(case, inputs):
    """TRL's chunked head and the same objective."""
    import trl.trainer.utils  # noqa: F401

    kwargs = inputs.kwargs
    if "masked" in case.params or kwargs["logit_dtype"] is not None or kwargs["reduction"] != "mean":
        return None

    def fn(hidden, weight, target, advantage, *, bias, softcap, temperature, entropy, **_):
        found = trl_log_prob(
            hidden, weight, target, bias=bias, softcap=softcap, temperature=temperature, entropy=entropy
        )
        return _objective(found if entropy else (found,), advantage).mean()

    return fn


PEERS = {"trl": _trl}
