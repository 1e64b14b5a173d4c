"""Moments of 8-bit codes: plain PyTorch, blocks that processes share, states of other libraries.

Contract: ``csrc/tigon/ops/adamw/adamw.h``, "Codes".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist

from tigon._op import cached_tensor
from tigon.error import check
from tigon.ops.adamw import TensorList
from tigon.ops.grad_norm import is_dtensor, local, process_groups

BLOCK = 256
SMALLEST = 4096  # elements of a parameter with codes, as bitsandbytes has it
# In a state. They are not PyTorch's names, so that no optimizer takes codes for moments.
AVG, AVG_MAX = "exp_avg_codes", "exp_avg_absmax"
ROOT, ROOT_MAX = "exp_avg_sq_root_codes", "exp_avg_sq_root_absmax"
NAMES, MAXIMA = (AVG, AVG_MAX, ROOT, ROOT_MAX), (AVG_MAX, ROOT_MAX)
_ZERO = (127, 0)  # the codes of zero
_WRAPPED = "__bnb_optimizer_quant_state__"


def takes(p: torch.Tensor) -> bool:
    """Whether a parameter has codes where they are asked for: a large and contiguous one, a DTensor cut along
    the first dimension."""
    if p.numel() < SMALLEST or not local(p).is_contiguous():
        return False
    return _is_by_rows(p)


def _is_by_rows(p: torch.Tensor) -> bool:
    """Whether the elements of a process follow each other in the whole."""
    if not is_dtensor(p):
        return True
    from torch.distributed.tensor import Shard

    return all((type(x) is Shard and x.dim == 0) or x.is_replicate() for x in p.placements)


def blocks_of(p: torch.Tensor, begin: int) -> tuple[int, int]:
    """The first block of a local part that begins at an element of the whole, and the one after the last."""
    n = local(p).numel()
    return begin // BLOCK, -(-(begin + n) // BLOCK) if n else begin // BLOCK


def make(state: dict, p: torch.Tensor, begin: int) -> None:
    """The codes of moments that are zero."""
    first, end = blocks_of(p, begin)
    for (name, name_max), zero in zip(((AVG, AVG_MAX), (ROOT, ROOT_MAX)), _ZERO, strict=True):
        state[name] = torch.zeros_like(p, dtype=torch.uint8)
        local(state[name]).fill_(zero)
        state[name_max] = torch.zeros(end - first, dtype=torch.float32, device=p.device)


def listed(states: list[dict]) -> tuple[list, list, list]:
    """The moments or codes of each parameter, and absmax of the codes. Raises KeyError if it has neither."""
    avgs = [state[AVG if AVG in state else "exp_avg"] for state in states]
    sqs = [state[ROOT if ROOT in state else "exp_avg_sq"] for state in states]
    return avgs, sqs, [state[name] for state in states if AVG in state for name in MAXIMA]


# --- codes of values --------------------------------------------------------------------------


@cached_tensor
def code_map(of_roots: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """The 256 values in order: those of exp_avg, or of the root of exp_avg_sq."""
    single, values = functools.partial(torch.tensor, dtype=torch.float32, device="cpu"), []
    for decade in range(7):
        n = 2 ** (decade + of_roots)
        k = torch.arange(n + 1, dtype=torch.float64, device="cpu")
        step, low = ((single(1.0) - 0.1) / n).double(), single(0.1).double()
        grid = torch.where(k < (n + 1) // 2, low + step * k, 1 - step * (n - k)).float()
        values.append((grid[1:] + grid[:-1]) / 2 * single(10.0 ** (decade - 6)))
    signs = (1,) if of_roots else (1, -1)
    return torch.cat([single([0.0, 1.0]), *(s * x for s in signs for x in values)]).sort()[0].to(device)


def encode(x: torch.Tensor, of_roots: bool, absmax: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """(codes, absmax) of float32 values, flat from the beginning of a block on, or of blocks [n, 256] with
    the absmax of each."""
    blocks = x if absmax is not None else _in_blocks(x)
    if absmax is None:
        absmax = blocks.abs().amax(1)
    absmax = finite_or_nan(absmax)
    factor = torch.where(absmax >= 2.0**-126, torch.ones_like(absmax) / absmax, 0.0)
    y = blocks * factor.unsqueeze(1)
    values = code_map(of_roots, x.device).double()
    codes = torch.bucketize(y.nan_to_num(0.0).double(), (values[1:] + values[:-1]) / 2, out_int32=True)
    if of_roots:
        codes = torch.where(blocks > 0, codes.clamp(min=1), 0)
    return codes.to(torch.uint8).reshape(-1)[: x.numel()].view_as(x), absmax


def root(x: torch.Tensor) -> torch.Tensor:
    """The square root in float32, rounded correctly: PyTorch's on the CPU may be 3 ulp away."""
    return x.double().sqrt().float()


