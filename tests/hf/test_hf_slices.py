"""Forwards that cut q, k and v out of one projection: by one split, to the same bits, and no other form."""

import copy
import functools
import pickle

import pytest
import torch
from tiny import batch, make, same_bits, step
from torch import nn
from transformers.utils.deprecation import deprecate_kwarg
from variants import variant

from tigon.integrations.transformers import apply, rewriting, undo
from tigon.integrations.transformers.qkv_split import plan_slices, rewrite

ONLY = dict.fromkeys(("norm", "mlp", "rope", "loss", "experts"), False)


def nodes(tensor):
    """Names of all nodes of a tensor's graph."""
    seen, open_nodes, names = set(), [tensor.grad_fn], []
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        open_nodes += [following for following, _ in node.next_functions]
    return names


def test_step_of_a_model_to_the_bit(device):
    stock = make("phi3", device=device)
    inputs = batch(device)
    wanted = step(stock, inputs)
    slices = nodes(stock(**inputs).loss).count("SliceBackward0")
    patched = copy.deepcopy(stock)
    report = apply(patched, **ONLY)
    assert report.count("qkv") == 2 and len(report.entries) == 2
    same_bits(step(patched, inputs), wanted)
    names = nodes(patched(**inputs).loss)
    assert names.count("SplitWithSizesBackward0") == 2
    assert names.count("SliceBackward0") == slices - 2 * 3
    for twin in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert nodes(twin(**inputs).loss).count("SplitWithSizesBackward0") == 2
    undo(patched)
    assert nodes(patched(**inputs).loss).count("SplitWithSizesBackward0") == 0


class Cut(nn.Module):
    """Base of modules that differ in their forward."""

    def __init__(self):
        super().__init__()
        self.both, self.width, self.heads = nn.Linear(6, 12), 4, 2


class Three(Cut):
    def forward(self, x, *, scale=1.0):
        x = x * scale
        packed = self.both(x)
        end = self.width
        q = packed[..., :end]
        k = packed[..., end : end + self.heads * 2]
        packed = packed[..., end + self.heads * 2 :]
        return q, k, packed


class Two(Cut):
    def forward(self, x):
        both = self.both(x)
        one = both[..., : self.width]
        other = both[..., self.width :]
        return one, other


@pytest.mark.parametrize("cls", [Three, Two, variant(Two)])
def test_forms_that_are_split(cls):
    module, x = cls(), torch.randn(3, 6)
    spec, by = plan_slices(module)
    assert by == "torch.split (parts of both)"
    options = {"scale": 2.0} if cls is Three else {}
    parts = spec.rewritten(module, x, **options)
    assert all(map(torch.equal, parts, module(x, **options)))
    assert all(part.grad_fn.name() == "SplitWithSizesBackward0" for part in parts)
    assert rewrite(cls.forward)[1].__code__.co_firstlineno == cls.forward.__code__.co_firstlineno


class Decorated(Cut):
    @functools.wraps(Two.forward)
    def forward(self, x):
        return Two.forward(self, x)


CHANGES = {
    "overlapping": [(": self.width]", ": self.width + 1]")],
    "unfinished": [("self.width :]", "self.width : self.width + 2]")],
    "from the end": [("self.width", "-self.width")],
    "another axis": [("..., ", "")],
    "no projection": [("        both = self.both(x)\n", ""), ("both[", "x[")],
    "overwritten": [("one", "both")],
    "called": [("self.width", "int(self.width)")],
    "inherited": [("class Two(Cut)", "class Two(Two)"), ("return one", "return super().forward(x), one")],
}
OTHERS = {name: variant(Two, *changes) for name, changes in CHANGES.items()} | {"decorated": Decorated}


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_stay(name):
    assert plan_slices(OTHERS[name]()) is None


def test_a_forward_of_its_own_instance_stays():
    module = Two()
    module.forward = lambda x: x
    assert plan_slices(module).startswith("its forward is bound to the instance")


class Adds(nn.Module):
    def forward(self, x):
        return x + 1


def counted(forward):
    """A wrapper as transformers puts one around layers that may be checkpointed."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, *args, **kwargs)

    return wrapper


def adds_two(forward):
    """A rewrite of `Adds.forward`."""

    def change(node):
        node.body = [rewriting.statement_at("return x + 2", node.body[-1])]
        return "a change"

    return rewriting.rewrite_innermost(forward, change)


def marked(forward):
    forward.mark = 7
    return forward


class Held:
    """A wrapper that is an object."""

    def __init__(self, forward):
        functools.update_wrapper(self, forward)

    def __get__(self, module, cls):
        return self if module is None else functools.partial(self.__wrapped__, module)


def held_by_default(forward):
    @functools.wraps(forward)
    def wrapper(self, x, forward=forward):
        return forward(self, x)

    return wrapper


def held_twice(forward):
    again = forward

    @functools.wraps(forward)
    def wrapper(self, x):
        return forward(self, x) if x > 5 else again(self, x)

    return wrapper


def unknown(forward):
    return lambda self, x: forward(self, x)


RENAMED = deprecate_kwarg("y", "99.0.0", new_name="x")
DECORATORS = {
    "renames a keyword": (RENAMED,),
    "counts": (counted,),
    "without gradients": (torch.no_grad(),),
    "not compiled": (torch.compiler.disable,),
    "the function itself": (marked,),
    "many": (RENAMED, counted, marked, torch.no_grad(), counted),
    "an object": (Held, None),
    "held by a default": (held_by_default, None),
    "held twice": (held_twice, None),
    "not a wrapper by name": (unknown, None),
}


@pytest.mark.parametrize("decorators", DECORATORS.values(), ids=DECORATORS)
def test_what_decorators_do_is_done(decorators):
    """A rewritten forward differs from stock's by what was rewritten, or stays as it is."""
    *decorators, last = decorators
    decorators += [last] if last else []

    class Decorated(nn.Module):
        def forward(self, x):
            return x + 1

    for decorator in reversed(decorators):
        Decorated.forward = decorator(Decorated.forward)
    found = adds_two(Decorated.forward)
    if last is None:
        assert found is None
        return
    one, two, x = Decorated(), Decorated(), torch.ones(3, requires_grad=True)
    wanted, got = one(x), found[1](two, x)
    assert torch.equal(got, wanted + 1) and got.requires_grad == wanted.requires_grad
    assert getattr(two, "calls", 0) == getattr(one, "calls", 0) == decorators.count(counted)
    function, other = found[1], Decorated.forward
    while other is not None:  # all the way in, every wrapper says of itself what it said
        inside, within = (getattr(f, "__wrapped__", None) for f in (function, other))
        assert function.__qualname__ == other.__qualname__
        assert vars(function) == {n: inside if v is within else v for n, v in vars(other).items()}
        function, other = inside, within
    if RENAMED in decorators:
        with pytest.warns(FutureWarning, match="`y` is deprecated"):
            assert torch.equal(found[1](two, y=x), wanted + 1)


def test_rewritten_forwards_follow_their_class():
    """FSDP2 gives a module a class of its own, around whose forward transformers' wrapper stands again."""
    module, spec = Adds(), rewriting.Rewritten(adds_two, Adds)
    assert rewriting.rewritten_forward(module, spec, 1) == 3
    module.__class__ = type("FSDPAdds", (Adds,), {"forward": counted(Adds.forward)})
    assert rewriting.rewritten_forward(module, spec, 1) == 3 and module.calls == 1
    again = pickle.loads(pickle.dumps(rewriting.Rewritten(adds_two, Adds)))
    assert again.rewritten(module, 1) == 3 and module.calls == 1
