"""The liger_kernel interface: found when asked for, shaped as callers know it, right in numbers."""

import importlib
import importlib.metadata
import inspect
import json
import pickle
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from test_compat_liger_ops import drawn, get
from tiny import VOCABULARY, batch, close, config, make, report_of, same, step
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import tigon
from tigon.integrations import liger
from tigon.integrations.liger import functional as LF
from tigon.integrations.liger import modules as LM
from tigon.integrations.liger import patching, paths
from tigon.integrations.transformers import LazyLogits

ROOT = Path(__file__).resolve().parents[2]


def write(folder, files):
    """Files below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# --- found and not found ---------------------------------------------------------------------


def test_availability_checks_pass(facade):
    from transformers.utils import is_liger_kernel_available

    assert is_liger_kernel_available()
    assert importlib.metadata.version("liger-kernel") == importlib.metadata.version("liger_kernel") == "0.8.5"
    assert "liger-kernel" in importlib.metadata.packages_distributions()["liger_kernel"]
    module = importlib.import_module("liger_kernel")
    assert module.__version__ == "0.8.5" and module.__spec__ is not None


def test_uninstall_leaves_nothing(facade):
    from transformers.utils import is_liger_kernel_available

    importlib.import_module("liger_kernel.transformers.rms_norm")
    liger.uninstall()
    assert not liger.installed()
    assert not any(name.startswith("liger_kernel") for name in sys.modules)
    if importlib.util.find_spec("liger_kernel") is None:
        assert not is_liger_kernel_available()


def test_an_installed_liger_is_not_hidden_silently(tmp_path, monkeypatch):
    write(tmp_path, {"liger_kernel/__init__.py": "real = True\n"})
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(tigon.Error, match=rf"must not be installed.*{tmp_path}"):
        liger.install()
    assert not liger.installed() and importlib.import_module("liger_kernel").real
    liger.install(replace=True)
    try:
        assert importlib.import_module("liger_kernel").__version__ == "0.8.5"
    finally:
        liger.uninstall()
    assert importlib.import_module("liger_kernel").real
    del sys.modules["liger_kernel"]


def test_every_name_imports(facade):
    """From its module, whose names these are, and no two objects go by one name."""
    found = {}
    for path in paths.PATHS:
        module = importlib.import_module(f"liger_kernel.{path}".rstrip("."))
        for name in paths.names_of(path):
            assert found.setdefault(name, getattr(module, name)) is getattr(module, name), (path, name)


@pytest.mark.parametrize(
    "path, instead",
    [
        ("ops.LigerRopeFunction", r"the op's class in liger_kernel\.transformers"),
        ("ops.utils.element_mul_kernel", "torch's own"),
        ("ops.mlp", "tigon's function"),
        ("backends.dispatch", "each op has one implementation"),
        ("set_impl", "each op has one implementation"),
        ("chunked_loss.functional.liger_fused_linear_dpo", "the loss's class"),
        ("chunked_loss.fused_linear_ppo.LigerFusedLinearPPOBase", r"tigon\.linear_loss"),
        ("chunked_loss.LigerFusedLinearCosineSimilarityLoss", "cosine_similarity"),
        ("transformers.grpo_loss.triton_grpo_loss", r"tigon\.policy_loss"),
        ("transformers.model.llama.lce_forward", r"tigon\.apply\(model\)"),
        ("transformers.monkey_patch._patch_rms_norm_module", r"tigon\.apply\(model\)"),
        ("transformers.trainer.orpo_trainer.LigerORPOTrainer", "TigonTrainerCallback"),
        ("transformers.multi_token_attention", "no op"),
        ("transformers.LigerExperts", r"tigon\.experts"),
        ("transformers.LigerPhi3SwiGLUMLP", r"tigon\.transformers\.FusedGatedMLP"),
        ("transformers.LigerTiledSwiGLUMLP", r"torch\.utils\.checkpoint"),
        ("transformers.swiglu.LigerQwen3MoeSwiGLUMLP", "LigerSwiGLUMLP"),
        ("transformers.LigerDyT", r"tigon\.nn\.DyT"),
        ("transformers.functional.liger_rms_norm", r"tigon\.rms_norm"),
        ("transformers.functional.liger_fused_add_rms_norm", r"tigon\.add_rms_norm"),
        ("transformers.functional.liger_attn_res", r"tigon\.attention_residual"),
        ("transformers.functional.liger_qwen2vl_mrope", "mrope_section"),
        ("transformers.llama4_rope.liger_llama4_text_rotary_pos_emb", "interleaved=True"),
        ("transformers.vocab_parallel_cross_entropy", r"tigon\.parallel\.cross_entropy"),
        ("utils.transformers_version_dispatch", "torch's own"),
        ("transformers.functional.liger_fused_neighborhood_attention", "flex_attention"),
        ("transformers.moe.LigerExpertParallelFusedMoe", "grouped_mlp"),
        ("transformers.experimental.matmul", r"torch\.matmul"),
        ("transformers.rms_norm.LigerRMSNormForGlm4", "LigerRMSNorm with offset"),
        ("testing", "assert_close"),
        ("utils.infer_device_arch", "torch's own"),
    ],
)
def test_what_is_dropped_says_what_to_use(path, instead, facade):
    """An import is an ImportError, as an attribute it is an AttributeError: probes of programs work."""
    words = rf"^\[compat\.liger\] liger_kernel\.{re.escape(path)} is not part .*: use .*{instead}"
    parent, _, name = f"liger_kernel.{path}".rpartition(".")
    if paths.is_module(parent[len("liger_kernel.") :]):
        assert not hasattr(importlib.import_module(parent), name)
        with pytest.raises(AttributeError, match=words):
            getattr(importlib.import_module(parent), name)
    else:
        words = words.replace(re.escape(path), ".*")  # of the module above it
    with pytest.raises(ImportError, match=words):
        exec(f"from {parent} import {name}")
    with pytest.raises(ImportError, match=words):
        importlib.import_module(f"{parent}.{name}")


def test_a_wrong_call_is_named(facade):
    for name, label in (
        ("LigerCrossEntropyLoss", "LigerCrossEntropyLoss.__init__"),
        ("apply_liger_kernel_to_llama", "apply_liger_kernel_to_llama"),
    ):
        call = getattr(importlib.import_module("liger_kernel.transformers"), name)
        with pytest.raises(TypeError, match=rf"^{label}\(\) got an unexpected keyword argument 'smooth'"):
            call(smooth=1)


def test_unknown_names_are_no_attributes(facade):
    module = importlib.import_module("liger_kernel.transformers")
    assert not hasattr(module, "LigerNothing")
    with pytest.raises(AttributeError, match="has no LigerNothing"):
        _ = module.LigerNothing
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("liger_kernel.nothing")


def test_modules_list_their_names(facade):
    """dir() and getmembers see names that are looked up when first used; one apply function a model type."""
    module = importlib.import_module("liger_kernel.transformers.monkey_patch")
    found = {
        value for name, value in inspect.getmembers(module, inspect.isfunction) if name.startswith("apply_")
    }
    assert found == set(module.MODEL_TYPE_TO_APPLY_LIGER_FN.values())
    assert {name for name in dir(patching) if name.startswith("apply_")} == {
        name for name in dir(module) if name.startswith("apply_")
    }


def test_auto_class_calls_the_types_function(monkeypatch):
    """That of the table, which a program may have exchanged, with the switches among the keywords."""
    seen = []
    monkeypatch.setitem(
        patching.MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", lambda model, rope: seen.append((model, rope))
    )
    model = patching.AutoLigerKernelForCausalLM.from_config(config(), rope=False, swiglu=True)
    assert seen == [(model, False)]


INTERFACE = json.loads((Path(__file__).parent / "liger_interface.json").read_text())


@pytest.mark.parametrize("name", INTERFACE)
def test_signature(name):
    """Names, order, kinds and defaults of what callers pass."""
    scope = {"torch": torch, "Optional": None, "AutoModelForCausalLM": AutoModelForCausalLM}
    wanted = inspect.signature(eval(f"lambda {INTERFACE[name]}: 0", scope))
    owner, _, method = name.partition(".")
    found = get(owner)
    got = list(inspect.signature(getattr(found, method) if method else found).parameters.values())
    got = got[1:] if method == "forward" else got
    positional = method == "apply"  # autograd's apply takes no keywords: names do not matter

    def shape(p):
        return ("" if positional else p.name, p.kind, p.default)

    for mine, theirs in zip(got, wanted.parameters.values(), strict=True):
        if positional and theirs.default is theirs.empty:
            mine = mine.replace(default=theirs.default)
        assert shape(mine) == shape(theirs)


# --- arithmetic ------------------------------------------------------------------------------


def labels(rows, vocabulary, seed=0):
    target = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))
    return target.masked_fill(torch.arange(rows) % 4 == 1, -100)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("head", [False, True])
def test_cross_entropies(head, reduction):
    """Loss, z loss, accuracy and predictions, from logits and from hidden states."""
    hidden, weight, target = drawn(13, 16), drawn(29, 16, seed=1), labels(13, 29)
    logits = 3 * torch.tanh(hidden @ weight.T / 3)
    hit = (target != -100) & (torch.arange(13) % 3 == 0)
    target = torch.where(hit, logits.argmax(-1), target)
    rows = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
    z = torch.where(target != -100, 0.01 * logits.logsumexp(-1).square(), 0.0)
    counts = (target != -100).sum()

    def reduced(x):
        return {"mean": x.sum() / counts, "sum": x.sum(), "none": x}[reduction]

    options = {"lse_square_scale": 0.01, "label_smoothing": 0.1, "reduction": reduction, "softcap": 3.0}
    options |= {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    if head:
        got = LM.LigerFusedLinearCrossEntropyLoss(**options)(weight, hidden, target)
    else:
        got = LM.LigerCrossEntropyLoss(**options)(hidden @ weight.T, target)
    assert isinstance(got, LF.CrossEntropyOutput)
    close(got.loss, reduced(rows + z))
    close(got.z_loss, reduced(z))
    hits = (logits.argmax(-1) == target).float()
    close(got.token_accuracy, hits if reduction == "none" else hits.sum() / counts)
    assert torch.equal(got.predicted_tokens, torch.where(target == -100, -1, logits.argmax(-1)))
    options |= {"return_z_loss": False, "return_token_accuracy": False, "return_predicted_tokens": False}
    alone = LF.liger_fused_linear_cross_entropy(hidden, weight, target, **options)
    close(alone, reduced(rows + z))


@pytest.mark.parametrize("head", [False, True])
def test_z_loss_beside_class_weights(head):
    """Liger divides the weighted loss by the weights and the z-loss by the rows; in the logits' dtype."""
    hidden, weight, target = drawn(13, 16).double(), drawn(29, 16, seed=1).double(), labels(13, 29)
    classes = drawn(29, seed=2).abs() + 0.1
    logits = (3 * torch.tanh(hidden @ weight.T / 3)).requires_grad_()
    z = torch.where(target != -100, 0.1 * logits.logsumexp(-1).square(), 0.0).sum() / (target != -100).sum()
    options = {"lse_square_scale": 0.1, "label_smoothing": 0.1}
    wanted = F.cross_entropy(logits, target, weight=classes.double(), label_smoothing=0.1) + z
    (gradient,) = torch.autograd.grad(wanted, logits)
    if head:
        got = LF.liger_fused_linear_cross_entropy(
            hidden.float(), weight.float(), target, ce_weight=classes, softcap=3.0, **options
        )
    else:
        again = logits.detach().float().requires_grad_()
        got = LF.liger_cross_entropy(again, target, weight=classes, **options)
        got.backward()
        close(again.grad, gradient.float())
    close(got, wanted.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_have_ligers_dtypes(dtype):
    """Of logits: theirs, tigon's own stays float32. From hidden states: float32, its z-loss theirs."""
    x, target = drawn(5, 9).to(dtype), torch.tensor([3, -100, 0, 7, 2])
    got = LM.LigerCrossEntropyLoss(return_z_loss=True, return_token_accuracy=True, lse_square_scale=0.1)(
        x, target
    )
    assert (got.loss.dtype, got.z_loss.dtype, got.token_accuracy.dtype) == (dtype, dtype, torch.float32)
    assert LF.liger_cross_entropy(x, target, reduction="none").dtype == dtype
    assert tigon.cross_entropy(x, target).dtype == torch.float32
    table = drawn(9, 9).to(dtype)
    got = LF.liger_fused_linear_cross_entropy(x, table, target, return_z_loss=True)
    assert (got.loss.dtype, got.z_loss.dtype) == (torch.float32, dtype)


def test_a_loss_is_a_module_of_its_options():
    """It pickles, says what they are, and compiles as one graph."""
    hidden, weight, target = drawn(5, 16), drawn(29, 16, seed=1), labels(5, 29)
    loss = LM.LigerFusedLinearCrossEntropyLoss(ce_weight=torch.ones(29), softcap=3.0)
    again = pickle.loads(pickle.dumps(loss))
    assert "softcap=3.0" in repr(again) and "ce_weight" not in repr(again) and again.training
    loss.label_smoothing = again.label_smoothing = 0.1
    wanted = LF.liger_fused_linear_cross_entropy(hidden, weight, target, **loss.options())
    torch._dynamo.reset()
    for call in (loss, again, torch.compile(loss, backend="eager", fullgraph=True)):
        assert torch.equal(call(weight, hidden, target), wanted)


def test_token_scaling_and_functions():
    hidden, weight, target = drawn(9, 16), drawn(29, 16, seed=1), labels(9, 29)
    rows = F.cross_entropy(hidden @ weight.T, target, reduction="none")
    scaled = torch.where(target == -100, 0.0, (-rows).exp()) * rows
    loss = LF.liger_fused_linear_cross_entropy(hidden, weight, target, use_token_scaling=True)
    close(loss, scaled.sum() / (target != -100).sum())
    entropy = torch.distributions.Categorical(logits=hidden @ weight.T / 2).entropy()
    nll, got = get("LigerFusedLinearScaledCrossEntropyFunction").apply(
        hidden, weight, target, 2.0, return_entropy=True
    )
    close(nll, F.cross_entropy(hidden @ weight.T / 2, target, reduction="none"))
    close(got, torch.where(target == -100, 0.0, entropy))


def test_causal_loss_calls_the_public_function(facade, monkeypatch):
    """Axolotl exchanges the function in liger_kernel.transformers.functional: that one must run."""
    from liger_kernel.transformers import functional
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    hidden, weight = drawn(2, 7, 16), drawn(29, 16, seed=1)
    target = labels(14, 29).view(2, 7)
    flat = F.pad(target, (0, 1), value=-100)[:, 1:].reshape(-1)
    wanted = F.cross_entropy((hidden @ weight.T).view(-1, 29), flat, reduction="sum") / 5
    got = LigerForCausalLMLoss(hidden, weight, target, 16, num_items_in_batch=torch.tensor(5), unknown=1)
    close(got, wanted)
    monkeypatch.setattr(
        functional, "liger_fused_linear_cross_entropy", lambda *args, **options: torch.tensor(3.0)
    )
    assert LigerForCausalLMLoss(hidden, weight, target, 16) == 3.0


# --- patching --------------------------------------------------------------------------------


def test_instance_patch_follows_the_switches(facade, caplog):
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model = make()
    _apply_liger_kernel_to_instance(model, rope=False, swiglu=None, unknown_key=True)
    assert caplog.messages == ["[compat.liger] no switch is called unknown_key: ignored"]
    report = tigon.apply(model, mlp=False, rope=False)
    assert report.count("norm") == 5 and report.count("loss") == 1
    assert report.count("mlp") == report.count("rope") == 0


def test_outputs_with_accuracy_and_predictions():
    """Their classes are transformers' own, and pickle; test_hf_loss_options.py has their values."""
    stock, model, inputs = make(), make(), batch()
    patching._apply_liger_kernel_to_instance(model)
    patching._apply_liger_kernel_to_instance(model)
    output = model(**inputs, return_token_accuracy=True, return_predicted_tokens=True)
    assert isinstance(output, CausalLMOutputWithPast)
    assert type(pickle.loads(pickle.dumps(output))) is type(output)
    with pytest.raises(ValueError, match="skip_logits is True"):
        model.eval()(input_ids=inputs["input_ids"], skip_logits=True)
    tigon.undo(model)
    assert type(model(**inputs)) is type(stock(**inputs))


def test_both_losses_are_refused():
    """The message names the one that nobody has asked for: granite has another default than the rest."""
    for family, asked, default in (
        ("llama", "cross_entropy", "fused_linear_cross_entropy"),
        ("granite", "fused_linear_cross_entropy", "cross_entropy"),
    ):
        words = rf"must not both be True, got both \({default} by default: pass {default}=False\)$"
        with pytest.raises(tigon.Error, match=words):
            patching._apply_liger_kernel_to_instance(make(family), **{asked: True})
        both = {asked: True, default: True}
        with pytest.raises(tigon.Error, match="must not both be True, got both$"):
            patching._apply_liger_kernel_to_instance(make(family), **both)


def test_cross_entropy_and_a_loss_of_the_program(caplog):
    """InstructLab's: nn.CrossEntropyLoss of logits. The message says what helps, and it does."""
    model, inputs = make(), batch()

    def loss_of(model, inputs):
        logits, labels = model(inputs["input_ids"]).logits, inputs["labels"]
        return torch.nn.CrossEntropyLoss()(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))

    wanted = step(model, inputs, loss_of)
    patching.apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False, model=model)
    for _ in range(2):
        same(step(model, inputs, loss_of), wanted)
    (said,) = [r.getMessage() for r in caplog.records if "given labels" in r.getMessage()]
    assert "tigon.apply(model, lazy_logits=True)" in said
    pickle.loads(pickle.dumps(model))
    report = tigon.apply(model, lazy_logits=True)
    same(step(model, inputs, loss_of), wanted)
    loss = model(**inputs).loss
    assert report.head_calls.fused == 2 and report.head_calls.materialised == 0
    close(loss, wanted[0])


