"""The RLJob itself."""

from typing import Annotated, Literal

from pydantic import Field

from operators.spec.fields import NULLS_EMPTY, AnnotationKey, LabelKey, LabelValue, Model, cluster_only, text
from operators.spec.inputs import Data, Environment, ModelSource, Output, Reward, Store
from operators.spec.learning import Algorithm, Checkpoint, Evaluation
from operators.spec.pods import Rollout, RunPolicy, Scheduling, Trainer

API_VERSION = "miles.dev/v1alpha1"
KIND = "RLJob"


class Metadata(Model):
    """Name, labels and annotations, as for every Kubernetes object."""

    name: Annotated[
        str, text(45, "[a-z]([-a-z0-9]*[a-z0-9])?", "use lower-case letters, digits and inner dashes, first a letter")
    ]
    """Name of the job, at most 45 characters: its children's names begin with it."""
    namespace: Annotated[str, text(63, "[a-z0-9]([-a-z0-9]*[a-z0-9])?", "write a DNS label")] = "default"
    """Namespace of the job."""
    uid: Annotated[str, text(64)] | None = None
    """Set by the API server."""
    labels: Annotated[dict[LabelKey, LabelValue], NULLS_EMPTY] = {}
    """Labels. kueue.x-k8s.io/queue-name is shown by `kubectl get -o wide`; no job waits in a queue yet."""
    annotations: Annotated[dict[AnnotationKey, str], NULLS_EMPTY] = {}
    """Annotations."""


class RLJobSpec(Model):
    """One run of reinforcement-learning post-training."""

    suspend: Annotated[bool, cluster_only("set it to false")] = False
    """Whether the job is to checkpoint and give its resources back, until this is false again."""
    managed_by: Annotated[
        Annotated[str, text(253)] | None, cluster_only("the run is this command's own", harmless=True)
    ] = None
    """Another controller that acts on this job in place of Miles' own."""
    model: ModelSource
    """The base model."""
    data: Data
    """The prompts, or stored samples."""
    environment: Environment | None = None
    """What the policy acts in, over several turns. Default: a completion is the whole answer to its prompt."""
    rewards: Annotated[list[Reward], Field(max_length=16)] = []
    """Terms of the score, summed by weight. Default: what the environment gives; without one the generator's own
    scorer, if all data is generated."""
    algorithm: Algorithm
    """What is optimised."""
    rollout: Rollout = Rollout()
    """The workers that generate."""
    trainer: Trainer = Trainer()
    """The processes that train."""
    evaluation: Evaluation = Evaluation()
    """Evaluation on held-out prompts."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints of the trainer."""
    store: Store
    """The object store."""
    output: Output | None = None
    """Where the trained model goes. Default: it stays in the store, under weights/."""
    scheduling: Scheduling = Scheduling()
    """Where the pods run."""
    run_policy: RunPolicy = RunPolicy()
    """Limits of the job as a whole."""

    @property
    def workers(self) -> int:
        """Rollout workers that the job has while it runs."""
        return 0 if self.data.replay_from else self.rollout.replicas


class RLJob(Model):
    """A reinforcement-learning post-training job."""

    api_version: Literal["miles.dev/v1alpha1"]
    """miles.dev/v1alpha1."""
    kind: Literal["RLJob"]
    """RLJob."""
    metadata: Metadata
    """Name, labels and annotations."""
    spec: RLJobSpec
    """What to run."""
