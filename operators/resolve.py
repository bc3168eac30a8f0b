"""From the RLJob that a user wrote to the RunConfig that its children read: defaults chosen, rates as numbers. Pure."""

import dataclasses
import pathlib
import posixpath
from typing import Any

from pydantic.alias_generators import to_snake

from operators import edits, schema
from operators.names import child_name
from operators.spec import RLJob
from operators.spec.inputs import ConfigMapSource, EvaluationSet, ModelSource, PromptSet, PromptSource, Replay
from operators.spec.learning import Correction
from operators.spec.pods import GPU, Resources, Rollout, Trainer
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.config import RunConfig

MODEL_PATH = "/var/lib/miles/model"
REWARDS_PATH = "/etc/miles/rewards"
ENVIRONMENT_PATH = "/etc/miles/environment"
REWARD_PORT = 8000


@dataclasses.dataclass(frozen=True)
class Platform:
    """Where the children run: in a cluster, or (local) as processes on this machine."""

    local: bool = False
    gpus: int = 0
    """Local only: GPUs of this machine. In a cluster the resources in the spec decide."""
    cpus: int = 1
    """Local only: processor cores that all children share."""
    folder: str = "."
    """Local only: folder of the spec's file, at which relative file:// URIs and reward files start."""
    image: str = "miles:0.1.0"
    """In a cluster: image of containers that name none and have no GPU."""
    gpu_image: str = "miles:0.1.0-gpu"
    """In a cluster: image of containers that name none and have GPUs."""
    service_accounts: tuple[str, ...] | None = ()
    """In a cluster: ServiceAccounts that a job may name; None: any."""
    operator_namespace: str = "miles-system"
    """In a cluster: namespace of the operator, which may ask the pods' status ports."""
    egress_cidrs: tuple[str, ...] = ("0.0.0.0/0", "::/0")
    """In a cluster: addresses outside the job that its pods may reach, at egress_ports."""
    egress_ports: tuple[int, ...] = (443,)
    """In a cluster: TCP ports of stores and hubs; those of addresses in the spec are added."""

    def rollout_gpus(self, rollout: Rollout) -> int:
        """GPUs of one vLLM server; 0: it runs on the CPU."""
        return self._gpus(rollout.resources, rollout.tensor_parallel_size)

    def trainer_gpus(self, trainer: Trainer) -> int:
        """GPUs of one trainer pod."""
        return self._gpus(trainer.resources, trainer.processes_per_node or gpus(trainer.resources) or 1)

    def model_gpus(self, resources: Resources) -> int:
        """GPUs of one reward model's server."""
        return self._gpus(resources, gpus(resources))

    def image_for(self, wanted: str | None, gpus: int) -> str:
        return wanted or (self.gpu_image if gpus else self.image)

    def _gpus(self, resources: Resources, wanted: int) -> int:
        return min(wanted, self.gpus) if self.local else gpus(resources)


def gpus(resources: Resources) -> int:
    """GPUs that a container has in a cluster; operators.rules refuses what is no whole number."""
    quantity = str(resources.limits.get(GPU, 0))
    return int(quantity) if quantity.isdigit() else 0


def cpus(resources: Resources) -> int:
    """Whole cores that a container has in a cluster; 0: unknown, or less than one."""
    quantity = str(resources.limits.get("cpu", resources.requests.get("cpu", 0)))
    return int(float(quantity[:-1]) / 1000) if quantity.endswith("m") else int(float(quantity))


def processes(job: RLJob, platform: Platform) -> int:
    """Training processes in each trainer pod."""
    trainer = job.spec.trainer
    return trainer.processes_per_node or max(1, platform.trainer_gpus(trainer))


def run_config(job: RLJob, run_id: str, platform: Platform, attempt: int = 0) -> RunConfig:
    """Raises ValueError naming the field that this platform cannot serve."""
    spec = job.spec
    on_gpu = platform.rollout_gpus(spec.rollout) > 0
    root = address(spec.store.uri, "spec.store.uri", platform)
    config: dict[str, Any] = {
        "namespace": job.metadata.namespace,
        "name": job.metadata.name,
        "run_id": run_id,
        "attempt": attempt,
        "model": policy_model(spec.model, platform),
        "data": {
            "seed": spec.data.seed,
            "system_prompt": spec.data.system_prompt,
            "sets": [_training_set(entry, number, platform) for number, entry in enumerate(spec.data.sets)],
            "replay_from": _replay(spec.data.replay_from, platform),
        },
        "environment": _environment(job, platform),
        "rewards": [_reward(job, number, platform) for number in range(len(spec.rewards))] or _default_rewards(job),
        "algorithm": _algorithm(job),
        "rollout": {
            "adapter_loading": spec.rollout.adapter_loading or ("hot" if on_gpu else "merge"),
            "max_concurrent_groups": spec.rollout.max_concurrent_groups,
            "max_model_len": spec.rollout.max_model_len,
        },
        "trainer": _trainer(job),
        "evaluation": {
            "every_steps": spec.evaluation.every_steps,
            "sets": [_evaluation_set(entry, number, platform) for number, entry in enumerate(spec.evaluation.sets)],
        },
        "checkpoint": {
            "every_steps": spec.checkpoint.every_steps,
            "keep_last": spec.checkpoint.keep_last,
            "resume_from": spec.checkpoint.resume_from
            and address(spec.checkpoint.resume_from, "spec.checkpoint.resumeFrom", platform),
        },
        "store": {
            "uri": posixpath.join(root, job.metadata.namespace, job.metadata.name, run_id),
            "endpoint": spec.store.endpoint,
            "region": spec.store.region,
            "retention": spec.store.retention,
        },
    }
    if spec.output is not None:
        config["output"] = {
            "uri": address(spec.output.uri, "spec.output.uri", platform),
            "what": spec.output.what,
        }
    config["given"] = given(job, platform)
    return RunConfig.model_validate(config)


