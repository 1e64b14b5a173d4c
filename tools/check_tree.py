#!/usr/bin/env python3
"""The layout, checked: who may include or import whom, which files an op has, what contracts say, how long
files are, and what torch.compile would not trace.

Includes point down the layers: python -> torch -> op -> backend -> math -> base. So do imports of the Python
package: integrations -> optim -> nn, parallel -> ops -> the rest.
Run by `make lint` and tests/test_tree.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

MAX_LINES = 800
HEADINGS = (
    "Formula",
    "Shapes",
    "Dtypes",
    "Rounding",
    "Saved",
    "Aliasing",
    "Determinism",
    "Traffic",
    "Refused",
)
SIBLINGS = ("{op}.h", "{op}_math.inc", "{op}_cpu.cpp", "{op}_cuda.cu")
# Where the op has no TIGON_OP, which makes them of its list of fields: entries by hand, and without a
# TIGON_OPERATOR or TIGON_CALL an adaptor too.
BY_HAND = ("{op}.cpp", "{op}_torch.cpp")
# What ops share without being one: no adaptor, no Python, no cases. An op whose contract includes such a
# header drives it, and has kernels only where it needs some of its own.
ENGINES = {"loss_head"}
KERNELS = ("{op}_math.inc", "{op}_cpu.cpp", "{op}_cuda.cu")
ELSEWHERE = ("python/tigon/ops/**/{op}.py", "tests/cases/{op}.py")  # ops of one family share a package
# Ops without a gradient, on lists of tensors or on codes: tests of their own have their cases.
WITHOUT_CASES = {"dequantize", "grad_norm"}
# The floors of the Python package above its lowest, which holds all other modules. Imports point down.
FLOORS = (
    (),
    ("ops",),
    ("nn", "parallel"),
    ("optim",),
    ("integrations",),
    ("", "__main__", "compat", "doctor", "megatron", "transformers"),
)
# A loss of a sharded tensor, which loads its process group's part when it gets one.
UPWARD = {("tigon._dtensor", "tigon.parallel.dtensor")}
SOURCE = {".h", ".cuh", ".inc", ".cpp", ".cu"}
CODE = SOURCE | {".py", ".sh", ".cmake"}
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|headeronly)/|^Python\.h$|^pybind11/")
INCLUDE = re.compile(
    r'^\s*#\s*(?:include\s+|define\s+TIGON_(?:KERNELS|FORMULA)\s+)[<"]([^>"]+)[>"]', re.MULTILINE
)


def role_of(path: Path) -> str:
    """base, math, header, backend, op or torch: what a file of tigon/ is, whose path begins there."""
    parts = path.parts
    if parts[1] == "torch" or path.stem.endswith("_torch"):
        return "torch"
    if parts[1] == "base":
        return "base"
    if path.name.endswith("_math.inc"):
        return "math"
    if path.suffix in (".cu", ".cuh", ".inc") or path.stem.endswith(("_cpu", "_cuda")):
        return "backend"
    return "header" if path.suffix == ".h" else "op"


def exports(header: Path) -> bool:
    """Whether a header declares functions of the library's interface."""
    text = header.read_text(encoding="utf-8") if header.exists() else ""
    return re.search(r"^TIGON_API", text, re.MULTILINE) is not None


def allowed(root: Path, path: Path, include: str) -> bool:
    """May this file of tigon/ include that header of tigon/?"""
    role, target = role_of(path), Path(include)
    if target.parts[1] == "base":
        return True
    if role == "base":
        return False
    if target.parts[1] == "torch":
        return role == "torch"
    own = path.parts[1] == "ops" and target.parts[:3] == path.parts[:3]
    public = target.name == f"{target.parts[2]}.h" or exports(root / "csrc" / target)
    public = public or (target.parts[2] in ENGINES and target.suffix == ".h")
    shared = (
        own and target.suffix == ".h" and role_of(target) in ("header", role)
    )  # a second op of the folder
    return {
        "math": False,
        "header": public or shared,  # an Args struct of another op may be part of a contract
        "backend": own,
        "op": public or shared,
        "torch": public or shared,
    }[role]


def check_includes(root: Path, path: Path) -> list[str]:
    """Includes of one file that point up, sideways or at a framework."""
    errors, spelled = [], path.relative_to("csrc")  # as other files include it
    role = role_of(spelled)
    for include in INCLUDE.findall((root / path).read_text(encoding="utf-8")):
        if TORCH_HEADER.search(include):
            if role != "torch":
                errors.append(
                    f"{path}: a {role} file includes {include}; only tigon/torch and *_torch.cpp may"
                )
        elif include.startswith("tigon/") and not allowed(root, spelled, include):
            errors.append(f"{path} is {role}: it may not include {include}")
        elif "/" not in include and (root / path.parent / include).exists():
            errors.append(f'{path}: spell "{include}" from csrc')
    return errors


