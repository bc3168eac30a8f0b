"""Policy versions: (term, step), ordered, and how they are spelled in keys."""

import re
from typing import NamedTuple


class Version(NamedTuple):
    """`term` counts trainer takeovers, `step` the optimizer steps behind these weights (0: what the run began with)."""

    term: int
    step: int

    def __str__(self) -> str:
        return f"t{self.term:06d}-s{self.step:020d}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        match = re.fullmatch(r"t(\d{6})-s(\d{20})", text)
        if not match:
            raise ValueError(f"not a version: {text!r}")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of_key(cls, key: str) -> "Version | None":
        """The version in whose folder (weights/<version>/…, checkpoints/<version>/…) the object lies; None for a key
        that is none of the run's."""
        match = re.fullmatch(r"\w+/(t\d{6}-s\d{20})(/[A-Za-z0-9_][A-Za-z0-9._=-]*)+", key)
        return cls.parse(match[1]) if match else None