def decode(codes: torch.Tensor, absmax: torch.Tensor, of_roots: bool) -> torch.Tensor:
    """Moments of flat codes; of blocks [n, 256]."""
    blocks = codes if codes.dim() == 2 else _in_blocks(codes)
    x = code_map(of_roots, codes.device)[blocks.int()] * absmax.unsqueeze(1)
    return (x.square() if of_roots else x).reshape(-1)[: codes.numel()].view_as(codes)


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


# --- blocks that processes share --------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _cut_blocks(shape: torch.Size, parts: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks that are cut if rows are cut in so many parts, and each of these again."""
    ranges, row = [(0, shape[0])], shape[1:].numel()
    for n in parts:
        steps = [(a, b, -(-(b - a) // n)) for a, b in ranges]
        ranges = [
            (min(a + i * step, b), min(a + (i + 1) * step, b)) for a, b, step in steps for i in range(n)
        ]
    cuts = {a * row for a, _ in ranges if 0 < a < shape[0]}
    return tuple(sorted({cut // BLOCK for cut in cuts if cut % BLOCK}))


def _shared_blocks_of(p: torch.Tensor) -> tuple[int, ...]:
    if not is_dtensor(p):
        return ()
    mesh = p.device_mesh
    return _cut_blocks(p.shape, tuple(mesh.size(i) for i, x in enumerate(p.placements) if x.is_shard()))


@dataclasses.dataclass
class _Edge:
    """The part of a shared block that this process has."""

    codes: tuple[torch.Tensor, torch.Tensor]  # flat views
    absmax: tuple[torch.Tensor, torch.Tensor]  # views of one element
    groups: tuple  # of the processes that share it
    slot: int  # its number among the blocks that they share
    place: int  # in the list


class SharedBlocks:
    """The blocks of a list of which other processes have a part.

    Their elements become tensors of their own in the list, with moments of float32, so that the same launch
    updates them. :meth:`join` finds the largest of each block among the processes, and writes the codes that
    one process would have written.
    """

    def __init__(self, made: TensorList, owners: list[torch.Tensor], begins: list[int]) -> None:
        self._edges: list[_Edge] = []
        self._counts: dict[tuple, int] = {}  # of blocks, by the groups that share them
        coded = [avg.dtype == torch.uint8 for avg in made.exp_avgs]
        shared = [_shared_blocks_of(p) if c else () for p, c in zip(owners, coded, strict=True)]
        if not any(shared):
            return
        new = TensorList(hyperparameters=made.hyperparameters, lrs=made.lrs)
        numbers = iter(range(len(owners)))
        extras, absmaxes = iter(made.extras), iter(made.absmaxes)
        for size in made.group_sizes:
            before = len(new.params)
            for i in itertools.islice(numbers, size):
                streams = [made.params[i], made.grads[i], made.exp_avgs[i], made.exp_avg_sqs[i]]
                if made.extras and streams[0].dtype != torch.float32:
                    streams.append(next(extras))
                maxima = [next(absmaxes), next(absmaxes)] if coded[i] else []
                first = made.first[i] if made.first else None
                if shared[i]:
                    groups = process_groups(owners[i])
                    whole = {"step": made.steps[i], "first": first, "begin": begins[i]}
                    self._split(new, streams, maxima, **whole, shared=shared[i], groups=groups)
                else:
                    _append(new, streams, maxima, made.steps[i], first)
            new.group_sizes.append(len(new.params) - before)
        vars(made).update(vars(new))
        self._decode(made)

    def _split(self, new: TensorList, streams, maxima, *, step, first, begin: int, shared, groups) -> None:
        """Appends a tensor in parts: what is in shared blocks, and what is between them."""
        slots = {block: self._counts.get(groups, 0) + k for k, block in enumerate(shared)}
        self._counts[groups] = self._counts.get(groups, 0) + len(shared)
        self._device = streams[0].device
        flat, size = [t.reshape(-1) for t in streams], streams[0].numel()
        cuts = {min(max(edge * BLOCK - begin, 0), size) for b in shared for edge in (b, b + 1)}
        cuts = sorted(cuts | {0, size})
        # A tensor without elements counts its step.
        for a, b in itertools.pairwise(cuts) if size else [(0, 0)]:
            block = (begin + a) // BLOCK
            number = block - begin // BLOCK
            parts = [t[a:b] for t in flat]
            if block in slots and size:
                maximum = tuple(x[number : number + 1] for x in maxima)
                edge = _Edge(tuple(parts[2:4]), maximum, groups, slots[block], len(new.params))
                self._edges.append(edge)
                own = []
            else:
                own = [x[number : number + -(-(b - a) // BLOCK)] for x in maxima]
            _append(new, parts, own, step if a == 0 else step.clone(), None if first is None else first + a)

    def _decode(self, made: TensorList) -> None:
        """Gives the list moments of float32 for the edges."""
        if not self._edges:
            return
        like, count, self._blocks = self._edges[0].absmax[0], len(self._edges), []
        for k, moments in enumerate((made.exp_avgs, made.exp_avg_sqs)):
            codes = like.new_full((count, BLOCK), _ZERO[k], dtype=torch.uint8)
            torch._foreach_copy_(self._own(codes, k), [edge.codes[k] for edge in self._edges])
            absmax = torch.cat([edge.absmax[k] for edge in self._edges])
            values = decode(codes, absmax, of_roots=k == 1)
            for edge, own in zip(self._edges, self._own(values, k), strict=True):
                moments[edge.place] = own
            self._blocks.append((codes, absmax, values))

    def _own(self, blocks: torch.Tensor, k: int) -> list[torch.Tensor]:
        """The elements of each edge, of one of the moments."""
        return [row[: edge.codes[k].numel()] for row, edge in zip(blocks, self._edges, strict=True)]

    def join(self, found_inf: torch.Tensor | None) -> None:
        """Write the codes of the edges if an update was done. Each process calls it."""
        if not self._counts:
            return
        edges = self._edges
        values = [root(v) if k else v for k, (_, _, v) in enumerate(self._blocks)] if edges else []
        own = [finite_or_nan(x.abs().amax(1)).view(torch.int32) for x in values]
        most = [[None] * len(edges) for _ in own]
        for groups, count in self._counts.items():
            mine = {edge.slot: j for j, edge in enumerate(edges) if edge.groups == groups}
            bits = self._largest(groups, count, mine, own)
            for k, row in enumerate(bits if mine else ()):
                for slot, j in mine.items():
                    most[k][j] = row[slot]
        for k, (codes, absmax, _) in enumerate(self._blocks if edges else ()):
            found = encode(values[k], k == 1, torch.stack(most[k]).view(torch.float32))
            if found_inf is not None:
                skipped = found_inf.reshape(()).to(absmax.device) != 0
                found = [torch.where(skipped, *pair) for pair in zip((codes, absmax), found, strict=True)]
            torch._foreach_copy_([edge.codes[k] for edge in edges], self._own(found[0], k))
            torch._foreach_copy_([edge.absmax[k] for edge in edges], list(found[1].split(1)))

    def _largest(self, groups, count: int, mine: dict[int, int], own) -> torch.Tensor:
        """The largest of each of `count` blocks, of both moments: bits of floats that are not negative are in
        their order, and those of NaN above all."""
        zero = own[0].new_zeros(()) if own else torch.zeros((), dtype=torch.int32, device=self._device)
        rows = [[own[k][mine[slot]] if slot in mine else zero for slot in range(count)] for k in range(2)]
        bits = torch.stack([torch.stack(row) for row in rows])
        for group in groups:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group)
        return bits


def _append(new: TensorList, streams, maxima, step, first) -> None:
    for name, t in zip(("params", "grads", "exp_avgs", "exp_avg_sqs", "extras"), streams, strict=False):
        getattr(new, name).append(t)
    new.absmaxes += maxima
    new.steps.append(step)
    new.first += [] if first is None else [first]


def finite_or_nan(absmax: torch.Tensor) -> torch.Tensor:
    """NaN, always the same one, if it is not finite."""
    return torch.where(absmax.isfinite(), absmax, torch.nan)


def whole_absmax(p: torch.Tensor, absmax: torch.Tensor, begin: int) -> torch.Tensor:
    """The absmax of all blocks of a DTensor, in every process that has a part of it."""
    first, end = blocks_of(p, begin)
    bits = absmax.new_zeros(-(-p.numel() // BLOCK), dtype=torch.int32)
    bits[first:end] = finite_or_nan(absmax).view(torch.int32)
    for group in process_groups(p):
        dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return bits.view(torch.float32)


# --- states that were saved -------------------------------------------------------------------


def known(op: str, saved: dict) -> dict:
    """A saved state with moments under our names or PyTorch's; bitsandbytes' and torchao's are converted."""
    step = {"step": saved["step"]} if "step" in saved else {}
    if _WRAPPED in saved or "state1" in saved:
        saved = saved | saved.get(_WRAPPED, {})
        adams = "state2" in saved and saved["state1"].shape == saved["state2"].shape
        check(op, adams, "a state of bitsandbytes must be Adam's, with state1 and state2 of one size")
        if saved["state1"].dtype != torch.uint8:
            return step | {"exp_avg": saved["state1"], "exp_avg_sq": saved["state2"]}
        return step | _converted(*([saved[f"{n}{k}"] for n in ("state", "absmax", "qmap")] for k in (1, 2)))
    moments = [saved.get(name) for name in ("exp_avg", "exp_avg_sq")]
    if not all(hasattr(local(x), "dequantize") and hasattr(local(x), "scale") for x in moments):
        return saved
    alone = not any(map(is_dtensor, moments))
    check(op, alone, "a state of torchao must be that of one process, got DTensors")
    if all(hasattr(x, "qmap") and x.codes.numel() == BLOCK * x.scale.numel() for x in moments):
        return step | _converted(*((x.codes, x.scale, x.qmap) for x in moments))
    return step | {n: x.dequantize() for n, x in zip(("exp_avg", "exp_avg_sq"), moments, strict=True)}


def _converted(avg: Iterable[torch.Tensor], sq: Iterable[torch.Tensor]) -> dict:
    """Codes, absmax and map of exp_avg and of exp_avg_sq as ours, those of the root."""
    codes, absmax, values = avg
    shape = codes.shape
    if not torch.allclose(values, code_map(False, values.device), rtol=1e-5, atol=0.0):
        codes, absmax = encode(_looked_up(codes, absmax, values), False)
    roots, root_absmax = encode(root(_looked_up(*sq)), True)
    return dict(zip(NAMES, (codes.view(shape), absmax, roots.view(shape), root_absmax), strict=True))


def _looked_up(codes: torch.Tensor, absmax: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Flat values of codes with a map of their own."""
    return (_in_blocks(values[codes.reshape(-1).int()]) * absmax.view(-1, 1)).view(-1)[: codes.numel()]


def known_group(group: dict) -> dict:
    """A saved group without the options of bitsandbytes' other optimizers, which AdamW8bit saves unused."""
    return {k: v for k, v in group.items() if k not in ("alpha", "t_alpha", "t_beta3") or v}


def check_saved(op: str, p: torch.Tensor, saved: dict) -> None:
    """Check that codes belong to the parameter."""
    if AVG not in saved:
        return
    whole = all(name in saved for name in NAMES)
    check(op, whole, "a state with codes must have {}, got {}", NAMES, (*saved,))
    for name in (AVG, ROOT):
        value = saved[name]
        check(op, value.dtype == torch.uint8, name + " must be uint8, got {}", value.dtype)
        words = name + " must have the sizes of its param, {}, got {}"
        check(op, value.shape == p.shape, words, p.shape, value.shape)
    for name in MAXIMA:
        size, blocks = saved[name].numel(), -(-p.numel() // BLOCK)
        check(op, size == blocks, name + " must have an element for each of {} blocks, got {}", blocks, size)


def own_absmax(p: torch.Tensor, whole: torch.Tensor, begin: int) -> torch.Tensor:
    """The absmax of this process' blocks, of that of the whole parameter."""
    first, end = blocks_of(p, begin)
    return whole.view(-1)[first:end].to(p.device, torch.float32, copy=True)


def _like(p: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A tensor with p's sizes, and its placements, of the elements that this process has."""
    made = torch.empty_like(p, dtype=flat.dtype, memory_format=torch.contiguous_format)
    local(made).view(-1).copy_(flat)
    return made


def _blocks_by_element(p: torch.Tensor) -> torch.Tensor:
    """The block of each element of a DTensor's local part, however it is cut."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    place = torch.zeros((), dtype=torch.int64, device=p.device)
    for size, own, offset in zip(p.shape, local(p).shape, offsets, strict=True):
        along = torch.arange(offset, offset + own, device=p.device)
        place = place.unsqueeze(-1) * size + along
    return place // BLOCK


def decoded(saved: dict, p: torch.Tensor, begin: int) -> dict:
    """A saved state of codes with float32 moments instead."""
    rest = {name: value for name, value in saved.items() if name not in NAMES}
    by_rows = _is_by_rows(p)
    for name, name_codes, name_max in (("exp_avg", AVG, AVG_MAX), ("exp_avg_sq", ROOT, ROOT_MAX)):
        codes, of_roots = local(saved[name_codes]).to(p.device), name == "exp_avg_sq"
        if by_rows:
            skip = begin % BLOCK if codes.numel() else 0  # elements of the first block that others have
            padded = torch.nn.functional.pad(codes.reshape(-1), (skip, 0))
            flat = decode(padded, own_absmax(p, saved[name_max], begin), of_roots)[skip:]
        else:
            absmax = saved[name_max].view(-1).to(p.device)[_blocks_by_element(p)]
            flat = (code_map(of_roots, p.device)[codes.int()] * absmax).reshape(-1)
            flat = flat.square() if of_roots else flat
        rest[name] = _like(p, flat)
    return rest


def encoded(saved: dict, p: torch.Tensor, begin: int) -> dict:
    """A saved state of moments with codes instead. Each process that has a part of the parameter calls it."""
    rest = {name: value for name, value in saved.items() if name not in ("exp_avg", "exp_avg_sq")}
    first, end = blocks_of(p, begin)
    for name, name_codes, name_max in (("exp_avg", AVG, AVG_MAX), ("exp_avg_sq", ROOT, ROOT_MAX)):
        flat = local(saved[name]).to(p.device, torch.float32).reshape(-1)
        size, of_roots = flat.numel(), name == "exp_avg_sq"
        skip = begin % BLOCK if size else 0
        blocks = torch.nn.functional.pad(root(flat) if of_roots else flat, (skip, -(skip + size) % BLOCK))
        blocks = blocks.view(-1, BLOCK)
        absmax = whole_absmax(p, blocks.abs().amax(1), begin)
        codes, _ = encode(blocks, of_roots, absmax[first:end])
        rest[name_codes] = _like(p, codes.view(-1)[skip : skip + size])
        rest[name_max] = absmax
    return rest


def bitsandbytes_state(state: dict) -> dict:
    """A state as bitsandbytes' AdamW8bit saves it."""
    saved = {"step": int(state["step"])}
    if AVG not in state:
        return saved | {_WRAPPED: {"state1": state["exp_avg"].float(), "state2": state["exp_avg_sq"].float()}}
    sq, sq_absmax = encode(decode(state[ROOT].reshape(-1), state[ROOT_MAX], True), True)
    device = sq.device
    maps = (code_map(signed, device).clone() for signed in (False, True))
    values = (state[AVG], sq.view_as(state[ROOT]), *maps, state[AVG_MAX], sq_absmax)
    names = ("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2")
    return saved | {_WRAPPED: dict(zip(names, values, strict=True))}
