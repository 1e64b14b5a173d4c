"""What `apply` leaves alone: a model of the same class, file and configuration that was never patched."""

import sys

import pytest
import torch
import transformers
from tiny import FAMILIES, SHARED, attributes, batch, make, step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tigon.integrations.transformers import apply, undo

# Models of other rotary functions, and what their configurations need besides.
EAGER = {"experts_implementation": "eager", "num_experts_per_tok": 2}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
MLA |= {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
MLA |= {"first_k_dense_replace": 1, "moe_intermediate_size": 16, **EAGER}
MODELS = {
    "Cohere": {},
    "Glm": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "Ernie4_5": {"head_dim": 8},
    "Helium": {"head_dim": 8},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, **EAGER},
    "DeepseekV3": MLA,
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "n_inner": 48},
}


def build(name):
    """A tiny model without dropout."""
    if name in FAMILIES:
        return make(name)
    torch.manual_seed(0)
    shared = {key: value for key, value in SHARED.items() if not (name == "GPTJ" and key.startswith("num_"))}
    config = getattr(transformers, f"{name}Config")(**{**shared, **MODELS[name]})
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def shared_state(model) -> dict:
    """Names of the modelling files and of the classes of a model, of transformers and of torch.nn."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    files = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("transformers.models.", "torch.nn."))
    ]
    spaces = {kind: kind for kind in kinds} | {
        module.__name__: module for module in files if module is not None
    }
    return {key: dict(vars(space)) for key, space in spaces.items()}


def same_objects(before: dict, after: dict) -> list:
    """What is another object than before; what was imported since is new."""
    return [
        (space, name)
        for space, names in before.items()
        for name, value in names.items()
        if after[space].get(name) is not value and not name.startswith(("__", "_abc"))
    ]


def derivatives(model, inputs) -> list[torch.Tensor]:
    """Loss, gradients, a second derivative, a directional one, and those of torch.func."""
    weights = dict(model.named_parameters())
    keys = list(weights)
    direction = {
        key: torch.cos(torch.arange(w.numel(), dtype=w.dtype)).view_as(w) for key, w in weights.items()
    }

    def loss_of(weights):
        return torch.func.functional_call(model, weights, (), inputs).loss

    loss, grads = step(model, inputs)
    first = torch.autograd.grad(model(**inputs).loss, list(weights.values()), create_graph=True)
    squares = sum((grad * direction[key]).sum() for key, grad in zip(keys, first, strict=True))
    second = torch.autograd.grad(squares, list(weights.values()), allow_unused=True)
    _, along = torch.func.jvp(loss_of, (weights,), (direction,))
    through = torch.func.grad(loss_of)({key: w.detach() for key, w in weights.items()})
    seconds = [x for x in second if x is not None]
    return [loss, *grads.values(), *seconds, along.detach(), *(through[key] for key in keys)]


def hooked(model, inputs) -> list[tuple]:
    """Paths of the modules that forward hooks saw, and the shapes that they saw."""
    seen, handles = [], []
    for path, module in model.named_modules():

        def note(module, args, kwargs, output, path=path):
            seen.append((path, len(args), sorted(kwargs), type(output).__name__))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    step(model, inputs)
    for handle in handles:
        handle.remove()
    return seen


class Operators(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def equal(got, wanted) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_a_compiled_model_beside_a_patched_one_is_stock(name):
    """Compiled before apply or behind it; no graph holds an operator of Tigon's."""
    model, inputs, operators = build(name), batch(), set()

    def backend(graph, _):
        operators.update(str(node.target) for node in graph.graph.nodes)
        return graph

    def compiled_step():
        torch._dynamo.reset()
        model.forward = torch.compile(type(model).forward, backend=backend).__get__(model)
        return step(model, inputs)

    patched = type(model)(model.config).train()
    wanted = compiled_step()
    before = model.forward
    apply(patched)
    step(patched, inputs)
    for run in (lambda: step(model, inputs), compiled_step):
        got = run()
        assert torch.equal(got[0], wanted[0]) and equal([*got[1].values()], [*wanted[1].values()])
    assert model.forward is not before and not any("tigon" in operator for operator in operators)


@pytest.mark.parametrize("name", [*FAMILIES, *MODELS])
def test_a_model_beside_a_patched_one_is_stock(name):
    model, inputs = build(name), batch()
    patched = type(model)(model.config).train()
    patched.load_state_dict(model.state_dict())
    wanted, seen = derivatives(model, inputs), hooked(model, inputs)
    shared, own = shared_state(model), attributes(model)
    report = apply(patched, qk_norm=True)
    assert report.count("rope")
    step(patched, inputs)
    assert not same_objects(shared, shared_state(model))
    assert own == attributes(model)
    got = derivatives(model, inputs)
    assert equal(got, wanted) and hooked(model, inputs) == seen
    with Operators() as operators:
        step(model, inputs)
    assert operators.names and not [name for name in operators.names if "tigon" in name]
    undo(patched)
    assert equal(derivatives(model, inputs), wanted)
