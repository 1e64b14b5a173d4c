"""Models that are not as apply would like them: each keeps working, or the report says what was left."""

import pytest
import torch
import torch.nn.functional as F
from tiny import apply_around, apply_as_stock, batch, close, config, make, same, step
from torch import nn
from transformers.models.llama import modeling_llama

import tigon
from tigon.integrations.transformers import apply, undo

SLOTS = ("norm", "mlp", "rope", "loss", "experts", "router")


@pytest.mark.parametrize(
    "family, slot",
    [*(("llama", slot) for slot in SLOTS[:4]), *(("mixtral", slot) for slot in SLOTS if slot != "mlp")],
)
def test_one_slot_alone(family, slot):
    model = make(family, **({"experts_implementation": "grouped_mm"} if family == "mixtral" else {}))
    report = apply_as_stock(model, batch(), **dict.fromkeys(SLOTS, False) | {slot: True})
    assert {entry.slot for entry in report.entries} == {slot} and report.replaced


# --- classes of others -----------------------------------------------------------------------


class Temperature(modeling_llama.LlamaForCausalLM):
    """Overrides forward and computes its loss in its own way."""

    def forward(self, input_ids, labels=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits / 0.7
        if labels is not None:
            flat = output.logits[:, :-1].reshape(-1, output.logits.shape[-1])
            output.loss = F.cross_entropy(flat.float(), labels[:, 1:].reshape(-1)) + 1.0
        return output


def test_a_subclass_that_overrides_forward():
    model = make()
    model.__class__ = Temperature
    report = apply_as_stock(model, batch())
    assert report.head_calls.fused == 1 and report.head_calls.materialised == 0


# --- heads -----------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """A quantised head as libraries make them: no nn.Linear, an integer weight."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def test_quantised_head_and_projections():
    model = make()
    model.lm_head = Int8Linear(model.lm_head)
    for layer in model.model.layers:
        layer.mlp.gate_proj = Int8Linear(layer.mlp.gate_proj)
    report = apply_as_stock(model, batch())
    assert report.count("mlp") == 2, "the Linears are called, not read"
    assert [entry.reason for entry in report.left] == ["the head is Int8Linear, not nn.Linear"]


def test_a_model_without_a_head():
    model = make().model
    report = apply(model)
    assert report.count("loss") == 0 and report.count("norm") == 5
    report.check()
    assert model(batch()["input_ids"]).last_hidden_state.requires_grad


# --- devices, dtypes, transforms -------------------------------------------------------------


@pytest.mark.parametrize("path", ["model.norm", "model.layers.0.input_layernorm", "lm_head"])
def test_a_weight_left_on_meta_is_refused(path):
    """A checkpoint lacked it, or offloading moved it: no result of memory that nobody wrote."""
    model, inputs = make(), batch()
    apply(model)
    module = model.get_submodule(path)
    module.weight = nn.Parameter(module.weight.to("meta"))
    with pytest.raises((tigon.Error, RuntimeError), match="meta"):
        model(**inputs)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen3", "granite"])
def test_a_model_on_meta(family):
    """Shapes and dtypes of a training step, without memory."""
    model = make(family)
    report = apply(model)
    model.to("meta")
    output = model(**{name: tensor.to("meta") for name, tensor in batch().items()})
    output.loss.backward()
    assert output.loss.is_meta and output.loss.shape == () and output.logits.shape == (2, 11, 97)
    assert all(p.grad.is_meta and p.grad.shape == p.shape for p in model.parameters())
    assert report.head_calls.fused == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family, what",
    [
        *(("llama", what) for what in ("loss", "logits", "both")),
        *((family, "loss") for family in ("gemma2", "phi3", "olmo2")),
    ],
)
def test_func_grad_over_functional_call(family, what):
    model, inputs = make(family), batch()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    labels = {} if what == "logits" else {"labels": inputs["labels"]}

    def function(parameters):
        output = torch.func.functional_call(model, parameters, (inputs["input_ids"],), labels)
        loss = 0.0 if what == "loss" else output.logits.float().square().mean()
        return loss if what == "logits" else loss + output.loss

    wanted = torch.func.grad(function)(parameters)
    report = apply(model)
    got = torch.func.grad(function)(parameters)
    assert report.head_calls.fused == (what != "logits")
    close(got, wanted, ulps=256)
    ones = {name: torch.ones_like(p) for name, p in parameters.items()}
    with pytest.raises(tigon.Error, match="forward-mode AD is not supported"):
        torch.func.jvp(function, (parameters,), (ones,))


