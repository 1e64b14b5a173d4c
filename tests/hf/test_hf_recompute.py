"""apply(recompute=): results of norms and gated units are formed again, with the very same bits."""

import copy
import functools
import pickle

import pytest
import torch
import transformers
from tiny import SHARED, adapted, attributes, batch, make, report_of, same_bits, step
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from tigon.integrations.transformers.recompute import KINDS, place_of

LAYERS = 3
AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)
MODES = ("norms", "elementwise", 0.5, 1.0)
OTHERS = {  # config, its changes: two norms more, layer norms with one norm a layer, an ungated MLP
    "gemma3": ("Gemma3Text", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "phi": ("Phi", {"num_key_value_heads": 4, "resid_pdrop": 0.0, "partial_rotary_factor": 0.5}),
    "stablelm": ("StableLm", {}),
    "nemotron": ("Nemotron", {}),
    "gpt2": ("GPT2", {"use_cache": False, **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0)}),
}
FAMILIES = ("llama", "llama_bias_tied", "qwen3", "gemma2", "olmo2", "phi3", "mixtral", *OTHERS)


def build(family="llama", layers=LAYERS, **changes):
    changes |= {"num_hidden_layers": layers}
    if family not in OTHERS:
        return make(family, **changes)
    prefix, own = OTHERS[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**SHARED, **own, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).train()


class Census(TorchDispatchMode):
    """The storages that are made inside, and how often Tigon's forward operators run."""

    def __init__(self):
        super().__init__()
        self.made, self.calls = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls[func._schema.name] = self.calls.get(func._schema.name, 0) + 1
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def kept(self, model) -> int:
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        made = (made for key, made in self.made.items() if key not in own)
        return sum(size for storage, size in made if not storage.expired())


def run(model, inputs, times=2):
    """The last step's loss and gradients, the bytes that its forward keeps, the calls in its backward."""
    for _ in range(times):
        model.zero_grad(set_to_none=True)
        with Census() as forward:
            loss = model(**inputs).loss
        with Census() as backward:
            kept = forward.kept(model)
            loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return (loss.detach(), gradients), kept, backward.calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_and_fewer_bytes(family, dtype):
    model, inputs = build(family).to(dtype), batch()
    found = {}
    for mode in (None, *MODES):
        one = copy.deepcopy(model)
        tigon.apply(one, recompute=mode)
        one._tigon_state.ledger.note = lambda *_: None  # else MLPs save what the head takes
        found[mode] = run(one, inputs)
        same_bits(found[mode][0], found[None][0])
    kept = {mode: bytes_ for mode, (_, bytes_, _) in found.items()}
    assert kept[1.0] < kept[0.5] <= kept["elementwise"] <= kept["norms"] <= kept[None]
    products = family not in ("mixtral", "phi", "gpt2")  # experts; a gelu
    assert (kept["elementwise"] < kept["norms"]) == products
    assert (kept["norms"] < kept[None]) == (family != "olmo2")  # its norms come after


def test_the_bytes_of_a_layer():
    model, inputs = build(), batch()
    tokens, hidden, inner = inputs["input_ids"].numel(), 32, 48
    kept, calls = {}, {}
    for mode in (None, "norms", "elementwise"):
        one = copy.deepcopy(model)
        tigon.apply(one, recompute=mode)
        _, kept[mode], calls[mode] = run(one, inputs, times=1)
    assert kept[None] - kept["norms"] == 4 * LAYERS * 2 * (tokens - 1) * hidden, (
        "of each norm, a weight is kept"
    )
    assert kept["norms"] - kept["elementwise"] == 4 * LAYERS * tokens * inner
    assert calls["norms"]["tigon::rms_norm_fwd"] == 2 * LAYERS, "q, k and v, gate and up share one"
    assert calls["elementwise"]["tigon::glu_fwd"] == LAYERS
    assert not {"tigon::rms_norm_fwd", "tigon::glu_fwd"} & calls[None].keys()