def test_cross_entropy_of_the_model_is_said_nothing_about(caplog):
    model = make()
    patching.apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False, model=model)
    model.eval()(batch()["input_ids"])
    step(model.train(), batch())
    model(batch()["input_ids"])
    assert not caplog.text and not model._forward_pre_hooks


def test_loss_of_logits(device):
    """cross_entropy=True: logits exist, their loss is tigon.cross_entropy; nothing global changes."""
    before = F.cross_entropy
    stock, model = make(device=device), make(device=device)
    patching._apply_liger_kernel_to_instance(
        model, cross_entropy=True, fused_linear_cross_entropy=False, rope=False, rms_norm=False, swiglu=False
    )
    assert F.cross_entropy is before
    inputs = batch(device)
    output = model(**inputs)
    assert isinstance(output.logits, torch.Tensor)
    assert model.loss_function is patching.logits_causal_lm_loss
    wanted = step(stock, inputs)
    got = step(model, inputs)
    same(got, wanted, ulps=64)


def test_unknown_model_type_gets_what_fits(caplog):
    """Liger would leave it; structures are recognised, so there is no reason to."""
    model = make()
    model.config.model_type = "of_my_own"
    patching._apply_liger_kernel_to_instance(model)
    assert report_of(model).count("loss") == 1
    empty = torch.nn.Sequential(torch.nn.Linear(2, 2))
    empty.config = types.SimpleNamespace(model_type="nothing_here")
    for nothing in (empty, "no module"):
        caplog.clear()
        patching._apply_liger_kernel_to_instance(nothing)
        assert "stays as it is" in caplog.text