# --- accelerate ------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_device_map(when):
    """accelerate binds forwards of its own to move tensors; ours goes inside."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, inputs = make(), batch()
    wanted = step(model, inputs)

    def dispatch(model):
        for module in model.modules():
            if not list(module.children()):
                hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu"))
        return hooks.add_hook_to_module(model, hooks.AlignDevicesHook("cpu", io_same_device=True))

    _, report = apply_around(dispatch, model, when)
    assert not report.left, str(report)
    assert report.count("norm") == 5 and report.count("loss") == 1
    same(step(model, inputs), wanted)
    assert report.head_calls.fused == 1 and report.head_calls.materialised == 0
    undo(model)
    assert torch.equal(step(model, inputs)[0], wanted[0])
    hooks.remove_hook_from_module(model, recurse=True)
    same(step(model, inputs), wanted)


def test_offloaded_to_the_cpu_and_meta():
    """Weights that are on the meta device between calls."""
    accelerate = pytest.importorskip("accelerate")
    model = make().eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        wanted = model(ids).logits
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.lm_head.weight.is_meta
        report = apply(model)
        close(model(ids).logits, wanted)
    assert report.count("norm") == 5
    undo(model)
    with torch.no_grad():
        close(model(ids).logits, wanted)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_save_and_load_after_apply(tmp_path, family):
    model = make(family)
    inputs = batch()
    wanted = step(model, inputs)
    apply(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    assert not loaded._forward_pre_hooks
    close(step(loaded, inputs)[0], wanted[0])
    report = apply(loaded)
    same(step(loaded, inputs), wanted)
    assert report.head_calls.fused == 1


def test_labels_on_the_device_are_counted_before_the_layers_run(monkeypatch):
    from tigon.integrations.transformers import head

    seen = []

    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(head, "count_labels", lambda *arguments, **options: seen.append((arguments, options)))
    model = make()
    apply(model)
    spec, _ = model.forward.spec
    labels = batch()["labels"].as_subclass(OnDevice)
    head.before_forward(model, spec, {"labels": labels}, {})
    head.before_forward(model, spec, {"labels": labels, "shift_labels": labels, "ignore_index": 7}, {})
    head.before_forward(model.eval(), spec, {"labels": labels}, {})
    head.before_forward(model.train(), spec, {"labels": batch()["labels"]}, {})
    head.before_forward(model, spec, {}, {})
    assert seen == [((labels, -100), {"shift": True}), ((labels, 7), {"shift": False})]


@pytest.mark.parametrize("optimizer", [tigon.optim.AdamW, torch.optim.SGD])
def test_another_default_device(optimizer):
    """Two steps of training where `torch.set_default_device` names a device without values."""
    runs = []
    for default in ("cpu", "meta"):
        model, inputs = make(), batch()
        with torch.device(default):
            apply(model)
            adam = optimizer(model.parameters(), lr=1e-2)
            losses = []
            for _ in range(2):
                losses.append(step(model, inputs)[0])
                adam.step()
        runs.append(torch.stack(losses))
    assert torch.equal(*runs)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_an_activation_replaced_after_apply(family):
    """The module that is there is what runs, as for weights; a second apply takes it up again."""
    model, wanted = make(family), make(family)
    apply(model)
    for each in (model, wanted):
        for module in each.modules():
            if hasattr(module, "act_fn"):
                module.act_fn = torch.nn.ReLU()
    want = step(wanted, batch())
    for _ in range(2):
        got = step(model, batch())
        same(got, want, ulps=512)
        report = apply(model)
    kind = "mlp" if family == "llama" else "experts"
    by = {entry.by for entry in report.replaced if entry.slot == kind}
    assert all("reglu" in one or "experts" in one for one in by) and by


def test_modules_that_are_no_transformers_model():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = modeling_llama.LlamaRMSNorm(8)
            self.other = nn.RMSNorm(8, eps=1e-6)

        def forward(self, x):
            return self.other(self.norm(x))

    block, x = Block(), torch.randn(3, 8)
    wanted = block(x)
    assert apply(block).count("norm") == 2
    close(block(x), wanted)
    undo(block)
    assert torch.equal(block(x), wanted)


def test_meta_device_model():
    with torch.device("meta"):
        model = modeling_llama.LlamaForCausalLM(config())
    report = apply(model)
    assert report.count("norm") == 5 and report.count("loss") == 1
    stock = make()
    inputs = batch()
    wanted = step(stock, inputs)
    model.load_state_dict(stock.state_dict(), assign=True)
    model.model.rotary_emb = stock.model.rotary_emb
    close(step(model.train(), inputs)[0], wanted[0])


def test_tensor_subclass_weights_keep_stock_arithmetic():
    class Wrapped(torch.Tensor):
        pass

    model = make()
    inputs = batch()
    wanted = step(model, inputs)
    report = apply(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Wrapped))
    close(torch.Tensor(step(model, inputs)[0]), wanted[0])
    assert report.head_calls.lazy == 0
