"""What single functions refuse, and what signatures say of options; test_refusals.py has the common rules."""

import inspect
import re

import numpy as np
import pytest
import torch

import tigon
import tigon.parallel

X, W = torch.randn(4, 8), torch.randn(8)
HEAD, LABELS = torch.randn(11, 8), torch.arange(4)

CALLS = {
    "fn": (lambda: tigon.linear_loss(X, HEAD, LABELS, None), "fn must be callable, got NoneType"),
    "nn.Embedding": (lambda: tigon.nn.Embedding(5, 3, padding_idx=7), r"padding_idx must be in \[-5, 5\)"),
    "no rows": (lambda: tigon.group_norm(X[:0], 2, W.to("meta")), "weight must be on cpu, got meta"),
    "nn.GroupNorm": (lambda: tigon.nn.GroupNorm(3, 8), "num_groups must divide 8, got 3"),
    **{
        f"rotary_dim {size}": (
            lambda size=size: tigon.nn.RotaryEmbedding(8, rotary_dim=size),
            rf"rotary_dim must be even and in \[2, 8\], got {size}",
        )
        for size in (0, -2, 3, 16)
    },
    "odd head": (lambda: tigon.nn.QKNormRotaryEmbedding(7), "rotary_dim must be even .*, got 7"),
    "base": (lambda: tigon.nn.RotaryEmbedding(8, base="x"), "base must be a number, got str"),
    "streams": (lambda: tigon.nn.HyperConnections(8, 9), r"streams must be in \[1, 8\], got 9"),
    "nn.RMSNorm": (lambda: tigon.nn.RMSNorm((8, 8)), r"hidden_size must be an int, or .*got \[8, 8\]"),
    "nn.RMSNorm eps": (lambda: tigon.nn.RMSNorm(8, eps=None), "eps must be a number, got NoneType"),
    "nn.LayerNorm": (lambda: tigon.nn.LayerNorm(8.0), "hidden_size must be an int, or .*got 8.0"),
}


@pytest.mark.parametrize("name", CALLS)
def test_values(name):
    call, message = CALLS[name]
    with pytest.raises(tigon.Error, match=rf"^\[\S+\] {message}"):
        call()


def test_numbers_of_other_libraries():
    """NumPy's scalars and tensors of one element are numbers; what is no float may be one."""
    want = tigon.rms_norm(X, W, 0.5)
    for eps in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        assert torch.equal(tigon.rms_norm(X, W, eps), want)
    assert torch.equal(tigon.rms_norm(X, W, 1), tigon.rms_norm(X, W, 1.0))
    assert torch.equal(tigon.group_norm(X, np.int64(2)), tigon.group_norm(X, 2))


def test_modules_take_torchs_shapes():
    """A sequence of one column count, as torch's modules do."""
    for shape in ((8,), [8], torch.Size([8])):
        assert torch.equal(tigon.nn.RMSNorm(shape)(X), tigon.nn.RMSNorm(8)(X))
        assert torch.equal(tigon.nn.LayerNorm(shape)(X), tigon.nn.LayerNorm(8)(X))


def test_a_tensor_that_fn_reaches_on_its_own():
    """Refused whether or not the head's operands need a gradient; without gradients nothing is lost."""
    captured, given = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)

    def loss(*given, hidden=X):
        return tigon.linear_loss(hidden, HEAD, LABELS, lambda lp, *t: -lp * captured * sum(t, 1.0), *given)

    for arguments in ({}, {"hidden": X.clone().requires_grad_()}):
        for tensors in ((), (given,)):
            with pytest.raises(tigon.Error, match="fn must take tensors that need a gradient as arguments"):
                loss(*tensors, **arguments)
    with torch.no_grad():
        assert loss().isfinite()


def test_error_is_runtime_and_value_error():
    assert issubclass(tigon.Error, RuntimeError) and issubclass(tigon.Error, ValueError)


LOSSES = {
    "linear_cross_entropy": "LinearCrossEntropyLoss",
    "linear_kl_div": "LinearKLDivLoss",
    "linear_jsd": "LinearJSDLoss",
    "linear_tvd": "LinearTVDLoss",
    "linear_preference": "LinearPreferenceLoss",
    "linear_kto": "LinearKTOLoss",
    "linear_policy": "LinearPolicyLoss",
}


def test_signatures_name_every_option():
    """Functions and modules that take ``**options`` show those of the function that they hand them to."""
    keywords = {name: inspect.signature(getattr(tigon, name)).parameters for name in LOSSES}
    whole = set(keywords["linear_kl_div"])
    assert set(keywords["linear_tvd"]) == whole - {"reverse"}
    assert set(keywords["linear_jsd"]) == whole - {"reverse"} | {"beta"}
    for name, module in LOSSES.items():
        module = getattr(tigon.nn, module)
        own, call = (inspect.signature(f).parameters for f in (module, module.forward))
        assert set(own) == set(keywords[name]) - set(call) and "options" not in own
        assert all(own[key].default == keywords[name][key].default for key in own)
        with pytest.raises(TypeError, match="unexpected keyword argument 'warmth'"):
            module(warmth=2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'reverse'"):
        tigon.linear_tvd(None, None, None, reverse=True)
    own = inspect.signature(tigon.linear_log_prob_memory).parameters
    assert own["lora_rank"].default == 0 and not {"reduction", "function", "groups"} & set(own)


def _takers():
    """Everything that takes ``**options: Unpack[...]``, and the options."""
    for space in (tigon, tigon.nn, tigon.parallel):
        for name in space.__all__:
            taker = getattr(space, name)
            for function in (taker, getattr(taker, "__init__", None), getattr(taker, "forward", None)):
                if not inspect.isfunction(function):
                    continue
                written = inspect.unwrap(function)
                options = re.search(r"Unpack\[(\w+)\]", str(inspect.signature(written)))
                if options:
                    yield f"{name}.{function.__name__}", function, written.__globals__[options[1]]


def test_options_of_type_checkers_are_those_of_calls():
    """Every TypedDict has the options that a signature shows beside a taker's own, with their types."""
    functions = [getattr(space, name) for space in (tigon, tigon.parallel) for name in space.__all__]
    known = {f.__name__: inspect.signature(f).parameters for f in functions if inspect.isfunction(f)}
    found = {name: (taker, options.__annotations__) for name, taker, options in _takers()}
    assert len(found) >= 16
    for name, (taker, options) in found.items():
        types = {key: value.__forward_arg__ for key, value in options.items()}
        shown = {key: p.annotation for key, p in inspect.signature(taker).parameters.items()}
        if taker is not inspect.unwrap(taker):
            own = inspect.signature(inspect.unwrap(taker)).parameters
            assert {key: kind for key, kind in shown.items() if key not in own} == types, name
        else:  # a forward, which hands them on as they are
            assert any(
                types.items() <= {key: p.annotation for key, p in taken.items()}.items()
                for taken in known.values()
            ), name


def test_public_losses_write_their_options_out():
    """No public function of a loss hides options behind ``**``."""
    for space in (tigon, tigon.parallel):
        for name in space.__all__:
            function = getattr(space, name)
            if inspect.isfunction(function) and not name.endswith("_memory"):
                kinds = {p.kind for p in inspect.signature(inspect.unwrap(function)).parameters.values()}
                assert inspect.Parameter.VAR_KEYWORD not in kinds, name
