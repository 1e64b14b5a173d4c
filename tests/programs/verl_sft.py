"""verl's SFT trainer and the log-probabilities of its actor."""

from __future__ import annotations

PROGRAM, DISTRIBUTION = "verl", "verl"
PACKAGES = (
    "transformers==5.10.2 tensordict==0.10.0 accelerate datasets peft hydra-core codetiming dill pandas pyarrow torchdata "
    "ray pylatexenc tensorboard"
)
ALONE = "verl==0.9.1"
CASES = []
