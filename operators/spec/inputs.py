"""What goes into a run and what comes out: model, prompts, rewards, store, output."""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from operators.spec.fields import (
    Between,
    ColumnName,
    DataUri,
    Model,
    ModelUri,
    Name,
    ObjectName,
    OneOf,
    Parameters,
    Rate,
    SignedRate,
    StoreUri,
    Url,
    text,
)
from operators.spec.pods import Resources
from pipeline.environments.registry import LIBRARY as ENVIRONMENTS
from pipeline.rewards.registry import LIBRARY
from pipeline.where import LONGEST

_GENERATOR = text(128, "reasoning-gym/[a-z][a-z0-9_]*", "write reasoning-gym/task, such as reasoning-gym/chain_sum")
_FUNCTION = text(
    256,
    r"([A-Za-z0-9_][-A-Za-z0-9_]*\.py|[A-Za-z_][A-Za-z0-9_.]*):[A-Za-z_][A-Za-z0-9_]*",
    "write file.py:function or module:function, without folders",
)

_CLASS = text(
    256,
    r"([A-Za-z0-9_][-A-Za-z0-9_]*\.py|[A-Za-z_][A-Za-z0-9_.]*):[A-Za-z_][A-Za-z0-9_]*",
    "write file.py:Class or module:Class, without folders",
)


class SecretReference(Model):
    """A Secret in the job's namespace; its keys become environment variables of the same name."""

    name: ObjectName
    """Name of the Secret. Keys for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if need be, AWS_SESSION_TOKEN;
    for a hub: HF_TOKEN. `miles run` takes the same variables from its own environment instead."""


class ModelSource(Model):
    """The base model that is trained."""

    uri: ModelUri
    """Where the model comes from: hf://organisation/name, s3://bucket/key or file:///folder, a folder in the Hugging
    Face layout with safetensors weights."""
    revision: Annotated[str, text(128, "[A-Za-z0-9][-A-Za-z0-9._/]*", "write a branch, tag or commit")] | None = None
    """Branch, tag or commit of an hf:// model. Default: its main branch, which may change between two attempts."""
    tokenizer: ModelUri | None = None
    """Another model, whose tokenizer and chat template are used. Default: the model's own."""
    trust_remote_code: bool = False
    """Whether Python that comes with the model may run in the job's pods. An hf:// model then needs a revision."""
    secret_ref: SecretReference | None = None
    """Credentials for reading the model. Default: those of the store, for an s3:// model."""


class Fields(Model):
    """Which columns of the data are read."""

    prompt: ColumnName = "prompt"
    """Column that holds the prompt: text, or a list of chat messages {role, content}."""
    answer: ColumnName = "answer"
    """Column that holds the reference answer, which rewards are given; it may be missing."""


def _without_null_seed(value: Any) -> Any:
    """A seed is refused here, but one without a value is absent."""
    empty = isinstance(value, dict) and value.get("seed", 0) is None
    return {key: item for key, item in value.items() if key != "seed"} if empty else value


class PromptSource(Model):
    """Prompts from a file or a generator, exactly one of them."""

    name: Name | None = None
    """Name in metrics and records. Default: the generator's task, or the file's name without its ending."""
    uri: DataUri | None = None
    """A .jsonl or .parquet file, one prompt a row: s3://bucket/key, https://host/path or file:///path."""
    generator: Annotated[str, _GENERATOR] | None = None
    """A procedural task that never runs out: reasoning-gym/<task>. It comes with its own scorer."""
    parameters: Annotated[Parameters, pydantic.BeforeValidator(_without_null_seed)] = {}
    """Arguments of the generator, such as {max_terms: 4}. Any JSON values, at most 16 KiB."""
    fields: Fields = Fields()
    """Names of the columns of a file."""


