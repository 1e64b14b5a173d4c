"""Good calls of every public function, with each tensor and option that it takes: sweeps of wrong calls begin
from these."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import tigon
from tigon import doctor

ROWS, COLUMNS, VOCABULARY = doctor.ROWS, doctor.COLUMNS, doctor.VOCABULARY


class Call(NamedTuple):
    """A function and its arguments by name, drawn anew by every look."""

    name: str
    function: Callable
    draw: Callable[[], dict[str, Any]]

    def __call__(self, **changed: Any) -> Any:
        """The result, with other arguments."""
        return call(self.function, self.draw() | changed)

    def parameters(self) -> list[str]:
        """What the function takes."""
        kinds = inspect.signature(self.function).parameters
        return [name for name, p in kinds.items() if p.kind is not p.VAR_POSITIONAL]


def call(function: Callable, arguments: dict[str, Any]) -> Any:
    """The result of arguments by name, those that come in any number by the name of all."""
    kinds = inspect.signature(function).parameters
    rest = next((name for name, p in kinds.items() if p.kind is p.VAR_POSITIONAL), None)
    if rest not in arguments:
        return function(**arguments)
    names = list(kinds)[: list(kinds).index(rest)]
    named = {name: value for name, value in arguments.items() if name not in (*names, rest)}
    return function(*(arguments[name] for name in names), *arguments[rest], **named)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, COLUMNS)))


def labels(*shape: int, classes: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, classes, shape or (ROWS,))


def _positions(*shape: int) -> torch.Tensor:
    return torch.arange(shape[-1]).expand(shape).contiguous()


def _lora() -> tuple:
    return rows(3, COLUMNS), rows(VOCABULARY, 3), 0.5


def _top_k() -> tuple:
    return torch.rand(ROWS, VOCABULARY).argsort(-1)[:, :4], rows(ROWS, 4).log_softmax(-1) - 0.5


def _draft_ids() -> torch.Tensor:
    return torch.randperm(VOCABULARY)


def _with_gradient() -> list[torch.Tensor]:
    found = [rows(5), rows(3, 4)]
    for p in found:
        p.grad = torch.ones_like(p)
    return found


_HEAD = {"bias": lambda: rows(VOCABULARY), "lora": _lora, "position_ids": lambda: _positions(ROWS)}
_HEAD |= {"class_weight": lambda: torch.rand(VOCABULARY), "token_weight": lambda: torch.rand(ROWS)}
_HEAD |= {"softcap": lambda: 5.0, "shift": lambda: 1}
_TEACHER = _HEAD | {"labels": labels, "hard": lambda: 0.5}
_ANSWERS = {"bias": _HEAD["bias"], "lora": _lora, "shift": lambda: 1}
_EXPERTS = {
    "gate_up_bias": lambda: rows(3, 2 * COLUMNS),
    "down_bias": lambda: rows(3, COLUMNS),
    "gate_up_lora": lambda: (rows(3, 2, COLUMNS), rows(3, 2 * COLUMNS, 2), 0.5),
    "down_lora": lambda: (rows(3, 2, COLUMNS), rows(3, COLUMNS, 2), 0.5),
}
_ROPE = {"position_ids": lambda: _positions(2, 6)}
_DIVERGENCE = {"labels": labels}
# What a call may have beside the arguments of the doctor's probe, by function.
_MORE: dict[str, dict[str, Callable[[], Any]]] = {
    "rms_norm": {"weight": lambda: rows(COLUMNS)},
    "add_rms_norm": {"weight": lambda: rows(COLUMNS)},
    "experts": _EXPERTS,
    "grouped_mlp": _EXPERTS,
    "geglu": {"up": rows},
    "route": {
        "correction_bias": lambda: rows(COLUMNS),
        "token_weights": lambda: torch.rand(ROWS),
        "losses": lambda: True,
        "ids": lambda: rows().argsort(-1)[:, :3],
    },
    "rope": _ROPE,
    "qk_norm_rope": _ROPE,
    "lora_linear": {"bias": lambda: rows(40), "dropout": lambda: 0.5, "seed": lambda: torch.tensor([3])},
    "kl_div": _DIVERGENCE,
    "jsd": _DIVERGENCE,
    "tvd": _DIVERGENCE,
    "cross_entropy": {"weight": lambda: torch.rand(VOCABULARY), "denominator": lambda: torch.tensor(3.0)},
    "linear_cross_entropy": _HEAD | {"denominator": lambda: torch.tensor(3.0)},
    "linear_log_prob": {**{n: _HEAD[n] for n in ("bias", "lora", "position_ids", "softcap", "shift")}},
    "linear_kl_div": {n: v for n, v in _TEACHER.items() if n != "class_weight"},
    "linear_jsd": {n: v for n, v in _TEACHER.items() if n != "class_weight"},
    "linear_tvd": {n: v for n, v in _TEACHER.items() if n != "class_weight"},
    "preference_loss": {
        "ref": lambda: rows(8),
        "nll_mask": lambda: torch.rand(4, 17) < 0.5,
        "nll": lambda: 1.0,
        "denominator": lambda: torch.tensor(3.0),
    },
    "kto_loss": {
        "ref": lambda: rows(7),
        "kl": lambda: torch.tensor(0.1),
        "denominator": lambda: torch.tensor(3.0),
    },
    "policy_loss": {
        "old": lambda: rows(7, 17),
        "ref": lambda: rows(7, 17),
        "entropies": lambda: rows(7, 17),
        "importance": lambda: torch.rand(7, 17),
        "kl": lambda: 0.1,
        "entropy": lambda: 0.1,
        "delta": lambda: 2.0,
        "denominator": lambda: torch.tensor(3.0),
    },
    "linear_preference": _ANSWERS
    | {"ref": lambda: rows(8), "nll": lambda: 1.0, "nll_target": lambda: torch.full((4, 6), -100)},
    "linear_kto": _ANSWERS | {"ref": lambda: rows(7), "kl": lambda: torch.tensor(0.1)},
    "linear_policy": _ANSWERS
    | {
        "old": lambda: rows(7, 6),
        "ref": lambda: rows(7, 6),
        "kl": lambda: 0.1,
        "importance": lambda: torch.rand(7, 6),
        "entropy": lambda: 0.1,
    },
    "drafter_loss": {
        "draft_ids": _draft_ids,
        "mask": lambda: torch.rand(ROWS) < 0.7,
        "token_weight": lambda: torch.rand(ROWS),
        "position_ids": lambda: _positions(ROWS),
        "shifts": lambda: (1,),
        "step_weights": lambda: (0.5,),
    },
    "contrastive_loss": {
        "labels": lambda: labels(ROWS, 2, classes=ROWS),
        "weight": lambda: torch.rand(ROWS),
        "ids": lambda: (labels(), labels()),
        "guide": lambda: (rows(), rows()),
        "margin": lambda: 0.1,
        "sizes": lambda: (COLUMNS, 8),
        "size_weights": lambda: (1.0, 0.5),
        "temperature": lambda: torch.tensor(0.5),
    },
}


def _with(draw, options, more):
    """Arguments of a probe and of each of `more`."""
    return lambda: draw() | options | {name: value() for name, value in more.items()}


def _bound(function, draw):
    return lambda: dict(inspect.signature(function).bind(*draw()).arguments)


def _plain() -> Iterator[Call]:
    """Functions that the doctor has no probe of, and other forms of those that it has."""

    def of(op, name="", **arguments):
        def draw():
            return {key: value() if callable(value) else value for key, value in arguments.items()}

        return Call(f"{op} {name}".strip(), getattr(tigon, op), draw)

    head = {"hidden": rows, "weight": lambda: 0.2 * rows(VOCABULARY, COLUMNS)}
    yield of("clip_grad_norm_", parameters=_with_gradient, max_norm=1.0)
    yield of("fp8_linear", x=lambda: rows(ROWS, 32), weight=lambda: rows(48, 32), bias=lambda: rows(48))
    yield of("dequantize", source=lambda: rows(4, 8).char(), scales=lambda: rows(4, 1))
    yield of("checkpoint_policy", save=("attention", "aten::convolution"))
    yield of("count_labels", target=labels, position_ids=lambda: _positions(ROWS), shift=1)
    linears = {"linears": lambda: [(rows(40, COLUMNS), rows(4, COLUMNS), rows(40, 4), 2.0, rows(40))]}
    yield of("lora_linears", x=rows, dropout=0.5, seed=lambda: torch.tensor([3]), **linears)
    own = {"fn": lambda: lambda lp, *w: lp * sum(w), "tensors": lambda: (rows(ROWS),), "shift": 1}
    own |= {name: _HEAD[name] for name in ("bias", "position_ids")}
    yield of("linear_loss", **head, target=labels, **own)
    several = {"heads": lambda: [rows(VOCABULARY, COLUMNS)] * 2, "lora": lambda: (_lora(), None)}
    several |= {name: _HEAD[name] for name in ("token_weight", "position_ids")}
    several |= {"coefficients": (1.0, 0.5), "shifts": (1, 2)}
    yield of("multi_token_loss", hidden=rows, labels=labels, **several)
    sizes = {"rows": 40, "hidden_size": 16, "vocab": 50, "device": "cpu"}
    for op in ("cross_entropy", "log_prob", "divergence", "loss"):
        yield of(f"linear_{op}_memory", **sizes)
    yield of("drafter_loss_memory", **sizes, teacher_hidden_size=24, teacher_vocab=60, steps=2)
    drawn = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "log_prob": True}
    yield of("sample", logits=lambda: 3 * rows(ROWS, VOCABULARY), seed=3, **drawn)
    yield of("linear_sample", **head, seed=3, **drawn, **{n: _HEAD[n] for n in ("bias", "lora", "softcap")})
    drawn = {name: lambda: torch.rand(ROWS) for name in ("temperature", "top_p", "min_p")}
    drawn |= {"seed": lambda: torch.arange(ROWS), "top_k": lambda: labels(classes=9)}
    yield of("linear_sample", "by row", **head, **drawn)
    yield of("linear_preference_memory", answers=4, tokens=10, hidden_size=16, vocab=50, device="cpu")
    yield of("linear_log_prob", "of several", **head, target=lambda: labels(ROWS, 3))
    yield of("linear_log_prob", "that matches", **head, target=labels, match="vllm", bias=_HEAD["bias"])

    def teacher():
        return rows(), rows(VOCABULARY, COLUMNS)

    for op in ("linear_kl_div", "linear_jsd", "linear_tvd"):
        yield of(op, "of a head", **head, labels=labels, teacher=lambda: (*teacher(), rows(VOCABULARY)))
        yield of(op, "of a list", **head, teacher=_top_k, labels=labels, hard=0.5)

    def reference():
        return rows(8, 6, COLUMNS), rows(VOCABULARY, COLUMNS)

    answers = {"hidden": lambda: rows(8, 6, COLUMNS), "target": lambda: labels(8, 6)}
    answers["weight"] = head["weight"]
    yield of("linear_preference", "of a head", **answers, ref=reference)
    yield of("linear_kto", "of a head", **answers, ref=reference, desirable=lambda: torch.rand(8) < 0.5)
    steps = {"hidden": lambda: [rows(), rows()], "weight": head["weight"], "teacher": teacher}
    steps |= {"shifts": (0, 1), "draft_ids": _draft_ids, "mask_outside": False, "outside": "renormalize"}
    yield of("drafter_loss", "of steps", **steps)
    row = {"query": lambda: rows(COLUMNS), "norm_weight": lambda: rows(COLUMNS)}
    yield of("attention_residual", "of a list", values=lambda: [rows(), rows()], **row)
    yield of("contrastive_loss", "of one", q=rows, d=rows, labels=lambda: labels(ROWS, classes=ROWS))
    turns = {"cos": lambda: rows(3, 2, 6, 16), "sin": lambda: rows(3, 2, 6, 16), "mrope_section": (2, 3, 3)}
    yield of("rope", "in sections", q=lambda: rows(2, 4, 6, 16), **turns)


def calls() -> list[Call]:
    """Every public function, some in several forms."""
    found = []
    for probe in doctor.probes():
        function = getattr(tigon, probe.op)
        draw = _bound(function, probe.draw)
        found.append(Call(probe.op, function, _with(draw, probe.options, {})))
        if probe.op in _MORE:
            found.append(Call(f"{probe.op} with all", function, _with(draw, probe.options, _MORE[probe.op])))
    return [*found, *_plain()]


def converted(value, dtype):
    """Its floating-point tensors in another dtype."""
    if isinstance(value, (tuple, list)):
        return type(value)(converted(one, dtype) for one in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def freed(x: torch.Tensor) -> torch.Tensor:
    """A copy whose storage is gone, as FSDP leaves it."""
    x = x.detach().clone()
    x.untyped_storage().resize_(0)
    return x


def tensors_of(value: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of an argument, those in tuples and lists too, and where it stands."""
    if isinstance(value, torch.Tensor):
        yield at, value
    elif isinstance(value, (tuple, list)):
        for i, one in enumerate(value):
            yield from tensors_of(one, f"{at}[{i}]")
