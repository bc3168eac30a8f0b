"""What is optimised and how: algorithm, evaluation, checkpoints."""

import functools
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic.alias_generators import to_camel

from operators.spec.fields import (
    OWN_COUNT,
    Between,
    Model,
    OneOf,
    Parameters,
    Rate,
    StoreUri,
    own_rate,
    text,
)
from operators.spec.inputs import EvaluationSet
from pipeline.algorithms.registry import ALGORITHMS, PARAMETERS

_TRUNCATING = ("topP", "topK", "minP", "repetitionPenalty", "presencePenalty", "frequencyPenalty", "minTokens")


@functools.cache
def _own_parameters() -> dict[str, Any]:
    """The parameters of all algorithms, as one object."""
    owners: dict[str, dict[str, bool | int | float]] = {}
    for algorithm, entry in ALGORITHMS.items():
        for name, default in entry.parameters.items():
            owners.setdefault(name, {})[algorithm] = default
    properties = {to_camel(name): _own_parameter(name, of) for name, of in owners.items()}
    return {"type": "object", "properties": properties, "default": {}}


def _own_parameter(name: str, defaults: dict[str, bool | int | float]) -> dict[str, Any]:
    """`defaults`: by algorithm; all of one kind."""
    (kind,) = {type(default) for default in defaults.values()}
    shown = {owner: str(default).lower() if kind is bool else f"{default:g}" for owner, default in defaults.items()}
    values = set(shown.values())
    of = f"Default: {values.pop()}" if len(values) == 1 else f"Default: {', '.join(map(' '.join, shown.items()))}"
    schema: dict[str, Any] = {"type": "boolean"}
    if kind is int:
        schema = {"type": "integer", "minimum": 0, "maximum": OWN_COUNT}
    elif kind is float:
        schema = pydantic.TypeAdapter(Annotated[Rate, own_rate(name)]).json_schema()
    return schema | {"description": f"Of {', '.join(shown)}: {PARAMETERS[name]}. {of}."}


def _without_nulls(value: Any) -> Any:
    """As in every other object of the resource: a known key without a value is absent."""
    known = _own_parameters()["properties"]
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None or key not in known}


class Sampling(Model):
    """How completions are sampled. The whole distribution is sampled (no top-p, top-k or penalties), since the
    trainer must be able to compute the same probabilities."""

    model_config = pydantic.ConfigDict(
        json_schema_extra={"refused": dict.fromkeys(_TRUNCATING, "leave it out; the whole distribution is sampled")}
    )

    temperature: Annotated[Rate, Between(0.01, 10)] = "1"
    """Divides the logits, in the sampler and in the trainer alike; vLLM knows none between 0 and 0.01."""
    max_new_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 512
    """Tokens after which a completion is cut off, those of all its turns together. With the prompt it must fit
    rollout.maxModelLen."""
    stop: Annotated[list[Annotated[str, text(128)]], Field(max_length=16)] = []
    """Texts at which a completion ends, besides the model's own end-of-sequence tokens."""


class Clip(Model):
    """Bounds of the ratio of new to old probabilities, as distances from 1."""

    low: Annotated[Rate, Between(0, 0.999, above=True)] | None = None
    """Below 1; less than "1". Default: the algorithm's own ("0.2"; gspo "0.0003", cispo no bound)."""
    high: Annotated[Rate, Between(0, 100, above=True)] | None = None
    """Above 1. Default: the algorithm's own ("0.2"; grpo and dapo "0.28", gspo "0.0004", cispo "4": weights up
    to 5)."""


class Kl(Model):
    """A pull towards the base model."""

    coefficient: Annotated[Rate, Between(0, 100)] = "0"
    """Weight of the divergence; at "0" no reference model is kept."""
    placement: Literal["loss", "reward"] = "loss"
    """Whether it is added to the loss or taken from the reward of each token."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence. k1 has no gradient as a loss and is refused there."""
    target: Annotated[Rate, Between(0, 100, above=True)] | None = None
    """Divergence per token, in nats, that the coefficient is steered towards after every step, from the one above.
    Default: the coefficient stays as it is."""
    horizon: Annotated[int, Field(ge=1, le=1_000_000_000)] = 10_000
    """With target: completions over which the coefficient changes by the relative error (of at most 0.2); the fewer,
    the faster. At least promptsPerStep times groupSize: five times as many in a step would turn its sign."""


