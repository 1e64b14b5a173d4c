"""The router of a mixture of experts: refused calls, the routers and losses of transformers, ties, dtypes."""

import pytest
import torch
from checks import refusals, refused, same_bits

import tigon
from tigon.ops.route import reference

X = torch.randn(5, 12)
BIAS = torch.randn(12)

CALLS = """
route(x[0, 0], 2) -> logits must have at least one dimension, got 0
route(x.new_zeros(2, 1025), 2) -> logits must have 1 to 1024 columns, got 1025
route(x[:, :0], 1) -> logits must have 1 to 1024 columns, got 0
route(x, 13) -> top_k must be in [1, 12] (1 groups of 12 experts), got 13
route(x, 2, num_groups=5) -> num_groups must divide 12, got 5
route(x, 2, num_groups=3, top_groups=4) -> top_groups must be in [1, 3], got 4
route(x, 5, num_groups=3, top_groups=1) -> top_k must be in [1, 4] (1 groups of 4 experts), got 5
route(x, 2, num_groups=12, top_groups=3, group_score='sum_of_two')
    -> group_score must be 'max' for groups of one expert, got 'sum_of_two'
route(x, 2, dtype=torch.int64) -> dtype must be None, torch.float32 or
route(x, 2, ids_dtype=torch.int16) -> ids_dtype must be torch.int64 or torch.int32, got torch.int16
route(x, 2, token_weights=torch.ones(5)) -> token_weights must be None without losses
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call, message", refusals(CALLS))
def test_refused(call, message, dtype):
    refused(call, "[route] " + message, x=X.to(dtype), BIAS=BIAS)


@pytest.mark.parametrize("mask", [False, True])
def test_losses_of_transformers(mask, device):
    """The auxiliary loss is that of transformers for one layer; z is ST-MoE's."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(2 * 30, 16, device=device).requires_grad_()
    attention = (torch.rand(2, 30, device=device) > 0.3) if mask else None
    rows = None if attention is None else attention.flatten()
    *_, aux, z = tigon.route(logits, 4, losses=True, token_weights=rows)
    want = load_balancing_loss_func((logits,), 16, 4, attention)
    torch.testing.assert_close(aux, want)
    lse = torch.logsumexp(logits, -1)
    want_z = (lse if rows is None else lse[rows]).square().mean()
    torch.testing.assert_close(z, want_z)
    for got, wanted in ((aux, want), (z, want_z)):
        torch.testing.assert_close(
            *(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (got, wanted))
        )


def test_equal_experts_come_by_id(device):
    logits = torch.zeros(3, 100, device=device)
    logits[1, 50:] = 1.0
    logits[2, ::2] = -0.0
    _, ids = tigon.route(logits, 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [50, 51, 52, 53, 54], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results(dtype, device):
    """Dtypes, ids that differ, weights that sum to the scale."""
    logits = torch.randn(3, 7, 40, device=device, dtype=dtype)
    weights, ids = tigon.route(logits, 6, scale=2.0)
    assert (weights.dtype, ids.dtype, weights.shape, ids.shape) == (
        torch.float32,
        torch.int64,
        (3, 7, 6),
        (3, 7, 6),
    )
    torch.testing.assert_close(weights.sum(-1), torch.full((3, 7), 2.0, device=device))
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    rounded, small = tigon.route(logits, 6, scale=2.0, dtype=None, ids_dtype=torch.int32)
    assert same_bits(rounded, weights.to(dtype)) and same_bits(small, ids.int())
    with torch.no_grad():
        assert all(map(same_bits, tigon.route(logits, 6, scale=2.0), (weights, ids)))


def test_sigmoids_next_to_nothing(device):
    """Sums of them are as small as what keeps the division from 0."""
    logits = torch.tensor([[-46.0, -46.5, -200.0], [-30.0, -44.0, -90.0]], device=device).requires_grad_()
    double = logits.detach().double().requires_grad_()
    scale = torch.tensor([1.0, -2.0], device=device)
    grads = []
    for x, run in ((logits, tigon.route), (double, reference)):
        weights, ids = run(x, 2, score="sigmoid")[:2]
        assert (ids[0] == torch.tensor([0, 1], device=device)).all()
        grads.append(torch.autograd.grad((weights * scale).sum(), x)[0])
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-4, atol=1e-6)


def test_correction_bias_gets_no_gradient(device):
    logits = torch.randn(9, 24, device=device).requires_grad_()
    bias = torch.randn(24, device=device).requires_grad_()
    weights, _ = tigon.route(logits, 3, score="sigmoid", correction_bias=bias)
    weights.square().sum().backward()
    assert bias.grad is None and logits.grad is not None


def test_masked_tokens_do_not_touch_losses(device):
    """What a token of weight 0 holds changes no bit of the losses and of other tokens' gradients."""
    logits = torch.randn(40, 16, device=device)
    mask = torch.rand(40, device=device) > 0.4
    results = []
    for other in (0.0, float("nan"), float("inf")):
        x = torch.where(mask[:, None], logits, other).requires_grad_()
        *_, aux, z = tigon.route(x, 4, losses=True, token_weights=mask)
        results.append((aux, z, *torch.autograd.grad(aux + z, x)))
        assert (results[-1][2][~mask] == 0).all()
    for got in results[1:]:
        assert all(map(same_bits, got, results[0]))