@pytest.mark.parametrize("fraction", [0.01, 0.4, 0.5, 0.75, 0.9, 1])
def test_a_fraction(fraction):
    model, inputs = build(layers=6), batch()
    report = tigon.apply(model, recompute=fraction)
    assert "chosen in the first training step" in str(report)
    run(model, inputs)
    kind = place_of(model.model.layers[0]).kind
    assert kind.left == inputs["input_ids"].numel() * 32 * 4
    saved = [kind.kept - kind.left if i in kind.chosen else kind.dropped for i in range(6)]
    count = len(kind.chosen)
    assert count == 6 or sum(saved) >= fraction * 6 * kind.kept
    assert count == 0 or sum(saved) - kind.kept + kind.left + kind.dropped < fraction * 6 * kind.kept
    gaps = sorted(kind.chosen)
    assert len({b - a for a, b in zip(gaps, gaps[1:], strict=False)}) <= 2, "evenly spread"
    assert f"checkpointed layers: {gaps}, {kind.gone():.0%} of the bytes are not kept" in str(report)


@pytest.mark.parametrize("mode", ["norms", "elementwise", 0.5])
def test_lora(mode):
    models = {}
    for when in ("never", "before", "after"):
        model = build()
        if when == "before":
            tigon.apply(model, recompute=mode)
        model = adapted(model, target_modules=["q_proj", "v_proj", "up_proj"])
        if when != "before":
            tigon.apply(model, recompute=mode if when == "after" else None)
        models[when] = run(model, batch())
        report = tigon.apply(model)
        assert (f"{3 * LAYERS} LoRA layers keep no result" in str(report)) == (when != "never")
    for when in ("before", "after"):
        same_bits(models[when][0], models["never"][0])
        assert models[when][1] < models["never"][1]


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_dw_bf16"])
def test_float8_keeps_its_bytes(recipe, monkeypatch):
    monkeypatch.setattr("tigon.integrations.transformers.fp8.gains", lambda *sizes: True)
    model, inputs = build(), batch()
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    tigon.apply(plain, fp8=recipe)
    report = tigon.apply(other, fp8=recipe, recompute="elementwise")
    same_bits(run(other, inputs)[0], run(plain, inputs)[0])
    assert f"{7 * LAYERS} left: computed in float8" in str(report)
    later = copy.deepcopy(model)
    tigon.apply(later, recompute="elementwise")
    assert tigon.apply(later, fp8=recipe).count("fp8") == 7 * LAYERS
    same_bits(run(later, inputs)[0], run(plain, inputs)[0])


@pytest.mark.parametrize("context", [AUTOCAST, tigon.deterministic])
def test_contexts(context):
    model, inputs = build(), batch()
    found = []
    for mode in (None, "elementwise"):
        one = copy.deepcopy(model)
        tigon.apply(one, recompute=mode)
        with context():
            found.append(run(one, inputs, times=1))
    same_bits(found[1][0], found[0][0])
    assert found[1][1] < found[0][1]


@pytest.mark.parametrize("mode", MODES)
def test_undo_copies_and_pickles(mode):
    model, inputs = build(), batch()
    stock = step(model, inputs)
    before = attributes(model)
    tigon.apply(model)
    wanted = step(model, inputs)
    report = tigon.apply(model, recompute=mode)
    run(model, inputs)
    assert tigon.apply(model) is report and report.recompute.given == mode, "it stays on"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same_bits(run(other, inputs)[0], wanted)
        assert place_of(other.model.layers[0]) is not place_of(model.model.layers[0]) or mode in KINDS
        assert "q_proj" in str(report_of(other)).partition("recompute")[2]
    assert tigon.apply(model, recompute="norms").recompute.kinds == KINDS["norms"]
    assert all(place_of(module) is None for module in model.modules()), "no layer is checkpointed any more"
    tigon.undo(model)
    assert attributes(model) == before
    same_bits(step(model, inputs), stock)


@pytest.mark.parametrize("given", ["none", "all", 0, -0.5, 1.5, float("nan"), True, ("norms",)])
def test_unknown_values_are_refused(given):
    model = build()
    with pytest.raises(tigon.Error, match=r"recompute must be \"norms\", \"elementwise\" or a number"):
        tigon.apply(model, recompute=given)
    assert "forward" not in vars(model.model.norm)


