"""The C++ reference of the site: of each header its contract as a table, and its declarations one by one."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from check_docs import ROOT

HEADERS = ("base/make_context.h", "base/context.h", "base/tensor.h")
FIELD = re.compile(r"^([A-Z][a-z]+(?: [a-z]+)?) +(?<=^.{12})(\S.*)$")  # text begins in the 13th column
ENTRY = r"TIGON_API void \1{0}(Context& ctx, const \2{1}& a);"
MACROS = {  # what a header declares by a macro, written out
    r"TIGON_API_OP\((\w+), (\w+)\)": "\n".join(map(ENTRY.format, ("_fwd", "_bwd"), ("Fwd", "Bwd"))),
    r"TIGON_API_ENTRY\((\w+), (\w+)\)": ENTRY.format("", ""),
}


def contract(essay: list[str]) -> str:
    """The comment that a header begins with: its first paragraph, then a row for each named field."""
    prose, fields = [], []
    for line in essay:
        if (found := FIELD.match(line)) and prose:
            fields.append((found[1], [found[2]]))
        elif fields and line.strip():
            fields[-1][1].append(line.strip())
        elif line.strip():
            prose.append(line.strip())
    rows = "\n".join(
        f"<tr><th>{name}</th><td>{'<br>'.join(map(text, lines))}</td></tr>" for name, lines in fields
    )
    first = f"<p>{text(' '.join(prose))}</p>"
    return f'{first}\n\n<table class="contract"><tbody>\n{rows}\n</tbody></table>' if fields else first


def items(declared: str) -> Iterator[tuple[str, str]]:
    """Comment and code of each declaration."""
    comment, code, depth = [], [], 0
    for line in declared.splitlines():
        if not code and line.startswith("//"):
            comment.append(line.removeprefix("//").removeprefix(" "))
            continue
        if not code and not line.strip():
            continue
        code.append(line)
        plain = re.sub(r"//.*", "", line).rstrip()
        depth += sum(map(plain.count, "{(")) - sum(map(plain.count, "})"))
        if depth == 0 and plain.endswith((";", "}", ")")):
            yield "\n".join(comment), "\n".join(code)
            comment, code = [], []


def text(words: str) -> str:
    """Words as HTML, what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words, quote=False))


def prose(comment: str) -> str:
    """A comment as paragraphs; lines that are indented keep their columns."""
    if re.search(r"^ {2,}\S", comment, re.MULTILINE):
        return f'<pre class="contract">{html.escape(comment, quote=False)}</pre>'
    return f"<p>{text(' '.join(comment.split()))}</p>" if comment else ""


def section(header: Path) -> str:
    """One header."""
    essay, _, rest = header.read_text(encoding="utf-8").partition("#pragma once")
    lines = [re.sub(r"^// ?", "", line) for line in essay.splitlines()]
    for internal in (
        r"^#include[^\n]*\n",
        r"^namespace (?:cpu|cuda) \{.*?^\}[^\n]*\n",
        r"^\n? {2}void \w+\(Fields& \w+\) \{.*?^ {2}\}\n",
        r"^(?:namespace tigon \{|\}  // namespace tigon)\n?",
    ):
        rest = re.sub(internal, "", rest, flags=re.DOTALL | re.MULTILINE)
    for macro, written in MACROS.items():
        rest = re.sub(f"^{macro}", written, rest, flags=re.MULTILINE)
    name = header.relative_to(ROOT / "csrc").as_posix()
    blocks = [f"## {header.stem}", f'`#include "{name}"`', contract(lines)]
    for comment, code in items(rest):
        if "Fields&" in code:  # checks, which callers do not make
            continue
        code = re.sub(r"\n+(?=};)", "\n", code)
        if not code.startswith(("struct", "enum", "class")):
            code = re.sub(r" \{\n.*", ";", code, flags=re.DOTALL)  # a function's body
        blocks += [prose(comment), f"```cpp\n{code}\n```"]
    return "\n\n".join(filter(None, blocks)) + "\n"


def reference() -> str:
    """Every header that a program includes: the base first, then the ops."""
    ops = [folder / f"{folder.name}.h" for folder in sorted((ROOT / "csrc/tigon/ops").iterdir())]
    headers = [ROOT / "csrc/tigon" / name for name in HEADERS] + ops
    return "\n".join(section(path) for path in headers if path.exists())
