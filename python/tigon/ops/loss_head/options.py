"""The options of a loss head: as its functions take them, and as type checkers see them in wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from typing_extensions import Self, TypedDict


class HeadOptions(NamedTuple):
    """The options that functions on a head share, as the caller gave them."""

    bias: torch.Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None
    ignore_index: int = -100
    shift: int | bool = False
    position_ids: torch.Tensor | None = None
    valid_rows: int | None = None
    chunk_rows: int | None = None
    max_workspace_mb: float | None = None
    logit_dtype: torch.dtype | None = None
    max_peak_mb: float | None = None

    @classmethod
    def of(cls, options: dict) -> Self:
        """The options of a head among those of a loss."""
        return cls(**{name: options[name] for name in cls._fields if name in options})

    def log_prob_options(self) -> dict:
        """The options of :func:`tigon.linear_log_prob` or its reference on shifted labels."""
        others = ("shift", "position_ids", "max_workspace_mb", "max_peak_mb")
        return {name: value for name, value in self._asdict().items() if name not in others}


class HeadOptionsDict(TypedDict, total=False):
    """The options that the modules of all losses of a head fix."""

    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float
    shift: int | bool
    chunk_rows: int | None
    max_peak_mb: float | None


class LinearCrossEntropyDict(HeadOptionsDict, total=False):
    """Of :func:`tigon.linear_cross_entropy`."""

    class_weight: torch.Tensor | None
    label_smoothing: float
    z_loss: float
    reduction: str
    outputs: tuple[str, ...] | None
    max_workspace_mb: float | None
    keep_mb: float | None
    logit_dtype: torch.dtype | None


class LinearTVDDict(HeadOptionsDict, total=False):
    """Of :func:`tigon.linear_tvd`."""

    soft: float
    hard: float
    teacher_softcap: float | None
    teacher_logit_scale: float
    reduction: str
    outputs: tuple[str, ...]


class LinearKLDivDict(LinearTVDDict, total=False):
    """Of :func:`tigon.linear_kl_div`."""

    reverse: bool


class LinearJSDDict(LinearTVDDict, total=False):
    """Of :func:`tigon.linear_jsd`."""

    beta: float


class AnswersDict(HeadOptionsDict, total=False):
    """Options of all losses of answers; their calls may also pass any of them."""

    bias: torch.Tensor | None
    lora: tuple[torch.Tensor, torch.Tensor, float] | None
    valid_rows: int | None
    max_workspace_mb: float | None
    denominator: float | torch.Tensor | None


class LinearPreferenceDict(AnswersDict, total=False):
    """Of :func:`tigon.linear_preference`."""

    nll_target: torch.Tensor | None
    kind: str
    beta: float
    average: bool | None
    label_smoothing: float
    gamma: float
    tau: float
    nll: float | None


class LinearKTODict(AnswersDict, total=False):
    """Of :func:`tigon.linear_kto`."""

    kind: str
    beta: float
    average: bool
    weights: tuple[float, float]


class LinearPolicyDict(AnswersDict, total=False):
    """Of :func:`tigon.linear_policy`."""

    kind: str
    level: str
    clip: tuple[float, float]
    delta: float | None
    tau: tuple[float, float]
    gamma: tuple[float, float, float, float]
    kl: float
    kl_estimator: str
    kl_corrected: bool
    entropy: float
    entropy_denominator: float | torch.Tensor | None
    normalise: str


class MultiTokenDict(TypedDict, total=False):
    """Of :func:`tigon.multi_token_loss`."""

    coefficients: Sequence[float] | None
    shifts: Sequence[int] | None
    lora: Sequence[tuple[torch.Tensor, torch.Tensor, float] | None] | None
    denominator: float | torch.Tensor | Sequence[float | torch.Tensor] | None
    valid_rows: Sequence[int | None] | None
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    logit_scale: float
    temperature: float
    z_loss: float
    token_weight: torch.Tensor | None
    reduction: str
    position_ids: torch.Tensor | None
    chunk_rows: int | None
    max_workspace_mb: float | None
    max_peak_mb: float | None
    logit_dtype: torch.dtype | None
