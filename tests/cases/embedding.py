"""Cases of embedding: rows by token id."""

import math

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, itemsize, liger, nothing, ours, params, stock, test_case

NAME = "embedding"
tigon_fn = ours(NAME)

DEFAULTS = {
    "draw": "uniform"  # zipf: as words come; same: one id; half: one id at every other position
}
DEFAULTS |= {"tokens": (3, 17), "table": (37, 64), "wide": True, "options": {}, "layout": "contiguous"}
DEFAULTS |= {"grad_layout": "contiguous"}

CASES = [
    test_case("3x17", small=True),
    test_case("scale_padding", options={"scale": 8.0, "padding_idx": 3}),
    test_case("odd_7", small=True, tokens=(2, 5), table=(11, 7)),
    test_case("int32", tokens=(5, 40), wide=False),
    test_case("negative_padding", tokens=(90,), options={"padding_idx": -2}),
    test_case("one_token", tokens=()),
    test_case("no_token", tokens=(0, 4)),
    test_case("one_row", tokens=(70,), table=(1, 24)),
    test_case("one_column", tokens=(70,), table=(9, 1)),
    test_case("same", tokens=(700,), table=(9, 40), draw="same"),
    test_case("same_odd", tokens=(701,), table=(600, 9), draw="same"),
    test_case("half", tokens=(2100,), table=(1000, 24), draw="half", options={"scale": 0.5}),
    test_case("zipf", tokens=(2, 2500), table=(3000, 40), draw="zipf", options={"padding_idx": 0}),
    test_case("many_rows", tokens=(300,), table=(70000, 8)),
    test_case("many_columns", tokens=(40,), table=(30, 3000), draw="zipf"),
    test_case("rows", tokens=(9, 13), layout="rows", grad_layout="rows"),
    test_case("misaligned", tokens=(9, 13), layout="offset1", grad_layout="offset1"),
    test_case("grad_transposed", tokens=(9, 13), grad_layout="transposed"),
    test_case("grad_expanded", tokens=(9, 13), grad_layout="expanded"),
]
CASES += [
    *(
        bench_case(f"{pattern}_16384x4096", tokens=(16384,), table=(128256, 4096), draw=pattern)
        for pattern in ("uniform", "zipf", "same")
    ),
    bench_case("zipf_8192x2048", tokens=(8192,), table=(151936, 2048), draw="zipf"),
    bench_case("zipf_16384x2048_small", tokens=(16384,), table=(32000, 2048), draw="zipf"),
    bench_case("zipf_4096x512", "bench_cpu", tokens=(4096,), table=(32000, 512), draw="zipf"),
    bench_case("zipf_256x64", "smoke", tokens=(256,), table=(500, 64), draw="zipf"),
]


def _ids(draw: Maker, pattern: str, tokens: tuple, rows: int) -> torch.Tensor:
    if pattern == "same":
        return draw.integers(rows // 2, rows // 2 + 1, *tokens)
    if pattern == "zipf":  # density 1 / id
        bits = draw.integers(0, 2**30, *tokens).double() / 2**30
        return (torch.exp(bits * math.log(rows + 1)).long() - 1).clamp(0, rows - 1)
    ids = draw.integers(0, rows, *tokens)
    if pattern == "half":
        ids[..., ::2] = rows // 3
    return ids


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    ids = _ids(draw, p["draw"], p["tokens"], p["table"][0])
    weight = draw.randn(*p["table"], layout=p["layout"])
    grad = draw.randn(*p["tokens"], p["table"][1], layout=p["grad_layout"])
    ids = ids if p["wide"] else ids.int()
    return Inputs(args=(ids, weight), kwargs=dict(p["options"]), grads=(1,), grad_outputs=(grad,))


def eager_fn(ids, weight, *, padding_idx=None, scale=1.0):
    """torch's own, scaled as Gemma does."""
    y = F.embedding(ids, weight, padding_idx)
    return y if scale == 1.0 else y * scale


def _sizes(case: Case, dtype: torch.dtype) -> tuple[int, int]:
    p = params(case, DEFAULTS)
    row = p["table"][1] * itemsize(dtype)
    return math.prod(p["tokens"]) * row, p["table"][0] * row


def bytes_fwd(case: Case, dtype: torch.dtype) -> int:
    """A row read and written a token."""
    return 2 * _sizes(case, dtype)[0]


def bytes_bwd(case: Case, dtype: torch.dtype) -> int:
    """Read dy, write dweight."""
    return sum(_sizes(case, dtype))


flops_fwd = flops_bwd = nothing


PEERS = {
    "aten": stock(eager_fn),
    "liger": liger("experimental.embedding", "LigerEmbeddingFunction", lambda fn, ids, w: fn(w, ids)),
}
