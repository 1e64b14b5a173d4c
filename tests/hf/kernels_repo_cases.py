"""Run by test_kernels_repo.py in a process of its own: a model with the layers of the repository named."""

import sys
from pathlib import Path

import torch
from kernels import (
    LocalLayerRepository,
    Mode,
    get_local_kernel,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
    use_kernelized_func,
)
from transformers.activations import ACT2FN

sys.path = [entry for entry in sys.path if not (Path(entry) / "tigon").exists()]
repository = Path(sys.argv[1])
tigon = get_local_kernel(repository, backend="cpu")
assert Path(sys.modules["tigon"].__file__).is_relative_to(repository), sys.modules["tigon"].__file__
x = torch.randn(3, 8)
torch.testing.assert_close(tigon.rms_norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))


@use_kernel_forward_from_hub("RMSNorm")
class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8))
        self.variance_epsilon = 1e-5

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


@use_kernel_forward_from_hub("MLP")
class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(8, 8) for _ in range(3))
        self.act_fn = torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@use_kernel_forward_from_hub("rotary_pos_emb")
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@use_kernelized_func(apply_rotary_pos_emb)
class Attention(torch.nn.Module):
    def forward(self, x):
        angle = torch.arange(x.shape[1])[:, None] * 0.3 ** torch.arange(4.0).repeat(2)
        q, k = apply_rotary_pos_emb(x[:, None], x[:, None], angle.cos()[None], angle.sin()[None])
        return (q * k)[:, 0]


@use_kernel_forward_from_hub("GeGLUMLP")
class GeluMLP(MLP):
    def __init__(self):
        super().__init__()
        self.act_fn = torch.nn.GELU(approximate="tanh")


@use_kernel_forward_from_hub("RMSNormGated")
class GatedNorm(Norm):
    def __init__(self):
        super().__init__()
        self.activation = "silu"

    def forward(self, hidden_states, gate):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight * hidden_states.to(dtype)
        hidden_states = hidden_states * ACT2FN[self.activation](gate.to(torch.float32))
        return hidden_states.to(dtype)


@use_kernel_forward_from_hub("SiLU")
class SiLU(torch.nn.Module):
    def forward(self, input):
        return torch.nn.functional.silu(input)


@use_kernel_forward_from_hub("ForCausalLMLoss")
class CausalLoss(torch.nn.Module):
    def forward(
        self,
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        **kwargs,
    ):
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )


@use_kernel_forward_from_hub("CrossEntropyLoss")
class Loss(torch.nn.CrossEntropyLoss):
    pass


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.mlp, self.loss = Norm(), Attention(), MLP(), Loss(label_smoothing=0.1)
        self.gated, self.gelu, self.act, self.causal = GatedNorm(), GeluMLP(), SiLU(), CausalLoss()

    def forward(self, x, target):
        y = self.mlp(self.attention(self.norm(x)))
        z = self.act(self.gelu(self.gated(y, x)))
        causal = self.causal(z, target.view(x.shape[:2]), 8)
        share = self.causal(z, target.view(x.shape[:2]), 8, num_items_in_batch=torch.tensor(7))
        return self.loss(y.flatten(0, 1), target) + causal + share


LAYERS = {
    "RMSNorm": "RMSNorm",
    "MLP": "SwiGLUMLP",
    "rotary_pos_emb": "RotaryPosEmb",
    "CrossEntropyLoss": "CrossEntropyLoss",
    "GeGLUMLP": "GeGLUMLP",
    "RMSNormGated": "RMSNormGated",
    "SiLU": "SiLU",
    "ForCausalLMLoss": "ForCausalLMLoss",
}
mapping = {tag: {"cpu": LocalLayerRepository(repository, layer_name=name)} for tag, name in LAYERS.items()}
model = Model()
x, target = torch.randn(2, 5, 8), torch.randint(8, (10,))
target[3] = -100
stock = model(x, target)
gradients = torch.autograd.grad(stock, list(model.parameters()))
with use_kernel_mapping(mapping, inherit_mapping=False):
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
loss = model(x, target)
torch.testing.assert_close(loss, stock)
torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), gradients)
assert "tigon" in str(model.norm(x).grad_fn).lower()
bound = (model.mlp, model.loss, model.gated, model.gelu, model.act, model.causal, apply_rotary_pos_emb)
assert all("tigon" in part.forward.__module__ for part in bound)
found = [part.__dict__["_tigon_tagged"] for part in (model.mlp, model.gated, model.gelu, model.norm)]
assert all(found), found
