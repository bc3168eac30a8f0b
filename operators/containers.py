"""The containers of a job's pods: commands, arguments, environment. Pure.

Nothing that a user writes reaches a command line but numbers and fixed words; URIs and texts travel in run.json.
Ports stand in variables that end in PORT and are used as $(NAME) in arguments, so that `miles run` can move them.
"""

from collections.abc import Iterable
from typing import Any

from operators.names import token_name
from operators.resolve import (
    ENVIRONMENT_PATH,
    MODEL_PATH,
    REWARD_PORT,
    REWARDS_PATH,
    Platform,
    cpus,
    model,
    policy_model,
    processes,
)
from operators.spec import RLJob
from operators.spec.inputs import Reward, SecretReference
from operators.spec.pods import GPU, EnvironmentVariable, Resources

CONFIG_FOLDER = "/etc/miles/config"
POLICIES_PATH = "/var/lib/miles/policies"  # where the worker puts weights for the server beside it
VLLM_PORT = 8000
STATUS_PORT = 8001
MASTER_PORT = 29500
LOOPBACK = "127.0.0.1"
SHARED_GPU_FRACTION = 0.4  # of a GPU's memory, for vLLM, where trainer and server share one
CPU_CACHE = {"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"}
"""GiB of keys and values that a server on a CPU holds, unless the job's own variables say otherwise."""
STARTUP = {"periodSeconds": 10, "failureThreshold": 60}
ORDERLY_END = ("--shutdown-timeout", "5")
"""Seconds for vLLM's engine to take itself apart. Without, its server kills it at once, and each end of one leaves its
shared memory behind (0.32)."""

Dict = dict[str, Any]

COMPANION: Dict = {"requests": {"cpu": "250m", "memory": "512Mi"}}
"""What the containers beside vLLM reserve; the user's reward functions and environment run in the worker's."""
RESTRICTED: Dict = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def fetch(job: RLJob, platform: Platform, image: str, config: str, source: SecretReference | None) -> Dict:
    """Init container that puts a model into the pod; `config` is the file whose model that is."""
    keys = _credentials(source or job.spec.store.secret_ref)
    if source is not None:
        keys = [_optional(entry) for entry in keys] + [_optional(_secret("HF_TOKEN", source))]
    # In the model's own volume, so that files are linked there and not copied.
    cache = [] if platform.local else [_value("HF_HOME", f"{MODEL_PATH}/.hub")]
    environment = [*_common(platform), _value("MILES_CONFIG", config), *cache, *keys]
    return {
        "name": "fetch",
        "image": image,
        "command": ["python", "-m", "pipeline.fetch"],
        "env": environment,
        "resources": {} if platform.local else COMPANION,
        "volumeMounts": [_mount("config"), _mount("model", writable=True), _mount("tmp", "fetch")],
    }


def vllm(job: RLJob, platform: Platform, image: str) -> Dict:
    """The inference server, reachable from its own pod only: its endpoints can replace the policy."""
    rollout = job.spec.rollout
    on_gpu = platform.rollout_gpus(rollout) > 0
    arguments = [
        *("--model", policy_model(job.spec.model, platform)["path"]),
        *(["--trust-remote-code"] if job.spec.model.trust_remote_code else []),
        *("--served-model-name", "policy", "--host", LOOPBACK, "--port", "$(MILES_VLLM_PORT)"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--max-model-len", str(rollout.max_model_len), "--seed", str(job.spec.data.seed)),
        *("--dtype", _dtype(job, on_gpu), "--disable-uvicorn-access-log", *ORDERLY_END),
        *("--worker-extension-cls", "pipeline.vllm_worker.PackedHeads"),
    ]
    if not (on_gpu if rollout.compile is None else rollout.compile):
        arguments.append("--enforce-eager")
    if not on_gpu:  # with its 128 tokens the samples of a group would share no block of a shorter prompt
        arguments += ["--block-size", "32"]
    if rollout.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(rollout.tensor_parallel_size)]
    if on_gpu and _shares_gpus(job, platform):
        arguments += ["--gpu-memory-utilization", str(SHARED_GPU_FRACTION)]
    environment = [
        *_server_environment(platform),
        _value("VLLM_SERVER_DEV_MODE", "1"),
        *([] if on_gpu else _cpu_environment(job, platform)),
    ]
    if job.spec.trainer.lora is not None and adapters_are_hot(job, platform):
        arguments += ["--enable-lora", "--max-lora-rank", str(job.spec.trainer.lora.rank)]
        environment.append(_value("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"))
    return {
        "name": "vllm",
        "image": image,
        "command": ["python", "-m", "pipeline.vllm_server"],
        "args": arguments,
        "env": environment,
        "resources": _resources(rollout.resources, platform, platform.rollout_gpus(rollout)),
        # The worker is told to stop at the same time and needs the server until it has handed back its work.
        "lifecycle": {"preStop": {"sleep": {"seconds": 15}}},
        "volumeMounts": [_mount("model"), _mount("policies"), _mount("tmp", "vllm"), _mount("shm")],
    }


