"""Calls that go to their operator at once: they return, and refuse, what they do behind all checks."""

import pytest
import torch
from calls import call, freed
from checks import outputs_of, same_bits

import tigon
from cases.case import lay_out
from tigon._op import Op

X = 2, 3, 8
TABLES = "cos", "sin"


def draw(name):
    torch.manual_seed(0)
    norm = {"x": torch.randn(X), "weight": torch.randn(8), "eps": 1e-5, "offset": 1.0, "rounding": "llama"}
    tables = {"cos": torch.randn(2, 5, 8), "sin": torch.randn(2, 5, 8), "unsqueeze_dim": 1}
    heads = {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 2, 5, 8)}
    gates = {"gate": torch.randn(X), "up": torch.randn(X)}
    weights = {"q_weight": torch.randn(8), "k_weight": torch.randn(8), "eps": 1e-5, "rounding": "gemma"}
    return {
        "rms_norm": norm,
        "add_rms_norm": norm | {"residual": torch.randn(X)},
        "rope": heads | tables,
        "qk_norm_rope": heads | tables | weights,
        "swiglu": gates | {"gate_multiplier": 0.5, "down_multiplier": 2.0},
        "geglu": gates,
    }[name]


def tensors(t):
    """Others in the place of a tensor."""
    layouts = ["offset1", "rows", "columns", "transposed", "expanded"]
    yield from (lay_out(t, layout) for layout in layouts if t.dim() > 1)
    yield from (t.to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64))
    yield from (t.to(torch.complex64), t[..., :-1], t[..., :0], t[:0], t[None], t.flatten(), t.new_ones(()))
    yield from (t.to("meta"), t.requires_grad_(), t.detach(), torch.nn.Parameter(t), torch._neg_view(t))
    yield from (t.to_sparse(), torch.nested.nested_tensor([t]), None, [], 1.0, t.tolist())
    yield freed(t)
    yield t.squeeze(0).mT if t.dim() > 1 else t.flip(0)
    yield t.expand(2, *t.shape)


def numbers():
    """Others in the place of a number, or of a word."""
    yield from (0, 1, -1, 2, -2, True, 0.0, -1e-3, 1e300, float("nan"), float("inf"), None, "gemma", "x")
    yield from (2**70, 1j, [], torch.tensor(1.0), torch.tensor(1))


def outcome(name, arguments):
    """The results with their strides and graph, and the gradients; or the error."""
    arguments = {
        key: value.detach().requires_grad_()
        if value is not None and isinstance(value, torch.Tensor) and value.requires_grad
        else value
        for key, value in arguments.items()
    }
    try:
        y = call(getattr(tigon, name), arguments)
    except Exception as error:
        return [type(error), str(error)]
    ys = outputs_of(y)
    trained = [t for t in arguments.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    found = [(t.dtype, t.shape, t.stride(), t.requires_grad, t.device, type(t)) for t in ys]
    if trained and ys[0].requires_grad:
        torch.manual_seed(1)
        loss = sum((t * torch.randn(t.shape)).sum() for t in ys)
        ys = *ys, *torch.autograd.grad(loss, trained, allow_unused=True)
    return [found, ys]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rope", "qk_norm_rope", "swiglu", "geglu"])
def test_as_behind_the_checks(name, trained, monkeypatch):
    quick, taken = Op.quick, []
    base = draw(name)
    for key, t in base.items():
        if trained and isinstance(t, torch.Tensor) and key not in TABLES:
            t.requires_grad_()
    calls = [{}]
    for key, value in base.items():
        others = tensors(value.detach()) if isinstance(value, torch.Tensor) else numbers()
        calls += [{key: other} for other in others]
    floats = [key for key, value in base.items() if isinstance(value, torch.Tensor)]
    for change in (torch.Tensor.bfloat16, torch.Tensor.double, lambda t: t[:1], lambda t: t[:, :0]):
        calls.append({key: change(base[key]) for key in floats if base[key].dim() > 1})
    for changed in calls:
        monkeypatch.setattr(Op, "quick", lambda *args: taken.append(quick(*args)) or taken[-1])
        at_once = outcome(name, base | changed)
        monkeypatch.setattr(Op, "quick", lambda *_: None)
        wanted = outcome(name, base | changed)
        assert at_once[0] == wanted[0], (changed, at_once, wanted)
        if isinstance(wanted[1], str):
            assert at_once[1] == wanted[1], (changed, at_once, wanted)
        else:
            for y, w in zip(at_once[1], wanted[1], strict=True):
                assert (y is None) == (w is None), changed
                assert y is None or y.is_meta or y.is_sparse or same_bits(y, w), changed
    assert any(y is not None for y in taken)


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
def test_trained_tables_beside_freed_tensors(name):
    base = draw(name)
    base["cos"].requires_grad_()  # the plain formula runs
    for key in [key for key, t in base.items() if isinstance(t, torch.Tensor) and key != "cos"]:
        with pytest.raises(tigon.Error, match=rf"{key} was freed"):
            call(getattr(tigon, name), base | {key: freed(base[key])})
