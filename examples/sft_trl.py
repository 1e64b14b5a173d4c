"""Supervised fine-tuning with TRL's SFTTrainer: prompts masked, packed; Tigon in the model and in TRL's head.

    python examples/sft_trl.py            a new small model, the sources of Python
    python examples/sft_trl.py --stock    the same without Tigon

Needs trl (1.15 or 1.16).
"""

from __future__ import annotations

from sft_data import arguments, finish, load_model, load_pairs, load_tokenizer, losses_of, training_arguments


def main(words: list[str] | None = None) -> int:
    """Data, model, trainer, curve."""
    args = arguments(__doc__).parse_args(words)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    import tigon
    from tigon.compat import trl

    tokenizer, _ = load_tokenizer(args)
    pairs = load_pairs(args)
    pairs = pairs[:: max(1, len(pairs) // (8 * args.steps * args.batch))]  # enough to fill the rows
    dataset = Dataset.from_dict({"prompt": [p for p, _ in pairs], "completion": [a for _, a in pairs]})
    callback = None
    if not args.stock:
        trl.install()
        callback = tigon.TigonTrainerCallback()
    trainer = SFTTrainer(
        model=load_model(args, tokenizer),
        args=SFTConfig(
            **training_arguments(args, "sft_trl"),
            max_length=args.seq,
            packing=True,
            gradient_checkpointing=False,
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[callback] if callback else None,
    )
    if callback:
        print(callback.report)
    trainer.train()
    finish(args, "sft_trl", losses_of(trainer), tigon=not args.stock)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
