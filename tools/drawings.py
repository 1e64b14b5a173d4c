#!/usr/bin/env python3
"""Write the drawings of the pages, docs/drawings/*.svg: python tools/drawings.py"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "docs/drawings"
GREY, BLUE, ORANGE, PALE, INK = "#c9ccd1", "#3b6fb6", "#e8710a", "#fbe3cf", "#2b2f36"


class Drawing:
    """An SVG with a white ground, in one font."""

    def __init__(self, width: int, height: int):
        self.size = width, height
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, text: str = "", fill: str = "none", size: int = 12
    ) -> None:
        """A rectangle with lines of text in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" stroke="{INK}"/>'
        )
        self.text(x + w / 2, y + h / 2, text, size, "middle", "#fff" if fill in (BLUE, ORANGE) else INK)

    def text(
        self, x: float, y: float, text: str, size: int = 12, anchor: str = "start", colour: str = INK
    ) -> None:
        """Lines of text around the height y."""
        lines = text.split("\n") if text else []
        for n, line in enumerate(lines):
            at = y + (n - (len(lines) - 1) / 2) * size * 1.3 + size * 0.35
            look = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
            self.parts.append(f'<text x="{x:g}" y="{at:g}" {look}>{escape(line)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a head at its second end."""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{INK}" fill="none" marker-end="url(#head)"/>'
        )

    def curve(self, points: Iterable[tuple[float, float]], colour: str) -> None:
        """A polyline."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2.5" fill="none"/>')

    def svg(self) -> str:
        """The text of the file."""
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'font-family="system-ui, sans-serif">\n'
            f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def chunks() -> Drawing:
    """The loss head: one chunk of logits at a time."""
    d = Drawing(760, 330)
    d.text(85, 22, "hidden X [N, H]", 13, "middle")
    for n in range(4):
        d.box(45, 40 + 60 * n, 80, 54, f"chunk {n + 1}", PALE if n == 1 else "none")
    d.text(290, 22, "logits of one chunk [C, V]", 13, "middle")
    d.box(190, 100, 200, 54, "1  X W\u1d40   logits\n2  one pass: loss, dl in place", ORANGE)
    d.arrow(125, 127, 186, 127)
    for n in (0, 2, 3):
        d.box(190, 40 + 60 * n, 200, 54, "never in memory together", "#f4f5f7", 11)
    d.text(500, 22, "dX [N, H]", 13, "middle")
    for n in range(4):
        d.box(
            460,
            40 + 60 * n,
            80,
            54,
            "done" if n == 0 else ("3  dl W" if n == 1 else ""),
            PALE if n < 2 else "none",
        )
    d.arrow(390, 127, 456, 127)
    d.text(660, 22, "dW [V, H], float32", 13, "middle")
    d.box(600, 40, 120, 234, "4  dW += dl\u1d40 X\nsummed over\nthe chunks", PALE)
    d.arrow(540, 145, 596, 145)
    d.text(
        380,
        305,
        "Three matmuls in all. Stock holds the logits of all N rows, and their gradient.",
        13,
        "middle",
    )
    return d


def step() -> Drawing:
    """Memory over a training step, as a sketch."""
    d = Drawing(760, 340)
    d.text(380, 20, "Memory over one training step (a sketch)", 14, "middle")
    d.arrow(60, 290, 730, 290)
    d.arrow(60, 290, 60, 45)
    d.text(66, 50, "memory", 12)
    for x, text in ((190, "forward of the layers"), (400, "loss head"), (590, "backward of the layers")):
        d.text(x, 308, text, 12, "middle")
    for x in (330, 470):
        d.parts.append(f'<path d="M{x} 60V290" stroke="{GREY}" stroke-dasharray="4 4"/>')
    d.curve([(60, 230), (330, 150), (360, 80), (385, 65), (430, 65), (470, 138), (700, 215)], GREY)
    d.curve(
        [
            (60, 230),
            (330, 150),
            (345, 135),
            (365, 143),
            (380, 135),
            (400, 143),
            (415, 135),
            (435, 143),
            (470, 138),
            (700, 215),
        ],
        ORANGE,
    )
    d.text(480, 78, "stock: all logits and their gradients", 12)
    d.text(480, 122, "Tigon: one chunk of logits at a time", 12, "start", ORANGE)
    d.box(62, 230, 638, 58, "parameters and optimizer state", "#f4f5f7")
    d.text(245, 215, "activations", 12, "middle")
    return d


def patching() -> Drawing:
    """Recognition by structure."""
    d = Drawing(760, 240)
    columns = (20, 205, 390, 575)
    texts = (
        (
            "source of a forward",
            "x = x.to(float32)\nv = x.pow(2).mean(-1)\nx = x * rsqrt(v + eps)\nreturn w * x.to(dtype)",
        ),
        ("canonical expression", "helpers inlined\nspellings unified\noperands sorted\nattributes numbered"),
        ("table of forms", "llama, gemma, T5,\nLayerNorm, gated MLP,\nrotary, routers ..."),
        ("forward of the instance", 'tigon.rms_norm(\n  x, w, eps,\n  rounding="llama")'),
    )
    for n, (x, (title, text)) in enumerate(zip(columns, texts, strict=True)):
        d.text(x + 80, 30, title, 13, "middle")
        d.box(x, 50, 160, 110, text, PALE if n == 3 else "#f4f5f7", 12)
        if n:
            d.arrow(x - 23, 105, x - 3, 105)
    d.text(
        380,
        195,
        "Equal to a form of the table: replaced. Anything else stays stock, and the report says why.",
        13,
        "middle",
    )
    d.text(380, 217, "Names of models and classes are not used.", 13, "middle")
    return d


def layers() -> Drawing:
    """The layers, and the path of one call."""
    d = Drawing(760, 400)
    rows = (
        ("python/tigon/integrations", "recognise and replace parts of models", "tigon.apply(model)"),
        ("python/tigon/ops, nn, optim", "arguments, reference, autograd", "tigon.rms_norm(x, w)"),
        (
            "csrc/tigon/torch/op.cpp",
            "schema, tensors as views, results: by the list of fields",
            "torch.ops.tigon.rms_norm_fwd",
        ),
        (
            "csrc/tigon/ops/*/*.h, base/op.h",
            "the list of fields: all checks; device",
            "tigon::rms_norm_fwd(ctx, args)",
        ),
        ("*_cpu.cpp, *_cuda.cu", "loops, tasks, launches", "cuda::rms_norm_fwd"),
        ("*_math.inc", "the formula, once for all devices", "h * (offset + weight)"),
    )
    d.text(20, 20, "layer", 13)
    d.text(500, 20, "one call", 13)
    for n, (folder, what, call) in enumerate(rows):
        y = 40 + 56 * n
        d.box(20, y, 440, 42, f"{folder}\n{what}", PALE if n < 2 else "#f4f5f7", 12)
        d.box(500, y, 240, 42, call, "none", 12)
        if n:
            d.arrow(240, y - 14, 240, y - 2)
            d.arrow(620, y - 14, 620, y - 2)
    d.text(380, 385, "C++ programs enter at the fourth layer. Includes point down only.", 13, "middle")
    return d


DRAWINGS = {f"{draw.__name__}.svg": draw for draw in (chunks, step, patching, layers)}


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
