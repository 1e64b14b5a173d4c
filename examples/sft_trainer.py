"""Supervised fine-tuning with Trainer: packed sequences, prompts masked, Tigon by one callback.

python examples/sft_trainer.py                          a new small model, the sources of Python
python examples/sft_trainer.py --model out/checkpoint   the checkpoint of `make train`
python examples/sft_trainer.py --stock                  the same without Tigon
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
    """Data, model, trainer, curve."""
    args = arguments(__doc__).parse_args(words)
    from transformers import Trainer, TrainingArguments

    import tigon

    tokenizer, _ = load_tokenizer(args)
    train, evaluation = packed_dataset(args, tokenizer)
    trained = sum(label >= 0 for row in train for label in row["labels"])
    print(f"{len(train)} rows of {args.seq} tokens, {trained / (len(train) * args.seq):.0%} of them answers")
    callback = None if args.stock else tigon.TigonTrainerCallback()
    trainer = Trainer(
        model=load_model(args, tokenizer),
        args=TrainingArguments(**training_arguments(args, "sft", per_device_eval_batch_size=args.batch)),
        train_dataset=train,
        eval_dataset=evaluation,
        callbacks=[callback] if callback else None,
    )
    if callback:
        print(callback.report)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"loss of answers it has not seen: {before:.3f} before, {after:.3f} after")
    trainer.save_model(str(args.out / "sft/model"))
    tokenizer.save_pretrained(str(args.out / "sft/model"))
    finish(args, "sft", losses_of(trainer), before=before, after=after, tigon=not args.stock)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
