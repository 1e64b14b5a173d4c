"""Modules that are no longer what they were: a step of the patched model is one of stock all the same.

Each called submodule of small models gets another forward (of the instance, of the class), a hook of each
sort, another class or other parameters, before `apply` and after it.
"""

import contextlib
import copy
import functools
import importlib
import re
from collections import Counter
from types import MethodType

import pytest
import torch
import transformers
from packaging.version import Version
from tiny import SHARED, adapted, batch, loaded, step
from tiny_config import tiny_config
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import tigon
import tigon.transformers
from tigon.integrations.transformers import apply, undo
from tigon.integrations.transformers.canonical import canonical
from tigon.integrations.transformers.forward import bound

peft = pytest.importorskip("peft")

SMALL = {**SHARED, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS = {
    "llama": ("Llama", {"mlp_bias": True}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {}),
    "granite": ("Granite", {"logits_scaling": 3.0}),
    "nemotron": ("Nemotron", {}),
    "qwen3": ("Qwen3", {}),
    "falcon_h1": None,
    **{
        f"mixtral {way}": ("Mixtral", {"num_local_experts": 4, "experts_implementation": way})
        for way in ("eager", "grouped_mm", "batched_mm")
    },
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "gpt_oss": None,
    "lora": {},
    "dora": {"use_dora": True},
}


def make(name):
    torch.manual_seed(0)
    made = MODELS[name]
    if made is None:
        config = tiny_config(transformers.CONFIG_MAPPING[name]())
        config.num_hidden_layers = 1
        if vars(config).get("layer_types"):
            config.layer_types = config.layer_types[:1]
        return transformers.AutoModelForCausalLM.from_config(config).train()
    if isinstance(made, dict):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
        return adapted(model, target_modules=TARGETS, **made)
    kind, options = made
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
    ).train()


def scaled(value, by=1.25):
    if isinstance(value, tuple):
        return tuple(scaled(one, by) for one in value)
    numbers = not isinstance(value, torch.Tensor) or value.is_floating_point()
    return value * by if numbers and hasattr(value, "shape") else value


def around(function):
    return lambda *args, **kwargs: scaled(function(*args, **kwargs))


# Each changes one module by a monkeypatch, or by a hook, which it gives back.
def wrapped(patch, module):
    patch.setitem(vars(module), "forward", around(module.forward))


def call_impl(patch, module):
    patch.setitem(vars(module), "_call_impl", around(module._call_impl))


def other_class(patch, module, method="forward"):
    kind = type(module)
    other = type(kind.__name__, (kind,), {method: around(getattr(kind, method))})
    patch.setattr(module, "__class__", other)


def class_forward(patch, module):
    patch.setattr(type(module), "forward", around(type(module).forward))


def parameters(patch, module):
    for name, p in module._parameters.items():
        if p is not None:
            other = nn.Parameter(p.detach() * 1.25, requires_grad=p.requires_grad)
            patch.setitem(module._parameters, name, other)


def trained(patch, module):
    for p in module.parameters(recurse=False):
        patch.setattr(p, "requires_grad", not p.requires_grad)


CHANGES = {
    "wrapped": wrapped,
    "class": other_class,
    "class_forward": class_forward,
    "call": functools.partial(other_class, method="__call__"),
    "call_impl": call_impl,
    "parameters": parameters,
    "trained": trained,
    "pre": lambda _, m: m.register_forward_pre_hook(lambda _, args: scaled(args)),
    "post": lambda _, m: m.register_forward_hook(lambda _, args, y: scaled(y)),
    "backward_pre": lambda _, m: m.register_full_backward_pre_hook(lambda _, dy: scaled(dy)),
    "backward": lambda _, m: m.register_full_backward_hook(lambda _, dx, dy: scaled(dx)),
}


def called(model, inputs):
    """The modules that a forward of stock calls and that return tensors, one of each kind and place."""
    found, handles = {}, []

    def note(path):
        def hook(module, args, y):
            first = y[0] if isinstance(y, tuple) else y
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                found.setdefault((type(module), re.sub(r"\d+", "#", path)), path)

        return hook

    for path, module in model.named_modules():
        handles.append(module.register_forward_hook(note(path)))
    model(**inputs)
    for handle in handles:
        handle.remove()
    return sorted(found.values())


def outcome(model, inputs):
    """Of a step; the text of an error where it fails."""
    try:
        return step(model, inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)


