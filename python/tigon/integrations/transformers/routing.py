"""Routing replay: the experts that each token went to, recorded from a patched model or given to it.

Routers and their results: ``routers.py``. A router's module keeps the experts that it replays or records, so
that a layer that is computed again in the backward reads the same rows.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

import torch
from torch import nn

from tigon.error import check, refuse
from tigon.integrations.transformers.forward import bound
from tigon.integrations.transformers.patch import STATE
from tigon.integrations.transformers.routers import ROUTED, Routed, router_forward
from tigon.ops.arguments import check_choice, check_integers, kind_of

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


class _Context:
    """Gives every router of a model its part, and removes it at the end."""

    op = ""

    def __init__(self, model: nn.Module) -> None:
        self.routers = _routers(self.op, model)
        self.parts: list[tuple[nn.Module, Routed]] = []

    def __enter__(self):
        for module, _ in self.routers:
            part = module.__dict__.get(ROUTED)
            busy = part is not None and part.open
            check(self.op, not busy, "the model must be in no other routing context, got one that is open")
        self.parts = [(module, Routed(self, layer)) for module, layer in self.routers]
        for module, part in self.parts:
            module.__dict__[ROUTED] = part
        return self

    def __exit__(self, *_):
        for module, part in self.parts:
            part.open = False
            if not part.used and module.__dict__.get(ROUTED) is part:
                del module.__dict__[ROUTED]
        self.parts = []


class record_routing(_Context):
    """Record the experts of each token: ``with tigon.record_routing(model) as record``.

    Args:
        model: a model that :func:`tigon.apply` has patched.

    ``record.ids`` maps the index of a decoder layer to the last forward's ids ``[tokens, K]``, in the order
    of the weights. :meth:`routed` returns all of them in vLLM's format.

    Raises:
        tigon.Error: the model has no router that Tigon runs, or has one that Tigon does not run.
    """

    op = "record_routing"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.ids: dict[int, torch.Tensor] = {}
        self._layers = _number_of_layers(model, self.routers)

    def routed(self, batch: int = 1) -> torch.Tensor:
        """``[batch, tokens / batch, layers, K]``: uint8 for at most 256 experts, else int16.

        Dense layers are zeros. ``routed[i, :-1]`` is the ``CompletionOutput.routed_experts`` of a sequence in
        vLLM.
        """
        check(self.op, bool(self.ids), "a forward must have run in the context, got none")
        check_integers(self.op, least=1, batch=batch)
        first = next(iter(self.ids.values()))
        tokens, top_k = first.shape
        check(self.op, tokens % batch == 0, "batch must divide {} tokens, got {}", tokens, batch)
        experts = max(module.weight.shape[0] for module, _ in self.routers)
        dtype = torch.uint8 if experts <= 256 else torch.int16
        whole = torch.zeros(tokens, self._layers, top_k, dtype=dtype, device=first.device)
        for layer, ids in self.ids.items():
            whole[:, layer] = ids.to(whole.device, dtype)
        return whole.view(batch, tokens // batch, self._layers, top_k)

    def given(self, part: Routed, logits: torch.Tensor) -> None:
        """Return nothing: the router chooses."""

    def chosen(self, part: Routed, ids: torch.Tensor) -> None:
        self.ids[part.layer] = ids.detach()


class replay_routing(_Context):
    """Route each token to given experts, those of the engine that sampled it (R3) or of an earlier pass (R2).

    Only ids are replayed. The weights are gathered from the current scores and have their gradient. Balancing
    losses that the model computes from its logits keep their gradient too. Keep the context open until the
    backward has ended: a checkpointed layer reads the same rows again::

        with tigon.replay_routing(model, routed):
            model(input_ids, labels=labels).loss.backward()

    Args:
        model: a model that :func:`tigon.apply` has patched.
        routed: the experts of each token, in any integer dtype: ``[batch, length, layers, K]``,
            ``[tokens, layers, K]`` for packed rows, or a list of one ``[length, layers, K]`` per sequence:
            tensors, numpy arrays (vLLM's ``routed_experts``), or SGLang's base64 text of int32. It may be
            shorter than the batch's sequences, since some engines do not route the last token: the router
            chooses for the remaining tokens. It also chooses for rows whose first id is negative or that
            contain an expert twice (rows of zeros).
        layers: ``"all"``: one entry a decoder layer, those of dense layers are skipped; ``"moe"``: one a
            router.
        offset: how many tokens of each sequence precede `routed`, such as its padding on the left: a number,
            or one for each sequence.

    Raises:
        tigon.Error: the model has no router that Tigon runs, or has one that Tigon does not run; sizes do not
            fit the model or the batch; a router cannot replay a call. Ids that are not experts are an error
            on the CPU, and make their tokens' weights NaN on CUDA.

    Source: Ma et al. 2025, "Stabilizing MoE reinforcement learning by aligning training and inference
    routers", arXiv:2510.11370.
    """

    op = "replay_routing"

    def __init__(
        self, model: nn.Module, routed: object, *, layers: str = "all", offset: int | Sequence[int] = 0
    ) -> None:
        super().__init__(model)
        check_choice(self.op, "layers", layers, ("all", "moe"))
        many = _number_of_layers(model, self.routers) if layers == "all" else len(self.routers)
        if layers == "moe":
            order = sorted(layer for _, layer in self.routers)
            self.routers = [(module, order.index(layer)) for module, layer in self.routers]
        top_k = {getattr(module, bound(module).spec.top_k) for module, _ in self.routers}
        check(self.op, len(top_k) == 1, "all routers must choose equally many experts, got {}", sorted(top_k))
        (self._top_k,) = top_k
        self._sequences = self._read(routed, many)
        offsets = [offset] * len(self._sequences) if isinstance(offset, int) else list(offset)
        fits = len(offsets) == len(self._sequences)
        check(self.op, fits, "offset must be one number or {}, got {}", len(self._sequences), len(offsets))
        for start in offsets:
            check_integers(self.op, least=0, offset=start)
        self._offsets, self._layers, self._whole = offsets, many, None

    def _read(self, routed, layers: int) -> list[torch.Tensor]:
        """int32 ``[length, layers, K]`` of each sequence, on its own device."""
        if isinstance(routed, torch.Tensor) or hasattr(routed, "__array__"):
            routed = torch.as_tensor(routed)
            words = "routed must be [batch, length, layers, K] or [tokens, layers, K], got {}"
            check(self.op, routed.dim() in (3, 4), words, tuple(routed.shape))
            routed = [routed] if routed.dim() == 3 else list(routed)
        some = isinstance(routed, Sequence) and not isinstance(routed, (str, bytes)) and len(routed) > 0
        words = "routed must be a tensor, an array or a list of sequences, got {}"
        check(self.op, some, words, kind_of(routed))
        return [self._sequence(one, layers) for one in routed]

    def _sequence(self, one, layers: int) -> torch.Tensor:
        if isinstance(one, (str, bytes)):
            data = bytearray(base64.b64decode(one))
            whole = len(data) % (4 * layers * self._top_k) == 0
            words = "routed must be base64 of int32 [length, {}, {}], got {} bytes"
            check(self.op, whole, words, layers, self._top_k, len(data))
            flat = torch.frombuffer(data, dtype=torch.int32) if data else torch.empty(0, dtype=torch.int32)
            return flat.view(-1, layers, self._top_k)
        readable = isinstance(one, torch.Tensor) or hasattr(one, "__array__")
        check(self.op, readable, "routed must be tensors, arrays or base64 text, got {}", kind_of(one))
        ids = torch.as_tensor(one)
        integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        check(self.op, integers, "routed must hold integers, got {}", ids.dtype)
        fits = ids.dim() == 3 and tuple(ids.shape[1:]) == (layers, self._top_k)
        words = "routed must be [length, {} (layers), {} (K)] for each sequence, got {}"
        check(self.op, fits, words, layers, self._top_k, ids.shape)
        return ids.to(torch.int32)

    def given(self, part: Routed, logits: torch.Tensor) -> torch.Tensor:
        """The ids of one router, int32 ``[tokens, K]`` on the device of the logits."""
        tokens, batch = logits.shape[0], len(self._sequences)
        if self._whole is None or self._whole.shape[1] != tokens or self._whole.device != logits.device:
            words = "the batch must have {} sequences as routed, got {} tokens"
            check(self.op, tokens % batch == 0, words, batch, tokens)
            self._whole = self._rows(tokens // batch).to(logits.device, non_blocking=True)
        part.used = True
        return self._whole[part.layer]

    def _rows(self, length: int) -> torch.Tensor:
        """``[layers, batch * length, K]``, -1 for tokens without given experts."""
        sizes = (len(self._sequences), length, self._layers, self._top_k)
        whole = torch.full(sizes, -1, dtype=torch.int32, device=self._sequences[0].device)
        for row, ids, start in zip(whole, self._sequences, self._offsets, strict=True):
            words = "routed and offset must fit sequences of {} tokens, got {} from {}"
            check(self.op, start + len(ids) <= length, words, length, len(ids), start)
            row[start : start + len(ids)] = ids
        return whole.flatten(0, 1).transpose(0, 1).contiguous()

    def chosen(self, part: Routed, ids: torch.Tensor) -> None:
        """Keep nothing."""


def _routers(op: str, model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The routers that Tigon runs, with the index of their decoder layer."""
    check(op, isinstance(model, nn.Module), "model must be a torch.nn.Module, got {}", kind_of(model))
    routers = []
    for path, module in model.named_modules():
        forward = bound(module)
        if forward is None or forward.function is not router_forward:
            continue
        layer = _LAYER.search(path)
        check(op, layer is not None, "every router must be in a numbered decoder layer, got {}", path)
        routers.append((module, int(layer[1])))
    kept = {id(module) for module, _ in routers}
    for root in [module for module in model.modules() if STATE in module.__dict__]:
        named = dict(root.named_modules())
        for entry in root.__dict__[STATE].report.entries:
            if entry.slot == "router" and id(named.get(entry.path)) not in kept:
                reason = entry.reason or "it has another forward or class since"
                refuse(op, "every router must run tigon.route, got {} left: {}", entry.path, reason)
    words = "model must have routers that tigon.apply(model, router=True) replaced, got none"
    check(op, bool(routers), words)
    return routers


def _number_of_layers(model: nn.Module, routers) -> int:
    """The number of decoder layers as engines count it."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    return layers if isinstance(layers, int) else 1 + max(layer for _, layer in routers)
