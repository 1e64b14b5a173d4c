#!/usr/bin/env python3
"""Runs notebooks of jupytext's percent format and saves each with its outputs, as FILE.ipynb next to FILE.py.

    python tools/run_notebook.py examples/notebooks/fine_tune.py

All cells run in this process, one notebook after the other, in a folder that is thrown away. It needs no
Jupyter. Standard output, figures and the value of a cell's last line are kept; progress bars are not.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

MARK = re.compile(r"^# %%(?P<kind> \[markdown\])?\n", re.MULTILINE)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def lines(text: str) -> list[str]:
    """A text as notebooks keep it."""
    return text.splitlines(keepends=True)


def cells_of(text: str) -> list[dict]:
    """The cells of a notebook in the percent format, without outputs."""
    marks = list(MARK.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    found: list[dict] = []
    for mark, end in zip(marks, ends, strict=True):
        source = text[mark.end() : end].strip("\n")
        cell = {"id": f"cell-{len(found)}", "metadata": {}}
        if mark["kind"]:
            cell |= {"cell_type": "markdown", "source": lines(re.sub("(?m)^# ?", "", source))}
        else:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": [], "source": lines(source)}
        found.append(cell)
    return found


def shown(value: object) -> dict:
    """A value as text, and as HTML if it has such a form."""
    data = {"text/plain": lines(repr(value))}
    html = getattr(value, "_repr_html_", None)
    return data | ({} if html is None else {"text/html": lines(html())})


def figures() -> list[dict]:
    """The open figures of matplotlib, which are closed."""
    plt = sys.modules.get("matplotlib.pyplot")
    found = []
    for number in [] if plt is None else plt.get_fignums():
        png = io.BytesIO()
        plt.figure(number).savefig(png, format="png", dpi=110)
        found.append({"image/png": base64.b64encode(png.getvalue()).decode()})
        plt.close(number)
    return found


def run_cell(cell: dict, number: int, namespace: dict) -> None:
    """Run a cell of code and give it its outputs."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)
    cell["execution_count"] = number
    if printed.getvalue():
        stream = {"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())}
        cell["outputs"].append(stream)
    for data in figures():
        cell["outputs"].append({"output_type": "display_data", "metadata": {}, "data": data})
    if value is not None:
        result = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        cell["outputs"].append(result | {"data": shown(value)})


def run(path: Path) -> dict:
    """The notebook with its outputs."""
    cells = cells_of(path.read_text(encoding="utf-8"))
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), 1):
        print(f"{path.name}, cell {number}", file=sys.stderr)
        run_cell(cell, number, namespace)
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def main(names: list[str]) -> int:
    """Run each notebook and write what it shows."""
    os.environ["MPLBACKEND"] = "agg"
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        # Trainer writes its losses through the bar, which is not kept.
        tqdm.write = classmethod(lambda cls, text, *_, **__: print(text, file=sys.stderr))
    for path in [Path(name).resolve() for name in names]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            notebook = run(path)
            os.chdir(path.parent)
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        path.with_suffix(".ipynb").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