def given(job: RLJob, platform: Platform) -> dict[str, Any]:
    """Field below spec → value, as the user wrote them, but for the values of variables, which may be secrets, and in a
    cluster for what a running job takes on at once, so that such an edit costs no ConfigMap. There the API server has
    filled in the defaults before anybody sees the job: what equals one is left out, too."""
    content = job.spec.model_dump(mode="json", by_alias=True, exclude_unset=platform.local)
    values = schema.set_values(content, schema.fields(schema.tree())["spec"], defaults=platform.local)
    written = {path: value for path, value, node in values if not schema.fields(node)}
    secret = {path for path in written if "env" in path and path[-1] == "value"}
    live = {path for path in written if edits.effect(("spec", *path)) == edits.LIVE and not platform.local}
    return {schema.dotted(path): value for path, value in written.items() if path not in secret | live}


def _replay(source: Replay | None, platform: Platform) -> dict[str, Any] | None:
    if source is None:
        return None
    return {"uri": address(source.uri, "spec.data.replayFrom.uri", platform), "where": source.where}


def _default_rewards(job: RLJob) -> list[dict[str, Any]]:
    if job.spec.data.replay_from is not None:
        return []  # stored samples have theirs
    library = "generator" if job.spec.environment is None else "environment"
    return [{"name": library, "library": library}]


def policy_model(source: ModelSource, platform: Platform) -> dict[str, Any]:
    tokenizer = source.tokenizer and address(source.tokenizer, "spec.model.tokenizer", platform)
    return model(source.uri, "spec.model.uri", platform, tokenizer) | {
        "revision": source.revision,
        "trust_remote_code": source.trust_remote_code,
    }


def model(uri: str, field: str, platform: Platform, tokenizer: str | None = None) -> dict[str, Any]:
    """Where a model comes from, and where children find it: a folder of this machine is used where it lies, unless it
    gets another tokenizer; other models are fetched."""
    place = address(uri, field, platform)
    in_place = place.startswith("file://") and tokenizer is None
    return {"uri": place, "tokenizer": tokenizer, "path": place.removeprefix("file://") if in_place else MODEL_PATH}


def address(uri: str, field: str, platform: Platform) -> str:
    """`uri`, with a relative file:// URI made absolute. Raises ValueError for file:// in a cluster."""
    if not uri.startswith("file://"):
        return uri
    if not platform.local:
        raise ValueError(f'{field}: got "{uri}": pods share no folder; use s3://…, or `miles run` on one machine')
    path = pathlib.Path(platform.folder, uri.removeprefix("file://"))
    return f"file://{posixpath.normpath(path.absolute().as_posix())}"


def _prompts(entry: PromptSource, field: str, platform: Platform) -> dict[str, Any]:
    return {
        "name": set_name(entry),
        "uri": entry.uri and address(entry.uri, f"{field}.uri", platform),
        "generator": entry.generator,
        "parameters": entry.parameters,
        "prompt_field": entry.fields.prompt,
        "answer_field": entry.fields.answer,
    }


def set_name(entry: PromptSource) -> str:
    """The name that the user gave, else the generator's task or the stem of the file's name."""
    place = entry.generator or entry.uri or ""
    return entry.name or posixpath.basename(place.rstrip("/")).partition(".")[0]


def _training_set(entry: PromptSet, number: int, platform: Platform) -> dict[str, Any]:
    return _prompts(entry, f"spec.data.sets[{number}]", platform) | {
        "weight": float(entry.weight),
        "limit": entry.limit,
    }


def _evaluation_set(entry: EvaluationSet, number: int, platform: Platform) -> dict[str, Any]:
    return _prompts(entry, f"spec.evaluation.sets[{number}]", platform) | {
        "samples": entry.samples,
        "limit": entry.limit,
        "temperature": None if entry.temperature is None else float(entry.temperature),
    }


