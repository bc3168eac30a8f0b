"""What the environment itself gave: the sum of the rewards of an episode's steps."""


def score(episode_reward: float | None = None) -> float:
    """Raises ValueError for a sample that no environment has made."""
    if episode_reward is None:
        raise ValueError("the run has no environment")
    return episode_reward
