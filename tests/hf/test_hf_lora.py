"""The slot `lora`: PEFT's layers in all their states compute and learn what PEFT computes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random

import pytest
import torch
from tiny import batch, close, make, step

from tigon.integrations.liger import patching
from tigon.integrations.transformers import apply, undo
from tigon.integrations.transformers import lora as slot

peft = pytest.importorskip("peft")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS = {
    "plain": {},
    "rank1": {"r": 1},
    "rank64": {"r": 64},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias_all": {"bias": "all"},
    "bias_lora": {"bias": "lora_only"},
    "some": {"target_modules": ["q_proj", "v_proj"]},
    "lora_bias": {"lora_bias": True},
    "pattern": {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"up_proj": 7}},
    "saved": {"modules_to_save": ["lm_head"]},
}


@pytest.fixture
def calls(monkeypatch):
    """Counts the native calls of the slot."""
    counted = []
    original = slot.adapted

    def counting(x, bases, adapters, *rest):
        counted.append((len(bases), len(adapters)))
        return original(x, bases, adapters, *rest)

    monkeypatch.setattr(slot, "adapted", counting)
    return counted


def config(**options):
    options = {"r": 4, "lora_alpha": 6, "target_modules": ALL, "init_lora_weights": False} | options
    return peft.LoraConfig(**options)


def adapted_model(device, *, family="llama_bias_tied", seed=5, dtype=torch.float32, cast=True, **options):
    model = make(family, device=device, dtype=dtype)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config(**options), autocast_adapter_dtype=cast).train()


def same(got, wanted, ulps=512):
    close(got[0], wanted[0], ulps=ulps)
    assert got[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        close(got[1][name], gradient, ulps=ulps)


@pytest.mark.parametrize("family", ["llama_bias_tied", "qwen2"])
@pytest.mark.parametrize("what", OPTIONS)
def test_options(what, family, device, calls):
    stock = adapted_model(device, family=family, **OPTIONS[what])
    model = copy.deepcopy(stock)
    inputs = batch(device)
    wanted = step(stock, inputs)
    report = apply(model)
    layers = sum(isinstance(m, peft.tuners.lora.Linear) for m in model.modules())
    assert report.count("lora") == layers > 0
    same(step(model, inputs), wanted)
    assert sum(bases for bases, _ in calls) == layers
    undo(model)
    model.zero_grad()
    same(step(model, inputs), wanted, ulps=0)
    assert sum(bases for bases, _ in calls) == layers


@pytest.mark.parametrize("seed", range(6))
def test_random_combinations(seed, device):
    draw = random.Random(seed)
    options = {}
    for name in draw.sample(sorted(set(OPTIONS) - {"lora_bias"}), 3):
        options |= OPTIONS[name]
    stock = adapted_model(device, **options)
    model = copy.deepcopy(stock)
    apply(model)
    inputs = batch(device)
    same(step(model, inputs), step(stock, inputs))


def test_states(device):
    """Two adapters, each, both, merged, disabled, scaled, deleted."""

    def states(patched):
        model = adapted_model(device)
        torch.manual_seed(7)
        model.add_adapter("other", config(r=3, lora_alpha=1))
        if patched:
            apply(model)
        inputs = batch(device)
        for names in (["default"], ["other"], ["default", "other"]):
            model.base_model.set_adapter(names)
            yield names, step(model, inputs)
            model.zero_grad()
        with model.disable_adapter():
            yield "disabled", (model(**inputs).loss.detach(), {})
        model.merge_adapter()
        yield "merged", (model(**inputs).loss.detach(), {})
        model.unmerge_adapter()
        yield "unmerged", (model(**inputs).loss.detach(), {})
        model.delete_adapter("other")
        model.set_adapter("default")
        for layer in model.modules():
            if isinstance(layer, peft.tuners.lora.LoraLayer):
                layer.scale_layer(0.5)
        yield "scaled", (model(**inputs).loss.detach(), {})
        yield "unloaded", (model.merge_and_unload()(**inputs).loss.detach(), {})

    for (name, wanted), (_, got) in zip(states(False), states(True), strict=True):
        assert got[1].keys() == wanted[1].keys(), name
        same(got, wanted, ulps=1024)


def test_nan_in_an_adapter_that_is_not_active(device):
    model = adapted_model(device)
    model.add_adapter("other", config())
    for name, parameter in model.named_parameters():
        if ".other." in name:
            parameter.data.fill_(float("nan"))
    apply(model)
    assert model(**batch(device)).loss.isfinite()


@pytest.mark.parametrize("cast", [True, False], ids=["fp32", "bf16"])
def test_autocast(cast, device, calls):
    """A bf16 model as the Trainer runs it: the error is at most twice PEFT's."""
    exact = adapted_model(device, dtype=torch.float64)
    inputs = batch(device)
    wanted = step(exact, inputs)

    def run(patched):
        model = adapted_model(device, dtype=torch.bfloat16, cast=cast)
        model.load_state_dict(exact.state_dict())
        if patched:
            apply(model, norm=False, mlp=False, rope=False, loss=False)
        with torch.autocast(device, dtype=torch.bfloat16):
            return step(model, inputs)

    stock, ours = run(False), run(True)
    assert sum(bases for bases, _ in calls) == 14
    for name, gradient in wanted[1].items():
        assert ours[1][name].dtype == stock[1][name].dtype

        def error(found, gradient=gradient, name=name):
            return (found[1][name].double() - gradient).norm()

        assert error(ours) <= 2 * error(stock) + 1e-3 * gradient.norm(), name


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_switch_of_the_interface(family, calls):
    """Programs that take Liger's switches leave PEFT its layers, and with them its masks."""
    models = [adapted_model(None, family=family, lora_dropout=0.4) for _ in range(2)]
    patching._apply_liger_kernel_to_instance(models[1], lora=False)
    results = []
    for model in models:
        torch.manual_seed(3)
        results.append(step(model, batch()))
    same(results[1], results[0])
    assert not calls
    patching._apply_liger_kernel_to_instance(models[1])
    step(models[1], batch())
    assert calls
    assert "token_accuracy" in models[1](**batch(), return_token_accuracy=True)


