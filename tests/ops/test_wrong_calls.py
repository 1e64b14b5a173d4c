"""Every public function, each of its arguments, values that are none: tigon.Error and nothing else.

tests/fuzz.py draws more of them.
"""

import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import calls
import numpy as np
import pytest
import torch
from checks import outputs_of, same_bits

import tigon
import tigon.parallel

CALLS = calls.calls()
every_call = pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])


def values() -> dict[str, Any]:
    """What no function takes as all of its arguments."""
    return {
        "None": None,
        "True": True,
        "-1": -1,
        "0": 0,
        "3": 3,
        "1.5": 1.5,
        "nan": float("nan"),
        "inf": -float("inf"),
        "1e300": 1e300,
        "1e-300": 1e-300,
        "2**63": 2**63,
        "2**70": -(2**70),
        "10**400": 10**400,
        "text": "x",
        "bytes": b"x",
        "[]": [],
        "(1,)": (1,),
        "(None, None)": (None, None),
        "{}": {},
        "[[]]": [[]],
        "('loss', [])": ("loss", []),
        "object": object(),
        "1j": 1j,
        "class": int,
        "dtype": torch.int8,
        "array": np.ones(3),
        "0-d array": np.array(1.5),
        "generator": (i for i in "ab"),
        "number": torch.tensor(1.0),
        "two": torch.ones(2),
        "empty": torch.ones(0),
        "bool": torch.tensor(True),
        "complex": torch.tensor(1j),
        "meta": torch.ones((), device="meta"),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "a float8": torch.ones(()).to(torch.float8_e5m2),
        "sparse": torch.ones(2, 2).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2)] * 2),
        "two tensors": (torch.ones(2), torch.ones(2)),
        "tensor and text": (torch.ones(2), None, "a"),
    }