def _reward(job: RLJob, number: int, platform: Platform) -> dict[str, Any]:
    reward = job.spec.rewards[number]
    served = reward.model and f"http://{child_name(job, f'reward-{reward.name}')}:{REWARD_PORT}"
    return {
        "name": reward.name,
        "function": reward.function,
        "endpoint": reward.endpoint,
        "library": reward.library,
        "model": served,
        "parameters": reward.parameters,
        "normalize": reward.normalize,
        "clip": _number(reward.clip),
        "weight": float(reward.weight),
        "timeout_s": reward.timeout_seconds,
        "on_error": reward.on_error,
        "folder": _folder(
            reward.function, reward.from_, f"spec.rewards[{number}]", f"{REWARDS_PATH}/{reward.name}", platform
        ),
        "memory_mib": reward.memory_mebibytes,
    }


def _environment(job: RLJob, platform: Platform) -> dict[str, Any] | None:
    environment = job.spec.environment
    if environment is None:
        return None
    return {
        "code": environment.class_,
        "library": environment.library,
        "parameters": environment.parameters,
        "folder": _folder(environment.class_, environment.from_, "spec.environment", ENVIRONMENT_PATH, platform),
        "max_turns": environment.max_turns,
        "max_tokens_per_turn": environment.max_tokens_per_turn,
        "timeout_s": environment.timeout_seconds,
        "episode_timeout_s": environment.episode_timeout_seconds,
        "concurrency": environment.concurrency,
        "memory_mib": environment.memory_mebibytes,
    }


def _folder(
    code: str | None, source: ConfigMapSource | None, field: str, mounted: str, platform: Platform
) -> str | None:
    """Folder of the file.py that `code` names; None if it names none. `field`: what has `code` and `source`."""
    if code is None or ".py:" not in code:
        return None
    if platform.local:
        return pathlib.Path(platform.folder).absolute().as_posix()
    if source is None:
        file = code.partition(":")[0]
        raise ValueError(f"{field}.from: missing; a cluster takes {file} from a ConfigMap: from: {{configMap: …}}")
    return mounted


def _algorithm(job: RLJob) -> dict[str, Any]:
    algorithm = job.spec.algorithm
    entry = ALGORITHMS.get(algorithm.type)
    own = entry.defaults if entry else {}
    chosen = {
        "clip_low": _number(algorithm.clip.low),
        "clip_high": _number(algorithm.clip.high),
        "aggregation": algorithm.aggregation,
    }
    parameters = dict(entry.parameters) if entry else {}
    for name, value in algorithm.parameters.items():
        parameters[to_snake(name)] = float(value) if isinstance(value, str) else value
    return {
        **own,
        **{name: value for name, value in chosen.items() if value is not None},
        "type": algorithm.type,
        "total_steps": algorithm.total_steps,
        "prompts_per_step": algorithm.prompts_per_step,
        "group_size": algorithm.group_size,
        "max_staleness": algorithm.max_staleness,
        "updates_per_step": algorithm.updates_per_step,
        "sampling": {
            "temperature": float(algorithm.sampling.temperature),
            "max_new_tokens": algorithm.sampling.max_new_tokens,
            "stop": algorithm.sampling.stop,
        },
        "learning_rate": learning_rate(job),
        "warmup_steps": algorithm.warmup_steps,
        "lr_schedule": algorithm.schedule,
        "weight_decay": float(algorithm.weight_decay),
        "max_grad_norm": float(algorithm.max_grad_norm),
        "kl_coefficient": float(algorithm.kl.coefficient),
        "kl_estimator": algorithm.kl.estimator,
        "kl_placement": algorithm.kl.placement,
        "kl_target": float(algorithm.kl.target or 0),
        "kl_horizon": algorithm.kl.horizon,
        "entropy_coefficient": float(algorithm.entropy_coefficient),
        "correction": _correction(algorithm.correction),
        "parameters": parameters,
    }


def _correction(correction: Correction) -> dict[str, Any]:
    sequences = correction.sequence_band
    return {
        "type": correction.type,
        "cap": float(correction.cap),
        "low": float(correction.band.low),
        "high": float(correction.band.high),
        "sequence_low": sequences and float(sequences.low),
        "sequence_high": sequences and float(sequences.high),
        "veto": float(correction.veto),
        "bypass": correction.bypass,
    }


def _number(rate: str | None) -> float | None:
    return None if rate is None else float(rate)


def learning_rate(job: RLJob) -> float:
    return float(job.spec.algorithm.learning_rate or ("1e-6" if job.spec.trainer.lora is None else "1e-5"))


def _trainer(job: RLJob) -> dict[str, Any]:
    trainer = job.spec.trainer
    lora = trainer.lora and {
        "rank": trainer.lora.rank,
        "alpha": float(trainer.lora.alpha or 2 * trainer.lora.rank),
        "targets": trainer.lora.targets if trainer.lora.targets == "all-linear" else trainer.lora.targets.split(","),
    }
    return {
        "lora": lora,
        "dtype": trainer.dtype,
        "compile": trainer.compile,
        "activation_checkpointing": trainer.activation_checkpointing,
        "max_tokens_per_micro_batch": trainer.max_tokens_per_micro_batch or job.spec.rollout.max_model_len,
        "model_replicas": trainer.model_replicas,
        "offload": trainer.offload,
        "seed": trainer.seed,
        "stop_grace_s": trainer.stop_grace_seconds,
    }
