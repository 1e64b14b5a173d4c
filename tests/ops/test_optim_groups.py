"""Options of groups: each is used or refused by name, by every way that a group comes, before anything is
modified."""

import contextlib
import copy
import inspect

import pytest
import torch
from checks import same_bits
from torch import nn

import tigon
from tigon.optim import AdamW, Muon, lora_plus_groups, muon_groups, step_in_backward

# Notes that programs and schedulers leave in groups.
NOTES = {"name": "head", "initial_lr": 0.1, "max_momentum": 0.95, "base_momentum": 0.8, "max_lr": 1.0}
NOTES |= {"min_lr": 0.0, "lr_scale": 0.5, "lr_mult": 2.0, "wd_mult": 0.0, "is_expert_parallel": False}
NOTES |= {"is_decoupled_lr": False, "layer": 3, "tag": None, "swa_lr": 0.1, 7: "a key that is no name"}


def matrix(rows=4, columns=6, device="cpu") -> nn.Parameter:
    return nn.Parameter(torch.ones(rows, columns, device=device))


def with_gradients(params):
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 0.5 + i)
    return params


def made(groups, cls):
    return cls(groups)


def added(groups, cls):
    """The last group comes later."""
    optimizer = cls(groups[:-1] or [matrix()])
    optimizer.add_param_group(groups[-1])
    return optimizer


def in_backward(groups, cls):
    optimizer = cls([matrix()])
    step_in_backward(optimizer)
    optimizer.add_param_group(groups[-1])
    return optimizer


def loaded(groups, cls):
    """The last group's options come with a saved state."""
    plain = [{"params": [matrix()], "use_muon": group.get("use_muon", True)} for group in groups]
    plain = plain if cls is Muon else [matrix()]
    optimizer, saved = cls(copy.copy(plain)), cls(copy.copy(plain)).state_dict()
    saved["param_groups"][-1].update({k: v for k, v in groups[-1].items() if k not in ("params", "use_muon")})
    optimizer.load_state_dict(saved)
    return optimizer


# How a group of AdamW comes, alone or as Muon's second one, and a group of Muon.
ADAMW_WAYS = [("adamw", way) for way in (made, added, in_backward, loaded)]
ADAMW_WAYS += [("muon's adamw", way) for way in (made, added, loaded)]
MUON_WAYS = [("muon", way) for way in (made, added, loaded)]


def optimizer_of(kind, way, extra):
    """An optimizer whose last group has these options and came this way."""
    group = {"params": [matrix()], **extra}
    if kind == "muon's adamw":
        return way([{"params": [matrix()]}, {"use_muon": False, **group}], Muon)
    return way([group], Muon if kind == "muon" else AdamW)


def ways(of):
    return pytest.mark.parametrize("kind, way", of, ids=[f"{kind}-{way.__name__}" for kind, way in of])


WHOLE = {"rounding": "split", "moment_dtype": torch.float32, "moment_rounding": "nearest"}
WHOLE |= {"max_grad_norm": 1.0, "seed": 3}


def arguments(cls) -> set[str]:
    return {*inspect.signature(cls).parameters} - {"params"}


def of_pytorch() -> set[str]:
    """The arguments of every optimizer of PyTorch."""
    classes = [
        c for c in vars(torch.optim).values() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    ]
    return set().union(*(arguments(c) for c in classes if c is not torch.optim.Optimizer))


def misspelled(name: str) -> set[str]:
    """One letter less, two that changed places, one twice, another last one."""
    cuts = range(1, len(name))
    return (
        {
            *(name[:i] + name[i + 1 :] for i in cuts if len(name) > 4),
            *(name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(1, len(name) - 1)),
            *(name[:i] + name[i - 1] + name[i:] for i in cuts if len(name) > 3),
            name[:-1] + "q",
        }
        if len(name) > 3
        else set()
    )


@ways(ADAMW_WAYS + MUON_WAYS)
def test_every_option_is_used_or_refused(kind, way):
    """Options of the optimizer as a whole, those of other optimizers, and misspelled ones are refused by
    name, by each way that a group comes; notes stay."""
    whole = WHOLE.keys() - ({"moment_dtype"} if kind == "adamw" else set())
    own = arguments(Muon if kind == "muon" else AdamW) - whole
    # A state that was saved before has Muon's options in all groups.
    taken = own | (arguments(Muon) if (kind, way) == ("muon's adamw", loaded) else set()) | {"use_muon"}
    for name in sorted(whole | (of_pytorch() | {"learning_rate", "wd"}) - taken):
        with pytest.raises(tigon.Error, match=rf"a group must not have '{name}'"):
            optimizer_of(kind, way, {name: WHOLE.get(name, 0.5)})
    others = {"momentum", "nesterov", "dampening"}  # that somebody took this optimizer to have
    for option in sorted(own | others):
        for name in sorted(misspelled(option) - taken):
            with pytest.raises(tigon.Error, match=rf"a group must not have '{name}'"):
                optimizer_of(kind, way, {name: 0.5})
    assert NOTES.items() <= optimizer_of(kind, way, NOTES).param_groups[-1].items()


