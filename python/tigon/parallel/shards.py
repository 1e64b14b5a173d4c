"""Who holds which classes, and that all processes of a group make the same call."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from tigon._deterministic import is_deterministic
from tigon.error import check
from tigon.ops.arguments import kind_of

# PyTorch renames them.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class Facts(NamedTuple):
    """What a process says of its call; every value but the last four must be that of all others."""

    rows: int = 0
    size: int = 0  # of a hidden state
    dtype: int = 0
    needs: int = 0  # which gradients
    options: int = 0
    target: int = 0
    refused: int = 0
    columns: int = 0
    first_class: int = -1
    vocab: int = -1


SAME = {
    "rows": "the number of rows",
    "size": "the hidden size",
    "dtype": "the dtype",
    "needs": "which tensors require grad",
    "options": "the options",
    "target": "target",
}
_COUNTS = ("rows", "size")  # the others are checksums and bits, which say nothing to a reader


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
        """Sum of each shard's class weights, float32 ``[size]``."""
        if class_weight is None:
            return _counts(self.reals, device)
        parts = [class_weight[a : a + n] for a, n in zip(self.firsts, self.reals, strict=True)]
        return torch.stack([part.double().sum() for part in parts]).float()


def code(value: object) -> int:
    """A number for a value that prints alike in every process."""
    return zlib.crc32(repr(value).encode())


def target_code(target: torch.Tensor, device) -> int:
    """A number for the labels of a call on the CPU; on a device calls are compared without them."""
    on_cpu = device.type == target.device.type == "cpu"
    return zlib.crc32(target.contiguous().numpy().tobytes()) if on_cpu else 0


@functools.cache
def _counts(columns: tuple[int, ...], device) -> torch.Tensor:
    """On the device once: a copy from the host would wait, and fail under capture."""
    return torch.tensor(columns, dtype=torch.float32, device=device)


# Of each group that lives: what its processes agreed on. They make the same calls and forget at the same one.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Facts, Layout]] = weakref.WeakKeyDictionary()
_AGREED_CALLS = 4096


def agree(op: str, group: object, device, describe: Callable[[], tuple[Facts, object]]):
    """``(Shards, what else describe returned)``, or an error on every process.

    ``describe`` checks this process's arguments. What it refuses is told to the others before it is raised,
    so that none of them waits. On the CPU the processes compare every call; on CUDA, where reading what the
    others said synchronises, the first call of each kind. Without the number of all classes another process
    alone may have other columns than before, so then they compare every call.

    Raises:
        tigon.Error: the group is none of this process, another process refused its arguments, or the
            processes make different calls.
    """
    check(op, isinstance(group, dist.ProcessGroup), "group must be a ProcessGroup, got {}", kind_of(group))
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    check(op, rank >= 0, "group must contain this process, got one that does not")
    refusal, result, facts = None, None, Facts(refused=1)
    try:
        facts, result = describe()
    except Exception as error:  # whatever it is, nobody waits for this process
        refusal = error
    agreed = _agreed.setdefault(group, {})
    lasting = device.type == "cuda" and (facts.vocab >= 0 or size == 1)
    if lasting and refusal is None and facts in agreed:
        return Shards(group, rank, *agreed[facts]), result
    said = _exchange(group, size, device, facts)
    if refusal is not None:
        raise refusal
    for other, other_facts in enumerate(said):
        check(op, not other_facts.refused, "process {} of the group has refused its arguments", other)
        for name, words in SAME.items():
            mine, theirs = getattr(facts, name), getattr(other_facts, name)
            given = f"{mine} here and {theirs}" if name in _COUNTS else "another"
            check(op, mine == theirs, "{} must be the same in all processes, got {} in process {}", words,
                  given, other)  # fmt: skip
    layout = _layout(op, said)
    if lasting:
        if len(agreed) == _AGREED_CALLS:
            agreed.clear()
        agreed[facts] = layout
    return Shards(group, rank, *layout), result


def _exchange(group, size, device, facts: Facts) -> list[Facts]:
    """The facts of every process."""
    if size == 1:
        return [facts]
    mine = torch.tensor(facts, dtype=torch.int64, device="cpu").to(device)
    return [Facts(*row) for row in gathered(mine[None], size, group).tolist()]


def _layout(op, said: list[Facts]) -> Layout:
    """The layout that all processes find alike, checked to hold every class once."""
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
    """The part of each of so many processes, one after another in the first dimension; ready on return."""
    whole = part.new_empty(size * part.shape[0], *part.shape[1:])
    _all_gather(whole, part.contiguous(), group=group)
    return whole


def _sum_in_order(parts: torch.Tensor, to: torch.Tensor) -> None:
    """The sum of every process's part; in a collective its order depends on an element's place."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    to.copy_(total)


class Work:
    """Collectives under way, each with the tensors that it reads and writes."""

    def __init__(self, shards: Shards) -> None:
        self.shards, self.pending = shards, []

    def _start(self, work, *tensors) -> None:
        self.pending.append((work, tensors))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """:func:`gathered` of the group."""
        return part if self.shards.size == 1 else gathered(part, self.shards.size, self.shards.group)

    def start_gather(self, part: torch.Tensor, whole: torch.Tensor | None = None):
        """A function that waits for :meth:`gather`'s result, in ``whole`` where that is given."""
        if self.shards.size == 1:
            return lambda: part
        if whole is None:
            whole = part.new_empty(self.shards.size * part.shape[0], *part.shape[1:])
        part = part.contiguous()
        work = _all_gather(whole, part, group=self.shards.group, async_op=True)

        def wait():
            work.wait()
            return whole if part is not None else None  # `part` lives as long as it is read

        return wait

    def start_all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the processes, in place; ready after :meth:`wait`."""
        if self.shards.size == 1:
            return
        if is_deterministic():
            _sum_in_order(self.gather(tensor[None]), tensor)
        else:
            self._start(dist.all_reduce(tensor, group=self.shards.group, async_op=True), tensor)

    def start_reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """``part`` = this process's rows of the sum of ``whole``; ready after :meth:`wait`."""
        if self.shards.size == 1:
            part.copy_(whole)
            return
        if is_deterministic():
            theirs = torch.empty_like(whole)
            dist.all_to_all_single(theirs, whole, group=self.shards.group)
            _sum_in_order(theirs.view(self.shards.size, *part.shape), part)
            return
        work = _reduce_scatter(part, whole, group=self.shards.group, async_op=True)
        self._start(work, whole, part)

    def wait(self, but: int = 0) -> None:
        """Let what follows on this stream see every result but the last ones."""
        while len(self.pending) > but:
            work, _ = self.pending.pop(0)
            work.wait()
