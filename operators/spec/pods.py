"""Where a run takes place: rollout workers, trainer, what their pods are given, and the limits of the whole."""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from operators.spec.fields import (
    WITHOUT_NULLS,
    Image,
    LabelKey,
    LabelValue,
    Model,
    ObjectName,
    Quantity,
    ResourceName,
    cluster_only,
    text,
)

GPU = "nvidia.com/gpu"
NodeSelector = Annotated[dict[LabelKey, LabelValue], Field(max_length=16), WITHOUT_NULLS]
Quantities = Annotated[dict[ResourceName, Quantity], Field(max_length=16), WITHOUT_NULLS]


class Resources(Model):
    """What one container is given, in Kubernetes' quantities."""

    requests: Quantities = {}
    """What the scheduler reserves. Default: the limits."""
    limits: Quantities = {}
    """What may not be exceeded. nvidia.com/gpu here decides that the container runs on GPUs."""


class SecretKey(Model):
    """One key of a Secret."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, text(253, "[-._a-zA-Z0-9]+", "write a key of the Secret")]
    """Key in it."""


class ValueSource(Model):
    """Where a variable's value comes from."""

    secret_key_ref: SecretKey
    """A key of a Secret in the job's namespace."""


class EnvironmentVariable(Model):
    """One environment variable: a value, or a reference to a Secret."""

    name: Annotated[str, text(128, "[A-Za-z_][A-Za-z0-9_]*", "write the name of an environment variable")]
    """Name; those that Miles sets itself (PET_*, MASTER_*, MILES_*, RANK, WORLD_SIZE …) are refused."""
    value: Annotated[str, text(4096, shortest=0)] | None = None
    """The value, in clear text."""
    value_from: ValueSource | None = None
    """A reference to the value."""


class Toleration(Model):
    """A taint that pods accept, as in a pod's tolerations."""

    key: LabelKey | None = None
    """Key of the taint. Default: every key, with operator Exists."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Whether the value matters."""
    value: LabelValue | None = None
    """Value of the taint, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Default: every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """Seconds that a pod stays after a NoExecute taint appears. Default: for ever."""


Annotation = Annotated[str, text(4096, shortest=0)]
Tolerations = Annotated[list[Toleration], Field(max_length=16)]


class Template(Model):
    """Additions to the pods of one part of the job."""

    env: Annotated[list[EnvironmentVariable], Field(max_length=32)] = []
    """Environment variables of its containers, after those that Miles sets."""
    annotations: Annotated[dict[LabelKey, Annotation], Field(max_length=16), WITHOUT_NULLS] = {}
    """Annotations of the pods."""
    node_selector: NodeSelector = {}
    """Labels a node must have, besides scheduling.nodeSelector."""
    tolerations: Tolerations = []
    """Taints the pods accept, besides scheduling.tolerations."""


class Autoscale(Model):
    """Bounds for the number of rollout workers."""

    min: Annotated[int, Field(ge=0, le=1024)]
    """Fewest workers."""
    max: Annotated[int, Field(ge=1, le=1024)]
    """Most workers."""


class Rollout(Model):
    """The workers that generate: each a vLLM server with a Miles worker beside it."""

    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Number of workers."""
    autoscale: Annotated[Autoscale | None, cluster_only("rollout.replicas workers run", harmless=True)] = None
    """Bounds between which the number of workers follows the trainer's demand: more where it waits for completions,
    fewer where they wait for it. It starts from replicas; 0 there means none. Default: replicas workers run."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that one server splits the model over."""
    max_model_len: Annotated[int, Field(ge=64, le=1_048_576)] = 4096
    """Tokens of prompt and completion together; longer prompts are refused. More needs more memory in vLLM's cache
    and in the trainer, whose maxTokensPerMicroBatch must hold one such sample."""
    max_concurrent_groups: Annotated[int, Field(ge=1, le=4096)] = 64
    """Prompts that one worker completes at a time."""
    compile: bool | None = None
    """Whether vLLM compiles the model: on a CPU about 1.4 times the speed, after a start that takes a minute longer and
    needs a C++ compiler. Default: yes on GPUs, no on a CPU."""
    adapter_loading: Literal["merge", "hot"] | None = None
    """How new LoRA weights reach vLLM. merge: merged into the base beside the server, fastest on a CPU; hot: loaded as
    an adapter. Default: hot on GPUs, merge on a CPU."""
    spot: Annotated[bool, cluster_only("the workers run on this machine", harmless=True)] = False
    """Whether the workers prefer nodes that the cloud may take away (spot), and tolerate the taints of these: a few
    completions are made again when one is. They run on other nodes where there is no room on such ones. The trainer
    never prefers them."""
    image: Image | None = None
    """Image of both containers. Default: that of this release."""
    resources: Resources = Resources()
    """What each vLLM server needs."""
    template: Template = Template()
    """Additions to the workers' pods."""


