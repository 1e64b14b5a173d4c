"""What drops a graph: each thing that a captured decision has read. See test_hf_graphs.py."""

import collections
import contextlib
import copy
import dataclasses
import functools
import re
import types
from unittest import mock

import pytest
import torch
import transformers
from graph_cases import captured, captured_pair, held, inputs, pair, same_steps, twins
from graph_recorder import Recorder
from tiny import adapted, close, make, same_bits, step
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tigon
from tigon.graphs.watch import Watch
from tigon.integrations.transformers import apply, undo
from tigon.integrations.transformers.patch import unwrapped

pytestmark = pytest.mark.usefixtures("recorder")


class Helper:
    factor = 2.0

    def __init__(self):
        self.factor = 2.0


def _attention(model):
    return model.model.layers[0].self_attn


def _data(p, of):
    p.data = of(p.data)


def _class(model):
    attention = _attention(model)

    def halved(self, hidden_states, **_):
        return hidden_states * 0.5, None

    attention.__class__ = type("Other", (type(attention),), {"forward": halved})


def _scaled(m):
    return nn.Parameter(m.model.norm.weight.detach() * 2)


CHANGES = {
    "swap": lambda m: _data(m.model.norm.weight, torch.clone),
    "transpose": lambda m: _data(_attention(m).o_proj.weight, torch.t),
    "other parameter": lambda m: setattr(m.model.norm, "weight", _scaled(m)),
    "freeze": lambda m: m.model.embed_tokens.weight.requires_grad_(False),
    "other buffer": lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 2),
    "other module": lambda m: m.model.layers.__setitem__(1, copy.deepcopy(m.model.layers[1])),
    "less layers": lambda m: m.model.layers.pop(1),
    "partly eval": lambda m: m.model.layers[0].eval(),
    "scaling": lambda m: setattr(_attention(m), "scaling", 2 * _attention(m).scaling),
    "epsilon": lambda m: setattr(m.model.norm, "variance_epsilon", 0.5),
    "configuration": lambda m: setattr(m.config, "num_hidden_layers", 1),
    "other forward": lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: x * 2),
    "rows": lambda m: m.resize_token_embeddings(101),
    "whole dtype": lambda m: m.to(torch.bfloat16),
    "loss function": lambda m: setattr(m, "loss_function", lambda logits, labels, **_: logits[0, 0, 0] * 1.0),
    "helper": lambda m: setattr(_attention(m).helper, "factor", 3.0),
    "class": _class,
    "dropout": lambda m: setattr(_attention(m), "attention_dropout", 0.5),
    "checkpointing": lambda m: m.gradient_checkpointing_enable(),
    "apply": lambda m: apply(m, graphs=True),
    "undo": undo,
}


def replayed(before, call) -> list:
    """Which of the graphs that were there before `call` have been replayed in it."""
    seen = []
    original = Recorder.replay

    def replay(self, graph):
        seen.append(graph)
        original(self, graph)

    with mock.patch.object(Recorder, "replay", replay):
        call()
    return [graph for graph in seen if graph in before]


def backwards(graphs):
    return [graph.backward for graph in graphs._graphs.values()]


def dropped_by(change, models, before, steps=same_steps):
    """Nothing that was captured before the change is replayed after it, and both models go on alike."""
    for m in models:
        step(m, inputs(20))
        torch.manual_seed(5)
        change(m)
    for seed in range(4):
        assert not replayed(before, lambda s=seed: steps(models, [s]))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_drops_the_graph(change):
    models = pair(attention_dropout=0.3 * (change == "dropout"))
    for m in models:
        _attention(m).helper = Helper()
    dropped_by(CHANGES[change], models, backwards(captured(models[1])))


