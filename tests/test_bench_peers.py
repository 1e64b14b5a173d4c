"""Losses of linear heads of other packages, as bench/run.py calls them: values and gradients as Tigon's."""

import dataclasses
import functools

import pytest
import torch
from providers import Runner, Unavailable, difference, find

from cases import modules
from cases.case import select

CPU = torch.device("cpu")
SMALL = {"answers": 8, "T": 17, "lead": (50,), "H": 32, "Ht": 24, "V": 67}
LOSSES = ("linear_preference", "linear_policy", "linear_divergence", "linear_log_prob", "linear_loss")
PEERS = {"liger": "liger_kernel.chunked_loss", "trl": "trl.trainer.utils"}
# What a peer lacks, as the names of cases have it.
LACKING = {
    "liger": ("tvd", "entropy", "none", "logits"),
    "trl": ("tvd", "lora16", "fp32", "masked80", "labels64", "hard", "logits"),
}


def small(module, case):
    """A case of the benchmark with its options and other sizes, and its inputs."""
    sizes = {name: value for name, value in SMALL.items() if name in module.DEFAULTS}
    case = dataclasses.replace(case, params=case.params | sizes | {"scale": 2.0})
    return case, module.make(case, CPU, torch.float32, 0)


@pytest.mark.parametrize(
    ("peer", "module", "case"),
    [
        pytest.param(peer, module, case, id=f"{peer}-{module.NAME}-{case}")
        for module in map(modules().get, LOSSES)
        for peer in sorted(PEERS.keys() & module.PEERS.keys())  # the same order in every worker
        for case in select(module.CASES, "bench")
    ],
)
def test_same_as_tigon(peer, module, case):
    pytest.importorskip(PEERS[peer])
    case, inputs = small(module, case)
    try:
        fn = find(module, peer, case, inputs)
    except Unavailable as reason:
        assert any(name in case.name for name in LACKING[peer]), reason
        pytest.skip(f"{reason}")
    if peer == "liger" and case.name.endswith("logits") and not torch.cuda.is_available():
        pytest.skip("Liger's KL of given probabilities is a Triton kernel: needs a GPU")
    theirs, ours = (Runner(f, inputs, CPU).everything() for f in (fn, module.tigon_fn))
    assert len(theirs) == len(inputs.grads) + (
        2 if inputs.kwargs.get("entropy") and peer == "trl" and module.NAME == "linear_log_prob" else 1
    )
    assert difference(theirs, ours) < 1e-5


@pytest.mark.parametrize("case", select(modules()["route"].CASES, "bench"), ids=str)
def test_topk_routes_as_tigon(case):
    route = modules()["route"]
    case = dataclasses.replace(case, params=case.params | {"shape": (200, case.params["shape"][1])})
    inputs = route.make(case, CPU, torch.float32, 0)
    functions = functools.partial(route.eager_fn, best=route.topk_best), route.tigon_fn
    theirs, ours = (Runner(f, inputs, CPU).everything() for f in functions)
    assert difference(theirs, ours) < 1e-5
