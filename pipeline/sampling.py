"""From one prompt to one group of scored rollouts: what rollout and evaluation have in common.

One bad sample costs that sample alone, with a reason (`Rollout.invalid`): an empty completion, a log-probability
that is no finite number, an id outside the vocabulary, a reward that fails. A prompt that cannot be sampled at all
gives a group whose samples all carry that reason, so that it is dropped once and not tried again and again.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.clock import Clock
from pipeline.environments.episode import Environment, Episode
from pipeline.experience import GREEDY, Rollout, RolloutGroup, Step, Turn, sampled
from pipeline.inference import Completion, Engine, EngineLost, Sampling, defect, unfit
from pipeline.prompts import Prompt
from pipeline.rewards.scorer import Scorer
from pipeline.tokenizer import Tokenizer
from pipeline.versions import Version

TOLD = frozenset(
    {
        *("prompt", "messages", "answer", "set", "index", "prompt_ids", "max_new_tokens", "entry"),
        *("completion", "completion_ids", "tokens", "finish_reason"),
    }
)
"""Arguments of rewards, beside the columns of the prompt's row and, with an environment, `episode_reward`."""


@dataclasses.dataclass(frozen=True)
class Generated:
    """Completions of one prompt by one policy version; none, and `reason`, where it cannot be sampled."""

    prompt: Prompt
    prompt_ids: list[int]  # [P]
    version: Version
    samples: int
    completions: list[Completion]
    max_new_tokens: int
    reason: str | None = None
    greedy: bool = False
    """Whether the last of the samples is the greedy completion, to be scored and not trained."""
    episodes: list[Episode] = dataclasses.field(default_factory=list)
    """What made the completions, where the run has an environment."""

    @property
    def tokens(self) -> int:
        """Sampled ones."""
        if self.episodes:
            return sum(episode.tokens for episode in self.episodes)
        return sum(len(completion.ids) for completion in self.completions)