HOOKS = {
    "hook": lambda m: _attention(m).q_proj.register_forward_hook(lambda module, args, output: output * 2),
    "pre hook": lambda m: _attention(m).register_forward_pre_hook(lambda module, args: None),
    "backward": lambda m: m.model.layers[1].register_full_backward_hook(lambda module, given, out: None),
    "everywhere": lambda m: nn.modules.module.register_module_forward_hook(lambda module, args, output: None),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_run_in_each_call(hook, caplog):
    model, twin, graphs = captured_pair()
    handles = [HOOKS[hook](m) for m in ((twin,) if hook == "everywhere" else (model, twin))]
    replays = graphs.replays
    try:
        same_bits(step(twin, inputs(3)), step(model, inputs(3)))
        step(twin, inputs(3))
    finally:
        for handle in handles:
            handle.remove()
    assert graphs.replays == replays
    assert caplog.text.count("runs eagerly: hooks on") == 1
    same_steps((model, twin), range(2))
    assert graphs.replays > replays


def test_hooks_on_gradients_run():
    model, twin, _ = captured_pair()
    handles = [m.model.norm.weight.register_hook(lambda g: g * 3) for m in (model, twin)]
    replays = held(twin).replays
    same_steps((model, twin), [3, 3])
    assert held(twin).replays == replays + 2
    held(twin).reset()  # captured with the hooks there
    same_steps((model, twin), [3, 3, 3])
    assert held(twin).replays > replays + 2
    del handles


def test_an_old_loss_may_live_on():
    """Autograd's nodes of parameters live with it: a capture must not meet them."""
    models, kept = pair(), []

    def loss_of(model, given):
        kept.append(model(**given).loss)
        return kept[-1]

    same_steps(models, range(6), loss_of=loss_of)
    assert held(models[1]).replays == 4


def test_hooks_behind_accumulation_run_after_a_replay():
    """An optimizer in the backward works; gradients are all there before the first parameter changes."""
    model, twin, _ = captured_pair()
    seen = []

    def update(m, p):
        seen.append(m)
        p.data.sub_(p.grad, alpha=0.1)

    for m in (model, twin):
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(functools.partial(update, m))
    step(twin, inputs(3))
    step(model, inputs(3))
    assert seen.count(twin) == seen.count(model) > 0
    close([*model.parameters()], [*twin.parameters()], ulps=0)


@contextlib.contextmanager
def _set(function, before, value):
    function(value)
    try:
        yield
    finally:
        function(before)


def _replaced(owner, name, value):
    return _set(functools.partial(setattr, owner, name), getattr(owner, name), value)


def _other_attention(key, value):
    change = functools.partial(ALL_ATTENTION_FUNCTIONS.__setitem__, key)
    return _set(change, ALL_ATTENTION_FUNCTIONS[key], value)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _no_attention(module, query, *_, **__):
    return query.transpose(1, 2), None


_qwen3 = transformers.models.qwen3.modeling_qwen3
SWITCHES = {
    "function": lambda: _replaced(_qwen3, "eager_attention_forward", _no_attention),
    "inner function": lambda: _replaced(_qwen3, "repeat_kv", lambda x, n: x.repeat_interleave(n, 1)),
    "class forward": lambda: _replaced(_qwen3.Qwen3DecoderLayer, "forward", lambda self, x, **_: x),
    "registry": lambda: _other_attention("sdpa", _no_attention),
    "deterministic": tigon.deterministic,
    "default dtype": lambda: _set(torch.set_default_dtype, torch.float32, torch.float64),
    "precision": lambda: _set(torch.set_float32_matmul_precision, "highest", "medium"),
    "tf32": lambda: _replaced(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "sdp": lambda: _set(torch.backends.cuda.enable_flash_sdp, True, False),
    "anomaly": torch.autograd.detect_anomaly,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "dispatch mode": lambda: _Dispatch(),
    "function mode": lambda: BaseTorchFunctionMode(),
    "default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_outside_of_the_model(switch):
    family = {"registry": {"attn_implementation": "sdpa"}}.get(switch, {})
    _, twin, graphs = captured_pair(**family)

    def call():
        with SWITCHES[switch]():
            step(twin, inputs(1))

    assert not replayed(backwards(graphs), call)


def test_under_a_default_device():
    """A program that sets one has it around every step."""
    _, twin = pair()
    with torch.device("cpu"):
        graphs = captured(twin)
        assert replayed(backwards(graphs), lambda: step(twin, inputs(1)))
    assert not replayed(backwards(graphs), lambda: step(twin, inputs(1)))


LORA = {
    "merge": lambda m: m.merge_adapter(),
    "disable": lambda m: m.base_model.disable_adapter_layers(),
    "scale": lambda m: [layer.scaling.__setitem__("default", 0.5) for layer in _lora(m)],
    "switch": lambda m: (m.add_adapter("other", m.peft_config["default"]), m.set_adapter("other")),
    "dropout": lambda m: [layer.lora_dropout.__setitem__("default", nn.Dropout(0.5)) for layer in _lora(m)],
    "unfreeze": lambda m: m.base_model.model.model.norm.weight.requires_grad_(True),
    "other": lambda m: [layer.lora_A.update({"default": _linear(layer)}) for layer in _lora(m)],
}


def _linear(layer):
    return nn.Linear(layer.in_features, 4, bias=False)


def _lora(model):
    return [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "scaling")]


@pytest.mark.parametrize("change", LORA)
def test_a_change_of_adapters_drops_the_graph(change):
    models = twins(adapted(make("qwen3"), lora_dropout=0.1 * (change == "dropout")))

    def same_losses(models, seeds):  # nothing is trained
        for seed in seeds:
            assert torch.equal(*(m(**inputs(seed)).loss for m in models))

    steps = same_losses if change in ("merge", "disable") else same_steps
    dropped_by(LORA[change], models, backwards(captured(models[1])), steps)


def test_what_changes_in_each_step_runs_eagerly(caplog):
    model, twin, _ = captured_pair()
    for seed in range(60):
        for m in (model, twin):
            _attention(m).scaling += 0.01 * (seed % 3 == 0)
        if seed % 10 == 0:
            same_bits(step(twin, inputs(seed)), step(model, inputs(seed)))
        else:
            step(twin, inputs(seed))
    assert held(twin).captures <= 10
    assert "again and again" in caplog.text


def _other(value):
    """Another value of the same kind, or None where nobody sets one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "_"
    if isinstance(value, tuple):
        return (*value, 1)
    return object() if value is None else None


def test_every_attribute_is_watched():
    """Of every module, configuration and container in it, one after the other."""
    model = adapted(make("qwen3"))
    apply(model, graphs=True)
    graphs = captured(model)
    watch, root, swept = graphs._watch, unwrapped(model), 0
    assert watch.moved() is None and watch.changed() is None
    places = []
    for module in root.modules():
        places.append(vars(module))
        places += [vars(v) for v in vars(module).values() if type(v).__name__.endswith("Config")]
        places += [v for n, v in vars(module).items() if isinstance(v, dict) and not n.startswith("_")]
    for place in places:
        for name, value in list(place.items()):
            other = _other(value)
            if other is None or (place is vars(root) and name in ("tigon_report",)):
                continue
            place[name] = other
            assert watch.changed() is not None, (name, value)
            place[name] = value
            swept += 1
    assert watch.changed() is None and swept > 300


@dataclasses.dataclass(slots=True)
class Slots:
    factor: float = 2.0


class Scaled(nn.Module):
    alpha = 2.0


# What a module holds, and what reaches the number inside.
HOLDERS = {
    "slots": (Slots, lambda held: setattr(held, "factor", 3.0)),
    "object": (Helper, lambda held: setattr(held, "factor", 3.0)),
    "empty": (types.SimpleNamespace, lambda held: setattr(held, "factor", 3.0)),
    "tuple": (lambda: (Helper(),), lambda held: setattr(held[0], "factor", 3.0)),
    "deque": (lambda: collections.deque([2.0]), lambda held: held.append(3.0)),
    "order": (lambda: collections.OrderedDict(a=2.0), lambda held: held.update(a=3.0)),
    "user's": (lambda: collections.UserDict(a=2.0), lambda held: held.update(a=3.0)),
    "nested": (lambda: {"a": {"b": ({"c": 2.0},)}}, lambda held: held["a"]["b"][0].update(c=3.0)),
    "shared": (lambda: [[[[[one := [2.0]]]]], one], lambda held: held[1].append(3.0)),
    "class": (lambda: None, lambda held: setattr(Scaled, "alpha", Scaled.alpha + 1)),
    "method": (lambda: None, lambda held: setattr(Scaled, "helper", lambda self: None)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_attributes_hold_is_watched(holder):
    make_held, change = HOLDERS[holder]
    module = nn.Sequential(Scaled())
    module[0].held = make_held()
    watch = Watch(module)
    assert watch.changed() is None
    change(module[0].held)
    assert re.search(r"(0\.held|Scaled\.\w+ of the class) has changed", watch.changed())
    assert Watch(module).changed() is None


def test_every_parameter_and_buffer_is_watched():
    model = adapted(make("qwen3"))
    apply(model, graphs=True)
    watch = captured(model)._watch
    for t in [*unwrapped(model).parameters(), *unwrapped(model).buffers()]:
        kept = t.data
        t.data = kept.clone()
        assert watch.moved() is not None
        t.data = kept
        t.data = kept.view(-1, 1) if kept.ndim == 1 else kept.flatten()
        assert watch.changed() is not None
        t.data = kept
        if isinstance(t, nn.Parameter):
            t.requires_grad_(not t.requires_grad)
            assert watch.changed() is not None
            t.requires_grad_(not t.requires_grad)
    assert watch.moved() is None and watch.changed() is None
