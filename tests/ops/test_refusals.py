"""What every public function refuses by one rule: dtypes, numbers and sizes of its arguments.

Each error names function and argument, and says what was given. test_wrong_calls.py has values of other
kinds; what a single op refuses besides, a relation of its arguments, its own tests have.
"""

import inspect
import re

import calls
import pytest
import torch

import tigon

INF = float("inf")

# Numbers that nothing takes by such a name, and what is said of them.
BOUNDS = [
    ("eps norm_eps sinkhorn_eps soft hard eta keep_mb nll", (-1.0,), ">= 0"),
    ("shift rows answers tokens lora_rank", (-1,), ">= 0"),
    ("softcap teacher_softcap delta tau limit temperature", (0.0, -1.0), ">=? 0"),
    ("softcap teacher_softcap temperature", (INF,), ">=? 0 and finite"),
    ("label_smoothing", (-0.1, 1.5), r"(in \[0, 1\]|0 with)"),
    ("beta", (-0.1,), r"(> 0 and finite|in \[0, 1\])"),
    ("dropout top_p min_p", (-0.1, 1.5), r"in [\[(]0, 1"),
    ("max_workspace_mb max_peak_mb", (INF,), "finite"),
    ("chunk_rows hidden_size vocab teacher_hidden_size columns iterations", (0, -1), ">= 1"),
    ("group_size num_groups top_groups top_k unsqueeze_dim groups", (0, -1), "(> 0|divide|in|1 or 2|>= 1)"),
    ("valid_rows", (-1, 1000), r"(in \[0|>= 0|at most)"),
]

CALLS = [call for call in calls.calls() if " " not in call.name or call.name.endswith("with all")]
CALLS = [call for call in CALLS if call.function is not tigon.clip_grad_norm_]  # it modifies gradients
TAKEN = {("sample", 0.0), ("linear_sample", 0.0)}  # as a temperature: the likeliest class
NUMBER = re.compile("(int|float)( |$)")
every_call = pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])
both_routes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def drawn(call, dtype):
    return {name: calls.converted(value, dtype) for name, value in call.draw().items()}


def refused(call, good, name, value, words):
    """What is said of a call with one argument changed."""
    with pytest.raises(tigon.Error, match=rf"(?s)^\[{call.function.__name__}\] {words}") as caught:
        calls.call(call.function, good | {name: value})
    return str(caught.value)


@every_call
@both_routes
def test_bounds(call, dtype):
    good, options = drawn(call, dtype), inspect.signature(call.function).parameters
    numbers = {name for name, option in options.items() if NUMBER.match(str(option.annotation))}
    for names, values, words in BOUNDS:
        for name in numbers & set(names.split()):
            for value in (value for value in values if (call.name, value) not in TAKEN):
                refused(call, good, name, value, rf"{name} must (be )?{words}.*, got {value:g}")


SPACE = {"max_workspace_mb", "max_peak_mb"}


@pytest.mark.parametrize(
    "call", [c for c in CALLS if SPACE & {*c.parameters()} and "_memory" not in c.name], ids=lambda c: c.name
)
def test_least_memory(call):
    """What a call needs at least; functions that predict it take any number."""
    for name in SPACE & set(call.parameters()):
        refused(call, call.draw(), name, 0.0, rf"{name} must be at least .*, got 0")


# Tensors of any real dtype, and of one element.
REAL = ("token_weights", "scales", "denominator", "source")
NUMBERS = ("denominator", "temperature", "kl", "seed", "alpha")
# Floats that have the dtype of those before them.
OF_ONE_DTYPE = (
    "residual gate up f k k_weight d gate_up gate_up_bias down down_bias b kl_div.teacher jsd.teacher "
)
OF_ONE_DTYPE += "tvd.teacher fp8_linear.weight fp8_linear.bias lora_linear.weight lora_linear.bias"


@every_call
@both_routes
def test_dtypes(call, dtype):
    """Floats where there are none, and none where there are floats, float8 and other floats among them."""
    good = drawn(call, dtype)
    for at, (name, value) in enumerate(good.items()):
        if isinstance(value, torch.Tensor) and name not in (*REAL, *NUMBERS[:3]):
            floats, others = value.is_floating_point(), (torch.int64, torch.float8_e4m3fn)
            if at and {name, f"{call.function.__name__}.{name}"} & {*OF_ONE_DTYPE.split()}:
                others += (torch.float16,)
            bools = value.dtype == torch.bool or call.function is tigon.count_labels
            for other in others if floats else (torch.float32, torch.bool)[: 2 - bools]:
                refused(call, good, name, value.to(other), f"{name} must be .*, got {other}")


@every_call
@both_routes
def test_devices(call, dtype):
    """One tensor elsewhere, or all others."""
    good = drawn(call, dtype)
    tensors = [name for name, value in good.items() if isinstance(value, torch.Tensor)]
    for name in tensors if len(tensors) > 1 else ():
        words = rf"({name} must be on cpu, got meta|.+ must be on meta, got cpu)"
        refused(call, good, name, good[name].to("meta"), words)


# Sizes that the other arguments follow.
LEAD = {"embedding.weight", "contrastive_loss.q", "contrastive_loss.d"}


def sizes(x):
    """A tensor of other sizes, and what is said of it if it is named."""
    yield "columns", x[..., 1:]
    yield "rows", x[1:]
    yield "dimensions", x[None]
    yield "a scalar", x.reshape(-1)[0]
    if x.dim() > 2:
        yield "inner rows", x[..., 1:, :]


FREE = {
    "columns": "teacher labels source scales",
    "rows": "weight source scales position_ids",
    "dimensions": "scale shift position_ids",
    "a scalar": "scales",
    "inner rows": "",
}


@every_call
@both_routes
def test_sizes(call, dtype):
    """Every tensor but those that say what sizes the others have."""
    good = drawn(call, dtype)
    for at, (name, value) in enumerate(good.items()):
        if not at or not isinstance(value, torch.Tensor) or not value.dim() or name in NUMBERS:
            continue
        for what, other in sizes(value):
            if name not in FREE[what].split() and f"{call.function.__name__}.{name}" not in LEAD:
                said = refused(call, good, name, other, ".+ must .*, got .+")
                got = [list(other.shape), other.dim(), *other.shape[-2:], *other.shape[:1]]
                assert f"] {name} must" not in said or said.endswith(tuple(f"got {x}" for x in got)), said


@pytest.mark.parametrize(
    "call", [c for c in CALLS if {"lora", "outputs"} & set(c.parameters())], ids=lambda c: c.name
)
@both_routes
def test_adapters_and_outputs(call, dtype):
    good, options = drawn(call, dtype), inspect.signature(call.function).parameters
    if (
        isinstance(lora := good.get("lora"), tuple)
        and lora[0] is not None
        and isinstance(lora[0], torch.Tensor)
    ):
        a, b, scale = lora
        for value, words in (
            ((a, b), r"must be \(A, B, scale\), got 2"),
            ((None, b, scale), "A must be a float tensor, got NoneType"),
            ((a.long(), b, scale), "A must be a float tensor, got torch.int64"),
            ((a, b, None), "scale must be a number, got NoneType"),
            ((a[:, 1:], b, scale), r"must be \(A \[r, \d+\], B \[\d+, r\], scale\), got"),
            ((a, b[:, 1:], scale), r"must be \(A \[r, \d+\], B \[\d+, r\], scale\), got"),
        ):
            refused(call, good, "lora", value, f"lora {words}")
    if "outputs" in options:
        for value in ("loss", ("lse",), ("loss", "logits")):
            refused(call, good, "outputs", value, "outputs must be .*, got ")
