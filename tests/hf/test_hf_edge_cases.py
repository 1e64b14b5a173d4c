"""Models that are not as apply would like them: each keeps working, or the report says what was left."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from tiny import apply_as_stock, batch, close, make, same, step
from torch import nn
from transformers.models.llama import modeling_llama

import tigon
from tigon.integrations.transformers import apply, undo

STOCK_ROTARY = modeling_llama.apply_rotary_pos_emb


SLOTS = ("norm", "mlp", "rope", "loss", "experts", "router")


@pytest.mark.parametrize(
    "family, slot",
    [*(("llama", slot) for slot in SLOTS[:4]), *(("mixtral", slot) for slot in SLOTS if slot != "mlp")],
)
def test_one_slot_alone(family, slot):
    model = make(family, **({"experts_implementation": "grouped_mm"} if family == "mixtral" else {}))
    inputs = batch()
    wanted = step(model, inputs)
    off = dict.fromkeys(SLOTS, False)
    report = apply(model, **{**off, slot: True})
    assert {entry.slot for entry in report.entries} == {slot} and report.replaced
    same(step(model, inputs), wanted)


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
    inputs = batch()
    report = apply_as_stock(model, inputs)
    assert report.head_calls.fused == 1 and report.head_calls.materialised == 0


def test_a_class_patched_by_another_library(monkeypatch):
    """What its forward says now is what counts, not its name."""

    def scaled(self, hidden_states):
        h = hidden_states.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return 1.5 * self.weight * h.to(hidden_states.dtype)

    def equivalent(self, hidden_states):
        h = hidden_states.to(torch.float32)
        h = torch.rsqrt((h * h).mean(-1, True) + self.variance_epsilon) * h
        return h.to(hidden_states.dtype) * self.weight

    model, inputs = make(), batch()
    for forward, count in ((scaled, 0), (equivalent, 5)):
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)
        wanted = step(model, inputs)
        report = apply(model)
        assert report.count("norm") == count
        same(step(model, inputs), wanted)
        undo(model)


def test_patched_between_apply_and_undo():
    """Somebody wraps our forward: undo leaves the wrapper alone."""
    model = make()
    apply(model)
    norm = model.model.norm
    ours = norm.forward
    norm.forward = wrapper = lambda x: ours(x)
    undo(model)
    assert norm.forward is wrapper
    step(model, batch())


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
    model, inputs = make(), batch()
    model.lm_head = Int8Linear(model.lm_head)
    for layer in model.model.layers:
        layer.mlp.gate_proj = Int8Linear(layer.mlp.gate_proj)
    wanted = step(model, inputs)
    report = apply(model)
    assert report.count("mlp") == 2, "the Linears are called, not read"
    assert [entry.reason for entry in report.left] == ["the head is Int8Linear, not nn.Linear"]
    same(step(model, inputs), wanted)


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


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma", "phi3", "qwen3"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_in_float64_trains(family, when):
    model = make(family, dtype=torch.float64 if when == "before" else torch.float32)
    inputs = batch()
    wanted = step(make(family).double(), inputs)
    model.load_state_dict(make(family).state_dict())
    report = apply(model)
    got = step(model.double(), inputs)
    assert got[0].dtype == torch.float64 and report.head_calls.fused == 1
    close(got[0].float(), wanted[0].float())  # stock rounds its logits to float32
    for name, grad in wanted[1].items():
        close(got[1][name].float(), grad.float())


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
    for name, grad in wanted.items():
        close(got[name], grad, ulps=256)
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

    def dispatch():
        for module in model.modules():
            if not list(module.children()):
                hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu"))
        hooks.add_hook_to_module(model, hooks.AlignDevicesHook("cpu", io_same_device=True))

    if when == "before":
        report = apply(model)
        dispatch()
    else:
        dispatch()
        report = apply(model)
    assert not report.left, str(report)
    assert report.count("norm") == 5 and report.count("loss") == 1
    same(step(model, inputs), wanted)
    assert report.head_calls.fused == 1 and report.head_calls.materialised == 0
    undo(model)
    again = step(model, inputs)
    assert torch.equal(again[0], wanted[0])
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


# --- undo, copies, processes -----------------------------------------------------------------


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_undo_in_any_order(order):
    models = [make(), make(seed=1), make("qwen2", seed=2)]
    inputs = batch()
    wanted = [step(model, inputs) for model in models]
    for model in models:
        apply(model)
    for place in order:
        undo(models[place])
        for model, want in zip(models, wanted, strict=True):
            same(step(model, inputs), want)
    assert modeling_llama.apply_rotary_pos_emb is STOCK_ROTARY
    for model in models:
        assert not model._forward_pre_hooks
        assert not any("forward" in module.__dict__ for module in model.modules())


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


def _inner(model, kind):
    return [m for m in model.modules() if type(m).__name__ == kind]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "family, implementation",
    [("llama", None), ("mixtral", "eager"), ("mixtral", "grouped_mm"), ("mixtral", "batched_mm")],
)
def test_hooks_on_the_activation_see_its_calls(family, implementation, when):
    """Whoever captures or changes the activations of an MLP, before apply or after it."""
    changes = {"experts_implementation": implementation} if implementation else {}
    wanted = make(family, **changes)
    model = make(family, **changes)
    seen = []

    def watch(model):
        for act in _inner(model, "SiLUActivation"):
            act.register_forward_hook(
                lambda module, args, output: (seen.append(output.shape), 1.5 * output)[1]
            )

    watch(wanted)
    want = step(wanted, batch())
    calls, seen[:] = list(seen), []
    if when == "before":
        watch(model)
    apply(model)
    if when == "after":
        watch(model)
    got = step(model, batch())
    assert calls and seen == calls
    same(got, want, ulps=512)


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
