"""Cases of two processes: FSDP2 gathers the bytes of weights in float8; results are those of weights."""

import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist
from fp8_cases import LR, STEPS, of_any_size
from tiny import make, step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_forward_pre_hook
from two_processes import case, data, full, mesh, shard

from tigon.integrations.transformers import fp8_gather, undo

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BYTES = torch.float8_e4m3fn
LINEARS = 14


@contextlib.contextmanager
def gathers():
    """The dtypes of what is gathered of each parameter, in all all-gathers inside, and their bytes."""
    seen, original = [], _fsdp_param_group.foreach_all_gather

    def spy(*args):
        result = original(*args)
        dtypes = [dtype for dtypes in result.param_all_gather_input_dtypes for dtype in dtypes]
        seen.append((dtypes.count(BYTES), result.all_gather_output.nbytes))
        return result

    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", spy):
        yield seen


def of_bytes(seen) -> int:
    """Weights that were gathered as bytes."""
    return sum(count for count, _ in seen)


def of_weights():
    """Weights are gathered as they are."""
    return mock.patch.object(fp8_gather, "_find", lambda *_: None)


def train(model, run=step, steps=STEPS) -> list[dict]:
    """Losses and gradients of a few steps of SGD."""
    ours = torch.optim.SGD(model.parameters(), lr=LR)
    found = []
    for _ in range(steps):
        loss, _ = run(model, data())
        grads = {n: full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": full(loss), **grads})
        ours.step()
    return found


def equal(some: list[dict], others: list[dict]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys(), one.keys() ^ other.keys()
        differ = [name for name in one if not torch.equal(one[name], other[name])]
        assert not differ, differ


def as_of_weights(build, run=step):
    """Losses and gradients are bitwise those of gathered weights; what was gathered, there and here."""
    with of_weights(), gathers() as whole:
        want = train(build(), run)
    with gathers() as seen:
        equal(train(build(), run), want)
    return whole, seen


def accumulate(model, inputs):
    """Three microbatches, reduced after the last."""
    model.zero_grad(set_to_none=True)
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        loss = model(**inputs).loss
        loss.backward()
    return loss.detach(), None


def forwards_first(model, inputs):
    """Two forwards, then their backwards: those of the second one's graph are first."""
    model.zero_grad(set_to_none=True)
    losses = [model(**inputs).loss for _ in range(2)]
    sum(losses).backward()
    return losses[0].detach(), None


def looking(model, inputs):
    """An evaluation between the forward and the backward, whose gathers are of weights."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    model.eval()
    with torch.no_grad():
        model(**inputs)
    loss.backward()
    model.train()
    return loss.detach(), None


def then_evaluated(model, inputs):
    step(model, inputs)
    model.eval()
    with torch.no_grad():
        loss = model(**inputs).loss
    model.train()
    return loss, None


def checkpointed(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def frozen(model):
    for path in ("self_attn.q_proj", "mlp.down_proj"):
        model.model.layers[1].get_submodule(path).weight.requires_grad_(False)
    return model


def plain(model):
    return model


HEAD = functools.partial(shard, head="root")


def prefetched(model):
    first, second = HEAD(model).model.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    return model


def given_up(model):
    """The first layer's backward gathers the second one's weights, which nobody waits for."""
    first, second = HEAD(model).model.layers
    first.set_modules_to_backward_prefetch([second])
    return model


VARIANTS = {  # what is done before apply, the sharding, a step, options of apply
    "reshard": (plain, HEAD, step, {}),
    "kept": (plain, functools.partial(HEAD, layers=False), step, {}),
    "one group": (plain, lambda model: fully_shard(model, mesh=mesh()), step, {}),
    "tail": (plain, functools.partial(shard, head="tail"), step, {}),
    "mixed": (plain, functools.partial(HEAD, mp_policy=HALF), step, {}),
    "mixed dw": (plain, functools.partial(HEAD, mp_policy=HALF), step, {"recipe": "rowwise_dw_bf16"}),
    "accumulated": (plain, HEAD, accumulate, {}),
    "accumulated kept": (plain, functools.partial(HEAD, layers=False), accumulate, {}),
    "forwards first": (plain, HEAD, forwards_first, {}),
    "evaluation between": (plain, HEAD, looking, {}),
    "evaluation between kept": (plain, functools.partial(HEAD, layers=False), looking, {}),
    "reentrant": (functools.partial(checkpointed, reentrant=True), HEAD, step, {}),
    "checkpointed": (functools.partial(checkpointed, reentrant=False), HEAD, step, {}),
    "prefetched": (plain, prefetched, step, {}),
    "given up": (plain, given_up, then_evaluated, {}),
    "frozen": (frozen, HEAD, step, {}),
    "biased": (plain, HEAD, step, {}),
}


@case(**{f"{name}, {when}": (name, when) for name in VARIANTS for when in ("before", "after")})
def fp8_gather_steps(name, when):
    """A step gathers about half as much as of weights."""
    prepare, shards, run, options = VARIANTS[name]
    family = "llama_bias_tied" if name == "biased" else "llama"

    def build():
        model = prepare(make(family))
        if when == "before":
            return shards(of_any_size(model, **options))
        return of_any_size(shards(model), **options)

    whole, seen = as_of_weights(build, run)
    assert not of_bytes(whole) and of_bytes(seen) >= LINEARS * (STEPS - 1), seen
    if not name.startswith("evaluation"):  # which gathers once more where the bytes were kept
        assert len(seen) == len(whole)
        later = slice(len(seen) // STEPS, None)
        assert sum(size for _, size in seen[later]) < sum(size for _, size in whole[later])


@case
def fp8_gather_rows():
    """Weights whose rows the processes cannot share evenly are gathered as they are."""
    _, seen = as_of_weights(lambda: of_any_size(HEAD(make())))
    rows = [len(p) for layer in make().model.layers for p in layer.parameters() if p.ndim == 2]
    shared = sum(count % dist.get_world_size() == 0 for count in rows)
    assert of_bytes(seen) == shared * (2 * STEPS - 1) > 0, (of_bytes(seen), shared)


@case(eager=(False,), mixed=(True,))
def fp8_gather_sizes(mixed):
    """What a layer gathers: a byte an element, four a row, and its norms."""
    model = of_any_size(HEAD(make(), **({"mp_policy": HALF} if mixed else {})))
    layer = model.model.layers[0]
    weights = [full(p) for name, p in layer.named_parameters() if p.ndim == 2]
    norms = sum(full(p).numel() for name, p in layer.named_parameters() if p.ndim == 1)
    want = sum(w.numel() + 4 * len(w) for w in weights) + norms * (2 if mixed else 4)
    step(model, data())
    with gathers() as seen:
        step(model, data())
    assert [size for count, size in seen if count] == [want] * 4, (seen, want)


@case(reshard=(True,), kept=(False,))
def fp8_gather_evaluation(layers):
    """It computes with the weights themselves, whenever it comes, and training goes on after it."""
    stock = make().eval()
    model = of_any_size(shard(make(), "root", layers=layers))

    def evaluates():
        model.eval()
        with torch.no_grad():
            got = model(**data()).logits
            torch.testing.assert_close(got, stock(**data()).logits, rtol=1e-5, atol=1e-5)
        model.train()

    evaluates()
    want, _ = step(model, data())
    evaluates()
    for _ in range(2):
        assert torch.equal(step(model, data())[0], want)
    with torch.no_grad(), gathers() as seen:
        model(**data())
    assert of_bytes(seen) == LINEARS  # which stay there in layers that are not resharded
    with gathers() as seen:
        evaluates()
    assert seen and not of_bytes(seen)
    assert torch.equal(step(model, data())[0], want)  # of weights that are there
    with gathers() as seen:
        assert torch.equal(step(model, data())[0], want)
    assert of_bytes(seen) == LINEARS * (1 + layers)
    model.eval()
    with torch.inference_mode():
        torch.testing.assert_close(model(**data()).logits, stock(**data()).logits, rtol=1e-5, atol=1e-5)
    model.train()
    assert torch.equal(step(model, data())[0], want)


@case
def fp8_gather_states():
    """State dicts hold plain DTensors; what is loaded, assigned or written to `.data` is seen at once."""
    model = of_any_size(HEAD(make()))
    twin = of_any_size(HEAD(make(seed=3)))
    want = train(model, steps=2)
    for load in (
        lambda state: model.load_state_dict(state),
        lambda state: model.load_state_dict(state, assign=True),
        lambda state: set_model_state_dict(model, state),
        lambda state: [p.data.copy_(state[name]) for name, p in model.named_parameters()],
    ):
        step(twin, data())
        state = {name: t.clone() for name, t in twin.state_dict().items()}
        assert all(type(t) is DTensor and type(t.to_local()) is torch.Tensor for t in state.values())
        assert not any(hasattr(t._local_tensor, "fsdp_pre_all_gather") for t in twin.state_dict().values())
        load(state)
        expected = train(twin, steps=2)
        with gathers() as seen:
            got = train(model, steps=2)
        equal(got, expected)
        assert of_bytes(seen), load
    assert get_model_state_dict(model).keys() == state.keys()
    assert not torch.equal(want[0]["loss"], expected[0]["loss"])


@case
def fp8_gather_undo():
    """The model is stock's again, also where its weights are there as bytes."""
    model = of_any_size(shard(make(), "root", layers=False))
    step(model, data())
    model.zero_grad()
    with torch.no_grad(), gathers() as seen:
        model(**data())
    assert of_bytes(seen) == LINEARS
    undo(model)
    model.reshard()  # of the root, whose own parameters are then those of the optimizer
    with gathers() as seen:
        got = train(model)
    equal(got, train(shard(make(), "root", layers=False)))
    assert not of_bytes(seen)
    names = [name for p in model.parameters() for name in vars(p._local_tensor)]
    assert not names and not any("tigon" in name for m in model.modules() for name in vars(m)), names


def of_columns(model):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    return fully_shard(model, mesh=mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1))


def tied(model):
    """The second layer has the first one's weights."""
    first, second = (dict(layer.named_modules()) for layer in model.model.layers)
    for path, module in second.items():
        if isinstance(module, nn.Linear):
            module.weight = first[path].weight
    return fully_shard(model, mesh=mesh())


LEFT = {
    "columns": of_columns,
    "offloaded": functools.partial(HEAD, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "one process": lambda model: fully_shard(model, mesh=mesh(2, 1, mesh_dim_names=("replicas", "shards"))),
    "tied": tied,
}


@case(**{name: (name,) for name in LEFT})
def fp8_gather_left(name):
    """What cannot be gathered as bytes is gathered as it is."""
    _, seen = as_of_weights(lambda: of_any_size(LEFT[name](make())))
    assert not of_bytes(seen)


@case(half=(torch.float16, {"mp_policy": HALF}, False), wide=(torch.bfloat16, {}, True))
def fp8_gather_autocast(dtype, policy, taken):
    """Weights of bfloat16 are cast to what autocast computes in, those of float32 quantised as they are."""

    def run(model, inputs):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype):
            loss = model(**inputs).loss
        loss.backward()
        return loss.detach(), None

    _, seen = as_of_weights(lambda: of_any_size(HEAD(make(), **policy)), run)
    assert bool(of_bytes(seen)) == taken


def hooked(linear, read):
    return linear.register_forward_pre_hook(lambda module, args: read(module))


def hooked_everywhere(linear, read):
    return register_module_forward_pre_hook(lambda module, args: read(module) if module is linear else None)


def wrapped(linear, read):
    """The instance has a forward of others around Tigon's."""
    inner = linear.forward
    return mock.patch.object(linear, "forward", lambda x: (read(linear), inner(x))[1])


@contextlib.contextmanager
def of_another_class(linear, read):
    class Other(nn.Linear):
        def forward(self, x):
            read(self)
            return super().forward(x)

    before, linear.__class__ = linear.__class__, Other
    yield
    linear.__class__ = before


def of_another_class_forward(linear, read):
    original = nn.Linear.forward

    def forward(self, x):
        if self is linear:
            read(self)
        return original(self, x)

    return mock.patch.object(nn.Linear, "forward", forward)


READERS = {  # of a weight, and the Linears that gather theirs
    "hook": (hooked, 1),
    "global hook": (hooked_everywhere, LINEARS),
    "instance forward": (wrapped, 1),
    "class": (of_another_class, 1),
    "class forward": (of_another_class_forward, LINEARS),
}


@case(**READERS)
def fp8_gather_read_by_others(reader, left):
    """Who reads a Linear's weight finds it, put there after steps in bytes, which come again without it."""
    model, read = of_any_size(HEAD(make())), []
    linear = model.model.layers[1].mlp.up_proj
    want, _ = step(model, data())
    assert torch.equal(step(model, data())[0], want)
    with reader(linear, lambda module: read.append(module.weight.detach().clone())), gathers() as seen:
        loss, _ = step(model, data())
    torch.testing.assert_close(loss, want, rtol=1e-2, atol=0)  # another class computes as it is
    assert torch.equal(read[0], full(linear.weight)) and of_bytes(seen) == 2 * (LINEARS - left)
    with gathers() as seen:
        assert torch.equal(step(model, data())[0], want)
    assert of_bytes(seen) == 2 * LINEARS


@case
def fp8_gather_compiled():
    """Layers that are compiled after some steps gather their weights again."""
    losses = []
    for context in (of_weights(), contextlib.nullcontext()):
        with context, gathers() as seen:
            model = of_any_size(HEAD(make(use_cache=False)))
            step(model, data())
            step(model, data())
            torch._dynamo.reset()
            for layer in model.model.layers:
                layer.compile(backend="aot_eager")
            seen.clear()
            losses.append([step(model, data()) for _ in range(3)])
            late = of_bytes(seen[-2:])
    for (loss, grads), (expected, wanted) in zip(*reversed(losses), strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(full(grad), full(wanted[name]), rtol=1e-4, atol=1e-6)
    assert not late
