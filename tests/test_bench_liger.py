"""Liger's losses of linear heads, as bench/run.py calls them: the same values and gradients as Tigon's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("liger_kernel.chunked_loss")
from providers import Runner, Unavailable, difference, find

from cases import linear_divergence, linear_policy, linear_preference
from cases.case import select

CPU = torch.device("cpu")
SMALL = {"answers": 8, "T": 17, "lead": (50,), "H": 32, "Ht": 24, "V": 67}


def small(module, case):
    """A case of the benchmark with its options and other sizes, and its inputs."""
    sizes = {name: value for name, value in SMALL.items() if name in module.DEFAULTS}
    case = dataclasses.replace(case, params=case.params | sizes | {"scale": 2.0})
    return case, module.make(case, CPU, torch.float32, 0)


@pytest.mark.parametrize(
    ("module", "case"),
    [
        pytest.param(module, case, id=f"{module.NAME}-{case}")
        for module in (linear_preference, linear_policy, linear_divergence)
        for case in select(module.CASES, "bench")
    ],
)
def test_same_as_tigon(module, case):
    case, inputs = small(module, case)
    try:
        peer = find(module, "liger", case, inputs)
    except Unavailable as reason:
        lacking = ("tvd", "entropy", "none") if str(reason) == "does not support this case" else ("logits",)
        assert any(name in case.name for name in lacking), reason
        pytest.skip(f"{reason}")
    theirs, ours = (Runner(fn, inputs, CPU).everything() for fn in (peer, module.tigon_fn))
    assert len(theirs) == 1 + len(inputs.grads)
    assert difference(theirs, ours) < 1e-5
