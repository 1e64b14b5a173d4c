"""Arguments of a training call as graphs take them: padded on the right to few lengths."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tigon.graphs.watch import settings


class Eagerly(Exception):
    """Raised if a call must run without a graph, with the reason if the report should say one."""

    def __init__(self, reason: str | None = None):
        super().__init__(reason)
        self.reason = reason


# Arguments of one value for each token.
_PER_TOKEN = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
# Arguments of packed rows, for kernels that read no mask. Their sizes differ in each batch.
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def bucket(length: int, lengths: Sequence[int] = ()) -> int:
    """The length that a batch is padded to: the next of `lengths`, or of four steps in each doubling."""
    for given in lengths:
        if length <= given:
            return given
    if lengths or length <= 32:
        return length if lengths else 32
    step = 1 << max(length - 1, 1).bit_length() - 3
    return -(-length // step) * step


@dataclass
class Given:
    """Tensors and plain values of a call."""

    tensors: dict[str, torch.Tensor]
    options: dict[str, object]
    length: int = 0  # tokens of a row, 0 if nothing is padded
    padded: int = 0

    @property
    def ignored(self) -> int:
        """The label of rows that do not count."""
        return self.options.get("ignore_index", -100)

    def size(self, value: torch.Tensor) -> tuple[int, ...]:
        """The sizes of a tensor after padding."""
        padded = self.length and value.ndim == 2
        return (*value.shape[:-1], self.padded) if padded else tuple(value.shape)

    def cut(self, result: torch.Tensor) -> torch.Tensor:
        """A result of each token, or of all tokens in one dimension, without those of the padding."""
        if not self.length:
            return result
        rows = self.tensors["input_ids"].shape[0]
        if result.ndim > 1 and result.shape[:2] == (rows, self.padded):
            return result[:, : self.length]
        if result.ndim == 1 and result.numel() == rows * self.padded:
            return result.view(rows, self.padded)[:, : self.length].reshape(-1)
        return result

    def key(self, device: str) -> tuple:
        """The key of a graph: all calls of one graph have it in common."""
        tensors = tuple((name, self.size(t), t.dtype) for name, t in sorted(self.tensors.items()))
        options = tuple((name, type(value), value) for name, value in sorted(self.options.items()))
        return tensors, options, bool(self.length), settings(device)

    def copy_to(self, inputs: dict[str, torch.Tensor], padding: int) -> None:
        """Copy the tensors into a graph's inputs, padded on the right with the token `padding`."""
        for name, value in self.tensors.items():
            static = inputs[name]
            if static.shape == value.shape:
                static.copy_(value, non_blocking=True)
                continue
            static[..., : self.length].copy_(value, non_blocking=True)
            rest = static[..., self.length :]
            if name == "position_ids":
                steps = torch.arange(1, rest.shape[-1] + 1, device=rest.device, dtype=rest.dtype)
                torch.add(value[..., -1:], steps, out=rest)
            else:
                rest.fill_(self.ignored if "labels" in name else padding if name == "input_ids" else 0)


@dataclass(frozen=True)
class Traits:
    """The properties of a model on which padding and masks depend."""

    causal: bool  # tokens on the right do not change earlier ones
    cached: bool  # its calls use a cache of keys by default
    takes_cache: bool
    padding: int  # token of the padding
    longest: int | None  # rows that it has positions for
    reads_packing: bool  # its attention, or another part, reads more of packed rows than their positions

    @classmethod
    def of(cls, module: nn.Module, names: Sequence[str]) -> Traits:
        config = getattr(module, "config", None)
        given, rows = getattr(config, "pad_token_id", None), 0
        with contextlib.suppress(NotImplementedError):
            rows = getattr(module.get_input_embeddings(), "num_embeddings", 0)
        padding = given if isinstance(given, int) and 0 <= given < rows else 0
        cached = bool(getattr(config, "use_cache", False))
        parts = [part for part in (config, getattr(config, "text_config", None)) if part is not None]
        limits = [getattr(part, name, None) for part in parts for name in _POSITIONS]
        longest = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
        packing = _reads_packing(module, config)
        return cls(_causal(module, config), cached, "use_cache" in names, padding, longest, packing)


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")  # names in configurations


