"""The rule every op is tested by.

An op computes in storage precision what the formula says in real numbers, so some error is right.
How much is not written down by hand: the same inputs go through the op, through the plain PyTorch
formulation of the same precision, and through the formula in fp64, and the op's error may be at
most twice the plain formulation's, in the maximum norm and in the root mean square.

The plain formulation is now and then exact by luck, so a floor is added, measured in units in the
last place of the output's dtype: one ulp at the largest value for the maximum norm, half an ulp of
the root mean square for that one (a correctly rounded result is off by up to half an ulp
everywhere). The smaller a tensor, the more its error is a single draw: n numbers widen the floor
by 1 + 3/sqrt(n), four ulp for a lone loss. A lone bf16 loss over rounded logits is a draw of a far
larger error, and the largest of many errors is a single draw too: a tensor that breaks the bound is
drawn 32 times (8 times from a million numbers on), and the root mean square over all draws is held
to it. Chance averages out, a bias or a wrong element does not. For fp64 the oracle has the precision
of what it judges, hence 64 ulp; and the plain formulation, which may be the very reference that is
judged, counts up to an error of 1e-12.

Besides: the same shapes and dtypes, NaN and infinities at the same places as in the oracle, inputs
untouched, the same bits in a second run, and every output element written (the first run works on
memory filled with NaN).
"""

import dataclasses
import functools
import itertools
import math
import re
import types
from collections.abc import Callable

import pytest
import torch

import tigon
from cases.case import Case, Inputs
from conftest import poisoned
from tigon.environment import library_text

FACTOR = 2.0
OF_PLAIN_FLOAT64 = 1e-12
DRAWS, DRAWS_OF_LARGE = 32, 8
LARGE = 2**20  # numbers of a case's inputs


@dataclasses.dataclass
class Result:
    """Outputs and gradients of one run, by name."""

    tensors: dict[str, torch.Tensor | None]


def outputs_of(value) -> tuple:
    """A result as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def _copy(value, dtype):
    """A detached tensor on the same memory, or in another dtype; anything else as it is."""
    if not torch.is_tensor(value) or not value.is_floating_point():
        return value
    return value.detach() if dtype is None else value.detach().to(dtype)


def run(fn, inputs: Inputs, *, grad=True, dtype: torch.dtype | None = None, twice=False) -> Result:
    """Call `fn`, and its backward where the case asks for gradients; `dtype` converts the inputs.

    Without `dtype` the function sees the very memory of `inputs`. `twice`: again, to the bit.
    """
    args = [_copy(value, dtype) for value in inputs.args]
    kwargs = {name: _copy(value, dtype) for name, value in inputs.kwargs.items()}
    leaves: dict[str, torch.Tensor] = {}
    if grad:
        leaves |= {f"d(arg {i})": args[i].requires_grad_() for i in inputs.grads}
        leaves |= {f"d({name})": kwargs[name].requires_grad_() for name in inputs.grad_kwargs}
    with torch.set_grad_enabled(grad):
        outputs = outputs_of(fn(*args, **kwargs))
    tensors = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    if leaves:
        upstream = inputs.grad_outputs or tuple(torch.ones_like(out) for out in outputs)
        upstream = [_copy(value, dtype) for value in upstream]
        pairs = [pair for pair in zip(outputs, upstream, strict=True) if pair[0].requires_grad]
        roots, upstream = zip(*pairs, strict=True)

        def backward(keep):
            return torch.autograd.grad(
                roots, list(leaves.values()), upstream, retain_graph=keep, allow_unused=True
            )

        grads = backward(twice)
        assert not twice or all(map(same_bits, grads, backward(False)))
        tensors |= dict(zip(leaves, grads, strict=True))
    return Result(tensors)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, for comparisons in which NaN equals NaN and -0 differs from 0."""
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal shape, dtype and bytes."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def _check_form(name: str, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Shape, dtype, NaN and infinities."""
    assert got.shape == eager.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(eager.shape)}"
    assert got.dtype == eager.dtype, f"{name}: dtype {got.dtype}, not {eager.dtype}"
    rounded = exact.to(got.dtype)
    for what, places in (("NaN", torch.isnan), ("inf", torch.isinf)):
        differ = places(got) != places(rounded)
        assert not differ.any(), f"{name}: {what} at other places, first {differ.nonzero()[0]}"


