"""Recognition: equal functions in other words are found, near misses are not."""

import contextlib
import sys
import types

import pytest
import torch
from torch import nn
from variants import variant

from tigon.integrations.transformers.canonical import Unrecognised, canonical
from tigon.integrations.transformers.norms import plan_norm
from tigon.integrations.transformers.patterns.norms import NORMS
from tigon.integrations.transformers.patterns.rope import ROTARY, rotate_half
from tigon.integrations.transformers.recognition import match
from tigon.integrations.transformers.rope import plan_rotary


class Base(nn.Module):
    def __init__(self, size=24):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.epsilon = 1e-5


class OtherWords(Base):
    def helper(self, values):
        ms = torch.mean(torch.square(values), dim=-1, keepdim=True)
        return torch.pow(self.epsilon + ms, -0.5) * values

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Llama's norm in other words."""
        kept = inputs.dtype
        out = self.helper(inputs.to(dtype=torch.float32))
        out = out.to(kept)
        return out * self.scale


class Multiplied(Base):
    def forward(self, x):
        h = x.float()
        return self.scale * (h * torch.rsqrt((h * h).mean(-1, True) + self.epsilon)).type_as(x)


class Branches(Base):
    def forward(self, x):
        h = x.float() if x.dtype == torch.float16 else x.to(torch.float32)
        if self.epsilon > 0:
            h = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + self.epsilon)
        else:
            h *= (self.epsilon + h.square().mean(dim=-1, keepdim=True)).rsqrt()
        return self.scale * h.to(x.dtype)


class Llama(Base):
    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.scale * h.to(x.dtype)


@pytest.mark.parametrize("cls", [OtherWords, Multiplied, Branches, variant(Llama)])
def test_other_words_are_recognised(cls):
    found = match(canonical(cls.forward, cls), NORMS)
    assert found.structure.name == "llama"
    assert found.roles == {"weight": "scale", "eps": "epsilon"}


class Calls(OtherWords):
    def forward(self, x):
        return super().forward(x) * 2


class OtherHelper(OtherWords):
    def helper(self, values):
        return values


INVERSE = "torch.rsqrt(h.pow(2).mean(-1, keepdim=True)"
CHANGES = {
    "eps outside": (f"{INVERSE} + self.epsilon)", f"({INVERSE}) + self.epsilon)"),
    "another axis": ("mean(-1", "mean(-2"),
    "no upcast": ("x.float()", "x"),
    "cubed": ("pow(2)", "pow(3)"),
    "twice": ("self.scale *", "self.scale * self.scale *"),
    "centred": ("x.float()\n", "x.float()\n        h = h - h.mean(-1, keepdim=True)\n"),
    "rounded to 16 bits": ("h.to(x.dtype)", "h.to(torch.bfloat16)"),
    "sometimes": ("        return", "        if self.training:\n            h = h * 2\n        return"),
    "of all": ("mean(-1, keepdim=True)", "mean()"),
    "not kept": ("mean(-1, keepdim=True)", "mean(-1)"),
    "of an attribute": ("self.scale", "self.scale.data"),
    "decorated": ("    def forward", "    @torch.no_grad()\n    def forward"),
}
NEAR_MISSES = {name: variant(Llama, change) for name, change in CHANGES.items()}
NEAR_MISSES |= {"calls": Calls, "another helper": OtherHelper}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_not_recognised(name):
    cls, found = NEAR_MISSES[name], None
    with contextlib.suppress(Unrecognised):
        found = match(canonical(cls.forward, cls), NORMS)
    assert found is None


@pytest.mark.parametrize("structure", NORMS, ids=lambda structure: structure.name)
def test_every_row_of_the_table_is_distinct(structure):
    assert match(structure.expression, NORMS).structure == structure


def good(query, key, c, s, unsqueeze_dim=1):
    c = c.unsqueeze(unsqueeze_dim)
    s = s.unsqueeze(unsqueeze_dim)
    a = query * c + rotate_half(query) * s
    b = rotate_half(key) * s + key * c
    return a, b


def sizes_before(x, cos, sin):
    missing = x.dim() - cos.dim()
    sizes = cos.shape[0:1] + (1,) * missing + cos.shape[1:]
    if missing > 0:
        cos, sin = cos.view(*sizes), sin.view(*sizes)
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


def test_sizes_are_put_together_in_their_order():
    assert match(canonical(sizes_before), ROTARY).structure.name == "half, one tensor, cast back"
    behind = variant(sizes_before, ("(1,) * missing + cos.shape[1:]", "cos.shape[1:] + (1,) * missing"))
    assert match(canonical(behind), ROTARY) is None


def test_rotary_recognition():
    assert match(canonical(variant(good)), ROTARY).structure.name == "half"
    for change in (
        ("s\n    b", "-s\n    b"),
        ("rotate_half(key)", "-rotate_half(key)"),
        ("return a, b", "return b, a"),
        ("unsqueeze_dim=1", "unsqueeze_dim=2"),
    ):
        assert match(canonical(variant(good, change)), ROTARY) is None


NO_FILE = """
import torch
from torch import nn

class Hidden(nn.Module):
    def __init__(self, size=24):
        super().__init__()
        self.g = nn.Parameter(torch.ones(size))
        self.small = 1e-5
        self.other = 3.0

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.small)
        return FORMULA

def rotate(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)

def apply_it(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * SIGN * sin
"""


def without_file(formula="self.g * h.to(x.dtype)", sign="1"):
    """Classes of a module that has no source file, as compiled modules have none."""
    namespace = {"__name__": "no_file"}
    exec(NO_FILE.replace("FORMULA", formula).replace("SIGN", sign), namespace)
    return namespace


@pytest.mark.parametrize(
    ("formula", "rounding", "offset"),
    [
        ("self.g * h.to(x.dtype)", "llama", 0.0),
        ("(self.g * h).to(x.dtype)", "gemma", 0.0),
        ("((1 + self.g.float()) * h).to(x.dtype)", "gemma", 1.0),
    ],
)
def test_norm_without_source_is_probed(formula, rounding, offset):
    spec, _ = plan_norm(without_file(formula)["Hidden"]())
    assert (spec.weight, spec.eps) == ("g", "small")
    assert (spec.rounding, spec.offset) == (rounding, offset)


def test_norm_without_source_on_the_meta_device_is_probed():
    with torch.device("meta"):
        module = without_file()["Hidden"]()
    assert plan_norm(module)[0].eps == "small"
    assert module.g.is_meta


@pytest.mark.parametrize("formula", ["self.g * h.to(x.dtype) * 1.001", "h.to(x.dtype)", "x", "1"])
def test_probe_accepts_only_equality(formula):
    namespace = without_file(formula)
    namespace["HiddenNorm"] = type("HiddenNorm", (namespace["Hidden"],), {})
    assert "no source" in plan_norm(namespace["HiddenNorm"]())


def test_rotary_without_source_is_probed(monkeypatch):
    for sign, verdict in (("1", "tigon.rope (half)"), ("-1", "no source")):
        module = types.ModuleType("no_file")
        vars(module).update(without_file(sign=sign))
        monkeypatch.setitem(sys.modules, "no_file", module)
        found = plan_rotary(("no_file", "apply_it"), module.apply_it)
        assert verdict in (found if isinstance(found, str) else found[0])


def test_torch_rms_norm_is_known():
    spec, _ = plan_norm(nn.RMSNorm(8, eps=1e-5))
    assert (spec.rounding, spec.offset) == ("gemma", 0.0)  # once, to x's dtype
    assert "axes" in plan_norm(nn.RMSNorm((2, 8), eps=1e-5))
