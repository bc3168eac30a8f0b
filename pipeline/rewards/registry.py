"""The shipped rewards by name: what `library:` may say. Each is a function of the kind that users write."""

LIBRARY: dict[str, str] = {
    "environment": "pipeline.rewards.environment:score",
    "generator": "pipeline.rewards.generator:score",
    "math-verify": "pipeline.rewards.math_verify:score",
    "length": "pipeline.rewards.length:score",
}
