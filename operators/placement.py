"""Where the children of a run go on one machine: Kubernetes dicts → processes. Pure; operators.local carries it out.

The command, arguments, environment and probes stay those of the cluster. What a cluster would provide is replaced:
volumes become folders below the run's folder, Service names 127.0.0.1, secrets the caller's environment, and a
port that is taken another one. Anything in a child that has no counterpart here is refused with a ValueError.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from operators.probes import Probe
from operators.processes import PodSpec, ProcessSpec
from operators.rewriting import LOOPBACK, Rewrite, expand

GPU = "nvidia.com/gpu"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
JOB_NAME_LABEL = "miles.dev/job-name"
TOKEN_VARIABLE = "MILES_STATUS_TOKEN"
"""Whoever holds it may pause the trainer; `miles run` makes one up for each run."""
COMPONENT_LABEL = "app.kubernetes.io/component"
MACHINE_MOUNTS = ("/tmp", "/dev/shm")
"""Mounts that every machine has already, and that paths of the user may lie in. Instead of a volume, TMPDIR and
variables with that very value name a folder of the pod."""
COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where PyTorch keeps what it has compiled: in TMPDIR, it would compile for each run anew (vLLM on a CPU: most of a
minute, eager or not)."""
FOREIGN = re.compile(r"PET_|MASTER_|MILES_|RANK$|WORLD_SIZE$|LOCAL_RANK$")
"""Variables of the caller that no child inherits: they would steer torchrun or the data plane."""

Dict = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Placement:
    pods: tuple[PodSpec, ...]
    folders: tuple[str, ...]
    """To be made before the start."""
    files: dict[str, str]
    """Path → text: the mounted ConfigMaps."""
    ports: dict[str, dict[int, int]]
    """Pod → container port → the port it has here."""


@dataclasses.dataclass
class Pod:
    """One pod to be: its template, and what this machine gives it."""

    name: str
    index: int
    owner: Dict  # the Deployment or Job
    ports: dict[int, int] = dataclasses.field(default_factory=dict)
    volumes: dict[str, str] = dataclasses.field(default_factory=dict)  # volume name → folder
    gpus: tuple[str, ...] = ()

    @property
    def spec(self) -> Dict:
        template: Dict = self.owner["spec"]["template"]["spec"]
        return template

    @property
    def labels(self) -> Dict:
        labels: Dict = self.owner["spec"]["template"]["metadata"].get("labels", {})
        return labels

    @property
    def is_job(self) -> bool:
        return bool(self.owner["kind"] == "Job")

    def containers(self) -> list[Dict]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def plan(
    children: Sequence[Dict],
    run_folder: str,
    ports: Callable[[str, int], int],
    environment: Mapping[str, str],
    gpus: Sequence[str] = (),
    folder: str = ".",
    scratch: str = "/tmp",
) -> Placement:
    """The processes that stand for `children`.

    ports: gives the port to use for a wanted one of a pod; for each of them another one. environment: the caller's,
    from which secrets are taken by name. gpus: ids of this machine's. folder: working directory of every process.
    scratch: short path of a folder for what need not outlive the run, in place of /tmp and /dev/shm.
    Raises ValueError naming every secret that is not set, or a feature of a child that has no counterpart here.
    """
    pods = [pod for child in children if child["kind"] in ("Deployment", "Job") for pod in replicas(child)]
    config_maps = {child["metadata"]["name"]: child for child in children if child["kind"] == "ConfigMap"}
    services = [child for child in children if child["kind"] == "Service"]
    inits = name_inits(pods)
    assign_ports(pods, ports)
    assign_gpus(pods, gpus)
    for pod in pods:
        assign_volumes(pod, run_folder, inits)
    require_secrets(pods, environment)
    reachable = [(service, service_ports(service, pods)) for service in services]
    rewrites = {pod.name: Rewrite(mounted_paths(pod), pod.ports, reachable) for pod in pods}
    builders = [Builder(pod, run_folder, environment, gpus, rewrites[pod.name], inits, folder, scratch) for pod in pods]
    files = [mounted_files(pod, config_maps, rewrites[pod.name]) for pod in pods]
    return Placement(
        pods=tuple(builder.pod_spec() for builder in builders),
        folders=tuple(sorted({volume for pod in pods for volume in (*pod.volumes.values(), f"{scratch}/{pod.name}")})),
        files={path: text for mounted in files for path, text in mounted.items()},
        ports={pod.name: pod.ports for pod in pods},
    )


