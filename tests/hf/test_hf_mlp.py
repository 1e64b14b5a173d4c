"""Which MLPs are recognised, by their activation and their form, and that the fused ones are as good."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import InDouble, assert_all_as_good, close, double, make
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.moshi.modeling_moshi import MoshiGatingMLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

from tigon.integrations.transformers import apply
from tigon.integrations.transformers.mlp import known_activation, plan_mlp
from tigon.integrations.transformers.patterns.mlp import EXPERT_GATES

NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu"}
NAMES |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
NAMES |= {"gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "relu": "relu", "relu2": "relu_squared"}


@pytest.mark.parametrize("name", sorted(set(ACT2FN) - {"xielu"}))
def test_activations_are_told_apart(name):
    """Every activation of transformers: the ones we have, in all spellings, and no other."""
    assert known_activation(ACT2FN[name]) == NAMES.get(name)


def test_functions_and_torch_modules_are_known():
    assert known_activation(nn.functional.silu) == "silu"
    assert known_activation(nn.GELU("tanh")) == "gelu_tanh"
    assert known_activation(nn.GELU()) == "gelu"


def test_asking_leaves_no_trace():
    """A dropout between two matmuls is asked too: the random numbers that follow stay the same."""
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    assert known_activation(nn.Dropout(0.5)) is None
    assert torch.equal(torch.rand(4), wanted)


class Gated(nn.Module):
    def __init__(self, act, size=24, dtype=torch.float32):
        super().__init__()
        self.wide, self.other = (nn.Linear(16, size, bias=False, dtype=dtype) for _ in range(2))
        self.back = nn.Linear(size, 16, bias=False, dtype=dtype)
        self.act = act

    def forward(self, hidden):
        return self.back(self.other(hidden) * self.act(self.wide(hidden)))


class Packed(nn.Module):
    def __init__(self, act, size=24, dtype=torch.float32):
        super().__init__()
        self.both = nn.Linear(16, 2 * size, bias=False, dtype=dtype)
        self.back = nn.Linear(size, 16, bias=False, dtype=dtype)
        self.act = act

    def forward(self, hidden):
        halves = self.both(hidden).chunk(2, dim=-1)
        return self.back(self.act(halves[0]) * halves[1])


class Alone(nn.Module):
    """No projection behind the product (CPM-Ant): that is another module's."""

    def __init__(self, act, size=16, dtype=torch.float32):
        super().__init__()
        self.wide, self.other = (nn.Linear(16, size, bias=False, dtype=dtype) for _ in range(2))
        self.act = act

    def forward(self, hidden):
        score = self.act(self.wide(hidden))
        return score * self.other(hidden)


def _results(module, x, dy):
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def _hold(stock, by, seed=0):
    """The patched twin of a module: output and all gradients under the house rule."""
    torch.manual_seed(seed)
    dtype = next(stock.parameters()).dtype
    x, dy = torch.randn(2, 7, 16, dtype=dtype), torch.randn(2, 7, 16, dtype=dtype)
    patched = copy.deepcopy(stock)
    (entry,) = apply(patched).replaced
    assert entry.by.startswith(by)
    exact = _results(double(stock), x.double(), dy.double())
    assert_all_as_good(_results(patched, x, dy), _results(stock, x, dy), exact)


