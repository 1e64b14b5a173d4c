"""Where tensors live, and tensors that no kernel can take: refused in words before anything runs."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from checks import outputs_of, run, same_bits

import tigon
from cases import modules
from cases.case import select
from tigon.ops import group_norm, rms_norm


def _cases():
    """The first small case of every op, and the one with most tensors."""
    for module in modules().values():
        cases = select(module.CASES, "small")
        if not cases:  # linear_loss: a function of Python that no graph holds
            continue
        most = max(cases, key=lambda case: len(_places(module.make(case, "cpu", torch.float32, 0))))
        for case in {case.name: case for case in (cases[0], most)}.values():
            yield pytest.param(module, case, id=f"{module.NAME}-{case.name}")


def _places(inputs):
    """Where the tensors of a call are: positions and keywords."""
    named = [*enumerate(inputs.args), *inputs.kwargs.items()]
    return [place for place, value in named if torch.is_tensor(value)]


def _call(module, inputs, change):
    """The op, its tensors changed by place."""
    args, kwargs = list(inputs.args), dict(inputs.kwargs)
    for place in _places(inputs):
        of = args if isinstance(place, int) else kwargs
        of[place] = change(place, of[place])
    return module.tigon_fn(*args, **kwargs)


every_op = pytest.mark.parametrize("module, case", list(_cases()))


@every_op
def test_all_on_meta(module, case):
    """Results and gradients have their sizes and dtypes there."""
    inputs = module.make(case, "cpu", torch.float32, 0)
    args, kwargs = (_on_meta(dict(given)) for given in (enumerate(inputs.args), inputs.kwargs))
    meta = dataclasses.replace(inputs, args=tuple(args.values()), kwargs=kwargs, grad_outputs=None)
    real, meta = (run(module.tigon_fn, given).tensors for given in (inputs, meta))
    for name, r in real.items():
        m = meta[name]
        assert (r is None) == (m is None)
        assert r is None or (m.is_meta and (m.shape, m.dtype) == (r.shape, r.dtype)), name


def _on_meta(given: dict) -> dict:
    return {name: t.to("meta") if torch.is_tensor(t) else t for name, t in given.items()}


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [False, True])
def test_one_on_meta_is_refused(module, case, grad, dtype):
    inputs = module.make(case, "cpu", dtype, 0)
    for moved in _places(inputs) if len(_places(inputs)) > 1 else []:

        def change(place, t, moved=moved):
            t = t.to("meta") if place == moved else t.detach()
            return t.requires_grad_() if grad and place in (*inputs.grads, *inputs.grad_kwargs) else t

        with pytest.raises(tigon.Error, match=r"^\[\w+\] .* must be .*(on cpu, got meta|on meta, got cpu)"):
            _call(module, inputs, change)


def test_linear_loss_on_meta():
    hidden, weight = torch.randn(4, 8), torch.randn(11, 8)
    target, advantage = torch.arange(4), torch.randn(4)

    def loss(log_prob, factor):
        return -log_prob * factor

    all_meta = [t.to("meta") for t in (hidden, weight, target, advantage)]
    h = all_meta[0].requires_grad_()
    tigon.linear_loss(*all_meta[:3], loss, all_meta[3]).backward()
    assert h.grad.is_meta and h.grad.shape == h.shape
    for i in range(4):
        mixed = [t.to("meta") if i == j else t for j, t in enumerate((hidden, weight, target, advantage))]
        with pytest.raises(tigon.Error, match=r"^\[linear_loss\] \w+ must be on"):
            tigon.linear_loss(*mixed[:3], loss, mixed[3])
    with pytest.raises(tigon.Error, match=r"^\[linear_loss\] denominator must be on cpu, got meta"):
        tigon.linear_loss(hidden, weight, target, loss, advantage, denominator=torch.ones((), device="meta"))


def test_freed_views_are_refused():
    """Behind an offset, and where a copy would come first."""
    for layout in (lambda t: t.view(-1)[1:9].view(2, 4), lambda t: t.t()):
        base = torch.randn(4, 4)
        view = layout(base)
        base.untyped_storage().resize_(0)
        with pytest.raises(tigon.Error, match="x was freed"):
            tigon.softmax(view)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_out_of_memory_is_pytorchs(device, strided, grad):
    """Batch-size finders look at type and text."""
    x = torch.zeros(1, 8, device=device).requires_grad_(grad)
    x = x.expand(2**42, 8)
    with pytest.raises(RuntimeError) as caught:
        tigon.rms_norm(x.transpose(0, 1) if strided else x)
    assert not isinstance(caught.value, tigon.Error)
    if device == "cuda":
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert "CUDA out of memory." in str(caught.value)
    else:
        assert "DefaultCPUAllocator: can't allocate memory" in str(caught.value)
    assert len(caught.value.args) == 1


def _rows(t):
    """Rows to nest."""
    return [t] if t.dim() == 0 else list(t.reshape(t.shape[0], -1))


LAYOUTS = {
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr() if t.dim() == 2 else None,
    "mkldnn": lambda t: t.to_mkldnn() if t.dtype == torch.float32 else None,
    "nested": lambda t: torch.nested.nested_tensor(_rows(t)),
    "jagged": lambda t: torch.nested.nested_tensor(_rows(t), layout=torch.jagged) if t.dim() else None,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_op
def test_layouts_are_refused(module, case, dtype):
    """In words, before sizes, strides and views of such tensors fail in PyTorch's."""
    inputs = module.make(case, "cpu", dtype, 0)
    tensors = dict(enumerate(inputs.args)) | inputs.kwargs
    for replaced in _places(inputs):
        for layout in LAYOUTS.values():
            other = layout(tensors[replaced].detach())
            if other is None:
                continue
            with pytest.raises(tigon.Error, match=r"^\[\w+\] .+ must be .*, got .+"):
                _call(module, inputs, lambda place, t, r=replaced, other=other: other if place == r else t)


