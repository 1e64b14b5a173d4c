"""Embedding beyond the cases: refusals, ids outside the table, long runs of one id, the module, bits."""

import pytest
import torch
from checks import same_bits

import tigon
from tigon.ops import arguments, embedding

TABLE = torch.randn(9, 16)
IDS = torch.tensor([1, 4, 8])
BAD = {
    "padding": (
        lambda: tigon.embedding(IDS, TABLE, padding_idx=9),
        r"padding_idx must be in \[-9, 9\), got 9",
    ),
    "above": (lambda: tigon.embedding(IDS + 1, TABLE), r"\[embedding\] ids must be in \[0, 9\), got 9"),
    "below": (lambda: tigon.embedding(-IDS.int(), TABLE), r"ids must be in \[0, 9\), got -1"),
    "above in float64": (lambda: tigon.embedding(IDS + 1, TABLE.double()), r"ids must be in \[0, 9\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name):
    call, message = BAD[name]
    with pytest.raises(tigon.Error, match=message):
        call()


@pytest.mark.gpu
def test_an_id_outside_the_table_is_a_nan_row_on_cuda():
    weight = TABLE.cuda().requires_grad_()
    ids = torch.tensor([2, 9, -1, 2], device="cuda")
    y = tigon.embedding(ids, weight)
    assert torch.isnan(y).all(-1).tolist() == [False, True, True, False]
    (grad,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    want = torch.zeros_like(grad)
    want[2] = 2.0
    assert torch.equal(grad, want)


@pytest.mark.parametrize("tokens", [31, 64, 1000, 70001])
def test_sums_of_a_frequent_id_are_exact(tokens, device):
    """Whole numbers: every part of every run is there once."""
    ids = torch.arange(tokens, device=device) % 3 % 2 * 5
    dy = torch.randint(-8, 9, (tokens, 24), device=device)
    weight = torch.zeros(7, 24, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(tigon.embedding(ids, weight), weight, dy.float())
    want = torch.zeros(7, 24, device=device, dtype=torch.int64).index_add_(0, ids, dy)
    assert torch.equal(grad, want.float())


def test_module_is_torchs(device):
    torch.manual_seed(0)
    ours = tigon.nn.Embedding(11, 8, padding_idx=2, device=device)
    assert not ours.weight[2].any() and ours.weight[3].any()
    theirs = torch.nn.Embedding(11, 8, padding_idx=2, device=device)
    theirs.load_state_dict(ours.state_dict())
    ids = torch.tensor([[2, 3, 3], [0, 2, 10]], device=device)
    grads = []
    for module in (ours, theirs):
        module(ids).square().sum().backward()
        grads.append(module.weight.grad)
    assert same_bits(ours(ids), theirs(ids)) and same_bits(*grads)
    assert str(ours) == "Embedding(11, 8, padding_idx=2)"


def test_only_ids_are_kept(device):
    weight = torch.randn(5, 8, device=device, requires_grad=True)
    y = tigon.embedding(torch.tensor([1, 3], device=device), weight)
    with torch.no_grad():
        weight.zero_()  # nobody saved it
    y.sum().backward()
    assert weight.grad.sum() == 16


def test_plain_formula_of_ids_of_no_row(monkeypatch):
    """On a GPU, where nothing refuses them: NaN, and no gradient."""
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(arguments, "refuses_labels", lambda _: False)
    y = embedding.reference(torch.tensor([4, 5, 0, -1]), weight)
    assert torch.equal(y.isnan().all(-1), torch.tensor([False, True, False, True]))
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    assert torch.equal(gradient[:, 0], torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64))
