"""From one prompt to one group of scored rollouts: what rollout and evaluation have in common.

One bad sample costs that sample alone, with a reason (`Rollout.invalid`): an empty completion, a log-probability
that is no finite number, an id outside the vocabulary, a reward that fails. A prompt that cannot be sampled at all
gives a group whose samples all carry that reason, so that it is dropped once and not tried again and again.
"""

import asyncio
import dataclasses
import math

from pipeline.clock import Clock
from pipeline.experience import Rollout, RolloutGroup
from pipeline.inference import Completion, Engine, EngineLost, Sampling
from pipeline.prompts import Prompt
from pipeline.rewards.scorer import Scorer
from pipeline.tokenizer import Tokenizer
from pipeline.versions import Version

STAND_IN = -9999.0
"""vLLM's spelling of minus infinity, which JSON does not have."""
ROUNDING = 1e-5
"""Log-probabilities this little above 0 are float32's doing, and are 0."""


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


class Sampler:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        scorer: Scorer,
        clock: Clock,
        system_prompt: str | None,
        max_model_len: int,
    ) -> None:
        self.engine, self.tokenizer, self.scorer, self.clock = engine, tokenizer, scorer, clock
        self.system_prompt, self.max_model_len = system_prompt, max_model_len
        self.vocabulary_size = tokenizer.vocabulary_size

    async def generate(self, prompt: Prompt, samples: int, sampling: Sampling) -> Generated:
        """Raises EngineError where the engine fails; what is wrong with the prompt is told in the result."""
        version = self.engine.version
        if version is None:
            raise EngineLost("the server went away before this prompt was sent")
        try:
            ids = self.tokenizer.encode(prompt.content, self.system_prompt)
        except ValueError as error:
            return Generated(prompt, [], version, samples, [], sampling.max_new_tokens, str(error))
        reason = self._unfit(ids, sampling)
        if reason:
            return Generated(prompt, [], version, samples, [], sampling.max_new_tokens, reason)
        sampling = dataclasses.replace(sampling, stop_ids=tuple(sorted(self.tokenizer.eos_ids)))
        completions = await self.engine.generate(ids, samples, sampling)
        return Generated(prompt, ids, version, samples, completions, sampling.max_new_tokens)

    async def score(self, generated: Generated) -> RolloutGroup:
        """The finished group; never fails on account of a reward."""
        prompt = generated.prompt
        if generated.reason:
            rollouts = [_rejected(generated.version, generated.reason)] * generated.samples
        else:
            known = self._known(generated)
            tasks = (self._rollout(completion, generated.version, known) for completion in generated.completions)
            rollouts = list(await asyncio.gather(*tasks))
        return RolloutGroup(
            index=prompt.index,
            set=prompt.set,
            prompt=prompt.text,
            answer=prompt.answer,
            prompt_ids=generated.prompt_ids,
            rollouts=rollouts,
            created=self.clock.now(),
        )

    def _unfit(self, ids: list[int], sampling: Sampling) -> str | None:
        if not ids:
            return "the prompt has no tokens"
        if len(ids) + sampling.max_new_tokens > self.max_model_len:
            return (
                f"the prompt has {len(ids)} tokens; with max_new_tokens {sampling.max_new_tokens} "
                f"they exceed max_model_len {self.max_model_len}"
            )
        return None

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

    async def _rollout(self, completion: Completion, version: Version, known: dict[str, object]) -> Rollout:
        reason = defect(completion, self.vocabulary_size)
        if reason:
            return _rejected(version, reason, completion)
        score = await self.scorer.score(
            {
                **known,
                "completion": completion.text,
                "completion_ids": completion.ids,
                "tokens": len(completion.ids),
                "finish_reason": completion.finish_reason,
            }
        )
        return Rollout(
            completion_ids=completion.ids,
            logprobs=[min(logprob, 0.0) for logprob in completion.logprobs],
            completion=completion.text,
            finish_reason=completion.finish_reason,
            reward=score.total,
            rewards=score.parts,
            invalid=score.invalid,
            spans=[(0, version)],
        )


def defect(completion: Completion, vocabulary_size: int) -> str | None:
    """Why the trainer could do nothing with this completion; None if it can."""
    if not completion.ids:
        return "empty completion"
    if len(completion.logprobs) != len(completion.ids):
        return f"{len(completion.logprobs)} logprobs for {len(completion.ids)} tokens"
    for token, logprob in zip(completion.ids, completion.logprobs, strict=True):
        if not 0 <= token < vocabulary_size:
            return f"token id {token} is outside the vocabulary of {vocabulary_size}"
        if not math.isfinite(logprob) or logprob <= STAND_IN or logprob > ROUNDING:
            return f"logprob {logprob:g}"
    return None


def _rejected(version: Version, reason: str, completion: Completion | None = None) -> Rollout:
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
    )
