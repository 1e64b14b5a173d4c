"""Cases of gated_rms_norm: rms_norm(x) * act(gate), or rms_norm(x * act(gate))."""

import torch
import torch.nn.functional as F

from .case import Case, Inputs, Maker, bench_case, memory_bound, ours, params, test_case, upcast

NAME = "gated_rms_norm"
tigon_fn = ours(NAME)

DEFAULTS = {"shape": (4, 64), "weight": True, "eps": 1e-6, "norm_before_gate": True, "group_size": None}
DEFAULTS |= {"activation": "silu", "rounding": "llama", "layout": "contiguous", "gate_layout": "contiguous"}
DEFAULTS |= {"grad_layout": "contiguous", "fill": None, "grads": (0, 1, 2)}

GATE_FIRST = {"norm_before_gate": False}

CASES = [
    test_case("4x64"),
    test_case("odd_3x7", small=True, shape=(3, 7)),
    test_case("one_column", shape=(5, 1), eps=0.5),
    test_case("vector", shape=(96,)),
    test_case("empty", shape=(0, 64)),
    test_case("heads", shape=(2, 31, 4, 128), layout="heads", gate_layout="heads"),
    test_case("tall", shape=(331, 64)),
    test_case("17x512", shape=(17, 512)),
    test_case("5x2048", shape=(5, 2048)),
    test_case("3x8192", shape=(3, 8192)),
    test_case("2x17000", shape=(2, 17000)),
    test_case("misaligned_gate", shape=(7, 256), gate_layout="offset1"),
    test_case("rows", shape=(9, 130), layout="rows", gate_layout="rows", grad_layout="rows"),
    test_case("gemma_sigmoid", small=True, shape=(9, 57), rounding="gemma", activation="sigmoid"),
    test_case("weightless", shape=(9, 257), weight=False),
    test_case("frozen_gate", shape=(9, 257), grads=(0, 2)),
    test_case("only_gate", shape=(9, 257), grads=(1,)),
    test_case("only_weight", shape=(9, 257), grads=(2,)),
    test_case("nan_row", shape=(5, 130), fill="nan"),
    test_case("gate_first", small=True, shape=(5, 57), **GATE_FIRST),
    test_case("gate_first_gemma", shape=(9, 257), rounding="gemma", **GATE_FIRST),
    test_case("gate_first_2048", shape=(5, 2048), **GATE_FIRST),
    test_case("gate_first_wide", shape=(2, 70001), **GATE_FIRST),
    test_case("groups", small=True, shape=(3, 4, 24), group_size=8, **GATE_FIRST),
    test_case("groups_norm_first", shape=(37, 96), group_size=32),
    test_case("groups_odd", shape=(5, 99), group_size=33, gate_layout="rows", **GATE_FIRST),
    test_case("groups_of_512", shape=(21, 2048), group_size=512, layout="rows", **GATE_FIRST),
    test_case("groups_only_gate", shape=(5, 96), group_size=48, grads=(1,), **GATE_FIRST),
    bench_case("524288x128", shape=(524288, 128)),
    bench_case("16384x4096", shape=(16384, 4096)),
    bench_case("16384x8192", shape=(16384, 8192)),
    bench_case("gate_first_16384x4096", shape=(16384, 4096), **GATE_FIRST),
    bench_case("gate_first_16384x8192_by_1024", shape=(16384, 8192), group_size=1024, **GATE_FIRST),
    bench_case("4096x512", "bench_cpu", shape=(4096, 512)),
    bench_case("128x1024", "smoke", shape=(128, 1024)),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    x = draw.randn(*p["shape"], layout=p["layout"])
    gate = draw.randn(*p["shape"], layout=p["gate_layout"])
    if p["fill"] is not None:
        x.view(-1, x.shape[-1])[1, 3] = float(p["fill"])
    weight = draw.randn(p["shape"][-1], scale=0.3, mean=1.0) if p["weight"] else None
    args = (x, gate, weight)
    names = ("eps", "norm_before_gate", "group_size", "activation", "rounding")
    return Inputs(
        args=args,
        kwargs={name: p[name] for name in names},
        grads=tuple(i for i in p["grads"] if args[i] is not None),
        grad_outputs=(draw.randn(*p["shape"], layout=p["grad_layout"]),),
    )


def _groups(x, size):
    size = size or x.shape[-1]
    return x.unflatten(-1, (x.shape[-1] // size, size))


def eager_fn(x, gate, weight, *, eps, norm_before_gate, group_size, activation, rounding):
    """Qwen3NextRMSNormGated, KimiLinearRMSNormGated (gemma), MambaRMSNormGated, FalconH1RMSNormGated."""
    dtype, act = x.dtype, getattr(F, activation)
    x = upcast(x)
    if not norm_before_gate:
        x = x * act(upcast(gate))
    groups = _groups(x, group_size)
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    x = groups.reshape(x.shape)
    if rounding == "llama":
        x = x.to(dtype)
    if weight is not None:
        x = (weight if rounding == "llama" else upcast(weight)) * x
    if norm_before_gate:
        x = x * act(upcast(gate))
    return x.to(dtype)


# x and gate to y; x, gate and dy to dx and dgate
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(3, 5)


def _mamba(case, inputs):
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

    if inputs.args[2] is None or inputs.kwargs["activation"] != "silu":
        return None

    def fn(x, gate, weight, *, eps, norm_before_gate, group_size, **_):
        return rmsnorm_fn(x, weight, None, gate, eps, group_size, norm_before_gate)

    return fn


PEERS = {"mamba_ssm": _mamba}