def constructed(groups, cls):
    """The options are the optimizer's own."""
    (group,) = groups
    return cls(**group)


BAD_VALUES = [
    ({"lr": -1.0}, "lr must be >= 0"),
    ({"lr": 1j}, "lr must be a number"),
    ({"lr": float("nan")}, "lr must be a number, got NaN"),
    ({"lr": torch.ones(2)}, "lr must be a number or a tensor of one element"),
    ({"lr": torch.tensor(0.1, requires_grad=True)}, "lr must not require grad"),
    ({"eps": -1.0}, "eps must be"),
    ({"eps": "a"}, "eps must be a number"),
    ({"eps": None}, "eps must"),
    ({"eps": torch.tensor(0.1, requires_grad=True)}, "eps must not require grad"),
    ({"weight_decay": -0.1}, "weight_decay must be >= 0"),
    ({"weight_decay": None}, "weight_decay must"),
]
BAD_OF_ADAMW = [
    ({"betas": (1.0, 0.9)}, "betas must be in"),
    ({"betas": (0.9, 1.0)}, "betas must be in"),
    ({"betas": (0.9,)}, "betas must be two numbers"),
    ({"betas": (0.9, 1j)}, r"betas\[1\] must"),
    ({"amsgrad": 1}, "amsgrad must be True or False, got int"),
    ({"maximize": "no"}, "maximize must be True or False"),
    ({"capturable": 0}, "capturable must be True or False"),
    ({"decoupled_weight_decay": 1}, "decoupled_weight_decay must be True or False"),
    ({"fused": "yes"}, "fused must be True, False or None, got str"),
    ({"foreach": 0}, "foreach must be True, False or None"),
    ({"differentiable": True}, "differentiable must be False"),
]
BAD_MOMENTS = [
    *(
        ({"moment_dtype": value}, "moment_dtype must be float32, bfloat16, None, a pair")
        for value in ("int4", 8, torch.uint8, torch.float16, ("int8", None))
    ),
    ({"moment_dtype": "int8", "amsgrad": True}, "amsgrad must be False where moment_dtype is"),
]
BAD_OF_MUON = [
    ({"momentum": -0.1}, r"momentum must be in \[0, 1\), got -0.1"),
    ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
    ({"nesterov": "no"}, "nesterov must be True or False, got str"),
    ({"ns_steps": 0}, "ns_steps must be in"),
    ({"ns_steps": 100}, r"ns_steps must be in \[1, 100\)"),
    ({"ns_coefficients": (1, 2)}, "ns_coefficients must be three"),
    ({"adjust_lr_fn": "rms"}, "adjust_lr_fn must be"),
]
BAD_OF_THE_WHOLE = [
    ({"rounding": "up"}, "rounding must be one of"),
    ({"moment_rounding": "split"}, r"moment_rounding must be one of \['nearest', 'stochastic'\], got"),
    ({"max_grad_norm": 0.0}, "max_grad_norm must be"),
    ({"max_grad_norm": float("nan")}, "max_grad_norm must be a number"),
    ({"seed": -1}, "seed must be"),
    ({"seed": 1.0}, "seed must be an"),
]


@ways([("adamw", constructed), ("muon", constructed), *ADAMW_WAYS, *MUON_WAYS])
def test_values_that_are_refused(kind, way):
    """What the constructor refuses is refused in a group."""
    bad = BAD_VALUES + (BAD_OF_MUON if kind == "muon" else BAD_OF_ADAMW)
    if kind == "adamw":
        bad = bad + BAD_MOMENTS + BAD_OF_THE_WHOLE * (way is constructed)
    for options, words in bad:
        with pytest.raises(tigon.Error, match=words):
            optimizer_of(kind, way, options)


