"""Cases of two processes: the slot `lora` under what shards, gathers and reduces."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from tiny import adapted, close, make, step
from torch.nn.parallel import DistributedDataParallel
from transformers_cases import load, saved
from two_processes import (
    FOLDER,
    accelerated,
    case,
    data,
    full,
    rank,
    two_steps,
    with_tigon,
    zero_engine,
    zero_step,
)

from tigon.integrations.transformers import apply
from tigon.integrations.transformers import lora as slot

LAYERS = 14


@contextlib.contextmanager
def native(layers):
    """Every LoRA layer inside runs natively in the forwards, so many layers altogether."""
    ran = []

    def counting(x, layout, *rest):
        ran.append(layout.count)
        return original(x, layout, *rest)

    original = slot.apply
    # Norms of any size are formed again in the backward, by when their weights are freed.
    with mock.patch.object(slot, "apply", counting), mock.patch.object(slot, "_LARGE", 0):
        yield
    assert sum(ran) == layers, ran


OPTIONS = {"plain": ({},), "dora": ({"use_dora": True},), "bias": ({"bias": "all"},)}


@case(needs="peft", **OPTIONS)
def lora_ddp(options):
    model = adapted(make(), **options)
    _, losses, want = with_tigon(model)
    wrapped = DistributedDataParallel(model)
    with native(2 * LAYERS):
        two_steps(wrapped, losses, want, ulps=512)


@case(needs="peft", **OPTIONS, checkpointing=({}, True), reentrant=({}, True, True))
def lora_accelerate_fsdp2(options, checkpointing=False, reentrant=False):
    """Adapters, which are float32, in the groups of their layers."""
    model = adapted(make(), **options)
    _, losses, want = with_tigon(model)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model = accelerated(model)
    with native(2 * LAYERS * (1 + checkpointing)):
        two_steps(model, losses, want, ulps=512)


@case(needs="peft")
def lora_tensor_parallel():
    """transformers gives the base a forward of its own; PEFT computes, and the report says why."""
    from transformers.distributed import DistributedConfig

    model = load(saved(FOLDER[0], "llama", vocab_size=98), DistributedConfig(tp_size=2, tp_plan="auto"))
    model = adapted(model, target_modules=["q_proj", "v_proj"])
    loss, want = step(model, data(0))
    report = apply(model, loss=False)
    left = [entry.reason for entry in report.left if entry.slot == "lora"]
    assert len(left) == 4 and all("tensor parallel" in reason for reason in left), report
    got, gradients = step(model, data(0))
    close(full(got), full(loss))
    close(*({name: full(g) for name, g in one.items()} for one in (gradients, want)), ulps=512)


@case(needs="peft")
def lora_saved():
    """Written by FSDP2's full state dict, the adapters are those of one process."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = adapted(make())
    want = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    apply(model)
    model = accelerated(model)
    model(**data()).loss.backward()
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank() == 0:
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    dist.barrier()


@case(
    needs="deepspeed",
    two=(2, {}),
    three=(3, {}),
    three_dora=(3, {"use_dora": True}),
    three_checkpointing=(3, {}, True),
)
def lora_zero(stage, options, checkpointing=False):
    """ZeRO-3 gathers each part in hooks of its own: PEFT computes there."""
    model = adapted(make(), **options)
    _, losses, want = with_tigon(model)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = zero_engine(model, stage)
    with native(LAYERS if stage == 2 else 0):
        zero_step(engine, losses, want, ulps=512)
