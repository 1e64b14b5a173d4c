"""``tigon.optim.Muon``: momentum, orthogonalised with half of the arithmetic."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tigon.error import check, refuse
from tigon.nn.embedding import Embedding
from tigon.ops.arguments import check_booleans, check_choice, check_integers, check_stored
from tigon.ops.grad_norm import alike, is_dtensor, local
from tigon.ops.muon import Start, momentum_, update_
from tigon.ops.orthogonalize import newton_schulz_, orthogonalize_
from tigon.optim.adamw import AdamW, check_placed, evaluated
from tigon.optim.groups import ADAMW, ADAMW_WHOLE, check_adamw, check_constants, check_keys, check_lr

_OP = "Muon"
_MUON = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Most elements of the matrices that are orthogonalised together.
_BATCH = 3 * 2**27
# Modules whose weights are a model's head.
_HEADS = ("lm_head", "head", "output", "score", "classifier")


class Muon(torch.optim.Optimizer):
    """Muon: ``torch.optim.Muon`` with about half of its arithmetic, and AdamW for all but hidden matrices.

    A polynomial of its singular values orthogonalises the momentum of every matrix. Tigon evaluates it on the
    Gram matrix of the shorter side, whose powers are symmetric, in fp16 with scales on CUDA and in float32 on
    the CPU. Matrices of equal shape are one batch. This optimizer and PyTorch's load each other's
    ``state_dict``. The host does not wait for the device.

    Args:
        params: matrices [rows, columns], or experts [number, rows, columns], each a separate matrix; or
            groups of them. :class:`AdamW` updates a group with ``use_muon=False``, which takes the options of
            its groups and holds any parameters. :func:`muon_groups` makes both kinds. Options of other
            optimizers are an error. DTensors sharded in one dimension are orthogonalised whole, each on one
            process; experts sharded by number stay on their processes.
        lr: number or tensor of one element.
        weight_decay: decoupled.
        momentum: in [0, 1).
        nesterov: use Nesterov momentum.
        ns_coefficients: a, b, c of X <- a X + b (X X^T) X + c (X X^T)^2 X.
        eps: smallest norm by which an update is divided.
        ns_steps: number of iterations.
        adjust_lr_fn: ``original`` (or None): lr * sqrt(max(1, rows / columns)); ``match_rms_adamw``:
            0.2 * lr * sqrt(max(rows, columns)), which works with AdamW's lr and weight decay.

    Raises:
        tigon.Error: options or parameters do not fit, also those of a loaded state; gradients are sparse.
            Nothing is modified.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025,
    "Muon is scalable for LLM training", arXiv:2502.16982.
    """

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        self._adamw: AdamW | None = None
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as PyTorch's optimizers do; parameters that cannot be updated are an error."""
        check_booleans(_OP, use_muon=param_group.get("use_muon", True))
        if not param_group.get("use_muon", True):
            # The AdamW checks the group first, so that a group with an error is not added.
            group = {name: value for name, value in param_group.items() if name != "use_muon"}
            check_keys(_OP, group, ADAMW)
            made = AdamW([group])
            param_group.update(group)
            super().add_param_group(param_group)
            for name in set(_MUON) - {*ADAMW}:
                del param_group[name]
            self._adamw = self._adamw or made
            return
        check_keys(_OP, param_group, (*_MUON, "use_muon"))
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dim() not in (2, 3) or p.dtype not in _FLOATS:
                self.param_groups.pop()
                refuse(
                    _OP,
                    "params must be real matrices, or experts of three dimensions, got {} of {}: "
                    "groups with use_muon=False take others (tigon.optim.muon_groups)",
                    p.dtype,
                    tuple(p.shape),
                )

    def __getstate__(self):
        return super().__getstate__() | {"_adamw": self._adamw}

    def load_state_dict(self, state_dict) -> None:
        """Load as PyTorch's optimizers do; unknown options are an error."""
        handle = self.register_load_state_dict_pre_hook(_check_loaded)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    @torch.no_grad()
    def step(self, closure=None):
        """Do one update. `closure` reevaluates the model and returns the loss, which is returned."""
        loss = evaluated(closure)
        groups = [(group, group.get("use_muon", True)) for group in self.param_groups]
        shared = [p for group, use_muon in groups if use_muon for p in group["params"]]
        work = alike(_OP, shared, functools.partial(self._work, groups))
        if rest := [group for group, use_muon in groups if not use_muon]:
            self._adamw.param_groups, self._adamw.state = rest, self.state
            self._adamw.step()  # modifies nothing if it raises an error
        for group, params, whole in work:
            self._update(group, params, whole)
        return loss

    def _work(self, groups: list) -> list:
        """The updates of a step, after a check of everything that it reads."""
        for group, use_muon in groups:
            if use_muon:
                _check_options(group)
        work = [item for group, use_muon in groups if use_muon for item in _batches(group)]
        for _, params, _ in work:
            for p in params:
                _check_state(p, self.state[p].get("momentum_buffer"))
        return work

    def _update(self, group: dict, params: list, whole: _Gathering) -> None:
        """One update of parameters of equal shape, dtype and placement."""
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
        momenta = [local(self.state[p]["momentum_buffer"]) for p in params]
        step = momenta, [local(p.grad) for p in params], group["momentum"], group["nesterov"]
        options = group["ns_coefficients"], group["ns_steps"]
        if whole.is_sharded:
            updates = whole.orthogonalize(momentum_(*step), *options, group["eps"])
        else:
            updates = newton_schulz_(momentum_(*step, Start(step[1][0], group["eps"])), *options)
        rows, cols = params[0].shape[-2:]
        matches_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
        ratio = 0.2 * math.sqrt(max(rows, cols)) if matches_adamw else math.sqrt(max(1.0, rows / cols))
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            lr = float(lr) if lr.device.type == "cpu" else lr.reshape(())
        update_([local(p) for p in params], list(updates), lr, ratio, group["weight_decay"])
        torch.autograd.graph.increment_version(params)


