"""What pages and sections of docs/results are called."""

from __future__ import annotations

PAGES = {  # in the order of the index
    "models": "Whole models",
    "loss_head": "Loss head",
    "post_training": "Post-training and per-token losses",
    "losses": "Losses",
    "norms": "Norms",
    "softmax": "Softmax",
    "elementwise": "Elementwise ops",
    "rope": "Rotary embedding",
    "embedding": "Embedding",
    "streams": "Attention residuals and hyper-connections",
    "experts": "Experts",
    "adapters": "LoRA",
    "optimizer": "Optimizer",
    "parallel": "Several GPUs",
    "host": "Host time",
    "cpu": "CPU",
    "convergence": "Convergence",
    "older": "Older runs",
}
OPS = {
    "linear_cross_entropy": "Loss head",
    "multi_token_loss": "Multi-token prediction",
    "linear_log_prob": "Log-probabilities from hidden states",
    "linear_loss": "Losses of log-probabilities, from hidden states",
    "linear_preference": "Preference losses from hidden states",
    "linear_policy": "Policy losses from hidden states",
    "linear_divergence": "Distillation from hidden states",
    "drafter_loss": "Drafters",
    "preference": "Preference losses of log-probabilities",
    "policy": "Policy losses of log-probabilities",
    "sample": "Tokens drawn from logits",
    "cross_entropy": "Cross-entropy of logits",
    "divergence": "KL, JSD and total variation of logits",
    "contrastive": "Contrastive loss",
    "rms_norm": "RMSNorm",
    "add_rms_norm": "Addition and RMSNorm",
    "layer_norm": "LayerNorm",
    "modulated_rms_norm": "Modulated RMSNorm",
    "gated_rms_norm": "Gated RMSNorm",
    "group_norm": "GroupNorm",
    "poly_norm": "PolyNorm",
    "softmax": "Softmax",
    "sparsemax": "Sparsemax",
    "glu": "Gated units",
    "relu_squared": "Squared ReLU",
    "dyt": "DyT",
    "rope": "Rotary embedding",
    "qk_norm_rope": "QK-norm with rotary embedding",
    "embedding": "Embedding",
    "attention_residual": "Attention residuals",
    "hyper_connection": "Hyper-connections",
    "experts": "Experts",
    "route": "Routers",
    "parallel_head": "Sharded loss head",
    "parallel_cross_entropy": "Sharded cross-entropy",
}
FILES = {  # of these files a page shows the first ones first
    "e2e_six": "Six models, 16 x 512 tokens",
    "e2e_people": "Models as people train them",
    "e2e_moe": "Mixtures of experts",
    "e2e_fp8": "Linears in FP8",
    "e2e_fp8_peers": "Linears in FP8, with torchao's recipes",
    "fp8": "One layer and microbatches in FP8",
    "e2e_card": "Models on cards of less memory",
    "e2e_recompute": "What is computed again in the backward",
    "lowbit": "Weights of few bits",
    "e2e_paper": "Five models over batch sizes",
    "e2e_optimizer": "Tigon's optimizer and clipping, PyTorch's in the others",
    "e2e_compile": "Under torch.compile",
    "e2e_biencoder": "A bi-encoder under a contrastive loss",
    "small_steps": "Steps that wait for the host",
    "floor": "The least that a step can take",
    "train_llama_1b": "A training run of 1.2 B parameters",
    "medusa": "Medusa's heads",
    "trl_trainers": "Steps of TRL's trainers",
    "lora": "Layers and models with adapters",
    "optimizer": "AdamW and Muon",
    "e2e": "Training steps under FSDP2 and Megatron-Core",
    "train_fp32": "A training run in float32",
    "train_bf16": "A training run in bfloat16",
    "host": "Small calls",
    "convergence": "Ten families, 100 steps",
    "fp8_accuracy": "Training in FP8",
    "moments": "Training with moments of fewer bits",
}
SUITES = {  # what the cases of an op have in common in these files
    "loss_head_odd": "odd sizes and vocabularies",
    "loss_head_few_rows": "few rows",
    "loss_head_peak": "bounds of the peak",
    "scaled": "a loss divided by 8",
    "paper": "sizes of Liger's paper",
    "cross_entropy_vocabulary": "vocabularies",
}
DEVICES = {"h100": "H100", "h200x2": "two H200", "cpu": "CPU"}


def page(name: str) -> str:
    return PAGES.get(name) or name.replace("_", " ")


def heading(run, op: str | None = None) -> str:
    """The heading of a file's section, or of an op in it."""
    stem = run.path.stem
    parts = [OPS.get(op, op) if op else FILES.get(stem, f"{run.kind}: {stem}")]
    parts += [SUITES[stem]] if op and stem in SUITES else []
    parts += [DEVICES[run.path.parent.name]] if run.path.parent.name in DEVICES else []
    return ", ".join(parts)


def place(run) -> int:
    """Files of FILES in their order, then the others."""
    order = list(FILES)
    return order.index(run.path.stem) if run.path.stem in order else len(order)
