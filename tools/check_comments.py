"""Comments of C++ and Python, checked: within the limit, no empty lines, terms of the field, sentences.

A part of tools/check_docs.py, which calls it. What is flagged has no false alarms that a comment could not
easily avoid, so there is no way to switch it off in a line.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from check_tree import SOURCE, tracked

LIMIT = 110
FOLDERS = ("csrc/", "python/tigon/")
# Words that only this project would use so, and what to write instead.
WORDS = {
    r"\bbesides?\b(?!:)": "with, next to, in addition to",
    r"\balone\b(?! or )": "only, by itself",
    r"\b(?:is|are|be) there\b(?! (?:an?|any|no)\b)": "present, given, exists",
    r"\b(?:is|are) not here\b": "in another process, absent",
    r"\bthe very\b": "the",
    r"\bsame bits\b": "bitwise equal",
    r"\b[Mm]atrix products?\b": "GEMM, matmul",
    r"\bNone where\b": "None if",
    r"\bby turns\b": "alternating, in turn",
}
# How a fragment opens where a sentence should stand.
FRAGMENTS = {
    r"Whether\b": "True if ...",
    r"Of [^,.:;]*[.:;]?$|Of [^,.:;]*[.:;]\s": "a sentence that names what holds",
    r"(?:Null|Empty|As above)\b[.:,;]": "a sentence",
    r"(?:The same|Else|And)\b [^.]{0,20}[.:;]?$": "a sentence",
}
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])*\'|//(?P<comment>[^\n]*)')
Comment = tuple[int, str, bool]  # line, text, whether nothing else is on the line


def cpp_comments(text: str) -> Iterator[Comment]:
    """The comments of C++ source, line by line."""
    for match in TOKEN.finditer(text):
        if match["comment"] is not None:
            start = text.rfind("\n", 0, match.start()) + 1
            alone = not text[start : match.start()].strip()
            yield text.count("\n", 0, start) + 1, match["comment"].strip(), alone


def python_comments(text: str) -> Iterator[Comment]:
    """The comments and docstrings of Python source, line by line."""
    opening = True  # a string here is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            yield token.start[0], token.string[1:].strip(), alone
        elif token.type == tokenize.STRING and opening:
            for i, line in enumerate(token.string.splitlines()):
                yield token.start[0] + i, line.strip() or '"""', False
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            opening = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def blocks(comments: list[Comment]) -> Iterator[tuple[int, str]]:
    """Adjacent comments that have lines of their own, each block as one text with its first line."""
    first, last, words = 0, -1, []
    for line, text, alone in [*comments, (0, "", True)]:
        if line != last + 1 or not alone:
            if words:
                yield first, " ".join(words)
            first, words = line, []
        if alone and line:
            words.append(text)
            last = line
        else:
            last = -1


def check_comments(root: Path) -> list[str]:
    """Every violation of the tree below `root`, one line each."""
    errors = []
    for path in sorted(tracked(root)):
        name = path.as_posix()
        cpp = path.suffix in SOURCE
        if not name.startswith(FOLDERS) or not (cpp or path.suffix == ".py"):
            continue
        text = (root / path).read_text(encoding="utf-8")
        lines = text.splitlines()
        comments = list(cpp_comments(text) if cpp else python_comments(text))
        for line, comment, alone in comments:
            if len(lines[line - 1]) > LIMIT:
                errors.append(f"{name}:{line}: a comment past column {LIMIT}: wrap it, or put it above")
            if not comment and alone:
                errors.append(f"{name}:{line}: an empty comment line")
            for pattern, instead in WORDS.items():
                if match := re.search(pattern, comment):
                    errors.append(f"{name}:{line}: {match[0]!r} in a comment: better {instead}")
        for line, block in blocks(comments) if cpp else ():
            for pattern, instead in FRAGMENTS.items():
                if match := re.match(pattern, block):
                    errors.append(f"{name}:{line}: {match[0]!r} opens a comment: better {instead}")
    return errors