@pytest.mark.parametrize("how", ["from_config", "from_pretrained"])
@pytest.mark.parametrize("name", ["AutoLigerKernelForCausalLM", "AutoTigonForCausalLM"])
def test_auto_classes(name, how, tmp_path):
    cls = getattr(tigon if "Tigon" in name else patching, name)
    off = {"mlp": False} if "Tigon" in name else {"swiglu": False}
    if how == "from_config":
        model = cls.from_config(config(), **off)
    else:
        make().save_pretrained(tmp_path)
        model = cls.from_pretrained(tmp_path, dtype=torch.bfloat16, **off)
        assert model.dtype == torch.bfloat16
    report = report_of(model)
    assert report.count("loss") == 1 and report.count("mlp") == 0
    assert type(model) is transformers.LlamaForCausalLM


# --- whole classes: models made or loaded after the patch, and models that exist already ----------


def test_class_level_patch(facade, tmp_path):
    """apply_liger_kernel_to_llama() before loading, as LLaMA-Factory and Axolotl do it."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    inputs = batch()
    stock = make()
    wanted = step(stock, inputs)
    stock.save_pretrained(tmp_path)
    before = transformers.LlamaForCausalLM.__init__
    assert MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] is apply_liger_kernel_to_llama
    apply_liger_kernel_to_llama(rope=None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").train()
    built = transformers.LlamaForCausalLM(config())
    other = make("qwen2")
    for model in (loaded, built):
        report = report_of(model)
        assert (report.count("norm"), report.count("mlp"), report.count("rope")) == (5, 2, 0)
        assert isinstance(model(**inputs).logits, LazyLogits)
        assert not hasattr(model.model, "_tigon_state"), "applied to the inner model too"
    assert not hasattr(other, "_tigon_state")
    got = step(loaded, inputs)
    same(got, wanted)
    liger.uninstall()
    assert transformers.LlamaForCausalLM.__init__ is before
    assert not hasattr(make(), "_tigon_state")


def test_class_level_patch_reaches_models_that_exist(facade):
    """oumi builds its model, then calls _apply_liger_kernel; what is patched or of another type stays."""
    from liger_kernel.transformers import _apply_liger_kernel

    model, stock, other, mine = make(), make(), make("qwen2"), make(seed=1)
    inner = make().model
    before = tigon.apply(mine, norm=False)
    inputs, wanted = batch(), step(stock, batch())
    _apply_liger_kernel("llama")
    assert report_of(model).count("norm") == report_of(inner).count("norm") == 5
    assert "_tigon_state" not in vars(model.model) and "_tigon_state" not in vars(other)
    assert report_of(mine) is before and before.count("norm") == 0
    same(step(model, inputs), wanted)
    report_of(model).check()
    report = report_of(model)
    _apply_liger_kernel("llama")
    assert report_of(model) is report


def test_class_level_patch_on_the_meta_device(facade):
    patching.apply_liger_kernel_to_llama()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config())
    assert report_of(model).count("norm") == 5
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.model.rotary_emb.inv_freq.copy_(make().model.rotary_emb.inv_freq)
    assert model.train()(**batch()).loss.isfinite()


# --- the distribution ------------------------------------------------------------------------


def test_distribution_on_disk(tmp_path):
    """compat/liger_kernel: the package alone, in a fresh process, without install()."""
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("a real Liger is installed")
    metadata = "Metadata-Version: 2.1\nName: tigon-liger-compat\nVersion: 0.8.5\n"
    package = ROOT / "compat/liger_kernel"
    assert 'version = "0.8.5"' in (package / "pyproject.toml").read_text()
    pytest.importorskip("setuptools", reason="needs setuptools to build the package")
    shutil.copytree(package, tmp_path / "source")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=tmp_path / "source", check=True)
    write(
        tmp_path,
        {
            "tigon_liger_compat-0.8.5.dist-info/METADATA": metadata,
            "tigon_liger_compat-0.8.5.dist-info/top_level.txt": "liger_kernel\n",
        },
    )
    script = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import importlib.metadata
assert importlib.metadata.version("liger-kernel") == importlib.metadata.version("liger_kernel") == "0.8.5"
from transformers.utils import is_liger_kernel_available
assert is_liger_kernel_available()
from liger_kernel.transformers import LigerRMSNorm, _apply_liger_kernel_to_instance
import liger_kernel, tigon.compat.liger
assert liger_kernel.__file__.startswith({str(tmp_path)!r}) and liger_kernel.__version__ == "0.8.5"
assert not tigon.compat.liger.installed()
tigon.compat.liger.install()  # no error: it is ours
assert tigon.compat.liger.installed()
from liger_kernel.transformers.functional import liger_modulated_rms_norm
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    clash = tmp_path / "liger_kernel-0.8.5.dist-info/METADATA"
    write(
        tmp_path, {str(clash.relative_to(tmp_path)): metadata.replace("tigon-liger-compat", "liger-kernel")}
    )
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport liger_kernel"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode and "both installed" in done.stderr
