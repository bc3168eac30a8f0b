"""pipeline.schedule: the learning rate of a step."""

import pytest

from pipeline.config import AlgorithmConfig
from pipeline.schedule import learning_rate


def rates(schedule, total, warmup, rate=1.0):
    config = AlgorithmConfig(
        type="grpo", total_steps=total, prompts_per_step=1, group_size=2,
        learning_rate=rate, warmup_steps=warmup, lr_schedule=schedule,
    )  # fmt: skip
    return [learning_rate(config, step) for step in range(1, total + 1)]


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1, 1, 0.5]),
        ("cosine", 0, [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ],
)
def test_the_learning_rate_warms_up_and_then_follows_its_schedule(schedule, warmup, expected):
    assert rates(schedule, 4, warmup) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5, 9])
def test_no_step_has_a_rate_of_zero_or_above_the_given_one(schedule, warmup):
    assert all(0 < rate <= 1e-6 for rate in rates(schedule, 5, warmup, rate=1e-6))
