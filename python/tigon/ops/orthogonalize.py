"""Newton-Schulz iterations of batches of matrices, by ``csrc/tigon/base/symmetric_gemm.h``."""

from __future__ import annotations

import torch

from tigon._op import raw
from tigon.ops.muon import Start, x_scale

# (out, a, b, c, trans, alpha, beta, gamma) -> bool: alpha a b^T (trans: a^T b) + beta c + gamma I, symmetric.
_native = raw("symmetric_matmul_", lambda *args: False, op="symmetric_matmul")


def _symmetric(a, b, c=None, *, trans=False, alpha=1.0, beta=0.0, gamma=0.0) -> torch.Tensor:
    n = a.shape[2 if trans else 1]
    out = a.new_empty(a.shape[0], n, n)
    if a.device.type in ("cuda", "cpu") and _native(out, a, b, c, trans, alpha, beta, gamma):
        return out
    left, right = (a.mT, b) if trans else (a, b.mT)
    torch.baddbmm(out if c is None else c, left, right, beta=beta, alpha=alpha, out=out)
    if gamma:
        out.diagonal(dim1=1, dim2=2).add_(gamma)
    return out


def _rounds(steps: int, n: int, k: int) -> list[int]:
    """After how many iterations X is formed. Each multiplies errors of small eigenvalues of R by twelve,
    which 16 bits bear three times. To form X of a square matrix costs no more than it saves."""
    most = 3 if n >= 256 and 2 * k >= 3 * n else 1
    return [min(most, steps - i) for i in range(0, steps, most)]


@torch.no_grad()
def newton_schulz_(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """Matrices with singular vectors of `x`'s and singular values near 1.

    X <- a X + b (X X^T) X + c (X X^T)^2 X, begun with x over its norm. With R = X X^T of the shorter side and
    P = a I + b R + c R^2 an iteration is X <- P X and R <- P R P^T: GEMMs of n x n matrices that commute,
    so that half of each is computed. X itself is formed after some iterations, from the product Q of their P.
    All factors stay in their order: what one step rounds must not grow as what it was given does.

    Args:
        x: [..., rows, columns], by :class:`Start`. It is written over.
        coefficients: a, b, c.
        steps: iterations, at least 1.

    Returns:
        A tensor of x's sizes and dtype. Zeros and NaN stay in their matrix.
    """
    a, b, c = coefficients
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    tall = x.shape[1] > x.shape[2]
    n, k = sorted(x.shape[1:])
    scale, r_scale = x_scale(x), min(float(n), 2.0**13)
    left = steps
    for count in _rounds(steps, n, k):
        left -= count
        r, q = _symmetric(x, x, trans=tall, alpha=r_scale / scale**2), None  # q: the transpose of Q
        for i in range(count):
            p = _symmetric(r, r, r, alpha=c / r_scale**2, beta=b / r_scale, gamma=a)
            q = p if q is None else _symmetric(q, p)
            if i + 1 < count:
                r = _symmetric(_symmetric(p, r), p)
        x = torch.baddbmm(x, *((x, q) if tall else (q.mT, x)), beta=0, alpha=1.0 if left else 1.0 / scale)
    return x.view(shape)


@torch.no_grad()
def orthogonalize_(
    x: torch.Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Orthogonalise any matrices: see :class:`Start`."""
    return newton_schulz_(Start(x, eps, dtype).of(x), coefficients, steps)
