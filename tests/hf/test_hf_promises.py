"""What holds for every part that `apply` replaces: copies, undo, compilation, checkpoints, float64, autocast.

A part is a model in which it runs. The files of the parts have what is particular to them.
"""

import contextlib
import copy

import pytest
import torch
import transformers
from graph_recorder import recording
from tiny import (
    adapted,
    assert_step_as_good,
    attributes,
    batch,
    loaded,
    report_of,
    same,
    same_bits,
    step,
    unequal,
)
from tiny import make as tiny
from tiny_config import tiny_config

from tigon.integrations.transformers import apply, fp8, undo
from tigon.integrations.transformers.forward import bound


def make(family="llama", **changes):
    return tiny(family, **{"num_hidden_layers": 1, "use_cache": False} | changes)


def mixtral(**changes):
    """Without router logits: a hook of transformers that collects them can not be pickled."""
    return make("mixtral", output_router_logits=False, **changes)


def of_type(model_type):
    torch.manual_seed(0)
    config = tiny_config(transformers.CONFIG_MAPPING[model_type]())
    return transformers.AutoModelForCausalLM.from_config(config).train()


def lora(**options):
    return adapted(make(), target_modules=["q_proj", "v_proj", "down_proj"], **options)


def lora_of_experts():
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = mixtral(experts_implementation="grouped_mm")
    return adapted(model, target_modules=["q_proj"], target_parameters=names)


# A model, options of `apply`, slots of which its report has something.
PARTS = {
    "llama": (lambda: make("llama_bias_tied"), {}, "norm mlp rope loss"),
    "gemma": (lambda: make("gemma"), {}, "norm mlp rope loss"),
    "gemma2": (lambda: make("gemma2"), {}, "norm mlp rope loss"),
    "phi3": (lambda: make("phi3"), {"qkv": True}, "norm mlp rope loss qkv"),
    "qwen3": (lambda: make("qwen3"), {"qk_norm": True}, "qk_norm"),
    "mixtral": (mixtral, {}, "experts router"),
    "grouped_mm": (lambda: mixtral(experts_implementation="grouped_mm"), {}, "experts router"),
    "deepseek_v3": (lambda: of_type("deepseek_v3"), {}, "router"),
    "deepseek_v4": (lambda: of_type("deepseek_v4"), {}, "hyper"),
    "lora": (lora, {}, "lora"),
    "lora with biases": (lambda: lora(lora_bias=True), {}, "lora"),
    "dora": (lambda: lora(use_dora=True), {}, "lora"),
    "lora of experts": (lora_of_experts, {}, "lora experts"),
    "fp8": (make, {"fp8": "rowwise"}, "fp8"),
    "fp8 and lora": (lora, {"fp8": "rowwise"}, "fp8 lora"),
    "bytes alone": (lora, {"fp8": "rowwise", "fp8_base_only": True}, "fp8 lora"),
    "norms again": (make, {"recompute": "norms"}, ""),
    "layers again": (lambda: make(num_hidden_layers=2), {"recompute": 0.5}, ""),
    "graphs": (make, {"graphs": True}, "norm"),
}
LORAS = ("lora", "lora with biases", "dora")
DOUBLE = ("llama", "gemma", "gemma2", "phi3", "qwen3", "mixtral", *LORAS)  # of stock
GPU = ("llama", "gemma2", "phi3", "qwen3", *LORAS)
EAGER = ("deepseek_v4", "bytes alone", "graphs")  # compiled, stock of the first has more gradients


@pytest.fixture(autouse=True)
def all_is_fused(monkeypatch):
    """Linears of any size compute in float8; graphs are recorded."""
    monkeypatch.setattr(fp8, "gains", lambda rows, columns: True)
    torch._dynamo.reset()
    with recording():
        yield


def stock(name, device="cpu"):
    """The model before `apply`, and a batch for it."""
    if device == "cuda" and name not in GPU:
        pytest.skip("held on the CPU")
    model = PARTS[name][0]().to(device)
    size = model.config.get_text_config().vocab_size
    inputs = {key: value.clamp(max=size - 1) for key, value in batch(device, tokens=32).items()}
    return model, inputs