def _finite(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Our error, the plain formulation's and the values, where all are finite."""
    finite = torch.isfinite(exact.to(got.dtype)) & torch.isfinite(eager)
    value = exact[finite]
    return got[finite].double() - value, eager[finite].double() - value, value


def _broken(ours, theirs, value, dtype: torch.dtype, norms: tuple[str, ...] = ("max", "rms")) -> str:
    """What breaks the rule, or nothing."""
    if not value.numel():
        return ""
    ulp = torch.finfo(dtype).eps * (1 + 3 / math.sqrt(value.numel()))
    if dtype == torch.float64:
        ulp *= 64
    for norm, of, share in (("max", _largest, 1.0), ("rms", _rms, 0.5)):
        plain = min(of(theirs), OF_PLAIN_FLOAT64 * of(value)) if dtype == torch.float64 else of(theirs)
        error, bound = of(ours), FACTOR * plain + share * ulp * of(value)
        if norm in norms and not error <= bound:
            return (
                f"{norm} error {error:.3e} over {bound:.3e}; "
                f"plain PyTorch has {of(theirs):.3e}, the values {of(value):.3e}"
            )
    return ""


def _broken_often(another_draw, dtype: torch.dtype, count: int) -> str:
    """The rule over many draws together: of one, chance may decide."""
    draws = [_finite(*another_draw(seed)) for seed in range(1, count + 1)]
    return _broken(*(torch.cat(parts) for parts in zip(*draws, strict=True)), dtype, norms=("rms",))


def check_close(
    name: str,
    got: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    another_draw=None,
    draws: int = DRAWS,
) -> None:
    """The rule of this file for one tensor.

    `exact` is fp64; `another_draw(seed)` draws the three again, from other inputs, at most `draws` times.
    """
    _check_form(name, got, eager, exact)
    broken = _broken(*_finite(got, eager, exact), got.dtype)
    if broken and another_draw is not None:
        broken = _broken_often(another_draw, got.dtype, draws)
    assert not broken, f"{name}: {broken}"


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item()


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def tensors_of(inputs: Inputs) -> list[torch.Tensor]:
    """Every tensor of a call, upstream gradients too."""
    values = (*inputs.args, *inputs.kwargs.values(), *(inputs.grad_outputs or ()))
    return [value for value in values if torch.is_tensor(value)]


@functools.cache
def runs_kernels(device: str) -> bool:
    """Whether tensors of the device take the CUDA kernels: on a GPU, and on a CPU in tests/emulator."""
    return device != "cpu" or library_text("tigon_cuda_build") == "emulated"


def oracle_of(module: types.ModuleType) -> Callable:
    """What is called with fp64 copies: the eager form, unless the module has an oracle of its own."""
    return getattr(module, "oracle_fn", module.eager_fn)


def check_case(
    module: types.ModuleType, case: Case, device: str, dtype: torch.dtype, *, seed: int = 0, fn=None
) -> None:
    """Hold an op (`fn`, by default the module's `tigon_fn`) to the rule on one case."""
    fn = fn or module.tigon_fn
    inputs = module.make(case, device, dtype, seed)
    before = [value.clone() for value in tensors_of(inputs)]
    grad = "grad" in case.tags
    with poisoned():
        got = run(fn, inputs, grad=grad)
    for value, kept in zip(tensors_of(inputs), before, strict=True):
        assert same_bits(value, kept), "an input was modified"
    again = run(fn, inputs, grad=grad)
    eager = run(module.eager_fn, inputs, grad=grad)
    exact = run(oracle_of(module), inputs, grad=grad, dtype=torch.float64)
    assert got.tensors.keys() == eager.tensors.keys()
    draws = DRAWS if sum(map(torch.numel, before)) < LARGE else DRAWS_OF_LARGE
    for name, value in got.tensors.items():
        assert same_bits(value, again.tensors[name]), f"{name}: two runs differ"
        if eager.tensors[name] is None:
            continue
        assert value is not None, f"{name}: no gradient"

        def another_draw(seed, name=name):
            seeded = module.make(case, device, dtype, seed)
            two = [run(f, seeded, grad=grad).tensors[name] for f in (fn, module.eager_fn)]
            return *two, run(oracle_of(module), seeded, grad=grad, dtype=torch.float64).tensors[name]

        check_close(name, value, eager.tensors[name], exact.tensors[name], another_draw, draws)
    if grad:
        plain = run(fn, inputs, grad=False)
        for name, value in plain.tensors.items():
            if same_bits(value, got.tensors[name]):
                continue
            # Calls without gradients have kernels of their own, which may sum in another order. So has
            # PyTorch, which computes in float64: a matmul with strided rows is folded only without gradients.
            may_differ = (runs_kernels(device) and value.is_floating_point()) or value.dtype == torch.float64
            assert may_differ, f"{name}: differs without gradients"
            tolerance = 4 * torch.finfo(value.dtype).eps
            if not torch.allclose(value, got.tensors[name], tolerance, equal_nan=True):
                check_close(f"{name} without gradients", value, eager.tensors[name], exact.tensors[name])


def check_needs(fn, inputs: Inputs) -> None:
    """Every set of gradients asked for, to the bits of all of them; a graph that is kept runs twice."""
    full = run(fn, inputs, twice=True)
    leaves = [*inputs.grads, *inputs.grad_kwargs]
    for needs in itertools.product([False, True], repeat=len(leaves)):
        if 1 < sum(needs) < len(leaves) - 1 and len(leaves) > 5:
            continue
        some = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        wanted = dataclasses.replace(
            inputs,
            grads=tuple(x for x in some if isinstance(x, int)),
            grad_kwargs=tuple(x for x in some if isinstance(x, str)),
        )
        for name, got in run(fn, wanted).tensors.items():
            assert same_bits(got, full.tensors[name]), (name, some)


def refusals(table: str) -> list[list[str]]:
    """Rows of `call -> words of its error`, where `...` is anything; an arrow may begin a line."""
    rows = table.strip().replace("\n    -> ", " -> ").splitlines()
    return [row.rsplit(" -> ", 1) for row in rows]


def refused(call: str, message: str, **names) -> None:
    """The call raises tigon.Error of the message, and modifies no tensor it is given.

    A `_raw` one is of a native operator, whose errors PyTorch hands on as RuntimeError.
    """
    kind = RuntimeError if call.startswith("_raw") else tigon.Error
    given = {name: value for name, value in names.items() if torch.is_tensor(value)}
    kept = {name: value.detach().clone() for name, value in given.items()}
    with pytest.raises(kind, match=".*".join(map(re.escape, message.split("...")))):
        eval(call, {**vars(tigon), "torch": torch, **names})
    assert all(same_bits(value, kept[name]) for name, value in given.items()), "an input was modified"
