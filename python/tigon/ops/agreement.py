"""The check that all processes of a group make the same call, and what it finds: who holds which classes."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from tigon._op import cached_tensor
from tigon.error import check
from tigon.ops.arguments import F, kind_of

# PyTorch renames them.
all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class Facts(NamedTuple):
    """A process's description of its call. All but refused, columns and first_class must be equal."""

    rows: int = 0
    size: int = 0  # of a hidden state
    dtype: int = 0
    needs: int = 0  # bits: which gradients are needed
    target: int = 0
    refused: int = 0
    columns: int = 0
    first_class: int = -1
    vocab: int = -1
    options: tuple[tuple[str, str], ...] = ()  # of :func:`comparable`

    def flat(self) -> list[int]:
        """The numbers that are exchanged, the same count for every call."""
        codes = [code([name for name, _ in self.options]), *(code(value) for _, value in self.options)]
        return [*self[:-1], *codes, *[0] * (_MOST_OPTIONS + 1 - len(codes))]


SAME = {
    "rows": "the number of rows",
    "size": "the hidden size",
    "dtype": "the dtype",
    "needs": "which tensors require grad",
    "target": "target",
}
_MOST_OPTIONS = 48  # of one call
_COUNTS = ("rows", "size")  # the others are checksums and bits, which no reader understands


Layout = tuple[tuple[int, ...], tuple[int, ...], int, int]  # the last four members of Shards


@dataclass(frozen=True)
class Shards:
    """The classes of every process of a group."""

    group: dist.ProcessGroup
    rank: int
    firsts: tuple[int, ...]
    reals: tuple[int, ...]  # columns that are classes; those past them are padding
    widest: int  # columns of the widest shard
    vocab: int

    @property
    def size(self) -> int:
        return len(self.firsts)

    @property
    def first(self) -> int:
        return self.firsts[self.rank]

    @property
    def real(self) -> int:
        return self.reals[self.rank]

    def weights(self, class_weight: torch.Tensor | None, device) -> torch.Tensor:
        """Sum each shard's class weights, float32 ``[size]``."""
        if class_weight is None:
            return _counts(self.reals, device)
        parts = [class_weight[a : a + n] for a, n in zip(self.firsts, self.reals, strict=True)]
        return torch.stack([part.double().sum() for part in parts]).float()


def code(value: object) -> int:
    """A number for a value that prints the same in every process."""
    return zlib.crc32(repr(value).encode())


def comparable(**options) -> tuple[tuple[str, str], ...]:
    """The options of a call as processes compare them: values that print the same in every process."""
    return tuple((name, repr(value)) for name, value in options.items())


def target_code(target: torch.Tensor, device) -> int:
    """A number for the labels of a call on the CPU; on a device calls are compared without them."""
    on_cpu = device.type == target.device.type == "cpu"
    return zlib.crc32(target.contiguous().numpy().tobytes()) if on_cpu else 0


def of_rows(target: torch.Tensor, x: torch.Tensor) -> dict[str, int]:
    """The facts of labels and of the tensor that they are compared with."""
    return {"rows": target.numel(), "dtype": code(x.dtype), "target": target_code(target, x.device)}


def number_of(denominator) -> object:
    """The value of a denominator that processes compare: its number, if the host knows it."""
    if not isinstance(denominator, torch.Tensor):
        return denominator
    known = denominator.is_cpu and denominator.numel() == 1 and not denominator.is_complex()
    return float(denominator) if known else "on a device"


def or_unknown(number: int | None) -> int:
    return -1 if number is None else number


def trains(*tensors) -> int:
    """A bit for each of the tensors that gets a gradient."""
    if not torch.is_grad_enabled():
        return 0
    return sum(1 << i for i, t in enumerate(tensors) if isinstance(t, torch.Tensor) and t.requires_grad)


def values_of(tensor: torch.Tensor | None, device) -> tuple | None:
    """The values that processes compare for a tensor equal in all: its sizes, and on the CPU its elements."""
    if not isinstance(tensor, torch.Tensor):
        return None
    code_of_values = 0
    if device.type == tensor.device.type == "cpu":  # elsewhere the conversion is not needed
        code_of_values = target_code(tensor.detach().to(torch.float32), device)
    return tuple(tensor.shape), code_of_values


@cached_tensor
def _counts(columns: tuple[int, ...], device) -> torch.Tensor:
    """Cached on the device: a copy from the host would wait, and fail under capture."""
    return torch.tensor(columns, dtype=torch.float32, device=device)


class _Agreed:
    """The agreements of a group's processes. They make the same calls and forget at the same call."""

    def __init__(self) -> None:
        self.layouts: dict[Facts, Layout] = {}
        self.calls = 0


_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, _Agreed] = weakref.WeakKeyDictionary()
_AGREED_CALLS = 4096


def _said(group) -> int:
    """How often this process has described a call to the group."""
    return _agreed.setdefault(group, _Agreed()).calls


