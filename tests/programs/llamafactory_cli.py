"""LLaMA-Factory's command line."""

import json
import sys

from program import case, pairs, saved_model, stand_in, state_losses, trainer_options

PROGRAM, DISTRIBUTION = "LLaMA-Factory", "llamafactory"
PACKAGES = (
    "accelerate==1.11.0 datasets==4.0.0 peft==0.18.1 transformers[kernels]==5.6.0 trl==0.24.0 av einops fire omegaconf pandas "
    "protobuf scipy sentencepiece tiktoken tyro==0.8.14 fastapi uvicorn sse-starlette matplotlib modelscope hf-transfer"
)
ALONE = "llamafactory==0.9.5"
CASES = []
LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}


@case(CASES, "SFT, full", "`tigon.compat.liger.install()`, `enable_liger_kernel: true`", {"stage": "sft"})
@case(CASES, "SFT, LoRA", "the same", {"stage": "sft", **LORA})
@case(CASES, "SFT, packing, checkpointing", "the same", {"stage": "sft", "packing": True}, False)
@case(CASES, "DPO, LoRA", "the same", {"stage": "dpo", **LORA}, head=False)
@case(CASES, "DPO, full", "the same", {"stage": "dpo"}, head=False)
def train(with_tigon, folder, settings, plain=True):
    if with_tigon:
        import tigon.compat.liger

        tigon.compat.liger.install()
    stand_in("torchaudio")
    data = pairs()
    rows = [
        {"instruction": p, "output": c, "chosen": c, "rejected": r}
        for p, c, r in zip(*data.values(), strict=True)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    columns = {"prompt": "instruction", "response": "output"}
    ranked = settings["stage"] == "dpo"
    if ranked:
        columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    info = {"rows": {"file_name": "rows.json", "columns": columns, "ranking": ranked}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    run = trainer_options(folder, save_strategy="steps", save_steps=3) | {
        "model_name_or_path": saved_model(folder), "do_train": True, "dataset": "rows", "dataset_dir": str(folder),
        "template": "default", "cutoff_len": 64, "finetuning_type": "full", "enable_liger_kernel": with_tigon,
        "overwrite_cache": True, "preprocessing_num_workers": 1, "dataloader_num_workers": 0,
        "disable_gradient_checkpointing": plain, **settings,
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(run))
    from llamafactory.cli import main

    sys.argv = ["llamafactory-cli", "train", "run.yaml"]
    main()
    return state_losses(folder)