@pytest.mark.parametrize(
    "option, value",
    [
        ("lr", 0.1),
        ("betas", (0.5, 0.6)),
        ("eps", 0.1),
        ("weight_decay", 0.5),
        ("amsgrad", True),
        ("maximize", True),
        ("decoupled_weight_decay", False),
        ("capturable", True),
    ],
)
@ways(ADAMW_WAYS)
def test_used_options_change_the_step(kind, way, option, value):
    """A group's option does what the constructor's does, by every way."""
    plain = {"betas": (0.9, 0.5), "lr": 0.05, "weight_decay": 0.25}
    theirs = torch.optim.AdamW([matrix()], **plain)
    if option == "decoupled_weight_decay":
        wanted = torch.optim.Adam([matrix()], **plain)
    else:  # PyTorch takes capturable on a GPU
        wanted = torch.optim.AdamW([matrix()], **plain | ({} if option == "capturable" else {option: value}))
    optimizer = optimizer_of(kind, way, plain | {option: value})
    p, q, r = (o.param_groups[-1]["params"][0] for o in (optimizer, theirs, wanted))
    for i in range(3):
        for x in (p, q, r):
            g = torch.linspace(-1, 1, x.numel()).view(x.shape) * (0.5 if i else 2)
            if getattr(optimizer, "updates_in_backward", None) is not None and x is p:
                (x * g).sum().backward()
            else:
                x.grad = g
        optimizer.step(), theirs.step(), wanted.step()
    torch.testing.assert_close(p, r)
    assert option == "capturable" or not torch.allclose(p, q)


def test_options_of_muon_groups():
    """Are AdamW's groups', also where a model has no part of AdamW's."""
    both = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    hidden = nn.Linear(4, 4, bias=False)
    for model in (both, hidden):
        for name, value in (WHOLE | {"momentm": 3, "momentum": 0.9, "name": "x"}).items():
            with pytest.raises(tigon.Error, match=rf"\[muon_groups\] .*got '{name}'"):
                muon_groups(model, **{name: value})
    groups = muon_groups(both, lr=0.1, betas=(0.5, 0.5), weight_decay=0.0)
    optimizer = Muon(groups)
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.5)
    with pytest.raises(tigon.Error, match="must not have 'use_muon'"):
        AdamW(muon_groups(both))
    again = Muon(optimizer.param_groups)  # as programs do that wrap an optimizer
    assert again.param_groups[1].keys() == optimizer.param_groups[1].keys()


def test_a_group_that_is_refused_is_in_no_optimizer():
    """Nothing of it stays, and the optimizer goes on."""
    p, q = matrix(), matrix()
    for optimizer in (AdamW([p]), Muon([p]), Muon([{"params": [p], "use_muon": False}])):
        for bad in (
            {"rounding": "split"},
            {"use_muon": False, "momentum": 0.5},
            {"lr": -1.0},
            {"use_muon": False, "params": [nn.Parameter(torch.ones(3, dtype=torch.complex64))]},
            {"params": [nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))]},
        ):
            with pytest.raises(tigon.Error):
                optimizer.add_param_group({"params": [q], **bad})
        with pytest.raises(ValueError, match="more than one"):
            optimizer.add_param_group(
                {"params": [p], **({"use_muon": False} if type(optimizer) is Muon else {})}
            )
        assert [group["params"] for group in optimizer.param_groups] == [[p]]
        more = {"use_muon": False} if type(optimizer) is Muon else {}
        optimizer.add_param_group({"params": [q], **more})
        with_gradients([p, q])
        optimizer.step()


# --- nothing is modified where something is refused -----------------------------------------------


def resize(optimizer, p):
    p.grad = None
    p.data = torch.ones(2, 2)
    p.grad = torch.ones(2, 2)


def edit(**options):
    return lambda optimizer, p: optimizer.param_groups[-1].update(options)


BAD = {
    "momentum_buffer must have the sizes": lambda o, p: o.state[p].update(momentum_buffer=torch.zeros(2, 2)),
    "momentum_buffer was freed": lambda o, p: o.state[p]["momentum_buffer"].untyped_storage().resize_(0),
    "gradients was freed": lambda o, p: p.grad.untyped_storage().resize_(0),
    "must have the sizes": resize,
    r"momentum must be in \[0, 1\)": edit(momentum=1.5),
    "nesterov must be": edit(nesterov=None),
    "lr must be >= 0": edit(lr=-1.0),
    "ns_steps must be in": edit(ns_steps=0),
    "eps must be": edit(eps=None),
}


def of_muon(*sizes, last=True):
    """Muon of a matrix in each of its groups, and AdamW's group after or before them."""
    groups = [{"params": [matrix(n, n + 2)]} for n in sizes]
    groups.insert(len(groups) if last else 0, {"params": [matrix(3, 3)], "use_muon": False})
    return Muon(groups)


def of_adamw(*kinds):
    return AdamW([nn.Parameter(torch.ones(4, 6, **kind)) for kind in kinds])


OF_THE_LAST = {
    "Muon before AdamW": lambda: of_muon(4),
    "float64": lambda: of_adamw({}, {"dtype": torch.float64}),
    "after float64": lambda: of_adamw({"dtype": torch.float64}, {}),
}
OF_A_GPU = {
    "after cuda": lambda: of_adamw({"device": "cuda"}, {"device": "cpu"}),
    "cuda": lambda: of_adamw({"device": "cpu"}, {"device": "cuda"}),
}
UNFIT = [pytest.param(lambda: of_muon(4, 5, last=False), BAD[words], words, id=words) for words in BAD]
UNFIT += [
    pytest.param(
        make,
        lambda o, p: o.state[p].update(exp_avg=torch.zeros(2, dtype=p.dtype, device=p.device)),
        "exp_avg.* must have the sizes of its",
        id=name,
        marks=[pytest.mark.gpu] * (name in OF_A_GPU),
    )
    for name, make in (OF_THE_LAST | OF_A_GPU).items()
]