class Sampler:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        scorer: Scorer,
        clock: Clock,
        system_prompt: str | None,
        max_model_len: int,
        environment: Environment | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.scorer, self.clock = engine, tokenizer, scorer, clock
        self.system_prompt, self.max_model_len = system_prompt, max_model_len
        self.vocabulary_size, self.environment = tokenizer.vocabulary_size, environment

    async def generate(self, prompt: Prompt, samples: int, sampling: Sampling, greedy: bool = False) -> Generated:
        """Raises EngineError where the engine fails; what is wrong with the prompt is told in the result.

        `greedy`: one more completion, the most likely one, comes last.
        """
        rows = samples + greedy
        version = self.engine.version
        if version is None:
            raise EngineLost("the server went away before this prompt was sent")
        sampling = dataclasses.replace(sampling, stop_ids=tuple(sorted(self.tokenizer.eos_ids)))
        most_likely = dataclasses.replace(sampling, temperature=0.0)
        if self.environment is not None:
            samplings = [sampling] * samples + [most_likely] * greedy
            return await self._play(self.environment, prompt, samplings, version, greedy)
        try:
            ids = self.tokenizer.encode(prompt.content, self.system_prompt)
        except ValueError as error:
            return Generated(prompt, [], version, rows, [], sampling.max_new_tokens, str(error))
        reason = unfit(ids, sampling, self.max_model_len)
        if reason:
            return Generated(prompt, [], version, rows, [], sampling.max_new_tokens, reason)
        completions = await self.engine.generate(ids, samples, sampling)
        if greedy:
            completions += await self.engine.generate(ids, 1, most_likely)
        return Generated(prompt, ids, version, rows, completions, sampling.max_new_tokens, greedy=greedy)

    async def _play(
        self, environment: Environment, prompt: Prompt, samplings: Sequence[Sampling], version: Version, greedy: bool
    ) -> Generated:
        """As many episodes at once. Those of a group share their prompt, or it would be no group."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(environment.play(prompt, sampling)) for sampling in samplings]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        episodes = [task.result() for task in tasks]
        first = next((episode for episode in episodes if episode.failure is None), episodes[0])
        for episode in episodes:
            if episode.failure is None and episode.prompt_ids != first.prompt_ids:
                episode.failure = "environment: reset gave samples of one prompt different beginnings"
        return Generated(
            prompt=first.prompt,
            prompt_ids=first.prompt_ids,
            version=version,
            samples=len(samplings),
            completions=[episode.completion for episode in episodes],
            max_new_tokens=samplings[0].max_new_tokens,
            greedy=greedy,
            episodes=episodes,
        )

    async def score(self, generated: Generated) -> RolloutGroup:
        """The finished group; never fails on account of a reward."""
        prompt = generated.prompt
        if generated.reason:
            rollouts = [_rejected(generated.version, generated.reason)] * generated.samples
        else:
            known = self._known(generated)
            episodes: Sequence[Episode | None] = generated.episodes or [None] * len(generated.completions)
            pairs = zip(generated.completions, episodes, strict=True)
            rollouts = list(await asyncio.gather(*(self._rollout(*pair, generated.version, known) for pair in pairs)))
            if generated.greedy:
                rollouts[-1] = dataclasses.replace(rollouts[-1], invalid=GREEDY)
        return RolloutGroup(
            index=prompt.index,
            set=prompt.set,
            prompt=prompt.text,
            answer=prompt.answer,
            prompt_ids=generated.prompt_ids,
            rollouts=rollouts,
            created=self.clock.now(),
        )

    def _known(self, generated: Generated) -> dict[str, object]:
        """What rewards are told of every completion of the group (see pipeline.rewards)."""
        prompt = generated.prompt
        return {
            **prompt.row,
            "prompt": prompt.text,
            "messages": prompt.content if isinstance(prompt.content, list) else None,
            "answer": prompt.answer,
            "set": prompt.set,
            "index": prompt.index,
            "prompt_ids": generated.prompt_ids,
            "max_new_tokens": generated.max_new_tokens,
            "entry": prompt.entry.encoded() if prompt.entry else None,
        }

    async def _rollout(
        self, completion: Completion, episode: Episode | None, version: Version, known: dict[str, object]
    ) -> Rollout:
        reason = episode.failure if episode else defect(completion, self.vocabulary_size)
        turns = self._weighted(episode.turns) if episode else []
        if reason:
            return _rejected(version, reason, completion, turns)
        told = {
            **known,
            "completion": completion.text,
            "completion_ids": completion.ids,
            "tokens": len(completion.ids),
            "finish_reason": completion.finish_reason,
        }
        if episode:
            told |= {
                "messages": episode.messages[:-1],
                "tokens": episode.tokens,
                "episode_reward": episode.reward,
            }
        score = await self.scorer.score(told)
        return Rollout(
            completion_ids=completion.ids,
            logprobs=[0.0 if logprob > 0 else logprob for logprob in completion.logprobs],
            completion=completion.text,
            finish_reason=completion.finish_reason,
            reward=score.total,
            rewards=score.parts,
            invalid=score.invalid,
            spans=[(0, version)],
            turns=turns,
            steps=_at_sampled(score.steps, turns, len(completion.ids)),
        )

    def _weighted(self, turns: Sequence[Turn]) -> list[Turn]:
        """What the environment gave for a turn, as it counts in the sample's reward."""
        weight = sum(config.weight for config in self.scorer.configs if config.library == "environment")
        return [turn if turn.reward is None else turn._replace(reward=weight * turn.reward) for turn in turns]


def _at_sampled(steps: Mapping[int, float], turns: Sequence[Turn], length: int) -> list[Step]:
    """`steps` by the position in all `length` tokens; one within an observation counts at the token sampled before."""
    places = np.flatnonzero(sampled(turns, length))
    rewards: dict[int, float] = collections.defaultdict(float)
    for position, reward in steps.items():
        rewards[int(places[np.searchsorted(places, position, side="right") - 1])] += reward
    return [Step(token, reward) for token, reward in sorted(rewards.items())]


def _rejected(
    version: Version, reason: str, completion: Completion | None = None, turns: Sequence[Turn] = ()
) -> Rollout:
    """A sample without tokens to train on; its text is kept for people."""
    return Rollout(
        completion_ids=[],
        logprobs=[],
        completion=completion.text if completion else "",
        finish_reason=completion.finish_reason if completion else "length",
        reward=None,
        rewards={},
        invalid=reason,
        spans=[(0, version)],
        turns=list(turns),
    )
