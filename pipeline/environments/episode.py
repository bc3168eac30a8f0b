"""Episodes: the policy and an environment take turns, and every token id that was sampled stays as it is.

The ids of the next prompt are all ids so far, plus those of the newly rendered observation (`Tokenizer.encode_reply`):
nothing that was said is rendered or encoded again. So a sample is one sequence, and the policy that is trained on it
sees what the policy that sampled it saw.

An episode ends when the environment says so, or at a limit: turns, tokens that the policy samples, or the model's
context, into which the next observation must fit. A limit truncates the sample (finish_reason length), whose rewards
so far count. A time limit, or an environment that fails, costs the sample.
"""

import asyncio
import dataclasses

from pipeline.config import EnvironmentConfig
from pipeline.environments.process import EpisodeProcess, EpisodeProcesses
from pipeline.experience import Turn
from pipeline.inference import Completion, Engine, Sampling, defect, unfit
from pipeline.prompts import Message, Prompt, as_text
from pipeline.tokenizer import Tokenizer, as_messages
from pipeline.usercode.process import SampleError


@dataclasses.dataclass
class Episode:
    """A conversation that grows, and what came of it."""

    prompt: Prompt
    """With the messages that the environment put after it."""
    messages: list[Message]
    """All that was said."""
    prompt_ids: list[int] = dataclasses.field(default_factory=list)  # [P]
    ids: list[int] = dataclasses.field(default_factory=list)  # [C]: all tokens after the prompt
    logprobs: list[float] = dataclasses.field(default_factory=list)  # [C]; NaN for observations
    turns: list[Turn] = dataclasses.field(default_factory=list)
    count: int = 0
    """Turns of the policy."""
    tokens: int = 0
    """Sampled ones."""
    reward: float = 0.0
    finish_reason: str = "length"
    failure: str | None = None
    """Why the sample takes no part in training; None: it does."""

    @property
    def completion(self) -> Completion:
        """All tokens, and the text of the policy's last turn."""
        text = next((turn.text for turn in reversed(self.turns) if not turn.observation), "")
        return Completion(self.ids, self.logprobs, text, self.finish_reason)

    def opened(self, messages: list[Message]) -> None:
        self.messages += messages
        if messages:
            self.prompt = dataclasses.replace(self.prompt, content=list(self.messages))

    def spoke(self, completion: Completion) -> None:
        self.turns.append(Turn(len(self.ids), False, completion.text))
        self.ids += completion.ids
        self.logprobs += completion.logprobs
        self.messages.append({"role": "assistant", "content": completion.text})
        self.count += 1
        self.tokens += len(completion.ids)

    def rewarded(self, reward: float) -> None:
        """For the turn that the policy has just had."""
        self.turns[-1] = self.turns[-1]._replace(reward=reward)
        self.reward += reward

    def observed(self, messages: list[Message], ids: list[int]) -> None:
        self.turns.append(Turn(len(self.ids), True, as_text(messages)))
        self.ids += ids
        self.logprobs += [float("nan")] * len(ids)
        self.messages += messages


class Environment:
    """An asynchronous context manager. Raises ValueError for an environment that cannot be started, and for a model
    whose chat template does not let earlier turns' ids be kept."""

    def __init__(
        self,
        config: EnvironmentConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        system_prompt: str | None,
        max_model_len: int,
    ) -> None:
        self.config, self.engine, self.tokenizer = config, engine, tokenizer
        self.system_prompt, self.max_model_len = system_prompt, max_model_len
        self._processes = EpisodeProcesses(config)

    async def __aenter__(self) -> "Environment":
        self.tokenizer.check_turns(self.system_prompt)
        await self._processes.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._processes.close()

    async def play(self, prompt: Prompt, sampling: Sampling) -> Episode:
        """One episode. Raises EngineError where the engine fails; whatever else fails is told in the result."""
        episode = Episode(prompt, as_messages(prompt.content))
        limit_s = self.config.episode_timeout_s
        try:
            async with self._processes.episode() as process, asyncio.timeout(limit_s):
                await self._begin(episode, process, sampling)
                while await self._turn(episode, process, sampling):
                    pass
        except TimeoutError:
            episode.failure = f"environment: the episode was not over within {limit_s:g} s"
        except (SampleError, ValueError, OSError) as error:  # messages that the template refuses; no process left
            episode.failure = f"environment: {error}"
        return episode

    async def _begin(self, episode: Episode, process: EpisodeProcess, sampling: Sampling) -> None:
        prompt = episode.prompt
        known = {
            **prompt.row,
            "prompt": prompt.text,
            "messages": episode.messages,
            "answer": prompt.answer,
            "set": prompt.set,
            "index": prompt.index,
            "entry": prompt.entry.encoded() if prompt.entry else None,
        }
        reply = await process.ask({"reset": known})
        episode.opened(reply["messages"])
        episode.prompt_ids = self.tokenizer.encode(episode.messages, self.system_prompt)
        reason = unfit(episode.prompt_ids, sampling, self.max_model_len)
        if reason:
            raise SampleError(reason)

    async def _turn(self, episode: Episode, process: EpisodeProcess, sampling: Sampling) -> bool:
        """One of the policy and, unless the episode ends, one of the environment; whether there is to be another."""
        left = sampling.max_new_tokens - episode.tokens
        context = [*episode.prompt_ids, *episode.ids]
        room = min(left, self.max_model_len - len(context), self.config.max_tokens_per_turn or left)
        (completion,) = await self.engine.generate(context, 1, dataclasses.replace(sampling, max_new_tokens=room))
        reason = defect(completion, self.tokenizer.vocabulary_size)
        if reason:
            raise SampleError(reason)
        episode.spoke(completion)
        said = {
            "completion": completion.text,
            "completion_ids": completion.ids,
            "finish_reason": completion.finish_reason,
            "messages": episode.messages,
            "turn": episode.count,
        }
        reply = await process.ask({"step": said})
        episode.rewarded(reply["reward"])
        if reply["done"]:
            episode.finish_reason = completion.finish_reason
            return False
        if episode.count >= self.config.max_turns or episode.tokens >= sampling.max_new_tokens:
            return False
        answer: list[Message] = reply["messages"]
        ids = self.tokenizer.encode_reply(episode.messages, answer, completion.ids[-1], self.system_prompt)
        if len(context) + len(completion.ids) + len(ids) >= self.max_model_len:
            return False
        episode.observed(answer, ids)
        return True
