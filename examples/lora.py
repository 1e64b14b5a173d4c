"""LoRA with PEFT: adapters on every projection, the base frozen; Tigon inside both.

python examples/lora.py --model out/checkpoint    adapters for the checkpoint of `make train`
python examples/lora.py                           for a new small model, to see it run
python examples/lora.py --compare                 PEFT's layers, then Tigon's: speed, memory, losses, a plot
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


def train(args, tokenizer, data, stock: bool):
    """A trainer that is done, its tokens a second and the peak of its memory in MiB (0 on the CPU)."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    import tigon

    torch.manual_seed(0)
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    model = get_peft_model(load_model(args, tokenizer), config)
    model.print_trainable_parameters()
    if not stock:  # by hand or by callback, after PEFT
        print(tigon.apply(model))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**training_arguments(args, "lora", per_device_eval_batch_size=args.batch)),
        train_dataset=data[0],
        eval_dataset=data[1],
    )
    on_gpu = trainer.args.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = trainer.train().metrics["train_runtime"]
    speed = args.steps * args.batch * args.seq / seconds
    memory = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0
    print(f"{'PEFT' if stock else 'PEFT and Tigon'}: {speed:,.0f} tokens/s, {memory:,.0f} MiB")
    return trainer, speed, memory


def main(words: list[str] | None = None) -> int:
    """Train adapters, merge them, and see that the merged model is the same."""
    parser = arguments(__doc__, lr=3e-3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--compare", action="store_true", help="train without Tigon first")
    args = parser.parse_args(words)

    tokenizer, _ = load_tokenizer(args)
    data = packed_dataset(args, tokenizer)
    beside, more = {}, {}
    if args.compare:
        trainer, speed, memory = train(args, tokenizer, data, stock=True)
        beside["PEFT"] = losses_of(trainer)
        more |= {"peft_losses": beside["PEFT"], "peft_tokens_per_s": speed, "peft_mib": memory}
        del trainer
    trainer, speed, memory = train(args, tokenizer, data, stock=args.stock)
    more |= {"tokens_per_s": speed, "mib": memory}
    adapted = trainer.evaluate()["eval_loss"]
    trainer.model.save_pretrained(str(args.out / "lora/adapter"))
    trainer.model = trainer.model_wrapped = trainer.model.merge_and_unload()
    merged = trainer.evaluate()["eval_loss"]
    print(f"loss with adapters {adapted:.5f}, with adapters merged into the weights {merged:.5f}")
    more |= {"adapted": adapted, "merged": merged, "tigon": not args.stock}
    finish(args, "lora", losses_of(trainer), beside, **more)
    exact = next(trainer.model.parameters()).dtype.itemsize == 4
    return int(abs(adapted - merged) > 1e-3 * abs(adapted) * (1 if exact else 10))


if __name__ == "__main__":
    raise SystemExit(main())
