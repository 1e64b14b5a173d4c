"""The slot `lora`: PEFT's layers in all their states compute and learn what PEFT computes."""

import contextlib
import copy
import functools
import weakref

import pytest
import torch
from tiny import (
    LINEARS,
    apply_as_stock,
    assert_as_good,
    batch,
    close,
    make,
    same,
    step,
    trainer_options,
    word_tokenizer,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from tigon.integrations.liger import patching
from tigon.integrations.transformers import apply, undo
from tigon.integrations.transformers import lora as slot

peft = pytest.importorskip("peft")

OPTIONS = {"plain": {}, "rank1": {"r": 1}, "rank64": {"r": 64}, "rslora": {"use_rslora": True}}
OPTIONS |= {"dora": {"use_dora": True}, "bias_all": {"bias": "all"}, "bias_lora": {"bias": "lora_only"}}
OPTIONS |= {"some": {"target_modules": ["q_proj", "v_proj"]}, "lora_bias": {"lora_bias": True}}
OPTIONS |= {"pattern": {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"up_proj": 7}}}
OPTIONS |= {"saved": {"modules_to_save": ["lm_head"]}, "rank256": {"r": 256, "lora_alpha": 8}}
OPTIONS |= {"regex": {"target_modules": r".*\.(q|down)_proj"}}
OPTIONS |= {"exclude": {"exclude_modules": ["k_proj", "down_proj"]}}
OPTIONS |= {"one_layer": {"layers_to_transform": [1]}, "replicated": {"layer_replication": [[0, 2], [1, 2]]}}
OPTIONS |= {"tokens": {"trainable_token_indices": {"embed_tokens": [3, 5]}}}
OPTIONS |= {"tying": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}}
OPTIONS |= {"gaussian": {"init_lora_weights": "gaussian"}, "olora": {"init_lora_weights": "olora"}}
OPTIONS |= {"pissa": {"init_lora_weights": "pissa"}, "pissa_niter": {"init_lora_weights": "pissa_niter_4"}}
OPTIONS |= {"orthogonal": {"init_lora_weights": "orthogonal"}}
OPTIONS |= {"ephemeral": {"runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=True)}}
# These change what an adapter computes.
VARIANTS = {
    "alora": {"alora_invocation_tokens": [4]},
    "velora": {"velora_config": {"num_groups": 4}},
    "kasa": {"kasa_config": {}},
    "parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    "embeddings": {"target_modules": ["embed_tokens"]},
}


@pytest.fixture
def calls(monkeypatch):
    """Counts the native calls of the slot."""
    counted = []
    original = slot.apply

    def counting(x, layout, *rest):
        counted.append((layout.count, layout.adapters))
        return original(x, layout, *rest)

    monkeypatch.setattr(slot, "apply", counting)
    return counted


def config(**options):
    options = {"r": 4, "lora_alpha": 6, "target_modules": LINEARS, "init_lora_weights": False} | options
    return peft.LoraConfig(**options)


def adapted_model(device, *, family="llama_bias_tied", dtype=torch.float32, cast=True, layers=2, **options):
    model = make(family, device=device, dtype=dtype, num_hidden_layers=layers)
    torch.manual_seed(5)
    return peft.get_peft_model(model, config(**options), autocast_adapter_dtype=cast).train()


@pytest.mark.parametrize(
    ("family", "what"),
    [("llama_bias_tied", what) for what in OPTIONS] + [("qwen2", w) for w in OPTIONS if w != "replicated"],
)
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


@pytest.mark.parametrize("what", VARIANTS)
def test_variants_are_peft_s(what, device, calls):
    options = dict(VARIANTS[what])
    if "velora_config" in options:
        options["velora_config"] = peft.tuners.lora.config.VeloraConfig(**options["velora_config"])
    if "kasa_config" in options:
        options["kasa_config"] = peft.tuners.lora.config.KasaConfig()
    stock = adapted_model(device, **options)
    model = copy.deepcopy(stock)
    inputs = batch(device)
    report = apply(model)
    left = [entry for entry in report.entries if entry.slot == "lora"]
    assert left and not any(entry.replaced for entry in left)
    same(step(model, inputs, seed=2), step(stock, inputs, seed=2))
    assert not calls


@pytest.mark.parametrize("what", ["plain", "lora_bias", "dora"])
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows, what, device):
    """Of no rows there are zeros for gradients, as PEFT has them."""
    model = adapted_model(device, **OPTIONS[what])
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    x, found = torch.randn(rows, 32, device=device, requires_grad=True), []
    leaves = (x, *(p for p in layer.parameters() if p.requires_grad))
    for call in (layer, functools.partial(slot.lora_forward, layer, slot.LoraSpec())):
        y = call(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    close(*reversed(found), ulps=512)


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
        assert_as_good(ours[1][name], stock[1][name], gradient, 1e-3, name)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_switch_of_the_interface(family, calls):
    """Programs that take Liger's switches leave PEFT its layers, and with them its masks."""
    models = [adapted_model(None, family=family, lora_dropout=0.4) for _ in range(2)]
    patching._apply_liger_kernel_to_instance(models[1], lora=False)
    stock, left = (step(model, batch(), seed=3) for model in models)
    same(left, stock)
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


def test_a_parametrised_base_under_checkpoints(device, calls):
    """Its weight is made in each call, which computes itself alone and leaves nothing for the next."""
    model = adapted_model(device, family="olmo2")
    attention = model.base_model.model.model.layers[0].self_attn
    nn.utils.parametrizations.weight_norm(attention.k_proj.base_layer)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    apply_as_stock(model, batch(device))
    calls.clear()
    model.eval()(**batch(device))
    assert calls == [(2, 2), (1, 1), (1, 1), (2, 2), (1, 1), (3, 3), (1, 1), (2, 2), (1, 1)]


def test_dora_of_a_head_in_float64(device):
    stock = adapted_model(device, use_dora=True, target_modules=["q_proj", "lm_head"]).double()
    model = copy.deepcopy(stock)
    apply(model)
    loss, gradients = step(model, batch(device))
    same((loss.float(), gradients), step(stock, batch(device)))  # transformers' logits are of float32


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


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_dora": True, "bias": "all"}], ids=str)
def test_siblings_share_a_call(options, device, calls):
    """q, k and v read one x, gate and up another; a result is not handed out once anything has changed."""
    model = adapted_model(device, **options)
    # Of more rows than columns, magnitudes need results: gated units must not write over them.
    apply_as_stock(model, batch(device, rows=4, tokens=12))
    assert calls == [(3, 3), (1, 1), (2, 2), (1, 1)] * 2
    attention = model.base_model.model.model.layers[0].self_attn
    changed = attention.k_proj.lora_magnitude_vector if options else attention.k_proj.lora_B
    x = torch.randn(40, 32, device=device)
    attention.q_proj(x)
    with torch.no_grad():
        changed["default"].weight.mul_(2)
    got = attention.k_proj(x)
    undo(model)
    close(got, attention.k_proj(x), ulps=64)


def test_what_is_left_has_a_reason(device):
    model = make(device=device)
    model = peft.get_peft_model(model, config(target_modules=["embed_tokens", "q_proj"]))
    report = apply(model)
    reasons = {entry.reason for entry in report.left if entry.slot == "lora"}
    assert reasons == {"lora.Embedding is not an adapter of a plain or quantised Linear"}


@pytest.mark.parametrize("what", ["plain", "dora"])
def test_torch_func(what, device):
    model = adapted_model(device, **OPTIONS[what])
    inputs = batch(device)
    _, wanted = step(model, inputs)
    apply(model, loss=False)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), inputs).loss

    close(torch.func.grad(loss)(trained), wanted, ulps=512)


