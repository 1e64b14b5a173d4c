"""Whether this installation computes what it should: every op, forward and backward, beside its reference.

Run as ``python -m tigon doctor``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import tigon
from tigon.environment import env
from tigon.ops import hyper_connection

# An op may be off by this many times its plain formulation's own error against float64, plus a few units in
# the last place (the tests are stricter and larger; this finds a broken build, not a lost bit).
FACTOR, ULPS = 4.0, 2.0
ROWS, COLUMNS, VOCABULARY = 24, 96, 203


@dataclass(frozen=True)
class Probe:
    """How to call one op, and its formula in plain PyTorch (of any float dtype)."""

    op: str
    draw: Callable[[], tuple]  # its arguments
    plain: Callable
    options: dict = field(default_factory=dict)
    fixed: tuple[int, ...] = ()  # float arguments that get no gradient


@dataclass(frozen=True)
class Finding:
    """One op on one device in one dtype: ``problem`` is empty when it is in order."""

    op: str
    device: str
    dtype: str
    error: float  # largest error of results and gradients against float64, relative to their size
    allowed: float
    problem: str = ""

    @property
    def status(self) -> str:
        """The word in the table."""
        return "FAILED" if self.problem else "ok"


def _rows(*shape):
    return torch.randn(*(shape or (ROWS, COLUMNS)))


def _angles():
    half = torch.arange(6.0)[:, None] * torch.rand(8)
    return torch.cat((half, half), -1)


def _labels():
    return torch.randint(0, VOCABULARY, (ROWS,)).masked_fill(torch.arange(ROWS) % 5 == 0, -100)


def _rope():
    angles = _angles()
    return _rows(2, 4, 6, 16), _rows(2, 2, 6, 16), angles.cos(), angles.sin()


def _gated():
    return _rows(), _rows()


def _normed():
    return _rows(), 1 + 0.1 * _rows(COLUMNS)


def _affine():
    return *_normed(), 0.1 * _rows(COLUMNS)


def _head():
    return _rows(), 0.2 * _rows(VOCABULARY, COLUMNS), _labels()


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _plain_rms_norm(x, weight):
    h = _wide(x)
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _plain_rope(q, k, cos, sin):
    def turned(x):
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), -1) * sin

    return turned(q), turned(k)


def _plain_head(hidden, weight, target):
    return F.cross_entropy(_wide(hidden @ weight.T), target)


def _plain_log_probs(hidden, weight, target):
    log_p = torch.log_softmax(_wide(hidden @ weight.T), -1)
    picked = log_p.gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(target == -100, 0.0, picked)


def _plain_qk_norm_rope(q, k, q_weight, k_weight, cos, sin):
    return _plain_rope(_plain_rms_norm(q, q_weight), _plain_rms_norm(k, k_weight), cos, sin)


def _qk_norm_rope():
    q, k, cos, sin = _rope()
    return q, k, 1 + 0.1 * _rows(16), 1 + 0.1 * _rows(16), cos, sin


def _plain_add_rms_norm(x, residual, weight):
    total = x + residual
    return _plain_rms_norm(total, weight), total


def _plain_poly_norm(x, w, b):
    powers = (x**3, x**2, x)
    return sum(w[i] * p / (p.square().mean(-1, keepdim=True) + 1e-6).sqrt() for i, p in enumerate(powers)) + b


def _plain_gated(x, gate, weight):
    return (_wide(_plain_rms_norm(x, weight)) * F.silu(_wide(gate))).to(x.dtype)


def _plain_swiglu_oai(x):
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _adapted():
    return _rows(), _rows(40, COLUMNS) / 10, _rows(4, COLUMNS) / 10, _rows(40, 4), 2.0


def _plain_lora(x, weight, a, b, scale=1.0):
    return x @ weight.T + x @ a.T @ b.T * scale


def _experts():
    gate_up, down = _rows(3, 2 * COLUMNS, COLUMNS) / 8, _rows(3, COLUMNS, COLUMNS) / 8
    return _rows(), gate_up, down, torch.randint(0, 4, (ROWS, 2)), _rows(ROWS, 2)


def _sorted_experts():
    x, gate_up, down, _, weights = _experts()
    return x, gate_up, down, torch.tensor([1, 1, ROWS - 1], dtype=torch.int32), weights[:, 0]


def _plain_experts(x, gate_up, down, ids, weights):
    """Every token through every expert, weighted with what its choices say."""
    if ids.dim() == 1:
        rows = torch.arange(len(x), device=x.device)
        ids, weights = torch.searchsorted(ids, rows, right=True)[:, None], weights[:, None]
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, dim=-1)
    y = torch.einsum("tei,ehi->teh", F.silu(gate) * up, down)
    chosen = F.one_hot(ids, len(gate_up) + 1)[..., :-1].to(weights.dtype)
    return torch.einsum("teh,te->th", y, torch.einsum("tke,tk->te", chosen, weights))


def _streams():
    return _rows(ROWS, 4, COLUMNS), _rows(24, 4 * COLUMNS) / 16, _rows(24), _rows(3)


def _after_layer():
    return _rows(ROWS, 4, COLUMNS), _rows(), _rows(ROWS, 4), _rows(ROWS, 4, 4)


def _distributions():
    return 2 * _rows(ROWS, VOCABULARY), 2 * _rows(ROWS, VOCABULARY)


def _log_softmax(x):
    return torch.log_softmax(_wide(x), -1)


def _plain_kl_div(student, teacher):
    return F.kl_div(_log_softmax(student), _log_softmax(teacher), log_target=True, reduction="batchmean")


def _plain_jsd(student, teacher):
    q, p = _log_softmax(student), _log_softmax(teacher)
    m = torch.log((q.exp() + p.exp()) / 2)
    return ((p.exp() * (p - m)).sum() + (q.exp() * (q - m)).sum()) / 2 / ROWS


def _plain_modulated(x, weight, scale, shift):
    return (_wide(_plain_rms_norm(x, weight)) * (1 + _wide(scale)) + _wide(shift)).to(x.dtype)


def _earlier_values():
    return _rows(3, ROWS, COLUMNS), 0.2 * _rows(COLUMNS), 1 + 0.1 * _rows(COLUMNS)


def _plain_attention_residual(values, query, norm_weight):
    scores = _wide(_plain_rms_norm(values, norm_weight)) @ _wide(query)
    return (scores.softmax(0)[..., None] * _wide(values)).sum(0).to(values.dtype)


def _two_heads():
    return 3 * _rows(), _rows(VOCABULARY, COLUMNS), 3 * _rows(ROWS, VOCABULARY)


def _of_heads(plain):
    return lambda hidden, weight, teacher: plain(F.linear(_wide(hidden), _wide(weight)), teacher)


def _plain_tvd(student, teacher):
    return (_log_softmax(student).exp() - _log_softmax(teacher).exp()).abs().sum() / 2 / ROWS


def _drafter():
    return 3 * _rows(), _rows(VOCABULARY, COLUMNS), (3 * _rows(), _rows(VOCABULARY, COLUMNS))


def _plain_drafter(hidden, weight, teacher):
    logits = (_wide(F.linear(x, w)) for x, w in ((hidden, weight), teacher))
    student, other = map(_log_softmax, logits)
    return (other.exp() * (other - student)).sum() / ROWS


def _plain_contrastive(q, d):
    similarities = _wide(F.normalize(q, dim=-1) @ F.normalize(d, dim=-1).T) / 0.5
    of = torch.arange(len(q), device=q.device)
    return (F.cross_entropy(similarities, of) + F.cross_entropy(similarities.T, of)) / 2


def _answers(rows):
    return -_rows(rows, 17).abs(), torch.rand(rows, 17) < 0.8


def _plain_preference(log_prob, mask):
    sums = torch.where(mask, _wide(log_prob), 0.0).sum(-1)
    rewards = (0.1 * sums).detach()
    margin = rewards[:4] - rewards[4:]
    nll = -torch.where(mask, _wide(log_prob), 0.0)[:4].sum() / mask[:4].sum()
    return -F.logsigmoid(0.1 * (sums[:4] - sums[4:])).mean(), sums.detach(), rewards, nll.detach(), margin


def _kto():
    log_prob, mask = _answers(7)
    return log_prob, torch.arange(7) % 3 == 0, mask


def _plain_kto(log_prob, desirable, mask):
    sums = torch.where(mask, _wide(log_prob), 0.0).sum(-1)
    losses = torch.sigmoid(-0.1 * torch.where(desirable, sums, -sums))
    return losses.mean(), sums.detach(), (0.1 * sums).detach()


def _policy():
    log_prob, mask = _answers(7)
    return log_prob, _rows(7), mask


def _plain_policy(log_prob, advantage, mask):
    ratio = torch.exp(_wide(log_prob) - _wide(log_prob).detach())
    loss = torch.where(mask, -ratio * _wide(advantage)[:, None], 0.0).sum() / mask.sum()
    return loss, torch.zeros_like(ratio)


def _answers_of_head(answers):
    target = torch.randint(0, VOCABULARY, (answers, 6)).masked_fill(torch.rand(answers, 6) < 0.2, -100)
    return _rows(answers, 6, COLUMNS), 0.2 * _rows(VOCABULARY, COLUMNS), target


def _kto_of_head():
    return *_answers_of_head(7), torch.arange(7) % 3 == 0


def _policy_of_head():
    return *_answers_of_head(7), _rows(7)


def _plain_linear_preference(hidden, weight, target):
    return _plain_preference(_plain_log_probs(hidden, weight, target), target != -100)


def _plain_linear_kto(hidden, weight, target, desirable):
    return _plain_kto(_plain_log_probs(hidden, weight, target), desirable, target != -100)


def _plain_linear_policy(hidden, weight, target, advantage):
    log_p = torch.log_softmax(_wide(hidden @ weight.T), -1)
    picked = _plain_log_probs(hidden, weight, target)
    loss, clipped = _plain_policy(picked, advantage, target != -100)
    entropy = torch.where(target == -100, 0.0, -(log_p.exp() * log_p).sum(-1))
    return loss, picked.detach(), entropy.detach(), clipped


def _plain_route(logits, top_k):
    weights, ids = torch.softmax(_wide(logits), -1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


PROBES = (
    Probe("rms_norm", _normed, _plain_rms_norm),
    Probe("layer_norm", _affine, lambda x, w, b: F.layer_norm(x, (COLUMNS,), w, b)),
    Probe("add_rms_norm", lambda: (_rows(), *_normed()), _plain_add_rms_norm),
    Probe("gated_rms_norm", lambda: (_rows(), *_normed()), _plain_gated),
    Probe("modulated_rms_norm", lambda: (*_normed(), 0.1 * _rows(COLUMNS), 0.1 * _rows(COLUMNS)),
          _plain_modulated),
    Probe("attention_residual", _earlier_values, _plain_attention_residual),
    Probe("group_norm", lambda: (_rows(4, 8, 12), 2, _rows(8), _rows(8)), F.group_norm),
    Probe("dyt", lambda: (_rows(), torch.tensor([0.7]), _rows(COLUMNS), _rows(COLUMNS)),
          lambda x, alpha, w, b: w * torch.tanh(alpha * x) + b),
    Probe("poly_norm", lambda: (_rows(), _rows(3), _rows(1)), _plain_poly_norm),
    Probe("embedding", lambda: (torch.randint(0, 9, (ROWS,)), _rows(9, COLUMNS)), F.embedding),
    Probe("swiglu", _gated, lambda gate, up: F.silu(gate) * up),
    Probe("geglu", _gated, lambda gate, up: F.gelu(gate, approximate="tanh") * up, {"approximate": "tanh"}),
    Probe("reglu", _gated, lambda gate, up: F.relu(gate) * up),
    Probe("swiglu_oai", lambda: (_rows(),), _plain_swiglu_oai),
    Probe("lora_linear", _adapted, _plain_lora),
    Probe("experts", _experts, _plain_experts),
    Probe("grouped_mlp", _sorted_experts, _plain_experts),
    Probe("route", lambda: (torch.rand(ROWS, COLUMNS).argsort(-1) / 16, 3), _plain_route),  # no ties
    Probe("hyper_connection_pre", _streams, hyper_connection.reference_pre),
    Probe("hyper_connection_post", _after_layer, hyper_connection.reference_post),
    Probe("rope", _rope, _plain_rope, fixed=(2, 3)),
    Probe("qk_norm_rope", _qk_norm_rope, _plain_qk_norm_rope, fixed=(4, 5)),
    Probe("kl_div", _distributions, _plain_kl_div, fixed=(1,)),
    Probe("jsd", _distributions, _plain_jsd, fixed=(1,)),
    Probe("tvd", _distributions, _plain_tvd, fixed=(1,)),
    Probe("cross_entropy", lambda: (3 * _rows(ROWS, VOCABULARY), _labels()),
          lambda logits, target: F.cross_entropy(_wide(logits), target)),
    Probe("linear_cross_entropy", _head, _plain_head),
    Probe("linear_log_prob", _head, _plain_log_probs),
    Probe("preference_loss", lambda: _answers(8), _plain_preference),
    Probe("kto_loss", _kto, _plain_kto),
    Probe("policy_loss", _policy, _plain_policy, fixed=(1,)),
    Probe("linear_preference", lambda: _answers_of_head(8), _plain_linear_preference),
    Probe("linear_kto", _kto_of_head, _plain_linear_kto),
    Probe("linear_policy", _policy_of_head, _plain_linear_policy, fixed=(3,)),
    *(Probe(f"linear_{op}", _two_heads, _of_heads(plain), fixed=(2,))
      for op, plain in (("kl_div", _plain_kl_div), ("jsd", _plain_jsd), ("tvd", _plain_tvd))),
    Probe("drafter_loss", _drafter, _plain_drafter, fixed=(2,)),
    Probe("contrastive_loss", lambda: (_rows(), _rows()), _plain_contrastive,
          {"symmetric": True, "temperature": 0.5}),
)  # fmt: skip
HELPERS = {
    "clip_grad_norm_",
    "count_labels",
    "linear_cross_entropy_memory",
    "linear_divergence_memory",
    "linear_log_prob_memory",
    "linear_loss",
    "linear_preference_memory",
    "lora_linears",
    "multi_token_loss",
}  # exported beside the ops


def ops() -> list[str]:
    """The ops that this version exports."""
    functions = {name: vars(tigon).get(name) for name in tigon.__all__ if name not in HELPERS}
    return [n for n, f in functions.items() if (getattr(f, "__module__", "") or "").startswith("tigon.ops.")]


def probes() -> list[Probe]:
    """``PROBES``; every other op of one tensor ``x`` is held to the ``reference`` of its module."""
    found = list(PROBES)
    for op in sorted(set(ops()) - {probe.op for probe in PROBES}):
        function = getattr(tigon, op)
        reference = getattr(sys.modules.get(function.__module__), "reference", None)
        if reference is not None and list(inspect.signature(function).parameters) == ["x"]:
            found.append(Probe(op, lambda: (_rows(),), reference))
    return found


def examine(devices=None, dtypes=(torch.float32, torch.bfloat16)) -> list[Finding]:
    """Every probed op that this version has, on every device."""
    if devices is None:
        devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    known = ops()
    present = [probe for probe in probes() if probe.op in known]
    return [_examine(probe, device, dtype) for probe in present for device in devices for dtype in dtypes]


def unprobed() -> list[str]:
    """Ops without a probe."""
    return sorted(set(ops()) - {probe.op for probe in probes()})


def _examine(probe: Probe, device: str, dtype: torch.dtype) -> Finding:
    label = str(dtype).removeprefix("torch.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = [_placed(x, device, dtype) for x in probe.draw()]
    try:
        function = functools.partial(getattr(tigon, probe.op), **probe.options)
        got, again = (_run(function, probe, drawn) for _ in range(2))
        plain = _run(probe.plain, probe, drawn)
        exact = _run(probe.plain, probe, [_placed(x, device, torch.float64) for x in drawn])
    except Exception as error:
        return Finding(probe.op, device, label, float("nan"), 0.0, f"{type(error).__name__}: {error}")
    worst, allowed = 0.0, 0.0
    for one, two, stock, wanted in zip(got, again, plain, exact, strict=True):
        size = wanted.abs().max().item() or 1.0
        error = (one.double() - wanted).abs().max().item() / size
        bound = FACTOR * (stock.double() - wanted).abs().max().item() / size + ULPS * torch.finfo(dtype).eps
        if not error <= bound:  # NaN too
            return Finding(probe.op, device, label, error, bound, "differs from the reference")
        if not torch.equal(one, two):
            return Finding(probe.op, device, label, error, bound, "two runs differ")
        if error >= worst:
            worst, allowed = error, bound
    return Finding(probe.op, device, label, worst, allowed)


def _placed(x, device, dtype):
    if isinstance(x, tuple):
        return tuple(_placed(one, device, dtype) for one in x)
    if not torch.is_tensor(x):
        return x
    return x.to(device, dtype) if x.is_floating_point() else x.to(device)


def _run(function, probe, drawn) -> list[torch.Tensor]:
    """Results and gradients."""
    arguments = [
        x.detach().requires_grad_(x.is_floating_point() and i not in probe.fixed) if torch.is_tensor(x) else x
        for i, x in enumerate(drawn)
    ]
    results = function(*arguments)
    results = [y for y in (results if isinstance(results, tuple) else (results,)) if y is not None]
    leaves = [x for x in arguments if torch.is_tensor(x) and x.requires_grad]
    slope = functools.partial(torch.linspace, -0.5, 1.0)  # whose sum is not 0
    slopes = [slope(y.numel(), device=y.device, dtype=y.dtype).view(y.shape) for y in results]
    if results[0].dim() == 0:
        slopes = [torch.ones_like(y) for y in results]
    pairs = [(y, slope) for y, slope in zip(results, slopes, strict=True) if y.requires_grad]
    outputs, upstream = zip(*pairs, strict=True)
    return [*(y.detach() for y in results), *torch.autograd.grad(outputs, leaves, upstream)]


def table(findings: list[Finding]) -> str:
    """The findings as text, problems last."""
    head = f"{'op':<22} {'device':<7} {'dtype':<9} {'error':>9} {'allowed':>9}  status"
    row = "{0.op:<22} {0.device:<7} {0.dtype:<9} {0.error:>9.1e} {0.allowed:>9.1e}  {0.status}"
    problems = [f"{f.op} on {f.device} in {f.dtype}: {f.problem}" for f in findings if f.problem]
    return "\n".join([head, *map(row.format, findings), *problems])


def main() -> int:
    """Environment, table, verdict; 0 when everything is in order."""
    print(env(), end="\n\n")
    findings = examine()
    print(table(findings))
    if unprobed():
        print(f"without a probe: {', '.join(unprobed())}")
    broken = [f for f in findings if f.problem]
    print(f"\n{len(findings) - len(broken)} of {len(findings)} probes in order")
    if broken:
        print("tigon does not work here as it should: please report this output", file=sys.stderr)
    return int(bool(broken))
