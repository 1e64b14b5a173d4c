"""Cases of lora_linear and lora_linears: linear maps of one x with low-rank adapters."""

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, itemsize, params, test_case

NAME = "lora_linear"

DEFAULTS = {
    "N": (24,),  # of each map
    "wide": True,  # adapters are float32
    "layout": "contiguous",  # of x
    "grads": None,  # places among the arguments, None: x, adapters and biases
}
DEFAULTS |= {"lead": (13,), "K": 32, "r": 8, "bias": False, "scale": 2.0, "dropout": 0.0}
DEFAULTS |= {"grad_layout": "contiguous", "weight_layout": "contiguous"}
SIZES = (
    (8192, 4096, 14336, 16),
    (8192, 4096, 4096, 16),
    (8192, 14336, 4096, 16),
    (8192, 4096, 14336, 64),
    (2048, 4096, 4096, 16),
)

CASES = [
    test_case("one", small=True),
    test_case("storage", wide=False),
    test_case("odd", small=True, lead=(7,), K=33, N=(19,), r=3, bias=True),
    test_case("rank1", r=1),
    test_case("rank256", r=256, wide=False),
    test_case("rank_above_n", N=(5,), r=24),
    test_case("three", small=True, N=(24, 9, 16), r=5, bias=True),
    test_case("two_storage", N=(24, 24), wide=False),
    test_case("one_row", lead=(1,), K=130, N=(70,)),
    test_case("one_column", K=1, N=(1,), r=1),
    test_case("empty", lead=(0,), N=(24, 8)),
    test_case("tiles", small=True, lead=(256,), K=256, N=(256,), r=12),
    test_case("tiles_three", lead=(256,), K=256, N=(256, 256, 256)),
    test_case("rank3", lead=(2, 9), bias=True),
    test_case("rows", lead=(2, 9), layout="rows", grad_layout="rows", weight_layout="rows"),
    test_case("columns", layout="columns", grad_layout="columns", weight_layout="transposed"),
    test_case("misaligned", K=64, layout="offset1", grad_layout="offset1", weight_layout="offset1"),
    test_case("grad_expanded", grad_layout="expanded"),
    test_case("dropout_empty", lead=(2, 0), dropout=0.2),
    test_case("dropout", small=True, dropout=0.4, bias=True),
    test_case("dropout_three", N=(24, 9, 16), r=5, dropout=0.25, K=50),
    test_case("dropout_rows", lead=(2, 9), layout="rows", dropout=0.1),
    test_case("x_only", grads=(0,)),
    test_case("b_only", grads=(3,)),
    test_case("weight_too", small=True, grads=(0, 1, 2, 3), bias=True),
    test_case("no_grad", grads=(), grad=False),
    *(bench_case(f"{m}x{k}x{n}_r{r}", lead=(m,), K=k, N=(n,), r=r, wide=False) for m, k, n, r in SIZES),
    bench_case("llama8b_qkv", lead=(8192,), K=4096, N=(4096, 1024, 1024), r=16),
    bench_case("llama8b_gate_up", lead=(8192,), K=4096, N=(14336, 14336), r=16),
    bench_case("cpu_1024x512x512", "bench_cpu", lead=(1024,), K=512, N=(512,), r=16),
    bench_case("128x64x64", "smoke", lead=(128,), K=64, N=(64,)),
]


