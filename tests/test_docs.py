"""README and docs: links and prose are in order, code runs, names exist, the reference is complete.

The Python of a page runs from top to bottom in one namespace, in a folder of its own. `<!-- python ... -->`
holds code that a reader need not see; `<!-- not run: REASON -->` before a block says why it is only compiled.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
import check_docs
import cpp_reference
import drawings

import tigon

BLOCK = re.compile(
    r"^<!-- python\n(?P<hidden>.*?)^-->$"
    r"|(?:^<!-- not run: (?P<reason>[^\n]+) -->\n+)?^```python[^\n]*\n(?P<shown>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PAGES = [page for page in check_docs.pages() if page.parent == ROOT or ROOT / "docs" in page.parents]
NAME = re.compile(r"(?<![\w.:/-])tigon(?:\.[A-Za-z_]\w*)+")


def blocks(text: str) -> list[tuple[int, str, str | None]]:
    """Line, code and reason not to run it, of every block of a page."""
    found = []
    for match in BLOCK.finditer(text):
        group = "hidden" if match["shown"] is None else "shown"
        found.append((check_docs.line_of(text, match.start(group)), match[group], match["reason"]))
    return found


def name_of(page: Path) -> str:
    """The page as a test's id."""
    return str(page.relative_to(ROOT))


def test_docs():
    """Links, anchors, paths, targets of make, prose."""
    assert check_docs.check_docs() == []


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p.read_text())], ids=name_of)
def test_code(page, tmp_path, monkeypatch):
    """The blocks of a page, one after the other."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "docs"}
    for line, code, reason in blocks(page.read_text()):
        compiled = compile("\n" * (line - 1) + code, str(page), "exec")
        if reason is None:
            exec(compiled, namespace)


RESOLVE = """
import sys, tigon
for name in sys.stdin.read().split():
    found = tigon
    try:
        for part in name.split(".")[1:]:
            found = getattr(found, part)
    except AttributeError:
        print(name)
    except ModuleNotFoundError as error:  # of another package, which is not installed here
        if error.name.startswith("tigon"):
            print(name)
"""


def test_names():
    """`tigon.x.y` in text and code is something for a user who has written `import tigon` and no more."""
    text = "\n".join(page.read_text() for page in PAGES)
    names = set(NAME.findall(re.sub(r"^::: .*", "", text, flags=re.MULTILINE)))  # those are paths of files
    names -= {"tigon.my_op"}  # docs/adding-an-op.md
    run = subprocess.run(
        [sys.executable, "-c", RESOLVE], input=" ".join(sorted(names)), capture_output=True, text=True
    )
    assert (run.returncode, run.stdout.split()) == (0, []), run.stderr


def test_reference_is_complete():
    """The reference has each public name of tigon, nn, optim and parallel, once, and an example that runs."""
    public = {f"tigon.{name}" for name in tigon.__all__ if name not in ("nn", "optim")}
    for module in ("nn", "optim", "parallel"):
        public |= {f"tigon.{module}.{name}" for name in importlib.import_module(f"tigon.{module}").__all__}
    reference = [page.read_text() for page in sorted((ROOT / "docs/reference").glob("*.md"))]
    documented = re.findall(
        r"^::: (?:tigon\S+\n(?:    .*\n)*?      heading: )?(tigon\S+)", "\n".join(reference), re.MULTILINE
    )
    assert sorted(documented) == sorted(set(documented)), "twice"
    assert public <= set(documented)
    code = "".join(code for page in reference for _, code, reason in blocks(page) if reason is None)
    shown = {name for name in public if re.search(rf"\b{name.rpartition('.')[2]}\b", code)}
    assert sorted(public - shown) == [], "without an example"


def test_drawings_are_current():
    """docs/drawings is what tools/drawings.py draws: else run it."""
    committed = {path.name: path.read_text(encoding="utf-8") for path in drawings.FOLDER.iterdir()}
    assert committed == {name: draw().svg() for name, draw in drawings.DRAWINGS.items()}


def test_cpp_reference():
    """Each header of an op has its contract and declarations, and no body of a function."""
    for folder in sorted((ROOT / "csrc/tigon/ops").iterdir()):
        header = folder / f"{folder.name}.h"
        if not header.exists():
            continue
        page, text = cpp_reference.section(header), header.read_text()
        essay = text.partition("#pragma once")[0]
        assert page.startswith(f"## {folder.name}\n") and '<table class="contract">' in page, header
        assert "Fields& f" not in page and "TIGON_API_OP" not in page and "namespace tigon" not in page, (
            header
        )
        structs = set(re.findall(r"^struct (\w+(?:Fwd|Bwd)) \{", text, re.MULTILINE))
        assert structs <= set(re.findall(r"^struct (\w+) \{", page, re.MULTILINE)), header
        fields = re.findall(r"^// ([A-Z][a-z]+(?: [a-z]+)?) +(?<=^.{15})\S", essay, re.MULTILINE)
        assert len(fields) >= 3 and page.count("<tr><th>") == len(fields), header


def test_lengths():
    """The pages that have to be short are."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    assert len(re.findall(r"[^\s|-]+", (ROOT / "docs/known-gaps.md").read_text())) <= 1200


@pytest.mark.parametrize(
    "text, message",
    [
        ("[a](no/such.md)", "no file no/such.md"),
        ("[a](#nothing)\n# Something", "no heading #nothing"),
        ("`tools/nothing.py`", "no file tools/nothing.py"),
        ("`make nothing`", "no target of make: nothing"),
        ("It saves x alone.", "better only"),
        ("Fast; of one\npass; exact.", "not fragments between semicolons"),
        (f"| {'word ' * 41}|\n|---|", "a cell of more than 200 characters"),
        ("A step takes 12 ms.", "'12 ms': link its record"),
        ("It is 1.5 times as fast.\n\n# Other\n\nNo record.", "'1.5 times as fast': link its record"),
        ("It is [1.5 times as fast](docs/results/a.md).", "1.5 is not in docs/results/a.md"),
        ("```sh\n.venv/bin/python bench/nothing.py\n```", "no file bench/nothing.py"),
    ],
)
def test_planted_violation(tmp_path, monkeypatch, text, message):
    """One page with one violation, and the same page without."""
    page = tmp_path / "page.md"
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    monkeypatch.setattr(check_docs, "tracked", lambda root: [Path("page.md")])
    (tmp_path / "Makefile").write_text("lint:\n")
    (tmp_path / "docs/results").mkdir(parents=True)
    (tmp_path / "docs/results/a.md").write_text("| 1.62x | 14.86x |\n")
    page.write_text(
        "# A page\n\nPlain text, `make lint`, [itself](#a-page), [15 times as fast](docs/results/a.md).\n"
    )
    assert check_docs.check_docs() == []
    page.write_text(text + "\n")
    errors = check_docs.check_docs()
    assert len(errors) == 1
    assert message in errors[0]
