"""The PEFT that Axolotl and ms-swift ask for, the last whose tuners call the model's forward."""

import hf_peft_0_18

PROGRAM, DISTRIBUTION = "PEFT of Axolotl, ms-swift", "peft"
PACKAGES, ALONE = "peft==0.20.0 accelerate==1.15.0", ""
CASES = hf_peft_0_18.CASES