def differs(got, wanted) -> str | None:
    if isinstance(wanted, str):
        return None  # nothing to compare with
    if isinstance(got, str):
        return got
    if got[1].keys() != wanted[1].keys():
        return f"gradients of {sorted(got[1].keys() ^ wanted[1].keys())}"
    pairs = {"loss": (got[0], wanted[0])} | {name: (got[1][name], g) for name, g in wanted[1].items()}
    scale = max(g.norm() for g in wanted[1].values())
    for name, (one, other) in pairs.items():
        error, allowed = (one - other).norm().item(), 1e-3 * other.norm().item() + 1e-5 * scale.item()
        if not error <= allowed:
            return f"{name}: {error:.2g} of {other.norm().item():.2g}"
    return None


@contextlib.contextmanager
def changed(model, path, change):
    no_hook = contextlib.nullcontext()
    with pytest.MonkeyPatch.context() as patch, CHANGES[change](patch, model.get_submodule(path)) or no_hook:
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_module_is_asked(name):
    model, inputs = make(name), batch(tokens=5, rows=1)
    inputs = {key: value % model.config.get_text_config().vocab_size for key, value in inputs.items()}
    cases = [(path, change) for path in called(model, inputs) for change in CHANGES if path]
    plain, wanted, wrong = step(model, inputs), {}, []
    for case in cases:
        with changed(model, *case):
            wanted[case] = outcome(model, inputs)
    assert differs(step(model, inputs), plain) is None
    qk_norm = name == "qwen3"
    for case in cases:
        with changed(model, *case):
            apply(model, qk_norm=qk_norm)
            wrong.append((*case, "before", differs(outcome(model, inputs), wanted[case])))
            undo(model)
    report = apply(model, qk_norm=qk_norm)
    assert differs(step(model, inputs), plain) is None
    for case in cases:
        with changed(model, *case):
            wrong.append((*case, "after", differs(outcome(model, inputs), wanted[case])))
        fused = report.head_calls.fused
        wrong.append((*case, "taken away", differs(step(model, inputs), plain)))
        assert report.head_calls.fused == fused + report.count("loss"), case
    wrong = [found for found in wrong if found[-1]]
    assert not wrong, "\n".join(map(str, wrong))
    seen = [differs(wanted[case], plain) is not None for case in cases]
    assert sum(seen) > 0.6 * len(seen), f"{sum(seen)} of {len(seen)} cases change a step"


class Larger(LlamaMLP):
    """As quantisation converts a module in place; pickle finds it by its name."""

    def forward(self, x):
        return super().forward(x) * 1.25


@pytest.mark.parametrize("before", [False, True], ids=["change, copy", "copy, change"])
@pytest.mark.parametrize("copied", [copy.deepcopy, loaded])
def test_a_copy_knows_what_was_replaced(copied, before):
    """A class that changes before a copy or in it is the model's own all the same."""
    model, inputs = make("llama"), batch()
    plain = step(model, inputs)
    apply(model)
    if before:
        model = copied(model)
    model.model.layers[0].mlp.__class__ = Larger
    model.model.layers[0].input_layernorm.register_forward_hook(twice)
    if not before:
        model = copied(model)
    got = step(model, inputs)
    undo(model)
    assert differs(got, step(model, inputs)) is None and differs(got, plain) is not None


def twice(module, args, y):
    return y * 2


def test_a_parametrisation_that_comes_and_goes():
    """Each makes another class, as PEFT does in each call for adapters of parameters."""
    model, inputs = make("llama"), batch()
    wanted = step(model, inputs)
    apply(model)
    norm = model.model.layers[0].input_layernorm
    for _ in range(3):
        nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
        assert type(norm) is not LlamaRMSNorm and bound(norm).replaces_own()
        loss = model(**inputs).loss.detach()
        nn.utils.parametrize.remove_parametrizations(norm, "weight")
        torch.testing.assert_close(loss, wanted[0])


def adapt_router(model):
    options = {"r": 2, "target_modules": ["gate"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**options)).train()


def wrap_adapter(model):
    up = model.base_model.model.model.layers[0].self_attn.v_proj.lora_B
    up["default"] = nn.Sequential(up["default"])
    return model


@pytest.mark.parametrize(
    "path", ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"]
)
def test_a_base_that_gets_a_wrapper(path):
    """PEFT calls what is there; it may have no weight."""
    model, inputs = make("lora"), batch()
    stock = copy.deepcopy(model)
    apply(model)
    step(model, inputs)
    for one in (model, stock):
        adapter = one.base_model.model.get_submodule(path)
        adapter.base_layer = nn.Sequential(adapter.base_layer)
    assert differs(step(model, inputs), step(stock, inputs)) is None
    assert differs(outcome(model.eval(), inputs), outcome(stock.eval(), inputs)) is None


