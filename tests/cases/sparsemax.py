"""Cases of sparsemax over the last dimension."""

import dataclasses

import torch

from . import softmax
from .case import Case, Inputs, bench_case, liger, memory_bound, ours, test_case, turn_cases

NAME = "sparsemax"
tigon_fn = ours(NAME)
DEFAULTS = softmax.DEFAULTS

CASES = [
    *softmax.ROWS,
    # Many entries in the support, and many steps of tau.
    test_case("wide_support", shape=(7, 257), scale=1e-3),
    test_case("wide_support_long", shape=(3, 70001), scale=1e-5),
    test_case("wide_support_swept", shape=(1, 1100001), scale=1e-7),
    test_case("half_support", shape=(9, 1000), scale=0.05),
    test_case("least_of_float16", shape=(3, 40001), scale=2e-5),
    test_case("many_steps", shape=(3, 30000), scale=0.01),
    test_case("equal", shape=(5, 130), fill="equal"),
    test_case("ties", shape=(5, 130), fill="ties"),
    *turn_cases(),
    # As many entries above max - 1 as a warp keeps, and one more; in all rows of a block; one alone.
    test_case("candidates_32", shape=(3, 4096), fill=32),
    test_case("candidates_33", shape=(3, 4096), fill=33),
    test_case("candidates_32_of_a_warp", shape=(9, 1000), fill=32),
    test_case("candidates_33_of_a_warp", shape=(9, 1000), fill=33),
    test_case("candidates_of_all_warps", shape=(5, 32760), scale=0.25),
    test_case("equal_long", shape=(3, 12288), fill="equal"),
    test_case("equal_warp", shape=(9, 512), fill="equal"),
    test_case("one_hot", shape=(5, 5000), fill=1),
    test_case("few_and_many", shape=(2200, 1032), fill="few_and_many"),
    test_case("masked_block", shape=(7, 3000), fill="masked"),
    test_case("nothing_left_block", shape=(7, 3000), fill="-inf"),
    test_case("nothing_left_warp", shape=(7, 600), fill="-inf"),
    test_case("nan_row_block", shape=(7, 3000), fill="nan"),
    test_case("nan_row_warp", shape=(7, 600), fill="nan"),
    test_case("inf_row_block", shape=(7, 3000), fill="inf"),
    bench_case("16384x4096_wide_support", shape=(16384, 4096), scale=1e-3),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case: those of softmax, with fills of its own."""
    fill = case.params.get("fill")
    if not isinstance(fill, int) and fill not in ("equal", "few_and_many", "ties"):
        return softmax.make(case, device, dtype, seed)
    inputs = softmax.make(dataclasses.replace(case, params=case.params | {"fill": None}), device, dtype, seed)
    (x,) = inputs.args
    if fill == "equal":
        x.fill_(1.5)
    elif fill == "few_and_many":  # by turns
        x[::2] *= 1e-3
    elif fill == "ties":  # entries that equal tau: outside of the support
        x.copy_((2 * x).round() / 2)
    else:  # that many in the support
        x.mul_(0.01).sub_(9.0)
        x[..., :fill].add_(9.0)
    return inputs


def eager_fn(x):
    """By sorting, as the paper has it (algorithm 1)."""
    from tigon.ops.sparsemax import reference

    return reference(x)


def oracle_fn(x):
    """For fp64: tau by bisection, then from the entries above it. NaN counts as above."""
    if x.numel() == 0:
        return x * 1.0
    if x.dim() == 0:
        return oracle_fn(x.reshape(1)).reshape(())
    z = x - x.detach().amax(-1, keepdim=True)

    def tau_of(low):
        inside = ~(z <= low)
        return (torch.where(inside, z, 0.0).sum(-1, keepdim=True) - 1) / inside.sum(-1, keepdim=True)

    with torch.no_grad():
        low, high = torch.full_like(z[..., :1], -1.0), torch.zeros_like(z[..., :1])
        for _ in range(100):
            middle = (low + high) / 2
            more = (z - middle).clamp_min(0).sum(-1, keepdim=True) > 1
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        tau = tau_of(low)  # at entries that equal tau the bisection may end on either side of it
    y = torch.relu(z - tau_of(tau))
    return y + 0 * y * y  # a row of NaN has a gradient of NaN


# x to y; y and dy to dx
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(2, 3)


PEERS = {"liger": liger("sparsemax", "LigerSparsemaxFunction", lambda fn, x: fn(x, -1))}
