"""README and docs: links and prose are in order, code runs, names exist, the reference is complete.

The Python of a page runs as a reader pastes it: from top to bottom, in an interpreter and an empty folder of
its own, with the package and nothing of the tests. A block whose first line is `# Needs ...` or
`# Part of ...` is only compiled; its reason is that of a skipped test.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
import check_docs
import cpp_reference
import drawings

import tigon
from page import blocks

PAGES = [page for page in check_docs.pages() if page.parent == ROOT or ROOT / "docs" in page.parents]
NAME = re.compile(r"(?<![\w.:/-])tigon(?:\.[A-Za-z_]\w*)+")


def name_of(page: Path) -> str:
    """The page as a test's id."""
    return str(page.relative_to(ROOT))


def test_docs():
    """Links, anchors, paths, targets of make, prose."""
    assert check_docs.check_docs() == []


READ = {page: page.read_text(encoding="utf-8") for page in PAGES}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(READ[p])], ids=name_of)
def test_code(page, tmp_path):
    """The blocks of a page, one after the other."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"PYTHONPATH": str(Path(tigon.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/page.py"), str(page)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode == 3:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr


NOT_RUN = [
    pytest.param(reason, id=f"{name_of(page)}:{line}")
    for page, text in READ.items()
    for line, _, reason in blocks(text)
    if reason is not None
]


@pytest.mark.parametrize("reason", NOT_RUN)
def test_not_run(reason):
    """Blocks that are only compiled, counted."""
    pytest.skip(reason)


def test_nothing_is_hidden():
    """A reader has all that a page's code stands on."""
    assert [
        name_of(page) for page, text in READ.items() if "<!-- python" in text or "<!-- not run" in text
    ] == []
    other = re.compile(r"^```(?!python)\w*\n(?:from|import) \w", re.MULTILINE)  # code that is not run
    assert [name_of(page) for page, text in READ.items() if other.search(text)] == []


def test_cpp_compiles_as_printed(tmp_path):
    """The program of docs/cpp.md, against the headers of the tree."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (code,) = re.findall(r"^```cpp\n(.*?)^```$", READ[ROOT / "docs/cpp.md"], re.MULTILINE | re.DOTALL)
    (tmp_path / "main.cpp").write_text(code)
    command = [compiler, "-std=c++20", "-fsyntax-only", "-I", str(ROOT / "csrc"), str(tmp_path / "main.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_memory_by_model_and_length():
    """The table of docs/memory.md is what the function that it names computes."""
    rows = re.findall(
        r"^\| (?:[^|]*?, (\d+) x (\d+))? *\| (\d+)[^|]* \| ([\d.]+) \| ([\d.]+) \|$",
        READ[ROOT / "docs/memory.md"],
        re.MULTILINE,
    )
    assert len(rows) >= 10
    hidden = vocab = 0
    for width, classes, tokens, without, ours in rows:
        hidden, vocab = (int(width), int(classes)) if width else (hidden, vocab)
        need = tigon.linear_cross_entropy_memory(int(tokens), hidden, vocab, torch.bfloat16)
        assert f"{need.peak / 1e9:.1f}" == ours, (hidden, vocab, tokens)
        assert f"{12 * int(tokens) * vocab / 1e9:.1f}" == without


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
    text = "\n".join(READ[page] for page in PAGES if page.name != "CHANGELOG.md")  # that has what is gone
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
    assert len(re.findall(r"[^\s|-]+", (ROOT / "docs/known-gaps.md").read_text())) <= 1400


@pytest.mark.parametrize(
    "text, message",
    [
        ("[a](no/such.md)", "no file no/such.md"),
        ("[a](#nothing)\n# Something", "no heading #nothing"),
        ("`tools/nothing.py`", "no file tools/nothing.py"),
        ("`make nothing`", "no target of make: nothing"),
        ("It saves x alone.", "better only"),
        ("Fast; of one\npass; exact.", "not fragments between semicolons"),
        ("The product of W and x.", "better matmul"),
        ("Four rows less the first.", "better minus"),
        ("Saving stays PEFT's.", "better PEFT keeps it"),
        ("The loss of stock.", "better without Tigon"),
        (f"| {'word ' * 41}|\n|---|", "a cell of more than 200 characters"),
        ("A step takes 12 ms.", "'12 ms': link its record"),
        ("It is 1.5 times as fast.\n\n# Other\n\nNo record.", "'1.5 times as fast': link its record"),
        ("It is [1.5 times as fast](results/a.md).", "1.5 is not in results/a.md"),
        ("```sh\n.venv/bin/python bench/nothing.py\n```", "no file bench/nothing.py"),
    ],
)
def test_planted_violation(tmp_path, monkeypatch, text, message):
    """One page with one violation, and the same page without."""
    page = tmp_path / "docs/page.md"
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    monkeypatch.setattr(check_docs, "tracked", lambda root: [Path("docs/page.md")])
    (tmp_path / "Makefile").write_text("lint:\n")
    (tmp_path / "docs/results").mkdir(parents=True)
    (tmp_path / "docs/results/a.md").write_text("| 1.62x | 14.86x |\n")
    page.write_text(
        "# A page\n\nPlain text, `make lint`, [itself](#a-page), [15 times as fast](results/a.md).\n"
    )
    assert check_docs.check_docs() == []
    page.write_text(text + "\n")
    errors = check_docs.check_docs()
    assert len(errors) == 1
    assert message in errors[0]
