"""transformers' Trainer with models made of a vision and a text model, by Liger's switch."""

from program import case, logged, token_rows, tokenizer, trainer_options

PROGRAM, DISTRIBUTION = "Trainer with images (transformers)", "transformers"
PACKAGES, ALONE = "accelerate==1.15.0", ""
CASES = []
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE, SIDE, PATCH = 3, 28, 14  # a token's id; an image is four patches


def configuration(kind):
    """(class, configuration, tokens of an image, shape of one)."""
    import transformers as t

    text = {**SIZES, "vocab_size": len(tokenizer()), "num_key_value_heads": 2, "max_position_embeddings": 256}
    eyes = {**SIZES, "image_size": SIDE, "patch_size": PATCH}
    if kind == "InternVL":
        eyes |= {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}
        config = t.InternVLConfig(
            vision_config=t.InternVLVisionConfig(**eyes), text_config=t.Qwen2Config(**text), image_token_id=IMAGE, downsample_ratio=0.5,
        )  # fmt: skip
        return t.InternVLForConditionalGeneration, config, 1, (3, SIDE, SIDE)
    if kind == "SmolVLM":
        config = t.SmolVLMConfig(
            vision_config=t.SmolVLMVisionConfig(**eyes), text_config=t.LlamaConfig(**text, pad_token_id=0),
            image_token_id=IMAGE, scale_factor=2,
        )  # fmt: skip
        return t.SmolVLMForConditionalGeneration, config, 1, (1, 3, SIDE, SIDE)
    vision, words = t.CLIPVisionConfig(**eyes, projection_dim=64), t.LlamaConfig(**text)
    strategy = "default"
    if kind == "LLaVA, Pixtral and Mistral":
        vision, words, strategy = t.PixtralVisionConfig(**eyes, head_dim=16), t.MistralConfig(**text), "full"
    config = t.LlavaConfig(
        vision_config=vision, text_config=words, image_token_id=IMAGE, image_seq_length=4, vision_feature_select_strategy=strategy,
        vision_feature_layer=-1,
    )  # fmt: skip
    return t.LlavaForConditionalGeneration, config, 4, (3, SIDE, SIDE)


@case(CASES, "LLaVA", "`tigon.compat.liger.install()`, `use_liger_kernel=True`", "LLaVA")
@case(CASES, "LLaVA, Pixtral and Mistral", "the same", "LLaVA, Pixtral and Mistral")
@case(CASES, "InternVL", "the same", "InternVL")
@case(CASES, "SmolVLM", "the same", "SmolVLM")
def train(with_tigon, folder, kind):
    if with_tigon:
        import tigon.compat.liger

        tigon.compat.liger.install()
    import torch
    from transformers import Trainer, TrainingArguments

    cls, config, count, shape = configuration(kind)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(config)
    rows = []
    for row in token_rows():
        ids = [max(i, IMAGE + 1) for i in row["input_ids"]]
        ids[1 : 1 + count] = [IMAGE] * count
        labels = [-100 if i == IMAGE else i for i in ids]
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": row["attention_mask"],
                     "pixel_values": torch.randn(shape)})  # fmt: skip
        if kind.endswith("Mistral"):
            rows[-1]["image_sizes"] = [SIDE, SIDE]
    trainer = Trainer(
        model=model, train_dataset=rows,
        args=TrainingArguments(**trainer_options(folder, use_liger_kernel=with_tigon)),
    )  # fmt: skip
    trainer.train()
    return logged(trainer.state.log_history)
