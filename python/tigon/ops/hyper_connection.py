"""Manifold-constrained hyper-connections. Contract: ``tigon/ops/hyper_connection/hyper_connection.h``."""

from __future__ import annotations

import torch

from tigon._op import has_kernel, paired
from tigon.error import check
from tigon.ops.arguments import (
    called,
    check_booleans,
    check_float,
    check_integers,
    check_like,
    check_numbers,
    check_stored,
)

PRE, POST = "hyper_connection_pre", "hyper_connection_post"
MAX_STREAMS = 8


def reference_pre(
    x,
    weight,
    base,
    scale,
    *,
    norm_eps=1e-6,
    pre_eps=0.0,
    post_scale=2.0,
    post_eps=0.0,
    iterations=20,
    sinkhorn_eps=1e-6,
    collapse=True,
):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    n, flat = x.shape[-2], x.flatten(-2).to(wide)
    r = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    sizes = (n, n, n * n)[: scale.numel()]
    parts = ((flat @ weight.to(wide).mT) * r).split(sizes, -1)
    logits = [
        m * s + b for m, s, b in zip(parts, scale.to(wide).unbind(), base.to(wide).split(sizes), strict=True)
    ]
    pre = torch.sigmoid(logits[0]) + pre_eps
    y = (pre.unsqueeze(-1) * x.to(wide)).sum(-2).to(x.dtype) if collapse else None
    post = post_scale * torch.sigmoid(logits[1]) + post_eps if len(sizes) > 1 else None
    res = None
    if len(sizes) > 2:
        res = torch.softmax(torch.unflatten(logits[2], -1, (n, n)), -1) + sinkhorn_eps
        res = res / (res.sum(-2, keepdim=True) + sinkhorn_eps)
        for _ in range(iterations - 1):
            res = res / (res.sum(-1, keepdim=True) + sinkhorn_eps)
            res = res / (res.sum(-2, keepdim=True) + sinkhorn_eps)
    return y, pre, post, res


def reference_post(x, f=None, post=None, res=None, *, transposed=False):
    """The same formula in plain PyTorch operations (any float dtype, any device)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if res is not None:
        y = (res.mT if transposed else res).to(wide) @ y
    if f is not None:
        y = y + post.to(wide).unsqueeze(-1) * f.to(wide).unsqueeze(-2)
    return y.to(x.dtype)


def _fake(x, weight, base, scale, streams, *options):
    n, parts = streams, scale.shape[0]
    f32 = {"dtype": torch.float32}
    lead, tokens = x.shape[:-1], x[..., 0].numel()
    y = x.new_empty((*lead, x.shape[-1] // n) if options[-1] else (0,))
    post = x.new_empty((*lead, n if parts > 1 else 0), **f32)
    res = x.new_empty((*lead, n * n if parts > 2 else 0), **f32)
    saved = x.new_empty((tokens, weight.shape[0]), **f32), x.new_empty(tokens, **f32)
    return y, x.new_empty((*lead, n), **f32), post, res, *saved


_op = paired("hyper_connection", _fake, results=4)


def _fake_mix(x, f, mix, post, streams, outs, transposed):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // streams * outs))


_mix = paired("hyper_connection_mix", _fake_mix)


def _check_streams(op: str, x) -> None:
    check_float(op, "x", x)
    check(op, x.dim() >= 2 and x.shape[-1] > 0, "x must be [..., n, C] with C >= 1, got {}", x.shape)
    n = x.shape[-2]
    check(op, 1 <= n <= MAX_STREAMS, "x must have 1 to 8 streams, got {}", n)


def _floats(op: str, **tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """In float32, as the operators take them."""
    for name, a in tensors.items():
        if a is not None and a.dtype != torch.float32:
            check_stored(op, name, a)
            tensors[name] = a.float()
    return list(tensors.values())


@called(stored=False)
def hyper_connection_pre(
    x: torch.Tensor,
    weight: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float = 1e-6,
    pre_eps: float = 0.0,
    post_scale: float = 2.0,
    post_eps: float = 0.0,
    iterations: int = 20,
    sinkhorn_eps: float = 1e-6,
    collapse: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Coefficients of manifold-constrained hyper-connections (mHC), and the input of a layer that they make.

    With ``m = (x.flatten(-2) @ weight.T) * rsqrt(mean(x^2) + norm_eps)`` and ``l = scale * m + base``, part
    by part: ``pre = sigmoid(l) + pre_eps``, ``post = post_scale * sigmoid(l) + post_eps``, ``res`` = Sinkhorn
    of l (softmax of the rows + sinkhorn_eps; columns divided by their sum + sinkhorn_eps;
    ``iterations - 1`` times rows, then columns) and ``y = sum_i pre_i x_i``.
    :func:`hyper_connection_post` takes the layer's result back.

    Args:
        x: ``[..., n, C]``, n streams (1 to 8), float32, bfloat16 or float16. float64 runs the eager
            reference.
        weight: ``[M, n * C]``, M = n (only pre), 2n (pre and post) or 2n + n^2 (pre, post, then res row by
            row); any float dtype: matmuls are in float32.
        base: ``[M]``, any float dtype.
        scale: one number for each part that there is: ``[1]``, ``[2]`` or ``[3]``, any float dtype.
        norm_eps, pre_eps, post_scale, post_eps, sinkhorn_eps: see above; norm_eps and sinkhorn_eps >= 0.
        iterations: of the Sinkhorn iteration, >= 1.
        collapse: ``False``: only the coefficients, without y.

    Returns:
        ``(y, pre, post, res)``: y ``[..., C]`` in x's dtype, pre and post ``[..., n]``, res ``[..., n, n]``,
        all three in float32; ``None`` for what is not there. Differentiable in x, weight, base and scale;
        bitwise deterministic.

    Raises:
        tigon.Error: shape, dtype, device or an option does not fit.

    Source: Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections", arXiv:2512.24880; Hugging Face
    DeepSeek-V4.
    """
    _check_streams(PRE, x)
    for name, a in (("weight", weight), ("base", base), ("scale", scale)):
        check_float(PRE, name, a)
    check(PRE, weight.device == x.device, "weight must be on {}, got {}", x.device, weight.device)
    check_numbers(PRE, norm_eps=norm_eps, pre_eps=pre_eps, post_scale=post_scale, post_eps=post_eps)
    check_numbers(PRE, sinkhorn_eps=sinkhorn_eps)
    n, columns = x.shape[-2], x.shape[-2] * x.shape[-1]
    sizes = (n, 2 * n, 2 * n + n * n)
    fits = weight.dim() == 2 and weight.shape[0] in sizes and weight.shape[1] == columns
    check(PRE, fits, "weight must be [M, {}] with M one of {}, got {}", columns, sizes, weight.shape)
    rows = weight.shape[0]
    check_like(PRE, "base", base, (rows,), x.device)
    parts = sizes.index(rows) + 1
    check_like(PRE, "scale", scale, (parts,), x.device)
    check(PRE, norm_eps >= 0, "norm_eps must be >= 0, got {}", norm_eps)
    check(PRE, sinkhorn_eps >= 0, "sinkhorn_eps must be >= 0, got {}", sinkhorn_eps)
    check_integers(PRE, least=1, iterations=iterations)
    check_booleans(PRE, collapse=collapse)
    options = {
        "norm_eps": norm_eps,
        "pre_eps": pre_eps,
        "post_scale": post_scale,
        "post_eps": post_eps,
        "iterations": iterations,
        "sinkhorn_eps": sinkhorn_eps,
        "collapse": collapse,
    }
    if not has_kernel(PRE, x=x) or torch.float64 in (weight.dtype, base.dtype, scale.dtype):
        for name, a in (("x", x), ("weight", weight), ("base", base), ("scale", scale)):
            check_stored(PRE, name, a)
        return reference_pre(x, weight, base, scale, **options)
    parameters = _floats(PRE, weight=weight, base=base, scale=scale)
    y, pre, post, res = _op(x.flatten(-2), *parameters, n, *options.values())
    res = torch.unflatten(res, -1, (n, n)) if parts > 2 else None
    return y if collapse else None, pre, post if parts > 1 else None, res


