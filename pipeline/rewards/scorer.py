"""What a completion is worth: the weighted sum of the run's rewards, each under its own timeout.

A reward that raises, hangs, dies or gives NaN, an infinity or no number costs that sample alone, and is told as a
reason: the sample takes no part in training (dropSample), or that reward counts as 0 (zero).
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from pipeline.clock import Clock
from pipeline.config import RewardConfig
from pipeline.rewards.endpoint import Endpoint
from pipeline.rewards.function import FunctionProcesses
from pipeline.rewards.model import RewardModel
from pipeline.rewards.registry import LIBRARY
from pipeline.rewards.values import Value
from pipeline.usercode.process import SampleError

MOST_PROCESSES = 8
"""Processes that run one reward's function; fewer where there are fewer processors."""
DEFAULT = RewardConfig(name="generator", library="generator")
"""For runs that list no reward: the generator's own scorer."""
LIBRARY_MEMORY_MIB = 4096

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Score:
    total: float | None
    """Weighted sum; None: unscorable."""
    parts: dict[str, float]
    """Unweighted, by reward; a reward that failed is missing, or 0 under onError: zero."""
    invalid: str | None
    """Which reward failed, and how, where that costs the sample."""
    steps: dict[int, float] = dataclasses.field(default_factory=dict)
    """What of the total came with which of the completion's ids, ascending."""


class Reward(Protocol):
    name: str

    async def start(self) -> None: ...

    async def score(self, arguments: dict[str, Any]) -> Value: ...

    async def close(self) -> None: ...


class Scorer:
    """An asynchronous context manager. Raises ValueError for rewards that cannot be started.

    `offered`: names of all arguments that a sample may come with; None: unknown, so that functions are not checked.
    """

    def __init__(self, configs: Sequence[RewardConfig], offered: Collection[str] | None = None) -> None:
        self.configs = list(configs) or [DEFAULT]
        names = [config.name for config in self.configs]
        if len(set(names)) < len(names):
            raise ValueError(f"rewards: names must be distinct; they are {names}")
        self._rewards = [make(config, offered) for config in self.configs]
        self.failures: collections.Counter[str] = collections.Counter()
        """Samples that a reward failed on, by its name."""
        self.waiting_for: str | None = None
        """What `until_ready` waits for, in words."""

    async def __aenter__(self) -> "Scorer":
        try:
            await asyncio.gather(*(reward.start() for reward in self._rewards))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        for reward in self._rewards:
            with contextlib.suppress(Exception):
                await reward.close()

    async def until_ready(self, clock: Clock) -> None:
        """Return once the servers of all reward models answer: until then each sample would be lost. Raises Unready."""
        for reward in self._rewards:
            if isinstance(reward, RewardModel):
                self.waiting_for = f"reward model {reward.name}"
                await reward.until_ready(clock)
        self.waiting_for = None

    async def score(self, arguments: dict[str, Any]) -> Score:
        """One completion, given by the keyword arguments that `pipeline.rewards` describes."""
        values = await asyncio.gather(
            *(self._part(*pair, arguments) for pair in zip(self.configs, self._rewards, strict=True))
        )
        parts: dict[str, float] = {}
        steps: dict[int, float] = collections.defaultdict(float)
        invalid = None
        for config, value in zip(self.configs, values, strict=True):
            if isinstance(value, Value):
                parts[config.name] = value.total
                for position, reward in value.steps:
                    steps[position] += config.weight * reward
                continue
            self._count(config.name, value)
            if config.on_error == "zero":
                parts[config.name] = 0.0
            else:
                invalid = invalid or f"reward {config.name}: {value}"
        if invalid:
            return Score(None, parts, invalid)
        total = sum(config.weight * parts[config.name] for config in self.configs)
        if not all(map(math.isfinite, (total, *steps.values()))):
            return Score(None, parts, "the weighted sum of its rewards is not finite")
        return Score(total, parts, None, dict(sorted(steps.items())))

    def _count(self, name: str, reason: str) -> None:
        """Told in the log when the count is 1, 2, 4, 8, …: a function that always fails would fill it."""
        self.failures[name] += 1
        count = self.failures[name]
        if count & (count - 1) == 0:
            logger.warning("reward %s failed on %d samples so far, on this one: %s", name, count, reason)

    async def _part(self, config: RewardConfig, reward: Reward, arguments: dict[str, Any]) -> Value | str:
        """The reward's value, or why there is none."""
        try:
            value = await reward.score({**arguments, **config.parameters})
        except SampleError as error:
            return str(error)
        except Exception as error:  # no descriptors or processes left, a row that JSON does not take, …
            return " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return _unusable(value, config, len(arguments["completion_ids"])) or value


def _unusable(value: Value, config: RewardConfig, length: int) -> str | None:
    """Why a sample of `length` tokens cannot have that value; None: it can."""
    if not math.isfinite(value.total):
        return f"returned {value.total}"
    if outside := [position for position, _ in value.steps if not 0 <= position < length]:
        return f"returned a reward for token {outside[0]}; the completion has {length}"
    if value.steps and (config.normalize or config.clip is not None):
        return "returned rewards of tokens, which cannot be rescaled: leave out normalize and clip"
    return None


def make(config: RewardConfig, offered: Collection[str] | None = None) -> Reward:
    """The reward that `config` describes. Raises ValueError, naming it, where it describes none."""
    kinds = [kind for kind in ("function", "endpoint", "library", "model") if getattr(config, kind) is not None]
    if len(kinds) != 1:
        raise ValueError(
            f"reward {config.name}: give exactly one of function, endpoint, library and model, not {kinds or 'none'}"
        )
    if config.endpoint is not None:
        return Endpoint(config.name, config.endpoint, config.timeout_s)
    if config.model is not None:
        return RewardModel(config.name, config.model, config.timeout_s, config.parameters.get("form", "chat"))
    if config.library is not None and config.library not in LIBRARY:
        raise ValueError(f"reward {config.name}: library {config.library!r} is none of {', '.join(LIBRARY)}")
    setup = {
        "code": LIBRARY[config.library] if config.library else config.function,
        "folder": config.folder,
        "memory_mib": max(config.memory_mib, LIBRARY_MEMORY_MIB) if config.library else config.memory_mib,
        "offered": None if offered is None else sorted({*offered, *config.parameters}),
    }
    return FunctionProcesses(config.name, setup, config.timeout_s, min(MOST_PROCESSES, os.cpu_count() or 1))
