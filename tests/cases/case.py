"""What a case is, and the small tools the case modules share.

A case module (`rms_norm.py` beside this file is the model) defines

* `NAME`, `CASES`, `make(case, device, dtype, seed) -> Inputs`
* `tigon_fn`, `eager_fn` (the plain same-precision PyTorch formulation) and, where the eager form in fp64
  is not the oracle, `oracle_fn` (the same mathematics); all three take `*inputs.args, **inputs.kwargs`
* `bytes_fwd`, `bytes_bwd` (least traffic) and `flops_fwd`, `flops_bwd` (0 where memory bound)
* where it applies, `bytes_step` (least traffic of forward and backward together, if that is less
  than their sum), `gemms(inputs, step)` (the bare matmuls that bound a compute-bound op),
  `even_neighbour(inputs)` (sizes that the library multiplies faster, and the share of them), and
  `LOSS = True` (the gradient may be made in the forward: no separate time of the backward), and
  `PASSES` (what is timed; by default the forward, the backward and both)
* `PEERS`: provider name -> factory(case, inputs) -> callable or None; a factory imports its peer
  lazily, an ImportError means "not installed", None means "does not support this case".

Tags: `test` correctness, `grad` its gradients too, `small` tests that repeat or trace the op too,
`bench` a GPU benchmark, `bench_cpu` a CPU one, `smoke` a benchmark of milliseconds, `paper` a point of
the paper's figures 2 and 3, `large` needs much memory.
"""

