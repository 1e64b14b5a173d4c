"""LoRA with PEFT: adapters on every projection, the base frozen; Tigon inside both.

python examples/lora.py --model out/checkpoint    adapters for the checkpoint of `make train`
python examples/lora.py                           for a new small model, to see it run
"""

from __future__ import annotations

from sft_data import (
    arguments,
    finish,
    load_model,
    load_tokenizer,
    losses_of,
    packed_dataset,
    training_arguments,
)


def main(words: list[str] | None = None) -> int:
    """Train adapters, merge them, and see that the merged model is the same."""
    parser = arguments(__doc__, lr=3e-3)
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args(words)
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    import tigon

    tokenizer, _ = load_tokenizer(args)
    train, evaluation = packed_dataset(args, tokenizer)
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    model = get_peft_model(load_model(args, tokenizer), config)
    model.print_trainable_parameters()
    if not args.stock:  # before or after PEFT, by hand or by callback: it comes to the same
        print(tigon.apply(model))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**training_arguments(args, "lora", per_device_eval_batch_size=args.batch)),
        train_dataset=train,
        eval_dataset=evaluation,
    )
    trainer.train()
    adapted = trainer.evaluate()["eval_loss"]
    model.save_pretrained(str(args.out / "lora/adapter"))
    trainer.model = trainer.model_wrapped = model.merge_and_unload()
    merged = trainer.evaluate()["eval_loss"]
    print(f"loss with adapters {adapted:.5f}, with adapters merged into the weights {merged:.5f}")
    finish(args, "lora", losses_of(trainer), adapted=adapted, merged=merged, tigon=not args.stock)
    tolerance = 1e-3 * abs(adapted) * (1 if next(model.parameters()).dtype == torch.float32 else 10)
    return int(abs(adapted - merged) > tolerance)


if __name__ == "__main__":
    raise SystemExit(main())
