"""PEFT's adapters of expert stacks on tigon.experts: each layout beside PEFT's own forward, and fp64."""

import contextlib
import copy
import importlib

import pytest
import torch
from test_hf_experts import CLASSES, Config
from tiny import assert_as_good, batch, close, make, report_of, same_bits
from tiny import step as model_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from tigon import apply, undo

peft = pytest.importorskip("peft")
E, K, T = Config.num_experts, 2, 20
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v4", "nemotron_h", "llama4")


class Sizes(Config):
    """H = 2 I: a shape does not tell which side is which."""

    num_local_experts, hidden_size = E, 48


def adapted(family, dtype=torch.float32, wide=False, names=None, **options):
    """A layer of experts in PEFT's wrappers, adapters not zero; `wide`: they are float32."""
    name = CLASSES.get(family, "Llama4TextExperts")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = Sizes("grouped_mm")
    config.hidden_act = "silu"
    torch.manual_seed(3)
    parts = {"experts": getattr(module, name)(config), "norm": nn.RMSNorm(48, 1e-6)}
    layer = nn.ModuleDict(parts).to(dtype)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    first = "gate_up_proj" if hasattr(layer["experts"], "gate_up_proj") else "up_proj"
    names = [f"experts.{n}" for n in names or (first, "down_proj")]
    made = {"r": E, "lora_alpha": 7, "init_lora_weights": False, "target_parameters": names} | options
    layer = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=[], **made), layer)
    for key, p in layer.named_parameters():
        if "lora_" in key:
            p.data = nn.init.normal_(p.data, std=0.2).to(torch.float32 if wide else dtype)
    return layer


def inputs_of(family, dtype):
    x = torch.randn(E * T if family == "llama4" else T, 48, generator=torch.Generator().manual_seed(1))
    if family == "llama4":
        return (x.to(dtype),)
    scores = torch.randn(T, E, generator=torch.Generator().manual_seed(2))
    weights, ids = scores.softmax(-1).topk(K, dim=-1)
    return x.to(dtype), ids.clamp(max=E - 2), weights.to(dtype)


def step(layer, inputs, run=lambda layer, *inputs: layer["experts"](*inputs)):
    """y and all gradients by name."""
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    leaves = {f"input {i}": t for i, t in enumerate(inputs) if t.requires_grad}
    leaves |= {name: p for name, p in layer.named_parameters() if p.requires_grad}
    y = run(layer, *inputs)
    layer.zero_grad()
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y))
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


@pytest.fixture
def peft_forwards(monkeypatch):
    """The calls of PEFT's own way."""
    from peft.tuners.lora.layer import ParamWrapper

    calls, way = [], ParamWrapper._activate_lora
    monkeypatch.setattr(ParamWrapper, "_activate_lora", lambda *a: (calls.append(1), way(*a))[1])
    return calls


