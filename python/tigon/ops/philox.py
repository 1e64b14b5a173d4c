"""Random numbers of a counter and a seed, the same on every device: ``csrc/tigon/base/philox.inc``."""

from __future__ import annotations

import threading

import torch

from tigon.error import check
from tigon.ops.arguments import check_dense, check_integers, check_stored


def words(counter: list[torch.Tensor], seed: torch.Tensor) -> list[torch.Tensor]:
    """Philox4x32-10 (Salmon et al. 2011) on words held in int64."""
    low = 0xFFFFFFFF
    key0, key1 = seed & low, (seed >> 32) & low

    def multiply(a, b):  # without the sign bit of 64
        upper, lower = a * (b >> 16), a * (b & 0xFFFF)
        whole = (upper & 0xFFFF) * 65536 + lower
        return ((upper >> 16) + (whole >> 32)) & low, whole & low

    for _ in range(10):
        (high0, low0), (high2, low2) = multiply(0xD2511F53, counter[0]), multiply(0xCD9E8D57, counter[2])
        counter = [high2 ^ counter[1] ^ key0, low2, high0 ^ counter[3] ^ key1, low0]
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    return counter


def words_of_matrix(rows: torch.Tensor, columns: int, stream: int, seed: torch.Tensor) -> torch.Tensor:
    """One word for each element of a matrix, ``[len(rows), columns]`` in int64, four columns a counter.

    Args:
        rows: int64, the number of each row.
        stream: which of several matrices of one seed.
        seed: int64, of one element or one for each row.
    """
    block = torch.arange((columns + 3) // 4, device=rows.device)[None]
    row, block = torch.broadcast_tensors(rows[:, None], block)
    counter = [block, row & 0xFFFFFFFF, (row >> 32) & 0xFFFFFFFF, torch.full_like(row, stream)]
    return torch.stack(words(counter, seed.reshape(-1, 1)), -1).flatten(1)[:, :columns]


def draw_seed(x: torch.Tensor) -> torch.Tensor:
    """A seed on x's device, from PyTorch's generator."""
    draws = _around.__dict__.get("draws")
    return torch.randint(2**62, (1,), device=x.device) if draws is None else draws.next(x)


_around = threading.local()


class Draws:
    """Around calls of one function: the first one draws seeds, and later ones get the same."""

    def __init__(self):
        self.seeds: list[torch.Tensor] = []
        self.calls = 0

    def __enter__(self) -> Draws:
        self._outer, self._place = _around.__dict__.get("draws"), 0
        self.calls += 1
        _around.draws = self
        return self

    def __exit__(self, *_) -> None:
        _around.draws = self._outer

    def next(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == 1:
            self.seeds.append(torch.randint(2**62, (1,), device=x.device))
        self._place += 1
        return self.seeds[self._place - 1]


def seed_of(
    op: str, seed: int | torch.Tensor | None, x: torch.Tensor, rows: torch.Size | None = None
) -> torch.Tensor:
    """A seed on x's device, in int64 and one dimension: the given one, or one that is drawn for ``None``.

    Args:
        rows: the shape that seeds by row may have; ``None``: there is one seed.
    """
    if seed is None:
        return draw_seed(x)
    if not isinstance(seed, torch.Tensor):
        check_integers(op, seed=seed)
        return torch.full((1,), seed, dtype=torch.int64, device=x.device)
    check_dense(op, "seed", seed)
    check_stored(op, "seed", seed)
    fits = seed.dtype == torch.int64 and (seed.numel() == 1 or seed.shape == rows)
    given = seed.dtype, tuple(seed.shape)
    if rows is None:
        check(op, fits, "seed must be an int or one int64, got {} {}", *given)
    else:
        check(op, fits, "seed must be an int, one int64, or int64 {}, got {} {}", tuple(rows), *given)
    check(op, seed.device == x.device, "seed must be on {}, got {}", x.device, seed.device)
    return seed.reshape(-1)
