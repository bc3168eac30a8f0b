"""What a job consists of in Kubernetes: its children as plain dicts, wanted by the operator, by `miles render` and, as
processes on one machine, by `miles run`. Pure: the same job, run id, attempt and platform give the same children.

    ConfigMap    <job>-config             run.json, which every process reads
    Deployment   <job>-rollout            vLLM and the worker beside it, rollout.replicas times; none with
                                          data.replayFrom
    Service      <job>-trainer            headless: names of the trainer's pods
    Job          <job>-trainer-<attempt>  Indexed, one pod a node; never retried by itself
    Deployment, Service  <job>-reward-<name>   for each reward that has a model
    NetworkPolicy, PodDisruptionBudget  <job>-…  in a cluster only: see isolation
    Secret       <job>-status-<uid>       token of the trainer's status port; see token_secret
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from operators import containers, isolation, spot
from operators.names import child_name, labels, selector, token_name
from operators.resolve import REWARD_PORT, Platform, model, run_config
from operators.spec import API_VERSION, KIND, RLJob
from operators.spec.inputs import Reward
from operators.spec.pods import Template
from pipeline.config import DataConfig, EvaluationConfig, ModelConfig, RunConfig

IN_CLUSTER = Platform()
USER = 10001  # any id but root's; images need not know it

Dict = dict[str, Any]


def children(job: RLJob, *, run_id: str, platform: Platform = IN_CLUSTER, attempt: int = 0) -> list[Dict]:
    """Every child that the job should have now. Raises ValueError naming a field that the platform cannot serve."""
    check_service_account(job, platform)
    config = run_config(job, run_id, platform, attempt)
    reward_models = [reward for reward in job.spec.rewards if reward.model is not None]
    return [
        *([] if platform.local else protection(job, platform)),
        config_map(job, config, reward_models, platform),
        *(child for reward in reward_models for child in reward_model(job, reward, platform)),
        *([] if job.spec.data.replay_from else [rollout(job, config, platform)]),
        trainer_service(job),
        trainer(job, run_id, platform, attempt),
    ]


def check_service_account(job: RLJob, platform: Platform) -> None:
    """A tenant may not take the identity of another account by naming it. Raises ValueError."""
    wanted = job.spec.scheduling.service_account_name
    allowed = None if platform.local else platform.service_accounts
    if wanted is not None and allowed is not None and wanted not in allowed:
        known = f"allowed are {', '.join(allowed)}" if allowed else "the operator allows none (--service-accounts)"
        raise ValueError(f'spec.scheduling.serviceAccountName: got "{wanted}": {known}')


def protection(job: RLJob, platform: Platform) -> list[Dict]:
    """First of all children, so that no pod is open even for a moment."""
    policies = [
        _object("networking.k8s.io/v1", "NetworkPolicy", job, child_name(job, suffix), "isolation") | {"spec": spec}
        for suffix, spec in isolation.policies(job, platform).items()
    ]
    if job.spec.data.replay_from:
        return policies
    budget = _object("policy/v1", "PodDisruptionBudget", job, child_name(job, "rollout"), "rollout")
    return [*policies, budget | {"spec": isolation.disruption_budget(job)}]


def config_map(job: RLJob, config: RunConfig, reward_models: Sequence[Reward], platform: Platform) -> Dict:
    """run.json, and for the fetch container of each reward model a short one with that model in the policy's place."""
    data = {"run.json": config.model_dump_json(indent=2)}
    bare = config.model_copy(update={"data": DataConfig(sets=[]), "rewards": [], "evaluation": EvaluationConfig()})
    for reward in reward_models:
        assert reward.model is not None
        served = ModelConfig(**model(reward.model.uri, f"spec.rewards.{reward.name}.model.uri", platform))
        data[f"reward-{reward.name}.json"] = bare.model_copy(update={"model": served}).model_dump_json(indent=2)
    return _object("v1", "ConfigMap", job, child_name(job, "config"), "config") | {"data": data}


def rollout(job: RLJob, config: RunConfig, platform: Platform) -> Dict:
    spec = job.spec.rollout
    image = platform.image_for(spec.image, platform.rollout_gpus(spec))
    pod = _pod(
        job,
        spec.template,
        platform,
        init=[
            containers.fetch(job, platform, image, f"{containers.CONFIG_FOLDER}/run.json", job.spec.model.secret_ref)
        ],
        main=[containers.vllm(job, platform, image), containers.worker(job, platform, image)],
        volumes=[volume for volume, mount in containers.user_files(job, platform)],
    )
    pod["terminationGracePeriodSeconds"] = 60
    if spec.spot and not platform.local:
        pod = spot.placed(pod)
    # A changed configuration replaces the workers; a new attempt or policy version does not.
    read = config.model_copy(update={"attempt": 0}).model_dump_json(exclude={"given"})
    digest = hashlib.sha256(read.encode()).hexdigest()[:16]
    annotations = {"miles.dev/config": digest}
    replicas = 0 if job.spec.suspend else spec.replicas
    return _deployment(
        job, child_name(job, "rollout"), "rollout", replicas, pod, annotations | spec.template.annotations
    )