def test_loss_of_logits_inside_of_the_wrapper():
    model = adapted_model(None)
    patching._apply_liger_kernel_to_instance(model, cross_entropy=True, fused_linear_cross_entropy=False)
    assert model.get_base_model().loss_function is patching.logits_causal_lm_loss


def test_dropout_has_peft_s_distribution(device):
    """Over many draws the mean is that of evaluation, and the variance PEFT's."""

    def draws(patched):
        model = adapted_model(device, lora_dropout=0.4, target_modules=["q_proj"])
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        if patched:
            apply(model)
        torch.manual_seed(3)
        x = torch.randn(5, 32, device=device)
        ys = torch.stack([layer(x) for _ in range(2000)])
        return ys.mean(0), ys.var(0), model.eval() and layer(x)

    mean, variance, evaluated = draws(True)
    _, wanted, stock = draws(False)
    close(evaluated, stock, ulps=256)
    assert (mean - evaluated).abs().max() < 6 * (wanted.max() / 2000).sqrt()
    assert (variance / wanted - 1).abs().mean() < 0.1


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_dropout(reentrant, device):
    """The mask of the forward run again is that of the first."""
    model = adapted_model(device, lora_dropout=0.3)
    apply(model)
    inputs = batch(device)
    torch.manual_seed(1)
    wanted = step(model, inputs)
    model.zero_grad()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(1)
    got = step(model, inputs)
    same(got, wanted)


def test_hooks_and_other_arguments_go_to_peft(device, calls):
    model = adapted_model(device, target_modules=["q_proj"])
    apply(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 3, 32, device=device)
    seen = []
    with contextlib.ExitStack() as stack:
        for part in (layer.base_layer, layer.lora_A["default"]):
            handle = part.register_forward_hook(lambda *_: seen.append(1))
            stack.callback(handle.remove)
        layer(x)
    assert len(seen) == 2 and not calls
    layer.eval()
    layer(x, adapter_names=["default", "__base__"])
    assert not calls
    layer(x)
    assert len(calls) == 1


def test_siblings_share_a_call(device, calls):
    """q, k and v read one x, gate and up another; a result is not handed out once anything has changed."""
    model = adapted_model(device)
    apply(model)
    model(**batch(device))
    assert calls == [(3, 3), (1, 1), (2, 2), (1, 1)] * 2
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(2, 3, 32, device=device)
    attention.q_proj(x)
    with torch.no_grad():
        attention.k_proj.lora_B["default"].weight.mul_(2)
    got = attention.k_proj(x)
    undo(model)
    close(got, attention.k_proj(x))


def test_what_is_left_has_a_reason(device):
    model = make(device=device)
    model = peft.get_peft_model(model, config(target_modules=["embed_tokens", "q_proj"]))
    report = apply(model)
    reasons = {entry.reason for entry in report.left if entry.slot == "lora"}
    assert reasons == {"lora.Embedding is not an adapter of a plain or quantised Linear"}


def test_save_and_load(tmp_path, device):
    model = adapted_model(device)
    inputs = batch(device)
    apply(model)
    wanted = model(**inputs).loss
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make("llama_bias_tied", device=device), tmp_path)
    close(loaded.train()(**inputs).loss, wanted, ulps=256)
    assert loaded.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("what", ["plain", "lora_bias", "dora"])
def test_compile_fullgraph(what, device):
    torch._dynamo.reset()
    stock = adapted_model(device, **OPTIONS[what])
    model = copy.deepcopy(stock)
    inputs = batch(device)
    wanted = step(stock, inputs)
    apply(model)
    got = step(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs)
    close(got[0], wanted[0])
    for name, gradient in wanted[1].items():
        close(got[1]["_orig_mod." + name], gradient, ulps=512)


def test_torch_func(device):
    model = adapted_model(device)
    inputs = batch(device)
    _, wanted = step(model, inputs)
    apply(model, loss=False)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), inputs).loss

    got = torch.func.grad(loss)(trained)
    for name, gradient in got.items():
        close(gradient, wanted[name], ulps=512)


def test_same_bits_from_run_to_run(device):
    model = adapted_model(device, dtype=torch.bfloat16)
    apply(model)
    inputs = batch(device)
    runs = []
    for _ in range(2):
        model.zero_grad()
        runs.append(step(model, inputs))
    for first, second in itertools.pairwise(runs):
        same(first, second, ulps=0)
