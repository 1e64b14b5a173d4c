"""MkDocs' hooks and the docstrings' extension of the site that mkdocs.yml describes.

README, CONTRIBUTING and CHANGELOG become pages, and so do files of the repository that pages link to. The
contracts of the C++ headers are rendered into the C++ reference. Sphinx' roles in docstrings become links.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
import sys
from pathlib import Path

import griffe
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import cpp_reference
from check_docs import LINK, ROOT
from run_notebook import cells_of

DOCS = ROOT / "docs"
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
ORIGIN = {uri: name for name, uri in MOVED.items()}
LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".cu": "cuda", ".cuh": "cuda", ".json": "json"}
NOTEBOOKS = ROOT / "examples/notebooks"
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"  # code would hide what explains it
CONTRACTS = "reference/cpp.md"
WIDE = ("results/", "models.md", "paper.md", "programs.md", "liger-suite.md")  # pages of wide tables


def uri_of(path: Path) -> str:
    """The page of a file or folder of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return MOVED.get(name, f"source/{name}.md")


def folder_of(uri: str) -> Path:
    """Where relative links of a page start."""
    if uri in ORIGIN:
        return ROOT
    return (ROOT / uri.removeprefix("source/") if uri.startswith("source/") else DOCS / uri).parent


def rewritten(text: str, uri: str) -> str:
    """The text with its links to files of the repository turned into links to their pages."""

    def link(match: re.Match) -> str:
        target, mark, anchor = match[1].partition("#")
        path = (folder_of(uri) / target).resolve()
        if not target or re.match(r"[a-z]+:", target) or not path.exists() or not path.is_relative_to(ROOT):
            return match[0]
        new = posixpath.relpath(uri_of(path), posixpath.dirname(uri) or ".")
        return match[0].replace(f"({match[1]})", f"({new}{mark}{anchor})")

    return LINK.sub(link, text)


def is_notebook(path: Path) -> bool:
    return path.suffix == ".py" and NOTEBOOKS in path.parents


def shown(output: dict) -> str:
    """An output of a cell, as HTML."""
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img src="data:image/png;base64,{data["image/png"]}" alt="Figure of this cell">'
    if "text/html" in data:
        return "".join(data["text/html"])
    text = "".join(output.get("text") or data["text/plain"]).strip("\n")
    return f"<pre><code>{html.escape(text)}</code></pre>".replace(
        "\n", "&#10;"
    )  # one line: no Markdown in it


def notebook_page(path: Path) -> str:
    """A notebook: text as it is, code in blocks with their outputs, if it is saved with them."""
    saved = path.with_suffix(".ipynb")
    if saved.exists():
        cells = json.loads(saved.read_text(encoding="utf-8"))["cells"]
    else:
        cells = cells_of(path.read_text(encoding="utf-8"))
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        outputs = "\n".join(map(shown, cell.get("outputs", [])))
        parts += [f'<div class="output">{outputs}</div>'] if outputs else []
    return "\n\n".join(parts)


def source_page(path: Path) -> str:
    """A file as a block of code; a folder as a list of its files."""
    if is_notebook(path):
        return notebook_page(path)
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in LANGUAGES and "__pycache__" not in p.parts)
        return f"# {name}\n\n" + "\n".join(
            f"- [{p.relative_to(path)}]({p.relative_to(path.parent)})" for p in files
        )
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"


def linked(text: str, folder: Path) -> set[Path]:
    """Files and folders outside docs that a text links to."""
    paths = {
        (folder / match[1].partition("#")[0]).resolve()
        for match in LINK.finditer(text)
        if ":" not in match[1]
    }
    return {
        p for p in paths if p.exists() and p.is_relative_to(ROOT) and p != ROOT and not p.is_relative_to(DOCS)
    }


def on_files(files, config):
    """Add the pages that have no file below docs."""
    pages = {uri: (ROOT / name).read_text(encoding="utf-8") for uri, name in ORIGIN.items()}
    texts = [(text, ROOT) for text in pages.values()]
    texts += [
        (Path(f.abs_src_path).read_text(encoding="utf-8"), DOCS / Path(f.src_uri).parent)
        for f in files.documentation_pages()
    ]
    found: set[Path] = set().union(*(linked(*pair) for pair in texts))
    for folder in [path for path in found if path.is_dir()]:
        found |= linked(source_page(folder), folder.parent)
    for path in found:
        if path.relative_to(ROOT).as_posix() not in MOVED:
            pages[uri_of(path)] = ("" if is_notebook(path) else UNSEARCHED) + source_page(path)
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links of the repository become links of the site; the C++ page gets its contracts."""
    uri = page.file.src_uri
    if uri.startswith("source/") and "````" in markdown:
        return markdown
    if uri.startswith(WIDE):
        page.meta.setdefault("hide", []).append("toc")
    if uri == "index.md":
        page.meta.setdefault("hide", []).append("navigation")  # which would be the word Tigon
    return rewritten(markdown, uri) + ("\n" + cpp_reference.reference() if uri == CONTRACTS else "")


def on_page_content(html, page, config, files):
    """Pages of wide tables are told apart for the style."""
    return f'<div class="wide">{html}</div>' if page.file.src_uri.startswith(WIDE) else html


class Docstrings(griffe.Extension):
    """Roles become links where the reference has the name; options of other functions stand in signatures."""

    def __init__(self) -> None:
        self.pages = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
        self.anchors = {name: name for name in re.findall(r"^::: (\S+)$", self.pages, re.MULTILINE)}
        headed = re.findall(r"^::: (\S+)\n    options:\n      heading: (\S+)", self.pages, re.MULTILINE)
        self.anchors |= {heading: name for name, heading in headed}

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None and obj.is_function and obj.returns:
            # Else a colon in the first line would end a type.
            returned = rf"\1{obj.returns}: "
            obj.docstring.value = re.sub(r"(^Returns:\n\s+)(?=\S)", returned, obj.docstring.value, flags=re.M)
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":\w+:`~?([\w.]+)`", self.link, obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        """What ``**options: Unpack[...]`` of ``tigon.ops.arguments.unpacked(functions)`` stands for."""
        modules = [pkg]
        for module in modules:
            members = [m for m in module.members.values() if not m.is_alias]
            modules += [m for m in members if m.is_module or m.is_class]
            for function in members:
                if function.is_function:
                    self.unpack(function)

    def unpack(self, function: griffe.Function) -> None:
        """Parameters in the place of ``**options``, with the defaults of the functions that have them."""
        calls = [d.value for d in function.decorators if "unpacked(" in str(d.value)]
        last = next((p for p in function.parameters if p.name == "options"), None)
        if not calls or last is None:
            return
        named = function.modules_collection[last.annotation.slice.canonical_path].all_members
        del function.parameters["options"]
        for source in calls[0].arguments:
            for p in function.modules_collection[source.canonical_path].parameters:
                if p.name in named and p.name not in {own.name for own in function.parameters}:
                    function.parameters.add(p)

    def link(self, match: re.Match) -> str:
        """A link, or code where the site has no such name."""
        name = match[1]
        return f"[`{name}`][{self.anchors[name]}]" if name in self.anchors else f"`{name}`"