@pytest.mark.parametrize("make, spoil, words", UNFIT)
def test_refused_before_anything_is_modified(make, spoil, words):
    """A last parameter that became unfit: those before it, of other kinds and devices, stay as they are."""
    optimizer = make()
    *params, last = (p for group in optimizer.param_groups for p in group["params"])
    with_gradients([*params, last])
    optimizer.step()
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in params])
    spoil(optimizer, last)
    with pytest.raises(tigon.Error, match=words):
        optimizer.step()
    for p, (data, state) in zip(params, before, strict=True):
        assert same_bits(p.detach(), data)
        assert all(same_bits(optimizer.state[p][name], value) for name, value in state.items())


def test_a_bad_state_is_not_loaded():
    """Options that are none or wrong are refused before anything of a state dict is taken."""
    for make in (lambda: AdamW([matrix()]), lambda: Muon([matrix()])):
        optimizer, saved = make(), make().state_dict()
        saved["param_groups"][0] |= {"lr": 0.5, "weight_decay": -1}
        with pytest.raises(tigon.Error, match="weight_decay must be >= 0"):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 1e-3


# --- the step in the backward -----------------------------------------------------------------


def test_groups_added_later_step_in_the_backward(device):
    """As those that were there, with their options; after undo() in step()."""
    p, q, r = (matrix(device=device) for _ in range(3))
    optimizer, other = AdamW([p]), AdamW([r], lr=0.5)
    handle = step_in_backward(optimizer)
    optimizer.add_param_group({"params": [q], "lr": 0.5})
    for x in (q, r):
        (x * 3).sum().backward()
    other.step()
    assert q.grad is None and same_bits(q.detach(), r.detach())
    handle.undo()
    (q * 3).sum().backward()
    assert q.grad is not None
    optimizer.add_param_group({"params": [matrix(device=device)]})
    assert len(handle._handles) == 0


def test_accumulation_contexts(device):
    """One object again and again, inside itself, ended in any order, and as a decorator."""
    p = matrix(device=device)
    optimizer = AdamW([p])
    handle = step_in_backward(optimizer)
    context = handle.accumulate()

    def updates():
        p.grad = None
        (p * 2).sum().backward()
        return p.grad is None

    for _ in range(2):
        with context:
            assert not updates()
            with context, contextlib.suppress(KeyError), handle.accumulate():
                raise KeyError
            assert not updates()
        assert updates()
    a, b = handle.accumulate(), handle.accumulate()
    a.__enter__(), b.__enter__()
    a.__exit__(None, None, None)
    assert not updates()
    b.__exit__(None, None, None)
    assert updates()
    assert not handle.accumulate()(updates)() and updates()


# --- LoRA+ ------------------------------------------------------------------------------------


def test_lora_plus_groups_of_a_module():
    """lora_b of tigon.nn.LoRALinear, vectors and norms; what is refused."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.first = nn.LayerNorm(8), tigon.nn.LoRALinear(8, 6, 2)
            self.second, self.scale = tigon.nn.LoRALinear(6, 4, 2, bias=True), nn.Parameter(torch.ones(4))

    net = Net()
    names = {p: name for name, p in net.named_parameters()}
    groups = lora_plus_groups(net, lr=1e-3, ratio=16, weight_decay=0.1)
    found = [([names[p] for p in g["params"]], g["lr"], g["weight_decay"]) for g in groups]
    assert found == [
        (["first.lora_a", "second.lora_a"], 1e-3, 0.1),
        (["scale", "first.lora_b", "second.lora_b"], 16e-3, 0.1),
        (["norm.weight", "norm.bias"], 16e-3, 0.0),
    ]
    AdamW(groups), torch.optim.AdamW(lora_plus_groups(net, lr=1e-3, ratio=2))
    for options, words in (
        ({"ratio": 0}, "ratio must be > 0"),
        ({"lr": -1}, "lr must be >= 0"),
        ({"weight_decay": "a"}, "weight_decay must be a number"),
    ):
        with pytest.raises(tigon.Error, match=words):
            lora_plus_groups(net, **{"lr": 1e-3, "ratio": 4} | options)
    with pytest.raises(tigon.Error, match="model must have a lora_B that trains, got 2 parameters"):
        lora_plus_groups(nn.Linear(2, 2), lr=1e-3, ratio=4)