def replicas(child: Dict) -> list[Pod]:
    """rollout-0, rollout-1, … for a Deployment, trainer-0, … for an Indexed Job whatever its attempt."""
    labels = child["spec"]["template"]["metadata"].get("labels", {})
    if child["kind"] == "Job":
        base, count = labels.get(COMPONENT_LABEL, child["metadata"]["name"]), child["spec"].get("completions", 1)
    else:
        base = child["metadata"]["name"].removeprefix(labels.get(JOB_NAME_LABEL, "") + "-")
        count = child["spec"].get("replicas", 1)
    return [Pod(f"{base}-{index}", index, child) for index in range(count)]


def init_identity(container: Dict) -> str:
    """Equal for init containers that do the same work, whichever pod they stand in."""
    environment = [entry for entry in container.get("env", []) if "fieldRef" not in entry.get("valueFrom", {})]
    return json.dumps([container.get("command"), container.get("args"), environment], sort_keys=True)


def name_inits(pods: list[Pod]) -> dict[str, str]:
    """Identity of an init container → the name under which it runs, once for all pods that have it."""
    first: dict[str, tuple[str, str]] = {}  # identity → (pod, container)
    for pod in pods:
        for container in pod.spec.get("initContainers", []):
            first.setdefault(init_identity(container), (pod.name, container["name"]))
    names = [name for _, name in first.values()]
    return {
        identity: name if names.count(name) == 1 else f"{pod_name}-{name}"
        for identity, (pod_name, name) in first.items()
    }


def assign_ports(pods: list[Pod], ports: Callable[[str, int], int]) -> None:
    """Each pod of a Deployment has ports of its own; the pods of a Job meet at the same ones."""
    jobs: dict[str, dict[int, int]] = {}
    for pod in pods:
        owner = pod.owner["metadata"]["name"]
        if pod.is_job and owner in jobs:
            pod.ports = jobs[owner]
            continue
        pod.ports = jobs[owner] = {wanted: ports(pod.name, wanted) for wanted in sorted(wanted_ports(pod))}


def wanted_ports(pod: Pod) -> set[int]:
    declared = {port["containerPort"] for container in pod.containers() for port in container.get("ports", [])}
    entries = [entry for container in pod.containers() for entry in container.get("env", [])]
    return declared | {int(entry["value"]) for entry in entries if carries_port(entry)}


def carries_port(entry: Dict) -> bool:
    return bool(entry["name"].endswith("PORT") and str(entry.get("value", "")).isdigit())


def gpu_request(pod: Pod) -> int:
    limits = [container.get("resources", {}).get("limits", {}) for container in pod.spec["containers"]]
    return sum(int(limit.get(GPU, 0)) for limit in limits)


def assign_gpus(pods: list[Pod], gpus: Sequence[str]) -> None:
    """Distinct GPUs as long as they last, then shared, beginning with the first again."""
    taken = 0
    for pod in pods:
        wanted = min(gpu_request(pod), len(gpus))
        pod.gpus = tuple(gpus[(taken + number) % len(gpus)] for number in range(wanted))
        taken += wanted


def assign_volumes(pod: Pod, run_folder: str, inits: Mapping[str, str]) -> None:
    """A volume that an init container fills is shared by all pods with that init container, others are the pod's."""
    filled = {}
    for container in reversed(pod.spec.get("initContainers", [])):
        for mount in container.get("volumeMounts", []):
            filled[mount["name"]] = inits[init_identity(container)]
    system = {
        mount["name"]
        for container in pod.containers()
        for mount in container.get("volumeMounts", [])
        if mount["mountPath"] in MACHINE_MOUNTS
    }
    for volume in pod.spec.get("volumes", []):
        if volume["name"] in system:
            continue
        if "emptyDir" in volume:
            place = filled.get(volume["name"], pod.name)
        elif "configMap" in volume:
            place = pod.name
        else:
            kind = next(key for key in volume if key != "name")
            raise ValueError(f"{pod.name}: `miles run` has no counterpart of {kind} (volume {volume['name']})")
        pod.volumes[volume["name"]] = f"{run_folder}/volumes/{place}/{volume['name']}"