def make(case: Case, device, dtype, seed: int) -> Inputs:
    """x, then weight, A, B and (with bias) bias of each map."""
    p = params(case, DEFAULTS)
    maker = Maker(case, device, dtype, seed)
    of = torch.float32 if p["wide"] and dtype != torch.float64 else dtype
    lead, columns, rank = p["lead"], p["K"], p["r"]
    args = [maker.randn(*lead, columns, layout=p["layout"])]
    wanted = [0]
    for n in p["N"]:
        wanted += [len(args) + 1, len(args) + 2] + [len(args) + 3] * p["bias"]
        args.append(maker.randn(n, columns, scale=columns**-0.5, layout=p["weight_layout"]))
        args.append(maker.randn(rank, columns, scale=columns**-0.5, dtype=of))
        args.append(maker.randn(n, rank, scale=rank**-0.5, dtype=of))
        if p["bias"]:
            args.append(maker.randn(n))
    kwargs = {"bias": p["bias"], "scale": p["scale"], "dropout": p["dropout"], "seed": 5}
    grads = tuple(wanted) if p["grads"] is None else p["grads"]
    dy = tuple(maker.randn(*lead, n, layout=p["grad_layout"]) for n in p["N"])
    return Inputs(tuple(args), kwargs, grads, dy)


def _maps(tensors, bias) -> list[tuple]:
    each = 4 if bias else 3
    return [tuple(tensors[i : i + each]) for i in range(0, len(tensors), each)]


def tigon_fn(x, *tensors, bias, scale, dropout, seed):
    """One call for all maps."""
    import tigon

    maps = [(w, a, b, scale, *rest) for w, a, b, *rest in _maps(tensors, bias)]
    if len(maps) == 1:
        w, a, b, scale, *rest = maps[0]
        return tigon.lora_linear(x, w, a, b, scale, *rest, dropout=dropout, seed=seed)
    return tigon.lora_linears(x, maps, dropout=dropout, seed=seed)


def eager_fn(x, *tensors, bias, scale, dropout, seed):
    """PEFT's composition under autocast, with the kernels' mask."""
    from tigon.ops.lora_linear import dropout_factors

    results = []
    for i, (w, a, b, *rest) in enumerate(_maps(tensors, bias)):
        dropped = x
        if dropout:
            shape = (x.shape[:-1].numel(), x.shape[-1])
            factors = dropout_factors(shape, dropout, torch.tensor(seed, device=x.device), i)
            dropped = x * factors.to(x.dtype).reshape(x.shape)
        low = F.linear(F.linear(dropped, a.to(x.dtype)), b.to(x.dtype)) * scale
        results.append(F.linear(x, w, *rest) + low)
    return results[0] if len(results) == 1 else tuple(results)


def _rows(p) -> int:
    return torch.Size(p["lead"]).numel()


def _bytes(case: Case, dtype, x_times: int, y_times: int) -> int:
    p = params(case, DEFAULTS)
    weights = sum(p["N"]) * p["K"]
    return (x_times * _rows(p) * p["K"] + y_times * _rows(p) * sum(p["N"]) + weights) * itemsize(dtype)


def bytes_fwd(case: Case, dtype) -> int:
    """x and the weights read, y written."""
    return _bytes(case, dtype, 1, 1)


def bytes_bwd(case: Case, dtype) -> int:
    """dy, x and the weights read, dx written."""
    return _bytes(case, dtype, 2, 1)


def flops_fwd(case: Case) -> int:
    """The base matmuls, and two of the rank for each map."""
    p = params(case, DEFAULTS)
    return sum(2 * _rows(p) * (p["K"] * n + p["r"] * (p["K"] + n)) for n in p["N"])


def flops_bwd(case: Case) -> int:
    """One base matmul for each map, four of the rank."""
    p = params(case, DEFAULTS)
    return sum(2 * _rows(p) * (p["K"] * n + 2 * p["r"] * (p["K"] + n)) for n in p["N"])


def gemms(inputs: Inputs, step: bool) -> list:
    """The matmuls of the frozen maps."""
    x, *tensors = inputs.args
    rows = x.reshape(-1, x.shape[-1])
    calls = []
    for (w, *_), dy in zip(_maps(tensors, inputs.kwargs["bias"]), inputs.grad_outputs, strict=True):
        calls.append(lambda w=w: rows @ w.t())
        if step:
            calls.append(lambda w=w, dy=dy: dy.reshape(-1, dy.shape[-1]) @ w)
    return calls


PEERS = {}  # PEFT's layer is the plain formulation; bench/adapters.py has the others