@pytest.mark.parametrize("name, change", [("mixtral eager", adapt_router), ("lora", wrap_adapter)])
def test_a_change_between_checkpointed_steps(name, change):
    """The step after it saves in its forward what it saves when it is computed again."""
    model, inputs = make(name), batch()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    stock = copy.deepcopy(model)
    apply(model)
    for _ in range(2):
        assert differs(step(model, inputs), step(stock, inputs)) is None
    torch.manual_seed(1)
    stock = change(stock)
    torch.manual_seed(1)
    model = change(model)
    for _ in range(2):
        assert differs(step(model, inputs), step(stock, inputs)) is None


HEADS = {
    "scale": lambda inner: lambda *args: inner(*args) / 1.7,
    "one argument": lambda inner: lambda x: inner(x) * 2,
    "input and bias": lambda inner: lambda x: inner(x * 1.5) + torch.arange(97.0),
    "mask": lambda inner: lambda x: inner(x).masked_fill(torch.arange(97) > 90, -1e4),
    "cast": lambda inner: lambda x: inner(x).to(torch.bfloat16).float(),
    "other": lambda inner: lambda x: x @ getattr(inner.__self__, "module", inner.__self__).weight.t().flip(0),
}


@pytest.mark.parametrize("kind", HEADS)
def test_another_forward_of_the_head(kind, caplog):
    """Its logits are those of the wrapper; the report, `check` and a second `apply` say so."""
    model, inputs = make("llama"), batch()
    before = model.lm_head.forward
    model.lm_head.forward = HEADS[kind](before)
    wanted = step(model, inputs)
    del model.lm_head.forward
    report = apply(model)
    ours = model.lm_head.forward
    model.lm_head.forward = HEADS[kind](ours)
    assert differs(step(model, inputs), wanted) is None
    assert report.head_calls.fused == 0 and "forward" in report.head_calls.reason
    assert "computes all logits: its forward" in str(report)
    with pytest.raises(tigon.Error, match="0 fused losses; logits computed at once: its forward"):
        report.check()
    apply(model)
    assert [entry.slot for entry in report.left] == ["loss"]
    assert differs(step(model, inputs), wanted) is None
    assert len([r for r in caplog.records if "computes all logits" in r.message]) == 2
    model.lm_head.forward = ours
    apply(model)
    step(model, inputs)
    report.check()


@pytest.mark.parametrize("late", [lambda m: setattr(m.lm_head, "forward", lambda x: x), undo])
def test_a_forward_that_comes_while_logits_are_owed(late):
    model, inputs = make("llama"), batch()
    apply(model)
    logits = model(**inputs).logits
    late(model)
    with pytest.raises(tigon.Error, match="before the head gets another forward"):
        logits.sum()


def test_an_adapter_that_changes_while_logits_are_owed():
    model, inputs = make("lora"), batch()
    with model.disable_adapter():
        wanted = model(**inputs).logits
    apply(model)
    with model.disable_adapter():
        logits, read = (model(**inputs).logits for _ in range(2))
        torch.testing.assert_close(read.materialise(), wanted)
    with pytest.raises(tigon.Error, match="before the head's adapter changes"):
        logits.sum()