def require_secrets(pods: list[Pod], environment: Mapping[str, str]) -> None:
    missing = {}
    for pod in pods:
        for container in pod.containers():
            if container.get("envFrom"):
                raise ValueError(f"{pod.name}: `miles run` has no counterpart of envFrom; name each variable")
            for entry in container.get("env", []):
                secret = entry.get("valueFrom", {}).get("secretKeyRef")
                if secret and not secret.get("optional") and entry["name"] not in environment:
                    missing[entry["name"]] = secret["name"]
    if missing:
        names = ", ".join(f"{name} (from secret {secret})" for name, secret in missing.items())
        raise ValueError(f"not set in the environment: {names}; export them, `miles run` reads no Kubernetes secrets")


def mounted_paths(pod: Pod) -> dict[str, str]:
    """Mount path → folder here."""
    mounts = [mount for container in pod.containers() for mount in container.get("volumeMounts", [])]
    return {m["mountPath"].rstrip("/"): pod.volumes[m["name"]] for m in mounts if m["name"] in pod.volumes}


def service_ports(service: Dict, pods: list[Pod]) -> dict[int, int]:
    """Port of the Service → the port here of the first pod that it selects."""
    selector = service["spec"].get("selector", {})
    pod = next((pod for pod in pods if selector and selector.items() <= pod.labels.items()), None)
    if pod is None:
        return {}
    numbers = {port.get("name"): port["containerPort"] for c in pod.containers() for port in c.get("ports", [])}
    targets = {port["port"]: port.get("targetPort", port["port"]) for port in service["spec"].get("ports", [])}
    targets = {port: numbers.get(target, target) for port, target in targets.items()}
    return {port: pod.ports.get(number, number) for port, number in targets.items()}


def mounted_files(pod: Pod, config_maps: Mapping[str, Dict], rewrite: Rewrite) -> dict[str, str]:
    files = {}
    for volume in pod.spec.get("volumes", []):
        if "configMap" not in volume:
            continue
        name = volume["configMap"]["name"]
        if name not in config_maps:
            raise ValueError(f"ConfigMap {name} is not known here; add it to the job's file as a further document")
        for key, text in config_maps[name].get("data", {}).items():
            files[f"{pod.volumes[volume['name']]}/{key}"] = rewrite.document(text) if key.endswith(".json") else text
    return files


