"""Moments of 8-bit codes in blocks of 256: plain PyTorch, blocks that processes share, other libraries' states.

Contract: ``csrc/tigon/ops/adamw/adamw.h``, "Codes".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist

from tigon.error import check, refuse
from tigon.ops.adamw import TensorList
from tigon.ops.grad_norm import is_dtensor, local

BLOCK = 256
SMALLEST = 4096  # elements of a parameter with codes, as bitsandbytes has it
# In a state. They are not PyTorch's names, so that no optimizer takes codes for moments.
AVG, AVG_MAX = "exp_avg_codes", "exp_avg_absmax"
ROOT, ROOT_MAX = "exp_avg_sq_root_codes", "exp_avg_sq_root_absmax"
NAMES = (AVG, AVG_MAX, ROOT, ROOT_MAX)
_ZERO = (127, 0)  # the codes of zero
_WRAPPED = "__bnb_optimizer_quant_state__"


def takes(p: torch.Tensor) -> bool:
    """Whether a parameter has codes where they are asked for: it is large and contiguous, and DTensors are cut
    along the first dimension."""
    if p.numel() < SMALLEST or not local(p).is_contiguous():
        return False
    return not is_dtensor(p) or all(_is_by_rows(x) or x.is_replicate() for x in p.placements)


def _is_by_rows(placement) -> bool:
    from torch.distributed.tensor import Shard

    return type(placement) is Shard and placement.dim == 0


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


# --- codes of values --------------------------------------------------------------------------


@functools.cache
def code_map(of_roots: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """The 256 values in order: those of exp_avg, or of the root of exp_avg_sq."""
    single, values = functools.partial(torch.tensor, dtype=torch.float32), []
    for decade in range(7):
        n = 2 ** (decade + of_roots)
        k = torch.arange(n + 1, dtype=torch.float64)
        step, low = ((single(1.0) - 0.1) / n).double(), single(0.1).double()
        grid = torch.where(k < (n + 1) // 2, low + step * k, 1 - step * (n - k)).float()
        values.append((grid[1:] + grid[:-1]) / 2 * single(10.0 ** (decade - 6)))
    signs = (1,) if of_roots else (1, -1)
    return torch.cat([single([0.0, 1.0]), *(s * x for s in signs for x in values)]).sort()[0].to(device)


def encode(x: torch.Tensor, of_roots: bool, absmax: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """(codes, absmax) of float32 values, flat and from the beginning of a block on, or of blocks [n, 256] with
    the absmax of each."""
    blocks = x if absmax is not None else _in_blocks(x)
    if absmax is None:
        absmax = blocks.abs().amax(1)
    absmax = torch.where(absmax.isfinite(), absmax, torch.nan)
    y = blocks * torch.where(absmax >= 2.0**-126, 1 / absmax, 0.0).unsqueeze(1)
    values = code_map(of_roots, x.device).double()
    codes = torch.bucketize(y.nan_to_num(0.0).double(), (values[1:] + values[:-1]) / 2, out_int32=True)
    if of_roots:
        codes = torch.where(blocks > 0, codes.clamp(min=1), 0)
    return codes.to(torch.uint8).reshape(-1)[: x.numel()].view_as(x), absmax


def decode(codes: torch.Tensor, absmax: torch.Tensor, of_roots: bool) -> torch.Tensor:
    """Moments of flat codes; of blocks [n, 256]."""
    blocks = codes if codes.dim() == 2 else _in_blocks(codes)
    x = code_map(of_roots, codes.device)[blocks.int()] * absmax.unsqueeze(1)
    return (x.square() if of_roots else x).reshape(-1)[: codes.numel()].view_as(codes)


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


# --- blocks that processes share --------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _shared_blocks(shape: torch.Size, parts: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks that a cut goes through where the rows are cut in so many parts, and each of them again."""
    ranges, row = [(0, shape[0])], shape[1:].numel()
    for n in parts:
        steps = [(a, b, -(-(b - a) // n)) for a, b in ranges]
        ranges = [(min(a + i * s, b), min(a + (i + 1) * s, b)) for a, b, s in steps for i in range(n)]
    cuts = {a * row for a, _ in ranges if 0 < a < shape[0]}
    return tuple(sorted({cut // BLOCK for cut in cuts if cut % BLOCK}))


def _parts(p: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """The dimensions of the mesh that cut a DTensor's rows, and their sizes."""
    if not is_dtensor(p):
        return ()
    return tuple((i, p.device_mesh.size(i)) for i, x in enumerate(p.placements) if x.is_shard())


@dataclasses.dataclass
class _Edge:
    """The part of a block that this process has."""

    codes: tuple[torch.Tensor, torch.Tensor]  # flat, views
    absmax: tuple[torch.Tensor, torch.Tensor]  # [1], views
    slot: int  # among the blocks of all parameters that are cut alike


class SharedBlocks:
    """The blocks of a list that other processes have a part of.

    Their elements are taken out of it as lists of their own with moments of float32, which one launch updates
    with the rest; then the processes find the largest of each block. So a block has the codes that one process
    would have given it.
    """

    def __init__(self, made: TensorList, owners: list[torch.Tensor], begins: list[int]) -> None:
        # By the mesh and its dimensions: edges, and the number of blocks that are shared.
        self._found: dict[tuple, tuple[list[_Edge], list[int]]] = {}
        self._moments: dict[tuple, list[torch.Tensor]] = {}
        cut = [self._blocks_of(p) if m.dtype == torch.uint8 else () for p, m in zip(owners, made.exp_avgs)]
        if any(cut):
            self._split(made, owners, begins, cut)

    @staticmethod
    def _blocks_of(p: torch.Tensor) -> tuple[int, ...]:
        parts = tuple(n for _, n in _parts(p))
        return _shared_blocks(p.shape, parts) if parts else ()

    def _split(self, made, owners, begins, cut) -> None:
        """Replaces each tensor that shares blocks by its parts."""
        flat, sizes, at = TensorList(), [], 0
        extras, absmaxes = iter(made.extras), iter(made.absmaxes)
        waiting: list[tuple[tuple, int]] = []  # places in the list of edges, whose moments come last
        for size in made.group_sizes:
            count = len(flat.params)
            for i in range(at, at + size):
                p, coded = made.params[i], made.exp_avgs[i].dtype == torch.uint8
                maxima = (next(absmaxes), next(absmaxes)) if coded else ()
                extra = next(extras) if made.extras and p.dtype != torch.float32 else None
                whole = [p, made.grads[i], made.exp_avgs[i], made.exp_avg_sqs[i], extra]
                if cut[i]:
                    whole = [None if t is None else t.reshape(-1) for t in whole]
                pieces = self._pieces(owners[i], begins[i], p.numel(), cut[i])
                for number, (begin, end, block) in enumerate(pieces):
                    p, grad, avg, sq, kept = (
                        t if t is None or not cut[i] else t[begin:end] for t in whole
                    )
                    if block is None:
                        first = (begins[i] + begin) // BLOCK - begins[i] // BLOCK if coded else 0
                        last = first - (begin - end) // BLOCK
                        flat.absmaxes += [m[first:last] for m in maxima] if cut[i] else maxima
                    else:
                        key, slot = self._slot(owners[i], cut[i], block)
                        mine = block - begins[i] // BLOCK
                        edge = _Edge((avg, sq), tuple(m[mine : mine + 1] for m in maxima), slot)
                        waiting.append((key, len(flat.params)))
                        self._found[key][0].append(edge)
                    for name, t in zip(("params", "grads", "exp_avgs", "exp_avg_sqs"), (p, grad, avg, sq)):
                        getattr(flat, name).append(t)
                    flat.extras += [] if kept is None else [kept]
                    step = made.steps[i]
                    flat.steps.append(step if number == 0 else step.clone())
                    flat.first += [made.first[i] + begin] if made.first else []
                if cut[i] and pieces:  # the next has other slots
                    self._slot(owners[i], cut[i], None)
                elif cut[i]:
                    self._slot(owners[i], cut[i], None)
            sizes.append(len(flat.params) - count)
            at += size
        flat.group_sizes, flat.hyperparameters, flat.lrs = sizes, made.hyperparameters, made.lrs
        vars(made).update(vars(flat))
        self._decode(made, waiting)