class Band(Model):
    """Bounds of a ratio of probabilities, trainer by sampler."""

    low: Annotated[Rate, Between(0, 1)] = "0.5"
    """Lower bound."""
    high: Annotated[Rate, Between(1, 1_000_000)] = "5"
    """Upper bound."""


class Correction(Model):
    """Correction for the difference between the policy that sampled and the one that is trained. What is rejected
    adds nothing to the loss, but counts in its denominators."""

    type: Literal["none", "token-tis", "masked-is"] = "token-tis"
    """token-tis: each token's loss is weighted by the ratio of the two probabilities, up to cap. masked-is: by the
    ratio where it lies in the band, and rejected elsewhere."""
    cap: Annotated[Rate, Between(1, 1000)] = "2"
    """Largest weight of a token, with token-tis."""
    band: Band = Band()
    """Ratios of tokens that masked-is keeps."""
    sequence_band: Band | None = None
    """A completion is rejected if the geometric mean of its tokens' ratios lies outside. Default: none is."""
    veto: Annotated[Rate, Between(0, 1)] = "0"
    """A completion is rejected if the ratio of one of its tokens is lower, such as "1e-4". "0": none is."""
    bypass: bool = False
    """Take the sampler's probabilities for those before the update: saves a forward pass where updatesPerStep is above
    1, corrects nothing, and clips against the sampler."""


class Algorithm(Model):
    """What is optimised, and how fast."""

    type: Annotated[str, OneOf(ALGORITHMS)]
    """The algorithm; pipeline/algorithms/README.md has a table. Clip bounds, aggregation and parameters have defaults
    that depend on it."""
    total_steps: Annotated[int, Field(ge=1, le=10_000_000)]
    """Training steps after which the job is complete."""
    prompts_per_step: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Prompts trained in one step; each is completed groupSize times."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Completions sampled per prompt, and compared with each other by group-relative algorithms."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 1
    """How many versions older than the trained policy a completion may be. 0: generation and training take turns;
    more: they overlap, and learn from older data."""
    updates_per_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimizer updates that the prompts of one step are split into; divides promptsPerStep."""
    sampling: Sampling = Sampling()
    """How completions are sampled."""
    learning_rate: Annotated[Rate, Between(0, 1, above=True)] | None = None
    """Peak learning rate of AdamW. Default: "1e-6", with trainer.lora "1e-5"."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine would reach 0 one step behind the last."""
    weight_decay: Annotated[Rate, Between(0, 1)] = "0"
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[Rate, Between(0, 1_000_000, above=True)] = "1"
    """Norm above which the gradient is scaled down."""
    clip: Clip = Clip()
    """Bounds of the probability ratio."""
    kl: Kl = Kl()
    """A pull towards the base model; off by default."""
    entropy_coefficient: Annotated[Rate, Between(0, 100)] = "0"
    """Weight of the policy's entropy, per token in nats, which is taken from the loss: keeps it exploring."""
    correction: Correction = Correction()
    """Correction for off-policy data."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] | None = None
    """How the losses of tokens become one number. token-mean: every token of the batch counts alike. Default: the
    algorithm's own (token-mean; dr-grpo constant, gspo seq-mean-token-mean)."""
    parameters: Annotated[
        Parameters, pydantic.BeforeValidator(_without_nulls), pydantic.WithJsonSchema(_own_parameters())
    ] = {}
    """Parameters that only some algorithms know; rates among them are strings."""


class Evaluation(Model):
    """Evaluation on held-out prompts, by the rollout workers."""

    every_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps between two evaluations; 0: only before the first step and after the last."""
    sets: Annotated[list[EvaluationSet], Field(max_length=32)] = []
    """What is evaluated; without a set, nothing is."""


class Checkpoint(Model):
    """Checkpoints of the trainer, from which an interrupted job goes on."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """Steps between two checkpoints: the work that is lost when the trainer dies. Training stands still only while
    each process copies its part to local disk; the store gets it while the next steps are trained."""
    keep_last: Annotated[int, Field(ge=1, le=1000)] = 2
    """Checkpoints kept; older ones are deleted."""
    resume_from: StoreUri | None = None
    """Another job's run to begin from: <store.uri>/<namespace>/<name>/<uid>, whose newest checkpoint is taken, or one
    of the folders in its checkpoints/. Its weights and optimizer are those of step 0 here; steps, prompts and the
    course of the learning rate begin anew. Model, shape of the adapter, and whether there is a critic must be the same;
    the number of processes need not. Read once, with the endpoint and the Secret of store. Default: the base model."""
