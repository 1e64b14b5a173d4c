"""Parameter lists of adamw: for the tests of ``tests/ops/test_adamw.py`` and for ``bench/optimizer.py``."""

import dataclasses

import torch

NAME = "adamw"


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Shapes of the parameters of a list, some of them misaligned views or permuted."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    layout: str = "contiguous"  # offset1, transposed

    def make(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[torch.nn.Parameter]:
        """Parameters of normal numbers."""
        draw = torch.Generator().manual_seed(seed)
        return [
            torch.nn.Parameter(self.lay_out(torch.randn(shape, generator=draw).to(device, dtype)))
            for shape in self.shapes
        ]

    def lay_out(self, x: torch.Tensor) -> torch.Tensor:
        """The same numbers in the list's layout."""
        if self.layout == "offset1":
            return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)
        if self.layout == "transposed" and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        return x


LISTS = [
    Parameters("odd", ((3, 5), (17,), (1,), (257, 129), (0,), (), (64, 64))),
    Parameters("aligned", ((64, 64), (128,), (16, 1032))),
    Parameters("chunks", ((5, 16384), (16385,), (16383,))),
    Parameters("misaligned", ((3, 5), (257, 129), (64, 64)), layout="offset1"),
    Parameters("permuted", ((3, 5, 7), (33, 65), (16, 4, 3, 3)), layout="transposed"),
    Parameters("some", tuple((1 + 37 * i % 200,) for i in range(100))),
    Parameters("many", tuple((1 + 37 * i % 200,) for i in range(600))),
]


def llama(
    hidden: int, intermediate: int, kv: int, layers: int, vocabulary: int
) -> tuple[tuple[int, ...], ...]:
    """Shapes of a Llama's parameters, its head apart from its embedding."""
    layer = (
        (hidden, hidden),
        (kv, hidden),
        (kv, hidden),
        (hidden, hidden),
        (intermediate, hidden),
        (intermediate, hidden),
        (hidden, intermediate),
        (hidden,),
        (hidden,),
    )
    return ((vocabulary, hidden), *(layer * layers), (hidden,), (vocabulary, hidden))


def llama_8b(layers: int = 32) -> tuple[tuple[int, ...], ...]:
    """LLaMA 3 8B, or its first layers."""
    return llama(4096, 14336, 1024, layers, 128256)


def many_small(count: int = 2000) -> tuple[tuple[int, ...], ...]:
    """Tensors of 4 to 100,000 elements, evenly by logarithm."""
    return tuple((int(4 * 25000 ** (i / (count - 1))),) for i in range(count))