def worker(job: RLJob, platform: Platform, image: str) -> Dict:
    """The rollout worker. It answers the kubelet for the whole pod: ready once vLLM holds a policy."""
    environment = [
        *_common(platform),
        _value("MILES_CONFIG", f"{CONFIG_FOLDER}/run.json"),
        _field("MILES_INSTANCE", "metadata.name"),
        _value("MILES_STATUS_PORT", str(STATUS_PORT)),
        _value("MILES_VLLM_PORT", str(VLLM_PORT)),
        _value("VLLM_URL", f"http://{LOOPBACK}:$(MILES_VLLM_PORT)"),
        _value("MILES_SCRATCH", POLICIES_PATH),
        _value("HF_HUB_OFFLINE", "1"),
        *_credentials(job.spec.store.secret_ref),
    ]
    files = [mount for volume, mount in user_files(job, platform)]
    return {
        "name": "worker",
        "image": image,
        "command": ["python", "-m", "pipeline.rollout"],
        "env": environment,
        "ports": [{"name": "status", "containerPort": STATUS_PORT}],
        "startupProbe": _probe("/healthz", "status") | STARTUP,
        "readinessProbe": _probe("/readyz", "status") | {"periodSeconds": 10, "failureThreshold": 3},
        "resources": {} if platform.local else COMPANION,
        "volumeMounts": [_mount("config"), _mount("model"), _mount("policies"), _mount("tmp", "worker"), *files],
    }