@pytest.mark.parametrize("wide", [False, True], ids=["alike", "float32 adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts(family, dtype, wide, peft_forwards, device):
    stock = adapted(family, dtype, wide).to(device)
    ours, inputs = copy.deepcopy(stock), [t.to(device) for t in inputs_of(family, dtype)]
    report = apply(ours)
    assert report.count("lora") == 1 and "PEFT's forward now" not in str(report), str(report)
    exact = copy.deepcopy(stock).double()
    exact["experts"].get_base_layer().config = Sizes("eager")  # grouped_mm knows no float64
    exact = step(exact, [t.double() if t.is_floating_point() else t for t in inputs])
    wanted = step(stock, inputs)
    assert peft_forwards
    peft_forwards.clear()
    got = step(ours, inputs)
    assert not peft_forwards
    for name, value in got.items():
        assert value.dtype == wanted[name].dtype and value.stride() == wanted[name].stride(), name
        assert_as_good(value, wanted[name], exact[name], 2 * torch.finfo(dtype).eps, name)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    undo(ours)
    assert step(ours, inputs)["y"].equal(wanted["y"])


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_one_parameter(name):
    stock = adapted("qwen3_moe", names=[name], use_rslora=True)
    ours, inputs = copy.deepcopy(stock), inputs_of("qwen3_moe", torch.float32)
    assert f"adapters of {name}" in str(apply(ours))
    close(step(ours, inputs), step(stock, inputs), ulps=1024)


def _hook(layer):
    layer["experts"].base_layer.lora_A["default"].register_forward_hook(lambda *a: None)


def _second(layer, *active):
    config = peft.LoraConfig(r=2, lora_alpha=1, init_lora_weights=False, target_modules=[])
    torch.manual_seed(6)
    for wrapper in (layer["experts"], layer["experts"].base_layer):
        wrapper.update_layer("other", r=2, lora_alpha=1, config=config)
    for wrapper in (layer["experts"], layer["experts"].base_layer):
        nn.init.normal_(wrapper.lora_B["other"].weight)
        wrapper.set_adapter(list(active))


def _wrappers(layer, call):
    for wrapper in (layer["experts"], layer["experts"].base_layer):
        call(wrapper)


STATES = {
    "several adapters are active": lambda m: _second(m, "default", "other"),
    "adapters are disabled": lambda m: _wrappers(m, lambda w: w.enable_adapters(False)),
    "adapters are merged": lambda m: _wrappers(m, lambda w: w.merge()),
    "a part of an adapter is not a plain Linear": _hook,
    "a scale is no number": lambda m: m["experts"].scaling.update(default=torch.tensor(0.5)),
    "": lambda m: _second(m, "other"),
}


@pytest.mark.parametrize("reason", STATES)
def test_states(reason):
    """PEFT's forward computes what the op does not; the report says why, and the next state is seen."""
    stock, inputs = adapted("qwen3_moe"), inputs_of("qwen3_moe", torch.float32)
    ours = copy.deepcopy(stock)
    apply(ours)
    for layer in (stock, ours):
        STATES[reason](layer)
    with torch.no_grad():
        close(ours["experts"](*inputs), stock["experts"](*inputs), ulps=64)
    assert (f"PEFT's forward now: {reason}" in str(apply(ours))) == bool(reason)


@pytest.mark.parametrize("names", [["gate_up_proj"], ["gate_up_proj", "gate_up_proj_bias"]])
def test_what_is_left(names):
    model = adapted("gpt_oss", names=names)
    report = apply(model, experts=len(names) > 1)
    wanted = "no adapter of gate_up_proj_bias" if len(names) > 1 else "does not run GptOssExperts"
    assert any(wanted in entry.reason for entry in report.left if entry.slot == "lora"), str(report)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    model, inputs = adapted("gpt_oss", torch.bfloat16, wide=True), inputs_of("gpt_oss", torch.bfloat16)
    apply(model)

    def again(layer, *args):
        return checkpoint(layer["experts"], *args, use_reentrant=reentrant)

    wanted = step(model, inputs)
    for name, value in step(model, inputs, again).items():
        assert value.equal(wanted[name]), name


@pytest.mark.parametrize("default_device", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_compiled(family, default_device):
    """A default device is a mode, under which PyTorch compiles fewer methods of a tensor."""
    model, inputs = adapted(family), inputs_of(family, torch.float32)
    apply(model)
    wanted = step(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model["experts"], fullgraph=True, backend="aot_eager")
    with torch.device("cpu") if default_device else contextlib.nullcontext():
        found = step(model, inputs, lambda _, *args: compiled(*args))
    close(found, wanted, ulps=1024)


NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
INPUTS = dict.fromkeys(("input_ids", "labels"), batch(tokens=7, masked=0)["input_ids"])


def test_a_model_trains_saves_loads_and_merges(tmp_path):
    base, ids = make("mixtral", experts_implementation="grouped_mm"), INPUTS["input_ids"]
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=NAMES, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    keys = [*model.state_dict()]
    report = apply(model)
    assert [*model.state_dict()] == keys and report.count("lora") == 4, str(report)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    for _ in range(3):
        losses.append(model(**INPUTS).loss)
        losses[-1].backward()
        optimizer.step(), optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.eval()
    wanted = model(input_ids=ids).logits
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    close(loaded(input_ids=ids).logits, wanted, ulps=1024)
    apply(loaded)
    close(loaded(input_ids=ids).logits, wanted, ulps=1024)
    close(loaded.merge_and_unload()(input_ids=ids).logits, wanted, ulps=1024)


@pytest.mark.parametrize(
    "options", [{}, {"fp8": "rowwise"}, {"fp8": "rowwise", "fp8_base_only": True}], ids=str
)
@pytest.mark.parametrize("entrance", ["apply", "class", "alive"])
def test_late_adapters(entrance, options, facade, peft_forwards):
    """PEFT after the patch, of the model, its class, or the class while it is alive: as PEFT before it."""
    liger = importlib.import_module("liger_kernel.transformers")

    def new(seen=lambda model: None):
        model = make("mixtral", dtype=torch.bfloat16, experts_implementation="grouped_mm")
        seen(model)
        torch.manual_seed(2)
        config = {"r": 3, "target_modules": ["q_proj"], "init_lora_weights": False}
        return peft.get_peft_model(model, peft.LoraConfig(target_parameters=NAMES, **config))

    def another(model):
        torch.manual_seed(3)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
        model.set_adapter("other")

    def late(model):
        if entrance == "alive":
            liger.apply_liger_kernel_to_mixtral()
        if entrance == "apply" or options:
            apply(model, **options)
        model_step(model, INPUTS)

    wanted = new()
    apply(wanted, **options)
    if entrance == "class":
        liger.apply_liger_kernel_to_mixtral()
    model = new(late)
    for change in (lambda m: None, another, lambda m: m.set_adapter("default")):
        change(model), change(wanted)
        same_bits(model_step(model, INPUTS), model_step(wanted, INPUTS))
    assert not peft_forwards and report_of(model.base_model.model).count("lora") == 4 + 2