def test_types_are_refused():
    """What no check in Python has looked at."""
    x = torch.randn(4, 8)
    for op, arguments, text in (
        (rms_norm, (x, None, "a", 0.0, 0), "eps must be of type float, got 'a'"),
        (rms_norm, (x, None, 1e-6, None, 0), "offset must be of type float, got None"),
        (group_norm, (x, None, None, 8, 2.0, 1e-6), "groups must be of type int, got 2.0"),
        (group_norm, (x, None, None, 8, 2**70, 1e-6), "groups must be of type int, got 1180"),
    ):
        for leaf in (x, x.clone().requires_grad_()):
            with pytest.raises(tigon.Error, match=rf"^\[{op.__name__.split('.')[-1]}\] {text}"):
                op._op(leaf, *arguments[1:])


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from torch.distributed.tensor import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# The arguments that may be a replicated DTensor beside plain tensors: each process works alone then.
REPLICATED = {"linear_cross_entropy": 1, "linear_log_prob": 1, "cross_entropy": 0, "silu": 0, "softmax": 0}
REPLICATED |= {"mish": 0, "relu_squared": 0, "sparsemax": 0}


@every_op
@pytest.mark.parametrize("grad", [False, True])
def test_one_dtensor(module, case, grad, mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    inputs = module.make(case, "cpu", torch.float32, 0)
    for sharded in _places(inputs):

        def change(place, t, sharded=sharded):
            t = distribute_tensor(t.clone(), mesh, [Replicate()]) if place == sharded else t.clone()
            return t.requires_grad_() if grad and place in (*inputs.grads, *inputs.grad_kwargs) else t

        if sharded == REPLICATED.get(module.NAME):
            plain = outputs_of(_call(module, inputs, lambda place, t: t))
            for got, want in zip(outputs_of(_call(module, inputs, change)), plain, strict=True):
                assert torch.equal(getattr(got, "_local_tensor", got), want)
            continue
        with pytest.raises(
            tigon.Error, match=r"^\[\w+\] .+ must be a plain dense tensor, got a DTensor .*to_local"
        ):
            _call(module, inputs, change)


@pytest.mark.parametrize(("module", "case"), list(_cases()))
def test_another_default_device(module, case, device):
    """Memory that a call takes for itself is where it says, whatever `torch.set_default_device` says."""
    inputs = module.make(case, device, torch.float32, 0)
    want = run(module.tigon_fn, inputs)
    with torch.device("meta"):
        got = run(module.tigon_fn, inputs)
    for name, value in want.tensors.items():
        assert same_bits(got.tensors[name], value), name


@pytest.mark.parametrize("op", ["silu", "rms_norm", "softmax", "swiglu", "sparsemax"])
def test_many_dimensions(op, device):
    """As many as PyTorch takes, dense and not."""
    x = torch.randn(6, 16, device=device)
    for shape in ((1,) * 7 + (2, 3, 16), (2,) + (1,) * 60 + (3, 16)):
        a, b = x.clone().requires_grad_(), x.view(shape).transpose(-2, -3).contiguous().transpose(-2, -3)
        b = b.detach().requires_grad_()
        ya, yb = getattr(tigon, op)(a), getattr(tigon, op)(b)
        (da,) = torch.autograd.grad(ya.square().sum(), a)
        (db,) = torch.autograd.grad(yb.square().sum(), b)
        assert torch.equal(ya, yb.reshape(ya.shape)) and torch.equal(da, db.reshape(x.shape))