def test_checkpoints_and_hooks_of_others():
    """They manage what is kept: nothing is formed again besides, and a number is refused."""
    model, inputs = build(), batch()
    tigon.apply(model)
    wanted = step(model, inputs)
    tigon.apply(model, recompute="elementwise")
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        same_bits(run(model, inputs)[0], wanted)
        assert f"{LAYERS} left: checkpointed" in str(tigon.apply(model))
        with pytest.raises(tigon.Error, match="whose layers are checkpointed"):
            tigon.apply(model, recompute=0.5)
    model.gradient_checkpointing_disable()
    with torch.autograd.graph.save_on_cpu():
        same_bits(run(model, inputs)[0], wanted)
    tigon.apply(model, recompute=0.5)
    with torch.autograd.graph.save_on_cpu():
        same_bits(run(model, inputs)[0], wanted)
    layer = tigon.apply(torch.nn.Sequential(model.model.norm, torch.nn.Linear(32, 8)))
    with pytest.raises(tigon.Error, match="a model without layers of transformers"):
        tigon.apply(torch.nn.Sequential(model.model.norm, torch.nn.Linear(32, 8)), recompute=0.5)
    assert layer.recompute is None


def norm_and_linear():
    model = torch.nn.Sequential(copy.deepcopy(build().model.norm), torch.nn.Linear(32, 8))
    tigon.apply(model, recompute="norms")
    leaf = torch.randn(5, 32, requires_grad=True)
    x = leaf * 1
    return model, leaf, x, model(x)


@pytest.mark.parametrize("changed", ["x", "the norm's weight", "the Linear's weight"])
def test_what_is_changed_before_the_backward_is_an_error(changed):
    model, _, x, y = norm_and_linear()
    with torch.no_grad():
        {"x": x, "the norm's weight": model[0].weight, "the Linear's weight": model[1].weight}[changed].mul_(
            2
        )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_changed_result_of_a_norm():
    """Before a Linear reads it, it is kept; afterwards, the backward has what the Linear has read."""
    model, _, x, y = norm_and_linear()
    y.sum().backward()
    wanted = model[1].weight.grad.clone()
    for when, factor in (("before", 2), ("after", 1)):
        model.zero_grad()
        h = model[0](x.detach().requires_grad_())
        with torch.no_grad():
            h.mul_(2) if when == "before" else None
            with torch.enable_grad():
                y = model[1](h)
            h.mul_(2) if when == "after" else None
        y.sum().backward()
        assert torch.equal(model[1].weight.grad, factor * wanted)


def test_graphs_that_are_kept_and_second_derivatives():
    model, leaf, _, y = norm_and_linear()
    first = torch.autograd.grad(y.sum(), [leaf, *model.parameters()], retain_graph=True)
    (part,) = torch.autograd.grad(y.sum(), model[1].weight, retain_graph=True)
    second = torch.autograd.grad(y.sum(), [leaf, *model.parameters()], retain_graph=True)
    assert all(map(torch.equal, first, second)) and torch.equal(part, first[2])
    with pytest.raises(tigon.Error, match="second derivatives"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_hooks_of_modules_run():
    model, inputs = build(), batch()
    tigon.apply(model)
    layer, seen = model.model.layers[0], []
    layer.input_layernorm.register_forward_hook(lambda module, args, out: out * 2)
    layer.mlp.down_proj.register_forward_hook(lambda *_: seen.append("forward"))
    layer.self_attn.q_proj.register_full_backward_hook(lambda *_: seen.append("backward"))
    wanted = step(model, inputs)
    tigon.apply(model, recompute="elementwise")
    same_bits(run(model, inputs, times=1)[0], wanted)
    assert seen == 2 * ["forward", "backward"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["elementwise", 0.5])
def test_a_compiled_model_keeps_what_the_compiler_chooses(mode):
    model, inputs = build(layers=1), batch()
    tigon.apply(model)
    wanted = step(torch.compile(model, backend="aot_eager"), inputs)
    torch.compiler.reset()
    tigon.apply(model, recompute=mode)
    got = step(torch.compile(model, backend="aot_eager"), inputs)
    assert torch.equal(got[0], wanted[0])
    assert "nothing yet" in str(report_of(model))


def test_trainer_callback():
    from tigon.integrations.transformers.modules import TigonTrainerCallback

    model = build()
    callback = TigonTrainerCallback(recompute=0.5)
    callback.on_init_end(None, None, None, model=model)
    assert callback.report.recompute.fraction == 0.5 and place_of(model.model.layers[0]) is not None
