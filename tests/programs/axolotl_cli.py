"""Axolotl's command line, with its plugin for Liger."""

import json

from program import case, pairs, saved_model, state_losses, trainer_options

PROGRAM, DISTRIBUTION = "Axolotl", "axolotl"
PACKAGES = (
    "huggingface_hub==1.17.0 accelerate==1.13.0 datasets==4.8.4 peft==0.20.0 transformers==5.16.1 trl==1.9.0 kernels<0.17 addict fire colorama "
    "einops scipy evaluate==0.4.1 numba python-dotenv==1.0.1 fastcore schedulefree==1.4.1 posthog art requests "
    "sentencepiece mistral-common==1.11.5 nvidia-ml-py langdetect immutabledict trackio==0.19.0 tensorboard zstandard triton==3.7.1 wandb"
)
ALONE = "axolotl==0.19.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 optimum==1.16.2 bitsandbytes==0.50.2"
CASES = []
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
LORA |= dict.fromkeys(
    ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False
)  # CUDA only
HEAD = ("fused_linear_cross_entropy",)
ALL = ("rope", "rms_norm", "layer_norm", "glu_activation", *HEAD)


@case(CASES, "full", "`LigerPlugin`, `liger_rope`, `_rms_norm`, `_layer_norm`, `_glu_activation`, "
                     "`_fused_linear_cross_entropy`", ALL, {})  # fmt: skip
@case(CASES, "full, packing, checkpointing", "the same", ALL,
      {"sample_packing": True, "pad_to_sequence_len": True, "gradient_checkpointing": True})  # fmt: skip
@case(CASES, "LoRA", "the same", ALL, LORA)
@case(CASES, "DPO", "the same", ALL, {"rl": "dpo"}, head=False)
@case(CASES, "full, loss of logits", "`liger_cross_entropy`", ("cross_entropy",), {}, head=False)
@case(CASES, "full, scaled tokens", "`liger_use_token_scaling` (stock: the formula in PyTorch)",
      (*HEAD, "use_token_scaling"), {})  # fmt: skip
@case(
    CASES,
    "full, Qwen3",
    "`liger_swiglu` (deprecated), `liger_rms_norm`",
    ("swiglu", "rms_norm"),
    {},
    "qwen3",
    head=False,
)
def train(with_tigon, folder, switches, settings, family="llama"):
    if with_tigon:
        import tigon.compat.liger

        tigon.compat.liger.install()
        settings = settings | {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}
        settings |= {f"liger_{name}": True for name in switches}
    elif "use_token_scaling" in switches:
        scale_tokens()
    data = pairs()
    if "rl" in settings:
        rows = [
            {"system": "", "question": p, "chosen": c, "rejected": r}
            for p, c, r in zip(*data.values(), strict=True)
        ]
        kind = "chatml.intel"
    else:
        rows = [
            {"instruction": p, "input": "", "output": c}
            for p, c in zip(data["prompt"], data["chosen"], strict=True)
        ]
        kind = "alpaca"
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ours = trainer_options(folder, save_strategy="steps", save_steps=3)
    for name in ("report_to", "use_cpu", "disable_tqdm", "per_device_train_batch_size"):
        ours.pop(name)
    source = {"path": str(folder / "rows.jsonl"), "ds_type": "json", "type": kind, "split": "train"}
    config = ours | {
        "base_model": saved_model(folder, family), "datasets": [source], "sequence_len": 128, "micro_batch_size": 2,
        "gradient_accumulation_steps": 1, "optimizer": "adamw_torch", "lr_scheduler": "constant", "bf16": False,
        "fp16": False, "tf32": False, "attn_implementation": "eager", "val_set_size": 0, "dataset_num_proc": 1,
        "dataset_prepared_path": str(folder / "prepared"), "flash_attention": False, **settings,
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(config))
    from axolotl.cli.main import cli

    cli(["train", "run.yaml", "--launcher", "python"], standalone_mode=False)
    return state_losses(folder)


def scale_tokens():
    """Stock's loss with each token's weighed by its probability, which gets no gradient."""
    import torch
    from transformers.loss import loss_utils

    def loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **_):
        rows, labels = logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
        each = torch.nn.functional.cross_entropy(rows, labels, reduction="none", ignore_index=ignore_index)
        each = each * (-each).exp().detach()
        return each.sum() / (
            (labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        )

    loss_utils.LOSS_MAPPING["ForCausalLM"] = loss