def sort_out(given: dict, traits: Traits, lengths: Sequence[int], device: torch.device) -> Given:
    """Sort the tensors and plain values of a call; raises `Eagerly` if it has other arguments."""
    tensors, options = {}, {}
    cached = traits.cached
    if "use_cache" in given and (cached := given.pop("use_cache")):
        raise Eagerly("use_cache=True was given")
    for name, value in given.items():
        if name == "num_items_in_batch" and type(value) in (int, float):
            value = torch.tensor(float(value), dtype=torch.float64)
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor or value.layout != torch.strided:
                raise Eagerly(f"{name} is no plain tensor")
            if value.requires_grad:
                raise Eagerly(f"{name} needs a gradient")
            if value.device != device and name != "num_items_in_batch":
                raise Eagerly  # an error, or a copy, which shall come
            tensors[name] = value
        elif isinstance(value, bool | int | float | str):
            options[name] = value
        else:
            raise Eagerly(f"{name} is a {type(value).__name__}")
    if "position_ids" in tensors and not traits.reads_packing:
        for name in _PACKING:
            tensors.pop(name, None), options.pop(name, None)
    elif any(name in tensors for name in _PACKING):
        raise Eagerly("its kernels read where packed rows begin, which has another size in each batch")
    if traits.takes_cache:
        options["use_cache"] = False  # no code reads a cache of keys when it computes a loss
    ids = tensors.get("input_ids")
    sorted_out = Given(tensors, options)
    if ids is None or ids.ndim != 2 or not traits.causal or not _fits(tensors, options, ids.shape):
        return sorted_out
    _drop_what_says_nothing(sorted_out, ids.shape)
    if cached and "position_ids" in tensors and "attention_mask" not in tensors:
        raise Eagerly("attention takes no notice of packed rows beside a cache of keys (use_cache=False)")
    sorted_out.length = ids.shape[1]
    sorted_out.padded = bucket(ids.shape[1], lengths)
    if traits.longest is not None:  # behind it there may be no embedding
        sorted_out.padded = max(ids.shape[1], min(sorted_out.padded, traits.longest))
    return sorted_out


def _causal(module, config) -> bool:
    for part in (config, getattr(config, "text_config", None)):
        if part is None:
            continue
        if getattr(part, "is_encoder_decoder", False) or getattr(part, "output_router_logits", False):
            return False
        if getattr(part, "is_causal", True) is False or getattr(part, "use_bidirectional_attention", False):
            return False
    return all(getattr(m, "is_causal", True) is not False for m in module.modules())


def _reads_packing(module: nn.Module, config) -> bool:
    """Whether an attention kernel reads packing, or the source of a part of the model names it."""
    if getattr(config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return True
    for name in {type(part).__module__ for part in module.modules()}:
        if not name.startswith(("torch.", "tigon.", "peft.")):
            try:
                source = inspect.getsource(sys.modules[name])
            except (KeyError, OSError, TypeError):
                return True
            if "cu_seq_lens" in source or "seq_idx" in source:
                return True
    return False


def _fits(tensors: dict, options: dict, shape) -> bool:
    """Whether all tensors are known by token, or are one value."""
    if options.get("output_router_logits") or options.get("logits_to_keep"):
        return False
    for name, value in tensors.items():
        if value.ndim == 0 or (value.numel() == 1 and name not in _PER_TOKEN):
            continue
        wide = tuple(value.shape) == tuple(shape) or (
            name == "position_ids" and tuple(value.shape) == (1, shape[1])
        )
        if name not in _PER_TOKEN or not wide:
            return False
    return True


def _drop_what_says_nothing(given: Given, shape) -> None:
    """Take out a mask of padding on the right only, and positions that only count.

    Causal attention does without both, by a kernel that reads no mask. The host waits for the answer.
    """
    tensors = given.tensors
    mask, positions = tensors.get("attention_mask"), tensors.get("position_ids")
    asked = {}
    if mask is not None:
        there = mask != 0
        says = (there[:, 1:] & ~there[:, :-1]).any()  # a token behind padding
        for name in ("labels", "shift_labels"):
            if name in tensors:
                says = says | (~there & (tensors[name] != given.ignored)).any()
        asked["attention_mask"] = says
    if positions is not None:
        plain = torch.arange(shape[1], device=positions.device, dtype=positions.dtype)
        asked["position_ids"] = (positions != plain).any()
    if not asked:
        return
    says = dict(zip(asked, torch.stack([*asked.values()]).tolist(), strict=True))
    if says.get("position_ids"):  # with a mask no model looks for packed rows
        return
    for name in asked:
        if not says[name]:
            del tensors[name]
