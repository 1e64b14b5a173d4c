"""Routers of transformers on tigon.route: each form against its class in fp64, what is left, whole models."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from tiny import InDouble, assert_as_good, assert_step_as_good, batch, close, double, make
from tiny import step as model_step
from torch import nn
from variants import variant

import tigon
from tigon import apply, undo
from tigon.integrations.transformers.routers import plan_router

OLDER = Version(transformers.__version__) < Version("5.23")
T, H, E, K = 23, 32, 24, 3
CLASSES = {
    "mixtral": "MixtralTopKRouter",
    "minimax": "MiniMaxTopKRouter",
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "qwen3_next": "Qwen3NextTopKRouter",
    "qwen3_vl_moe": "Qwen3VLMoeTextTopKRouter",
    "olmoe": "OlmoeTopKRouter",
    "flex_olmo": "FlexOlmoTopKRouter",
    "jamba": "JambaTopKRouter",
    "gpt_oss": "GptOssTopKRouter",
    "granitemoe": "GraniteMoeTopKRouter",
    "aria": "AriaTextTopKRouter",
    "deepseek_v2": "DeepseekV2TopkRouter",
    "deepseek_v3": "DeepseekV3TopkRouter",
    "glm4_moe": "Glm4MoeTopkRouter",
    "nemotron_h": "NemotronHTopkRouter",
    "hy_v3": "HYV3TopKRouter",
    "minimax_m2": "MiniMaxM2TopKRouter",
    "minimax_m3_vl": "MiniMaxM3VLTopKRouter",
}
GIVEN = ("hy_v3", "minimax_m2")  # the correction bias is an argument
AWAY = ("aria", "deepseek_v3", "glm4_moe", "nemotron_h", *GIVEN, "minimax_m3_vl")  # stock under autocast


class Config:
    """What the classes read of a configuration, under all their names."""

    num_experts = num_local_experts = n_routed_experts = moe_num_experts = E
    num_experts_per_tok = moe_topk = top_k = K
    hidden_size = H
    norm_topk_prob, routed_scaling_factor, router_scaling_factor, scoring_func = True, 2.5, 1.5, "sigmoid"
    topk_method, n_group, topk_group = "group_limited_greedy", 4, 2

    def __init__(self, **changes):
        vars(self).update(changes)


def router_of(family, dtype=torch.float32, **changes):
    name = f"transformers.models.{family}.modeling_{family}"
    try:
        cls = getattr(importlib.import_module(name), CLASSES[family])
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {CLASSES[family]}")
    torch.manual_seed(3)
    router = cls(Config(**changes))
    if OLDER and plan_router(router) is None:
        pytest.skip(f"{CLASSES[family]} has another form in this transformers")
    for p in (*router.parameters(), *router.buffers()):
        nn.init.normal_(p, std=0.3)
    for p in router.parameters():
        p.data = p.data.to(dtype)
    return nn.Sequential(router)


def inputs_of(family, dtype):
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    given = 0.3 * torch.randn(E, generator=torch.Generator().manual_seed(2))
    return (x, given) if family in GIVEN else (x,)


def step(model, x, *given):
    """Outputs, and all gradients of a sum over logits and weights in which every entry counts."""
    x = x.detach().requires_grad_()
    logits, weights, ids = model[0](x, *given)
    draw = torch.Generator().manual_seed(4)
    order = ids.argsort(-1)  # whatever the order of a token's choice
    ids, ordered = ids.gather(-1, order), weights.gather(-1, order)
    slopes = [torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t) for t in (logits, ordered)]
    leaves = [x, *model.parameters()]
    total = sum((t * s).sum() for t, s in zip((logits, ordered), slopes, strict=True))
    gradients = torch.autograd.grad(total, leaves)
    return [logits.detach(), ordered.detach(), ids, *gradients]


def exact_step(model, x, *given):
    with InDouble():
        return step(copy.deepcopy(model).double(), x.double(), *(g.double() for g in given))


def check(stock, patched, inputs, dtype):
    names = ["logits", "weights", "ids", "x", *(name for name, _ in stock.named_parameters())]
    rows = zip(names, step(patched, *inputs), step(stock, *inputs), exact_step(stock, *inputs), strict=True)
    for name, got, wanted, exact in rows:
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
        if name == "ids":
            assert torch.equal(got, wanted)
        else:
            assert_as_good(got, wanted, exact, 2 * torch.finfo(got.dtype).eps, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", CLASSES)
def test_classes(family, dtype):
    stock = router_of(family, dtype)
    patched = copy.deepcopy(stock)
    report = apply(patched)
    (entry,) = report.replaced
    assert entry.slot == "router" and entry.by.startswith("tigon.route ("), str(report)
    inputs = inputs_of(family, dtype)
    if dtype == torch.bfloat16:  # tokens whose choice no tie decides, which stock decides either way
        logits = stock[0](*inputs)[0].float()
        inputs = (inputs[0][(logits.sort(-1).values.diff(dim=-1) > 0).all(-1)], *inputs[1:])
    check(stock, patched, inputs, dtype)
    undo(patched)
    assert torch.equal(patched[0](*inputs)[1], stock[0](*inputs)[1])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": None, "topk_group": None}),
    ],
)
def test_options(family, changes):
    stock = router_of(family, **changes)
    patched = copy.deepcopy(stock)
    assert apply(patched).count("router") == 1
    check(stock, patched, inputs_of(family, torch.float32), torch.float32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"topk_method": "noaux_tc"}, "an unknown way to choose: 'noaux_tc'"),
        ({"topk_group": 5}, "3 of 24 experts in 5 of 4 groups"),
        ({"num_experts_per_tok": 20}, "20 of 24 experts in 2 of 4 groups"),
        ({"n_group": 5}, "3 of 24 experts in 2 of 5 groups"),
    ],
)
def test_left(changes, reason):
    model = nn.Sequential(router_of("deepseek_v2", **changes), nn.Sequential(router_of("mixtral")[0]))
    assert [entry.reason for entry in apply(model).left] == [reason]


def test_of_another_form_is_not_reported():
    """Llama 4's returns a matrix of scores: no form of the table, and no reason to refuse a strict call."""
    from transformers.models.llama4.modeling_llama4 import Llama4Router

    model = nn.Sequential(router_of("mixtral")[0], Llama4Router(Config()))
    report = apply(model, strict=True)
    assert [entry.path for entry in report.entries] == ["0"]