@pytest.mark.parametrize("lead", [(7,), (2, 3)])
def test_module(lead, device):
    """A projection and the op; a model of it and of experts trains."""
    options = {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}
    router = tigon.nn.Router(16, 12, 3, bias=True, correction=True, wide=True, **options).to(device)
    assert set(router.state_dict()) == {"weight", "bias", "e_score_correction_bias"}
    x = torch.randn(*lead, 16, device=device, dtype=torch.bfloat16)
    weights, ids, aux, _ = router(x, losses=True, token_weights=torch.ones(lead, device=device))
    logits = torch.nn.functional.linear(x.float(), router.weight, router.bias)
    wanted = tigon.route(logits, 3, correction_bias=router.e_score_correction_bias, **options)
    assert all(map(same_bits, (weights, ids), wanted))
    experts = tigon.nn.Experts(12, 16, 8, device=device)
    (experts(x.float(), ids, weights).square().mean() + aux).backward()
    assert router.weight.grad.abs().sum() > 0 and router.bias.grad is not None
    assert repr(router).startswith("Router(16, 12, 3, score='sigmoid'")
    with pytest.raises(tigon.Error, match="num_groups must divide 12, got 5"):
        tigon.nn.Router(16, 12, 3, num_groups=5)


FORCED_CALLS = """
route(x, 2, ids=ids + 11) -> ids must be in [0, 12), or begin with a negative one, got
route(x, 2, ids=torch.stack([ids[:, 0], -ids[:, 1]], 1)) -> ids must be in [0, 12)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call, message", refusals(FORCED_CALLS))
def test_forced_refused(call, message, dtype):
    ids = torch.tensor([[0, 1]] * 5)
    refused(call, "[route] " + message, x=X.to(dtype), ids=ids)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_own_choice_replayed(score, device):
    """The bits of weights, ids and gradients of the choice that was replayed, in any integer dtype."""
    options = {"score": score, "num_groups": 4, "top_groups": 2, "losses": True}
    logits = torch.randn(300, 64, device=device).requires_grad_()
    want = tigon.route(logits, 6, **options)
    upstream = torch.randn_like(want[0])
    (grad,) = torch.autograd.grad((want[0] * upstream).sum() + want[2] + want[3], logits)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16):
        got = tigon.route(logits, 6, ids=want[1].to(dtype), **options)
        (again,) = torch.autograd.grad((got[0] * upstream).sum() + got[2] + got[3], logits)
        assert all(map(same_bits, (*want, grad), (*got, again)))


def test_forced_rows_that_choose(device):
    """-1 first, an expert twice, rows of zeros: the choice of a call without ids."""
    logits = torch.randn(4, 12, device=device)
    ids = torch.tensor([[-1, 5, 7], [3, 4, 3], [0, 0, 0], [11, 0, 4]], device=device)
    weights, chosen = tigon.route(logits, 3, ids=ids)
    own = tigon.route(logits, 3)
    assert same_bits(weights[:3], own[0][:3]) and torch.equal(chosen[:3], own[1][:3])
    assert chosen[3].tolist() == [11, 0, 4]
    torch.testing.assert_close(weights[3], logits[3, ids[3]].softmax(0))


@pytest.mark.gpu
def test_forced_ids_that_are_no_experts_gpu():
    """Their tokens' weights are NaN, the ids are those of the own choice, and no other token changes."""
    logits = torch.randn(40, 12, device="cuda")
    ids = torch.randn(40, 12, device="cuda").argsort(1)[:, :3]
    bad = ids.clone()
    bad[5, 1], bad[6, 2], bad[7, 0], bad[8, 1] = 12, -1, 2**33 + 1, 2**31 - 1
    weights, chosen = tigon.route(logits, 3, ids=bad)
    want, own = tigon.route(logits, 3, ids=ids), tigon.route(logits, 3)[1]
    assert weights[5:9].isnan().all() and torch.equal(chosen[5:9], own[5:9])
    keep = [i for i in range(40) if not 5 <= i < 9]
    assert same_bits(weights[keep], want[0][keep]) and torch.equal(chosen[keep], want[1][keep])


def test_far_and_wild_logits_of_forced_rows():
    """Forced experts far below the best logit have the softmax of their own logits; NaN stays in its row."""
    z = torch.tensor([[1e30, -torch.inf, 0.0, 5.0], [torch.nan, 1.0, 2.0, 3.0], [1e-40, 1e-40, 1e-40, 0.0]])
    for dtype in (torch.float32, torch.bfloat16):
        ids = torch.tensor([[2, 3], [1, 2], [1, 0]])
        weights, chosen = tigon.route(z.to(dtype), 2, ids=ids)
        assert torch.equal(chosen, ids) and weights[1].isnan().all()
        want = torch.stack([torch.tensor([0.0, 5.0]).softmax(0), torch.full((2,), 0.5)])
        torch.testing.assert_close(weights[[0, 2]], want)