_QUANTISED: dict[str, Any] = dict.fromkeys(
    ("quantization", "loadIn4bit", "loadIn8bit"), "the base is trained upon in float32 or bfloat16; leave it out"
)
_UNSERVED: dict[str, Any] = dict.fromkeys(
    ("useDora", "modulesToSave", "bias"), "vLLM serves plain low-rank adapters alone; leave it out"
)


class Lora(Model):
    """Train a low-rank adapter of the linear layers, and leave the base as it is."""

    model_config = pydantic.ConfigDict(json_schema_extra={"refused": _UNSERVED | _QUANTISED})

    rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Rank of the adapter; one of those that vLLM serves."""
    alpha: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The adapter's output is scaled by alpha / rank. Default: twice the rank."""
    targets: Annotated[
        str, text(512, "[A-Za-z0-9_-]+(,[A-Za-z0-9_-]+)*", "write all-linear, or names of layers: q_proj,v_proj")
    ] = "all-linear"
    """Which layers get an adapter: all-linear, or a comma-separated list such as q_proj,v_proj."""


class Trainer(Model):
    """The processes that train, as one torchrun job with FSDP2."""

    model_config = pydantic.ConfigDict(json_schema_extra={"refused": _QUANTISED})

    nodes: Annotated[int, Field(ge=1, le=512)] = 1
    """Pods, one a node."""
    processes_per_node: Annotated[int, Field(ge=1, le=16)] | None = None
    """Training processes in each pod. Default: one a GPU in resources.limits, else 1."""
    lora: Lora | None = None
    """Train an adapter; {} takes the defaults. Default: full fine-tuning."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights in forward and backward passes. auto: bfloat16 on GPUs, float32 on a CPU."""
    offload: Literal["none", "reference", "all"] = "none"
    """What lies in the node's own memory and comes to the GPUs layer by layer. reference: the frozen copy of the model
    that full fine-tuning with algorithm.kl needs; all: every weight, every gradient, and the optimizer, which steps on
    the CPU. It saves so much of the GPUs' memory, for slower passes; `miles plan` counts both."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the adapter's initial weights."""
    compile: bool = False
    """Whether the model is compiled: faster steps after a first step of a minute or more."""
    activation_checkpointing: bool = False
    """Whether activations are computed again in the backward pass: less memory, about a third more time."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=64, le=1_048_576)] | None = None
    """Tokens packed into one forward pass; bounds the memory of activations. At least rollout.maxModelLen, which is
    the default."""
    model_replicas: Annotated[int, Field(ge=1, le=512)] = 1
    """Copies of the weights and of the optimizer's state that the training processes keep, each sharded over nodes /
    modelReplicas nodes (HSDP). With more copies weights travel between fewer nodes, and only gradients between all of
    them; each process holds as many times more. Must divide nodes."""
    stop_grace_seconds: Annotated[int, Field(ge=5, le=3600)] = 25
    """Time from a request to stop until the trainer is killed; a checkpoint must fit into it, behind one that is being
    uploaded just then."""
    image: Image | None = None
    """Image of the trainer. Default: that of this release."""
    resources: Resources = Resources()
    """What each pod needs."""
    template: Template = Template()
    """Additions to the trainer's pods."""


class Scheduling(Model):
    """Where all pods of the job run."""

    service_account_name: ObjectName | None = None
    """ServiceAccount of the pods, for clouds that give the store's credentials to it; none of its Kubernetes rights
    reach the pods. It must be one of those that the operator allows (--service-accounts). Default: the namespace's
    default account."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
    node_selector: NodeSelector = {}
    """Labels a node must have."""
    tolerations: Tolerations = []
    """Taints the pods accept."""
    topology_key: LabelKey | None = None
    """Node label whose value all trainer pods must share, such as that of a rack. Default: no such bond."""


class RunPolicy(Model):
    """Limits of the job as a whole."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the trainer after failures; then the job has failed. Disruptions are not counted."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Seconds that the job may run before it has failed. Default: no limit."""
    startup_deadline_seconds: Annotated[int, Field(ge=60, le=86_400)] = 1800
    """Seconds from the start to the end of the first step, after which the job has failed."""
    progress_deadline_seconds: Annotated[int, Field(ge=60, le=86_400)] = 3600
    """Seconds without a finished step after which the job has failed."""
    ttl_seconds_after_finished: Annotated[
        Annotated[int, Field(ge=0, le=31_536_000)] | None, cluster_only("the run's folder stays", harmless=True)
    ] = None
    """Seconds after which a finished job is deleted; its store stays. Default: never."""
    cleanup: Annotated[Literal["All", "None"], cluster_only("every process ends with the run", harmless=True)] = "All"
    """Which pods are removed once the job has finished."""