def trainer(job: RLJob, platform: Platform, image: str, rendezvous: str, master: str) -> Dict:
    """One node of the trainer; torchrun reads the PET_ variables. `rendezvous` names the attempt."""
    spec = job.spec.trainer
    environment = [
        *_common(platform),
        _value("MILES_CONFIG", f"{CONFIG_FOLDER}/run.json"),
        _field("MILES_INSTANCE", "metadata.name"),
        _value("MILES_STATUS_PORT", str(STATUS_PORT)),
        _value("PET_NNODES", str(spec.nodes)),
        _value("PET_NPROC_PER_NODE", str(processes(job, platform))),
        _field("PET_NODE_RANK", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
        _value("PET_MASTER_ADDR", master),
        _value("PET_MASTER_PORT", str(MASTER_PORT)),
        _value("PET_RDZV_ID", rendezvous),
        _value("PET_MAX_RESTARTS", "0"),
        _value("HF_HUB_OFFLINE", "1"),
        *([] if platform.local else [_token(job)]),
        *([] if platform.trainer_gpus(spec) else [_value("OMP_NUM_THREADS", str(_trainer_threads(job, platform)))]),
        *_credentials(job.spec.store.secret_ref),
    ]
    return {
        "name": "trainer",
        "image": image,
        "command": ["python", "-m", "pipeline.launch"],
        "env": environment,
        "ports": [
            {"name": "status", "containerPort": STATUS_PORT},
            {"name": "rendezvous", "containerPort": MASTER_PORT},
        ],
        "resources": _resources(spec.resources, platform, platform.trainer_gpus(spec)),
        "volumeMounts": [_mount("config"), _mount("model"), _mount("tmp", "trainer"), _mount("shm")],
    }


def reward_model(reward: Reward, platform: Platform, image: str) -> Dict:
    """The server of a reward model; it scores and offers nothing else."""
    assert reward.model is not None
    on_gpu = platform.model_gpus(reward.model.resources) > 0
    path = model(reward.model.uri, f"spec.rewards.{reward.name}.model.uri", platform)["path"]
    arguments = [
        *("--model", path, "--served-model-name", "reward", "--runner", "pooling", "--convert", "classify"),
        *("--host", LOOPBACK if platform.local else "0.0.0.0", "--port", "$(MILES_VLLM_PORT)"),
        *("--dtype", "bfloat16" if on_gpu else "float32", "--disable-uvicorn-access-log", *ORDERLY_END),
        *([] if on_gpu else ["--enforce-eager"]),
    ]
    return {
        "name": "vllm",
        "image": image,
        "command": ["python", "-m", "pipeline.vllm_server"],
        "args": arguments,
        "env": [*_server_environment(platform), *([] if on_gpu else [CPU_CACHE])],
        "ports": [{"name": "http", "containerPort": REWARD_PORT}],
        "startupProbe": _probe("/health", "http") | STARTUP,
        "readinessProbe": _probe("/health", "http") | {"periodSeconds": 10, "failureThreshold": 3},
        "resources": _resources(reward.model.resources, platform, platform.model_gpus(reward.model.resources)),
        "volumeMounts": [_mount("model"), _mount("tmp", "vllm"), _mount("shm")],
    }


def finished(container: Dict, extra: list[EnvironmentVariable]) -> Dict:
    """The container with the user's variables in place of equally named ones, and without privileges. Where it gives no
    reason for its end, the last lines of its log are the reason."""
    own = {entry.name: _user_variable(entry) for entry in extra}
    environment = [entry for entry in container["env"] if entry["name"] not in own]
    return container | {
        "env": [*environment, *own.values()],
        "securityContext": RESTRICTED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def volumes(containers: Iterable[Dict], config_map: str) -> list[Dict]:
    """The pod's own volumes that `containers` mount; those of the user's files come on top."""
    sources: dict[str, Dict] = {
        "config": {"configMap": {"name": config_map}},
        "model": {"emptyDir": {}},
        "policies": {"emptyDir": {}},
        "tmp": {"emptyDir": {}},
        "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
    }
    mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
    return [{"name": name, **source} for name, source in sources.items() if name in mounted]


MOUNTS = {
    "config": CONFIG_FOLDER,
    "model": MODEL_PATH,
    "policies": POLICIES_PATH,
    "tmp": "/tmp",
    "shm": "/dev/shm",
}


def _mount(volume: str, part: str | None = None, writable: bool | None = None) -> Dict:
    read_only = volume in ("config", "model") if writable is None else not writable
    mount: Dict = {"name": volume, "mountPath": MOUNTS[volume]}
    if part is not None:
        mount["subPath"] = part
    return mount | ({"readOnly": True} if read_only else {})


def user_files(job: RLJob, platform: Platform) -> list[tuple[Dict, Dict]]:
    """(volume, mount) of each ConfigMap that holds a reward function or the environment; `miles run` reads the files
    where they lie."""
    if platform.local:
        return []
    sources = {f"reward-{reward.name}": (reward.from_, f"{REWARDS_PATH}/{reward.name}") for reward in job.spec.rewards}
    if job.spec.environment is not None:
        sources["environment"] = (job.spec.environment.from_, ENVIRONMENT_PATH)
    return [
        (
            {"name": name, "configMap": {"name": source.config_map}},
            {"name": name, "mountPath": path, "readOnly": True},
        )
        for name, (source, path) in sources.items()
        if source is not None
    ]


def adapters_are_hot(job: RLJob, platform: Platform) -> bool:
    loading = job.spec.rollout.adapter_loading
    return loading == "hot" if loading else platform.rollout_gpus(job.spec.rollout) > 0


def _dtype(job: RLJob, on_gpu: bool) -> str:
    dtype = job.spec.trainer.dtype
    return {True: "bfloat16", False: "float32"}[on_gpu] if dtype == "auto" else dtype


def _shares_gpus(job: RLJob, platform: Platform) -> bool:
    spec = job.spec
    wanted = spec.workers * platform.rollout_gpus(spec.rollout) + platform.trainer_gpus(spec.trainer)
    return platform.local and wanted > platform.gpus


def cpu_cache(job: RLJob) -> str:
    """GiB of keys and values of a server on a CPU."""
    own = {entry.name: entry.value for entry in job.spec.rollout.template.env}
    return own.get(CPU_CACHE["name"]) or str(CPU_CACHE["value"])


def _server_environment(platform: Platform) -> list[Dict]:
    return [
        *_common(platform),
        _value("MILES_VLLM_PORT", str(VLLM_PORT)),
        _value("HF_HUB_OFFLINE", "1"),
        _value("VLLM_NO_USAGE_STATS", "1"),
    ]


def _cpu_environment(job: RLJob, platform: Platform) -> list[Dict]:
    """vLLM on a CPU would bind its threads to all cores of the node but one, whatever the pod's share."""
    environment = [CPU_CACHE]
    cores = platform.cpus // max(1, job.spec.rollout.replicas) if platform.local else cpus(job.spec.rollout.resources)
    if platform.local or cores:
        threads = str(max(1, cores))
        environment += [_value("VLLM_CPU_OMP_THREADS_BIND", "nobind"), _value("OMP_NUM_THREADS", threads)]
    return environment


def _trainer_threads(job: RLJob, platform: Platform) -> int:
    """On one machine half of the cores are left to vLLM, if there is any: a rank whose threads wait for busy cores is
    many times slower than one with fewer threads."""
    spec = job.spec.trainer
    share = 2 if job.spec.workers else 1
    ranks = processes(job, platform) * (share * spec.nodes if platform.local else 1)
    cores = platform.cpus if platform.local else cpus(spec.resources)
    return max(1, cores // ranks)


def _resources(resources: Resources, platform: Platform, wanted_gpus: int) -> Dict:
    if platform.local:
        return {"limits": {GPU: str(wanted_gpus)}} if wanted_gpus else {}
    given = {"requests": _quantities(resources.requests), "limits": _quantities(resources.limits)}
    return {kind: quantities for kind, quantities in given.items() if quantities}


def _quantities(given: dict[str, int | str]) -> dict[str, str]:
    return {name: str(quantity) for name, quantity in given.items()}


def _common(platform: Platform) -> list[Dict]:
    """The root file system is read-only and the user has no home: caches go to /tmp. At home, home stays home."""
    home = [] if platform.local else [_value("HOME", "/tmp")]
    return [*home, _value("PYTHONUNBUFFERED", "1"), _value("HF_HUB_DISABLE_TELEMETRY", "1")]


def _credentials(secret: SecretReference | None) -> list[Dict]:
    if secret is None:
        return []
    return [
        _secret("AWS_ACCESS_KEY_ID", secret),
        _secret("AWS_SECRET_ACCESS_KEY", secret),
        _optional(_secret("AWS_SESSION_TOKEN", secret)),
    ]


def _secret(name: str, secret: SecretReference) -> Dict:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": name}}}


def _token(job: RLJob) -> Dict:
    """Whose requests to checkpoint and stop the trainer obeys. Without the Secret it starts all the same."""
    key = {"name": token_name(job), "key": "token"}
    return _optional({"name": "MILES_STATUS_TOKEN", "valueFrom": {"secretKeyRef": key}})


def _optional(entry: Dict) -> Dict:
    return {
        "name": entry["name"],
        "valueFrom": {"secretKeyRef": entry["valueFrom"]["secretKeyRef"] | {"optional": True}},
    }


def _user_variable(entry: EnvironmentVariable) -> Dict:
    if entry.value_from is None:
        return _value(entry.name, entry.value or "")
    key = entry.value_from.secret_key_ref
    return {"name": entry.name, "valueFrom": {"secretKeyRef": {"name": key.name, "key": key.key}}}


def _value(name: str, value: str) -> Dict:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> Dict:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _probe(path: str, port: str) -> Dict:
    return {"httpGet": {"path": path, "port": port}, "timeoutSeconds": 5}
