"""Lists of Muon's matrices, for the tests of ``tests/ops/test_muon.py``."""

import torch

NAME = "muon"
# Shape of a tensor, tensors of a list, elements before each in its memory.
LISTS = [
    ((64, 64), 3, 0),
    ((37, 61), 2, 0),
    ((48, 200), 2, 1),
    ((3, 11, 13), 2, 0),
    ((4, 160, 128), 1, 0),
    ((129, 257), 3, 0),
    ((1, 9), 700, 0),
    ((2, 128, 130), 2, 3),
]


def make(shape: tuple[int, ...], count: int, before: int, dtype: torch.dtype, seed: int) -> list:
    """Normal numbers."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel()
    memory = torch.randn(count, before + size, generator=draw).to(dtype)
    return [row.clone()[before:].view(shape) for row in memory]