class PromptSet(PromptSource):
    """Prompts to train on: a file or a generator, exactly one of them."""

    weight: Annotated[Rate, Between(0, 1_000_000, above=True)] = "1"
    """Share of the prompts drawn from this set, relative to the other sets' weights."""
    limit: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Use the first so many prompts only, again and again. Default: all of them."""


class EvaluationSet(PromptSource):
    """Prompts to evaluate on: a file or a generator, exactly one of them."""

    samples: Annotated[int, Field(ge=1, le=256)] = 1
    """Completions per prompt: the k of avg@k and pass@k."""
    temperature: Annotated[Rate, Between(0.01, 10, off=True)] | None = None
    """Sampling temperature; "0" is greedy. Default: the temperature of training."""
    limit: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Use the first so many prompts only. Default: all of a file; a generator needs a limit."""


class Replay(Model):
    """The stored samples of a run that is over."""

    uri: StoreUri
    """Prefix of that run in the same store: <root>/<namespace>/<name>/<run id>. It is only read. What it has trained is
    trained again, in its order, and from the beginning when it is used up. groupSize and sampling.temperature must be
    that run's."""
    where: Annotated[str, text(LONGEST)] | None = None
    """Which samples take part, as SQL says it behind WHERE: reward > 0.5 and set = 'sums' and len(completion_ids) < 99.
    A group of which none does is passed over. Default: all."""


class Data(Model):
    """What to train on: prompts, or samples that another run has stored; exactly one of sets and replayFrom."""

    sets: Annotated[list[PromptSet], Field(max_length=32)] = []
    """One or more sets; each prompt is drawn from one of them by weight."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the order of prompts, which is the same in every run with the same seed and sets."""
    system_prompt: Annotated[str, text(16_384)] | None = None
    """System message put before every prompt. Default: none but what the chat template brings."""
    replay_from: Replay | None = None
    """Samples that are trained again. Nothing is generated then: there are no workers, no rewards and no evaluation,
    and the stored log-probabilities stand for the policy that sampled, which algorithm.correction makes up for."""


class ConfigMapSource(Model):
    """Where a file of the user's comes from."""

    config_map: ObjectName
    """ConfigMap in the job's namespace with the file as one of its keys. `miles run` reads the file that lies beside
    the spec instead."""


class Environment(Model):
    """What answers the policy, turn by turn, until an episode is over: exactly one of class and library. An episode is
    one sample; what the environment says is context, and not trained on."""

    class_: Annotated[Annotated[str, _CLASS] | None, Field(alias="class")] = None
    """A Python class, file.py:Class or module:Class, of which every episode has an object in a process of its own.
    step(completion, …) returns (observation, reward, done): text or messages {role, content}, a number, and whether the
    episode is over. reset(prompt, answer, …), which may be missing, may return messages that follow the prompt. Both
    are called with those arguments that they name: step has completion, completion_ids, finish_reason, messages, turn;
    reset has prompt, messages, answer, set, index and the columns of the prompt's row."""
    from_: Annotated[ConfigMapSource | None, Field(alias="from")] = None
    """Where file.py of `class` comes from; needed in a cluster."""
    library: Annotated[str, OneOf(ENVIRONMENTS)] | None = None
    """An environment that comes with Miles. reasoning-gym: several attempts at a generated task (parameters: {attempts:
    3, discount: 1.0, feedback: text after a wrong answer})."""
    parameters: Parameters = {}
    """Arguments of the class. Any JSON values, at most 16 KiB."""
    max_turns: Annotated[int, Field(ge=1, le=1024)] = 16
    """Turns of the policy after which an episode ends, truncated. All turns together sample at most
    algorithm.sampling.maxNewTokens and, with what the environment says, fit rollout.maxModelLen."""
    max_tokens_per_turn: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Tokens that the policy may sample in one turn. Default: what is left of maxNewTokens."""
    timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Longest time that one reset or step may take; then the sample takes no part in training."""
    episode_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Longest time that an episode may take, sampling included; then the sample takes no part in training. New weights
    are loaded between episodes, so a long one holds them up."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 128
    """Episodes that one rollout worker plays at a time; each has a process in the worker's container."""
    memory_mebibytes: Annotated[int, Field(ge=64, le=1_048_576)] = 2048
    """Memory that the process of one episode may use, in MiB."""