@dataclasses.dataclass
class Builder:
    """Makes the PodSpec of one pod."""

    pod: Pod
    run_folder: str
    caller: Mapping[str, str]  # environment
    gpus: Sequence[str]  # of the machine
    rewrite: Rewrite
    inits: Mapping[str, str]
    folder: str
    scratch: str

    def pod_spec(self) -> PodSpec:
        containers = self.pod.spec["containers"]
        inits = self.pod.spec.get("initContainers", [])
        single = len(containers) == 1
        return PodSpec(
            name=self.pod.name,
            component=self.pod.labels.get(COMPONENT_LABEL, self.pod.name),
            init=tuple(self.process(c, self.inits[init_identity(c)], one_off=True) for c in inits),
            containers=tuple(
                self.process(c, self.pod.name if single else f"{self.pod.name}-{c['name']}") for c in containers
            ),
            restart=not self.pod.is_job,
        )

    def process(self, container: Dict, name: str, one_off: bool = False) -> ProcessSpec:
        if not container.get("command"):
            raise ValueError(f"{self.pod.name}: container {container['name']} has no command of its own")
        given = self.given_environment(container)
        inherited = {key: value for key, value in self.caller.items() if not FOREIGN.match(key)}
        probes = {kind: self.probe(container.get(f"{kind}Probe"), container) for kind in PROBES}
        termination_message = f"{self.run_folder}/termination/{name}"
        return ProcessSpec(
            name=name,
            command=self.command([*container["command"], *container.get("args", [])], given),
            environment=inherited | given | self.local_environment() | {"MILES_TERMINATION_LOG": termination_message},
            folder=self.folder,
            log=f"{self.run_folder}/logs/{name}.log",
            termination_message=termination_message,
            grace_s=float(self.pod.spec.get("terminationGracePeriodSeconds", 30)),
            one_off=one_off,
            stop_delay_s=float(container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)),
            **probes,
        )

    def local_environment(self) -> dict[str, str]:
        local = {"MILES_RUN_DIR": self.run_folder, "MILES_STATUS_HOST": LOOPBACK}
        local["TMPDIR"] = f"{self.scratch}/{self.pod.name}"
        if home := self.caller.get("HOME"):
            caches = self.caller.get("XDG_CACHE_HOME") or f"{home}/.cache"
            local[COMPILED_VARIABLE] = self.caller.get(COMPILED_VARIABLE) or f"{caches}/miles/torchinductor"
        if self.gpus:
            local["CUDA_VISIBLE_DEVICES"] = ",".join(self.pod.gpus)
        if TOKEN_VARIABLE in self.caller:
            local[TOKEN_VARIABLE] = self.caller[TOKEN_VARIABLE]
        return local

    def given_environment(self, container: Dict) -> dict[str, str]:
        """The container's own variables, each expanded by those before it."""
        given: dict[str, str] = {}
        for entry in container.get("env", []):
            value = self.value(entry)
            if value is not None:
                value = f"{self.scratch}/{self.pod.name}" if value in MACHINE_MOUNTS else value
                given[entry["name"]] = expand(self.rewrite.text(value), given)
        return given

    def value(self, entry: Dict) -> str | None:
        """None: an optional secret that the caller has not set."""
        source = entry.get("valueFrom")
        if source is None:
            value = entry.get("value", "")
            return str(self.pod.ports.get(int(value), value)) if carries_port(entry) else value
        if "secretKeyRef" in source:
            return self.caller.get(entry["name"])
        if "fieldRef" in source:
            return self.field(source["fieldRef"]["fieldPath"])
        raise ValueError(f"{self.pod.name}: `miles run` has no counterpart of {next(iter(source))} ({entry['name']})")

    def field(self, path: str) -> str:
        """What the downward API says of this pod."""
        bracket = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        if bracket and bracket[2] == INDEX_ANNOTATION:
            return str(self.pod.index)
        if bracket:
            metadata = self.pod.owner["spec"]["template"]["metadata"]
            return str(metadata.get(bracket[1], {}).get(bracket[2], ""))
        known = {
            "metadata.name": self.pod.name,
            "metadata.namespace": self.pod.owner["metadata"].get("namespace", "default"),
            "status.podIP": LOOPBACK,
            "status.hostIP": LOOPBACK,
        }
        if path not in known:
            raise ValueError(f"{self.pod.name}: `miles run` has no counterpart of field {path}")
        return known[path]

    def command(self, parts: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
        program, *arguments = (expand(self.rewrite.text(part), variables) for part in parts)
        return (sys.executable if program in ("python", "python3") else program, *arguments)

    def probe(self, probe: Dict | None, container: Dict) -> Probe | None:
        if probe is None:
            return None
        given: dict[str, Any] = {name: probe[key] for key, name in PROBE_FIELDS.items() if key in probe}
        timing = Probe(**given)
        if "exec" in probe:
            return dataclasses.replace(timing, command=self.command(probe["exec"]["command"], {}))
        target = probe.get("httpGet") or probe["tcpSocket"]
        named = {port.get("name"): port["containerPort"] for port in container.get("ports", [])}
        number = named.get(target["port"], target["port"])
        path = target.get("path", "/") if "httpGet" in probe else None
        return dataclasses.replace(timing, port=self.pod.ports.get(number, number), path=path)


PROBES = ("startup", "readiness", "liveness")
PROBE_FIELDS = {
    "initialDelaySeconds": "initial_delay_s",
    "periodSeconds": "period_s",
    "timeoutSeconds": "timeout_s",
    "failureThreshold": "failure_threshold",
    "successThreshold": "success_threshold",
}
