"""Cases of hyper_connection: coefficients and the input of a layer (pre), the streams after it (post)."""

import math

import torch

from .case import Case, Inputs, Maker, bench_case, itemsize, nothing, params, test_case, upcast

NAME = "hyper_connection"

DEFAULTS = {
    "shape": (7, 4, 32),  # tokens, streams, columns
    "parameters": "float32",  # dtype of weight, base and scale; None: that of x
}
DEFAULTS |= {"op": "pre", "parts": 3, "iterations": 20, "pre_eps": 1e-6, "post_eps": 0.0, "collapse": True}
DEFAULTS |= {"outs": None, "res": True, "f": True, "transposed": False, "coefficients": "float32"}
DEFAULTS |= {"layout": "contiguous", "scale": 1.0, "fill": None, "grads": (0, 1, 2, 3)}


def _post(name, **options):
    return test_case(name, op="post", **options)


CASES = [
    test_case("7x4x32", small=True),
    test_case("one_token", shape=(1, 4, 64)),
    test_case("one_stream", shape=(9, 1, 33)),
    test_case("two_streams", shape=(2, 5, 2, 17), iterations=8),
    test_case("three_odd", small=True, shape=(19, 3, 13)),
    test_case("eight", shape=(5, 8, 24)),
    test_case("one_column", shape=(17, 4, 1), pre_eps=0.0),
    test_case("empty", shape=(0, 4, 16)),
    test_case("many_tokens", shape=(1100, 4, 8), iterations=3),
    test_case("wide", shape=(3, 4, 2051)),
    # More than a chunk of fp32 columns.
    test_case("chunks", shape=(65, 4, 32768), parts=2),
    # Around the tiles of tokens and columns of the CUDA kernels for four streams.
    test_case("1x4x1024", shape=(1, 4, 1024)),
    test_case("31x4x136", shape=(31, 4, 136)),
    test_case("33x4x1024", shape=(33, 4, 1024)),
    test_case("129x4x40", shape=(129, 4, 40)),
    test_case("129x4x136", shape=(129, 4, 136)),
    test_case("storage", shape=(33, 4, 40), parameters=None),
    test_case("pre_alone", small=True, shape=(9, 4, 40), parts=1),
    test_case("pre_and_post", shape=(9, 4, 40), parts=2, post_eps=1e-6),
    test_case("one_iteration", shape=(9, 4, 40), iterations=1),
    test_case("coefficients_alone", shape=(9, 4, 40), collapse=False),
    test_case("misaligned", shape=(9, 4, 64), layout="offset1"),
    test_case("rows", shape=(9, 4, 30), layout="rows"),
    test_case("sharp", shape=(9, 4, 40), scale=8.0),
    test_case("frozen_input", shape=(9, 4, 40), grads=(1, 2, 3)),
    test_case("only_input", shape=(9, 4, 40), grads=(0,)),
    test_case("only_base", shape=(9, 4, 40), grads=(2,)),
    test_case("only_scale", shape=(9, 4, 40), grads=(3,)),
    test_case("nan", shape=(9, 4, 40), fill="nan", grads=(0,)),
    _post("post", small=True),
    _post("post_one_token", shape=(1, 4, 64)),
    _post("post_one_stream", shape=(9, 1, 33)),
    _post("post_odd", shape=(2, 5, 3, 17)),
    _post("post_eight", shape=(5, 8, 24)),
    _post("post_empty", shape=(0, 4, 16)),
    _post("post_wide", shape=(3, 4, 4099)),
    _post("post_transposed", small=True, shape=(9, 4, 64), transposed=True),
    _post("post_identity", shape=(9, 4, 64), res=False),
    _post("post_one_out", shape=(9, 4, 64), outs=1, f=False),
    _post("post_more_outs", shape=(9, 3, 64), outs=5, transposed=True),
    _post("post_streams_alone", shape=(9, 4, 64), f=False),
    _post("post_storage", shape=(9, 4, 64), coefficients=None),
    _post("post_misaligned", shape=(9, 4, 64), layout="offset1"),
    _post("post_rows", shape=(9, 4, 30), layout="rows"),
    _post("post_frozen_streams", shape=(9, 4, 64), grads=(1, 2, 3)),
    _post("post_only_f", shape=(9, 4, 64), grads=(1,)),
    _post("post_only_res", shape=(9, 4, 64), grads=(3,)),
    _post("post_nan", shape=(9, 4, 40), fill="nan"),
    bench_case("8192x4x4096", shape=(8192, 4, 4096)),
    bench_case("8192x4x7168", shape=(8192, 4, 7168)),
    bench_case("post_8192x4x4096", op="post", shape=(8192, 4, 4096), transposed=True),
    bench_case("post_8192x4x7168", op="post", shape=(8192, 4, 7168), transposed=True),
    bench_case("512x4x1024", "bench_cpu", shape=(512, 4, 1024)),
    bench_case("post_512x4x1024", "bench_cpu", op="post", shape=(512, 4, 1024)),
    bench_case("128x4x512", "smoke", shape=(128, 4, 512)),
    bench_case("post_128x4x512", "smoke", op="post", shape=(128, 4, 512)),
]


