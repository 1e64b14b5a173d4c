"""What the examples of README and docs stand on: a tiny checkpoint under a real name, a batch, a head."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch

LLAMA = "meta-llama/Llama-3.2-1B"  # from_pretrained prefers a folder of this name
VOCABULARY, HIDDEN = 97, 32


def tiny_model(name: str = "Llama", **changes):
    """A random causal model of two layers, in training mode."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{name}Config")(**sizes | changes)
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def checkpoint(name: str = LLAMA) -> None:
    """Save a tiny model and its tokenizer where `from_pretrained(name)` finds them: in this folder."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{n}": n for n in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(name)
    tiny_model().save_pretrained(name)


def batch(rows: int = 2, tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and labels with the first third of each row masked."""
    ids = torch.randint(4, VOCABULARY, (rows, tokens))
    labels = ids.clone()
    labels[:, : tokens // 3] = -100
    return ids, labels


def head(rows: int = 2, tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states and a head's weight that need gradients, and labels."""
    hidden = torch.randn(rows, tokens, HIDDEN, requires_grad=True)
    return hidden, torch.randn(VOCABULARY, HIDDEN, requires_grad=True), batch(rows, tokens)[1]


def dataset(rows: int = 8) -> list[dict]:
    """Rows for a Trainer."""
    ids, labels = batch(rows)
    return [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]