def check_op(root: Path, op: str) -> list[str]:
    """Files of one op, and the headings of its contract."""
    header = root / f"csrc/tigon/ops/{op}/{op}.h"
    contract = header.read_text(encoding="utf-8") if header.exists() else ""
    drives = ENGINES & {Path(name).parent.name for name in INCLUDE.findall(contract)} - {op}
    cpu = root / f"csrc/tigon/ops/{op}/{op}_cpu.cpp"
    entry = re.compile(rf"TIGON_(OP|DEFINE_ENTRY)\({op}[,_]")
    listed = not cpu.exists() or entry.search(cpu.read_text(encoding="utf-8")) is not None
    entries = root / f"csrc/tigon/ops/{op}/{op}.cpp"
    text = entries.read_text(encoding="utf-8") if entries.exists() else ""
    declared = "TIGON_OPERATOR(" in text or "TIGON_CALL(" in text
    siblings = SIBLINGS if listed else (*SIBLINGS, *BY_HAND[: 1 if declared else 2])
    files = [f"csrc/tigon/ops/{op}/{name}" for name in siblings if not (drives and name in KERNELS)]
    wanted = [name for name in files if "_torch" not in name] if op in ENGINES else [*files, *ELSEWHERE]
    wanted = [name for name in wanted if not (op in WITHOUT_CASES and name.startswith("tests/"))]
    errors = [
        f"{name.format(op=op)}: missing (docs/adding-an-op.md)"
        for name in wanted
        if not any(root.glob(name.format(op=op)))
    ]
    if contract:
        essay = contract.split("#pragma once")[0]
        errors += [
            f"csrc/tigon/ops/{op}/{op}.h: the contract has no line '// {heading}'"
            for heading in HEADINGS
            if not re.search(rf"^// {heading}\b", essay, re.MULTILINE)
        ]
    return errors


def check_named_tuples(root: Path, path: Path) -> list[str]:
    """Properties of named tuples: the compiler of PyTorch 2.10 does not trace them."""
    classes = (
        n for n in ast.walk(ast.parse((root / path).read_text("utf-8"))) if isinstance(n, ast.ClassDef)
    )
    return [
        f"{path}: {c.name}.{f.name} is a property of a named tuple: make it a method (torch.compile)"
        for c in classes
        if any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in c.bases)
        for f in c.body
        if isinstance(f, ast.FunctionDef) and any(ast.unparse(d) == "property" for d in f.decorator_list)
    ]


def check_import_circles(root: Path, paths: list[Path]) -> list[str]:
    """Two modules that import each other, also inside functions."""
    modules = {".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__"): path for path in paths}
    imports = {}
    for name, path in modules.items():
        nodes = ast.walk(ast.parse((root / path).read_text(encoding="utf-8")))
        pairs = [(n.module, alias.name) for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names]
        imports[name] = {m if f"{m}.{part}" not in modules else f"{m}.{part}" for m, part in pairs}
    pairs = ((one, two) for one in imports for two in imports if one < two and "tigon" not in (one, two))
    return [
        f"{modules[one]}: it and {two} import each other"
        for one, two in pairs
        if two in imports[one] and one in imports[two]
    ]


def floor_of(module: str) -> int:
    """The floor of the package on which a module stands."""
    part = module.partition(".")[2].partition(".")[0]
    return next((floor for floor, parts in enumerate(FLOORS) if part in parts), 0)


def check_floors(root: Path, path: Path) -> list[str]:
    """Imports of a higher floor of the Python package, also inside functions."""
    name = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
    taken = set()
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            taken.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "tigon":
            taken.update(f"tigon.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            taken.add(node.module)
    return [
        f"{path}: it may not import {other}, which stands on a higher floor"
        for other in sorted(taken)
        if other.startswith("tigon.") and floor_of(other) > floor_of(name) and (name, other) not in UPWARD
    ]


def tracked(root: Path) -> list[Path]:
    """Files git knows or would add; every file where there is no git."""
    listing = subprocess.run(
        ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    names = (
        listing.stdout.splitlines()
        if listing.returncode == 0
        else [str(p.relative_to(root)) for p in root.rglob("*")]
    )
    return [Path(name) for name in names if (root / name).is_file()]


def check_tree(root: Path) -> list[str]:
    """Every violation, one line each."""
    errors = []
    for path in sorted(tracked(root)):
        if path.suffix in CODE:
            lines = (root / path).read_text(encoding="utf-8").count("\n")
            if lines > MAX_LINES:
                errors.append(f"{path}: {lines} lines, at most {MAX_LINES}: split it")
        if path.parts[0] == "csrc" and path.suffix in SOURCE:
            errors += check_includes(root, path)
        if path.parts[:2] == ("python", "tigon") and path.suffix == ".py":
            errors += check_named_tuples(root, path) + check_floors(root, path)
    package = [p for p in tracked(root) if p.parts[:2] == ("python", "tigon") and p.suffix == ".py"]
    errors += check_import_circles(root, package)
    ops = sorted(folder.name for folder in (root / "csrc/tigon/ops").iterdir() if any(folder.glob("*")))
    return errors + [error for op in ops for error in check_op(root, op)]


def main() -> int:
    """Print the violations; 1 when there is one."""
    errors = check_tree(Path(__file__).resolve().parent.parent)
    print(*errors, sep="\n", end="\n" if errors else "")
    print(f"check_tree: {len(errors)} violations" if errors else "check_tree: the tree is in order")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
