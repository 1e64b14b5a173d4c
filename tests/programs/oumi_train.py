"""oumi's `train`: its own trainer builds the model, then patches its class; the others pass Trainer's flag on."""

import json

from program import STEPS, case, on_gpu, pairs, saved_model, state_losses

PROGRAM, DISTRIBUTION = "oumi", "oumi"
PACKAGES = (
    "transformers[kernels]==5.16.1 trl==1.6.0 peft==0.19.1 datasets==4.8.5 accelerate omegaconf==2.4.0.dev4 aiofiles aiohttp "
    "backoff click==8.1.8 httpx jsonlines jsonschema pandas pexpect pillow protobuf pydantic tensorboard tiktoken typer "
    "numpy<2.4 wandb<0.26 mlflow"
)
ALONE = "oumi==0.9"
CASES = []
LORA = {"use_peft": True}


@case(
    CASES,
    "own trainer",
    "`tigon.compat.liger.install()`, `model.enable_liger_kernel: true`",
    {"trainer_type": "OUMI"},
)
@case(CASES, "own trainer, LoRA", "the same", {"trainer_type": "OUMI", **LORA})
@case(CASES, "TRL's SFT", "the same", {"trainer_type": "TRL_SFT"})
@case(CASES, "TRL's SFT, LoRA", "the same", {"trainer_type": "TRL_SFT", **LORA})
def train(with_tigon, folder, settings):
    if with_tigon:
        import tigon.compat.liger

        tigon.compat.liger.install()
    data = pairs()
    rows = [
        {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]}
        for p, c in zip(data["prompt"], data["chosen"], strict=True)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    masked = {"assistant_only": True, "response_template": "assistant:", "instruction_template": "user:"}
    dataset = {
        "dataset_name": "text_sft_jsonl",
        "dataset_path": str(folder / "rows.jsonl"),
        "dataset_kwargs": masked,
    }
    run = {
        "model": {
            "model_name": saved_model(folder), "model_max_length": 64, "torch_dtype_str": "float32",
            "attn_implementation": "eager", "enable_liger_kernel": with_tigon, "device_map": None,
        },
        "data": {"train": {"datasets": [dataset], "collator_name": "text_with_padding"}},
        "training": {
            "output_dir": str(folder / "out"), "per_device_train_batch_size": 2, "max_steps": STEPS,
            "logging_steps": 1, "learning_rate": 1e-2, "seed": 1, "save_steps": 0, "save_final_model": False,
            "dataloader_num_workers": 0, "include_performance_metrics": False, "enable_wandb": False,
            "enable_tensorboard": False, "use_peft": False, "optimizer": "adamw_torch", "gradient_accumulation_steps": 1,
            "save_epoch": False, **settings,
        },
        "peft": {"lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "up_proj"]},
    }  # fmt: skip
    if settings["trainer_type"] == "TRL_SFT":
        run["data"]["train"].pop("collator_name")
        run["training"] |= {"save_steps": STEPS, "trainer_kwargs": {"use_cpu": not on_gpu()}}
    (folder / "run.yaml").write_text(json.dumps(run))
    from oumi.core.configs import TrainingConfig
    from oumi.core.trainers import oumi_trainer
    from oumi.train import train

    said = []
    oumi_trainer.Trainer.log_metrics = lambda self, metrics, step: said.append(metrics["train/loss"])
    config = TrainingConfig.from_yaml(folder / "run.yaml")
    config.finalize_and_validate()
    train(config)
    return said or state_losses(folder)
