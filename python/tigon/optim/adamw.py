"""``tigon.optim.AdamW``: PyTorch's AdamW in one launch, with a choice of rounding for 16-bit parameters."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch

from tigon._dtensor import KERNEL_DTYPES, PLAIN
from tigon._op import has_kernel
from tigon.error import Error, check, refuse
from tigon.ops.adamw import ROUNDINGS, TensorList, adamw_, check_list, reference_
from tigon.ops.arguments import check_choice, check_integers, check_numbers
from tigon.ops.grad_norm import alike, global_norm, is_dtensor, local
from tigon.optim import codes
from tigon.optim.groups import check_adamw, check_keys

_OP = "AdamW"
_HALF = (torch.bfloat16, torch.float16)
# The state that a rounding keeps in addition to a 16-bit parameter.
_EXTRAS = {"split": ("param_low", torch.int16), "master": ("master_param", torch.float32)}


class AdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay): ``torch.optim.AdamW`` at the speed of a copy.

    One launch per device updates parameters of all sizes, dtypes and groups. The host does not wait for the
    device. This optimizer and PyTorch's load each other's ``state_dict``.

    Args:
        params: parameters or groups of them, float32, bfloat16, float16 or (with PyTorch operations) float64.
            They are strided and dense in any order of dimensions. Each process updates its local parts of
            DTensors (FSDP2, tensor parallel). A group may set the options from `lr` to `maximize`,
            `moment_dtype`, `capturable` and `decoupled_weight_decay`. Other options of this or another
            optimizer, and misspelled ones, are an error in a group. Any other key is kept as a note.
        lr: number or tensor of one element.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled; if `decoupled_weight_decay` is false, Adam with L2 regularisation.
        amsgrad: divide by the largest second moment so far.
        maximize: maximise the objective instead of minimising it.
        rounding: rounding of 16-bit parameters. ``nearest``: as PyTorch; small updates are lost.
            ``stochastic``: up or down at random, unbiased, without extra memory. ``split``: bfloat16 only; 16
            more bits in ``state["param_low"]`` make it an exact float32. ``master``: a float32 copy,
            ``state["master_param"]``. The last two follow the same trajectory.
        moment_dtype: dtype of exp_avg and exp_avg_sq, one or a pair: float32, bfloat16, or ``None``: the
            parameter's. ``"int8"``: 8-bit codes in blocks of 256 elements with bitsandbytes' dynamic map, for
            exp_avg_sq those of its square root; 2.03 bytes an element. Moments stay float32 for parameters
            that have less than 4096 elements, are not contiguous, or are sharded along another dimension than
            the first.
        moment_rounding: rounding of 16-bit moments. ``stochastic``: up or down at random, unbiased.
            ``nearest``: as PyTorch; exp_avg_sq in bfloat16 is then 1.2 times too large, and does not decrease
            when gradients become smaller.
        max_grad_norm: clip the norm of all gradients to it, without another read of them. The norm before
            clipping is ``optimizer.grad_norm``, a float32 scalar on the device.
        seed: seed of both ``stochastic`` roundings. The random bits depend only on the seed, the step and the
            position of an element among all parameters, not on the device.
        capturable: keep steps on the device, so that a CUDA graph can be captured.
        decoupled_weight_decay: see `weight_decay`.
        foreach, fused, differentiable: accepted for compatibility. With fused=False a GradScaler's caller
            unscales the gradients, as in PyTorch: Lightning's mixed precision clips gradients only then. The
            others change nothing.

    Raises:
        tigon.Error: options or parameters do not fit, also those of a loaded state; gradients are sparse or
            complex; a parameter was resized, moved or given another layout after its state was made. Nothing
            is modified.

    Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101, algorithm 2;
    Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861.
    """

    # GradScaler passes grad_scale and found_inf and does not wait; not with fused=False.
    _step_supports_amp_scaling = True
    # True if the tensors of the last step were one list of plain tensors with a kernel. A hint: see _update.
    _alike = False
    # The steps of a list's parameters in one tensor, and the place of each.
    _steps: tuple[torch.Tensor | None, list[int]] = None, []

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        rounding: str = "nearest",
        moment_dtype: torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | None = None,
        moment_rounding: str = "stochastic",
        max_grad_norm: float | None = None,
        seed: int = 0,
        capturable: bool = False,
        decoupled_weight_decay: bool = True,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        check_choice(_OP, "rounding", rounding, ROUNDINGS)
        _check_moments(moment_dtype)
        check_choice(_OP, "moment_rounding", moment_rounding, ROUNDINGS[:2])
        if max_grad_norm is not None:
            check_numbers(_OP, max_grad_norm=max_grad_norm)
            check(_OP, max_grad_norm > 0, "max_grad_norm must be > 0 or None, got {}", max_grad_norm)
        check_integers(_OP, seed=seed)
        check(_OP, seed >= 0, "seed must be in [0, 2^63), got {}", seed)
        self.rounding, self.moment_rounding = rounding, moment_rounding
        self.moment_dtype, self.seed = moment_dtype, seed
        self._step_supports_amp_scaling = fused is not False
        self.max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None
        self.updates_in_backward = None  # the handle of step_in_backward
        self._places: dict[torch.Tensor, int] = {}
        self._factor: torch.Tensor | None = None  # of clip_grad_norm_, for the next step
        self._moments: dict[int, object] = {}  # by the identity of a group: the moment_dtype of its state
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as PyTorch's optimizers do; parameters that cannot be updated are an error."""
        self._check_group(param_group)
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"] = list(dict.fromkeys(self.param_groups[-1]["params"]))
        for p in params:
            if p.dtype not in (*KERNEL_DTYPES, torch.float64):
                self.param_groups.pop()
                words = "params must be real floats, got {} (not float32, bfloat16, float16 or float64)"
                refuse(_OP, words, p.dtype)
        if self.updates_in_backward is not None:
            self.updates_in_backward.cover(len(self.param_groups) - 1)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_keys(_OP, group, (*self.defaults, "moment_dtype"))
        check_adamw(_OP, {**self.defaults, **group})
        moments = group.get("moment_dtype", self.moment_dtype)
        _check_moments(moments)
        plain = not group.get("amsgrad", self.defaults["amsgrad"])
        check(_OP, plain or moments != "int8", "amsgrad must be False where moment_dtype is 'int8', got True")

    def __getstate__(self):
        own = ("rounding", "moment_rounding", "moment_dtype", "seed", "max_grad_norm", "grad_norm", "_places")
        own += ("_step_supports_amp_scaling",)
        kept = super().__getstate__() | {name: getattr(self, name) for name in own}
        # A copy has no gradients waiting for a factor, and no hooks.
        return kept | {"_factor": None, "updates_in_backward": None}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._alike, self._moments = False, {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    # --- the step

    @torch.no_grad()
    def step(self, closure=None):
        """Do one update. `closure` reevaluates the model and returns the loss, which is returned."""
        loss = evaluated(closure)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.updates_in_backward is not None and scale is not None:
            refuse(
                _OP,
                "a GradScaler must not be used with step_in_backward: its verdict on the gradients "
                "comes when they have been used",
            )
        self._look_at_places()
        groups = self._with_gradients()
        clip = self._pending(groups, modified=False)
        if self.max_grad_norm is not None:
            clip = self._clip(groups, self.max_grad_norm, scale, clip)
        self._update(groups, clip, scale, found_inf)
        self._factor = None
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the norm of all gradients to `max_norm` in the next :meth:`step`, which reads them anyway.

        This call does not change the gradients, and they must not change before the step. If a step is
        skipped, new gradients are not clipped. Of two calls before a step the second clips the result of the
        first.

        Returns:
            The norm before clipping, a float32 scalar on the device; also in ``optimizer.grad_norm``.

        Raises:
            tigon.Error: some gradients are those of an earlier call and others are new; in the step also if
                gradients were modified since this call.
        """
        check_numbers(_OP, max_norm=max_norm)
        check(_OP, max_norm >= 0, "max_norm must be >= 0, got {}", max_norm)
        if self.updates_in_backward is not None:
            refuse(_OP, "clip_grad_norm_ must not be called with step_in_backward: gradients are gone")
        groups = self._with_gradients()
        factor = self._factor = self._clip(groups, max_norm, before=self._pending(groups, modified=True))
        for grad in _gradients_of(groups):
            grad._tigon_clipped = factor, grad._version
        return torch.zeros(()) if factor is None else self.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as PyTorch's optimizers do, and the factor of a clipping."""
        self._factor = None
        super().zero_grad(set_to_none)

    def _pending(self, groups, modified: bool) -> torch.Tensor | None:
        """The factor that these gradients wait for since :meth:`clip_grad_norm_`; new ones wait for none.

        Args:
            modified: those that were modified since are new.
        """
        if self._factor is None:
            return None
        grads = _gradients_of(groups)
        marks = [getattr(grad, "_tigon_clipped", (None, None)) for grad in grads]
        known = [factor is self._factor for factor, _ in marks]
        same = [k and version == g._version for k, (_, version), g in zip(known, marks, grads, strict=True)]
        if not any(same if modified else known):
            return None
        if not all(same):
            words = (
                "gradients must stay as they are between clip_grad_norm_ and step, which "
                "scales them: {} of {} were modified or are new (zero_grad() forgets the clipping)"
            )
            refuse(_OP, words, same.count(False), len(same))
        return self._factor

    def has_all_gradients_of(self, parameters) -> bool:
        """Whether `parameters` with a gradient are those of this optimizer."""
        ours = {id(p) for _, params, _ in self._with_gradients() for p in params}
        return ours == {id(p) for p in parameters if p.grad is not None}

    @torch.no_grad()
    def update_one(self, group: dict, p: torch.Tensor) -> None:
        """The update of a single parameter of a group, as :func:`step_in_backward` does it."""
        self._update([(group, [p], [p.grad])])

    def _with_gradients(self) -> list[tuple[dict, list, list]]:
        """Groups, their parameters that have a gradient, and these gradients."""
        found = []
        for group in self.param_groups:
            params = group["params"]
            grads = [grad for p in params if (grad := p.grad) is not None]
            if len(grads) < len(params):
                params = [p for p in params if p.grad is not None]
            if grads:
                found.append((group, params, grads))
        return found

    def _update(self, groups, clip=None, scale=None, found_inf=None) -> None:
        """The update of groups with their parameters and gradients.

        What was one list of plain tensors in the last step is taken for one again, unseen. The native call
        looks at each of its tensors, and modifies nothing if one does not fit: then they are sorted, and
        what is refused is refused in words. Nothing is kept from step to step that a change could make wrong.
        """
        if not groups:
            return
        for group, _, _ in groups:
            moments = group.get("moment_dtype", self.moment_dtype)
            if self._moments.setdefault(id(group), moments) != moments:
                words = "moment_dtype of a group must stay {}, which its moments have, got {}: "
                words += "load_state_dict(state_dict()) converts them"
                refuse(_OP, words, self._moments[id(group)], moments)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            capturable = all(group["capturable"] for group, _, _ in groups)
            check(_OP, capturable, "capturable must be True where a CUDA graph captures the step, got False")
        if self._alike:
            try:
                device = groups[0][1][0].device
                self._call(device, self._listed(groups, device, found_inf), clip, scale, found_inf)
                return
            except (KeyError, Error, NotImplementedError):  # no state yet; not alike; not dense
                self._alike = False
        lists, others, shared = self._sorted(groups, found_inf)
        if len(lists) + len(others) > 1:  # each refuses before it is modified, and so all do
            for tensors in lists.values():
                check_list(tensors, self.rounding)
        for device, tensors in lists.items():
            self._call(device, tensors, clip, scale, found_inf)
            shared[device].join(found_inf)
        if others and not (found_inf is not None and found_inf.item()):
            for group, p, state in others:
                self._update_plainly(group, p, state, clip, scale)
        kinds = {type(t) for _, params, grads in groups for t in itertools.chain(params, grads)}
        self._alike = len(lists) == 1 and not others and kinds.issubset(PLAIN)
        if self._alike:
            self._join_steps(groups)

    def _call(self, device: torch.device, tensors: TensorList, clip, scale, found_inf) -> None:
        adamw_(
            tensors,
            rounding=self.rounding,
            moment_rounding=self.moment_rounding,
            seed=self.seed,
            clip=_on(device, clip),
            grad_scale=_on(device, scale),
            found_inf=_on(device, found_inf),
        )

    def _listed(self, groups, device: torch.device, found_inf) -> TensorList:
        """All tensors in one list. Raises KeyError if a state is not complete."""
        made, extra = TensorList(), _EXTRAS.get(self.rounding, ("",))[0]
        # States are mostly in the order of parameters; to look one up takes a call of Tensor.__hash__.
        count = sum(len(params) for _, params, _ in groups)
        whole = count == len(self.state)
        owners, every = (list(self.state), list(self.state.values())) if whole else ([], [])
        draws = "stochastic" in (self.rounding, self.moment_rounding)
        placed = draws and count == len(self._places)
        order, places = (list(self._places), list(self._places.values())) if placed else ([], [])
        for group, params, grads in groups:
            at, end = len(made.params), len(made.params) + len(params)
            if whole and all(map(operator.is_, owners[at:end], params)):
                states = every[at:end]
            else:
                states = [self.state[p] for p in params]
            steps = [state["step"] for state in states]
            if self._counts_on_device(group, device, found_inf) and not all(step.is_cuda for step in steps):
                raise KeyError("step")
            made.params += params
            made.grads += grads
            try:
                avgs, sqs = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
            except KeyError:  # codes, or no state yet
                avgs, sqs, absmaxes = codes.listed(states)
                made.absmaxes += absmaxes
            made.exp_avgs += avgs
            made.exp_avg_sqs += sqs
            made.steps += steps
            if group["amsgrad"]:
                made.max_exp_avg_sqs += [state["max_exp_avg_sq"] for state in states]
            if extra:
                made.extras += [
                    state[extra] for p, state in zip(params, states, strict=True) if p.dtype in _HALF
                ]
            if placed and all(map(operator.is_, order[at:end], params)):
                made.first += places[at:end]
            elif draws:
                made.first += [self._places[p] for p in params]
            made.add_group(group, len(params), device)
        together, places = self._steps
        if len(places) == len(made.steps) and list(map(torch.Tensor.data_ptr, made.steps)) == places:
            made.steps = [together]
        return made

    def _join_steps(self, groups) -> None:
        """Makes the steps of all parameters views of one tensor, which a call then takes for all of them."""
        states = [self.state[p] for _, params, _ in groups for p in params]
        if len(states) == 1 or not all(state["step"].is_cpu for state in states):
            return
        together = torch.stack([state["step"] for state in states])
        for state, step in zip(states, together.unbind(), strict=True):
            state["step"] = step
        self._steps = together, [state["step"].data_ptr() for state in states]

    def _sorted(self, groups, found_inf) -> tuple[dict, list, dict]:
        """A list for each device, what has no kernel, and what processes share of a list; states are made and
        completed."""
        by_device: dict[torch.device, list[tuple[dict, list, list]]] = {}
        others: list[tuple] = []
        for group, params, grads in groups:
            found: dict[torch.device, tuple[list, list]] = {}
            for p, grad in zip(params, grads, strict=True):
                state = self._state_of(group, p, grad, found_inf)
                if (p.dtype not in KERNEL_DTYPES or not (p.is_cuda or p.is_cpu)) and not has_kernel(_OP, p=p):
                    self._check_plain(p, state)
                    others.append((group, p, state))
                    continue
                if p not in self._places:
                    self._find_places()
                if type(p) is not torch.nn.Parameter and is_dtensor(p):
                    check_placed(_OP, p, grad)
                for tensors, tensor in zip(found.setdefault(p.device, ([], [])), (p, grad), strict=True):
                    tensors.append(tensor)
            for device, tensors in found.items():
                by_device.setdefault(device, []).append((group, *tensors))
        lists = {device: self._listed(own, device, found_inf) for device, own in by_device.items()}
        shared = {}
        for device, made in lists.items():
            owners = made.params
            for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "extras", "steps"):
                setattr(made, name, [local(tensor) for tensor in getattr(made, name)])
            shared[device] = codes.SharedBlocks(made, owners, [_begin_of(p) for p in owners])
        return lists, others, shared

    def _find_places(self) -> None:
        """Find where each parameter's stream of random bits begins: after the elements before it."""
        self._places.clear()
        place = 0
        for p in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            self._places[p] = place + _begin_of(p)
            place += (p.numel() + 7) // 8 * 8

    def _look_at_places(self) -> None:
        """Forgets the places if groups have other parameters, or in another order."""
        params = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        if len(params) != len(self._places) or not all(map(operator.is_, self._places, params)):
            self._places.clear()

    def _check_plain(self, p, state) -> None:
        """Check the state on which :meth:`_update_plainly` would fail."""
        for name, value in state.items():
            if name != "step" and value.shape != p.shape:
                refuse(_OP, name + " must have the sizes of its param, {}, got {}", p.shape, value.shape)
        if p.dtype in _HALF and self.rounding != "nearest":
            words = "rounding must be nearest on {}, which has no kernel, got {!r}"
            refuse(_OP, words, p.device, self.rounding)

    def _update_plainly(self, group, p, state, clip, scale) -> None:
        parts = [local(state[n]) if n in state else None for n in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
        if not group["amsgrad"]:
            parts[2] = None
        reference_(local(p), local(p.grad), *parts, state["step"], group, clip, scale)

    def _clip(self, groups, max_norm: float, scale=None, before=None) -> torch.Tensor | None:
        """The factor of all gradients, which were multiplied by `scale` and wait for the factor `before`."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():  # so there may be FSDP1
            params = [p for group in self.param_groups for p in group["params"]]
            for p in params:
                if getattr(p, "_fsdp_flattened", False) or hasattr(p, "_is_flat_param"):
                    refuse(
                        _OP,
                        "max_grad_norm must be None under FSDP1, whose shards do not tell of each "
                        "other: call model.clip_grad_norm_",
                    )
            alike(_OP, params)
        grads = _gradients_of(groups)
        if not grads:
            return None
        scale = _on(grads[0].device, scale)
        if before is not None:
            scale = 1 / before if scale is None else scale / before
        self.grad_norm, factor = global_norm(grads, max_norm, scale)
        return factor if before is None else factor * before

    # --- state

    def _state_of(self, group: dict, p, grad, found_inf) -> dict:
        """The state of a parameter, made or completed if it is not."""
        if grad.layout != torch.strided:
            words = "gradients must be dense, got {} (torch.optim.SparseAdam takes sparse ones)"
            refuse(_OP, words, grad.layout)
        state = self.state[p]
        if codes.AVG not in state and "exp_avg_sq" not in state:
            if self._is_coded(group, p):
                codes.make(state, p, _begin_of(p))
            else:
                for name, dtype in zip(("exp_avg", "exp_avg_sq"), self._moment_dtypes(group, p), strict=True):
                    state[name] = _zeros(p, dtype)
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        if group["amsgrad"] and codes.AVG in state:
            refuse(_OP, "amsgrad must be False where moments are 8-bit codes, got True")
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = _zeros(p, state["exp_avg_sq"].dtype)
        key = _EXTRAS.get(self.rounding, ("",))[0]
        if key and key not in state and p.dtype in _HALF:
            state[key] = _zeros(p, torch.int16) if key == "param_low" else p.detach().float()
        if self._counts_on_device(group, p.device, found_inf) and not state["step"].is_cuda:
            state["step"] = state["step"].to(p.device)
        return state

    @staticmethod
    def _counts_on_device(group: dict, device: torch.device, found_inf) -> bool:
        """Whether the GPU counts steps: it decides whether a step is done, or a graph replays steps."""
        return device.type == "cuda" and (group["capturable"] or found_inf is not None)

    def _is_coded(self, group: dict, p) -> bool:
        """Whether the moments of a parameter are 8-bit codes."""
        wanted = group.get("moment_dtype", self.moment_dtype) == "int8"
        return wanted and p.dtype in KERNEL_DTYPES and (p.is_cuda or p.is_cpu) and codes.takes(p)

    def _moment_dtypes(self, group: dict, p) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of both moments of a parameter without codes."""
        given = group.get("moment_dtype", self.moment_dtype)
        if p.dtype not in KERNEL_DTYPES:
            return p.dtype, p.dtype
        pair = given if isinstance(given, tuple) else (given, given)
        return tuple(torch.float32 if dtype == "int8" else dtype or p.dtype for dtype in pair)

    def state_dict(self) -> dict[str, Any]:
        """Do as PyTorch's optimizers do. If moments of DTensors are codes, each process must call it."""
        saved, params = super().state_dict(), itertools.count()
        for group in self.param_groups:
            for number, p in zip(params, group["params"], strict=False):
                state = self.state.get(p, {})
                if codes.AVG in state and is_dtensor(p):
                    wholes = {n: codes.whole_absmax(p, state[n], _begin_of(p)) for n in codes.MAXIMA}
                    saved["state"][number] = state | wholes
        return saved

    def bitsandbytes_state_dict(self) -> dict[str, Any]:
        """The state as ``bitsandbytes.optim.AdamW8bit`` of the same groups loads it.

        Codes of exp_avg are the same; those of exp_avg_sq are made again, of itself and not of its root.

        Raises:
            tigon.Error: moments that are DTensors', which bitsandbytes has none of.
        """
        sharded = any(is_dtensor(p) for group in self.param_groups for p in group["params"])
        check(_OP, not sharded, "params must not be DTensors for a state of bitsandbytes")
        saved = super().state_dict()
        states = {number: codes.bitsandbytes_state(state) for number, state in saved["state"].items()}
        names = ("lr", "betas", "eps", "weight_decay", "params")
        unused = dict.fromkeys(("t_alpha", "t_beta3"))
        groups = [{n: g[n] for n in names} | unused | {"alpha": 0.0} for g in saved["param_groups"]]
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict) -> None:
        """Load as PyTorch's optimizers do. Moments keep their dtype; what a rounding keeps is restored too.

        Also a state of ``bitsandbytes.optim.AdamW8bit`` or of torchao's ``AdamW8bit`` and its kin.
        """
        states = {}

        def look(_, loaded):
            loaded = loaded | {"param_groups": [codes.known_group(group) for group in loaded["param_groups"]]}
            for group in loaded["param_groups"]:
                self._check_group(group)
            ids = itertools.chain.from_iterable(group["params"] for group in loaded["param_groups"])
            params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
            for p, saved in zip(params, ids, strict=False):
                if saved in loaded["state"]:
                    states[p] = codes.known(_OP, loaded["state"][saved])
                    codes.check_saved(_OP, p, states[p])
            # Parameters' states are made of what was saved: PyTorch would cast codes.
            of_params = set(itertools.chain.from_iterable(g["params"] for g in loaded["param_groups"]))
            return loaded | {"state": {k: v for k, v in loaded["state"].items() if k not in of_params}}

        kept = [{n: g[n] for n in ("moment_dtype",) if n in g} for g in self.param_groups]
        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, own in zip(self.param_groups, kept, strict=True):
            group.pop("moment_dtype", None)
            group.update(own)
            for p in group["params"]:
                if p in states:
                    self.state[p] = self._restored(group, p, states[p])

    def _restored(self, group: dict, p, saved: dict) -> dict:
        state, begin = {}, _begin_of(p)
        if codes.AVG in saved and not self._is_coded(group, p):
            saved = codes.decoded(saved, p, begin)
        elif {"exp_avg", "exp_avg_sq"} <= saved.keys() and self._is_coded(group, p):
            saved = codes.encoded(saved, p, begin)
        dtypes = dict(zip(("exp_avg", "exp_avg_sq"), self._moment_dtypes(group, p), strict=True))
        dtypes["max_exp_avg_sq"] = dtypes["exp_avg_sq"]
        for name, value in saved.items():
            kept = dict(_EXTRAS.values()).get(name)
            if name == "step":
                where = p.device if group["capturable"] else "cpu"
                step = (
                    value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                )
                state[name] = step.to(where, torch.float32)
            elif name in codes.MAXIMA:
                state[name] = codes.own_absmax(p, value, begin)
            elif kept is None:
                is_tensor = isinstance(value, torch.Tensor)
                state[name] = _laid_out(p, value, dtypes.get(name, value.dtype)) if is_tensor else value
            # One that another optimizer has rounded is lost; one of another rounding is of no use.
            elif value.dtype == kept and _EXTRAS.get(self.rounding, ("",))[0] == name:
                state[name] = _laid_out(p, value, kept)
        return state


