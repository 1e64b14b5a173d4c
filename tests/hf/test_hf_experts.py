"""Layers of experts of transformers on tigon.experts: each form against the loop of its class in fp64."""

import copy
import importlib
import inspect

import pytest
import torch
from tiny import InDouble, assert_all_as_good, close, make
from torch import nn

import tigon
from tigon import apply, undo

CLASSES = {
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "qwen3_next": "Qwen3NextExperts",
    "gpt_oss": "GptOssExperts",
    "openai_privacy_filter": "OpenAIPrivacyFilterExperts",
    "deepseek_v2": "DeepseekV2Experts",
    "deepseek_v3": "DeepseekV3Experts",
    "deepseek_v4": "DeepseekV4Experts",
    "glm4_moe": "Glm4MoeExperts",
    "olmoe": "OlmoeExperts",
    "aria": "AriaExperts",
    "nemotron_h": "NemotronHExperts",
}
T, H, I, E, K = 19, 32, 24, 5, 2


class Config:
    """What the classes read of a configuration, under all their names."""

    num_experts = num_local_experts = n_routed_experts = moe_num_experts = E
    hidden_size, moe_latent_size = H, None
    intermediate_size = moe_intermediate_size = I
    hidden_act, mlp_hidden_act, swiglu_alpha, swiglu_limit = "silu", "relu2", 1.702, 1.5

    def __init__(self, experts_implementation):
        self._experts_implementation_internal = experts_implementation

    @property
    def _experts_implementation(self):
        return self._experts_implementation_internal


def experts_of(family, implementation="grouped_mm"):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(3)
    experts = getattr(module, CLASSES.get(family, family))(Config(implementation))
    for p in experts.parameters():
        nn.init.normal_(p, std=0.3)
    return nn.Sequential(experts)


def routes_itself(family) -> bool:
    """Whether its forward takes the router's logits, so that it is not of the registry: Aria's in 5.17."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return "router_logits" in inspect.signature(getattr(module, CLASSES[family]).forward).parameters


def routed(dtype, away=0):
    """Tokens, ids and weights; so many experts past the last are somebody else's, their weights zero."""
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    scores = torch.randn(T, E + away, generator=torch.Generator().manual_seed(2))
    weights, ids = scores.softmax(-1).topk(K, dim=-1)
    ids = ids.clamp(max=E)
    return x, ids, weights.masked_fill(ids == E, 0.0).to(dtype)


def step(model, x, ids, weights):
    """y and all gradients."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    y = model[0](x, ids, weights)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(y.dtype)
    leaves = [x, weights, *model.parameters()]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def exact_step(model, x, ids, weights):
    """The loop that the class was written with, in fp64; one of them knows float32 alone."""
    twin = copy.deepcopy(model).double()
    in_float = type(twin[0]).__name__ == "OpenAIPrivacyFilterExperts"
    twin[0].config = Config("batched_mm" if in_float else "eager")
    with InDouble():
        return step(twin, x.double(), ids, weights.double())


@pytest.mark.parametrize("away", [0, 4], ids=["all here", "expert parallel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        (f, i)
        for f in CLASSES
        for i in ("grouped_mm", "eager")
        if (f, i) != ("openai_privacy_filter", "eager") and not routes_itself(f)
    ],
)
def test_layers(family, implementation, dtype, away):
    stock = experts_of(family, implementation).to(dtype)
    stock[0]._is_expert_parallel = away > 0
    patched = copy.deepcopy(stock)
    report = apply(patched)
    assert [entry.by.partition(" (")[0] for entry in report.replaced] == ["tigon.experts"], str(report)
    assert patched[0].config._experts_implementation == "tigon"
    inputs = routed(dtype, away)
    x, ids, weights = inputs
    # Some loops know no other ids: weights of zero leave every gradient but their own as it is.
    known = x, ids.clamp(max=E - 1), weights
    exact, wanted = exact_step(stock, *known), step(stock, *known)
    for found in (exact, wanted):
        found[2] = found[2].masked_fill(ids == E, 0.0)
    assert_all_as_good(step(patched, *inputs), wanted, exact)
    undo(patched)
    assert patched[0].config._experts_implementation == implementation
    assert torch.equal(step(patched, *known)[0], wanted[0])


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_chosen_by_name(family):
    """The registry's own way, without tigon.apply."""
    stock, ours, inputs = experts_of(family), experts_of(family, "tigon"), routed(torch.float32)
    close(step(ours, *inputs)[0], step(stock, *inputs)[0])
    report = apply(ours)
    assert report.count("experts") == 1


def test_another_implementation_keeps_its_matmuls():
    """The default and the loop of the class are replaced; what somebody asked for stays, its gate is ours."""
    model = experts_of("mixtral", "batched_mm")
    (entry,) = apply(model).replaced
    assert entry.by.startswith("tigon.swiglu")
    assert model[0].config._experts_implementation == "batched_mm"