def muon_groups(model: nn.Module, **adamw) -> list[dict[str, Any]]:
    """The trainable parameters of `model` in groups for :class:`Muon`: hidden matrices and the rest.

    Hidden matrices are parameters of two dimensions, and experts of three. AdamW updates the rest: vectors,
    biases, weights of embeddings and convolutions, and those of the head: ``model.get_output_embeddings()``
    and modules called lm_head, head, output, score or classifier.

    Args:
        model: any module.
        **adamw: options of the rest, such as ``lr``: those of :class:`AdamW`'s groups.

    Raises:
        tigon.Error: an option is not one of these.
    """
    for name in adamw:
        words = (
            "options must be those of AdamW's groups, got {!r}, which is one of tigon.optim.AdamW as a whole"
        )
        check("muon_groups", name not in ADAMW_WHOLE, words, name)
        check_choice("muon_groups", "every option", name, ADAMW)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    apart = (nn.Embedding, nn.EmbeddingBag, Embedding, nn.modules.conv._ConvNd)
    others = {
        p
        for name, module in model.named_modules()
        if module is head or isinstance(module, apart) or name.rpartition(".")[2] in _HEADS
        for p in module.parameters()
    }
    hidden, rest = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            is_hidden = p.dim() in (2, 3) and p not in others and not name.endswith("bias")
            (hidden if is_hidden else rest).append(p)
    groups = [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False, **adamw}]
    return [group for group in groups if group["params"]]


def _check_options(group: dict) -> None:
    coefficients, steps = group["ns_coefficients"], group["ns_steps"]
    check_lr(_OP, group["lr"])
    three = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
    check(_OP, three, "ns_coefficients must be three numbers, got {}", coefficients)
    check_constants(_OP, weight_decay=group["weight_decay"], momentum=group["momentum"], eps=group["eps"])
    check_constants(_OP, **{f"ns_coefficients[{i}]": value for i, value in enumerate(coefficients)})
    check_booleans(_OP, nesterov=group["nesterov"])
    check_integers(_OP, ns_steps=steps)
    for name in ("weight_decay", "eps"):
        check(_OP, group[name] >= 0, name + " must be >= 0, got {}", group[name])
    check(_OP, 0 <= group["momentum"] < 1, "momentum must be in [0, 1), got {}", group["momentum"])
    check(_OP, 1 <= steps < 100, "ns_steps must be in [1, 100), got {}", steps)
    choice = group["adjust_lr_fn"]
    if choice is not None:
        check_choice(_OP, "adjust_lr_fn", choice, ("original", "match_rms_adamw"))


def _check_loaded(_, loaded: dict) -> None:
    """The groups of a state to load. AdamW's may have Muon's options, which earlier versions put there."""
    for group in loaded["param_groups"]:
        own = group.get("use_muon", True)
        check_keys(_OP, group, (*_MUON, *(() if own else ADAMW), "use_muon"))
        if own and {*_MUON} <= group.keys():
            _check_options(group)
        if not own and {*ADAMW} <= group.keys():
            check_adamw(_OP, group)


def _check_state(p: torch.Tensor, momentum: torch.Tensor | None) -> None:
    """Check that a gradient and a momentum fit their parameter."""
    for name, t in (("gradients", p.grad), ("momentum_buffer", momentum)):
        if t is None:
            continue
        if t.shape != p.shape:
            refuse(_OP, name + " must have the sizes of their params, {}, got {}", tuple(p.shape), t.shape)
        if t.device != p.device:
            refuse(_OP, name + " must be on {} as their params, got {}", p.device, t.device)
        if t.dtype not in _FLOATS:
            refuse(_OP, name + " must be float32, bfloat16, float16 or float64, got {}", t.dtype)
        if is_dtensor(t) != is_dtensor(p):
            refuse(_OP, name + " must be DTensors where their params are, and there alone")
        check_stored(_OP, name, local(t))
    check_stored(_OP, "params", local(p))


