"""FSDP2's all-gather of a weight that is computed in float8: its bytes and scales instead of the weight.

FSDP2 asks the local tensor of a sharded parameter what to gather, and tells it when that has arrived, by two
functions that it looks for as attributes. Here they are attributes of the one tensor object, so that
optimizers, state dicts and copies see a plain DTensor. A row's scale follows from the row, and shards are
rows: each process quantises its own, and what arrives is what the whole weight would have been quantised to.

The unsharded parameter is FSDP2's own, of one identity in all passes, so that gradients find it. While its
bytes exist it has no memory. Whatever needs the weight itself gets it by another all-gather.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from tigon._op import is_traced_or_transformed
from tigon.integrations.transformers.forward import bound, has_hooks
from tigon.integrations.transformers.sharding import groups_of
from tigon.ops.fp8_linear import Quantized, quantize_rows

_GATHER = "_tigon_gather"  # where a Linear keeps its `Gather`
_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_IN_A_PASS = ("FORWARD", "PRE_BACKWARD")  # in other states a program calls unshard(), which gets weights


class Gather:
    """How the weight of a Linear is gathered: `parameter` of `group`, which are FSDP2's."""

    def __init__(self, module: nn.Linear, owners: Iterable[nn.Module]):
        self.weight_outputs: list[torch.Tensor] = []  # FSDP2's flat buffer of the weight
        self.outputs: list[torch.Tensor] = []  # those of the bytes and of the scales
        self.quantized: Quantized | None = None  # views of them
        self.group, self.parameter = _find(module, owners) or (None, None)
        self.active = self.parameter is not None

    def __deepcopy__(self, memo):
        return None  # what is copied is sharded by others, or not at all

    def __reduce__(self):
        return type(None), ()

    def has_bytes(self) -> bool:
        """Whether the bytes are in memory, and not the weight."""
        return bool(self.outputs) and self.outputs[0].untyped_storage().size() > 0

    def make(self, weight: torch.Tensor) -> Quantized:
        """The weight's bytes. The backward reads those that its own all-gather brings, or else the weight."""

        def of():
            return self.quantized if self.has_bytes() else weight

        if not self.has_bytes():
            self.install(weight)
            return Quantized.make(weight, of)
        made = Quantized(self.quantized.bytes, self.quantized.scales)
        made.of, made.version = of, None if weight.is_inference() else weight._version
        return made

    def install(self, weight: torch.Tensor) -> None:
        """Let the next all-gather ask for bytes."""
        parameter = self.parameter if self.active else None
        if parameter is None or hasattr(local := parameter._sharded_local_tensor, _BEFORE):
            return
        self.active = parameter._unsharded_param is weight and len(parameter.all_gather_outputs) == 1
        if self.active:
            self.weight_outputs = parameter.all_gather_outputs
            setattr(local, _BEFORE, _before)
            setattr(local, _AFTER, _after)
            parameter._init_extensions()

    def uninstall(self) -> None:
        self.active = False
        self.parameter.all_gather_outputs = self.weight_outputs  # after a `begin` without its `end`
        local = self.parameter._sharded_local_tensor
        for name in (_BEFORE, _AFTER):
            if hasattr(local, name):
                delattr(local, name)

    def wants_bytes(self, module: nn.Linear) -> bool:
        """Whether this all-gather is for a pass that computes in float8, and nobody else reads the weight."""
        if not (self.active and module.training) or torch.is_inference_mode_enabled():
            return False
        ours = bound(module)
        return (
            self.group._training_state.name in _IN_A_PASS
            and ours is not None
            and ours.replaces_own()
            and not (has_hooks(module) or _has_any_global_hook())
        )

    def begin(self, of_bytes: bool) -> None:
        """Name the buffers to which FSDP2 copies what it gathers. At first it allocates those of bytes."""
        self.parameter.all_gather_outputs = self.outputs if of_bytes else self.weight_outputs
        self.parameter._unsharded_inner_tensors = []  # FSDP2 would allocate memory for them

    def end(self) -> None:
        """Called when the bytes have arrived. Let FSDP2 free them; the scales stay for the backward."""
        parameter = self.parameter
        if not self.outputs:
            rows, scales = self.outputs = parameter.all_gather_outputs
            self.quantized = Quantized(rows.view(len(scales), -1), scales)
        parameter.all_gather_outputs = self.weight_outputs
        parameter._unsharded_inner_tensors = self.outputs[:1]

    @torch._disable_dynamo
    def require_weight(self) -> None:
        """Replace the bytes by the weight. If autograd records, later all-gathers bring the weight too."""
        if self.active and torch.is_grad_enabled():
            self.uninstall()
        if self.has_bytes():
            self.group._to_sharded()
            self.group.unshard()
            self.group.wait_for_unshard()