import dataclasses
import functools
import importlib
import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of sizes and options under a readable name."""

    name: str
    params: dict[str, Any]
    tags: frozenset[str] = frozenset({"test", "grad"})

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass
class Inputs:
    """The arguments of one call; `grads` are the indices of `args` that require a gradient.

    Tensors in `kwargs` that should get a gradient are named in `grad_kwargs`.
    `grad_outputs` has one upstream gradient per output; None means ones.
    """

    args: tuple
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    grads: tuple[int, ...] = ()
    grad_outputs: tuple | None = None
    grad_kwargs: tuple[str, ...] = ()


def test_case(name: str, *, grad: bool = True, small: bool = False, **params) -> Case:
    """A correctness case, with gradients unless told otherwise."""
    tags = {"test"} | ({"grad"} if grad else set()) | ({"small"} if small else set())
    return Case(name, params, frozenset(tags))


test_case.__test__ = False  # a maker of cases, not a test for pytest to collect


def layout_cases(*layouts: str, **params) -> list[Case]:
    """A case in several layouts, each of which names it."""
    return [test_case(layout, layout=layout, grad_layout=layout, **params) for layout in layouts]


def bench_case(name: str, *tags: str, **params) -> Case:
    """A benchmark case, by default for the GPU."""
    return Case(name, params, frozenset(tags or ("bench",)))


def norm_cases() -> list[Case]:
    """Rows of every length and layout: what any norm must get right. A module adds its own options."""
    return [
        test_case("4x64"),
        test_case("odd_3x7", small=True, shape=(3, 7)),
        test_case("one_row", shape=(1, 1000)),
        test_case("vector", shape=(96,)),
        test_case("empty", shape=(0, 64)),
        test_case("rank4_odd", shape=(2, 3, 5, 33)),
        test_case("5x4097", shape=(5, 4097)),
        test_case("wide", shape=(2, 70001)),
        # Rows too long for a block, more of them than there are clusters of blocks.
        test_case("many_long", shape=(141, 18432)),
        test_case("many_long_odd", shape=(141, 20001)),
        # Clusters that do not divide the rows of an alignment; more rows than blocks, a block a row.
        test_case("shared_odd", shape=(23, 70001)),
        test_case("long_odd", shape=(140, 13001)),
        test_case("long_apart", shape=(140, 13001), layout="offset1"),
        test_case("wide_misaligned", shape=(3, 70000), layout="offset1"),
        test_case("misaligned", shape=(7, 256), layout="offset1", grad_layout="offset1"),
        test_case("grad_expanded", shape=(7, 256), grad_layout="expanded"),
        test_case("nan_row", shape=(5, 130), fill="nan"),
        test_case("inf_row", shape=(5, 130), fill="inf", grad=False),
    ]


def weighted_norm_cases() -> list[Case]:
    """More of them, of norms whose weight may lie anywhere."""
    return [
        *norm_cases(),
        test_case("empty_inner", shape=(3, 0, 64)),
        *layout_cases("rows", "columns", "transposed", shape=(9, 130)),
        # More rows than a persistent kernel has blocks: it goes on from row to row.
        test_case("tall_odd", shape=(4001, 33)),
        test_case("tall_misaligned", shape=(5001, 40), layout="offset1", grad_layout="offset1"),
        test_case("misaligned_weight", shape=(7, 256), weight_layout="offset1"),
        test_case("strided_weight", shape=(7, 256), weight_layout="columns"),
        test_case("eps_large", shape=(9, 257), eps=0.5),
        test_case("eps_zero", shape=(9, 257), eps=0.0),
    ]


def pointwise_cases() -> list[Case]:
    """Sizes and layouts that any op of single elements must get right."""
    return [
        test_case("4x64"),
        test_case("odd_3x7", small=True, shape=(3, 7)),
        test_case("one_row", shape=(1, 1000)),
        test_case("one_column", shape=(5, 1)),
        test_case("one_element", shape=(1, 1)),
        test_case("scalar", shape=()),
        test_case("vector", shape=(97,)),
        test_case("empty", shape=(0, 64)),
        test_case("empty_columns", shape=(3, 0)),
        test_case("rank5", shape=(2, 1, 3, 2, 9)),
        test_case("129x1031", shape=(129, 1031)),
        test_case("wide", shape=(2, 70001)),
        *layout_cases("columns", "transposed", shape=(9, 130)),
        test_case("heads", shape=(2, 3, 5, 16), layout="heads"),
        test_case("misaligned", shape=(7, 256), layout="offset1", grad_layout="offset1"),
        test_case("grad_expanded", shape=(7, 256), grad_layout="expanded"),
        test_case("nan_row", shape=(5, 130), fill="nan"),
        test_case("zeros", shape=(5, 130), fill="zero"),
    ]


# Hidden sizes and lengths of figures 2 and 3 of Liger's paper (arXiv:2410.10989).
PAPER_HIDDEN = PAPER_LENGTHS = (4096, 8192, 12288, 16384)


def turn_cases(**params) -> list[Case]:
    """More rows than a device holds at a time: of some lanes, a warp, a block, a cluster of blocks."""
    shapes = [(20000, 64), (6500, 264), (6500, 265), (2200, 1032), (2200, 1033), (70, 33024), (70, 33025)]
    return [test_case(f"turns_{r}x{c}", shape=(r, c), **params) for r, c in shapes]


def norm_bench_cases(**params) -> list[Case]:
    """Row ops by row length: powers of two and what lies between, odd ones, heads, what a CPU does too."""
    columns = (1024, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384, 24576, 32768)
    shapes = [(16384, c) for c in columns] + [(16384, 4097)]
    # Odd ones of as many bytes as the round ones beside them.
    shapes += [(4096, 12288), (4096, 12289), (3072, 16384), (384, 131072), (512, 100003), (256, 262144)]
    shapes += [(262144, 128), (2048, 4096), (256, 4096)]
    cases = [bench_case(f"{r}x{c}", shape=(r, c), **params) for r, c in shapes]
    cases += [bench_case(f"4096x{c}", "bench_cpu", shape=(4096, c), **params) for c in (512, 4096)]
    cases += [bench_case(f"paper_8192x{c}", "paper", shape=(8192, c), **params) for c in PAPER_HIDDEN]
    return [*cases, bench_case("128x1024", "smoke", shape=(128, 1024), **params)]


def select(cases: Iterable[Case], tag: str) -> list[Case]:
    """The cases that carry a tag."""
    return [case for case in cases if tag in case.tags]


def itemsize(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return torch.empty((), dtype=dtype).element_size()


def upcast(x: torch.Tensor) -> torch.Tensor:
    """x in fp32, or in fp64 when it is fp64: where plain formulations call `.float()`."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Maker:
    """Draws reproducible tensors in awkward layouts.

    Small tensors are drawn on the CPU so that every device sees the same numbers; large ones are
    drawn where they live.
    """

    def __init__(self, case: Case, device: str | torch.device, dtype: torch.dtype, seed: int):
        self.device = torch.device(device)
        self.dtype = dtype
        self.seed = (seed * 1_000_003 + zlib.crc32(case.name.encode())) % (2**62)
        self._generators: dict[str, torch.Generator] = {}

    def _generator(self, device: torch.device) -> torch.Generator:
        key = str(device)
        if key not in self._generators:
            self._generators[key] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[key]

    def randn(
        self,
        *shape: int,
        layout: str = "contiguous",
        scale: float = 1.0,
        mean: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Normal numbers; `layout` names how the tensor lies in memory (see `lay_out`)."""
        dtype = dtype or self.dtype
        large = math.prod(shape) > 2**22
        where = self.device if large else torch.device("cpu")
        draw = torch.float32 if large and dtype != torch.float64 else torch.float64
        if large and dtype in (torch.bfloat16, torch.float16):
            draw = dtype
        x = torch.randn(shape, generator=self._generator(where), device=where, dtype=draw)
        if scale != 1.0:
            x.mul_(scale)
        if mean != 0.0:
            x.add_(mean)
        return lay_out(x.to(self.device, dtype), layout)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 in [low, high)."""
        cpu = torch.device("cpu")
        return torch.randint(low, high, shape, generator=self._generator(cpu)).to(self.device)

    def labels(self, vocab: int, *shape: int, masked: float = 0.0, ignore_index: int = -100) -> torch.Tensor:
        """Labels in [0, vocab), a fraction of them (1.0: all) replaced by `ignore_index`."""
        target = self.integers(0, vocab, *shape)
        if masked:
            cpu = torch.device("cpu")
            draw = torch.rand(shape, generator=self._generator(cpu)).to(self.device)
            target = torch.where(draw < masked, ignore_index, target)
        return target


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout.

    contiguous; offset1: storage offset of one element, so never aligned to a vector;
    rows: every row lies in a longer row (last dimension contiguous); columns: last dimension
    strided by two; transposed: the last two dimensions swapped in memory; heads: HF's
    [B, H, T, D] view of [B, T, H, D] memory; expanded: first dimension of stride 0 (all its
    entries become the first one), which is what the gradient of a sum looks like.
    """
    if layout == "contiguous":
        return x.contiguous()
    if layout == "offset1":
        flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        view = flat[1:].view(x.shape)
    elif layout == "rows":
        view = x.new_empty(*x.shape[:-1], x.shape[-1] + 3)[..., : x.shape[-1]]
    elif layout == "columns":
        view = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]
    elif layout == "transposed":
        view = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif layout == "heads":
        view = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "expanded":
        return x[:1].contiguous().expand(x.shape)
    else:
        raise ValueError(f"unknown layout {layout!r}")
    return view.copy_(x)


def params(case: Case, defaults: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a case over a module's defaults; an unknown name is an error."""
    unknown = set(case.params) - set(defaults)
    if unknown:
        raise KeyError(f"case {case.name}: unknown parameters {sorted(unknown)}")
    return defaults | case.params


def upstream(case: Case, dtype: torch.dtype, device) -> torch.Tensor:
    """The gradient of a scalar loss: what the case says, else 1 in benchmarks, as in `loss.backward()`."""
    value = case.params.get("upstream") or (0.7 if "test" in case.tags else 1.0)
    return torch.tensor(value, dtype=torch.promote_types(dtype, torch.float32), device=device)


SCALED = {"upstream": 0.125}  # of a loss divided by 8 steps of accumulation

Factory = Callable[[Case, Inputs], Callable | None]


def nothing(*case_and_dtype) -> int:
    """The flops of an op that memory bounds, or the costs of a backward whose gradients are there already."""
    return 0


def elements_of(case: Case) -> int:
    """Those of a tensor of the case's shape."""
    return math.prod(case.params["shape"])


def memory_bound(forward: int, backward: int, elements: Callable[[Case], int] = elements_of) -> tuple:
    """`bytes_fwd, bytes_bwd, flops_fwd, flops_bwd` of an op that moves so many tensors each way."""

    def moves(tensors: int) -> Callable:
        return lambda case, dtype: tensors * elements(case) * itemsize(dtype)

    return moves(forward), moves(backward), nothing, nothing


def ours(name: str, convert: Callable[[dict], dict] = dict) -> Callable:
    """The case module's `tigon_fn`: Tigon's function of that name, imported when it is called.

    `convert` makes of a case's options those of the function.
    """

    def tigon_fn(*args, **options):
        import tigon

        return getattr(tigon, name)(*args, **convert(options))

    return tigon_fn


def liger(module: str, function: str, call: Callable | None = None, whole: bool = False) -> Factory:
    """The peer `liger_kernel.ops.<module>.<function>`, an autograd function.

    It takes the case's own arguments, or `call(function, *arguments)` gives them; `whole`: it takes no None.
    """

    def factory(case: Case, inputs: Inputs) -> Callable | None:
        apply = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply
        if whole and any(x is None for x in inputs.args):
            return None
        return apply if call is None else functools.partial(call, apply)

    return factory


def stock(eager_fn: Callable) -> Factory:
    """The peer that is the plain formulation itself: one call of PyTorch's."""
    return lambda case, inputs: eager_fn
