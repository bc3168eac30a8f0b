"""The shipped environments by name: what environment.library may say. Each is a class of the kind that users write."""

LIBRARY: dict[str, str] = {
    "reasoning-gym": "pipeline.environments.reasoning_gym:Attempts",
}
