"""What the cases of two processes share: their register, the oracle, and the loop that runs them."""

import datetime
import functools
import json
import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import batch, close, step
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tigon
from tigon.integrations.transformers import apply

CASES = {}
FOLDER = []  # of this run
NEEDS = {}  # case -> package, or package>=version


def case(function=None, *, needs=None, **variants):
    """Register a case, or one for each of the named variants of its arguments."""
    if function is None:
        return functools.partial(case, needs=needs, **variants)
    named = {f"{function.__name__}[{name}]": functools.partial(function, *a) for name, a in variants.items()}
    for name, call in (named or {function.__name__: function}).items():
        CASES[name] = call
        if needs is not None:
            NEEDS[name] = needs
    return function


def rank():
    return dist.get_rank()


def device_type():
    """Where this run's tensors are: "cpu" (gloo) or "cuda" (NCCL)."""
    return torch.get_default_device().type


def mesh(*shape, **options):
    return dist.device_mesh.init_device_mesh(device_type(), shape or (dist.get_world_size(),), **options)


def data(of=None):
    return batch(torch.get_default_device(), seed=10 + (rank() if of is None else of))


def wanted(model, times=1.0):
    """Stock's losses on every rank's data, and its gradients averaged over ranks."""
    steps = [step(model, data(r)) for r in range(dist.get_world_size())]
    model.zero_grad(set_to_none=True)
    total = {name: times * sum(grads[name] for _, grads in steps) / len(steps) for name in steps[0][1]}
    return [loss for loss, _ in steps], total


def with_tigon(model, times=1.0, **slots):
    """Patches a model. Its report, and what `wanted` says of it before."""
    losses, want = wanted(model, times)
    return apply(model, **slots), losses, want


def with_tigon_alike(model):
    """Patches a model. Its report, a batch that all processes have, and stock's step of it."""
    inputs = data(0)
    loss, want = step(model, inputs)
    model.zero_grad(set_to_none=True)
    return apply(model), inputs, loss, want


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")


def check_gradients(model, want, ulps=256):
    got = {}
    for name, parameter in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if parameter.requires_grad:
            got[name] = full(parameter.grad)
    close(got, want, ulps=ulps)


def shard(model, head, layers=True, group=False, **options):
    """Shard layers, then the head as the layout says, then the root."""
    on = functools.partial(fully_shard, mesh=mesh(), **options)
    for layer in model.model.layers:
        on(layer, reshard_after_forward=layers)
    tail = {
        "root": [],
        "own": [model.lm_head],
        "tail": [model.model.norm, model.lm_head],
        "embed": [model.model.embed_tokens, model.lm_head],
        "tied tail": [model.model.norm, model.model.embed_tokens, model.lm_head],
    }[head]
    if tail:
        on(tail if len(tail) > 1 else tail[0], reshard_after_forward=group)
    on(model)
    return model


def two_steps(model, losses, want, ulps=256):
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss = model(**data()).loss
        loss.backward()
        close(full(loss.detach()), losses[rank()], ulps=ulps)
        check_gradients(model, want, ulps)


def accelerated(model):
    """What accelerate's FSDP2 makes of a model: layers in groups."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", ACCELERATE_USE_CPU="true")
    try:
        options = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
        options |= {"reshard_after_forward": True, "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
        options |= {"cpu_ram_efficient_loading": False}
        plugin = FullyShardedDataParallelPlugin(**options)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        accelerator.state.fsdp_plugin = plugin
        plugin.set_auto_wrap_policy(model)
        plugin.cpu_ram_efficient_loading = False
        return fsdp2_prepare_model(accelerator, model)
    finally:
        for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_USE_CPU"):
            del os.environ[name]


def zero_engine(model, stage):
    """DeepSpeed's engine around a model, with an optimizer of what is trained."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**6,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
    }
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def zero_step(engine, losses, want, ulps=256):
    """A step of DeepSpeed's engine: the loss, and the gradients of what is trained."""
    from deepspeed.utils import safe_get_full_grad

    loss = engine(**data()).loss
    engine.backward(loss)
    close(loss.detach(), losses[rank()], ulps=256)
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            close(safe_get_full_grad(parameter), want[name], ulps=ulps)
    engine.step()


def fused(report, count):
    calls = report.head_calls
    assert (calls.fused, calls.materialised, calls.computed) == (count, 0, 0), calls


def refused(call, *words):
    try:
        call()
    except tigon.Error as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError("not refused")


def main(folder, names):
    """Run the cases over NCCL where every process has a GPU, else over gloo.

    Each rank writes what went wrong, or nothing, as soon as it knows.
    """
    FOLDER.append(Path(folder))
    torch.set_num_threads(1)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    # One process may be late on a busy machine.
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=120))
    with open(FOLDER[0] / f"rank{rank()}.jsonl", "w", buffering=1) as outcomes:
        for name in names or CASES:
            dist.barrier()
            try:
                CASES[name]()
                said = None
            except Exception:
                said = traceback.format_exc()
            outcomes.write(json.dumps([name, said]) + "\n")
    dist.barrier()
    os._exit(0)  # groups of meshes need no orderly end
