"""Tokens drawn from logits, or from hidden states. Contract: ``csrc/tigon/ops/sample/sample.h``."""

from __future__ import annotations

import math

import torch

from tigon._op import has_kernel, is_transformed, raw
from tigon.error import check
from tigon.ops import arguments, philox
from tigon.ops.loss_head import operands
from tigon.ops.loss_head.matmuls import compute_logits
from tigon.ops.loss_head.options import HeadOptions
from tigon.ops.loss_head.plan import padded
from tigon.ops.loss_head.reference import plain_logits

_INTEGERS, _FLOATS = (torch.int64, torch.int32), (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_STREAM = 0x7361  # stream of the random counters
_LOGITS_BYTES = 256 << 20  # bytes of the logits of a chunk in linear_sample


def _of_rows(value, like: torch.Tensor):
    """A number, or one number a row in a shape that broadcasts over the row's entries."""
    return value.reshape(-1, 1).to(like.device) if isinstance(value, torch.Tensor) else value


def _share_threshold(z, p, kept, top_p):
    """The smallest z in the smallest set of largest kept z that has the share top_p of the kept ones."""
    order = torch.where(kept, z, -torch.inf).sort(-1, descending=True)
    mass = torch.where(kept, p, 0.0).gather(-1, order.indices).cumsum(-1)
    wanted = torch.clamp(torch.as_tensor(top_p, dtype=z.dtype, device=z.device), 0.0, 1.0) * mass[:, -1:]
    last = (mass < wanted).sum(-1, keepdim=True).clamp(max=z.shape[-1] - 1)
    return order.values.gather(-1, last)


def reference(
    logits, *, temperature=1.0, top_k=None, top_p=None, min_p=None, seed=None, log_prob=False, first_row=0
):
    """Compute the same formula with PyTorch operations (any float dtype, any device)."""
    lead, columns = logits.shape[:-1], logits.shape[-1]
    z = logits.reshape(-1, columns)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    seed = philox.draw_seed(z) if seed is None else torch.as_tensor(seed, device=z.device)
    temperature, top_k, top_p, min_p = (_of_rows(v, z) for v in (temperature, top_k, top_p, min_p))
    temperature = torch.as_tensor(temperature, dtype=z.dtype, device=z.device).expand(len(z), 1)
    greedy = ~(temperature > 0)
    scaled = z / torch.where(greedy, 1.0, temperature)
    log_p = scaled.log_softmax(-1)
    kept = torch.ones_like(z, dtype=torch.bool)
    if top_k is not None:
        count = torch.as_tensor(top_k, device=z.device).expand(len(z), 1)
        count = torch.where(count < 1, columns, count).clamp(max=columns)
        kept = z >= z.sort(-1, descending=True).values.gather(-1, count - 1)
    if top_p is not None:
        bounded = torch.as_tensor(top_p, device=z.device) < 1
        kept &= ~bounded | (z >= _share_threshold(z, log_p.exp(), kept, top_p))
    if min_p is not None:
        bound = torch.as_tensor(min_p, dtype=z.dtype, device=z.device).clamp(0.0, 1.0).log()
        kept &= scaled >= scaled.amax(-1, keepdim=True) + bound
    rows = torch.arange(first_row, first_row + len(z), device=z.device)
    words = philox.words_of_matrix(rows if seed.numel() == 1 else 0 * rows, columns, _STREAM, seed)
    exponential = -torch.log1p(-((words.to(z.dtype) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24))
    score = torch.where(greedy, scaled, torch.where(kept, scaled - exponential.log(), -torch.inf))
    ids = score.argmax(-1)
    picked = log_p.gather(-1, ids[:, None])[:, 0]
    finite = z.amax(-1).isfinite()  # NaN is the largest
    ids, picked = torch.where(finite, ids, -1), torch.where(finite, picked, torch.nan)
    return (ids.view(lead), picked.view(lead)) if log_prob else ids.view(lead)


def _fake(logits, bias, temperatures, top_ks, top_ps, min_ps, seed, *options):
    ids = logits.new_empty(logits.shape[0], dtype=torch.int64)
    return ids, logits.new_empty(logits.shape[0] if options[-1] else 0, dtype=torch.float32)


_sample = raw("sample", _fake, "sample")


class _Choice:
    """The options of a draw, checked: numbers, and tensors of one for each row."""

    def __init__(self, op, x, lead, temperature, top_k, top_p, min_p, seed, log_prob):
        arguments.check_booleans(op, log_prob=log_prob)
        self.lead, self.log_prob = lead, log_prob
        numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        self.given = {name: value for name, value in numbers.items() if value is not None}
        check(op, temperature is not None, "temperature must be a number or {}, got None", tuple(lead))
        for name, value in self.given.items():
            if isinstance(value, torch.Tensor):
                self.given[name] = self._checked_rows(op, name, value, x)
            elif name == "top_k":
                arguments.check_integers(op, least=1, top_k=value)
            else:
                arguments.check_numbers(op, **{name: value})
                if name == "temperature":
                    check(op, 0 <= value < math.inf, "temperature must be >= 0 and finite, got {}", value)
                elif name == "top_p":
                    check(op, 0 < value <= 1, "top_p must be in (0, 1] (or None), got {}", value)
                else:
                    check(op, 0 <= value <= 1, "min_p must be in [0, 1] (or None), got {}", value)
        self.seed = philox.seed_of(op, seed, x, lead)

    def _checked_rows(self, op, name, value, x):
        arguments.check_dense(op, name, value)
        arguments.check_stored(op, name, value)
        arguments.check_constant(op, name, value)
        dtypes = _INTEGERS if name == "top_k" else _FLOATS
        check(op, value.dtype in dtypes, name + " must be one of {}, got {}", dtypes, value.dtype)
        if value.dim() == 0:
            value = value.expand(self.lead)
        arguments.check_like(op, name, value, self.lead, x.device)
        return value

    def reference(self, logits):
        return reference(logits, **self.given, seed=self.seed, log_prob=self.log_prob)

    def draw(self, logits, bias=None, scale=1.0, softcap=None, rows=None, first_row=0):
        """Tokens of rows of logits, which are those of the slice `rows`, and their log-probabilities."""
        rows = rows or slice(None)

        def of_rows(name, dtype):
            value = self.given.get(name)
            return value.reshape(-1)[rows].to(dtype) if isinstance(value, torch.Tensor) else None

        def number(name, default):
            value = self.given.get(name)
            return default if value is None or isinstance(value, torch.Tensor) else value

        defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        by_row = [of_rows(name, torch.int64 if name == "top_k" else torch.float32) for name in defaults]
        numbers = [number(name, default) for name, default in defaults.items()]
        seed = self.seed if self.seed.numel() == 1 else self.seed[rows]
        head = scale, 0.0 if softcap is None else softcap
        return _sample(logits, bias, *by_row, seed, *head, *numbers, first_row, self.log_prob)

    def results(self, ids, log_prob):
        return (ids.view(self.lead), log_prob.view(self.lead)) if self.log_prob else ids.view(self.lead)


@arguments.called()
@torch.no_grad()
def sample(
    logits: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None,
    min_p: float | torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    log_prob: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw one token from every row of logits.

    Tokens are drawn from ``softmax(logits / temperature)`` after top_k, then top_p, then min_p remove tokens.
    Nothing is sorted, and the host does not wait for the device.

    Args:
        logits: ``[..., V]`` float32, bfloat16 or float16, any strides with dense rows (others are copied).
            float64 runs the eager reference.
        temperature: >= 0; 0 takes the largest logit. This and the next three may be tensors ``[...]``, one
            value a row, on logits' device. Their values are not checked; a value out of range removes no
            token.
        top_k: keep this many of the largest logits, >= 1; tensors int64 or int32.
        top_p: in (0, 1]: of the logits that top_k keeps, keep the fewest largest ones whose total probability
            is at least this share.
        min_p: in [0, 1]: remove tokens whose probability is less than this times the largest one.
        seed: an int, or int64 of one element or ``[...]``, on logits' device; ``None`` draws one from
            PyTorch's generator. The same seed draws the same tokens. With one seed a row, a row's token does
            not depend on its position in the batch. A CUDA graph replays an int as a constant; a tensor can
            change between replays.
        log_prob: return log-probabilities too.

    Returns:
        int64 ``[...]``; with `log_prob` also float32 ``[...]``, ``log_softmax(logits / temperature)`` over
        all V tokens at the drawn token (at temperature 0 that of temperature 1). A row that contains NaN or
        infinity, or only -infinity, gets token -1 and NaN. Equal logits are kept or removed together. The
        result is bitwise deterministic for a given seed.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit.

    Source: the Gumbel-max trick (Maddison et al. 2014, arXiv:1411.0030); top-k (Fan et al. 2018,
    arXiv:1805.04833); top-p (Holtzman et al. 2020, arXiv:1904.09751); min-p (Nguyen et al. 2025,
    arXiv:2407.01082).
    """
    op = "sample"
    arguments.check_float(op, "logits", logits)
    arguments.check_dense(op, "logits", logits)
    check(op, logits.dim() >= 1 and logits.shape[-1] >= 1, "logits must be [..., V], got {}", logits.shape)
    choice = _Choice(op, logits, logits.shape[:-1], temperature, top_k, top_p, min_p, seed, log_prob)
    if not has_kernel(op, logits=logits):
        return choice.reference(logits)
    return choice.results(*choice.draw(logits))


@arguments.called()
@torch.no_grad()
def linear_sample(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    logit_dtype: torch.dtype | None = None,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None,
    min_p: float | torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    log_prob: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for every hidden state: :func:`tigon.sample` of ``hidden @ weight.T``.

    At most 256 MiB of logits are in memory at a time.

    Args:
        hidden: ``[..., H]`` float32, bfloat16 or float16. float64 runs the eager reference.
        weight: ``[V, H]``, converted to hidden's dtype.
        bias, softcap, logit_scale, lora, logit_dtype: options of the head, as in
            :func:`tigon.linear_log_prob`, which gives the drawn tokens the log-probabilities returned here.
        temperature, top_k, top_p, min_p, seed, log_prob: as :func:`tigon.sample`; tensors are ``[...]``.

    Returns:
        As :func:`tigon.sample`.

    Raises:
        tigon.Error: shapes, dtypes, devices or options do not fit.
    """
    op = "linear_sample"
    arguments.check_float(op, "hidden", hidden)
    arguments.check_dense(op, "hidden", hidden)
    lead = hidden.shape[:-1]
    labels = torch.empty(lead, dtype=torch.int64, device=hidden.device)
    head = HeadOptions(bias, softcap, logit_scale, lora=lora, logit_dtype=logit_dtype)
    operands.check_head(op, hidden, weight, labels, head)
    hidden = operands.autocast(hidden)
    wide = operands.wide_logits(op, logit_dtype, hidden)
    choice = _Choice(op, hidden, lead, temperature, top_k, top_p, min_p, seed, log_prob)
    plain = is_transformed() or not has_kernel(op, hidden=hidden, beside=operands.float_parts(head))
    if plain:  # vmap has no rule for operators that write into a workspace
        return choice.reference(plain_logits(hidden, weight, head))
    weight, rows = weight.to(hidden.dtype), hidden.reshape(-1, hidden.shape[-1])
    a, b, scale = (None, None, 1.0) if lora is None else lora
    pair = [None if t is None else t.to(hidden.dtype) for t in (a, b)]
    vocab, dtype = weight.shape[0], torch.float32 if wide else hidden.dtype
    chunk = max(_LOGITS_BYTES // (padded(vocab) * dtype.itemsize), 1)
    space = rows.new_empty(min(chunk, rows.shape[0]), padded(vocab), dtype=dtype)[:, :vocab]
    draws = []
    for begin in range(0, rows.shape[0], chunk):
        part = slice(begin, min(begin + chunk, rows.shape[0]))
        logits = space[: part.stop - begin]
        compute_logits(logits, rows[part], weight, (*pair, scale))
        draws.append(choice.draw(logits, bias, logit_scale, softcap, part, begin))
    if not draws:
        draws = [(labels.reshape(-1), rows.new_empty(0, dtype=torch.float32))]
    return choice.results(*(torch.cat(parts) for parts in zip(*draws, strict=True)))