@called({"mix": "res"}, stored=False)
def hyper_connection_post(
    x: torch.Tensor,
    f: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    res: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """Streams mixed, and a layer's result added to each: ``y_o = sum_i res_oi x_i + post_o f``, rounded once.

    Args:
        x: ``[..., n, C]``, as in :func:`hyper_connection_pre`.
        f: ``[..., C]``, x's dtype: the layer's result; ``None``: 0.
        post: ``[..., outs]``, any float dtype; given if f is.
        res: ``[..., outs, n]``, outs from 1 to 8, any float dtype; ``None``: the identity.
        transposed: res is ``[..., n, outs]``: ``y_o = sum_i res_io x_i + post_o f``, as DeepSeek-V4 has it.

    Returns:
        ``[..., outs, C]``, contiguous, in x's dtype. Differentiable in every tensor; accumulation in float32;
        bitwise deterministic.

    Raises:
        tigon.Error: shape, dtype, device or an option does not fit.

    Source: Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections", arXiv:2512.24880, eq. 3.
    """
    op = POST
    _check_streams(op, x)
    n, lead = x.shape[-2], x.shape[:-2]
    outs = n
    check_booleans(op, transposed=transposed)
    for name, a in (("f", f), ("post", post), ("res", res)):
        if a is not None:
            check_float(op, name, a)
    if res is not None:
        check(op, res.device == x.device, "res must be on {}, got {}", x.device, res.device)
        shape = res.mT.shape if transposed and res.dim() > 1 else res.shape
        fits = res.dim() == x.dim() and shape[:-2] == lead and shape[-1] == n
        wanted = "[..., {}, outs]" if transposed else "[..., outs, {}]"
        words = f"res must be {wanted} with outs from 1 to 8 and the tokens of x, got {{}}"
        check(op, fits and 1 <= shape[-2] <= MAX_STREAMS, words, n, res.shape)
        outs = shape[-2]
    together = (f is None) == (post is None)
    check(op, together, "f and post must be given together, got {} alone", "post" if f is None else "f")
    if f is not None:
        check_like(op, "f", f, (*lead, x.shape[-1]), x.device)
        check_like(op, "post", post, (*lead, outs), x.device)
        check(op, f.dtype == x.dtype, "f must be {}, got {}", x.dtype, f.dtype)
    wide = any(a is not None and a.dtype == torch.float64 for a in (post, res))
    if wide or not has_kernel(op, x=x):
        for name, a in (("x", x), ("f", f), ("post", post), ("res", res)):
            if a is not None:
                check_stored(op, name, a)
        return reference_post(x, f, post, res, transposed=transposed)
    post, res = _floats(op, post=post, res=res)
    mix = None if res is None else res.flatten(-2)
    y = _mix(x.flatten(-2), f, mix, post, n, outs, transposed)
    return torch.unflatten(y, -1, (outs, x.shape[-1]))
