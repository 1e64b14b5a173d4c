"""`apply(fp8=)`: Linears of layers compute in float8, the others are named with a reason."""

import math

import pytest
import torch
import transformers
from tiny import batch, make, trainer_options
from tiny import step as step_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import tigon
from tigon.integrations.transformers import apply, fp8, undo
from tigon.ops import fp8_linear

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(fp8, "gains", lambda rows, columns: True)


def model(family="llama", **changes):
    return make(family, **{**TINY, **changes})


def step(model, masked=0.25):
    """Loss and gradients."""
    loss, gradients = step_of(model, batch(tokens=17, masked=masked))
    return {"loss": loss} | gradients


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def ratio(exact, got):
    """Signal to noise in decibels."""
    exact, got = exact.double(), got.double()
    return 10 * math.log10(exact.square().sum() / (exact - got).square().sum())


def taken(report):
    return {entry.path for entry in report.replaced if entry.slot == "fp8"}


def left(report):
    return {entry.path: entry.reason for entry in report.left if entry.slot == "fp8"}


@pytest.mark.parametrize(
    "family", ["llama", "llama_bias_tied", "qwen3", "gemma2", "phi3", "granite", "olmo2"]
)
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_gradients(family, recipe, monkeypatch):
    """Loss and every gradient of a model are those of the formula."""
    stock, ours = model(family), model(family)
    report = apply(ours, fp8=recipe)
    got = step(ours)
    assert equal(got, step(ours)), "another step of the same weights"
    apply(stock)
    assert not equal(got, step(stock))
    with monkeypatch.context() as patched:
        patched.setattr(fp8_linear, "apply", lambda *args, **_: fp8_linear.reference(*args))
        expected = step(ours)
    assert len(taken(report)) >= 9
    assert abs(expected["loss"] - got["loss"]) < 1e-4
    # A sum in another order may round to the byte beside.
    assert min(ratio(expected[name], got[name]) for name in expected if name != "loss") > 25


def test_one_layer():
    """The gate of a LLaMA block: 20 dB of the output and of every gradient."""
    stock, ours = model(num_hidden_layers=1), model(num_hidden_layers=1)
    apply(ours, fp8="rowwise")
    apply(stock)
    expected, got = step(stock), step(ours)
    assert min(ratio(expected[name], got[name]) for name in expected if name != "loss") > 20


def test_report():
    ours = model()
    report = apply(ours, fp8="rowwise")
    assert len(taken(report)) == 21 and left(report) == {"lm_head": "output head"}
    assert "fp8     21 x Linear -> tigon.fp8_linear (rowwise)" in str(report)
    report = apply(ours, fp8="rowwise_dw_bf16", fp8_except=["k_proj", "layers.1.mlp"], first_last_bf16=True)
    reasons = left(report)
    assert taken(report) == {f"model.layers.1.self_attn.{n}_proj" for n in "qvo"}
    assert reasons["model.layers.1.self_attn.k_proj"] == "asked for by name: fp8_except"
    assert reasons["model.layers.1.mlp.up_proj"] == "asked for by name: fp8_except"
    assert reasons["model.layers.0.mlp.up_proj"] == "asked for: first_last_bf16"
    assert reasons["model.layers.2.self_attn.q_proj"] == "asked for: first_last_bf16"
    assert "forward" not in vars(ours.model.layers[0].mlp.up_proj)
    apply(ours)  # keeps what it is not asked of
    assert len(taken(report)) == 3
    assert ours.model.layers[1].self_attn.q_proj.forward.__self__.spec.dw == "bf16"


def test_sizes(monkeypatch):
    """What no kernel takes, and what does not gain."""
    report = apply(model(intermediate_size=100), fp8="rowwise")
    assert left(report)["model.layers.0.mlp.up_proj"] == "100 x 64 is no multiple of 16"
    monkeypatch.undo()
    report = apply(model(), fp8="rowwise")
    assert not taken(report) and left(report)["model.layers.0.mlp.up_proj"] == "96 x 64 gains nothing"
    assert fp8.gains(4096, 4096) and fp8.gains(4096, 14336) and not fp8.gains(1024, 1024)


def test_routers_and_experts():
    config = transformers.MixtralConfig(**{**model().config.to_dict(), "num_local_experts": 16})
    ours = transformers.MixtralForCausalLM(config)
    report = apply(ours, fp8="rowwise")
    assert taken(report) == {f"model.layers.{i}.self_attn.{n}_proj" for i in range(3) for n in "qkvo"}
    assert left(report)["model.layers.0.mlp.experts"] == "experts: their casts take what float8 gains"

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(64, 16), nn.ModuleList([nn.Linear(64, 64)])

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = ours.model.norm
            self.layers, self.embed = nn.ModuleList([Layer()]), nn.Linear(64, 64)

    reasons = left(apply(Other(), fp8="rowwise"))
    assert reasons == {"layers.0.gate": "router", "layers.0.experts.0": "expert", "embed": "not in a layer"}


