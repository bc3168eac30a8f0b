"""The learning rate: a pure function of the step, so that a resumed run needs nothing restored."""

import math

from pipeline.config import AlgorithmConfig


def learning_rate(config: AlgorithmConfig, step: int) -> float:
    """Of the optimizer step `step` (1 … total_steps): linear warm-up, then the schedule down to 0 behind the last step.

    Warm-up over 2 of 4 steps, linear, at rate 1: 0.5, 1, 1, 0.5.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    left = 1 - (step - config.warmup_steps - 1) / max(1, config.total_steps - config.warmup_steps)
    factor = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[config.lr_schedule]
    return config.learning_rate * factor
