"""What all functions on a linear head share: labels, main_grad, results."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from checks import same_bits
from heads import head_inputs, run

import tigon

FUNCTIONS = {
    "linear_cross_entropy": tigon.linear_cross_entropy,
    "kept": lambda h, w, y, **o: tigon.linear_cross_entropy(h, w, y, reduction="none", keep_mb=1.0, **o),
    "linear_log_prob": tigon.linear_log_prob,
    "linear_loss": lambda h, w, y, **o: tigon.linear_loss(h, w, y, torch.neg, reduction="none", **o),
    "several": lambda h, w, y, **o: tigon.linear_log_prob(h, w, torch.stack((y, y), -1), **o).sum(-1),
    "reduced": lambda h, w, y, **o: tigon.linear_loss(h, w, y, torch.neg, reduction="sum", **o),
    "linear_kl_div": lambda h, w, y, **o: tigon.linear_kl_div(
        h, w, (h @ w.to(h.dtype).T).detach() + 1, y, hard=0.5, **o
    ),
    "multi_token": lambda h, w, y, **o: tigon.multi_token_loss(h, [w, w], y, **o).loss,
    "linear_policy": lambda h, w, y, **o: tigon.linear_policy(h, w, y, h[..., 0], **o).loss,
    "linear_preference": lambda h, w, y, **o: tigon.linear_preference(
        h, w, y, nll=1.0, nll_target=y[:1], **o
    )[0],
    "linear_kto": lambda h, w, y, **o: tigon.linear_kto(h, w, y, y[:, 0] >= 0, **o)[0],
}


@pytest.mark.parametrize("ignored", [-100, 255, 2**32 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_labels_of_other_integers(name, dtype, ignored, device):
    """As int64, also where ignore_index does not fit: 156 is -100 in 8 bits, 3 is 2^32 + 3 in 32."""
    hidden, weight = torch.randn(2, 6, 8, device=device), torch.randn(256, 8, device=device)
    target = torch.tensor([[156, 255, 3, 255, 0, 8], [7, 156, 1, 255, 255, 99]], device=device)
    options = {"ignore_index": ignored} | ({} if name in ("several", "multi_token") else {"shift": True})
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    results = [
        run(FUNCTIONS[name], (*leaves, y), options) for y in (target, target.to(torch.uint8), target.int())
    ]
    for a, b, c in zip(*results, strict=True):
        assert same_bits(a, b) and same_bits(a, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_wider_parameters(name, dtype, device):
    """A weight and a bias in float64 beside narrower hidden states: the gradients of float32, in float64."""
    hidden, weight, target = head_inputs((2, 6), 8, 16, dtype=dtype, device=device)
    takes_bias = name != "multi_token"
    found = []
    for wide in (torch.float32, torch.float64):
        leaves = [x.detach().to(of).requires_grad_() for x, of in ((hidden, dtype), (weight, wide))]
        bias = torch.linspace(-1, 1, 16, device=device, dtype=wide).requires_grad_()
        FUNCTIONS[name](*leaves, target, **({"bias": bias} if takes_bias else {})).sum().backward()
        found.append([x.grad for x in (*leaves, bias)[: 2 + takes_bias]])
        assert [x.dtype for x in found[-1]] == [dtype, wide, wide][: 2 + takes_bias]
    for narrow, wide in zip(*found, strict=True):
        torch.testing.assert_close(narrow, wide.to(narrow.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "several"])
def test_main_grad_of_every_function(name, dtype, device):
    """weight's gradient is added there and nowhere else."""
    hidden, weight, target = head_inputs((2, 6), 8, 16, dtype=dtype, device=device)
    call = FUNCTIONS[name]
    call(hidden, weight, target).sum().backward()
    owned = weight.detach().clone().requires_grad_()
    owned.tigon_main_grad, owned.main_grad = True, torch.zeros(16, 8, device=device)
    for _ in range(2):
        call(hidden, owned, target).sum().backward()
    assert owned.grad is None
    torch.testing.assert_close(owned.main_grad, 2 * weight.grad.float(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_copies_of_results(copier):
    hidden, weight, target = (t.detach() for t in head_inputs())
    teacher = torch.zeros(12, 40)
    for result in (
        tigon.linear_cross_entropy(hidden, weight, target, outputs=("loss", "entropy")),
        tigon.linear_kl_div(hidden, weight, teacher, target, hard=0.5, outputs=("loss", "soft")),
    ):
        other = copier(result)
        assert type(other) is type(result) and other._fields == result._fields
        assert all(same_bits(a, b) for a, b in zip(other, result, strict=True))