class Quantised(nn.Linear):
    """As quantisation-aware training and float8 convert a Linear, in place or by another module."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.round(decimals=2), self.bias)


def _of_class(model):
    model.lm_head.__class__ = Quantised


def _of_module(model):
    converted = Quantised(16, 97, bias=False)
    converted.weight = model.lm_head.weight
    model.lm_head = converted


@pytest.mark.parametrize("convert", [_of_class, _of_module])
def test_a_head_converted_after_apply(convert, caplog):
    inputs, stock, model = batch(), make("llama"), make("llama")
    convert(stock)
    report = apply(model)
    convert(model)
    for _ in range(2):
        assert differs(step(model, inputs), step(stock, inputs)) is None
    said = [r.message for r in caplog.records if "computes all logits" in r.message]
    assert len(said) == 1 and report.head_calls.computed == 2
    with pytest.raises(tigon.Error, match="logits computed at once: the head"):
        report.check()
    assert "computes all logits: the head" in str(report)


@pytest.fixture
def native(monkeypatch):
    """How often the slots call these functions."""
    counts = Counter()
    for place, name in (("norms", "rms_norm"), ("mlp", "gated_unit"), ("lora", "apply")):
        module = importlib.import_module(f"tigon.integrations.transformers.{place}")

        def counted(function, place, *args, **kwargs):
            counts[place] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, functools.partial(counted, getattr(module, name), place))
    return counts


class Doubled(nn.Module):
    """In the place of a norm: no norm."""

    def forward(self, x):
        return 2 * x * self.weight


def _norm_of_gemma(model):
    model.model.norm.eps = 1e-3
    model.model.norm.__class__ = GemmaRMSNorm


def _no_norm(model):
    model.model.norm.__class__ = Doubled


def _mlp_of_class(model):
    model.model.layers[0].mlp.__class__.forward = lambda self, x: self.down_proj(self.up_proj(x))


def _activation(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def _other_approximation(model):
    model.model.layers[0].mlp.act_fn.approximate = "tanh"


def _no_activation(model):
    model.model.layers[0].mlp.act_fn = nn.Softplus()


AGAIN = {
    "another norm": ((_norm_of_gemma,), 3, 1),
    "no norm": ((_no_norm,), 2, 1),
    "no norm any more": ((_norm_of_gemma, _no_norm), 2, 1),
    "a class's forward": ((_mlp_of_class,), 3, 0),
    "another activation": ((_activation,), 3, 1),
    "an attribute of it": ((_activation, _other_approximation), 3, 1),
    "no fused activation": ((_no_activation,), 3, 0),
}


@pytest.mark.parametrize("changes", AGAIN)
def test_applied_again_the_report_says_what_runs(changes, native, monkeypatch):
    """What was replaced and is another thing by now runs, and is replaced anew or left."""
    steps, norms, mlps = AGAIN[changes]
    monkeypatch.setattr(LlamaMLP, "forward", LlamaMLP.forward)  # given back
    inputs, stock, model = batch(), make("llama"), make("llama")
    report = apply(model)
    for change in steps:
        for one in (stock, model):
            change(one)
        wanted = step(stock, inputs)
        assert differs(step(model, inputs), wanted) is None
        apply(model)
        native.clear()
        assert differs(step(model, inputs), wanted) is None
    assert (native["norms"], native["mlp"]) == (norms, mlps), report
    assert (report.count("norm"), report.count("mlp")) == (norms, mlps), report


_peft = functools.partial(adapted, target_modules=["q_proj", "up_proj"])


def _added(model):
    torch.manual_seed(7)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    return model


def least_peft() -> str:
    from transformers.integrations.peft import MIN_PEFT_VERSION

    return MIN_PEFT_VERSION


def keep_device_forward(self, *args, **kwargs):
    return self.forward_origin(*(x.to(self.weight.device) for x in args), **kwargs)


keep_device_forward.__module__ = "swift.tuners.peft"


def moves_input(model):
    """As ms-swift leaves the parts of adapters, each with a forward of the instance."""
    for name, part in model.named_modules():
        if re.search(r"lora_[AB]\.default$", name):
            part.forward_origin, part.forward = part.forward, MethodType(keep_device_forward, part)
    return model


ADAPTED = {
    "get_peft_model": _peft,
    "dora": lambda m: _peft(m, use_dora=True),
    "add_adapter": _added,
    "ms-swift": lambda m: moves_input(_peft(m)),
}


@pytest.mark.parametrize("adapt", ADAPTED)
@pytest.mark.parametrize("slots", [{}, {"loss": False}])
def test_adapters_that_come_after_apply(slots, adapt, native):
    if adapt == "add_adapter" and Version(peft.__version__) < Version(least_peft()):
        pytest.skip(f"this transformers adds adapters by PEFT {least_peft()} and newer only")
    inputs, model = batch(), make("llama")
    stock = ADAPTED[adapt](make("llama"))
    report = apply(model, **slots)
    assert report.count("lora") == 0
    adapted = ADAPTED[adapt](model)
    assert differs(step(adapted, inputs), step(stock, inputs)) is None
    assert native["lora"] == 2 == report.count("lora")
    undo(model)
    native.clear()
    step(adapted, inputs)
    assert not native["lora"] and "forward" not in vars(model)


def test_adapters_whose_parts_move_their_input(native):
    """The forward below may be replaced, and the head's adapter is one too."""
    inputs = batch()
    stock, model = (moves_input(make("lora")) for _ in range(2))
    report = apply(model)
    assert differs(step(model, inputs), step(stock, inputs)) is None
    report.check()
    assert native["lora"] == 2
    for one in (stock, model):
        for part in one.modules():
            if "forward_origin" in vars(part):
                part.forward_origin = lambda x, below=part.forward_origin: below(x) * 1.5
    for _ in range(2):
        assert differs(step(model, inputs), step(stock, inputs)) is None
    assert native["lora"] == 2