def _before(mesh, outer_size, outer_stride, module, mp_policy):
    """What FSDP2 gathers, and what it tells `_after`: here whose bytes they are."""
    local, dtype = module._parameters["weight"]._local_tensor, mp_policy.param_dtype
    local = local.detach() if dtype is None else local.detach().to(dtype)
    gather = module.__dict__.get(_GATHER)
    if gather is None or not gather.active:
        return (local,), None
    of_bytes = gather.wants_bytes(module)
    gather.begin(of_bytes)
    return (quantize_rows(local), gather) if of_bytes else ((local,), None)


_before.__signature__ = inspect.signature(_before)  # FSDP2 asks for it in each all-gather


def _after(all_gather_outputs, gather, param_dtype, *, out=None):
    if gather is not None:
        gather.end()
    return None if out is not None else (all_gather_outputs[0], [])


def gathered(module: nn.Linear, weight: torch.Tensor, owners: Iterable[nn.Module]) -> Quantized | None:
    """The bytes, in a pass of FSDP2, of the module's weight or of a copy in another dtype.

    None under compilers and transforms: the call then makes them itself and keeps them for its backward.
    """
    if is_traced_or_transformed():
        require_weight(module)
        return None
    if weight is not module._parameters["weight"]:
        return Quantized.make(weight, lambda: weight)
    gather = module.__dict__.get(_GATHER)
    if gather is None:
        gather = module.__dict__[_GATHER] = Gather(module, owners)
    return gather.make(weight)


def require_weight(module: nn.Module) -> None:
    """Called before something reads the weight of a Linear whose bytes may have been gathered instead."""
    gather = module.__dict__.get(_GATHER)
    if gather is not None and gather.active:
        gather.require_weight()


def forget_gather(module: nn.Module) -> None:
    """Let FSDP2 gather the weight again."""
    gather = module.__dict__.pop(_GATHER, None)
    if gather is not None and gather.active:
        gather.uninstall()
        if gather.has_bytes():
            gather.group._to_sharded()


def _find(module: nn.Linear, owners: Iterable[nn.Module]) -> tuple | None:
    """FSDP2's group and parameter of the weight, if both have all that is needed.

    Each process has to hold the same number of whole rows. Weights are gathered if FSDP2 moves them to the
    CPU or reshards to fewer processes, or if there is one process: FSDP2 then takes one tensor a parameter.
    """
    try:
        for group in groups_of(owners):
            for parameter in group.fsdp_params:
                info, mesh = parameter._module_info, parameter.mesh_info
                if info.module is not module or info.param_name != "weight":
                    continue
                fits = (
                    parameter.fsdp_placement.dim == 0
                    and mesh.shard_mesh_size > 1
                    and len(module.weight) % mesh.shard_mesh_size == 0
                    and not (parameter.is_dtensor or parameter.offload_to_cpu or info.shared_modules)
                    and not group._use_post_forward_mesh
                    and all(hasattr(parameter, name) for name in _OF_PARAMETER)
                    and all(hasattr(group, name) for name in _OF_GROUP)
                )
                return (group, parameter) if fits else None
    except AttributeError:
        pass  # a version of FSDP2 with other attributes
    return None


_OF_PARAMETER = (
    *("_sharded_local_tensor", "_unsharded_param", "all_gather_outputs"),
    *("_init_extensions", "_unsharded_inner_tensors"),
)
_OF_GROUP = ("_training_state", "_to_sharded", "unshard", "wait_for_unshard")
