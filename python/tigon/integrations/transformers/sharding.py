"""FSDP, ZeRO and DDP with a loss head: when its weight is in memory, and cases that they do not handle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tigon._dtensor import is_dtensor
from tigon._op import is_traced_or_transformed
from tigon.error import check
from tigon.integrations.transformers.forward import plain, tensor_parallel


def present(head: nn.Module) -> bool:
    """Whether the weights of a head are whole and in memory: not sharded, not freed."""
    if vocabulary_sharded(head):
        return head.weight.to_local().untyped_storage().size() > 0
    weights = [head.weight, *head.parameters()]
    if not plain(*weights) or head.weight.ndim != 2:  # FSDP1 leaves a part of one dimension
        return False
    if is_traced_or_transformed():
        return True  # such tensors have no storage to check
    return all(weight.untyped_storage().size() > 0 for weight in weights)


def vocabulary_sharded(head: nn.Module) -> bool:
    """Whether processes of a tensor-parallel group hold rows of the weight, which nothing else shards."""
    weight, bias = head.weight, getattr(head, "bias", None)
    if plain(weight) or not is_dtensor(weight) or not tensor_parallel(head):
        return False
    (first, *others) = weight.placements
    fits = not others and first.is_shard(0)
    return fits and (bias is None or (is_dtensor(bias) and bias.placements == weight.placements))


def gathered_once(head: nn.Module) -> str | None:
    """Why the weight of a model's output head is in memory only during its first call, or None."""
    if hasattr(head, "_fsdp_wrapped_module"):
        return "FSDP1 holds the head as a unit of its own (leave it in the root)"
    state = _state(head)
    if state is None or not any(group.post_forward_mesh_info for group in _groups(state)):
        return None
    if len(state._modules) > 1:
        return "FSDP2 reshards the head in one group with other modules (reshard_after_forward=True)"
    return "FSDP2 reshards PEFT's wrapper of the head" if hasattr(head, "modules_to_save") else None


def in_a_group(head: nn.Module) -> bool:
    """Whether FSDP2 groups a head with other modules, so that calling only the head gathers the group."""
    state = _state(head)
    return state is not None and len(state._modules) > 1


def refuse_main_grad(owner: nn.Module, head: nn.Module) -> None:
    """Raise an error if the gradient in ``main_grad`` would be that of one process only."""
    states = filter(None, map(_state, (owner, head)))
    sharded = [p.sharded_param for state in states for group in _groups(state) for p in group.fsdp_params]
    weight = getattr(head, "weight", None)  # of PEFT's layer around a module that has none
    marked = any(getattr(p, "tigon_main_grad", False) for p in (weight, *sharded))
    if not marked:
        return
    wrapper = "FSDP2" if sharded or not plain(weight) else None
    if wrapper is None and DistributedDataParallel._active_ddp_module is not None:
        wrapper = "DistributedDataParallel"
    check(
        "apply",
        wrapper is None,
        "weight.tigon_main_grad must not be set under {}, which reduces "
        "weight.grad alone over the processes, got it set on a head's weight",
        wrapper,
    )


def _state(module):
    ask = getattr(module, "_get_fsdp_state", None)
    return None if ask is None else ask()


def _groups(state) -> list:
    groups = getattr(state, "_fsdp_param_groups", None)  # PyTorch before 2.12 has one
    return [group for group in (state._fsdp_param_group,) if group] if groups is None else groups


def groups_of(owners: Iterable[nn.Module]) -> Iterator:
    """FSDP2's groups of parameters of these modules from the last on, then those of all inside of them."""
    owners = [*owners]
    for module in (*reversed(owners), *(module for owner in owners[:1] for module in owner.modules())):
        state = _state(module)
        yield from () if state is None else _groups(state)