def test_adapters_that_come_go_and_stay_away(native):
    inputs, model = batch(), make("llama")
    report = apply(model)
    adapted = _peft(model)
    step(adapted, inputs)
    adapted.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"]))
    adapted.set_adapter("other")
    step(adapted, inputs)
    assert report.count("lora") == 3
    adapted.unload()
    model(**inputs)
    assert report.count("lora") == 0
    native.clear()
    model = make("llama")
    report = apply(model, lora=False)
    step(_peft(model), inputs)
    assert not native["lora"] and not report.count("lora")


def test_adapters_that_come_before_a_compiled_model(native):
    torch._dynamo.reset()
    inputs, model = batch(), make("llama")
    wanted = step(_peft(make("llama")), inputs)
    report = apply(model)
    adapted = torch.compile(_peft(model), backend="aot_eager", fullgraph=True)
    assert abs(adapted(**inputs).loss - wanted[0]) < 1e-4
    assert native["lora"] == 2 == report.count("lora")


@pytest.mark.parametrize("entrance", ["class", "instance", "type", "auto"])
def test_adapters_after_ligers_switch(facade, entrance, native):
    """As Axolotl and LLaMA-Factory have it (the class first, the model, then PEFT)."""
    liger = importlib.import_module("liger_kernel.transformers")
    inputs, wanted = batch(), step(_peft(make("llama")), batch())
    if entrance == "class":
        liger.apply_liger_kernel_to_llama()
    if entrance == "type":
        importlib.import_module("liger_kernel.transformers.monkey_patch")._apply_liger_kernel("llama")
    model = make("llama")
    if entrance == "instance":
        liger.apply_liger_kernel_to_llama(model=model)
    if entrance == "auto":
        model = tigon.transformers.AutoTigonForCausalLM.from_config(model.config).train()
        model.load_state_dict(make("llama").state_dict())
    assert differs(step(_peft(model), inputs), wanted) is None
    assert native["lora"] == 2


def test_a_recognised_form_is_that_of_what_its_names_mean_now(monkeypatch):
    """What was read for an expression is compared when it is asked for again."""
    assert apply(make("gemma2")).count("norm") == 5
    with monkeypatch.context() as patch:
        patch.setattr(Gemma2RMSNorm, "_norm", lambda self, x: x)
        assert apply(make("gemma2")).count("norm") == 0
    assert apply(make("gemma2")).count("norm") == 5
    rotary = importlib.import_module("transformers.models.llama.modeling_llama")
    known = canonical(rotary.apply_rotary_pos_emb)
    monkeypatch.setattr(rotary, "rotate_half", lambda x: x)
    assert canonical(rotary.apply_rotary_pos_emb) != known
    monkeypatch.undo()
    assert canonical(rotary.apply_rotary_pos_emb) == known


def test_a_method_that_a_replaced_forward_calls(monkeypatch):
    """Of the class, or of the instance."""
    inputs, stock, model = batch(), make("gemma2"), make("gemma2")
    apply(model)
    for one in (stock, model):
        one.model.norm._norm = lambda x: 0.5 * x
    assert differs(step(model, inputs), step(stock, inputs)) is None
    monkeypatch.setattr(Gemma2RMSNorm, "_norm", lambda self, x: 2 * x)
    assert differs(step(model, inputs), step(stock, inputs)) is None


def test_attributes_that_a_plan_was_made_by():
    """The gate of a norm, and whether it has a weight."""
    kimi = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    gemma = importlib.import_module("transformers.models.gemma4.modeling_gemma4")
    x, gate = torch.randn(2, 3, 16)
    for norm, args, change in (
        (kimi.KimiLinearRMSNormGated(16), (x, gate), {"activation": "silu"}),
        (gemma.Gemma4RMSNorm(16), (x,), {"with_scale": False}),
    ):
        nn.init.normal_(norm.weight)
        apply(nn.Sequential(norm))
        for _ in range(2):
            torch.testing.assert_close(norm(*args), type(norm).forward(norm, *args))
            vars(norm).update(change)
