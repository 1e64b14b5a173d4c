"""VeOmni's wrappers of kernels: those of its sequence parallelism, and those that its models take."""

import types

import torch
import torch.nn.functional as F
from program import STEPS, case, token_rows, tokenizer
from torch import nn

PROGRAM, DISTRIBUTION = "VeOmni", "veomni"
PACKAGES = "transformers[kernels]==5.9.0 datasets blobfile torchdata packaging tiktoken psutil einops"
ALONE = "veomni==0.1.12"
CASES = []
HIDDEN, HEADS = 64, 4


class Block(nn.Module):
    """The attention's norm and rotary function as in its sequence parallelism, an MLP, a norm, the loss."""

    def __init__(self, attention, norm, mlp, loss):
        super().__init__()
        torch.manual_seed(0)
        self.vocabulary = len(tokenizer())
        self.attention, self.norm, self.mlp, self.loss = attention, norm, mlp, loss
        self.embed, self.head = (nn.Embedding(self.vocabulary, HIDDEN) for _ in "ab")
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in "abc")
        self.first, self.last = (nn.Parameter(1 + 0.1 * torch.randn(HIDDEN)) for _ in "ab")

    def forward(self, ids, labels):
        x = self.embed(ids)
        angles = torch.outer(
            torch.arange(len(ids)).float(), 100.0 ** -torch.linspace(0, 1, HIDDEN // HEADS // 2)
        )
        cos, sin = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))
        x = x + self.attention.apply(x, self.first, cos, sin)
        x = x + self.mlp(self, x)
        hidden = self.norm(x, self.last, 1e-6)
        return self.loss(
            labels=labels, vocab_size=self.vocabulary, hidden_states=hidden, weights=self.head.weight
        )[0]  # fmt: skip


def compound(variant):
    """A function as VeOmni's async Ulysses has it: no autograd inside, states packed for the backward."""
    from veomni.distributed.sequence_parallel import op_wrappers

    norm = op_wrappers.get_op_wrapper("rms_norm", variant)
    rotary = op_wrappers.get_op_wrapper("rotary_pos_emb")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, cos, sin):
            saved, refs = [], []
            y, state = norm.forward(x, weight, 1e-6)
            refs.append(op_wrappers.pack_saved_state(saved, state))
            z, state = rotary.forward(y.view(len(x), HEADS, -1), cos, sin)
            refs.append(op_wrappers.pack_saved_state(saved, state))
            ctx.refs = refs
            ctx.save_for_backward(*saved)
            return z.reshape(x.shape)

        @staticmethod
        def backward(ctx, dz):
            states = [op_wrappers.unpack_saved_state(ctx.saved_tensors, ref) for ref in ctx.refs]
            (dy,) = rotary.backward(dz.view(len(dz), HEADS, -1), states[1])
            dx, dweight = norm.backward(dy.reshape(dz.shape), states[0])
            return dx, dweight, None, None

    return Attention


@case(
    CASES,
    "async Ulysses' wrappers, Liger's kernels",
    "`tigon.compat.liger.install()`, `liger_kernel`",
    "standard",
)
@case(CASES, "the same, Qwen3.5's norm", "the same", "qwen3_5")
def train(with_tigon, folder, variant):
    if with_tigon:
        import tigon.compat.liger

        tigon.compat.liger.install()
    from veomni.ops.config import singleton
    from veomni.ops.kernel_registry import KERNEL_REGISTRY
    from veomni.ops.kernels.cross_entropy import _resolve_cross_entropy_fn

    name = "liger_kernel" if with_tigon else "eager"
    chosen = types.SimpleNamespace(rms_norm_implementation=name, rotary_pos_emb_implementation=name)
    singleton.set_ops_config(chosen)
    if with_tigon:  # what resolve() gives on a GPU
        norm, mlp = (
            KERNEL_REGISTRY._specs[key][name].factory()
            for key in (("rms_norm", variant), ("swiglu_mlp", "standard"))
        )
    else:
        offset = float(variant == "qwen3_5")

        def norm(x, weight, eps):
            return F.rms_norm(x, (HIDDEN,), offset + weight, eps)

        def mlp(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    model = Block(compound(variant), norm, mlp, _resolve_cross_entropy_fn(name))
    optimizer, said = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for row in token_rows(STEPS):
        ids, labels = (torch.tensor(row[key]) for key in ("input_ids", "labels"))
        loss = model(ids, F.pad(labels[1:], (0, 1), value=-100))
        loss.backward()
        norm_of = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        said += [float(loss.detach()), float(norm_of)]
        optimizer.step()
        optimizer.zero_grad()
    return said
