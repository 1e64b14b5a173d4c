#!/usr/bin/env python3
"""The Markdown, checked: links, anchors, paths and targets exist, figures have records, sentences read well.

Comments of code are checked by check_comments.py, which this calls.

Pages that a program writes are read for links only. Run by `make lint` and tests/test_docs.py.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from check_comments import check_comments
from check_tree import tracked

ROOT = Path(__file__).resolve().parent.parent
GENERATED = re.compile(r"^Written by `|^\w+ by `make ", re.MULTILINE)
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]*(?:\([^()]*\))?[^()\s]*)\)")
PATH = re.compile(
    r"(?<![\w./-])(?:csrc|python|tests|tools|bench|docs|examples|cmake|compat|\.ci)/[\w./*<>{},-]+"
)
# A speed or a time that somebody must have measured, and what says where: a page of results, a file of
# records, or that there is none.
FIGURE = re.compile(
    r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?: to \d[\d,.]*)? ?"
    r"(?:ms|us|tokens/s|GB/s|times as (?:fast|long)|times (?:stock|Liger|TRL)"
    r"|% (?:faster|slower|longer|less time))\b"
)
RECORD = re.compile(r"results/\w+\.md|bench/results|paper\.md|\b[Nn]o record\b")
INDENTED = re.compile(r"^    .*$", re.MULTILINE)
LONGEST_CELL = 200
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)(?![\w-])(?=[^`\n]*(?:`|\n))")
# What a reader trips over, and what to write instead.
PROSE = {
    r"\balone\b(?! or )": "only, by itself",
    r"\bwhose\b[^.|]*\bwhose\b": "one idea a sentence",
    r"\b(?:are|is) not here\b": "outside the local ones",
    r"\b(?:they are|is) there\b": "exists, works",
    r"\bbesides? gradients\b": "in addition to the gradients",
    r"\bMended\b": "Fixed",
    r"\bforth and back\b": "twice",
    r";[^;|.:\n]*(?:\n[^;|.:\n]+)*;": "sentences, not fragments between semicolons",
    r"\bthe same;": "a sentence",
    r"\b(?:simply|obviously|blazing(?:ly)?|leverages?|seamless(?:ly)?)\b": "the fact without the adverb",
}
# Words of this project that readers of docs do not share, and theirs. In tables of a few words they hold too.
PRIVATE = {
    r'(?<!dot\s)(?<!id=")\bproducts?\b': "matmul",
    r"\bbeside\b": "with, next to, in addition to",
    r"\bless (?:a|an|the|its|those|one|that)\b": "minus",
    r"\beach way\b": "in the forward and in the backward",
    r"\b(?:said|says|refused) (?:it )?in words\b": "the message says",
    r"\bstays? \w+'s\b": "PEFT keeps it",
    r"\b(?:has|have) the bits of\b|\bto the same bits\b": "bit-identical",
    r"(?<!stay\s)\bwhere (?:it|they|this|that) (?:is|are|was|were|does|do|has|have|needs?)\b": "if",
    r"\bon purpose\b": "deliberate",
    r"\(goal\b": "nothing: it is ours",
}
STOCK = re.compile(r"\bstock\b(?! \()")  # the model without Tigon, once a page has said so
EXPLAINED = re.compile(r"\bstock \(|\bstock is\b", re.IGNORECASE)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def blank(match: re.Match) -> str:
    """As many characters and lines, and nothing on them."""
    return re.sub(r"[^\n]", " ", match[0])


def without_code(text: str) -> str:
    """The text with blocks of code and comments blanked out."""
    return COMMENT.sub(blank, FENCE.sub(blank, text))


def anchors(text: str) -> set[str]:
    """Every anchor of a page; of equal headings the later ones are numbered."""
    found: set[str] = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_code(text), re.MULTILINE):
        base = name = slug(heading)
        number = 0
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found.add(name)
    return found


def line_of(text: str, position: int) -> int:
    """The number of the line that holds a position."""
    return text.count("\n", 0, position) + 1


def check_links(page: Path, text: str) -> Iterator[str]:
    """Targets of links: files that exist, anchors that their page has."""
    for match in LINK.finditer(CODE.sub(blank, without_code(text))):
        target, _, anchor = match[1].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        where = f"{page.relative_to(ROOT)}:{line_of(text, match.start())}"
        if not file.exists():
            yield f"{where}: no file {target}"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{where}: no heading #{anchor} in {file.relative_to(ROOT)}"


def check_paths(page: Path, text: str) -> Iterator[str]:
    """Paths of the repository that the text names, and targets of make."""
    targets = set(
        re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    text = COMMENT.sub(blank, text)
    for match in PATH.finditer(text):
        name = re.sub(r"<\w+>", "*", match[0].rstrip(".,"))
        if (braces := re.search(r"\{([^}]*)\}", name)) is not None:
            names = [name.replace(braces[0], part) for part in braces[1].split(",")]
        else:
            names = [name]
        for one in names:
            if not (any(ROOT.glob(one)) if "*" in one else (ROOT / one).exists()):
                yield f"{page.relative_to(ROOT)}:{line_of(text, match.start())}: no file {one}"
    for match in TARGET.finditer(text):
        code = text[match.start() - 1] in "`\n"
        if code and match[1] not in targets:
            yield f"{page.relative_to(ROOT)}:{line_of(text, match.start())}: no target of make: {match[1]}"


def check_prose(page: Path, text: str) -> Iterator[str]:
    """Patterns of `PROSE` outside code, and cells of tables that should be sentences."""
    plain = CODE.sub(lambda m: "x" * len(m[0]), INDENTED.sub(blank, without_code(text)))
    plain = re.sub(r"\]\([^)\n]*\)", lambda m: "]" + " " * (len(m[0]) - 1), plain)
    for number, line in enumerate(re.sub(r"\] {3,}", "]", plain).splitlines(), 1):
        cells = line.strip("|").split("|") if line.startswith("|") else ()
        if any(len(cell.strip()) > LONGEST_CELL for cell in cells):
            where = f"{page.relative_to(ROOT)}:{number}"
            yield f"{where}: a cell of more than {LONGEST_CELL} characters: better sentences"
    patterns = dict(PROSE)
    if "docs" in page.relative_to(ROOT).parts:
        patterns |= PRIVATE
        if not EXPLAINED.search(plain):
            patterns[STOCK.pattern] = "without Tigon"
    for pattern, instead in patterns.items():
        for match in re.finditer(pattern, plain):
            found = " ".join(text[match.start() : match.end()].split())
            where = f"{page.relative_to(ROOT)}:{line_of(plain, match.start())}"
            yield f"{where}: {found!r}: better {instead}"


def check_figures(page: Path, text: str) -> Iterator[str]:
    """A figure names its record in its section or its page's introduction, in the changelog in its entry.

    One in the text of a link to results stands on that page.
    """
    begins = r"^(?:#|- )" if page.name == "CHANGELOG.md" else r"^#"
    plain = CODE.sub(blank, without_code(text))
    starts = [0, *(m.start() for m in re.finditer(begins, plain, re.MULTILINE)), len(text)]
    said = page.name != "CHANGELOG.md" and "o record" in text.split("\n#", 1)[0]
    for start, end in itertools.pairwise(starts) if not said else ():
        found = FIGURE.search(plain, start, end)
        if found and not RECORD.search(text, start, end):
            where = f"{page.relative_to(ROOT)}:{line_of(text, found.start())}"
            yield f'{where}: {found[0]!r}: link its record in docs/results, or say "no record"'
    for match in re.finditer(r"\[([^\[\]]*)\]\(([\w./-]*results/\w+\.md)[^)]*\)", plain):
        file = (page.parent / match[2]).resolve()
        numbers = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", file.read_text()) if file.exists() else []
        values = {float(number.replace(",", "")) for number in numbers}
        for figure in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?= times| ms| GB| MiB| tokens)", match[1]):
            unit = 0.1 ** len(figure.partition(".")[2])
            if not any(abs(value - float(figure.replace(",", ""))) < 0.6 * unit for value in values):
                where = f"{page.relative_to(ROOT)}:{line_of(text, match.start())}"
                yield f"{where}: {figure} is not in {match[2]}"


def pages() -> list[Path]:
    """Every Markdown file that git knows or would add."""
    return [ROOT / path for path in sorted(tracked(ROOT)) if path.suffix == ".md"]


def generated(text: str) -> bool:
    """Whether a program wrote the page: its second paragraph says so."""
    return GENERATED.search(text[:400]) is not None


def check_docs() -> list[str]:
    """Every violation, one line each."""
    errors = check_comments(ROOT)
    for page in pages():
        text = page.read_text(encoding="utf-8")
        errors += check_links(page, text)
        if not generated(text):
            errors += check_paths(page, text)
            errors += check_figures(page, text)
            if page.name != "CHANGELOG.md":
                errors += check_prose(page, text)
    return errors


def main() -> int:
    """Print the violations; 1 when there is one."""
    errors = check_docs()
    print(*errors, sep="\n", end="\n" if errors else "")
    print(f"check_docs: {len(errors)} violations" if errors else "check_docs: pages and comments in order")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
