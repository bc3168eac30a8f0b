"""Names and parameters of all algorithms, free of torch: spec, CRD and trainer read the same entries."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Algorithm:
    summary: str
    module: str
    """Module with `advantages` and `loss`; with a critic `returns`, too."""
    minimum_group_size: int = 1
    """Samples per prompt below which the estimator is undefined."""
    critic: bool = False
    """Whether a critic is trained beside the policy."""
    greedy_baseline: bool = False
    """Whether the worker adds one greedy completion to each group, which is scored and not trained."""
    defaults: dict[str, object] = dataclasses.field(default_factory=dict)
    """AlgorithmConfig fields whose default differs for this algorithm."""
    parameters: dict[str, bool | int | float] = dataclasses.field(default_factory=dict)
    """Parameters only some algorithms know, with their defaults (AlgorithmConfig.parameters); see PARAMETERS."""


PARAMETERS: dict[str, str] = {
    "dual_clip": "bounds the loss of tokens with a negative advantage at so many times the advantage; 0: no bound",
    "dynamic_sampling": "groups whose rewards are all the same are replaced before the step, at the cost of generation",
    "critic_learning_rate_scale": "learning rate of the critic, as a multiple of learningRate",
    "critic_warmup_steps": "first steps in which the critic is trained and the policy is not",
    "gae_lambda": "weight of later errors in the advantage, 1: returns less values, 0: one step ahead",
    "gamma": "discount of later rewards per token",
    "mask_truncated": "completions that were cut off have no part in the loss",
    "overlong_buffer": "last share of maxNewTokens in which the reward falls linearly; 0: none",
    "overlong_penalty": "what is taken from the reward of a completion of maxNewTokens",
    "value_clip": "distance from its value before the step beyond which the critic gains nothing; 0: no bound",
    "value_regularization": "pull of the critic's values towards those it began with",
}
"""What each parameter does: its documentation in the CRD. The kind is that of its defaults, the same everywhere."""
SHARES = frozenset({"gamma", "gae_lambda", "overlong_buffer"})
"""Rates of at most 1: a larger discount grows beyond all numbers over a long completion."""
OFF_OR_ABOVE_1 = frozenset({"dual_clip"})
"""Rates that are 0 or above 1: a dual clip of at most 1 leaves tokens with a negative advantage no gradient."""

_CLIPPED: dict[str, bool | int | float] = {"dual_clip": 0.0}
_GROUPED: dict[str, bool | int | float] = {"dynamic_sampling": False}

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        summary="group-relative advantages, clipped surrogate, token-mean (arXiv:2402.03300)",
        module="pipeline.algorithms.grpo",
        minimum_group_size=2,
        defaults={"clip_high": 0.28},
        parameters=_CLIPPED | _GROUPED,
    ),
    "ppo": Algorithm(
        summary="a critic's values as baseline, clipped surrogate; no groups (arXiv:1707.06347)",
        module="pipeline.algorithms.ppo",
        critic=True,
        parameters=_CLIPPED
        | {"gamma": 1.0, "gae_lambda": 1.0, "value_clip": 0.2, "value_regularization": 0.0}
        | {"critic_learning_rate_scale": 10.0, "critic_warmup_steps": 0},
    ),
    "dr-grpo": Algorithm(
        summary="GRPO without division by spread and length (arXiv:2503.20783)",
        module="pipeline.algorithms.dr_grpo",
        minimum_group_size=2,
        defaults={"aggregation": "constant"},
        parameters=_CLIPPED | _GROUPED,
    ),
    "rloo": Algorithm(
        summary="leave-one-out baseline (arXiv:2402.14740)",
        module="pipeline.algorithms.rloo",
        minimum_group_size=2,
        parameters=_CLIPPED | _GROUPED,
    ),
    "reinforce++": Algorithm(
        summary="token returns, normalised over the batch; no groups (arXiv:2501.03262)",
        module="pipeline.algorithms.reinforce",
        parameters=_CLIPPED | {"gamma": 1.0},
    ),
    "reinforce++-baseline": Algorithm(
        summary="the group's mean as baseline, normalised over the batch (arXiv:2501.03262)",
        module="pipeline.algorithms.reinforce_baseline",
        minimum_group_size=2,
        parameters=_CLIPPED | _GROUPED,
    ),
    "remax": Algorithm(
        summary="the greedy completion's reward as baseline; no groups (arXiv:2310.10505)",
        module="pipeline.algorithms.remax",
        greedy_baseline=True,
        parameters=_CLIPPED,
    ),
    "dapo": Algorithm(
        summary="GRPO with clip-higher, dynamic sampling and overlong shaping (arXiv:2503.14476)",
        module="pipeline.algorithms.dapo",
        minimum_group_size=2,
        defaults={"clip_high": 0.28},
        parameters=_CLIPPED
        | {"dynamic_sampling": True, "overlong_buffer": 0.2, "overlong_penalty": 1.0, "mask_truncated": False},
    ),
    "gspo": Algorithm(
        summary="GRPO with one ratio per completion (arXiv:2507.18071)",
        module="pipeline.algorithms.gspo",
        minimum_group_size=2,
        defaults={"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
        parameters=_CLIPPED | _GROUPED,
    ),
    "cispo": Algorithm(
        summary="the ratio is clipped as a weight, no token loses its gradient (arXiv:2506.13585)",
        module="pipeline.algorithms.cispo",
        minimum_group_size=2,
        defaults={"clip_low": 1.0, "clip_high": 4.0},
        parameters=_GROUPED,
    ),
}