def changed(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor with one thing about it changed."""
    found = {
        "float8": x.to(torch.float8_e5m2),
        "meta": x.to("meta"),
        "int64": x.long(),
        "int32": x.int(),
        "bool": x.bool(),
        "complex": x.to(torch.complex64),
        "float64": x.double(),
        "float16": x.half(),
        "one more dimension": x[None],
        "one dimension": x.flatten(),
        "large": x * 0 + 10**6,
        "negative": x * 0 - 10**6,
        "sparse": x.to_sparse(),
        "array": x.numpy(),
        "list": x.tolist(),
    }
    if x.dim():
        found |= {"a row": x[:1], "no row": x[:0], "a column": x[..., :1], "no column": x[..., :0]}
    return found


def put(value: Any, place: tuple[int, ...], new: Any) -> Any:
    """A nested tuple or list with another value at a place."""
    if not place:
        return new
    parts = list(value)
    parts[place[0]] = put(parts[place[0]], place[1:], new)
    return type(value)(parts)


def places(value: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Everything that a nested tuple or list holds, and where."""
    yield place, value
    if isinstance(value, (tuple, list)):
        for i, one in enumerate(value):
            yield from places(one, (*place, i))


def is_taken(call: calls.Call, name: str, value: Any) -> bool:
    """Whether a value says nothing of the function: its own callable runs, or is asked for once a round."""
    if name == "fn":
        return callable(value)
    if name == "tensors":
        return not isinstance(value, (tuple, list))
    return name == "iterations" and isinstance(value, int) and value > 100


def wrong(call: calls.Call) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Arguments of a call with one of them, or a part of one, replaced."""
    bare = next((c for c in CALLS if c.function is call.function), call)
    good = call.draw()
    for name in inspect.signature(call.function).parameters:
        given = good.get(name)
        asked = call.name == bare.name or name not in bare.draw()
        for what, value in values().items():
            if (asked or what == "text") and not is_taken(call, name, value):
                yield name, what, good | {name: value}
        for place, part in places(given):
            new = values() if place else {}
            new |= changed(part) if isinstance(part, torch.Tensor) else {}
            for what, value in new.items():
                whole = put(given, place, value)
                if not is_taken(call, name, whole):
                    yield name, f"{what} at {place}", good | {name: whole}


# What is said of `values` of no kind that an argument is declared to have, by that kind.
OF_NO_KIND = ("None", "True", "1.5", "nan", "2**63", "2**70", "text", "[]", "{}", "object", "1j", "array")
OF_NO_KIND += ("two", "complex", "sparse")
WORDS = {"torch.Tensor": "must be .*(tensor|None).*", "float": "must be a number.*", "int": "must be an int"}
WORDS |= {"bool": "must be True(, | or )False.*", "str": "must be (one of|'vllm') .*"}
UNUSED = {("lora_linear", "seed"), ("linear_loss", "tensors")}  # without dropout; any number of them


def of_no_kind(value: Any, kinds: set[str]) -> str:
    """The words that refuse a value of no declared kind; none for what is of one."""
    numbers = kinds & {"int", "float"}
    if type(value) is int and numbers:
        return "must .* 64 bits" if value == -(2**70) or "int" in kinds else ""
    if type(value) is float and value != value and "float" in kinds:
        return "must .*, got [Nn]a[Nn]"
    if torch.is_tensor(value) and "torch.Tensor" in kinds:
        return "must .*, got" if numbers else ""
    of = {type(None): {"None"}, bool: {"bool", "float"}, float: {"float"}}
    if of.get(type(value), set()) & kinds:
        return ""
    name = str(value.dtype) if torch.is_tensor(value) else type(value).__name__.removesuffix("Type")
    got = re.escape(repr(value) if "str" in kinds else name)
    return f"({'|'.join(WORDS[kind] for kind in kinds - {'None'})}), got {got}"


def said_of(call: calls.Call, name: str, what: str, value: Any) -> str:
    """What is said of one of `values`, if that is known; a form of a function ignores no text either."""
    kinds = set(str(inspect.signature(call.function).parameters[name].annotation).split(" | "))
    used = (call.name, name) not in UNUSED
    known = what in OF_NO_KIND and kinds <= {"None", *WORDS} and used
    if not known or " " in call.name.removesuffix(" with all"):
        return "." if what == "text" and "str" not in kinds and used else ""
    words = of_no_kind(value, kinds)
    return words and f"{name} {words}"


def outcome(function: Callable, arguments: dict[str, Any], expected: str = "") -> str:
    """What is wrong with how a call ends: nothing where it is in the expected words, or in its own."""
    try:
        calls.call(function, arguments)
    except tigon.Error as error:
        if expected:
            said = re.match(rf"(?s)\[{function.__name__}\] {expected}", str(error))
            return "" if said else f"does not say {expected}: {error}"
        said = re.match(r"\[(?:parallel\.)?(\w+)\] ", str(error))
        if said is None or said[1] != function.__name__:
            return f"names another function: {error}"
        words = str(error)[said.end() :]  # "teacher_hidden" is of teacher, "q_ids" of ids
        words = {*re.findall(r"\w+", words), *re.findall(r"[a-z]+", words)}
        return "" if words & set(inspect.signature(function).parameters) else f"names no argument: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return expected and f"does not say {expected}"


@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.filterwarnings("ignore")
def test_wrong_values(call, dtype):
    """An error that names the function and the argument, and the kind that was given; nothing is modified."""
    if call.function is tigon.clip_grad_norm_:
        pytest.skip("it modifies gradients: the next test calls it")
    good, found = {key: calls.converted(value, dtype) for key, value in call.draw().items()}, []
    tensors = list(calls.tensors_of(list(good.values())))
    kept = [t.clone() for _, t in tensors]
    for name, what, arguments in wrong(call._replace(draw=lambda: good)):
        said = said_of(call, name, what, arguments[name])
        if problem := outcome(call.function, arguments, said):
            found.append(f"{name} = {what}: {problem}"[:200])
        if arguments.get("inplace") is True:
            for (_, t), before in zip(tensors, kept, strict=True):
                t.copy_(before)
    assert not found, "\n".join([f"{len(found)}", *found])
    for (at, t), before in zip(tensors, kept, strict=True):
        assert same_bits(t, before), f"{at} was modified"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy", "linear_log_prob"])
def test_wrong_values_of_sharded_losses(name, one_process):
    """Each is an error of all processes: the storage of a freed tensor is looked at where they agree."""
    call = next(c for c in CALLS if c.name == f"{name} with all")
    function, good = getattr(tigon.parallel, name), call.draw()
    good = {key: value for key, value in good.items() if key in inspect.signature(function).parameters}
    call, found = calls.Call(name, function, lambda: good | {"group": one_process}), []
    call()
    for argument, what, arguments in wrong(call):
        if problem := outcome(function, arguments):
            found.append(f"{argument} = {what}: {problem}"[:200])
    for argument, value in good.items():
        for place, t in places(value):
            if isinstance(t, torch.Tensor):
                with pytest.raises(tigon.Error, match=rf"^\[parallel\.{name}\] .*{argument}.* was freed"):
                    call(**{argument: put(value, place, calls.freed(t))})
    assert not found, "\n".join(found)


def test_wrong_values_of_a_clipping():
    for name in ("parameters", "max_norm", "norm_type", "error_if_nonfinite"):
        for what, value in values().items():
            p = torch.ones(3, requires_grad=True)
            p.grad = torch.ones(3)
            arguments = {"parameters": [p], "max_norm": 1.0} | {name: value}
            assert not outcome(tigon.clip_grad_norm_, arguments), (name, what)


OTHER = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float64),
    torch.int64: (torch.int64, torch.int32),
}


@every_call
def test_freed_storage(call):
    """Of every tensor, in its dtype and in others, alone and where all are float64: never a crash."""
    if call.function in (tigon.clip_grad_norm_, tigon.count_labels):
        pytest.skip("reads no values of these tensors")
    good, found = call.draw(), []
    wide = {name: calls.converted(value, torch.float64) for name, value in good.items()}
    for name, value in good.items():
        for place, t in places(value):
            if not isinstance(t, torch.Tensor):
                continue
            for dtype in OTHER.get(t.dtype, (t.dtype,)):
                base = wide if dtype == torch.float64 else good
                arguments = base | {name: put(base[name], place, calls.freed(t.to(dtype)))}
                try:
                    calls.call(call.function, arguments)
                    problem = "returned"
                except tigon.Error as error:
                    named = name if dtype != torch.float64 else "a tensor"  # before the reference runs
                    words = rf"\[{call.function.__name__}\] ({name}|{named})\S* was freed"
                    problem = "" if re.match(words, str(error)) or dtype != t.dtype else str(error)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                found += [f"{name}{place} {dtype}: {problem}"[:160]] if problem else []
    assert not found, "\n".join(found)


def without(value: Any, size: int, dtype: torch.dtype) -> Any:
    """A nested tuple or list in a dtype, with no element in every dimension of that size."""
    if isinstance(value, (tuple, list)):
        return type(value)(without(one, size, dtype) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    for dim, n in enumerate(value.shape):
        value = value.narrow(dim, 0, 0 if n == size else n)
    return value.to(dtype) if value.is_floating_point() else value


@every_call
def test_float64_without_elements(call):
    """The references refuse the empty tensors that the kernels refuse, in the same words."""
    if call.function is tigon.dequantize:
        pytest.skip("takes no float64")
    good = call.draw()
    for size in {n for _, t in calls.tensors_of(list(good.values())) for n in t.shape}:
        said = []
        for dtype in (torch.float32, torch.float64):
            arguments = {name: without(value, size, dtype) for name, value in good.items()}
            try:
                calls.call(call.function, arguments)
                said.append("returned")
            except tigon.Error as error:
                said.append(str(error))
        assert said[0] == said[1], size


@every_call
def test_numbers_that_require_grad(call):
    """Refused by name, or learnt."""
    if call.function in (tigon.clip_grad_norm_, tigon.sample, tigon.linear_sample):
        pytest.skip("records no gradients, as PyTorch's")
    good = call.draw()
    for name, option in inspect.signature(call.function).parameters.items():
        if "float" not in str(option.annotation):
            continue
        before = good.get(name, option.default)
        for place, part in places(before) if before is not inspect.Parameter.empty else ((), None):
            if isinstance(part, (tuple, list, bool)):
                continue
            number = 0.5 if part is None or isinstance(part, torch.Tensor) else float(part)
            value = torch.tensor(number, requires_grad=True)
            arguments = good | {name: put(before, place, value)}
            try:
                result = calls.call(call.function, arguments)
            except tigon.Error as error:
                assert re.match(rf"\[\w+\] .*{name}", str(error)), error
                continue
            learnt = torch.autograd.grad(outputs_of(result)[0].sum(), value, allow_unused=True)[0]
            assert learnt is not None, f"{name} gets no gradient"


CHANGING = list(
    {call.function: call for call in CALLS if not call.name.endswith(("of one", "matches"))}.values()
)


@pytest.mark.parametrize("call", CHANGING, ids=[call.name for call in CHANGING])
def test_numbers_that_change_under_compile(call):
    """One graph, its numbers symbols: annealed temperatures, coefficients and shares."""
    if call.name in ("clip_grad_norm_", "linear_loss") or call.name.endswith("_memory"):
        pytest.skip("not a part of a graph")
    good = call.draw()
    options = {name: p.default for name, p in inspect.signature(call.function).parameters.items()} | good
    numbers = {name: value for name, value in options.items() if type(value) is float}
    if not numbers:
        pytest.skip("takes no numbers")
    given = {name: value for name, value in good.items() if name not in numbers}

    def run(numbers):
        return outputs_of(call.function(**given, **numbers))[0]

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    for factor in (1.0, 0.75, 0.5):
        changed = {name: value if value in (0.0, 1.0) else factor * value for name, value in numbers.items()}
        assert torch.equal(compiled(changed), run(changed)), changed


MODULES: dict[str, dict[str, Any]] = {
    "Embedding": {"num_embeddings": 5, "embedding_dim": 3},
    "Experts": {"num_experts": 3, "hidden_size": 8, "intermediate_size": 8},
    "GroupNorm": {"num_groups": 2, "num_channels": 8},
    "LoRALinear": {"in_features": 8, "out_features": 4, "rank": 2},
    "MedusaHeads": {"hidden_size": 8, "vocab_size": 11},
    "QKNormRotaryEmbedding": {"head_dim": 8},
    "RotaryEmbedding": {"head_dim": 8},
    "Router": {"hidden_size": 8, "num_experts": 4, "top_k": 2},
}
OF_A_HIDDEN_SIZE = "AddRMSNorm DyT GatedRMSNorm HyperConnections LayerNorm ModulatedRMSNorm RMSNorm"
MODULES |= {name: {"hidden_size": 8} for name in OF_A_HIDDEN_SIZE.split()}
NO_OPTIONS = {"ReGLU", "SiLU", "Sparsemax"}
MODULES |= {name: {} for name in sorted(set(tigon.nn.__all__) - set(MODULES) - NO_OPTIONS)}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore")
def test_wrong_values_of_modules(name):
    """What a module is made with is asked when it is made, or by its function."""
    module, found = getattr(tigon.nn, name), []
    others = "|".join([*MODULES[name], "rotary_dim", "logits"])  # which no longer fit
    for argument, option in inspect.signature(module).parameters.items():
        if option.kind is option.VAR_KEYWORD or argument in ("device", "dtype"):
            continue
        for what, value in values().items():
            try:
                module(**MODULES[name] | {argument: value})
            except tigon.Error as error:
                if not re.match(rf"\[[\w.]+\] .*({argument}|{others})", str(error)):
                    found.append(f"{argument} = {what}: {error}")
            except Exception as error:
                found.append(f"{argument} = {what}: {type(error).__name__}: {error}"[:160])
    assert not found, "\n".join(found)


# Rows labelled ignore_index do not count there; the class is never asked for.
PLAIN_LABELS = (tigon.kl_div, tigon.jsd, tigon.tvd, tigon.count_labels)


@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_labels_that_cannot_be(call, dtype):
    """Wherever a function takes labels: one that is no class is refused, whatever else it is asked for."""
    good = {key: calls.converted(value, dtype) for key, value in call.draw().items()}
    for name in ("labels", "target"):
        value = good.get(name)
        classes = isinstance(value, torch.Tensor) and call.function not in PLAIN_LABELS
        for wrong_label in (10**6, -1, -(2**63)) if classes else ():
            labels = value.clone()
            labels.view(-1)[-1] = wrong_label
            labels = labels.roll(5, -1)  # no shift reaches it
            with pytest.raises(tigon.Error, match=rf"^\[\w+\] {name} must be in .*got {wrong_label}"):
                calls.call(call.function, good | {name: labels})


def test_every_function_is_called():
    public = {f for n in tigon.__all__ if isinstance(f := vars(tigon).get(n), types.FunctionType)}
    assert public - {call.function for call in CALLS} == {tigon.env, tigon.graph_step}  # which take none
