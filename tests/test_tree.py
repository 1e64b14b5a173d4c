"""The layout holds, and its checker sees what it is for."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
from check_tree import MAX_LINES, check_op, check_tree


def test_tree():
    """Includes, files of an op, contracts and lengths."""
    assert check_tree(ROOT) == []


@pytest.mark.xdist_group("tree")
def test_groups_are_known_to_xdist(request):
    """Tests of a group share a process, and what it has set up: versions of pytest and xdist that agree."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@tree")


@pytest.fixture
def small_tree(tmp_path):
    """base, torch and one op of the real tree: in order."""
    for folder in ("csrc/tigon/base", "csrc/tigon/torch", "csrc/tigon/ops/rms_norm"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("python/tigon/ops/rms_norm.py", "tests/cases/rms_norm.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / OP / "rms_norm.cpp").touch()  # that an op with entries by hand has
    assert check_tree(tmp_path) == []
    return tmp_path


OP = "csrc/tigon/ops/rms_norm"
INCLUDED = "tigon/ops/rms_norm"


@pytest.mark.parametrize(
    "file, line, message",
    [
        ("csrc/tigon/base/tensor.h", f'#include "{INCLUDED}/rms_norm.h"', "is base: it may not include"),
        (f"{OP}/rms_norm_math.inc", f'#include "{INCLUDED}/rms_norm.h"', "is math: it may not include"),
        (f"{OP}/rms_norm_cpu.cpp", '#include "tigon/ops/glu/glu.h"', "is backend: it may not include"),
        (f"{OP}/rms_norm.cpp", f'#include "{INCLUDED}/rms_norm_math.inc"', "is op: it may not include"),
        (f"{OP}/rms_norm.cpp", '#include "tigon/torch/shim.h"', "is op: it may not include"),
        (f"{OP}/rms_norm_cuda.cu", "#include <torch/csrc/stable/tensor.h>", "only tigon/torch and"),
        (f"{OP}/rms_norm.cpp", '#include "rms_norm.h"', "from csrc"),
        pytest.param(f"{OP}/rms_norm_cpu.cpp", "//\n" * MAX_LINES, f"at most {MAX_LINES}", id="long"),
    ],
)
def test_planted_violation(small_tree, file, line, message):
    """One more line in a file of an orderly tree."""
    path = small_tree / file
    path.write_text(line + "\n" + path.read_text())
    errors = check_tree(small_tree)
    assert len(errors) == 1
    assert file in errors[0]
    assert message in errors[0]


@pytest.mark.parametrize("file", [f"{OP}/rms_norm_cuda.cu", "tests/cases/rms_norm.py"])
def test_missing_sibling(small_tree, file):
    """An op without its CUDA backend, without its cases."""
    (small_tree / file).unlink()
    assert [error.split(":")[0] for error in check_tree(small_tree)] == [file]


def test_property_of_a_named_tuple(small_tree):
    """PyTorch 2.10 traces methods of named tuples, not their properties."""
    path = small_tree / "python/tigon/ops/rms_norm.py"
    body = "    pairs: int\n\n    @property\n    def some(self):\n        return self.pairs > 0\n"
    path.write_text("class Form(NamedTuple):\n" + body)
    errors = check_tree(small_tree)
    assert len(errors) == 1
    assert "rms_norm.py: Form.some is a property of a named tuple" in errors[0]


def test_missing_heading(small_tree):
    """A contract that does not say what it saves."""
    header = small_tree / OP / "rms_norm.h"
    header.write_text(header.read_text().replace("// Saved", "// Kept "))
    assert check_tree(small_tree) == [f"{OP}/rms_norm.h: the contract has no line '// Saved'"]


def test_engine_and_driver():
    """What ops share has no adaptor and no cases; what drives it no kernels of its own."""
    engine, driver = (ROOT / f"csrc/tigon/ops/{name}" for name in ("loss_head", "linear_cross_entropy"))
    assert not list(engine.glob("*_torch.cpp"))
    assert not list(driver.glob("*_cuda.cu"))
    assert check_op(ROOT, "loss_head") == check_op(ROOT, "linear_cross_entropy") == []


@pytest.mark.parametrize("file", ["loss_head_cuda.cu", "loss_head.cpp"])
def test_missing_part_of_an_engine(tmp_path, file):
    """An engine without its CUDA backend, without its core."""
    folder = "csrc/tigon/ops/loss_head"
    shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / folder / file).unlink()
    assert [error.split(":")[0] for error in check_op(tmp_path, "loss_head")] == [f"{folder}/{file}"]


def test_two_modules_that_import_each_other(small_tree):
    package = small_tree / "python/tigon"
    (package / "one.py").write_text("from tigon.two import b\n")
    (package / "two.py").write_text("def b():\n    from tigon import one\n    from tigon.one import a\n")
    assert check_tree(small_tree) == ["python/tigon/one.py: it and tigon.two import each other"]
