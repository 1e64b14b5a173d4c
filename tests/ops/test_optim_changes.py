"""tigon.optim.AdamW whose tensors change between steps: each time the bits of an optimizer made anew."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from checks import same_bits
from test_optim import draw_gradients
from torch import nn

import tigon
from cases.adamw import LISTS, Parameters
from tigon.optim import AdamW

OPTIONS = [
    {},
    {"rounding": "stochastic", "seed": 7},
    {"rounding": "split", "moment_dtype": torch.float32},
    {"rounding": "master", "amsgrad": True},
    {"max_grad_norm": 0.5, "moment_rounding": "nearest"},
]
CODES = {"moment_dtype": "int8"}


def cloned(params) -> list[nn.Parameter]:
    """The same parameters and gradients elsewhere."""
    others = [nn.Parameter(torch.empty_like(p).copy_(p.detach())) for p in params]
    for p, q in zip(params, others, strict=True):
        if hasattr(p, "grad_dtype"):
            p.grad_dtype = q.grad_dtype = None
        if p.grad is not None:
            q.grad = torch.empty_strided(p.grad.shape, p.grad.stride(), dtype=p.grad.dtype, device=p.device)
            q.grad.copy_(p.grad)
    return others


def everything(optimizer) -> list[torch.Tensor]:
    """Parameters, and state by name."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [
        optimizer.state[p][name]
        for p in params
        if p in optimizer.state
        for name in sorted(optimizer.state[p])
    ]
    return [p.detach() for p in params] + states


