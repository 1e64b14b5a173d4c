"""FSDP2, alone or beside tensor parallelism, in a training loop of one's own: stock, then Tigon.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py               two data ranks
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --tensor 2    one data rank of two tensor ranks

On GPUs where there are enough of them (NCCL, bfloat16), else on the CPU (gloo). Both runs begin from the same
weights and see the same batches. With tensor parallelism the head is a DTensor that holds the rows of its
classes: stock's loss runs under `loss_parallel()`, Tigon's is `tigon.linear_cross_entropy` of that weight.
"""

from __future__ import annotations

from contextlib import nullcontext

import many_processes
from sft_data import arguments, load_model, load_tokenizer, packed_dataset


def shard(model, mesh, tigon: bool):
    """The layers over the tensor ranks, then everything over the data ranks."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    data, tensor = mesh["data"], mesh["tensor"]
    if tensor.size() > 1:
        wide = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan = {f"model.layers.*.{name}": ColwiseParallel() for name in wide}
        plan |= {
            f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")
        }
        if not tigon:
            plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, tensor, plan)
        if tigon:  # no hooks: the loss takes the weight
            head = distribute_tensor(model.lm_head.weight.detach(), tensor, [Shard(0)])
            model.lm_head.weight = nn.Parameter(head)
    half = torch.bfloat16 if data.device_type == "cuda" else None
    options = {"mesh": data, "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return options


def with_loss(model, tensor_ranks: int, tigon: bool):
    """The model and its loss in one module: FSDP2's root, whose forward gathers the head's weight."""
    import torch.nn.functional as F
    from torch import nn

    from tigon import linear_cross_entropy

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, rows, labels, denominator):
            if tigon and tensor_ranks > 1:  # this process's rows of the weight, and all classes' loss
                hidden, weight = self.model.model(**rows)[0], self.model.lm_head.weight
                return linear_cross_entropy(hidden, weight, labels, shift=True, denominator=denominator)
            if tigon:  # tigon.apply: the model's own loss is fused
                return self.model(**rows, labels=labels, num_items_in_batch=denominator).loss
            logits, target = self.model(**rows).logits[:, :-1].float(), labels[:, 1:]
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / denominator

    return WithLoss()


def run(args, tokenizer, train, mesh, device: str, tigon: bool) -> dict:
    """A curve."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import loss_parallel

    import tigon as library

    model = load_model(args, tokenizer).to(device)
    model.config.tie_word_embeddings = False  # the head alone is sharded over the vocabulary
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    if tigon:  # before or after the sharding
        library.apply(model, loss=mesh["tensor"].size() == 1)
    options = shard(model, mesh, tigon)
    whole = fully_shard(with_loss(model, mesh["tensor"].size(), tigon), **options)
    adam = torch.optim.AdamW(whole.parameters(), lr=args.lr, foreach=False)
    data = mesh["data"]
    rank, ranks, group = data.get_local_rank(), data.size(), data.get_group()

    def step(i: int) -> float:
        rows = train[i * args.batch : (i + 1) * args.batch][rank::ranks]
        of = {name: torch.tensor([row[name] for row in rows], device=device) for name in rows[0]}
        labels = of.pop("labels")
        count = (labels[:, 1:] >= 0).sum().float()
        dist.all_reduce(count, group=group)
        with nullcontext() if tigon or mesh["tensor"].size() == 1 else loss_parallel():
            loss = whole(of, labels, count / ranks)  # FSDP2 averages gradients over the data ranks
            loss.backward()
        total = (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).detach()
        adam.step()
        adam.zero_grad()
        dist.all_reduce(total, group=group)
        return float(total) / ranks

    return many_processes.train(step, args.steps, device, "Tigon" if tigon else "stock")


def main(words: list[str] | None = None) -> int:
    """Both curves."""
    parser = arguments(__doc__, steps=8, seq=128)
    parser.add_argument(
        "--tensor", type=int, default=1, help="processes that share a layer and the vocabulary"
    )
    args = parser.parse_args(words)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    device = many_processes.start()
    ranks = dist.get_world_size() // args.tensor
    mesh = init_device_mesh(device, (ranks, args.tensor), mesh_dim_names=("data", "tensor"))
    tokenizer, _ = many_processes.in_turn(lambda: load_tokenizer(args))
    train, _ = packed_dataset(args, tokenizer)
    curves = [run(args, tokenizer, train, mesh, device, tigon) for tigon in (False, True)]
    return many_processes.compare(args, f"fsdp2_tensor{args.tensor}", *curves)


if __name__ == "__main__":
    raise SystemExit(main())
