"""Cases of two processes over gloo. `test_hf_distributed.py` starts them once and reads each case's outcome.

python distributed_cases.py FOLDER [case ...], with the variables of torchrun; without cases: all of them.
"""

import copy
import functools
import sys
from unittest import mock

import contrastive_cases  # noqa: F401  these files register their cases
import dtensor_cases  # noqa: F401
import fp8_cases  # noqa: F401
import fp8_gather_cases  # noqa: F401
import graph_parallel_cases  # noqa: F401
import lora_cases  # noqa: F401
import megatron_cases  # noqa: F401
import multi_token_cases  # noqa: F401
import optimizer_cases  # noqa: F401
import parallel_cases  # noqa: F401
import parallel_label_cases  # noqa: F401
import parallel_name_cases  # noqa: F401
import parallel_option_cases  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers_cases  # noqa: F401
from tiny import VOCABULARY, adapted, apply_around, close, make, step
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from two_processes import (
    accelerated,
    case,
    check_gradients,
    data,
    full,
    fused,
    main,
    mesh,
    rank,
    refused,
    shard,
    two_steps,
    wanted,
    with_tigon,
    with_tigon_alike,
    zero_engine,
    zero_step,
)

import tigon
from tigon import _op
from tigon.checkpoint import GROUPS
from tigon.integrations.transformers import apply, qk_norm

# --- DDP -------------------------------------------------------------------------------------


@case(
    plain=({},),
    find_unused=({"find_unused_parameters": True},),
    static_graph=({"static_graph": True},),
    bucket_views=({"gradient_as_bucket_view": True},),
    apply_after_wrapping=({}, "after"),
)
def ddp(options, when="before"):
    model = make()
    losses, want = wanted(model)
    model, report = apply_around(functools.partial(DistributedDataParallel, **options), model, when)
    for count in (1, 2):
        close(step(model, data())[0], losses[rank()])
        check_gradients(model, want)
        fused(report, count)


@case
def ddp_no_sync():
    model = make()
    _, _, want = with_tigon(model, times=2)
    model = DistributedDataParallel(model)
    with model.no_sync():
        model(**data()).loss.backward()
    model(**data()).loss.backward()
    check_gradients(model, want)


@case
def ddp_a_rank_without_labels():
    """The number of labels of all ranks is the denominator; the tied weight takes part on both ranks."""
    stock = make("llama_bias_tied")
    inputs = [data(r) for r in range(2)]
    inputs[1]["labels"] = torch.full_like(inputs[1]["labels"], -100)
    count = sum((one["labels"][:, 1:] != -100).sum() for one in inputs)
    grads = [step(stock, {**one, "num_items_in_batch": count})[1] for one in inputs]
    apply(stock)
    model = DistributedDataParallel(stock)
    step(model, {**inputs[rank()], "num_items_in_batch": count})
    check_gradients(model, {name: (grad + grads[1][name]) / 2 for name, grad in grads[0].items()})


@case
def ddp_all_masked_on_a_rank():
    """A mean over nothing is NaN there, as in stock; its gradients are zeros."""
    model = make()
    apply(model)
    model = DistributedDataParallel(model)
    inputs = data()
    if rank() == 1:
        inputs["labels"].fill_(-100)
    loss, grads = step(model, inputs)
    assert loss.isnan() == (rank() == 1) and all(grad.isfinite().all() for grad in grads.values())


@case
def ddp_main_grad():
    model = make()
    apply(model)
    weight = model.lm_head.weight
    weight.tigon_main_grad, weight.main_grad = True, torch.zeros_like(weight)
    ran = []
    model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(1))
    wrapped = DistributedDataParallel(model)
    refused(lambda: wrapped(**data()), "tigon_main_grad", "DistributedDataParallel")
    assert not ran and not weight.main_grad.any()
    model(**data()).loss.backward()  # without the wrapper it is what was asked for
    assert weight.main_grad.any()


# --- FSDP2 -----------------------------------------------------------------------------------


LAYOUTS = {
    f"{head}-{'reshard' if layers else 'keep'}": (head, layers, when)
    for head in ("root", "own", "tail")
    for layers, when in ((True, "before"), (False, "after"))
}
LAYOUTS |= {
    f"tied {head}": (head, True, "before", "llama_bias_tied") for head in ("root", "embed", "tied tail")
}


@case(**LAYOUTS)
def fsdp2(head, layers, when, family="llama"):
    model = make(family)
    losses, want = wanted(model)
    on = functools.partial(shard, head=head, layers=layers, group=head == "own" and layers)
    model, report = apply_around(on, model, when)
    two_steps(model, losses, want)
    fused(report, 2)


