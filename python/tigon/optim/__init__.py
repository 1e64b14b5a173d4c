"""Optimizers: AdamW at the speed of a copy, Muon with half of the arithmetic."""

from tigon.optim.adamw import AdamW
from tigon.optim.groups import lora_plus_groups
from tigon.optim.in_backward import StepInBackward, step_in_backward
from tigon.optim.muon import Muon, muon_groups

__all__ = ["AdamW", "Muon", "StepInBackward", "lora_plus_groups", "muon_groups", "step_in_backward"]
