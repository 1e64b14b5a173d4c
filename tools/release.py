"""Releases a version: sets it, builds, checks, commits and tags. Pushes nothing.

Needs a clean work tree, and entries under [Unreleased] in CHANGELOG.md. What fails puts files back.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("lint", "test", "docs", "wheel", "wheel TIGON_CUDA=OFF", "kernels-repo")  # targets of make
UNRELEASED = "## [Unreleased]\n"
LARGEST_WHEEL = 100 << 20  # bytes that PyPI takes


class Refused(Exception):
    """Why there is no release."""


def git(root: Path, *arguments: str) -> str:
    """The output of git."""
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def edits(root: Path, version: str) -> dict[Path, str]:
    """The new texts of the files that name the version."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise Refused(f"a version is 1.2.3 or 1.2.3rc1, not {version}")
    source, changelog = root / "python/tigon/__init__.py", root / "CHANGELOG.md"
    before, _, entries = changelog.read_text(encoding="utf-8").partition(UNRELEASED)
    if not re.search(r"^- ", entries.partition("\n## [")[0], re.MULTILINE):
        raise Refused("CHANGELOG.md has no entries under [Unreleased]")
    today = datetime.date.today().isoformat()
    dated = f"{before}{UNRELEASED}\n## [{version}] - {today}\n{entries}"
    module = re.sub(
        r'^__version__ = ".*"$', f'__version__ = "{version}"', source.read_text(encoding="utf-8"), flags=re.M
    )
    citation = root / "CITATION.cff"
    cited = citation.read_text(encoding="utf-8")
    for name, value in (("version", version), ("date-released", today)):
        cited = re.sub(f"^{name}: .*$", f"{name}: {value}", cited, flags=re.M)
    return {source: module, changelog: dated, citation: cited}


def check_wheels(root: Path, version: str) -> None:
    """The wheels of this version are there, and not too large for PyPI."""
    for folder in ("dist", "dist/cpu"):
        wheels = list((root / folder).glob(f"tigon-{version}-py3-none-manylinux_*.whl"))
        if len(wheels) != 1 or wheels[0].stat().st_size > LARGEST_WHEEL:
            raise Refused(f"{folder} must hold one wheel of {version}, of at most 100 MB: {wheels}")


def release(root: Path, version: str, dry_run: bool) -> None:
    """All steps; a dry run prints them and the edits."""
    new = edits(root, version)
    if git(root, "status", "--porcelain"):
        raise Refused("the work tree has changes that are not committed")
    if git(root, "tag", "--list", f"v{version}"):
        raise Refused(f"there is a tag v{version}")
    if dry_run:
        for path, text in new.items():
            old, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
            sys.stdout.writelines(
                difflib.unified_diff(old.splitlines(True), text.splitlines(True), name, n=0)
            )
        print(*(f"make {step}" for step in STEPS), f"git tag v{version}", sep="\n")
        return
    try:
        for path, text in new.items():
            path.write_text(text, encoding="utf-8")
        for step in STEPS:
            subprocess.run(["make", *step.split()], cwd=root, check=True)
        check_wheels(root, version)
    except BaseException:
        git(root, "checkout", "--", ".")
        raise
    git(root, "commit", "-am", f"Release {version}")
    git(root, "tag", "-a", f"v{version}", "-m", f"Tigon {version}")
    print(f"v{version} is tagged: git push --follow-tags, and upload dist/*.whl")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    try:
        release(ROOT, options.version, options.dry_run)
    except (Refused, subprocess.CalledProcessError) as error:
        sys.exit(f"no release: {error}")
