"""The PEFT that LLaMA-Factory asks for: its tuners call the model's forward, not the model."""

import hf_peft

PROGRAM, DISTRIBUTION = "PEFT of LLaMA-Factory", "peft"
PACKAGES, ALONE = "peft==0.18.1 accelerate==1.15.0", ""
CASES = [
    case for case in hf_peft.CASES if case.name in ("LoRA", "LoRA on the head too", "DoRA", "modules_to_save")
]
