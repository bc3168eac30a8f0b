"""What tests of environments share: a user's file, and a sampler that plays in it."""

import contextlib
import pathlib
import textwrap
from collections.abc import AsyncIterator

from pipeline.clock import SystemClock
from pipeline.config import EnvironmentConfig, RewardConfig
from pipeline.environments.episode import Environment
from pipeline.inference import Engine
from pipeline.rewards.scorer import Scorer
from pipeline.sampling import Sampler
from pipeline.tokenizer import Tokenizer


def source(folder: pathlib.Path, body: str, before: str = "") -> EnvironmentConfig:
    """An environment whose step(self, completion, **metadata) is `body`; `before` are its other methods."""
    text = "import os, random, time\nclass Mine:\n" + textwrap.indent(before, "    ")
    text += "\n    def step(self, completion, **metadata):\n" + textwrap.indent(body, "        ")
    (folder / "mine.py").write_text(text)
    return EnvironmentConfig(code="mine.py:Mine", folder=str(folder), timeout_s=10.0)


@contextlib.asynccontextmanager
async def sampling_with(
    config: EnvironmentConfig, engine: Engine, tokenizer: Tokenizer, limit: int = 1000, *rewards: RewardConfig
) -> AsyncIterator[Sampler]:
    listed = rewards or (RewardConfig(name="environment", library="environment", timeout_s=30),)
    async with Environment(config, engine, tokenizer, None, limit) as environment, Scorer(listed) as scorer:
        yield Sampler(engine, tokenizer, scorer, SystemClock(), None, limit, environment)