OPS = {"silu": "tigon.swiglu", "gelu_new": "tigon.geglu", "gelu": "tigon.geglu", "relu": "tigon.reglu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Gated, Packed, Alone])
@pytest.mark.parametrize("name", OPS)
def test_gated_mlps(name, kind, dtype):
    torch.manual_seed(1)
    _hold(kind(ACT2FN[name], dtype=dtype), OPS[name])


class Inline(Gated):
    """torch's gelu, its approximation in a configuration (litgpt)."""

    def forward(self, hidden):
        other = self.other(hidden)
        return self.back(F.gelu(self.wide(hidden), approximate=self.act.gelu_approximate) * other)


class Exact(Gated):
    def forward(self, hidden):
        return self.back(F.gelu(self.wide(hidden)) * self.other(hidden))


class Tanh(Gated):
    def forward(self, hidden):
        return self.back(F.gelu(self.wide(hidden), approximate="tanh") * self.other(hidden))


class Optional(Gated):
    """With one projection less it is not gated (torchtune)."""

    def forward(self, hidden):
        inner = self.act(self.wide(hidden))
        if self.other is not None:
            inner = inner * self.other(hidden)
        return self.back(inner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_mlps_as_other_libraries_write_them(dtype):
    torch.manual_seed(1)
    config = SimpleNamespace(gelu_approximate="tanh")
    for module in (Inline(config, dtype=dtype), Exact(None, dtype=dtype), Tanh(None, dtype=dtype)):
        _hold(module, "tigon.geglu")
    assert plan_mlp(Inline(config))[0].activation == plan_mlp(Tanh(None))[0].activation == "gelu_tanh"
    config.gelu_approximate = "none"
    assert plan_mlp(Inline(config))[0].activation == plan_mlp(Exact(None))[0].activation == "gelu"
    config.gelu_approximate = "other"
    assert "gelu" in plan_mlp(Inline(config))
    _hold(Optional(nn.SiLU(), dtype=dtype), "tigon.swiglu")
    one = Optional(nn.SiLU())
    one.other = None
    assert plan_mlp(one) is None


def test_packed_gradient_is_written_once():
    """One packed input: the graph has no concatenation or copy of halves."""
    module = Packed(ACT2FN["silu"])
    apply(module)
    y = module(torch.randn(3, 16))  # keeps the graph
    function = y.grad_fn
    names = []
    while function is not None and len(names) < 4:
        names.append(type(function).__name__)
        function = function.next_functions[0][0] if function.next_functions else None
    assert not {"SplitBackward0", "SliceBackward0", "CatBackward0"} & set(names), names


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_falcon_h1_multipliers(act, bias):
    torch.manual_seed(2)
    config = transformers.FalconH1Config(
        hidden_size=16, intermediate_size=24, mlp_bias=bias, hidden_act=act, mlp_multipliers=[0.6, 1.75]
    )
    _hold(FalconH1MLP(config), "tigon.swiglu" if act == "silu" else "tigon.geglu")


def test_multipliers_that_are_no_numbers_are_left():
    config = transformers.FalconH1Config(hidden_size=16, intermediate_size=24, mlp_multipliers=[0.6, 1.75])
    module = FalconH1MLP(config)
    module.gate_multiplier = torch.ones(())
    assert "not a number" in plan_mlp(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t5_gated_mlps(dtype):
    """The product takes the dtype of the last weight, which T5 keeps in fp32."""
    torch.manual_seed(2)
    config = transformers.T5Config(d_model=16, d_ff=24, feed_forward_proj="gated-gelu", dropout_rate=0.0)
    stock = T5DenseGatedActDense(config).to(dtype).train()
    _hold(stock, "tigon.geglu")
    stock.wo.float()
    patched = copy.deepcopy(stock)
    apply(patched)
    x = torch.randn(2, 3, 16, dtype=dtype)
    assert patched(x).dtype == stock(x).dtype == torch.float32
    torch.testing.assert_close(patched(x), stock(x), rtol=2e-2, atol=2e-2)


def test_moshi_mlps():
    """Gate and up are halves; with a layer's own weights stock runs."""
    torch.manual_seed(2)
    config = transformers.MoshiConfig(hidden_size=16, ffn_dim=48, num_codebooks=2)
    _hold(MoshiGatingMLP(config), "tigon.swiglu")
    flexible = MoshiGatingMLP(config, use_flexible_linear=True)
    for parameter in flexible.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 2, 16)
    wanted = flexible(x, torch.tensor([0, 1]))
    apply(flexible)
    assert torch.equal(flexible(x, torch.tensor([0, 1])), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", EXPERT_GATES, ids=lambda row: row.name)
def test_gates_of_experts(row, dtype):
    """Every form of the table, from its reference: recognised, as near as stock to fp64, gradient too."""
    torch.manual_seed(3)
    methods = {"_apply_gate": row.reference, "forward": lambda self, x: self._apply_gate(x)}
    model = nn.Sequential(type("Experts", (nn.Module,), methods)())
    experts = model[0]
    experts.has_gate, experts.config = True, SimpleNamespace(_experts_implementation="grouped_mm")
    experts.act, experts.limit, experts.alpha = ACT2FN["silu"], 1.5, 1.702
    x, dy = 2 * torch.randn(9, 48, dtype=dtype), torch.randn(9, 24, dtype=dtype)

    def run(x, dy):
        x = x.detach().requires_grad_()
        y = model(x)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    wanted = run(x, dy)
    with InDouble():
        exact = run(x.double(), dy.double())
    assert apply(model).count("experts") == 1
    assert_all_as_good(run(x, dy), wanted, exact)


class Unregistered(nn.Module):
    """Experts that call their gate without the registry (Step 3.7): no has_gate, no config."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.act, self.limit = nn.Parameter(torch.randn(2, 16, 48)), ACT2FN["silu"], 1.5

    def forward(self, x):
        y = 0
        for weight in self.gate_up_proj:
            y = y + self._apply_gate(x @ weight)
        return y

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        gate = self.act(gate).clamp(max=self.limit)
        return gate * up.clamp(min=-self.limit, max=self.limit)


def test_experts_outside_the_registry():
    torch.manual_seed(3)
    stock = nn.Sequential(Unregistered())
    patched, x = copy.deepcopy(stock), torch.randn(5, 16)
    assert apply(patched).count("experts") == 1
    close(patched(x), stock(x))
    got, wanted = (torch.autograd.grad(m(x).square().sum(), m[0].gate_up_proj)[0] for m in (patched, stock))
    close(got, wanted, ulps=256)


class Ungated(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(16, 24), nn.Linear(24, 16), act

    def forward(self, hidden):
        hidden = self.fc1(hidden)
        hidden = self.act(hidden)
        return self.fc2(hidden)


def test_ungated_mlps():
    """The square of ReLU is fused; others are one pass already; three modules in a row are no MLP."""
    _hold(Ungated(ACT2FN["relu2"]), "tigon.relu_squared")
    assert plan_mlp(Ungated(ACT2FN["gelu"])) is None
    assert plan_mlp(Ungated(nn.LayerNorm(24))) is None


class Dropped(nn.Module):
    """A projection that draws, as LoRA with dropout does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(torch.dropout(x, 0.5, train=True))


@pytest.mark.parametrize("kind", ["llama", "falcon_h1"])
def test_projections_are_called_in_stocks_order(kind):
    """One seed, the same masks: Llama calls gate first, Falcon-H1 up."""
    if kind == "llama":
        stock = make().model.layers[0].mlp
    else:
        config = transformers.FalconH1Config(hidden_size=32, intermediate_size=48, mlp_multipliers=[0.7, 1.3])
        stock = FalconH1MLP(config)
    for name in ("gate_proj", "up_proj"):
        setattr(stock, name, Dropped(getattr(stock, name)))
    x = torch.randn(3, 7, 32)
    torch.manual_seed(1)
    wanted = stock(x)
    assert apply(stock).count("mlp") == 1
    torch.manual_seed(1)
    close(stock(x), wanted)
