"""What the head takes, MLPs give back: products that are not kept, and the very same gradients."""

import copy
import pickle

import pytest
import torch
from tiny import adapted, batch, close, make, same_bits, step
from torch.multiprocessing.reductions import StorageWeakRef

import tigon
from tigon.integrations.transformers import recompute as ledgers
from tigon.integrations.transformers.forward import bound
from tigon.ops import glu
from tigon.ops.again import Again, again
from tigon.ops.loss_head.plan import linear_cross_entropy_memory

LAYERS = 3


def ledger_of(model):
    return model._tigon_state.ledger


@pytest.fixture
def watch(monkeypatch):
    """Every gated product of a forward pass, and how many were formed again."""
    seen = {"products": [], "again": 0}
    make_product, form = glu._op, Again.__call__

    class Watched:
        def __call__(self, *args):
            result = make_product(*args)
            seen["products"].append(StorageWeakRef(result.untyped_storage()))
            return result

        quick = __call__

    def counted(known, node):
        seen["again"] += 1
        return form(known, node)

    monkeypatch.setattr(glu, "_op", Watched())
    monkeypatch.setattr(Again, "__call__", counted)
    return seen


def patched(family="llama", **changes):
    model = make(family, num_hidden_layers=LAYERS, **changes)
    tigon.apply(model)
    return model


def train(model, inputs, watch):
    """Loss, gradients, how many products were not kept, how many were formed again."""
    watch["products"].clear()
    watch["again"] = 0
    model.zero_grad()
    loss = model(**inputs).loss
    gone = sum(product.expired() for product in watch["products"])
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, gone, watch["again"]


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_and_less_memory(family, dtype, watch):
    model, inputs = patched(family, dtype=dtype), batch()
    *first, gone, again = train(model, inputs, watch)
    assert (gone, again) == (0, 0), "nothing is owed before the head has worked"
    assert ledger_of(model).taken > 0
    *later, gone, again = train(model, inputs, watch)
    assert (gone, again) == (LAYERS, LAYERS)
    same_bits(later, first)


def test_as_many_as_are_owed(watch):
    model, inputs = patched(), batch()
    train(model, inputs, watch)
    ledger = ledger_of(model)
    layer_bytes = inputs["input_ids"].numel() * model.config.intermediate_size * 4
    for taken, paid in ((0, 0), (1, 1), (layer_bytes, 1), (layer_bytes + 1, 2), (9 * layer_bytes, LAYERS)):
        ledger.taken = taken
        assert train(model, inputs, watch)[2:] == (paid, paid), taken


def test_what_is_owed(watch):
    model, inputs = patched(), batch()
    train(model, inputs, watch)
    rows, (vocab, size) = inputs["input_ids"].numel(), model.lm_head.weight.shape
    needs = linear_cross_entropy_memory(rows, size, vocab, torch.float32, device="cpu")
    assert ledger_of(model).taken == needs.peak - needs.results > 0
    model.lm_head.weight.requires_grad_(False)
    train(model, inputs, watch)
    frozen = linear_cross_entropy_memory(rows, size, vocab, torch.float32, device="cpu", train_weight=False)
    assert ledger_of(model).taken == frozen.peak - frozen.results


def test_others_see_to_what_is_kept(watch):
    """Checkpointing of both kinds and offloading hooks, evaluation, a loss that is not the head's."""
    model, inputs = patched(), batch()
    expected = train(model, inputs, watch)[1]
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        _, gradients, _, again = train(model, inputs, watch)
        assert again == 0
        close(gradients, expected, ulps=0)
    model.gradient_checkpointing_disable()
    with torch.autograd.graph.save_on_cpu():
        assert train(model, inputs, watch)[3] == 0
    with torch.no_grad():
        model(**inputs)
    other = make(num_hidden_layers=LAYERS)
    tigon.apply(other, loss=False)
    train(other, inputs, watch)
    assert train(other, inputs, watch)[2:] == (0, 0)


def test_second_derivatives(watch):
    """With create_graph the product that is formed again has its graph."""
    torch.manual_seed(0)
    gate, up = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    down = torch.nn.Linear(8, 3, bias=False)
    found = []
    for owed in (0, 1 << 30):
        ledger = ledgers.Ledger()
        ledger.owed = owed
        y = ledger.project(down, tigon.swiglu(gate, up))
        (dw,) = torch.autograd.grad(y.square().sum(), down.weight, create_graph=True)
        found.append(torch.autograd.grad(dw.sum(), (gate, up)))
    assert watch["again"] >= 1
    assert all(torch.equal(one, two) and one.abs().sum() > 0 for one, two in zip(*found, strict=True))


def test_a_weight_changed_in_between_is_an_error():
    down = torch.nn.Linear(8, 3, bias=False)
    ledger = ledgers.Ledger()
    ledger.owed = 1
    y = ledger.project(down, tigon.swiglu(torch.randn(5, 8, requires_grad=True), torch.randn(5, 8)))
    with torch.no_grad():
        down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_only_plain_projections():
    inner = tigon.swiglu(torch.randn(5, 8, requires_grad=True), torch.randn(5, 8))
    down = torch.nn.Linear(8, 3)

    def spared(module, x):
        ledger = ledgers.Ledger()
        ledger.owed = 1
        ledger.project(module, x)
        return ledger.owed < 1

    assert spared(down, inner)
    assert not spared(torch.nn.Sequential(down), inner)
    assert not spared(down, inner.clone()), "not straight from the op"
    assert not spared(down, inner.detach())
    down.weight.ds_id = 1
    assert not spared(down, inner), "ZeRO-3"


def test_lora(watch):
    model = adapted(make(num_hidden_layers=LAYERS), target_modules=["down_proj"])
    tigon.apply(model)
    _, expected, _, _ = train(model, batch(), watch)
    _, gradients, gone, _ = train(model, batch(), watch)
    assert len(expected) == 2 * LAYERS
    close(gradients, expected, ulps=0)
    assert gone == LAYERS - 1, "below the first adapter nothing is differentiated"


def test_copies_and_pickles_go_on(watch):
    model, inputs = patched(), batch()
    expected = step(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        train(other, inputs, watch)
        assert train(other, inputs, watch)[2] == LAYERS
        assert ledger_of(other) is bound(other.model.layers[0].mlp).spec.ledger
    assert expected[0] == step(model, inputs)[0]


def test_products_that_were_changed_are_kept():
    """Changed where autograd does not look: formed again they would be others."""
    gate, up = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8)
    x, down = torch.randn(5, 8, requires_grad=True), torch.nn.Linear(8, 3, bias=False)
    inner, normed = tigon.swiglu(gate, up), tigon.rms_norm(x)
    assert again(inner) is not None and again(normed) is not None
    with torch.no_grad():
        inner.mul_(2)
        normed.mul_(2)
    assert again(inner) is None and again(normed) is None
    ledger = ledgers.Ledger()
    ledger.owed = 1
    ledger.project(down, inner).sum().backward()
    expected = torch.ones(3, 5) @ inner.detach()
    assert torch.equal(down.weight.grad, expected)