@case(root=("root",), own=("own",))
def ledger_fsdp2(head):
    """From the second step on, MLPs, whose weights come and go, give back what the head takes."""
    model = make()
    shard(model, head, group=head == "own")
    apply(model)
    ledger = model._tigon_state.ledger
    for given_back in (False, True):
        loss = model(**data()).loss
        assert (0 < ledger.owed < ledger.taken) == given_back
        loss.backward()


@case(norm=({"norm": False},), loss=({"loss": False},))
def fsdp2_tail_without(slots):
    model = make()
    _, losses, want = with_tigon(model, **slots)
    two_steps(shard(model, "tail"), losses, want)


@case
def fsdp2_tail_resharded():
    """The group's weights are gone after the head's first call: it computes logits, and says why."""
    model = make()
    report, losses, want = with_tigon(model)
    two_steps(shard(model, "tail", group=True), losses, want)
    assert report.head_calls.lazy == 0 and "reshard_after_forward=True" in report.head_calls.reason
    model.lm_head.set_reshard_after_forward(False)
    two_steps(model, losses, want)
    assert report.head_calls.fused == 2


@case(root=("root", True), own=("own", False), tail=("tail", True), tail_nonreentrant=("tail", False))
def fsdp2_checkpointing(head, reentrant):
    model = make()
    report, losses, want = with_tigon(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    two_steps(shard(model, head, group=head == "own"), losses, want)
    fused(report, 2)


@case(
    ddp=("ddp", "elementwise"),
    ddp_layers=("ddp", 0.5),
    root=("root", "elementwise"),
    own=("own", "elementwise"),
    tail=("tail", 0.5),
    after=("root", 0.5, "after"),
)
def fsdp2_recompute(head, mode, when="before"):
    """Weights of norms and Linears are freed between the forward and the backward."""
    model = make(num_hidden_layers=3)
    losses, want = wanted(model)
    shards = functools.partial(shard, head=head, group=head == "own")
    wrap = DistributedDataParallel if head == "ddp" else shards
    model, report = apply_around(wrap, model, when, recompute=mode)
    two_steps(model, losses, want)
    assert "q_proj, k_proj, v_proj, gate_proj, up_proj, down_proj keep no result" in str(report)


@case(
    ddp=(None, "llama"),
    fsdp2=("root", "llama"),
    fsdp2_tail=("tail", "llama"),
    fsdp2_sparse=("root", "mixtral"),
    everything=("root", "mixtral", tuple(GROUPS)),
)
def checkpoint_policy(head, family, save=("attention", "matmuls")):
    """Layers that keep what a policy names, gathered once more for the rest."""
    model = make(family, attn_implementation="sdpa", use_cache=False)
    report, losses, want = with_tigon(model)
    options = {"use_reentrant": False, "context_fn": tigon.checkpoint_policy(save)}
    model.gradient_checkpointing_enable(options)
    two_steps(DistributedDataParallel(model) if head is None else shard(model, head), losses, want)
    fused(report, 2)


@case(plain=(False, False), checkpointed=(False, True), attention=(True, False))
def fsdp2_qk_norm(unit, checkpointed):
    """Norms of q and k fused with the rotary embedding, the attention in a unit of its own or its layer's."""
    model = make("qwen3")
    report, losses, want = with_tigon(model, qk_norm=True)
    assert report.count("qk_norm") == 2
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if unit:
        for layer in model.model.layers:
            fully_shard(layer.self_attn, mesh=mesh())
    with mock.patch.object(qk_norm, "qk_norm_rope", wraps=qk_norm.qk_norm_rope) as op:
        two_steps(shard(model, "root"), losses, want)
    assert op.call_count == (8 if checkpointed else 4)


SAVED = [torch.ops.aten.mm.default]


@case(
    none=({},),
    full=({0: {}, 1: {}},),
    every_second=({1: {}},),
    selective=(
        {i: {"context_fn": functools.partial(create_selective_checkpoint_contexts, SAVED)} for i in (0, 1)},
    ),
    policy=({i: {"context_fn": tigon.checkpoint_policy()} for i in (0, 1)},),
)
def fsdp2_compile(checkpointed):
    """Layers checkpointed, compiled and sharded, in this order."""
    model = make(use_cache=False)
    report, losses, want = with_tigon(model)
    for i, layer in enumerate(model.model.layers):
        if i in checkpointed:
            model.model.layers[i] = checkpoint_wrapper(layer, **checkpointed[i])
        model.model.layers[i].compile(backend="aot_eager", fullgraph=True)
    two_steps(shard(model, "tail"), losses, want)
    fused(report, 2)


@case(root=("root",), own=("own",), tail=("tail",))
def fsdp2_accumulation(head):
    model = make()
    report, _, want = with_tigon(model, times=2)
    shard(model, head, group=head == "own")
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model.set_requires_gradient_sync(False)
        model(**data()).loss.backward()
        model.set_requires_gradient_sync(True)
        model(**data()).loss.backward()
        check_gradients(model, want)
    fused(report, 4)


@case(root=("root",), own=("own",), tail=("tail",))
def fsdp2_mixed_precision(head):
    """bf16 weights, fp32 reduction: at most twice stock's error against fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact = make()
    losses, want = wanted(exact)
    errors = {}
    for patched in (False, True):
        model = make()
        report = apply(model) if patched else None
        shard(model, head, mp_policy=policy)
        loss, _ = step(model, data())
        differences = [
            (full(p.grad) - want[name]).norm() / want[name].norm() for name, p in model.named_parameters()
        ]
        errors[patched] = ((loss - losses[rank()]).abs().item(), max(differences).item())
    fused(report, 1)
    ulp = torch.finfo(torch.bfloat16).eps
    assert errors[True][0] <= 2 * errors[False][0] + ulp and errors[True][1] <= 2 * errors[False][1], errors


@case(root=("root", 0), own=("own", 1), tail=("tail", 0))
def fsdp2_gathers(head, more):
    """All-gathers of a step: stock's number, and one more where the head is a resharded unit of its own."""
    counts, name = [], "foreach_all_gather"
    for patched in (False, True):
        model = make()
        if patched:
            apply(model)
        shard(model, head, group=head == "own")
        step(model, data())
        with mock.patch.object(_fsdp_param_group, name, wraps=getattr(_fsdp_param_group, name)) as gather:
            step(model, data())
        counts.append(gather.call_count)
    assert counts[0] > 2 and counts[1] - counts[0] == more, counts


@case(root=("root",), own=("own",), tail=("tail",))
def fsdp2_logits_read(head):
    """Before the backward they are stock's; after it the head's group is closed, and says so."""
    stock = make()
    _, want = wanted(stock)
    logits = stock(**data()).logits.detach()
    model = shard(copy.deepcopy(stock), head, group=head == "own")
    apply(model)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        output = model(**data())
        close(output.logits[:, -1].clone(), logits[:, -1])
        output.loss.backward()
        check_gradients(model, want)
        if head == "own":
            close(output.logits[:, 0].clone(), logits[:, 0])
        else:
            refused(lambda output=output: output.logits[:, 0].clone(), "before backward()")


@case(root=("root",), own=("own",), tail=("tail",))
def fsdp2_main_grad(head):
    model = make()
    apply(model)
    shard(model, head)
    model.lm_head.weight.tigon_main_grad = True
    refused(lambda: model(**data()), "tigon_main_grad", "FSDP2")


@case
def fsdp2_evaluation_between_steps():
    model = make()
    losses, want = wanted(model)
    stock = copy.deepcopy(model).eval()
    report = apply(model)
    shard(model, "tail")
    two_steps(model, losses, want)
    model.zero_grad()
    with torch.no_grad():
        got = model.eval()(**data(), skip_logits=True)
        close(got.loss, stock(**data()).loss)
        close(model(**data()).logits, stock(**data()).logits)
    model.train()(**data()).loss.backward()
    check_gradients(model, want)
    fused(report, 4)


@case
def fsdp2_lora():
    """PEFT's model around it, the adapter of the head in the group of the norm."""
    model = adapted(make(), target_modules=["q_proj", "lm_head"])
    report, losses, want = with_tigon(model)
    inner = model.get_base_model()
    for part in (*inner.model.layers, [inner.model.norm, inner.lm_head], model):
        fully_shard(part, mesh=mesh(), reshard_after_forward=False)
    two_steps(model, losses, want, ulps=512)
    fused(report, 2)


# --- what accelerate and transformers do -----------------------------------------------------


@case(needs="accelerate", untied=("llama",), tied=("llama_bias_tied",))
def accelerate_fsdp2(family):
    model = make(family)
    report, losses, want = with_tigon(model)
    two_steps(accelerated(model), losses, want)
    fused(report, 2)


# --- FSDP1, ZeRO -----------------------------------------------------------------------------


@case(root=(True, False), flat=(False, False), own_unit=(True, True))
def fsdp1(original, own):
    """A head in the root's unit is fused; one in a unit of its own computes logits, and says why."""
    model = make()
    report, losses, want = with_tigon(model)
    units = [*model.model.layers, *([model.lm_head] if own else [])]
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in units)
    model = FullyShardedDataParallel(
        model, use_orig_params=original, device_id=torch.device("cpu"), auto_wrap_policy=policy
    )
    for _ in range(2):
        model.zero_grad()
        loss = model(**data()).loss
        loss.backward()
        close(loss.detach(), losses[rank()], ulps=256)
        if original:
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                check_gradients(model, want)
    if not original:
        norm = sum(grad.square().sum() for grad in want.values()).sqrt()
        close(model.clip_grad_norm_(1e9), norm, ulps=256)
    if own:
        assert report.head_calls.computed == 2 and "FSDP1" in report.head_calls.reason
    else:
        fused(report, 2)


