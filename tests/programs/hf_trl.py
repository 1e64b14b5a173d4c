"""TRL's trainers."""

from program import case, logged, pairs, saved_model, tokenizer, trainer_options

PROGRAM, DISTRIBUTION = "TRL", "trl"
PACKAGES, ALONE = "trl==1.16.0 datasets==5.2.0 accelerate==1.15.0 peft==0.21.2", ""
CASES = []


@case(CASES, "SFT", "`callbacks=[tigon.TigonTrainerCallback()]`", "SFT")
@case(CASES, "SFT, LoRA", "the same", "SFT", True)
@case(CASES, "DPO", "the same", "DPO")
@case(CASES, "KTO", "the same", "KTO")
@case(CASES, "GRPO", "the same", "GRPO")
@case(CASES, "reward", "the same", "Reward", head=False)
def train(with_tigon, folder, kind, lora=False):
    import datasets
    import trl

    callbacks = []
    if with_tigon:
        import tigon

        callbacks = [tigon.TigonTrainerCallback()]
    data, options, extra = (
        pairs(),
        {"learning_rate": 1e-3, "bf16": False, "gradient_checkpointing": False},
        {},
    )
    columns = {
        "SFT": {"prompt": data["prompt"], "completion": data["chosen"]},
        "DPO": data,
        "KTO": {"prompt": data["prompt"], "completion": data["chosen"], "label": [True, False] * 16},
        "GRPO": {"prompt": data["prompt"]},
        "Reward": data,
    }[kind]
    if kind == "GRPO":
        options |= {"num_generations": 2, "max_completion_length": 8, "temperature": 1.0}
        extra = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
    if lora:
        import peft

        extra["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.0)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=saved_model(folder), args=getattr(trl, f"{kind}Config")(**trainer_options(folder, **options)),
        train_dataset=datasets.Dataset.from_dict(columns), processing_class=tokenizer(), callbacks=callbacks, **extra,
    )  # fmt: skip
    trainer.train()
    return logged(trainer.state.log_history)
