"""OpenRLHF's Actor."""

from __future__ import annotations

PROGRAM, DISTRIBUTION = "OpenRLHF", "openrlhf"
PACKAGES = "transformers==5.15.0 accelerate datasets peft optree torchmetrics einops loralib jsonlines pylatexenc ninja hjson py-cpuinfo msgpack"
ALONE = "openrlhf==0.11.2 optimum deepspeed==0.19.6"
CASES = []