def test_a_loop_in_float32_stays():
    (entry,) = apply(experts_of("openai_privacy_filter", "eager")).replaced
    assert entry.by.startswith("tigon.swiglu")


class RoutesItself(nn.Module):
    """Experts that take the router's logits, as Aria's do in transformers 5.17."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, H, 2 * I))
        self.down_proj = nn.Parameter(torch.randn(E, I, H))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, router_logits):
        weights, ids = router_logits.topk(K)
        gate, up = torch.einsum("th,tkhi->tki", hidden_states, self.gate_up_proj[ids]).chunk(2, -1)
        y = torch.einsum("tki,tkih->tkh", self.act_fn(gate) * up, self.down_proj[ids])
        return (y * weights.softmax(-1)[..., None]).sum(1)


def test_experts_that_route_themselves_stay():
    model = nn.ModuleList([RoutesItself(), nn.RMSNorm(H, 1e-6)])
    x, logits = torch.randn(T, H), torch.randn(T, E)
    wanted = model[0](x, logits)
    report = apply(model)
    assert [entry.slot for entry in report.replaced] == ["norm"], str(report)
    assert torch.equal(model[0](x, logits), wanted)


@pytest.mark.parametrize("family", [f for f in CLASSES if routes_itself(f)])
def test_classes_outside_the_registry_stay(family):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with pytest.raises(tigon.Error, match="must hold"):
        apply(nn.Sequential(getattr(module, CLASSES[family])(Config("grouped_mm"))))


def test_layers_clamped_behind_the_activation_keep_their_matmuls():
    modeling = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    model = nn.Sequential(modeling.Step3p7Experts(Config("grouped_mm"), 1.5))
    (entry,) = apply(model).replaced
    assert entry.by.startswith("tigon.swiglu")


def test_one_configuration_of_two_models():
    """The one that is not patched runs as the default does."""
    patched, other = experts_of("mixtral"), experts_of("mixtral")
    other[0].config = patched[0].config
    inputs = routed(torch.float32)
    wanted = step(other, *inputs)
    apply(patched)
    close(step(other, *inputs)[0], wanted[0])
    twin = copy.deepcopy(patched)
    undo(patched)
    assert patched[0].config._experts_implementation == "grouped_mm"
    assert twin[0].config._experts_implementation == "tigon"
    undo(twin)
    assert twin[0].config._experts_implementation == "grouped_mm"


def adapt_all(model):
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules="all-linear"), model)


def copy_a_layer(model):
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])


def drop_experts(model):
    model.model.layers[0].mlp.experts = torch.nn.Identity()


@pytest.mark.parametrize("change", [adapt_all, copy_a_layer, drop_experts])
def test_undo_after_a_change(change):
    """Every configuration names the implementation of before, also one of a copied layer."""
    model = make("mixtral", experts_implementation="eager")
    apply(model)
    change(model)
    undo(model)
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    assert {config._experts_implementation for config in configs} == {"eager"}


@pytest.mark.parametrize("again", [False, True], ids=["once", "again in a copy"])
def test_what_the_op_does_not_take_goes_as_before(again):
    """float64 and autocast to another dtype."""
    stock = experts_of("qwen3_moe", "eager")
    patched, inputs = copy.deepcopy(stock), routed(torch.float32)
    apply(patched)
    if again:
        patched = copy.deepcopy(patched)
        apply(patched)
    wanted, got = (
        [*step(m.double(), *(t.double() if t.is_floating_point() else t for t in inputs))]
        for m in (copy.deepcopy(stock), copy.deepcopy(patched))
    )
    close(got, wanted, ulps=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(patched[0](*inputs), stock[0](*inputs))


def test_adapters_of_parameters():
    """PEFT's target_parameters: the sum that its parametrisation forms is what the matmuls read."""
    from torch.nn.utils import parametrize

    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(E, 2 * I, 2)), nn.Parameter(torch.randn(E, 2, H))

        def forward(self, weight):
            return weight + self.a @ self.b

    stock, inputs = experts_of("mixtral"), routed(torch.float32)
    torch.manual_seed(5)
    stock[0].requires_grad_(False)
    parametrize.register_parametrization(stock[0], "gate_up_proj", Added())
    patched = copy.deepcopy(stock)
    assert apply(patched).count("experts") == 1

    def gradients(model):
        y = model[0](*inputs)
        leaves = [p for p in model.parameters() if p.requires_grad]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    torch.testing.assert_close(gradients(patched), gradients(stock), rtol=1e-4, atol=1e-4)


def test_saved_configuration_names_no_implementation(tmp_path):
    model = make("mixtral", experts_implementation="grouped_mm")
    apply(model)
    model.save_pretrained(tmp_path)
    assert "tigon" not in (tmp_path / "config.json").read_text()
    with torch.no_grad():
        ids = torch.randint(3, 40, (1, 5))
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= 8
