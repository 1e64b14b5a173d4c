"""Optimizers at the speed of a copy."""

from tigon.optim.adamw import AdamW
from tigon.optim.in_backward import StepInBackward, step_in_backward

__all__ = ["AdamW", "StepInBackward", "step_in_backward"]