def _check_moments(given: object) -> None:
    """The option moment_dtype, of the whole or of a group."""
    pair = given if isinstance(given, tuple) else (given, given)
    known = len(pair) == 2 and all(t in (None, torch.float32, torch.bfloat16) for t in pair)
    words = "moment_dtype must be float32, bfloat16, None, a pair of them or 'int8', got {}"
    check(_OP, known or given == "int8", words, given)


def check_placed(op: str, p: torch.Tensor, grad: torch.Tensor) -> None:
    """The gradient of a DTensor must be placed as it is."""
    if not (is_dtensor(grad) and grad.placements == p.placements):
        words = "the gradient of a DTensor must be one with the same placements, got {}"
        refuse(op, words, getattr(grad, "placements", type(grad).__name__))


def evaluated(closure):
    """The loss of a step's closure, None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _gradients_of(groups) -> list[torch.Tensor]:
    return [grad for _, _, grads in groups for grad in grads]


def _on(device: torch.device, scalar: torch.Tensor | None) -> torch.Tensor | None:
    """A float32 scalar if it is needed."""
    return None if scalar is None else scalar.to(device, torch.float32, non_blocking=True)


def _zeros(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)


def _laid_out(p: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A loaded tensor on p's device and with its strides."""
    value = value.to(p.device, dtype)
    if is_dtensor(p) or value.shape != p.shape or value.stride() == p.stride():
        return value
    return torch.empty_like(p, dtype=dtype).copy_(value)


def _begin_of(p: torch.Tensor) -> int:
    """The place of a DTensor's local part among its elements; parts by another dimension than the first
    take the place of their first element, which is their own as well."""
    if not is_dtensor(p):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    place = 0
    for size, at in zip(p.shape, offset, strict=True):
        place = place * size + at
    return place