ZERO = {"2": (2, "before"), "3": (3, "before"), "3-apply_after": (3, "after")}
ZERO |= {"3-checkpointing": (3, "before", "llama", True), "3-tied": (3, "before", "llama_bias_tied")}


@case(needs="deepspeed", **ZERO)
def zero(stage, when, family="llama", checkpointing=False):
    model = make(family)
    losses, want = wanted(model)
    report = apply(model) if when == "before" else None
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = zero_engine(model, stage)
    report = apply(model) if when == "after" else report
    zero_step(engine, losses, want)
    fused(report, 1)


# --- DTensor, tensor and sequence parallelism, pipelines --------------------------------------


@case
def torch_tensor_parallel():
    """torch's own plan: the sharded head keeps stock's arithmetic, under loss_parallel too."""
    model = make()
    report, inputs, loss, want = with_tigon_alike(model)
    plan = {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for i in range(2):
        names = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        plan |= {f"model.layers.{i}.mlp.{name}": style for name, style in names.items()}
    parallelize_module(model, mesh(), plan)
    with loss_parallel():
        got = model(**inputs).loss
        got.backward()
    close(full(got.detach()), loss, ulps=256)
    check_gradients(model, want, ulps=512)
    assert report.head_calls.fused == 0


@case
def sequence_parallel_norm():
    """A norm of sharded rows is fused, each process's rows by themselves."""
    model = make()
    apply(model)
    norm, x = model.model.norm, torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    want = norm(x).detach()
    parallelize_module(model, mesh(), {"model.norm": SequenceParallel(use_local_output=False)})
    with mock.patch.object(_op, "call_local", wraps=_op.call_local) as local:
        got = norm(x[:, 4 * rank() : 4 * rank() + 4])
    assert local.call_count == 1
    assert got.placements == (Shard(1),)
    got.sum().backward()
    close(got.full_tensor().detach(), want)


@case
def shift_labels_without_labels():
    """As Ulysses and context parallelism do: shifted labels go in, the loss is asked of loss_function."""
    model = make()
    report, inputs, loss, want = with_tigon_alike(model)
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    output = model(inputs["input_ids"], shift_labels=shifted)
    options = {"logits": output.logits, "labels": None, "shift_labels": shifted, "vocab_size": VOCABULARY}
    options |= {"num_items_in_batch": (shifted != -100).sum()}
    got = model.loss_function(**options)
    got.backward()
    close(got.detach(), loss)
    check_gradients(model, want)
    fused(report, 1)


@case
def positions_split_over_ranks():
    """Each rank has half the positions; the denominator is that of all."""
    model = make()
    _, inputs, loss, want = with_tigon_alike(model)
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[..., 1:]
    hidden = model.model(inputs["input_ids"])[0]
    part = slice(0, 6) if rank() == 0 else slice(6, None)
    got = tigon.linear_cross_entropy(
        hidden[:, part],
        model.lm_head.weight,
        shifted[:, part].contiguous(),
        denominator=(shifted != -100).sum(),
    )
    got.backward()
    total, grad = got.detach().clone(), model.lm_head.weight.grad
    dist.all_reduce(total)
    dist.all_reduce(grad)
    close(total, loss)
    close(grad, want["lm_head.weight"], ulps=256)


def sharded(*shape, placement):
    torch.manual_seed(0)
    return distribute_tensor(torch.randn(*shape), mesh(), [placement])


@case
def dtensor_arguments():
    """Functions without a rule for DTensors take plain tensors, and say so; the others: dtensor_cases.py."""
    query, table = sharded(1, 4, 8, 16, placement=Shard(1)), torch.randn(1, 8, 16)
    refused(lambda: tigon.rope(query, query, table, table), "DTensor")
    x = sharded(2, 8, 16, placement=Shard(0))
    refused(lambda: tigon.group_norm(x, 2), "DTensor")


@case
def pipeline_stages():
    """A head alone in a stage hands on tensors."""
    inputs, losses = data(0), []

    class First(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.embedding = model.model.embed_tokens

        def forward(self, ids):
            return self.embedding(ids)

    class Last(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.norm, self.head = model.model.norm, model.lm_head

        def forward(self, x):
            return self.head(self.norm(x))

    def loss_of(logits, target):
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    model = make()
    whole = model.lm_head(model.model.norm(model.model.embed_tokens(inputs["input_ids"])))
    rows = zip(whole, inputs["labels"], strict=True)
    want = [loss_of(one[None], target[None]) for one, target in rows]
    apply(model)
    stage = PipelineStage((First, Last)[rank()](model), rank(), 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)
    if rank() == 0:
        schedule.step(inputs["input_ids"])
    else:
        schedule.step(target=inputs["labels"], losses=losses)
        close(torch.stack(losses), torch.stack(want).detach())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