def patched(name, device="cpu"):
    """The model, a batch, its settled step: MLPs pay for the head from the second on, graphs replay."""
    model, inputs = stock(name, device)
    report = apply(model, **PARTS[name][1])
    assert all(report.count(slot) for slot in PARTS[name][2].split()), str(report)
    return model, inputs, settled(model, inputs)


def settled(model, inputs):
    for _ in range(3):
        step(model, inputs)
    return step(model, inputs)


def agree(got, wanted, device, exact=True):
    """To the bit, but for a GPU's sums in any order."""
    same_bits(got, wanted) if exact and device == "cpu" else same(got, wanted)


@pytest.mark.parametrize("copied", [copy.deepcopy, loaded])
@pytest.mark.parametrize("name", PARTS)
def test_a_copy_is_patched_for_itself(name, copied, device):
    model, inputs, wanted = patched(name, device)
    twin = copied(model)
    for path, module in twin.named_modules():
        assert "forward" not in vars(module) or bound(module).module is module, path
    assert str(report_of(twin)).count("->") == str(report_of(model)).count("->") > 0
    agree(settled(twin, inputs), wanted, device)
    with torch.no_grad():
        for p in (p for p in twin.parameters() if p.requires_grad):
            p.mul_(1.5)
    assert unequal(step(twin, inputs), wanted)
    agree(step(model, inputs), wanted, device)
    undo(model)
    assert any("forward" in vars(module) for module in twin.modules())
    undo(twin)
    assert not any("forward" in vars(module) for module in twin.modules())


@pytest.mark.parametrize("name", [name for name in PARTS if name != "bytes alone"])
def test_undo_leaves_the_model_as_it_was(name, device):
    model, inputs = stock(name, device)
    wanted, before, keys = step(model, inputs), attributes(model), [*model.state_dict()]
    apply(model, **PARTS[name][1])
    assert attributes(model) != before and [*model.state_dict()] == keys
    settled(model, inputs)
    undo(model)
    after = attributes(model)
    assert after.keys() == before.keys()
    for path, names in before.items():
        assert after[path].keys() == names.keys(), path
        assert [key for key, value in names.items() if after[path][key] is not value] == [], path
    agree(step(model, inputs), wanted, device)
    undo(model)  # harmless


@pytest.mark.parametrize("name", [name for name in PARTS if name not in EAGER])
def test_compiled_in_one_graph(name, device):
    model, inputs, (loss, gradients) = patched(name, device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = step(compiled, inputs)
    same(got, (loss, {f"_orig_mod.{path}": g for path, g in gradients.items()}), ulps=512)
    assert report_of(model).head_calls.traced and not report_of(model).head_calls.materialised


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_checkpointed(name, reentrant, device):
    model, inputs, wanted = patched(name, device)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    agree(settled(model, inputs), wanted, device, exact="lora" not in PARTS[name][2])


@pytest.mark.parametrize("name", DOUBLE)
@pytest.mark.parametrize("when", ["before", "after"])
def test_float64(name, when):
    """A step of stock, whose head rounds logits to float32."""
    model, inputs = stock(name)
    wanted = step(copy.deepcopy(model).double(), inputs)
    if when == "before":
        model.double()
    apply(model, **PARTS[name][1])
    got = settled(model.double(), inputs)
    assert {t.dtype for t in (got[0], *got[1].values())} == {torch.float64}
    rounded = [(loss.float(), {n: g.float() for n, g in found.items()}) for loss, found in (got, wanted)]
    same(*rounded, ulps=64)


@pytest.mark.parametrize("name", [name for name in DOUBLE if name != "mixtral"])  # whose experts it decides
def test_autocast(name, device):
    """Dtypes are stock's, and so is the error but for a rounding to bfloat16."""
    model, inputs = stock(name, device)
    exact, steps = step(copy.deepcopy(model).double(), inputs), []
    for patch in (contextlib.nullcontext, lambda: apply(model, **PARTS[name][1])):
        patch()
        with torch.autocast(device, torch.bfloat16):
            steps.append(settled(model, inputs))
    wanted, got = steps
    assert {n: g.dtype for n, g in got[1].items()} == {n: g.dtype for n, g in wanted[1].items()}
    assert_step_as_good(got, wanted, exact, places=1, ulp=2.0**-8)
