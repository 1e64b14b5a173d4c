"""Arguments of another kind than the op takes: refused by tigon.Error, which names op and argument."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch

import tigon
import tigon.parallel
from tigon import doctor

X, W, ALPHA = torch.randn(4, 8), torch.randn(8), torch.tensor([0.5])
HEAD, LABELS = torch.randn(11, 8), torch.arange(4)
Q, COS = torch.randn(1, 1, 4, 8), torch.randn(4, 8)
HUGE, INF, NAN = 2**70, float("inf"), float("nan")
A, B = torch.randn(2, 8), torch.randn(11, 2)


def _norm(name, *more):
    op = getattr(tigon, name)
    return {
        f"{name} list": (lambda: op([1.0], *more), "x must be a float tensor, got list"),
        f"{name} numpy": (lambda: op(np.ones(3), *more), "x must be a float tensor, got ndarray"),
        f"{name} None": (lambda: op(None, *more), "x must be a float tensor, got NoneType"),
        f"{name} weight": (lambda: op(X, *more, 1.0), "weight must be a float tensor, got float"),
        f"{name} eps None": (lambda: op(X, *more, eps=None), "eps must be a number, got NoneType"),
        f"{name} eps text": (lambda: op(X, *more, eps="a"), "eps must be a number, got str"),
    }


def _lce(**options):
    return lambda: tigon.linear_cross_entropy(X, HEAD, LABELS, **options)


def _ce(**options):
    return lambda: tigon.cross_entropy(X, LABELS, **options)


def _rope(**options):
    return lambda: tigon.rope(Q, None, COS, COS, **options)


CALLS = {
    **_norm("rms_norm"),
    **_norm("layer_norm"),
    **_norm("add_rms_norm", X),
    **_norm("gated_rms_norm", X),
    "offset": (lambda: tigon.rms_norm(X, W, offset="a"), "offset must be a number, got str"),
    "rounding": (lambda: tigon.rms_norm(X, W, rounding=["llama"]), "rounding must be one of"),
    "residual": (lambda: tigon.add_rms_norm(X, None), "residual must be a float tensor, got NoneType"),
    "modulated scale": (lambda: tigon.modulated_rms_norm(X, W, 2.0), "scale must be a float tensor, got f"),
    "query": (lambda: tigon.attention_residual(X, None, W), "query must be a float tensor, got NoneType"),
    "gate": (lambda: tigon.gated_rms_norm(X, 2.0), "gate must be a float tensor, got float"),
    "group_size": (lambda: tigon.gated_rms_norm(X, X, group_size=4.0), "group_size must be an int, got f"),
    "activation": (lambda: tigon.gated_rms_norm(X, X, activation=None), "activation must be one of"),
    "groups": (lambda: tigon.group_norm(X, 2.0), "groups must be an int, got float"),
    "groups as torch": (lambda: tigon.group_norm(X, W, 2), "groups must be an int, got torch.float32"),
    "groups bool": (lambda: tigon.group_norm(X, True), "groups must be an int, got bool"),
    "group_norm weight": (lambda: tigon.group_norm(X, 2, 1.0), "weight must be a float tensor, got float"),
    "alpha": (lambda: tigon.dyt(X, 0.5), "alpha must be a float tensor, got float"),
    "dyt columns": (lambda: tigon.dyt(X[:, :0], ALPHA), "x must have at least one column, got 0"),
    "gate of a glu": (lambda: tigon.swiglu([1.0, 2.0]), "gate must be a float tensor, got list"),
    "up": (lambda: tigon.geglu(X, 1.0), "up must be a float tensor, got float"),
    "multiplier": (lambda: tigon.swiglu(X, gate_multiplier="a"), "gate_multiplier must be a number, got str"),
    "limit": (lambda: tigon.swiglu_oai(X, limit=None), "limit must be a number, got NoneType"),
    "ids": (lambda: tigon.embedding([1], HEAD), "ids must be an int64 or int32 tensor, got list"),
    "padding_idx": (lambda: tigon.embedding(LABELS, HEAD, padding_idx=1.5), "padding_idx must be an int"),
    "scale": (lambda: tigon.embedding(LABELS, HEAD, scale=None), "scale must be a number, got NoneType"),
    "q": (lambda: tigon.rope([1.0], None, COS, COS), "q must be a float tensor, got list"),
    "k": (lambda: tigon.rope(Q, 1.0, COS, COS), "k must be a float tensor, got float"),
    "cos": (lambda: tigon.rope(Q, None, [1.0], COS), "cos must be a tensor, got list"),
    "sin": (lambda: tigon.rope(Q, None, COS, 1.0), "sin must be a float tensor, got float"),
    "position_ids": (_rope(position_ids=[1, 2]), "position_ids must be an int64 or int32 tensor, got list"),
    "unsqueeze_dim": (_rope(unsqueeze_dim=1.0), "unsqueeze_dim must be an int, got float"),
    "sections": (_rope(mrope_section=(1.0, 1.0, 2.0)), "mrope_section must be three ints"),
    "sections number": (_rope(mrope_section=4), "mrope_section must be three ints"),
    "q_weight": (lambda: tigon.qk_norm_rope(Q, None, 1.0, None, COS, COS), "q_weight must be a float tensor"),
    "qk eps": (lambda: tigon.qk_norm_rope(Q, None, None, None, COS, COS, None), "eps must be a number"),
    "logits": (lambda: tigon.cross_entropy([1.0], LABELS), "logits must be a float tensor, got list"),
    "target": (lambda: tigon.cross_entropy(X, [1, 2]), "target must be an integer tensor, got list"),
    "ignore_index": (_ce(ignore_index=1.5), "ignore_index must be an int, got float"),
    "no ignore_index": (_ce(ignore_index=None), "ignore_index must be an int, got NoneType"),
    "large ignore_index": (_ce(ignore_index=HUGE), "ignore_index must have at most 64 bits"),
    "z_loss": (_ce(z_loss=None), "z_loss must be a number, got NoneType"),
    "smoothing": (_ce(label_smoothing="a"), "label_smoothing must be a number, got str"),
    "infinite softcap": (_ce(softcap=INF), r"softcap must be > 0 and finite \(or None\), got inf"),
    "class weights": (_ce(weight=[1.0]), "weight must be a float tensor, got list"),
    "denominator": (_ce(denominator="a"), "denominator must be a number, got str"),
    "complex denominator": (_ce(denominator=torch.tensor(1j)), "denominator must be real, .*got torch.c"),
    "student": (lambda: tigon.kl_div([1.0], X), "student must be a float tensor, got list"),
    "teacher": (lambda: tigon.tvd(X, None), "teacher must be a float tensor, got NoneType"),
    "labels": (lambda: tigon.jsd(X, X, [1]), "labels must be an integer tensor, got list"),
    "beta": (lambda: tigon.jsd(X, X, beta=None), "beta must be a number, got NoneType"),
    "temperature": (lambda: tigon.jsd(X, X, temperature=INF), "temperature must be > 0 and finite, got inf"),
    "hidden": (lambda: tigon.linear_log_prob([1.0], HEAD, LABELS), "hidden must be a float tensor, got list"),
    "head": (lambda: tigon.linear_log_prob(X, None, LABELS), "weight must be a float tensor, got NoneType"),
    "head's target": (lambda: tigon.linear_log_prob(X, HEAD, [1]), "target must be an int64 or int32 tensor"),
    "head's bias": (_lce(bias=1.0), "bias must be a float tensor, got float"),
    "head's ignore_index": (_lce(ignore_index=None), "ignore_index must be an int, got NoneType"),
    "head's softcap": (_lce(softcap=INF), "softcap must be > 0 and finite"),
    "head's temperature": (_lce(temperature=INF), "temperature must be > 0 and finite, got inf"),
    "logit_scale": (_lce(logit_scale=None), "logit_scale must be a number, got NoneType"),
    "head's z_loss": (_lce(z_loss=None), "z_loss must be a number, got NoneType"),
    "head's denominator": (_lce(denominator=torch.tensor(1j)), "denominator must be real"),
    "chunk_rows bool": (_lce(chunk_rows=True), "chunk_rows must be an int, got bool"),
    "large chunk_rows": (_lce(chunk_rows=HUGE), "chunk_rows must have at most 64 bits"),
    "valid_rows bool": (_lce(valid_rows=True), "valid_rows must be an int, got bool"),
    "infinite workspace": (_lce(max_workspace_mb=INF), r"max_workspace_mb must be finite .*got inf"),
    "workspace nan": (_lce(max_workspace_mb=NAN), "max_workspace_mb must be a number, got NaN"),
    "workspace text": (_lce(max_workspace_mb="aaa"), "max_workspace_mb must be a number, got str"),
    "keep_mb": (_lce(keep_mb=-1.0), r"keep_mb must be >= 0 \(or None\), got -1.0"),
    "keep_mb nan": (_lce(keep_mb=NAN), "keep_mb must be a number, got NaN"),
    "outputs": (_lce(outputs="loss"), "outputs must be a tuple of names"),
    "lora of two": (_lce(lora=(A, B)), r"lora must be \(A, B, scale\), got 2"),
    "lora None": (_lce(lora=(None, None, 1.0)), "lora A must be a float tensor, got NoneType"),
    "lora int": (_lce(lora=(A.long(), B, 1.0)), "lora A must be a float tensor, got torch.int64"),
    "lora scale": (_lce(lora=(A, B, None)), "lora scale must be a number, got NoneType"),
    "fn": (lambda: tigon.linear_loss(X, HEAD, LABELS, None), "fn must be callable, got NoneType"),
    "tensors": (lambda: tigon.linear_loss(X, HEAD, LABELS, abs, 1.0), "tensors must be tensors, got float"),
    "counted": (lambda: tigon.count_labels([1]), "target must be an integer tensor, got list"),
    "counted beside": (lambda: tigon.count_labels(LABELS, None), "ignore_index must be an int, got NoneType"),
    "nn.Embedding": (lambda: tigon.nn.Embedding(5, 3, padding_idx=7), r"padding_idx must be in \[-5, 5\)"),
    **{
        f"{name} on another device": (call, rf"{name} must be on cpu, got meta")
        for name, call in {
            "weight": lambda: tigon.group_norm(X[:0], 2, W.to("meta")),
            "target": lambda: tigon.linear_log_prob(X, HEAD, LABELS[:, None].to("meta")),
            "nll_target": lambda: tigon.linear_preference(
                X[:, None], HEAD, LABELS[:, None], nll=1.0, nll_target=LABELS[:2, None].to("meta")
            ),
        }.items()
    },
    **{
        f"{name} of an unhashable kind": (call, f"{name} must be one of .*, got")
        for name, call in {
            "reduction": _ce(reduction=["mean"]),
            "kind": lambda: tigon.kto_loss(X, LABELS > 1, kind={}),
            "activation": lambda: tigon.nn.Experts(2, 8, 8, activation=[]),
        }.items()
    },
    **{
        f"float8 {name}": (call, rf"{name} must be float32, bfloat16, float16 or float64, got torch.float8")
        for name, call in {
            "x": lambda: tigon.rms_norm(X.to(torch.float8_e4m3fn), None),
            "weight": lambda: tigon.layer_norm(X, W.to(torch.float8_e5m2)),
            "logits": lambda: tigon.cross_entropy(HEAD.to(torch.float8_e4m3fn), torch.arange(11) % 8),
        }.items()
    },
    "float8 table": (
        lambda: tigon.embedding(LABELS, X.to(torch.float8_e4m3fn)),
        "weight must be float32, bfloat16, float16 or float64, got torch.float8",
    ),
    "bool": (
        lambda: tigon.linear_log_prob(X, HEAD, LABELS, entropy=X),
        "entropy must be True or False, got torch.float32",
    ),
    "post alone": (lambda: tigon.hyper_connection_post(Q, None, X, None), ".*must be given.* got post alone"),
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
def test_kinds(name):
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


NO_NUMBERS = {"nan": NAN, "complex": 1j, "text": "x", "complex tensor": torch.tensor(1j), "list": [1.0]}
NO_NUMBERS |= {"two": torch.ones(2), "sparse": torch.ones(1).to_sparse()}


def _number_options():
    """Every op with its options whose default is a float, or that may be one."""
    for probe in doctor.probes():
        for option in inspect.signature(getattr(tigon, probe.op)).parameters.values():
            is_float = isinstance(option.default, float) or "float" in str(option.annotation)
            if (
                option.default is not inspect.Parameter.empty
                and is_float
                and "tuple" not in option.annotation
            ):
                yield pytest.param(probe, option.name, id=f"{probe.op} {option.name}")


@pytest.mark.parametrize("probe, name", list(_number_options()))
def test_numbers(probe, name):
    """What is no real number is refused, wherever one is an option."""
    function = getattr(tigon, probe.op)
    call = inspect.signature(function).bind(*probe.draw(), **probe.options)
    for value in NO_NUMBERS.values():
        with pytest.raises(tigon.Error, match=rf"^\[\w+\] {name} must "):
            call.arguments[name] = value
            function(*call.args, **call.kwargs)


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