def made_anew(optimizer, options) -> AdamW:
    """Another optimizer of clones with the same state and groups."""
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        | {"params": cloned(group["params"])}
        for group in optimizer.param_groups
    ]
    other = AdamW(groups, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


def step_like_a_new_one(optimizer, options) -> None:
    """One step, held to that of an optimizer made anew; steps are counted where they were."""
    other = made_anew(optimizer, options)
    optimizer.step(), other.step()
    mine, others = everything(optimizer), everything(other)
    assert len(mine) == len(others)
    assert all(same_bits(a.cpu(), b.cpu()) for a, b in zip(mine, others, strict=True))


def started(options, device, params=None, skipped=()):
    """Parameters of an optimizer that has stepped twice; some had no gradient the first time."""
    if params is None:
        params = [*LISTS[0].make(torch.bfloat16, device), *LISTS[1].make(torch.bfloat16, device, seed=1)]
    optimizer = AdamW(params, **options)
    for i in range(2):
        draw_gradients((params,), i)
        for k in skipped if i == 0 else ():
            params[k].grad = None
        optimizer.step()
    assert optimizer._alike
    return params, optimizer


def swap_data(params, optimizer):
    params[1].data = params[1].data.clone()
    params[6].data = params[6].data * 2


def skip_some(params, optimizer):
    params[0].grad = params[5].grad = None


def transpose_gradient(params, optimizer):
    params[3].grad = params[3].grad.t().contiguous().t()


def widen_gradient(params, optimizer):
    if not hasattr(params[3], "grad_dtype"):
        pytest.skip("this PyTorch ties the gradient's dtype to the parameter's")
    params[3].grad_dtype = None
    params[3].grad = params[3].grad.float()


def replace_state(params, optimizer):
    for name in ("exp_avg", "exp_avg_sq", "step"):
        optimizer.state[params[2]][name] = optimizer.state[params[2]][name] * 3


def write_steps(params, optimizer):
    optimizer.state[params[2]]["step"].fill_(7)
    optimizer.state[params[3]]["step"].data = torch.tensor(9.0)


def swap_states(params, optimizer):
    state = optimizer.state
    state[params[0]], state[params[1]] = state.pop(params[1]), state.pop(params[0])
    data = params[0].data, params[1].data
    for p, other in zip(params, reversed(data), strict=False):
        p.grad = None
        p.data = other
        p.grad = torch.ones_like(p)


def forget_state(params, optimizer):
    del optimizer.state[params[1]]


def load_state(params, optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"].mul_(0.5)
        state["step"] += 4
    optimizer.load_state_dict(saved)


def add_group(params, optimizer):
    more = LISTS[1].make(params[0].dtype, params[0].device, seed=5)
    draw_gradients((more,), 9)
    optimizer.add_param_group({"params": more, "lr": 0.5, "weight_decay": 0.0})


def tensor_lr(params, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125, device=params[0].device)


def reorder_parameters(params, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def remove_parameter(params, optimizer):
    del optimizer.state[optimizer.param_groups[0]["params"].pop(4)]


def widen_parameter(params, optimizer):
    p = params[1]
    p.grad = None
    p.data = p.data.double()
    p.grad = torch.ones_like(p)
    optimizer.state[p] = {name: t if name == "step" else t.double() for name, t in optimizer.state[p].items()}


def restride_parameter(params, optimizer):
    p = params[3]
    p.grad = None
    p.data = p.data.t().contiguous().t()
    p.grad = torch.ones_like(p)
    optimizer.state[p] = {
        name: t if name == "step" else torch.empty_like(p, dtype=t.dtype, requires_grad=False).copy_(t)
        for name, t in optimizer.state[p].items()
    }


CHANGES = [
    swap_data,
    skip_some,
    transpose_gradient,
    widen_gradient,
    replace_state,
    write_steps,
    forget_state,
    load_state,
    add_group,
    tensor_lr,
    remove_parameter,
    restride_parameter,
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changes_between_steps(change, options, device):
    """After a change, with new gradients after it, and once more: what a new optimizer does."""
    params, optimizer = started(options, device)
    draw_gradients((params,), 2)
    change(params, optimizer)
    step_like_a_new_one(optimizer, options)
    for i in (3, 4):
        draw_gradients(([p for group in optimizer.param_groups for p in group["params"]],), i)
        step_like_a_new_one(optimizer, options)
    assert optimizer._alike


@pytest.mark.parametrize(
    "change", [reorder_parameters, widen_parameter, swap_states], ids=lambda f: f.__name__
)
def test_other_changes(change, device):
    """Another order, a parameter without a kernel, states that changed places."""
    # Parameters that change places change their sizes, and where the streams of random bits begin.
    options = {"moment_rounding": "nearest"} if change is swap_states else {}
    params, optimizer = started(options, device)
    draw_gradients((params,), 2)
    change(params, optimizer)
    for i in (3, 4):
        step_like_a_new_one(optimizer, options)
        draw_gradients((params,), i)
    step_like_a_new_one(optimizer, options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_states_in_another_order(options, device):
    """States are in the order of first gradients, not of parameters, all of one size; two groups."""
    params = Parameters("one_size", ((5, 8),) * 6).make(torch.bfloat16, device)
    params, optimizer = started(options, device, params, skipped=(0, 3))
    assert [id(p) for p in optimizer.state][:2] != [id(p) for p in params][:2]
    for i in (2, 3):
        draw_gradients((params,), i)
        step_like_a_new_one(optimizer, options)
    optimizer.add_param_group({"params": LISTS[1].make(torch.bfloat16, device, seed=3)})
    for i in (4, 5):
        draw_gradients(([p for group in optimizer.param_groups for p in group["params"]],), i)
        step_like_a_new_one(optimizer, options)
    assert optimizer._alike


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("options", [*OPTIONS, CODES], ids=str)
def test_copies_are_apart(copier, options, device):
    """A copy goes on as the original, neither touches the other, and several optimizers take turns."""
    params, optimizer = started(options, device)
    copied = copier(optimizer)
    others = copied.param_groups[0]["params"]
    for i in (2, 3):
        draw_gradients((params, others), i)
        before = [t.clone() for t in everything(copied)]
        optimizer.step()
        assert all(same_bits(a, b) for a, b in zip(before, everything(copied), strict=True))
        copied.step()
        assert all(same_bits(a, b) for a, b in zip(everything(optimizer), everything(copied), strict=True))


def gapped(p):
    return torch.zeros(p.shape[0], 2 * p.shape[1], dtype=p.dtype, device=p.device)[:, ::2]


def resize_parameter(p, state):
    p.grad = None
    p.data = p.data[:2].clone()
    p.grad = torch.ones_like(p)


UNFIT = {
    "exp_avg 3 must have the sizes of its param": lambda p, state: state.update(
        exp_avg=p.data.view(-1)[:4].clone()
    ),
    "exp_avg_sq was freed": lambda p, state: state["exp_avg_sq"].untyped_storage().resize_(0),
    "param was freed": lambda p, state: p.untyped_storage().resize_(0),
    "grad was freed": lambda p, state: p.grad.untyped_storage().resize_(0),
    "exp_avg 3 must have the strides": lambda p, state: state.update(exp_avg=gapped(p)),
    "gradients must be dense": lambda p, state: setattr(p, "grad", p.grad.to_sparse()),
    "exp_avg must be float32, bfloat16 or": lambda p, state: state.update(exp_avg=state["exp_avg"].double()),
    "3 must have the sizes of its param": resize_parameter,
}


@pytest.mark.parametrize("words", UNFIT)
def test_refused_in_mid_run(words, device):
    """What became unfit after steps that fitted is refused, nothing is modified, and mended it goes on."""
    params, optimizer = started({}, device)
    draw_gradients((params,), 2)
    kept = {name: t.clone() for name, t in optimizer.state[params[3]].items()}
    data = params[3].detach().clone()
    UNFIT[words](params[3], optimizer.state[params[3]])
    rest = [
        (t, t.clone())
        for p in params
        if p is not params[3]
        for t in (p.detach(), *optimizer.state[p].values())
    ]
    with pytest.raises(tigon.Error, match=words):
        optimizer.step()
    assert all(same_bits(t, before) for t, before in rest)
    params[3].grad = None
    params[3].data = data
    optimizer.state[params[3]] = kept
    draw_gradients((params,), 3)
    step_like_a_new_one(optimizer, {})


@pytest.mark.parametrize("options", [{}, CODES], ids=str)
def test_a_scaler_comes_and_goes(options, device):
    """found_inf and grad_scale set for some steps, as GradScaler does."""
    params, optimizer = started(options, device)
    for i, inf in enumerate((0.0, 1.0, 0.0)):
        draw_gradients((params,), 2 + i)
        before = [t.clone() for t in everything(optimizer)]
        other = made_anew(optimizer, options)
        for o in (optimizer, other):
            o.grad_scale = torch.tensor(4.0, device=device)
            o.found_inf = torch.tensor(inf, device=device)
            o.step()
            del o.grad_scale, o.found_inf
        after = everything(optimizer)
        assert all(same_bits(a.cpu(), b.cpu()) for a, b in zip(after, everything(other), strict=True))
        assert inf == 0.0 or all(same_bits(a.cpu(), b.cpu()) for a, b in zip(before, after, strict=True))
    step_like_a_new_one(optimizer, options)


@pytest.mark.gpu
def test_counted_on_the_device_once_capturable():
    """Steps that the host counted move to the device as soon as the group is capturable."""
    params, optimizer = started({}, "cuda")
    assert all(not optimizer.state[p]["step"].is_cuda for p in params)
    optimizer.param_groups[0]["capturable"] = True
    draw_gradients((params,), 2)
    optimizer.step()
    assert all(optimizer.state[p]["step"].is_cuda for p in params)
    assert optimizer.state[params[0]]["step"].item() == 3


def test_nothing_is_kept_alive(device):
    """State that is replaced between steps, as when it is moved away, is freed at once; gradients too."""
    params, optimizer = started({}, device)
    watched = [weakref.ref(optimizer.state[p][name]) for p in params for name in ("exp_avg", "exp_avg_sq")]
    watched += [weakref.ref(p.grad) for p in params]
    for p in params:
        p.grad = None
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][name] = optimizer.state[p][name].clone()
    assert all(ref() is None for ref in watched)


# --- clipping in the next step --------------------------------------------------------------


def clipped(plan, ours, dtype, device):
    """Parameters after a plan of clippings, steps and new gradients, by Tigon or PyTorch."""
    p = [nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in (3, 5)]
    limit = plan[0] if isinstance(plan[0], float) and plan[0] < 0 else None
    optimizer = AdamW(p, eps=10.0, max_grad_norm=limit and -limit) if ours else torch.optim.AdamW(p, eps=10.0)
    norms = []
    for i, what in enumerate(plan):
        if what == "step":
            if limit and not ours:
                nn.utils.clip_grad_norm_(p, -limit)
            optimizer.step()
        elif what == "new":
            for q in p:
                q.grad = torch.full_like(q, 3.0 + i)
        elif what == "zero":
            optimizer.zero_grad(set_to_none=False)
            for q in p:
                q.grad += 2.0
        elif what == "none":
            nn.Module.zero_grad(nn.ParameterList(p))
        elif what > 0:
            norms.append(optimizer.clip_grad_norm_(what) if ours else nn.utils.clip_grad_norm_(p, what))
    return [*norms, *p]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "plan",
    [
        ("new", 0.5, "step"),
        ("new", 0.5, "new", "step"),
        ("new", 0.5, "none", "new", "step"),
        ("new", 0.5, "zero", "step"),
        ("new", 0.5, "zero", 1.0, "step"),
        ("new", 0.5, 100.0, "step"),
        ("new", 100.0, 0.5, 0.25, "step"),
        ("new", 0.5, "new", 100.0, "step"),
        ("new", 0.5, "step", "zero", 0.7, "step"),
        (-100.0, "new", 0.5, "step"),
        (-0.2, "new", 0.5, "step"),
        ("new", 0.5, "none", "step", "new", "step"),
    ],
    ids=str,
)
def test_clipping_is_of_the_gradients_that_were_there(plan, dtype, device):
    """A skipped step, new gradients, a second clipping: as where PyTorch scales gradients at once."""
    for a, b in zip(clipped(plan, True, dtype, device), clipped(plan, False, dtype, device), strict=True):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=1e-5, atol=1e-9)


def test_a_copy_has_no_hooks():
    """And takes its own."""
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    tigon.optim.step_in_backward(optimizer)
    tigon.optim.step_in_backward(copy.deepcopy(optimizer))


def test_gradients_change_between_clipping_and_step(device):
    """What would be scaled is then not what was clipped."""
    p = [nn.Parameter(torch.ones(n, device=device)) for n in (3, 5)]
    optimizer = AdamW(p)
    for change in (lambda: p[0].grad.add_(1.0), lambda: setattr(p[0], "grad", torch.ones_like(p[0]))):
        for q in p:
            q.grad = torch.full_like(q, 9.0)
        optimizer.clip_grad_norm_(0.5)
        change()
        before = [q.clone() for q in p]
        with pytest.raises(
            tigon.Error, match="gradients must stay as they are .*: 1 of 2 were modified or are new"
        ):
            optimizer.step()
        assert all(same_bits(a, b) for a, b in zip(before, p, strict=True))
        optimizer.zero_grad()
        optimizer.step()


# --- the norm ---------------------------------------------------------------------------------


def test_norm_of_changing_gradients(device):
    """Plain gradients, then one of float64, one of another layout, and plain ones again."""
    params = LISTS[0].make(torch.float32, device)
    for change in (None, "double", "transposed", None):
        draw_gradients((params,), 3)
        if change == "double":
            params[1].data, params[1].grad = params[1].data.double(), None
            params[1].grad = torch.ones_like(params[1])
        if change == "transposed":
            params[3].grad = params[3].grad.t().contiguous().t()
        exact = torch.cat([p.grad.double().reshape(-1) for p in params]).norm()
        before = [p.grad.double().clone() for p in params]
        norm = tigon.clip_grad_norm_(params, 0.5)
        assert abs(norm.double() - exact) <= 1e-6 * exact
        for p, g in zip(params, before, strict=True):
            torch.testing.assert_close(p.grad.double(), g * (0.5 / (exact + 1e-6)), rtol=1e-6, atol=1e-9)
        if change == "double":
            params[1].data, params[1].grad = params[1].data.float(), None


@pytest.mark.gpu
def test_norm_over_devices():
    """Gradients on the CPU and a GPU."""
    params = [*LISTS[1].make(torch.float32), *LISTS[0].make(torch.float32, "cuda")]
    draw_gradients((params,), 1)
    exact = torch.cat([p.grad.double().cpu().reshape(-1) for p in params]).norm()
    norm = tigon.clip_grad_norm_(params, 0.5)
    assert norm.device.type == "cpu"
    assert abs(norm.double() - exact) <= 1e-6 * exact
    total = torch.cat([p.grad.double().cpu().reshape(-1) for p in params]).norm()
    assert abs(total - 0.5) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_learning_rate_of_one_element(dtype, device):
    """A tensor lr may have a dimension, with parameters of any shape and dtype."""
    results = []
    for lr in (torch.tensor([0.1]), 0.1):
        params = [torch.nn.Parameter(torch.ones(s, dtype=dtype, device=device)) for s in ((), (3, 5))]
        optimizer = AdamW(params, lr=lr)
        for scale in (1.0, -0.3):
            for p in params:
                p.grad = torch.full_like(p, scale)
            optimizer.step()
        results.append([p.detach() for p in params])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_grad_scaler(clip, fused, device):
    """Steps with infinite gradients are skipped, others are those on unscaled ones; no step waits.

    With fused=False it is the scaler that unscales, and skips, as Lightning's clipping needs it.
    """
    ours, theirs = (LISTS[0].make(torch.float32, device) for _ in range(2))
    a, b = copy.deepcopy(AdamW(ours, max_grad_norm=clip, fused=fused)), torch.optim.AdamW(theirs)
    ours = a.param_groups[0]["params"]
    assert a._step_supports_amp_scaling is (fused is None)
    scalers = [torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2) for _ in range(2)]
    for i in range(6):
        draw_gradients((ours, theirs), i)
        for params, optimizer, scaler in zip((ours, theirs), (a, b), scalers, strict=True):
            scaler.scale(torch.ones((), device=device))
            for p in params:
                p.grad.mul_(scaler.get_scale())
            if i in (2, 4):
                params[1].grad[3] = math.inf if i == 2 else math.nan
            if optimizer is b and clip:
                scaler.unscale_(b)
                torch.nn.utils.clip_grad_norm_(theirs, clip)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)
        assert a.state[p]["step"].item() == 4


def test_a_model_that_steps_in_the_backward_is_freed(device):
    """With its optimizer, which nobody else need hold; a pickled model leaves the optimizer behind."""
    linear = nn.Linear(8, 8, device=device)
    tigon.optim.step_in_backward(AdamW(linear.parameters(), lr=1e-2))
    before = linear.weight.detach().clone()
    linear(torch.randn(2, 8, device=device)).sum().backward()
    assert linear.weight.grad is None and not torch.equal(linear.weight, before)
    assert b"AdamW" not in pickle.dumps(linear.weight.__reduce_ex__(2)[1:])
    alive = weakref.ref(linear.weight)
    del linear
    gc.collect()
    assert alive() is None


def test_undone_steps_leave_nothing(device):
    p = nn.Parameter(torch.ones(4, device=device))
    tigon.optim.step_in_backward(AdamW([p])).undo()
    assert not vars(p)