def agree(op: str, group: object, device, describe: Callable[[], tuple[Facts, object]]):
    """``(Shards, the second result of describe)``, or an error in every process.

    ``describe`` checks this process's arguments. If it raises an error, the other processes are told first,
    so that none of them waits. On the CPU the processes compare every call. On CUDA, where reading the facts
    of others synchronises, they compare the first call of each kind. Without the number of all classes a
    single process's columns may have changed, so the processes compare every call.

    Raises:
        tigon.Error: this process is not in the group, another process refused its arguments, or the
            processes make different calls.
    """
    check(op, isinstance(group, dist.ProcessGroup), "group must be a ProcessGroup, got {}", kind_of(group))
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    check(op, rank >= 0, "group must contain this process, got one that does not")
    refusal, result, facts = None, None, Facts(refused=1)
    try:
        facts, result = describe()
    except Exception as error:  # any error: the others must not wait
        refusal = error
    agreed = _agreed.setdefault(group, _Agreed())
    agreed.calls += 1
    lasting = device.type == "cuda" and (facts.vocab >= 0 or size == 1)
    if lasting and refusal is None and facts in agreed.layouts:
        return Shards(group, rank, *agreed.layouts[facts]), result
    said = _exchange(group, device, facts)
    if refusal is not None:
        raise refusal
    for other, (other_facts, _) in enumerate(said):
        check(op, not other_facts.refused, "process {} of the group has refused its arguments", other)
    for other, (other_facts, codes) in enumerate(said):
        for name, words in SAME.items():
            mine, theirs = getattr(facts, name), getattr(other_facts, name)
            given = f"{mine} here and {theirs}" if name in _COUNTS else "another"
            _check_same(op, words, given, other, mine == theirs)
        names, *own = facts.flat()[len(facts) - 1 :]
        _check_same(op, "the call", "another", other, names == codes[0])
        for (name, value), mine, theirs in zip(facts.options, own, codes[1:], strict=False):
            given = f"{name}={value} here and another"
            _check_same(op, "the options", given, other, mine == theirs)
    layout = _layout(op, [other_facts for other_facts, _ in said])
    if lasting:
        if len(agreed.layouts) == _AGREED_CALLS:
            agreed.layouts.clear()
        agreed.layouts[facts] = layout
    return Shards(group, rank, *layout), result


def _check_same(op, words, given, other, same: bool) -> None:
    check(op, same, "{} must be the same in all processes, got {} in process {}", words, given, other)


def _exchange(group, device, facts: Facts) -> list[tuple[Facts, list[int]]]:
    """Exchange the facts of every process, and the codes of its options."""
    said, size = [facts.flat()], dist.get_world_size(group)
    if size > 1:
        mine = torch.tensor(said, dtype=torch.int64, device="cpu").to(device)
        said = gathered(mine, size, group).tolist()
    numbers = len(Facts._fields) - 1
    return [(Facts(*row[:numbers]), row[numbers:]) for row in said]


def tells_refusals(function: F) -> F:
    """Decorates a function of tensors and the keyword ``group`` that calls :func:`agree`.

    If it raises an error before that, the other processes are told, so that none of them waits.
    """

    @functools.wraps(function)
    def call(*args, group=None, **options):
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            return function(*args, group=group, **options)
        said = _said(group)
        try:
            return function(*args, group=group, **options)
        except Exception:
            if _said(group) == said:
                _exchange(group, device_of(group, *args, *options.values()), Facts(refused=1))
            raise

    return call  # type: ignore[return-value]


def agree_on(op: str, groups, device, describe: Callable[[], tuple[dict, object]]):
    """The second result of describe, after the processes of each group found its options equal.

    As in :func:`agree`, an error in one process is an error in all, and on CUDA only the first call of each
    kind is compared.
    """
    try:
        options, result = describe()
    except Exception:
        for group in groups:
            _exchange(group, device, Facts(refused=1))
        raise
    for group in groups:
        facts = Facts(columns=1, vocab=dist.get_world_size(group), options=comparable(op=op, **options))
        agree(op, group, device, lambda facts=facts: (facts, None))
    return result


def device_of(group, *values) -> torch.device:
    """The device of a group's exchanges: that of the first tensor, or CUDA if the group supports it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device
    cuda = any(device.type == "cuda" for device in group._device_types)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _layout(op, said: list[Facts]) -> Layout:
    """The layout, equal in all processes, checked to hold every class once."""
    columns, vocabs = [s.columns for s in said], {s.vocab for s in said}
    check(op, len(vocabs) == 1, "vocab must be the same in all processes, got {}", sorted(vocabs))
    given = [s.first_class >= 0 for s in said]
    check(op, all(given) or not any(given), "first_class must be given in all processes or in none, got both")
    firsts = [s.first_class for s in said]
    if not any(given):
        firsts = [sum(columns[:r]) for r in range(len(said))]
    (vocab,) = vocabs
    if vocab < 0:
        vocab = max(a + n for a, n in zip(firsts, columns, strict=True))
    reals = [max(0, min(vocab - a, n)) for a, n in zip(firsts, columns, strict=True)]
    end = 0
    for first, real in sorted((a, n) for a, n in zip(firsts, reals, strict=True) if n > 0):
        check(op, first == end, "shards must hold every class once, got first_class {} after {}", first, end)
        end = first + real
    check(op, end == vocab and vocab > 0, "shards must hold all {} classes (vocab), got {}", vocab, end)
    return tuple(firsts), tuple(reals), max(columns), vocab


def gathered(part: torch.Tensor, size: int, group) -> torch.Tensor:
    """Return the parts of `size` processes, concatenated in the first dimension; ready on return."""
    whole = part.new_empty(size * part.shape[0], *part.shape[1:])
    all_gather(whole, part.contiguous(), group=group)
    return whole
