"""Cases of fp8_linear: a linear map whose matmuls are of float8."""

import torch

from .case import Case, Inputs, Maker, bench_case, itemsize, ours, params, test_case

NAME = "fp8_linear"
tigon_fn = ours(NAME)

DEFAULTS = {
    "wide": False,  # weight and bias are float32
    "spread": 0,  # rows of x and of dy differ by up to this many powers of two
    "layout": "contiguous",  # of x
}
DEFAULTS |= {"lead": (13,), "K": 32, "N": 48, "bias": False, "dw": "fp8", "grad_layout": "contiguous"}
DEFAULTS |= {"weight_layout": "contiguous", "fill": None, "grads": (0, 1)}
SIZES = ((8192, 4096, 6144), (8192, 4096, 4096), (8192, 4096, 28672), (8192, 14336, 4096))

# None is small: the slopes of what is rounded are not finite differences.
CASES = [
    test_case("one"),
    test_case("bias", bias=True, grads=(0, 1, 2)),
    test_case("dw_bf16", dw="bf16"),
    test_case("wide", wide=True, bias=True, grads=(0, 1, 2)),
    test_case("one_token", lead=(1,)),
    test_case("fifteen", lead=(15,), K=48, N=16),
    test_case("sixteen", lead=(16,), K=16, N=64),
    test_case("seventeen", lead=(17,), K=64, N=80),
    test_case("tiles", lead=(130,), K=528, N=144),
    test_case("spread", lead=(40,), spread=12),
    test_case("empty", lead=(0,)),
    test_case("rank3", lead=(2, 9), bias=True),
    test_case("rows", lead=(2, 9), layout="rows", grad_layout="rows", weight_layout="rows"),
    test_case("columns", layout="columns", grad_layout="columns", weight_layout="transposed"),
    test_case("misaligned", layout="offset1", grad_layout="offset1", weight_layout="offset1"),
    test_case("grad_expanded", grad_layout="expanded"),
    test_case("nan_row", fill="nan", grads=(0,)),
    test_case("inf_row", fill="inf", grads=(0,)),
    test_case("zero_row", fill="zero"),
    test_case("x_only", grads=(0,)),
    test_case("weight_only", grads=(1,)),
    test_case("no_grad", grads=(), grad=False),
    *(bench_case(f"{m}x{k}x{n}", lead=(m,), K=k, N=n) for m, k, n in SIZES),
    bench_case("cpu_512x512x512", "bench_cpu", lead=(512,), K=512, N=512),
    bench_case("128x64x64", "smoke", lead=(128,), K=64, N=64),
]
FILLS = {"nan": torch.nan, "inf": torch.inf, "zero": 0.0}


def make(case: Case, device, dtype, seed: int) -> Inputs:
    """x, weight and, where there is one, bias."""
    p = params(case, DEFAULTS)
    maker = Maker(case, device, dtype, seed)
    of = torch.float32 if p["wide"] and dtype != torch.float64 else dtype
    lead, columns = p["lead"], p["K"]

    def rows(size, layout):
        t = maker.randn(*lead, size, layout=layout)
        if p["spread"]:
            t *= torch.exp2(-maker.integers(0, p["spread"], *lead, 1)).to(dtype)
        return t

    x = rows(columns, p["layout"])
    if p["fill"]:
        x[0, -1] = x[0] = FILLS[p["fill"]]
    args = [x, maker.randn(p["N"], columns, scale=columns**-0.5, layout=p["weight_layout"], dtype=of)]
    if p["bias"]:
        args.append(maker.randn(p["N"], dtype=of))
    return Inputs(tuple(args), {"dw": p["dw"]}, p["grads"], (rows(p["N"], p["grad_layout"]),))


def oracle_fn(x, weight, bias=None, *, dw):
    """The same bytes in PyTorch's operations."""
    from tigon.ops.fp8_linear import reference

    return reference(x, weight, bias, dw)


class _Rounded(torch.autograd.Function):
    """A result, or the gradient, in the precision of bfloat16."""

    @staticmethod
    def forward(ctx, x, result):
        ctx.result = result
        return x.bfloat16().to(x.dtype) if result else x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx if ctx.result else dx.bfloat16().to(dx.dtype), None


def eager_fn(x, weight, bias=None, *, dw):
    """The same. On a GPU sums of float8 have some 14 bits, here results have 8."""
    if not x.is_cuda or x.dtype == torch.float64:
        return oracle_fn(x, weight, bias, dw=dw)
    x, weight = _Rounded.apply(x, False), _Rounded.apply(weight, False)
    return _Rounded.apply(oracle_fn(x, weight, bias, dw=dw), True)


def _sizes(case: Case) -> tuple[int, int, int]:
    p = params(case, DEFAULTS)
    return torch.Size(p["lead"]).numel(), p["K"], p["N"]


def bytes_fwd(case: Case, dtype) -> int:
    """x and the weight read, y written."""
    m, k, n = _sizes(case)
    return (m * k + k * n + m * n) * itemsize(dtype)


def bytes_bwd(case: Case, dtype) -> int:
    """dy read, dx and dweight written, a byte an element of x and of the weight read."""
    m, k, n = _sizes(case)
    return (m * n + m * k + k * n) * itemsize(dtype) + m * k + k * n


def flops_fwd(case: Case) -> int:
    """One matmul."""
    m, k, n = _sizes(case)
    return 2 * m * k * n


def flops_bwd(case: Case) -> int:
    """Two matmuls."""
    return 2 * flops_fwd(case)


def _linear(case: Case, inputs: Inputs):
    return lambda x, weight, bias=None, *, dw: torch.nn.functional.linear(x, weight, bias)


PEERS = {"torch": _linear}
