"""What is published: one version, the workflows, the conda recipe, the release script."""

import re
import subprocess
from pathlib import Path

import pytest
import release
import yaml

import tigon

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_version_is_in_one_place():
    """The newest version of the changelog and the one to cite are the module's."""
    assert re.search(r"^## \[(\d.*?)\]", text("CHANGELOG.md"), re.MULTILINE)[1] == tigon.__version__
    assert yaml.safe_load(text("CITATION.cff"))["version"] == tigon.__version__
    for file in ("pyproject.toml", "CMakeLists.txt", "packaging/conda/recipe.yaml"):
        assert tigon.__version__ not in text(file)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_call_make(file):
    """Their own steps are .ci/run or targets of the Makefile, and nothing else."""
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE))
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    commands = [step["run"] for step in steps if "uses" not in step]
    assert commands
    for command in commands:
        match = re.fullmatch(r"make ([\w-]+)( \w+=\w+)*", command)
        assert command == "bash .ci/run" or (match and match[1] in targets), command


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_conda_recipe(cuda, monkeypatch):
    """It renders, for the CPU and for CUDA, with the architectures of `make wheel`."""
    stage0 = pytest.importorskip("rattler_build.stage0", reason="needs the package py-rattler-build")
    from rattler_build.variant_config import VariantConfig

    monkeypatch.setenv("TIGON_VERSION", tigon.__version__)
    chosen = {"c_stdlib": ["sysroot"], "c_stdlib_version": ["2.34"]}
    chosen |= {"cuda_compiler": ["cuda-nvcc"], "cuda_compiler_version": [cuda]} if cuda else {}
    (rendered,) = stage0.Stage0Recipe.from_file(ROOT / "packaging/conda/recipe.yaml").render(
        VariantConfig(chosen)
    )
    recipe = rendered.recipe.to_dict()
    assert recipe["package"] == {"name": "tigon", "version": tigon.__version__}
    assert any("cuda" in each for each in recipe["requirements"]["build"]) == bool(cuda)
    env = recipe["build"]["script"]["env"]
    assert env["TIGON_CUDA"] == ("ON" if cuda else "OFF")
    assert f"release_archs='{env['TIGON_CUDA_ARCHS']}'" in text("tools/bootstrap.sh")
    torch = re.search(r'dependencies = \["torch(.*)"\]', text("pyproject.toml"))[1]
    assert f"pytorch {torch}" in recipe["requirements"]["run"]


@pytest.fixture
def clone(tmp_path):
    """A repository of the files that a release edits, and a Makefile that leaves wheels."""
    (tmp_path / "python/tigon").mkdir(parents=True)
    (tmp_path / "python/tigon/__init__.py").write_text('x = 1\n__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2026-01-01\n"
    )
    (tmp_path / "CITATION.cff").write_text("title: Tigon\nversion: 0.1.0\ndate-released: 2026-01-01\n")
    wheel = "tigon-0.2.0-py3-none-manylinux_2_34_x86_64.whl"
    (tmp_path / "Makefile").write_text(
        ".PHONY: lint test docs kernels-repo\nlint test docs kernels-repo:\n"
        f"wheel:\n\tmkdir -p dist/cpu && touch dist/{wheel} dist/cpu/{wheel}\n"
    )
    (tmp_path / ".gitignore").write_text("dist\n")
    for command in (
        ["init", "-q"],
        ["config", "user.email", "a@b"],
        ["config", "user.name", "a"],
        ["add", "-A"],
        ["commit", "-qm", "one"],
    ):
        release.git(tmp_path, *command)
    return tmp_path


def test_dry_run_changes_nothing(clone, capsys):
    release.release(clone, "0.2.0", dry_run=True)
    shown = capsys.readouterr().out
    assert '+__version__ = "0.2.0"' in shown and "+## [0.2.0] - " in shown
    assert "make wheel TIGON_CUDA=OFF\n" in shown and "git tag v0.2.0" in shown
    assert release.git(clone, "status", "--porcelain") == "" and release.git(clone, "tag") == ""


def test_release(clone):
    """The version is set, the entries are dated, the commit is tagged; a second time there is a tag."""
    release.release(clone, "0.2.0", dry_run=False)
    assert '__version__ = "0.2.0"\n' in (clone / "python/tigon/__init__.py").read_text()
    changelog = (clone / "CHANGELOG.md").read_text()
    assert re.search(r"## \[Unreleased\]\n\n## \[0\.2\.0\] - [\d-]+\n\n### Added\n\n- A thing\.\n", changelog)
    assert "\nversion: 0.2.0\n" in (clone / "CITATION.cff").read_text()
    assert release.git(clone, "tag", "--points-at", "HEAD") == "v0.2.0"
    with pytest.raises(release.Refused, match="no entries"):
        release.release(clone, "0.2.1", dry_run=False)


def test_failure_puts_the_files_back(clone):
    (clone / "Makefile").write_text("lint:\n\tfalse\n")
    release.git(clone, "commit", "-qam", "two")
    with pytest.raises(subprocess.CalledProcessError):
        release.release(clone, "0.2.0", dry_run=False)
    assert release.git(clone, "status", "--porcelain") == "" and release.git(clone, "tag") == ""


@pytest.mark.parametrize("version", ["0.2", "v0.2.0", "0.2.0-rc1"])
def test_version_that_is_none(clone, version):
    with pytest.raises(release.Refused, match="a version is"):
        release.release(clone, version, dry_run=True)
