"""`tigon.graph_step`: a whole function as one graph; on the CPU by the recorder."""

import copy

import pytest
import torch
from graph_recorder import Recorder
from tiny import close
from torch import nn

import tigon

pytestmark = pytest.mark.usefixtures("recorder")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.norm = tigon.nn.RMSNorm(16)
        self.out = nn.Linear(16, 4)
        self.factor = 1.0

    def forward(self, x):
        return self.out(self.norm(self.inner(x))) * self.factor


def data(seed, rows=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def made(zero="end", **options):
    """A model, its optimizer and a step of both."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)

    def train(x, target):
        if zero == "start":
            optimizer.zero_grad()
        loss = tigon.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        if zero == "end":
            optimizer.zero_grad()
        return {"loss": loss, "twice": (loss * 2,)}

    return model, optimizer, train


@pytest.mark.parametrize("zero", ["start", "end"])
def test_a_step_is_an_eager_one(zero):
    model, _, train = made(zero=zero)
    twin, _, graphed = made(zero=zero)
    step = tigon.graph_step(graphed, data(0))
    Recorder.keep = [*twin.parameters()]
    for seed in range(8):
        wanted, got = train(*data(seed)), step(*data(seed))
        assert torch.equal(got["loss"], wanted["loss"].detach()) and not got["loss"].requires_grad
        assert torch.equal(got["twice"][0], 2 * got["loss"])
        close([*model.parameters()], [*twin.parameters()], ulps=0)
    replays = 6 if zero == "end" else 4  # gradients were there: it waits for a call without
    assert step.replays == replays
    assert any(f"captured, {replays} replays" in line for line in tigon.env().graphs)


def test_results_and_keywords():
    twice = tigon.graph_step(
        lambda x, k, flag: (x * k, [flag, x + 1]), {"x": torch.ones(3), "k": 2.0, "flag": True}
    )
    for value in range(5):
        x = torch.full((3,), float(value))
        product, (flag, more) = twice(flag=True, k=2.0, x=x)
        assert torch.equal(product, 2 * x) and flag is True and torch.equal(more, x + 1)
    assert twice.replays == 3


def test_other_arguments_run_eagerly(caplog):
    step = tigon.graph_step(lambda x: x.sum(), (torch.ones(3),))
    for n in (3, 3, 3, 4, 3, 4):
        assert step(torch.ones(n)) == n
    assert step.replays == 2
    assert caplog.text.count("not like the example") == 1


def test_gradients_outside_of_the_optimizer():
    """A function that leaves gradients gives them anew in each call; where some wait, it adds to them."""
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)

    def body(net):
        def step(x, target):
            loss = tigon.cross_entropy(net(x), target)
            loss.backward()
            return loss

        return step

    graphed = tigon.graph_step(body(twin), data(0))
    for seed in range(8):
        for micro in range(1 + seed % 2):
            body(model)(*data(seed + micro))
            graphed(*data(seed + micro))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
            p.grad = q.grad = None
    assert graphed.replays > 0


CHANGES = {
    "data": lambda m, o: setattr(m.out.weight, "data", m.out.weight.data.clone()),
    "parameter": lambda m, o: setattr(m.out, "weight", nn.Parameter(m.out.weight.detach() * 2)),
    "frozen": lambda m, o: m.out.weight.requires_grad_(False),
    "attribute": lambda m, o: setattr(m, "factor", 2.0),
    "mode": lambda m, o: m.norm.eval(),
    "module": lambda m, o: setattr(m, "out", nn.Linear(16, 4)),
    "lr": lambda m, o: o.param_groups[0].update(lr=0.5),
    "state": lambda m, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "group": lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.1}),
    "hook": lambda m, o: m.inner.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_reaches_is_watched(change):
    model, optimizer, train = made(momentum=0.9)
    step = tigon.graph_step(train, data(0))
    for seed in range(4):
        step(*data(seed))
    before, replays = step._graph, step.replays
    assert replays == 2
    CHANGES[change](model, optimizer)
    step(*data(5))
    assert step._graph is not before or step.replays == replays


def test_a_number_that_changes_in_each_step(caplog):
    _, optimizer, train = made()
    step = tigon.graph_step(train, data(0))
    for seed in range(30):
        optimizer.param_groups[0]["lr"] = 0.1 / (seed + 1)
        step(*data(seed))
    assert "a number that changes must be a tensor" in caplog.text
    assert step._captures <= 10


def test_watch_and_refusals():
    hidden = Net()
    step = tigon.graph_step(torch.sin, (torch.ones(2),), watch=[hidden])
    for _ in range(3):
        step(torch.ones(2))
    graph = step._graph
    hidden.factor = 3.0
    step(torch.ones(2))
    assert step._graph is not graph
    for fn, example in ((3, ()), (torch.sin, torch.ones(2))):
        with pytest.raises(tigon.Error, match="graph_step"):
            tigon.graph_step(fn, example)
    with pytest.raises(tigon.Error, match="must not be copied"):
        copy.deepcopy(step)


def test_a_capture_that_fails(caplog, recorder):
    recorder.fail = RuntimeError("operation not permitted when stream is capturing")
    step = tigon.graph_step(lambda x: x + 1, (torch.ones(2),))
    for _ in range(5):
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    assert caplog.text.count("its capture failed") == 1


def test_inside_another_capture(monkeypatch):
    step = tigon.graph_step(lambda x: x + 1, (torch.ones(2),))
    monkeypatch.setattr(Recorder, "inside", True)
    for _ in range(5):
        step(torch.ones(2))
    assert step.replays == 0
