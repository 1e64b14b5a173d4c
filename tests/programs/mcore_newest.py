"""The newest Megatron-Core. Its wheels name Python 3.12; what runs here of it is Python of 3.11 and newer."""

import os
import subprocess
import sys

import mcore
from program import ROOT, case

PROGRAM, DISTRIBUTION = "Megatron-Core, newest", mcore.DISTRIBUTION
PACKAGES, ALONE = "pytest==9.1.1 triton==3.7.1", "megatron-core==0.19.2"
if sys.version_info < (3, 12):
    ALONE = "--ignore-requires-python --python-version 3.12 --only-binary=:all: --target {site} " + ALONE
CASES = [*mcore.CASES]
CHEAP = True
MOE = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}  # fmt: skip
for name, changes in (  # the router of 0.16 asks for Transformer Engine
    ("GPTModel, experts", MOE),
    ("HybridModel of local layers and experts", {"pattern": "*-*E", **MOE}),
):
    case(CASES, name, "the same", changes)(mcore.train)

TESTS = ("test_megatron", "test_megatron_patch", "test_compat_liger_megatron", "test_hf_distributed")


@case(CASES, "GPTModel of compat/megatron/tigon.patch", "`TransformerConfig(use_tigon=True)`")
def patched(with_tigon, folder):
    """The package with the patch in it; Tigon's run also has the project's tests pass beside this version."""
    import test_megatron_patch

    if with_tigon:
        tests = [ROOT / f"tests/hf/{name}.py" for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-qxk", "megatron", "-p", "no:cacheprovider", *tests]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT / "python")}, cwd=ROOT, check=True)
    test_megatron_patch.patch(folder)
    sys.path.insert(0, str(folder))
    return mcore.train(False, folder, {"use_tigon": with_tigon})
