"""The lint of comments finds what it is for, and lets sentences pass."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import check_comments

LONG = "x" * 100
FOUND = {
    f"int a;  // {LONG}\n": ["1: a comment past column 110"],
    "// A sentence is here.\n//\n// And another one.\n": ["2: an empty comment line"],
    'auto s = "// beside";\n// Rows lie beside it.\n': ["2: 'beside' in a comment"],
    "int a;  // the same bits\n": ["1: 'same bits' in a comment"],
    "// Of each tensor\n// of a list.\nint a;\n": ["1: 'Of each tensor of a list.' opens a comment"],
    "// Whether a row counts.\nbool a();\n": ["1: 'Whether' opens a comment"],
    "// Null: absent.\nint* a;\n": ["1: 'Null:' opens a comment"],
    "// Of the two parts, the small one comes first.\nint a = 1'000'000;  // rows\n": [],
    "// Holds the rows if there are any.\n// [rows, cols]\nint a;\n": [],
}
PYTHON = {
    '"""What is there."""\n': ["1: 'is there' in a comment"],
    "x = 1\n#\ny = 2  # besides\n": ["2: an empty comment line", "3: 'besides' in a comment"],
    'def f():\n    """One line.\n\n    A second part.\n    """\n    return "beside"\n': [],
}


@pytest.mark.parametrize("name, cases", [("csrc/a.h", FOUND), ("python/tigon/a.py", PYTHON)])
def test_found(name, cases, tmp_path):
    """Each violation with its line, and nothing else."""
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    for text, expected in cases.items():
        file.write_text(text)
        errors = [error.removeprefix(f"{name}:") for error in check_comments.check_comments(tmp_path)]
        assert len(errors) == len(expected), (text, errors)
        assert all(error.startswith(start) for error, start in zip(errors, expected, strict=True)), errors
