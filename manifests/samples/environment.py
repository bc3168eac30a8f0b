"""The environment of environment.yaml: see `miles explain spec.environment.class`."""


class Digits:
    """Asks for digits until most of an answer is digits, or there is no attempt left."""

    def __init__(self, attempts: int = 3) -> None:
        self.attempts = attempts

    def step(self, completion: str, turn: int) -> tuple[str | None, float, bool]:
        share = sum(character.isdigit() for character in completion) / max(1, len(completion))
        if share > 0.5 or turn == self.attempts:
            return None, share, True
        return f"{share:.0%} digits. Again.", 0.0, False