def test_float64_stays_stock():
    """The class takes softmax in float32, whatever its logits are."""
    stock = router_of("mixtral").double()
    patched = copy.deepcopy(stock)
    apply(patched)
    x = inputs_of("mixtral", torch.float64)[0]
    assert all(map(torch.equal, patched[0](x), stock[0](x)))


@pytest.mark.parametrize("family", CLASSES)
def test_autocast(family):
    stock = router_of(family)
    patched = copy.deepcopy(stock)
    apply(patched)
    inputs = inputs_of(family, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = patched[0](*inputs), stock[0](*inputs)
    assert [t.dtype for t in got] == [t.dtype for t in wanted]
    assert torch.equal(got[0], wanted[0])
    if family in AWAY:
        assert all(map(torch.equal, got, wanted))
    else:
        ties = got[2] != wanted[2]
        torch.testing.assert_close(got[1][~ties], wanted[1][~ties], rtol=2**-7, atol=2**-7)


def test_whole_model():
    """A model with router logits and their auxiliary loss: loss, gradients, logits; undone bit for bit."""
    stock = make("mixtral", router_aux_loss_coef=0.1)
    patched = copy.deepcopy(stock)
    inputs = batch()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    report = apply(patched, norm=False, mlp=False, rope=False, loss=False)
    assert [entry.kind for entry in report.replaced].count("MixtralTopKRouter") == 2, str(report)
    got, wanted = patched(**inputs), stock(**inputs)
    close(got.aux_loss, wanted.aux_loss)
    close(got.router_logits, wanted.router_logits)
    found, wanted, exact = (model_step(m, inputs) for m in (patched, stock, double(stock)))
    assert_step_as_good(found, wanted, exact, 8)
    assert report.count("router") == report.count("experts") == 2
    undo(patched)
    assert torch.equal(model_step(patched, inputs)[0], wanted[0])


def test_switched_off():
    model = make("mixtral")
    assert apply(model, router=False).count("router") == 0
    assert not any("forward" in vars(m) for n, m in model.named_modules() if n.endswith("gate"))


def test_op_has_the_weights_of_the_class():
    """The options in the docstring of tigon.route are those of the models named there."""
    router = router_of("deepseek_v3")
    logits, weights, ids = router(*inputs_of("deepseek_v3", torch.float32))
    options = {"score": "sigmoid", "correction_bias": router[0].e_score_correction_bias, "num_groups": 4}
    options |= {"top_groups": 2, "group_score": "sum_of_two", "scale": 2.5}
    found, chosen = tigon.route(logits, K, **options)
    order, wanted = chosen.argsort(-1), ids.argsort(-1)
    assert torch.equal(chosen.gather(-1, order), ids.gather(-1, wanted))
    close(found.gather(-1, order), weights.gather(-1, wanted))


class Router(nn.Module):
    """The parts of a router; forms below differ from the table's in one place."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(E, H)), nn.Buffer(torch.randn(E))
        self.hidden, self.k, self.groups, self.best, self.experts = H, K, 4, 2, E


class Plain(Router):
    def forward(self, x):
        x = x.reshape(-1, self.hidden)
        logits = F.linear(x, self.weight)
        weights, ids = torch.topk(F.softmax(logits.float(), dim=-1), self.k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        return logits, weights, ids


class BiasedWeights(Router):
    def forward(self, x):
        x = x.reshape(-1, self.hidden)
        logits = F.linear(x.to(self.weight.dtype), self.weight)
        scores = torch.sigmoid(logits.float()) + self.bias
        ids = torch.topk(scores, self.k, dim=-1)[1]
        weights = scores.gather(1, ids)
        weights /= weights.sum(dim=-1, keepdim=True)
        return logits, weights, ids


class WorstGroups(Router):
    def forward(self, x):
        x = x.view(-1, self.hidden)
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid()
        biased = scores + self.bias
        group_scores = (
            biased.view(-1, self.groups, self.experts // self.groups).topk(2, dim=-1)[0].sum(dim=-1)
        )
        best = torch.topk(group_scores, self.best, dim=-1)[1]
        mask = torch.zeros_like(group_scores)
        mask.scatter_(1, best, 1)
        mask = mask.unsqueeze(-1).expand(-1, self.groups, self.experts // self.groups)
        mask = mask.reshape(-1, self.experts).bool()
        ids = torch.topk(biased.masked_fill(mask, float("-inf")), self.k, dim=-1)[1]
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights, ids


class SameForm(Router):
    def forward(self, hidden):
        hidden = hidden.reshape(-1, self.hidden)
        scores = F.linear(hidden, self.weight)
        best = scores.float().softmax(-1).topk(self.k, -1)
        return scores, best.values / best.values.sum(-1, True), best.indices


SUM = "weights.sum(dim=-1, keepdim=True)"
OTHERS = {
    "another epsilon": variant(Plain, (f"weights /= {SUM}", f"weights = weights / ({SUM} + 0.1)")),
    "smallest": variant(Plain, ("self.k, dim=-1)", "self.k, dim=-1, largest=False)")),
    "over tokens": variant(Plain, ("dim=-1), self.k", "dim=0), self.k")),
    "biased weights": BiasedWeights,
    "worst groups": WorstGroups,
}


@pytest.mark.parametrize("name", OTHERS)
def test_forms_that_differ(name):
    model = nn.Sequential(OTHERS[name](), SameForm(), variant(Plain)())
    report = apply(model)
    assert [entry.path for entry in report.entries] == ["1", "2"], str(report)


def test_other_words():
    model = nn.Sequential(SameForm())
    x, before = torch.randn(T, H), copy.deepcopy(model)
    apply(model)
    close(model(x), before(x))
