"""Cases of sample: draws of one seed, the same in every form; log-probabilities of what is drawn."""

import math

import torch

from .case import Case, Inputs, Maker, bench_case, memory_bound, params, test_case

NAME = "sample"
PASSES = ("fwd",)  # a draw has no gradient

DEFAULTS = {
    "by_row": False  # options and seeds as tensors
}
DEFAULTS |= {"shape": (7, 130), "options": {}, "scale": 3.0, "fill": None, "layout": "contiguous", "seed": 5}
ALL = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
KINDS = {"plain": {}, "top_k": {"top_k": 50}, "top_p": {"top_p": 0.95}, "all": ALL}


def _case(name: str, **options) -> Case:
    return test_case(name, grad=False, **options)


CASES = [
    _case("7x130", small=True),
    _case("greedy", options={"temperature": 0.0}),
    _case("top_k", options={"top_k": 5}, small=True),
    _case("top_p", options={"top_p": 0.7}),
    _case("min_p", options={"min_p": 0.05}),
    _case("all", options=ALL, shape=(33, 1001), small=True),
    _case("one_column", shape=(5, 1), options=ALL),
    _case("one_row", shape=(1, 4097), options=ALL),
    _case("vector", shape=(96,)),
    _case("rank4", shape=(2, 3, 5, 33), options={"top_k": 3}),
    _case("empty", shape=(0, 64)),
    _case("wide", shape=(2, 70001), options={"top_k": 900, "top_p": 0.95}),
    _case("by_row", shape=(41, 301), by_row=True),
    _case("misaligned", layout="offset1", options=ALL),
    _case("rows", layout="rows", options=ALL),
    _case("columns", layout="columns", options=ALL),
    _case("nan", fill="nan", options=ALL),
    _case("inf", fill="inf"),
    _case("closed", fill="-inf", options={"top_p": 0.5}),
    _case("masked", fill="masked", options=ALL),
    *(
        bench_case(f"{rows}x128256_{name}", shape=(rows, 128256), options=options)
        for rows in (1, 64, 1024)
        for name, options in KINDS.items()
    ),
    bench_case("64x32000", "bench_cpu", shape=(64, 32000), options=ALL),
    bench_case("16x4096", "smoke", shape=(16, 4096), options=ALL),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    *lead, columns = p["shape"]
    logits = draw.randn(*p["shape"], layout=p["layout"], scale=p["scale"])
    if p["fill"] == "masked":
        logits[..., ::2] = -math.inf
    elif p["fill"] == "-inf":
        logits[1].fill_(-math.inf)
    elif p["fill"] is not None:
        logits[1, 3] = float(p["fill"])
    options = {"seed": p["seed"], **p["options"]}
    if p["by_row"]:
        uniform = draw.randn(4, *lead, dtype=torch.float32).sigmoid()
        options = {"temperature": 2 * uniform[0], "top_p": uniform[1], "min_p": 0.1 * uniform[2]}
        options |= {"top_k": (columns * uniform[3]).long(), "seed": draw.integers(0, 2**62, *lead)}
    return Inputs(args=(logits,), kwargs=options)


def _with_numbers(found):
    """Tokens below 2^24, which float32 holds."""
    ids, log_prob = found
    return log_prob, ids.to(log_prob.dtype)


def tigon_fn(logits, **options):
    """Tigon's own."""
    import tigon

    return _with_numbers(tigon.sample(logits, log_prob=True, **options))


def eager_fn(logits, **options):
    """The same draws in PyTorch's operations, sorted."""
    from tigon.ops import sample

    return _with_numbers(sample.reference(logits, log_prob=True, **options))


# the logits once; there is no backward
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(
    1, 0, lambda case: math.prod(params(case, DEFAULTS)["shape"])
)

PEERS: dict = {}  # draws of others come from other random numbers, so results cannot be compared
