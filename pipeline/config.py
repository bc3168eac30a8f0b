"""What every data-plane process reads: the resolved configuration of one run.

The operator writes it from an RLJob (`operators.children`) as one JSON file, mounted beside each child and
named by the environment variable MILES_CONFIG. All defaults are already filled in, rates are numbers,
names are snake_case. Free of torch and vllm; validated once, here, when it is read.
"""

import os
import pathlib
from typing import Any, Literal

import pydantic

CONFIG_VARIABLE = "MILES_CONFIG"


class Config(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Config):
    uri: str
    """Where the base model comes from: a folder, s3://…, hf://org/name."""
    revision: str | None = None
    """Branch, tag or commit of an hf:// model."""
    tokenizer: str | None = None
    """URI of another tokenizer folder; None: the model's own."""
    trust_remote_code: bool = False
    """Whether Python shipped with the model may run."""
    path: str
    """Local folder in which the fetched model lies, in every child."""


class PromptSetConfig(Config):
    name: str
    uri: str | None = None
    """JSONL or Parquet file, any fsspec URI. Exactly one of uri and generator."""
    generator: str | None = None
    """`reasoning-gym/<task>`."""
    parameters: dict[str, Any] = {}
    """Arguments of the generator."""
    prompt_field: str = "prompt"
    """Column with the prompt: text, or a list of chat messages {role, content}."""
    answer_field: str = "answer"
    """Column with the reference answer, given to rewards; may be missing."""
    weight: float = 1.0
    """Relative share of the prompts drawn from this set."""
    samples: int = 1
    """Evaluation only: completions per prompt (k of avg@k and pass@k)."""
    limit: int | None = None
    """Use only the first so many prompts; None: all (a generator in an evaluation needs one)."""
    temperature: float | None = None
    """Evaluation only: None: the training temperature; 0: greedy."""


class ReplayConfig(Config):
    uri: str
    """Prefix of the run whose samples are trained again."""
    where: str | None = None
    """Condition on samples, see pipeline.where; None: all."""


class DataConfig(Config):
    seed: int = 0
    """Order of the prompts is a pure function of (seed, pass)."""
    system_prompt: str | None = None
    sets: list[PromptSetConfig]
    replay_from: ReplayConfig | None = None
    """Stored samples to train on; then there are no sets, and nothing is generated."""


class RewardConfig(Config):
    name: str
    function: str | None = None
    """`module:function` or `file.py:function`; exactly one of function, endpoint, library, model."""
    endpoint: str | None = None
    """http(s) URL that receives {prompt, completion, answer} and replies {score}."""
    library: str | None = None
    """A shipped scorer: a name in pipeline.rewards.registry."""
    model: str | None = None
    """URL of the vLLM pooling server of a reward model."""
    parameters: dict[str, Any] = {}
    normalize: bool = False
    """Whether advantages see the score less its running mean, in running standard deviations."""
    clip: float | None = None
    """Largest size of the score that advantages see, after normalize; None: no bound."""
    weight: float = 1.0
    timeout_s: float = 5.0
    """Longest time one sample may take to score."""
    on_error: Literal["dropSample", "zero"] = "dropSample"
    """What a sample that raised, hung or scored NaN is worth: no part in training, or a score of 0."""
    folder: str | None = None
    """Folder that `file.py` is relative to."""
    memory_mib: int = 2048
    """Address-space limit of the process that runs a user's function."""


class EnvironmentConfig(Config):
    code: str | None = None
    """`module:Class` or `file.py:Class`; exactly one of code and library."""
    library: str | None = None
    """A shipped environment: reasoning-gym."""
    parameters: dict[str, Any] = {}
    """Arguments of the class."""
    folder: str | None = None
    """Folder that `file.py` is relative to."""
    max_turns: int = 16
    """Turns of the policy after which an episode ends."""
    max_tokens_per_turn: int | None = None
    """Tokens that the policy samples in one turn; None: what sampling.max_new_tokens leaves."""
    timeout_s: float = 30.0
    """Longest time one reset or step may take."""
    episode_timeout_s: float = 600.0
    """Longest time one episode may take."""
    concurrency: int = 128
    """Episodes that one worker plays at a time, each in a process of its own."""
    memory_mib: int = 2048
    """Address-space limit of an episode's process."""


class SamplingConfig(Config):
    temperature: float = 1.0
    max_new_tokens: int = 256
    """Of a sample in all its turns together."""
    stop: list[str] = []


class CorrectionConfig(Config):
    """What is done about μ ≠ π_old; see pipeline.algorithms.correction. Ratios are π_old/μ."""

    type: Literal["none", "token-tis", "masked-is"] = "token-tis"
    cap: float = 2.0
    """Largest weight of a token; token-tis."""
    low: float = 0.5
    high: float = 5.0
    """Band outside of which a token is rejected; masked-is."""
    sequence_low: float | None = None
    sequence_high: float | None = None
    """Band of exp(mean log-ratio) outside of which a sample is rejected; None: no such band."""
    veto: float = 0.0
    """Ratio below which one token has its whole sample rejected; 0: never."""
    bypass: bool = False
    """π_old := μ: nothing is corrected, and the clip acts on π_θ/μ."""


