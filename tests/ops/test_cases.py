"""Every case of every op, on every device and dtype, by the rule in checks.py."""

import collections
import itertools
import math
import zlib

import pytest
import torch
from checks import check_case, check_needs, oracle_of, outputs_of, run, runs_kernels, same_bits
from torch.utils._python_dispatch import TorchDispatchMode

from cases import modules
from cases.case import select
from conftest import DEVICES

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def pairs(tag: str):
    return [
        pytest.param(module, case, id=f"{module.NAME}-{case.name}")
        for module in modules().values()
        for case in select(module.CASES, tag)
    ]


def _runs():
    """A CPU that runs CPU kernels has one loop for every length and dtype, and fp64 runs the eager reference.

    There every other dtype of a case runs, by turns, and of a large case one, which its name draws. The rest
    are slow, as are the largest cases: they are there for the choice among CUDA kernels.
    """
    turn = collections.Counter()
    for pair, device in itertools.product(pairs("test"), DEVICES):
        module, case = pair.values
        size, kernels = math.prod(case.params.get("shape", ())), runs_kernels(device)
        large = size > 100_000
        dtypes = DTYPES if device == "cpu" and not large else DTYPES[:3]
        if large and not kernels:
            dtypes = [DTYPES[zlib.crc32(case.name.encode()) % 3]]
        turn[module.NAME] += 1
        for i, dtype in enumerate(dtypes):
            slow = not kernels and (size > 200_000 if large else (turn[module.NAME] + i) % 2)
            yield pytest.param(
                *pair.values,
                device,
                dtype,
                id=f"{pair.id}-{device}-{str(dtype).removeprefix('torch.')}",
                marks=[pytest.mark.slow] if slow else [],
            )


@pytest.mark.parametrize("module, case, device, dtype", list(_runs()))
def test_case(module, case, device, dtype):
    """Error at most twice the plain formulation's; see checks.py for the rest."""
    check_case(module, case, device, dtype)


@pytest.mark.parametrize(
    "module", [m for m in modules().values() if select(m.CASES, "small")], ids=lambda m: m.NAME
)
def test_gradients_on_demand(module, device):
    """Of the case of an op with most gradients; see check_needs."""
    inputs = [module.make(case, device, torch.float32, 0) for case in select(module.CASES, "small")]
    check_needs(module.tigon_fn, max(inputs, key=lambda i: len(i.grads) + len(i.grad_kwargs)))


with_gradients = [pair for pair in pairs("small") if "grad" in pair.values[1].tags]


@pytest.mark.parametrize("module, case", with_gradients)
def test_gradients_of_one_result(module, case, device):
    """Upstream gradients that are not there count as zero."""
    inputs = module.make(case, device, torch.float32, 0)
    leaves = {i: inputs.args[i].detach().clone().requires_grad_() for i in inputs.grads}
    results = module.tigon_fn(*(leaves.get(i, x) for i, x in enumerate(inputs.args)), **inputs.kwargs)
    results = [y for y in outputs_of(results) if y.requires_grad]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    for y in results if len(results) > 1 else ():
        slopes = [torch.cos(x.detach()) if x is y else torch.zeros_like(x) for x in results]
        got = torch.autograd.grad(y, [*leaves.values()], torch.cos(y.detach()), **options)
        want = torch.autograd.grad(results, [*leaves.values()], slopes, **options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("module, case", with_gradients)
def test_oracle_against_finite_differences(module, case):
    """The gradients all others are measured by are themselves the slopes of the formula."""
    inputs = module.make(case, "cpu", torch.float64, 0)
    leaves = [inputs.args[i].detach().clone() for i in inputs.grads]
    leaves += [inputs.kwargs[name].detach().clone() for name in inputs.grad_kwargs]

    def fn(*values):
        args, kwargs = list(inputs.args), dict(inputs.kwargs)
        for i, value in zip(inputs.grads, values, strict=False):
            args[i] = value
        kwargs |= zip(inputs.grad_kwargs, values[len(inputs.grads) :], strict=True)
        return oracle_of(module)(*args, **kwargs)

    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(fn, leaves, fast_mode=True)


def _traced():
    """Three cases an op. Slow: the others, and float32 of one, for only fakes ask for dtypes (opcheck)."""
    place = collections.Counter()
    for pair in pairs("small"):
        place[pair.values[0].NAME] += 1
        at = place[pair.values[0].NAME]
        for dtype in [torch.bfloat16, torch.float32][: 1 + (at == 1)]:
            slow = [pytest.mark.slow] if at > 3 or dtype == torch.float32 else []
            name = f"{pair.id}-{str(dtype).removeprefix('torch.')}"
            yield pytest.param(*pair.values, dtype, at == 2, id=name, marks=slow)


@pytest.mark.parametrize("module, case, dtype, dynamic", list(_traced()))
def test_compiled_is_eager(module, case, dtype, dynamic, device):
    """torch.compile traces the op whole and gives the same bits; sizes of an op's second case are symbols."""
    torch._dynamo.reset()
    inputs = module.make(case, device, dtype, 0)
    compiled = torch.compile(module.tigon_fn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    eager, traced = run(module.tigon_fn, inputs), run(compiled, inputs)
    for name, value in eager.tensors.items():
        assert same_bits(value, traced.tensors[name]), name


# No graph holds the first; fakes of the others have x's dtype for an empty gradient, which nobody reads.
NOT_TRACED = (
    "tigon::linear_cross_entropy_bwd_",
    "tigon::hyper_connection_bwd",
    "tigon::hyper_connection_mix_bwd",
)


class _Calls(TorchDispatchMode):
    """Native operators that run below, and copies of their arguments: one call of each set of their kinds."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tigon":
            tensors = {i: x for i, x in enumerate(args) if torch.is_tensor(x)}
            kinds = [tensors[i].dtype if i in tensors else (type(x), x is True) for i, x in enumerate(args)]
            copies = [tensors[i].detach().clone() if i in tensors else x for i, x in enumerate(args)]
            self.found.setdefault((func, str(kinds)), (copies, kwargs))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", modules())
def test_operators(name, device):
    """What an operator says of itself is so: what it writes, what shares memory, results of fake tensors."""
    module, calls = modules()[name], _Calls()
    for case in select(module.CASES, "test"):
        if math.prod(case.params.get("shape", ())) <= 10_000:
            inputs = module.make(case, device, torch.bfloat16, 0)
            with calls:
                for grad in (False, True)[: 1 + ("grad" in case.tags)]:
                    run(module.tigon_fn, inputs, grad=grad)
    for (operator, _), (args, kwargs) in calls.found.items():
        names = [argument.name for argument in operator._schema.arguments]
        checks = ["test_schema"] * (len(names) == len(set(names)))  # linear_preference has two targets
        if any(torch.is_tensor(x) and x.dtype == torch.float8_e4m3fn for x in args):
            checks = []  # PyTorch compares arguments by allclose, which float8 does not have
        if operator._schema.name not in NOT_TRACED:
            checks += ["test_faketensor"]
        torch.library.opcheck(operator, args, kwargs, test_utils=checks)
