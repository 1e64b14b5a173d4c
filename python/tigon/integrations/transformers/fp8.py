"""Linears of a model's layers with float8 matmuls: which are replaced, which are left and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from tigon._dtensor import KERNEL_DTYPES, is_dtensor
from tigon.error import Error
from tigon.integrations.transformers.forward import autocast_dtype, blocked, bound, plain, stock
from tigon.integrations.transformers.fp8_gather import gathered, require_weight
from tigon.integrations.transformers.head_operands import LORA_PARTS, is_linear
from tigon.integrations.transformers.recompute import LinearSpec
from tigon.ops import fp8_linear
from tigon.ops.fp8_linear import MULTIPLE
from tigon.ops.fp8_weight import Fp8Weight

RECIPES = {"rowwise": "fp8", "rowwise_dw_bf16": "bf16"}  # name -> the matmul of a weight's gradient


class Options(NamedTuple):
    """The options of `apply` for float8."""

    recipe: str
    names: tuple[str, ...] = ()
    first_last_bf16: bool = False
    base_only: bool = False


@dataclass(frozen=True)
class Fp8Spec:
    """How a Linear computes in float8."""

    dw: str
    adapted: bool = False  # the model has adapters: frozen weights are quantised once
    owners: tuple[nn.Module, ...] = ()  # the modules that contain the Linear
    packs: bool = False  # only the bytes of its weight are kept
    keeps_bytes = True  # of x, and not x

    def gathers(self, weight: torch.Tensor) -> bool:
        """Whether the weight exists for this pass only, as FSDP2 gathers it."""
        if hasattr(weight, "ds_id"):
            raise Error(
                "[apply] fp8 must run under FSDP2, DDP or ZeRO-2, got a weight that ZeRO-3 has sharded"
            )
        kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        return any(isinstance(owner, kind) for owner in self.owners)


def pack(linear: nn.Linear) -> None:
    """Keep only the bytes of a frozen weight. State dicts contain the weight that they stand for."""
    if type(linear.weight) is Fp8Weight:
        linear.weight.pack()
    else:
        linear.weight = Fp8Weight.of(linear.weight)
        linear.register_state_dict_post_hook(_densify)


def unpack(linear: nn.Module) -> None:
    """Make the weight of a Linear dense again if only its bytes were kept."""
    if type(linear._parameters.get("weight")) is Fp8Weight:
        linear.weight = nn.Parameter(linear.weight.dequantize(), requires_grad=False)
        for key in [key for key, hook in linear._state_dict_hooks.items() if hook is _densify]:
            del linear._state_dict_hooks[key]


def _densify(linear, state, prefix, metadata) -> None:
    """Put the weight into a state dict on the CPU: programs that save only adapters ask for it too."""
    weight = state.get(prefix + "weight")
    if type(weight) is Fp8Weight and not isinstance(weight, nn.Parameter):
        state[prefix + "weight"] = weight.dequantize().cpu()


def fp8_forward(module: nn.Module, spec: Fp8Spec, x):
    """Compute in float8 in training; evaluation, which reads weights once, runs as before."""
    weight, bias = module.weight, module.bias
    if not (module.training or torch.is_grad_enabled()):
        return _as_before(module, x)
    given = [x] if bias is None else [bias, x]
    if type(weight) is not Fp8Weight:
        given.append(weight)
    if not plain(*given) or x.device != weight.device or x.device.type not in ("cpu", "cuda"):
        return _as_before(module, x)
    dtype = autocast_dtype(x.device.type)
    if dtype is None and weight.dtype != x.dtype:
        return _as_before(module, x)  # the original forward raises its own error
    dtype = dtype or x.dtype
    if dtype not in KERNEL_DTYPES or weight.dtype not in KERNEL_DTYPES or x.shape[-1] != weight.shape[1]:
        return _as_before(module, x)
    x = x.to(dtype)
    if weight.dtype not in (dtype, torch.float32):
        require_weight(module)
        weight = weight.to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
    made = gathered(module, weight, spec.owners) if spec.gathers(weight) else None
    return fp8_linear.apply(x, weight, bias, spec.dw, reuse=True, frozen=spec.adapted, made=made)


def _as_before(module: nn.Module, x):
    require_weight(module)
    return stock(module, x)


def gains(rows: int, columns: int) -> bool:
    """Whether matmuls with a weight of these sizes are faster in float8, with the casts of x and dy."""
    return rows * columns >= 1 << 22 and min(rows, columns) >= 1024


def check_recipe(recipe: str | None, model: nn.Module) -> None:
    """Refuse an unknown recipe, and GPUs without float8 matmuls."""
    if recipe is None:
        return
    if recipe not in RECIPES:
        raise Error(f"[apply] fp8 must be one of {[*RECIPES]} or None, got {recipe!r}")
    for device in {p.device for p in model.parameters() if p.is_cuda}:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            major, minor = capability
            raise Error(f"[apply] fp8 must run on compute capability 8.9 or newer, got {major}.{minor}")


def plan_fp8(
    model: nn.Module, heads: set[int], bases: set[int], options: Options
) -> Iterator[tuple[str, nn.Module, tuple | str]]:
    """(path, module, (spec, what it is) or why it is left) of all Linears and experts.

    Args:
        bases: identities of the bases that the slot `lora` computes.
    """
    names, recipe = options.names, options.recipe
    unknown = set(names)
    parents = dict(model.named_modules())
    adapted = any(all(hasattr(m, part) for part in LORA_PARTS) for m in parents.values())
    for path, module in parents.items():
        if not isinstance(module, nn.Linear):
            if "experts" in path.split(".") and any(p.dim() == 3 for p in module.parameters(recurse=False)):
                yield path, module, "experts: their casts take what float8 gains"
            continue
        asked = {name for name in names if path == name or f".{path}.".find(f".{name}.") >= 0}
        unknown -= asked
        base = id(module) in bases
        verdict = _place(path, parents, heads, options.first_last_bf16, base) or _kind(module)
        if asked:
            verdict = "asked for by name: fp8_except"
        by = f"tigon.{'lora' if base else 'fp8'}_linear ({recipe})"
        packs = options.base_only and not module.weight.requires_grad and not is_dtensor(module.weight)
        by += ", bytes only" * packs
        names_above = path.split(".")
        owners = tuple(parents[".".join(names_above[:i])] for i in range(len(names_above)))
        yield path, module, verdict or (Fp8Spec(RECIPES[recipe], adapted, owners, packs), by)
    if unknown:
        raise Error(f"[apply] fp8_except must name Linears of the model, found none of {sorted(unknown)}")


def _place(
    path: str, parents: dict[str, nn.Module], heads: set[int], first_last_bf16: bool, base: bool
) -> str | None:
    """The reason if a Linear is left because of its place in the model."""
    if id(parents[path]) in heads:
        return "output head"
    above = path.split(".")
    owners = [parents[".".join(above[:i])] for i in range(len(above))]  # from the model down
    lists = [i for i, owner in enumerate(owners) if isinstance(owner, nn.ModuleList)]
    if not lists:
        return "not in a layer"
    parent = owners[-1]
    if all(hasattr(parent, part) for part in LORA_PARTS):
        if not base:
            return "base of an adapter that the slot lora does not compute"
        if parent.lora_variant:
            return "DoRA reads the base's own weight"
        if parents[path].weight.requires_grad:
            return "base of an adapter that is trained too"
        parent = owners[-2]
    elif any(all(hasattr(owner, part) for part in LORA_PARTS) for owner in owners):
        return "LoRA adapter"
    if "experts" in above[:-1]:
        return "expert"
    if hasattr(parent, "experts") and not hasattr(parents[path], "experts"):
        return "router"
    if "router" in type(parent).__name__.lower() or "router" in above[-1].lower():
        return "router"
    place, count = int(above[lists[0]]), len(owners[lists[0]])
    if first_last_bf16 and place in (0, count - 1):
        return "asked for: first_last_bf16"
    return None


def _kind(module: nn.Linear) -> str | None:
    """The reason if a Linear is left because of its class or its weight."""
    known = bound(module)
    if known is not None and not isinstance(known.spec, Fp8Spec | LinearSpec):
        return "replaced by another slot"
    sharded = is_dtensor(module.weight)  # FSDP2 gathers it for the forward
    whole = plain(module.weight) or type(module.weight) is Fp8Weight
    if not is_linear(module) or not (whole or sharded) or module.weight.dtype not in KERNEL_DTYPES:
        return "no plain weight"
    rows, columns = module.weight.shape
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"{rows} x {columns} is no multiple of {MULTIPLE}"
    if not gains(rows, columns):
        return f"{rows} x {columns} gains nothing"
    return blocked(module)