class AlgorithmConfig(Config):
    type: str
    """A name in pipeline.algorithms.registry."""
    total_steps: int
    prompts_per_step: int
    """Groups (prompts) trained in one step: B."""
    group_size: int
    """Completions sampled per prompt."""
    max_staleness: int = 1
    """η, in policy versions: 0 is synchronous."""
    updates_per_step: int = 1
    """Optimizer updates one step's batch is split into."""
    sampling: SamplingConfig = SamplingConfig()
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_placement: Literal["loss", "reward"] = "loss"
    kl_target: float = 0.0
    """KL per token, in nats, that kl_coefficient follows from step to step; 0: it stays as it is."""
    kl_horizon: int = 10_000
    """Samples over which the coefficient changes by the error's own size."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy that is taken from the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] = "token-mean"
    parameters: dict[str, Any] = {}
    """Parameters that only this algorithm knows, checked by its registry entry."""


class LoraConfig(Config):
    rank: int = 16
    alpha: float = 32.0
    targets: str | list[str] = "all-linear"


class TrainerConfig(Config):
    lora: LoraConfig | None = None
    """None: full fine-tuning."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    compile: bool = False
    activation_checkpointing: bool = False
    max_tokens_per_micro_batch: int = 4096
    """Packed tokens in one forward pass; bounds activation memory."""
    model_replicas: int = 1
    """Copies of model and optimizer among the ranks, each sharded over its part of them; divides their number."""
    offload: Literal["none", "reference", "all"] = "none"
    """What lies in the CPU's memory. reference: the frozen copy of full fine-tuning; all: every parameter with its
    gradient and optimizer state."""
    seed: int = 0
    stop_grace_s: int = 25
    """Longest time from SIGTERM to exit; a checkpoint is written in it."""


class RolloutConfig(Config):
    adapter_loading: Literal["merge", "hot"] = "merge"
    """LoRA only. merge: base + adapter merged beside the server, reloaded in place (fp32, best on CPU);
    hot: the adapter is loaded into vLLM (best on GPU)."""
    max_concurrent_groups: int = 64
    """Groups one worker generates at a time."""
    flush_s: float = 2.0
    """Longest time a finished group waits before its shard is written."""
    shard_groups: int = 64
    """Groups after which a shard is written at once."""
    poll_s: float = 0.5
    """Seconds between two looks at control/state.json while there is work; a worker without any looks less and less
    often, down to once in heartbeat_s, and finds new work later by a twentieth of the time it has waited. So does the
    trainer, of each worker that has long delivered nothing."""
    heartbeat_s: float = 5.0
    """Seconds between two refreshes of writers/<ulid>.json; twice as many where the worker idles."""
    lease_timeout_s: float = 60.0
    """Silence after which a writer's leases are taken back."""
    group_timeout_s: float = 1800.0
    """Longest time one index may be held without being delivered."""
    max_failures: int = 3
    """Failures of one index by itself after which it is dropped."""
    max_model_len: int = 4096
    """Tokens of prompt and completion together that vLLM accepts."""


class EvaluationConfig(Config):
    every_steps: int = 0
    """0: only at start and end; sets empty: no evaluation."""
    sets: list[PromptSetConfig] = []


class CheckpointConfig(Config):
    every_steps: int = 20
    keep_last: int = 2
    resume_from: str | None = None
    """Another run's prefix, or one of its checkpoints: its weights and optimizer are those of this run's step 0."""


class StoreConfig(Config):
    uri: str
    """Prefix of this very run, <root>/<namespace>/<name>/<run id>: s3://… or file:///…"""
    endpoint: str | None = None
    """S3 endpoint URL; None: AWS."""
    region: str | None = None
    retention: Literal["all", "window"] = "all"


class OutputConfig(Config):
    uri: str
    what: Literal["final", "best"] = "final"


class RunConfig(Config):
    namespace: str = "default"
    name: str
    run_id: str
    attempt: int = 0
    model: ModelConfig
    data: DataConfig
    environment: EnvironmentConfig | None = None
    """None: a completion has one turn."""
    rewards: list[RewardConfig]
    algorithm: AlgorithmConfig
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    store: StoreConfig
    output: OutputConfig | None = None
    given: dict[str, Any] = {}
    """Field of the RLJob's spec, such as `trainer.nodes` or `rewards[0].name` → what it says there. For people: nothing
    is decided by it."""


def load(path: str | None = None) -> RunConfig:
    """Read the RunConfig from `path`, by default from the file that MILES_CONFIG names.

    Raises ValueError, one line for all that is wrong with it.
    """
    path = path or os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise ValueError(f"{CONFIG_VARIABLE} is not set; it names the run's configuration file")
    try:
        return RunConfig.model_validate_json(pathlib.Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{CONFIG_VARIABLE}: {error.filename}: {error.strerror}") from None
    except pydantic.ValidationError as error:
        faults = [".".join(map(str, fault["loc"])) + ": " + fault["msg"] for fault in error.errors()]
        raise ValueError("configuration: " + "; ".join(faults)) from None
