"""Full fine-tuning on one card: every parameter of LLaMA 3 8B trained in 37 GB.

python examples/one_card.py --memory-gb 37              random weights of LLaMA 3 8B, the sources of Python
python examples/one_card.py --seq 4096 --memory-gb 37   longer rows
python examples/one_card.py --model DIR --save          a checkpoint, trained and written to out/one_card
"""

from __future__ import annotations

import time

from sft_data import arguments, finish, load_tokenizer, overrides, pick_device

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def load(args, device: str):
    """The checkpoint of --model, or random weights that are made where they stay; bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        if args.model:
            return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, device_map=device)
        config = AutoConfig.for_model(**LLAMA_8B | overrides(args), use_cache=False)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def main(words: list[str] | None = None) -> int:
    """Load, patch, train; tokens per second and the peak of memory."""
    parser = arguments(__doc__, batch=1, seq=2048, steps=20, lr=1e-5)
    parser.add_argument("--memory-gb", type=float, help="let PyTorch have no more of the card")
    parser.add_argument("--save", action="store_true", help="write the trained model")
    args = parser.parse_args(words)
    import torch
    from train_data import batches

    import tigon

    device = pick_device(args.device)
    cuda = device.startswith("cuda")
    if args.memory_gb and cuda:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_gb * 1e9 / total), device)
    tokenizer, data = load_tokenizer(args)
    model = load(args, device).train()
    # Layers keep their inputs alone, and run again in the backward.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if not args.stock:
        print(tigon.apply(model))  # the loss head keeps no logits for the backward
    # Moments of one byte; a gradient is used and freed before the next one is there.
    optimizer = tigon.optim.AdamW(model.parameters(), lr=args.lr, moment_dtype="int8", rounding="stochastic")
    tigon.optim.step_in_backward(optimizer)

    losses, rates = [], []
    for rows in batches(data["tokens_file"], args.batch, args.seq, args.steps, 0):
        rows = torch.as_tensor(rows).long().to(device)
        start = time.perf_counter()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()  # updates every parameter
        losses.append(loss.item())
        if cuda:
            torch.cuda.synchronize()
        rates.append(rows.numel() / (time.perf_counter() - start))
    speed = sorted(rates)[len(rates) // 2]
    print(f"{speed:,.0f} tokens/s")
    more = {"tokens_per_s": speed, "tigon": not args.stock}
    if cuda:
        more["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        more["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        print(f"peak {more['peak_gb']:.2f} GB allocated, {more['reserved_gb']:.2f} GB reserved")
    if args.save:
        model.save_pretrained(args.out / "one_card/model")
        tokenizer.save_pretrained(args.out / "one_card/model")
    finish(args, "one_card", losses, **more)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