def reward_model(job: RLJob, reward: Reward, platform: Platform) -> list[Dict]:
    assert reward.model is not None
    name, component = child_name(job, f"reward-{reward.name}"), f"reward-{reward.name}"
    image = platform.image_for(None, platform.model_gpus(reward.model.resources))
    config = f"{containers.CONFIG_FOLDER}/reward-{reward.name}.json"
    pod = _pod(
        job,
        Template(),
        platform,
        init=[containers.fetch(job, platform, image, config, job.spec.model.secret_ref)],
        main=[containers.reward_model(reward, platform, image)],
    )
    service = _object("v1", "Service", job, name, component)
    service["spec"] = {
        "selector": selector(job, component),
        "ports": [{"name": "http", "port": REWARD_PORT, "targetPort": "http"}],
    }
    replicas = 0 if job.spec.suspend else reward.model.replicas
    return [_deployment(job, name, component, replicas, pod, {}), service]


def trainer_service(job: RLJob) -> Dict:
    """Gives the trainer's pods names before they are ready: they meet while they start."""
    service = _object("v1", "Service", job, child_name(job, "trainer"), "trainer")
    service["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector(job, "trainer"),
        "ports": [
            {"name": "rendezvous", "port": containers.MASTER_PORT, "targetPort": "rendezvous"},
            {"name": "status", "port": containers.STATUS_PORT, "targetPort": "status"},
        ],
    }
    return service


def trainer(job: RLJob, run_id: str, platform: Platform, attempt: int) -> Dict:
    """The torchrun nodes of one attempt. A failed pod fails the Job at once, and so does an evicted one, which the
    Job then remembers as a disruption: starting again, from a checkpoint, is decided above it."""
    spec = job.spec.trainer
    name, service = child_name(job, f"trainer-{attempt}"), child_name(job, "trainer")
    image = platform.image_for(spec.image, platform.trainer_gpus(spec))
    pod = _pod(
        job,
        spec.template,
        platform,
        init=[
            containers.fetch(job, platform, image, f"{containers.CONFIG_FOLDER}/run.json", job.spec.model.secret_ref)
        ],
        main=[containers.trainer(job, platform, image, f"{run_id}-{attempt}", f"{name}-0.{service}")],
    )
    # torchrun gives its processes 30 s after SIGTERM, whatever the pod's grace.
    pod |= {
        "subdomain": service,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(30, spec.stop_grace_seconds) + 10,
    }
    if job.spec.scheduling.topology_key is not None:
        pod["affinity"] = _together(job, job.spec.scheduling.topology_key)
    child = _object("batch/v1", "Job", job, name, "trainer", attempt)
    child["spec"] = {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "suspend": job.spec.suspend,
        "template": _template(job, "trainer", pod, spec.template.annotations, attempt),
    }
    return child


def token_secret(job: RLJob, token: str) -> Dict:
    """What the trainer knows the operator's requests by; none of `children`, which are plain to read."""
    return _object("v1", "Secret", job, token_name(job), "trainer") | {"stringData": {"token": token}}


def _deployment(
    job: RLJob, name: str, component: str, replicas: int, pod: Dict, annotations: Mapping[str, str]
) -> Dict:
    """Never more pods than wanted: each may hold a GPU."""
    child = _object("apps/v1", "Deployment", job, name, component)
    child["spec"] = {
        "replicas": replicas,
        "revisionHistoryLimit": 1,
        "progressDeadlineSeconds": job.spec.run_policy.startup_deadline_seconds,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "selector": {"matchLabels": selector(job, component)},
        "template": _template(job, component, pod, annotations),
    }
    return child


def _template(
    job: RLJob, component: str, pod: Dict, annotations: Mapping[str, str], attempt: int | None = None
) -> Dict:
    metadata: Dict = {"labels": labels(job, component, attempt)}
    return {"metadata": metadata | ({"annotations": dict(annotations)} if annotations else {}), "spec": pod}


def _pod(
    job: RLJob, template: Template, platform: Platform, init: list[Dict], main: list[Dict], volumes: Sequence[Dict] = ()
) -> Dict:
    scheduling = job.spec.scheduling
    tolerations = [*scheduling.tolerations, *template.tolerations]
    optional = {
        "serviceAccountName": scheduling.service_account_name,
        "priorityClassName": scheduling.priority_class_name,
        "nodeSelector": scheduling.node_selector | template.node_selector,
        "tolerations": [toleration.model_dump(by_alias=True, exclude_none=True) for toleration in tolerations],
    }
    return {
        "automountServiceAccountToken": False,
        # A Service named vllm would set VLLM_PORT, which vLLM reads.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **{key: value for key, value in optional.items() if value},
        "initContainers": [containers.finished(container, template.env) for container in init],
        "containers": [containers.finished(container, template.env) for container in main],
        "volumes": [*containers.volumes([*init, *main], child_name(job, "config")), *volumes],
    }


def _together(job: RLJob, topology_key: str) -> Dict:
    term = {"labelSelector": {"matchLabels": selector(job, "trainer")}, "topologyKey": topology_key}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _object(version: str, kind: str, job: RLJob, name: str, component: str, attempt: int | None = None) -> Dict:
    metadata: Dict = {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": labels(job, component, attempt),
    }
    if job.metadata.uid is not None:
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.metadata.name, "uid": job.metadata.uid}
        metadata["ownerReferences"] = [owner | {"controller": True, "blockOwnerDeletion": True}]
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