def _batches(group: dict) -> Iterator[tuple[dict, list, _Gathering]]:
    """A group's parameters with gradients, those of equal shape, dtype and placement together."""
    alike: dict[tuple, list] = {}
    for p in group["params"]:
        if p.grad is None or not p.numel():
            continue
        check(_OP, p.grad.layout == torch.strided, "gradients must be dense, got {}", p.grad.layout)
        placed = (p.device_mesh, p.placements) if is_dtensor(p) else None
        if placed is not None:
            check_placed(_OP, p, p.grad)
        alike.setdefault((p.shape, p.dtype, p.grad.dtype, p.device, placed), []).append(p)
    homes = itertools.count()
    for params in alike.values():
        whole = _Gathering(params[0], homes)
        size = -(-len(params) // -(-len(params) // whole.most))
        for i in range(0, len(params), size):
            yield group, params[i : i + size], whole


class _Gathering:
    """Gathers the matrices of sharded parameters of one kind, and scatters them again.

    Each matrix has a home among the processes that share it. One exchange sends the parts of many matrices to
    their homes, and another sends the results back.
    """

    def __init__(self, p: torch.Tensor, homes: Iterator[int]) -> None:
        self.shape, self.homes, self.group = p.shape, homes, None
        self.most = max(1, _BATCH // p.numel())
        self.placed = None
        sharded = [i for i, at in enumerate(p.placements) if not at.is_replicate()] if is_dtensor(p) else []
        by = [p.placements[i] for i in sharded]
        if not by or (p.dim() == 3 and all(type(at).__name__ == "Shard" and at.dim == 0 for at in by)):
            return  # whole matrices
        if len(by) > 1 or type(by[0]).__name__ != "Shard":  # as FSDP2 of tensor parallel parameters
            self.placed = p.device_mesh, p.placements, p.stride()
            return
        self.group, self.dim = p.device_mesh.get_group(sharded[0]), by[0].dim % p.dim()
        self.rank, processes = p.device_mesh.get_local_rank(sharded[0]), p.device_mesh.size(sharded[0])
        size = p.shape[self.dim]
        part = -(-size // processes)
        self.sizes = [max(0, min(part, size - i * part)) for i in range(processes)]
        self.most *= processes

    @property
    def is_sharded(self) -> bool:
        """Whether matrices are not whole here."""
        return self.group is not None or self.placed is not None

    def orthogonalize(self, updates: torch.Tensor, *options) -> list[torch.Tensor]:
        """This process' parts of the orthogonalised matrices."""
        if self.placed is not None:
            return [self._replicated(update, options) for update in updates]
        return self._exchanged(updates, options)

    def _replicated(self, update: torch.Tensor, options) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        mesh, placements, stride = self.placed
        parts = DTensor.from_local(update, mesh, placements, run_check=False, shape=self.shape, stride=stride)
        whole = orthogonalize_(parts.full_tensor(), *options)
        copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return copies.redistribute(placements=placements).to_local()

    def _exchanged(self, updates: torch.Tensor, options) -> list[torch.Tensor]:
        homes = [next(self.homes) % len(self.sizes) for _ in updates]
        order = sorted(range(len(updates)), key=homes.__getitem__)  # as they are sent, home by home
        counts = [homes.count(i) for i in range(len(self.sizes))]
        mine = counts[self.rank]
        parts = self._exchange(
            updates[order].split(counts),
            [(mine, *self.shape[: self.dim], size, *self.shape[self.dim + 1 :]) for size in self.sizes],
        )
        x = orthogonalize_(torch.cat(parts, dim=self.dim + 1), *options)
        back = self._exchange(x.split(self.sizes, self.dim + 1), [(n, *updates[0].shape) for n in counts])
        results = dict(zip(order, itertools.chain.from_iterable(back), strict=True))
        return [results[i] for i in range(len(updates))]

    def _exchange(self, parts, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """Sends the i-th part to the i-th process, and returns what each sent here, of these shapes."""
        sent = torch.cat([part.reshape(-1) for part in parts]).view(torch.uint8)
        bytes_of = parts[0].element_size()
        counts = [bytes_of * math.prod(shape) for shape in shapes]
        received = sent.new_empty(sum(counts))
        torch.distributed.all_to_all_single(
            received, sent, counts, [bytes_of * part.numel() for part in parts], group=self.group
        )
        dtype = parts[0].dtype
        return [r.view(dtype).view(shape) for r, shape in zip(received.split(counts), shapes, strict=True)]
