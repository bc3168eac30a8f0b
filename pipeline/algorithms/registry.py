"""Names and parameters of all algorithms, free of torch: spec, CRD and trainer read the same entries."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Algorithm:
    summary: str
    module: str
    """Module with `advantages` and `loss`."""
    minimum_group_size: int = 1
    """Samples per prompt below which the estimator is undefined."""
    defaults: dict[str, object] = dataclasses.field(default_factory=dict)
    """AlgorithmConfig fields whose default differs for this algorithm."""
    parameters: dict[str, object] = dataclasses.field(default_factory=dict)
    """Parameters only this algorithm knows, with their defaults (AlgorithmConfig.parameters)."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        summary="Group-relative advantages, clipped surrogate, token-mean (arXiv:2402.03300).",
        module="pipeline.algorithms.grpo",
        minimum_group_size=2,
        defaults={"clip_high": 0.28},
        parameters={"dual_clip": 0.0},  # bound of the loss at −dual_clip·A where A < 0; 0: none
    ),
}

PLANNED = ("ppo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "remax", "dapo", "gspo", "cispo")
"""Names that a spec may hold already; a run is refused until the name has an entry above."""
