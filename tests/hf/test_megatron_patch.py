"""compat/megatron/tigon.patch, applied to the Megatron-Core that it is for, runs there."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCH = ROOT / "compat/megatron/tigon.patch"
VERSION = "0.19.2"

RUN = """
import sys
import pytest, torch, torch.distributed as dist
import megatron_tiny as tiny
from megatron_tiny import config, gpt, hybrid, same, step
import tigon.megatron as tm
from tigon.integrations.megatron.apply import STATE

class Missing:
    def find_spec(name, *rest):
        if name.partition(".")[0] == "tigon":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with tiny.megatron():
    wanted = step(gpt())
    model = gpt(use_tigon=True)
    report = vars(model)[STATE].report
    same(step(model), wanted)
    assert report.count("norm") == 5 and report.count("mlp") == 2 and report.count("rope") == 2, report
    report.check()
    assert vars(gpt()).get(STATE) is None
    report = vars(hybrid(use_tigon=True))[STATE].report
    assert report.count("norm") and report.count("loss"), report
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", use_tigon=True)
    norms = [type(m).__name__ for m in gpt(lambda conf: spec).modules() if "Norm" in type(m).__name__]
    assert norms == ["RMSNorm"] * 5 and spec.submodules.input_layernorm is tm.NormWithResidual
    same(step(gpt(lambda conf: spec)), wanted)
    with pytest.raises(ValueError, match="use_tigon and use_kitchen"):
        get_gpt_layer_local_spec(use_tigon=True, use_kitchen=True)
    local = {"use_transformer_engine": False, "normalization": "RMSNorm"}
    block = lambda conf: get_gpt_decoder_block_spec(conf, **local)
    model = gpt(block, use_tigon=True, mtp=1)
    same(step(model), step(gpt(mtp=1)))
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    assert len(norms) == 10 and all(isinstance(m, tm.RMSNorm) for m in norms), norms
    for other in ({"use_kitchen": True}, {"transformer_impl": "inference_optimized"}):
        with pytest.raises(ValueError, match="use_tigon"):
            config(use_tigon=True, **other)
    calls, own = [], tm.fused_vocab_parallel_cross_entropy
    tm.fused_vocab_parallel_cross_entropy = lambda *args: calls.append(1) or own(*args)
    same(step(gpt(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="tigon")), wanted)
    assert calls
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
    with pytest.raises(AssertionError, match="cross_entropy_loss_fusion=False"):
        tiny.deterministic_mode(**fused)
    fused["cross_entropy_fusion_impl"] = "tigon"
    tiny.deterministic_mode(**fused)
    for more in ({}, {"use_tigon": True}):
        model = gpt(deterministic_mode=True, **fused, **more)
        first, second = step(model), step(model)
        same(first, wanted)
        assert torch.equal(first[0], second[0])
        assert all(torch.equal(second[1][name], gradient) for name, gradient in first[1].items())
    logits, labels = torch.randn(16, 2, tiny.VOCAB), torch.randint(0, tiny.VOCAB, (2, 16))
    whole, alone = (model.compute_language_model_loss(labels[i:], logits[:, i:].contiguous()) for i in (0, 1))
    assert torch.equal(whole[1:], alone) and torch.are_deterministic_algorithms_enabled()
    model = gpt(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="tigon")
    with pytest.MonkeyPatch.context() as patch:  # as where tigon is not installed
        for name in [name for name in sys.modules if name.partition(".")[0] == "tigon"]:
            patch.delitem(sys.modules, name)
        patch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
        for asked, call in (
            ("use_tigon=True", lambda: gpt(use_tigon=True)),
            ("use_tigon=True", lambda: gpt(block, use_tigon=True)),
            ("use_tigon=True", lambda: get_gpt_layer_local_spec(use_tigon=True)),
            ("cross_entropy_fusion_impl='tigon'", lambda: step(model)),
        ):
            with pytest.raises(ImportError, match=f"{asked} needs the package tigon, which is not installed"):
                call()
        same(step(gpt()), wanted)
print("ran")
"""


def installed() -> str | None:
    """The version of Megatron-Core, if there is one."""
    try:
        return importlib.metadata.version("megatron-core").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def patch(folder: Path) -> None:
    """A copy of the installed package in this folder, with the patch in it."""
    package = importlib.metadata.distribution("megatron-core").locate_file("megatron")
    shutil.copytree(package, folder / "megatron")
    subprocess.run(["patch", "-s", "-p1", "--fuzz=0", "-i", PATCH], cwd=folder, check=True)


@pytest.mark.skipif(
    installed() != VERSION, reason=f"the patch is of Megatron-Core {VERSION}, not {installed()}"
)
def test_the_patched_package(tmp_path):
    patch(tmp_path)
    tests = (str(ROOT / path) for path in ("python", "tests", "tests/hf"))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tmp_path), *tests, os.environ.get("PYTHONPATH", ""))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", RUN]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("ran\n"), done.stderr[-3000:]
