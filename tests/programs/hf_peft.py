"""PEFT's adapters."""

import torch
from program import case, loop, model, saved_model

PROGRAM, DISTRIBUTION = "PEFT", "peft"
PACKAGES, ALONE = "peft==0.21.2 accelerate==1.15.0", "bitsandbytes==0.50.2"
CASES = []
TARGETS = ["q_proj", "v_proj", "up_proj", "gate_proj"]


@case(CASES, "LoRA", "`tigon.apply(model)`", {})
@case(
    CASES,
    "LoRA with dropout",
    "`tigon.apply(model, lora=False)`, which leaves PEFT its masks",
    {"lora_dropout": 0.1},
    lora=False,
)
@case(CASES, "LoRA on the head too", "`tigon.apply(model)`", {"target_modules": [*TARGETS, "lm_head"]})
@case(CASES, "DoRA", "the same", {"use_dora": True})
@case(CASES, "modules_to_save", "the same", {"modules_to_save": ["lm_head", "embed_tokens"]})
@case(CASES, "QLoRA, 4 bits", "the same", {}, False, True)
def lora(with_tigon, folder, options, plus=False, quantised=False):
    import peft
    from peft.optimizers import create_loraplus_optimizer

    base = in_4_bits(folder) if quantised else model()
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(**{"r": 4, "init_lora_weights": False, "target_modules": TARGETS, **options})
    ).train()
    if with_tigon:
        import tigon

        report = tigon.apply(adapted, lora="lora_dropout" not in options)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    if not plus:
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
    else:
        optimizer = create_loraplus_optimizer(
            adapted,
            optimizer_cls=tigon.optim.AdamW if with_tigon else torch.optim.AdamW,
            lr=1e-2,
            loraplus_lr_ratio=4,
        )
    torch.manual_seed(3)
    said = loop(adapted, optimizer)
    if with_tigon:
        report.check()
    return said


def in_4_bits(folder):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    wanted = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    place = saved_model(folder, hidden_size=64, intermediate_size=128)
    return AutoModelForCausalLM.from_pretrained(place, quantization_config=wanted, dtype=torch.float32)


@case(CASES, "LoRA+", "`create_loraplus_optimizer(model, tigon.optim.AdamW, ...)` too")
def lora_plus(with_tigon, folder):
    return lora(with_tigon, folder, {}, plus=True)