# --- what is kept, and its error ------------------------------------------------------------------


def test_gated_products_and_large_norms_are_not_kept(device, monkeypatch):
    """They are formed again in the backward, from what their own backwards keep, with the same bits."""
    model = adapted_model(device, family="llama")
    model.enable_input_require_grads()  # otherwise the first norm has no backward
    apply(model)
    inputs = batch(device)
    found = {}
    for large in (1 << 40, 0):
        monkeypatch.setattr(slot, "_LARGE", large)
        kept, made = [], slot.apply

        def watched(x, *rest, made=made, kept=kept):
            kept.append(weakref.ref(x))
            return made(x, *rest)

        monkeypatch.setattr(slot, "apply", watched)
        loss = model(**inputs).loss
        alive = [one() is not None for one in kept]
        assert alive == [bool(large), True, bool(large), False] * 2  # q, k, v; o; gate, up; down
        loss.backward()
        found[large] = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        model.zero_grad()
        monkeypatch.setattr(slot, "apply", made)
    close(*found.values(), ulps=0)


def test_x_is_kept_once_for_all_that_share_it(device):
    """Beside it t, and nothing of the size of a result."""
    model = adapted_model(device, target_modules=["q_proj", "k_proj", "v_proj"])
    apply(model)
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(5, 32, device=device, requires_grad=True)
    ys = [layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    kept = [t for t in ys[0].grad_fn.saved_tensors if t is not None]
    mine = {p.data_ptr() for p in model.parameters()}
    others = [t for t in kept if t.data_ptr() not in mine]
    assert len({y.grad_fn for y in ys}) == 1 and len(others) == 2
    assert others[0].data_ptr() == x.data_ptr() and others[1].shape == (5, 3 * 8)  # t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", [True, False], ids=["fp32", "base's"])
@pytest.mark.parametrize(("rows", "dora"), [(7, False), (7, True), (200, True)])
def test_error_of_a_layer(rows, dora, cast, dtype, device):
    """At most twice PEFT's. DoRA scales the results of few rows; of many, the weight."""
    base = nn.Linear(48, 40, bias=True, device=device, dtype=torch.float64)
    exact = peft.get_peft_model(
        nn.Sequential(base), config(target_modules=["0"], use_dora=dora), autocast_adapter_dtype=False
    ).double()
    if dora:
        exact.base_model.model[0].lora_magnitude_vector["default"].weight.data.mul_(1.3)
    x, dy = (torch.randn(rows, n, device=device, dtype=torch.float64).to(dtype) for n in (48, 40))

    def run(model, patched, dtype):
        layer = model.base_model.model[0]
        x_ = x.to(dtype).requires_grad_()
        # Outside of autocast PEFT computes with float32 adapters in float32.
        with torch.autocast(device, dtype=dtype, enabled=cast and dtype in (torch.bfloat16, torch.float16)):
            y = slot.lora_forward(layer, slot.LoraSpec(), x_) if patched else layer(x_)
        y.backward(dy.to(y.dtype))
        return {"y": y, "x": x_.grad} | {n: p.grad for n, p in layer.named_parameters() if p.requires_grad}

    low = copy.deepcopy(exact).to(dtype)
    for name, parameter in low.named_parameters():
        if cast and "lora_" in name:
            parameter.data = parameter.data.float()
    exact.load_state_dict({name: t.double() for name, t in low.state_dict().items()})
    wanted = run(exact, False, torch.float64)
    stock, ours = run(low, False, dtype), (low.zero_grad(), run(low, True, dtype))[1]
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_as_good(ours[name], stock[name], value, 1e-6, name)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_base_that_is_trained_too(options, device):
    """Its gradient is PEFT's."""
    model = adapted_model(device, **options)
    for name, parameter in model.named_parameters():
        if "base_layer" in name:
            parameter.requires_grad_(True)
    apply_as_stock(model, batch(device, rows=4, tokens=12), ulps=1024)


def dora_around(linear):
    """PEFT's layer."""
    options = config(target_modules=["0"], use_dora=True)
    return peft.get_peft_model(nn.Sequential(linear), options).base_model.model[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_of_magnitude_zero(dtype, device):
    """Its gradient is PEFT's: one step leads away from 0."""
    layer = dora_around(nn.Linear(8, 6, dtype=dtype, device=device))
    magnitude = layer.lora_magnitude_vector["default"].weight
    magnitude.data[2] = 0
    x, grads = torch.randn(64, 8, device=device, dtype=dtype), []
    for call in (layer, lambda x: slot.lora_forward(layer, slot.LoraSpec(), x)):
        magnitude.grad = None
        call(x).sum().backward()
        grads.append(magnitude.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=0.1)


@pytest.mark.parametrize("rows", [1, 40])
def test_dora_of_a_weight_that_is_made(rows, device):
    """As of a quantised base: made once a direction, one alive at a time, with the bits of a plain weight."""
    layer, alive = dora_around(nn.Linear(32, 24, bias=False, device=device)), []

    def make():
        assert all(one() is None for one in alive)
        weight = layer.base_layer.weight.detach().clone()
        alive.append(weakref.ref(weight))
        return weight

    x, found = torch.randn(rows, 32, device=device, requires_grad=True), []
    state = slot._find_state(layer, x)
    made = state._replace(base=slot.Base(make))
    for one in (state, made._replace(call=slot._prepare(made))):
        y = slot._dora(x, one) if rows == 1 else one.finish(*slot._adapted(x, one.dtype, one.call))
        leaves = (x, *(p for p in layer.parameters() if p.requires_grad))
        found.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert len(alive) == 2
    assert all(map(torch.equal, *found))


# --- training --------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_a_checkpoint(reentrant, device):
    """The mask of a forward that is run again is that of the first."""
    model = adapted_model(device, lora_dropout=0.3)
    apply(model)
    inputs = batch(device)
    wanted = step(model, inputs, seed=1)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in model.base_model.model.model.layers:
        layer.mlp.forward = functools.partial(checkpoint, layer.mlp.forward, use_reentrant=reentrant)
    same(step(model, inputs, seed=1), wanted)


def test_adapters_that_share_a_parameter(device):
    """Tied A: its gradient is the sum over the layers that read it."""
    model = adapted_model(device)
    attention = model.base_model.model.model.layers[0].self_attn
    attention.k_proj.lora_A["default"].weight = attention.q_proj.lora_A["default"].weight
    apply_as_stock(model, batch(device))


def test_merged_and_saved_for_stock_peft(tmp_path, device):
    """An adapter trained with the slot is merged, saved and loaded by PEFT without it."""
    model = adapted_model(device)
    apply(model)
    inputs = batch(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        step(model, inputs)
        optimizer.step()
    model.save_pretrained(tmp_path / "adapter")
    wanted = model.eval()(**inputs).loss
    stock = make("llama_bias_tied", device=device)
    stock = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()
    assert stock.state_dict().keys() == model.state_dict().keys()
    close(stock(**inputs).loss, wanted, ulps=256)
    merged = stock.merge_and_unload()
    close(merged(**inputs).loss, wanted, ulps=512)
    merged.save_pretrained(tmp_path / "merged")
    again = type(merged).from_pretrained(tmp_path / "merged").to(device).eval()
    close(again(**inputs).loss, wanted, ulps=512)
    ours = model.merge_and_unload()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), merged.parameters(), strict=True))


def test_trl_sft(tmp_path, device, calls):
    """TRL's SFTTrainer makes the adapters itself; `tigon.apply` comes after it."""
    trl = pytest.importorskip("trl", reason="needs trl")
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    rows = [{"input_ids": batch("cpu", rows=1, seed=i)["input_ids"][0].tolist()} for i in range(8)]

    def train(patched):
        options = {"seed": 3, "use_cpu": device == "cpu", "lr_scheduler_type": "constant", "bf16": False}
        options |= {"gradient_checkpointing": True, "dataset_kwargs": {"skip_prepare_dataset": True}}
        args = trl.SFTConfig(**trainer_options(tmp_path, **options))
        trainer = trl.SFTTrainer(
            make(device=device),
            args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=word_tokenizer(),
            peft_config=config(lora_dropout=0.0, init_lora_weights=True),
        )
        if patched:
            apply(trainer.model)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    wanted = train(False)
    assert not calls
    torch.testing.assert_close(torch.tensor(train(True)), torch.tensor(wanted), rtol=1e-4, atol=1e-4)
    assert calls
    assert wanted[-1] != wanted[0]