REFUSED = {
    "fp8 must be one of ['rowwise', 'rowwise_dw_bf16'] or None, got 'tensorwise'": {"fp8": "tensorwise"},
    "fp8_except must name Linears of the model, found none of ['nothing']": {
        "fp8": "rowwise",
        "fp8_except": ["q_proj", "nothing"],
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    """Before anything is modified."""
    ours = model()
    with pytest.raises(tigon.Error) as caught:
        apply(ours, **REFUSED[message])
    assert str(caught.value) == f"[apply] {message}"
    assert "_tigon_state" not in vars(ours)


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    parameter = type("Parameter", (), {"device": torch.device("cuda", 0), "is_cuda": True})()
    holder = type("Model", (), {"parameters": lambda self: [parameter]})()
    with pytest.raises(tigon.Error, match=r"fp8 must run on compute capability 8.9 or newer, got 8.0"):
        fp8.check_recipe("rowwise", holder)


def test_undo_frees_the_bytes():
    ours = model()
    apply(ours, fp8="rowwise")
    step(ours)
    assert any(id(p) in fp8_linear._kept for p in ours.parameters())
    undo(ours)
    assert not any(id(p) in fp8_linear._kept for p in ours.parameters())


def test_evaluation_is_not_quantised():
    ours, stock = model(), model()
    apply(ours, fp8="rowwise")
    ids = batch()["input_ids"]
    with torch.no_grad():
        wanted = stock.eval()(input_ids=ids).logits
        assert torch.allclose(ours.eval()(input_ids=ids).logits, wanted, atol=1e-5)
        assert not torch.allclose(ours.train()(input_ids=ids).logits, wanted, atol=1e-5)


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_mlps_pay_for_the_head(recipe, monkeypatch):
    """A product that is formed again gives the same gradients; neither it nor its bytes are kept."""
    net, made, down = model(dtype=torch.bfloat16), [], TINY["intermediate_size"]
    tigon.apply(net, fp8=recipe)
    rows_of = fp8_linear.rows_of

    def noted(x):
        found = rows_of(x)
        made.extend(StorageWeakRef(t.untyped_storage()) for t in (x, found[0]) if x.shape[-1] == down)
        return found

    monkeypatch.setattr(fp8_linear, "rows_of", noted)
    kept, grads = [], []
    for owed in (0, 1 << 30):
        net._tigon_state.ledger.taken = owed
        made.clear()
        net.zero_grad()
        loss = net(**batch(tokens=17)).loss
        kept.append(sum(not storage.expired() for storage in made))
        loss.backward()
        grads.append({name: p.grad.clone() for name, p in net.named_parameters()})
    assert kept[0] >= len(made) // 2 > 0 == kept[1] and equal(*grads)


def test_accumulation(monkeypatch):
    """Weights are quantised once a step, from the second on, and gradients of halves add up."""
    ours = model()
    apply(ours, fp8="rowwise")
    seen, original = [], fp8_linear._quantize
    monkeypatch.setattr(fp8_linear, "_quantize", lambda x, f: (seen.append(x), original(x, f))[1])
    ids, labels = batch(tokens=17, masked=0).values()
    whole = step(ours, masked=0)
    once = sum(x.data_ptr() in {p.data_ptr() for p in ours.parameters()} for x in seen)
    for _ in range(2):
        seen.clear()
        ours.zero_grad()
        for rows in range(len(ids)):
            (ours(input_ids=ids[rows : rows + 1], labels=labels[rows : rows + 1]).loss / len(ids)).backward()
    weights = {p.data_ptr() for p in ours.parameters()}
    assert once == sum(x.data_ptr() in weights for x in seen) == 21
    for name, p in ours.named_parameters():
        assert ratio(whole[name], p.grad) > 15, name


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, tigon.optim.AdamW, torch.optim.SGD])
def test_training(optimizer):
    """The loss falls as in stock: weights are quantised anew after every step."""
    losses = []
    for recipe in (None, "rowwise"):
        ours = model()
        apply(ours, fp8=recipe)
        steps = optimizer(ours.parameters(), lr=0.3 if optimizer is torch.optim.SGD else 3e-3)
        history = []
        for _ in range(8):
            history.append(step(ours)["loss"].item())
            steps.step()
        losses.append(history)
    stock, ours = losses
    assert stock[0] - stock[-1] > 0.3
    assert max(abs(a - b) for a, b in zip(stock, ours, strict=True)) < 0.03 * (stock[0] - stock[-1]) + 5e-3


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(bf16, tmp_path):
    """Through the callback, with accumulation: the losses are stock's but for the rounding."""
    rows = batch(rows=8, tokens=17)["input_ids"]
    losses = []
    for recipe in (None, "rowwise"):
        callback = tigon.TigonTrainerCallback(fp8=recipe, optimizer=True)
        options = {"max_steps": 4, "gradient_accumulation_steps": 2, "learning_rate": 3e-3, "bf16": bf16}
        arguments = transformers.TrainingArguments(**trainer_options(tmp_path, **options))
        dataset = [{"input_ids": row, "labels": row} for row in rows]
        trainer = transformers.Trainer(model(), arguments, train_dataset=dataset, callbacks=[callback])
        trainer.train()
        losses.append([float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])
    assert callback.report.count("fp8") == 21 and losses[0] != losses[1]
    assert losses[0][0] - losses[0][-1] > 0.05
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 0.02


def test_autocast():
    """float32 parameters under autocast: matmuls of float8, results in autocast's dtype."""
    stock, ours = model(), model()
    apply(ours, fp8="rowwise")
    apply(stock)
    seen = []
    ours.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, args, y: seen.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = step(stock), step(ours)
    assert seen == [torch.bfloat16] and got["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert min(ratio(expected[name], got[name]) for name in expected if name != "loss") > 13


def test_trainer_callback_and_auto_model(tmp_path):
    callback = tigon.TigonTrainerCallback(fp8="rowwise", fp8_except=["o_proj"])
    ours = model()
    callback._apply(ours)
    assert len(taken(callback.report)) == 18
    ours.save_pretrained(tmp_path)
    loaded = tigon.AutoTigonForCausalLM.from_pretrained(tmp_path, fp8="rowwise", first_last_bf16=True)
    assert len(taken(loaded.tigon_report)) == 7
    assert {name for name, _ in loaded.named_parameters()} == {name for name, _ in model().named_parameters()}