class RewardModel(Model):
    """A sequence-classification model with one label, served beside the job; its raw output is the score."""

    uri: ModelUri
    """Where the reward model comes from, as for model.uri."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Servers behind one Service."""
    resources: Resources = Resources()
    """What each server needs; without a GPU it runs on the CPU in float32."""


class Reward(Model):
    """One term of the score of a completion: exactly one of function, endpoint, model and library."""

    name: Name
    """Name in metrics (reward/<name>/mean)."""
    function: Annotated[str, _FUNCTION] | None = None
    """A Python function, file.py:function or module:function, called in a process of its own with those of these
    arguments that it names, and its own `parameters`: prompt, completion, answer (texts), messages, tokens,
    finish_reason, max_new_tokens, prompt_ids, completion_ids, set, index, entry (what a generator's own scorer reads,
    encoded), and the columns of the prompt's row, of a generated prompt item. Of several turns completion is the
    last, messages are what came before, and episode_reward is what the environment gave. Returns a finite number, or
    a pair of it and [(position, reward), …], what else came with which of completion_ids: ppo and reinforce++ count
    each at its token, the others see the sum of all."""
    from_: Annotated[ConfigMapSource | None, Field(alias="from")] = None
    """Where file.py of `function` comes from; needed in a cluster."""
    endpoint: Url | None = None
    """An HTTP service that is sent {prompt, completion, answer, metadata} and replies {score} or, with rewards of
    single tokens, {score, steps: [[position, reward], …]}; both are as of a function."""
    model: RewardModel | None = None
    """A reward model that Miles serves."""
    library: Annotated[str, OneOf(LIBRARY)] | None = None
    """A scorer that comes with Miles. environment: the sum of the rewards of its steps; generator: the task's own;
    math-verify: whether two answers are equal as mathematics; length: a penalty for completions near the limit
    (parameters: {buffer: tokens})."""
    parameters: Parameters = {}
    """Arguments of the function or scorer. Any JSON values, at most 16 KiB."""
    normalize: bool = False
    """Whether the trainer puts the score on a common scale before advantages are made of it: less the mean and divided
    by the standard deviation of all samples trained so far, those of the step included. For a score whose scale is not
    known, such as a reward model's; a weight then counts standard deviations. What is stored and logged as
    reward/<name>/mean stays as it is."""
    clip: Annotated[Rate, Between(0, 1_000_000, above=True)] | None = None
    """Largest size of the score, in both directions, that advantages are made of; with normalize in standard
    deviations, and after it. Samples beyond it count alike. Default: no bound."""
    weight: Annotated[SignedRate, Between(-1_000_000, 1_000_000)] = "1"
    """Factor of this term in the sum; negative for a penalty."""
    timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 5
    """Longest time that scoring one sample may take; then onError applies. A server that is gone or busy is asked again
    until then: more than its restart takes lets its samples survive one."""
    on_error: Literal["dropSample", "zero"] = "dropSample"
    """What becomes of a sample whose scoring raised, hung or gave NaN: no part in training, or a score of 0."""
    memory_mebibytes: Annotated[int, Field(ge=64, le=1_048_576)] = 2048
    """Memory that the function's process may use, in MiB."""


class Store(Model):
    """The object store that workers and trainer share; it is also the run's data set."""

    uri: StoreUri
    """Root under which the job writes <namespace>/<name>/<run id>: s3://bucket/prefix, or file:///folder, which only
    `miles run` can use."""
    endpoint: Url | None = None
    """URL of an S3-compatible service. Default: AWS."""
    region: Annotated[str, text(64, "[a-z0-9-]+", "write a region, such as eu-central-1")] | None = None
    """Region of the bucket. Default: what the environment says."""
    secret_ref: SecretReference | None = None
    """Credentials of the store. Default: what the pods' environment offers."""
    retention: Literal["all", "window"] = "all"
    """all: the run stays as a data set; window: what no kept checkpoint needs is deleted."""


class Output(Model):
    """Where the trained model goes when the job is complete."""

    uri: StoreUri
    """Prefix to write the model to; it must be free."""
    what: Literal["final", "best"] = "final"
    """The last version, or the one that was evaluated best."""