def _dtype(name: str | None, x_dtype: torch.dtype) -> torch.dtype:
    """That of the small tensors: the one named, x's own (None), and float64 beside float64."""
    return torch.promote_types(getattr(torch, name), x_dtype) if name else x_dtype


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    *lead, n, columns = p["shape"]
    x = draw.randn(*p["shape"], layout=p["layout"])
    if p["fill"] is not None:
        x[1, 0, 3] = float(p["fill"])
    if p["op"] == "post":
        outs = p["outs"] or n
        of = _dtype(p["coefficients"], dtype)
        shape = (n, outs) if p["transposed"] else (outs, n)
        f = draw.randn(*lead, columns, layout=p["layout"]) if p["f"] else None
        post = draw.randn(*lead, outs, dtype=of) if p["f"] else None
        res = draw.randn(*lead, *shape, dtype=of) if p["res"] else None
        args = (x, f, post, res)
        kwargs = {"op": "post", "transposed": p["transposed"]}
        upstream = (draw.randn(*lead, outs, columns, layout=p["layout"]),)
    else:
        sizes = (n, n, n * n)[: p["parts"]]
        of = _dtype(p["parameters"], dtype)
        weight = draw.randn(sum(sizes), n * columns, dtype=of, scale=1 / math.sqrt(n * columns))
        base = draw.randn(sum(sizes), dtype=of)
        args = (x, weight, base, draw.randn(len(sizes), dtype=of, mean=1.0, scale=0.3) * p["scale"])
        kwargs = {name: p[name] for name in ("op", "iterations", "pre_eps", "post_eps", "collapse")}
        upstream = [draw.randn(*lead, columns, layout=p["layout"])] if p["collapse"] else []
        shapes = ((n,), (n,), (n, n))[: p["parts"]]
        upstream = (*upstream, *(draw.randn(*lead, *s, dtype=_dtype("float32", dtype)) for s in shapes))
    grads = tuple(i for i in p["grads"] if args[i] is not None)
    return Inputs(args=args, kwargs=kwargs, grads=grads, grad_outputs=upstream)


def tigon_fn(*args, op, **options):
    """Tigon's own."""
    import tigon

    if op == "post":
        return tigon.hyper_connection_post(*args, **options)
    return tuple(a for a in tigon.hyper_connection_pre(*args, **options) if a is not None)


def eager_fn(*args, op, **options):
    """DeepseekV4HyperConnection, and the residual of its layer with coefficients that stay in fp32."""
    return _eager_post(*args, **options) if op == "post" else _eager_pre(*args, **options)


def _eager_post(x, f, post, res, *, transposed):
    y = upcast(x) if res is None else torch.matmul(upcast(res.mT if transposed else res), upcast(x))
    return (y if f is None else upcast(post).unsqueeze(-1) * upcast(f).unsqueeze(-2) + y).to(x.dtype)


def _eager_pre(x, weight, base, scale, *, iterations, pre_eps, post_eps, collapse):
    n, flat, eps = x.shape[-2], upcast(x.flatten(-2)), 1e-6
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    sizes = (n, n, n * n)[: len(scale)]
    mixed = torch.nn.functional.linear(flat, upcast(weight)).split(sizes, -1)
    of = [m * s + b for m, s, b in zip(mixed, upcast(scale), upcast(base).split(sizes), strict=True)]
    pre = torch.sigmoid(of[0]) + pre_eps
    results = [(pre.unsqueeze(-1) * upcast(x)).sum(-2).to(x.dtype)] if collapse else []
    results.append(pre)
    if len(sizes) > 1:
        results.append(2 * torch.sigmoid(of[1]) + post_eps)
    if len(sizes) > 2:
        comb = torch.softmax(of[2].unflatten(-1, (n, n)), dim=-1) + eps
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
            comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
        results.append(comb)
    return tuple(results)


def _elements(case: Case) -> int:
    return math.prod(case.params["shape"])


def _streams(case: Case, forward: bool) -> float:
    """Tensors of the size of x that must move."""
    n = case.params["shape"][-2]
    if case.params.get("op") == "post":
        return 2 + 1 / n if forward else 3 + 2 / n
    return 1 + 1 / n if forward else 2 + 1 / n


def bytes_fwd(case: Case, dtype: torch.dtype) -> int:
    """x and f to y; x to the input of the layer."""
    return int(_streams(case, True) * _elements(case)) * itemsize(dtype)


def bytes_bwd(case: Case, dtype: torch.dtype) -> int:
    """Upstream gradient, x and f to their gradients."""
    return int(_streams(case, False) * _elements(case)) * itemsize(dtype)


flops_fwd = flops_bwd = nothing


def _liger(case, inputs):
    from liger_kernel.ops.mhc import LigerMHCCoeffsFunction, LigerMHCPostResFunction, LigerMHCPreFunction

    p = params(case, DEFAULTS)
    if p["op"] == "post":
        if (
            any(value is None for value in inputs.args)
            or inputs.args[3].shape[-1] != inputs.args[3].shape[-2]
        ):
            return None
        return lambda x, f, post, res, *, transposed, **_: LigerMHCPostResFunction.apply(
            x, f, post, res.mT if transposed else res
        ).to(x.dtype)  # it has fp32 results

    if p["parts"] != 3 or p["post_eps"] or not p["collapse"]:
        return None

    def pre(x, weight, base, scale, *, iterations, pre_eps, **_):
        found = LigerMHCCoeffsFunction.apply(
            x, weight.t(), base, *scale, True, iterations, 1e-6, pre_eps, 1e-6, 2.0
        )
        return LigerMHCPreFunction.apply(x, found[0]).to(x.dtype), *found

    return pre


PEERS = {"liger": _liger}
