"""operators.placement: Kubernetes dicts → processes, value by value; and the real children all have their place."""

import itertools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from operators.children import children
from operators.placement import Placement, plan
from operators.probes import Probe
from operators.processes import ProcessSpec
from operators.resolve import Platform
from operators.rewriting import expand
from operators.spec import RLJob

RUN = "/runs/r"
Dict = dict[str, Any]


def wanted_port(pod: str, wanted: int) -> int:
    return wanted


def moved_ports() -> Callable[[str, int], int]:
    """Every port one further than the last, from 9000."""
    numbers = itertools.count(9000)
    return lambda pod, wanted: next(numbers)


def container(name: str = "main", **fields: Any) -> Dict:
    return {"name": name, "command": ["program"]} | fields


def deployment(*containers: Dict, name: str = "j-rollout", replicas: int = 1, **pod: Any) -> Dict:
    labels = {"miles.dev/job-name": "j", "app.kubernetes.io/component": name.removeprefix("j-")}
    template = {"metadata": {"labels": labels}, "spec": {"containers": list(containers)} | pod}
    spec = {"replicas": replicas, "template": template}
    return {"kind": "Deployment", "metadata": {"name": name, "namespace": "ns"}, "spec": spec}


def indexed_job(*containers: Dict, completions: int = 1, **pod: Any) -> Dict:
    child = deployment(*containers, name="j-trainer", **pod)
    spec = {"completions": completions, "template": child["spec"]["template"]}
    return {"kind": "Job", "metadata": {"name": "j-trainer-0", "namespace": "ns"}, "spec": spec}


def service(name: str, component: str, port: int, target: int | str) -> Dict:
    selector = {"app.kubernetes.io/component": component}
    ports = [{"port": port, "targetPort": target}]
    return {
        "kind": "Service",
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"selector": selector, "ports": ports},
    }


def place(*found: Dict, **arguments: Any) -> Placement:
    arguments = {"ports": wanted_port, "environment": {"PATH": "/bin"}} | arguments
    return plan(list(found), RUN, **arguments)


def only(placement: Placement) -> ProcessSpec:
    ((process,),) = (pod.containers for pod in placement.pods)
    return process


def variable(name: str, value: str) -> Dict:
    return {"name": name, "value": value}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)$(B)y", "x12y"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$A ${A}", "$A ${A}"),
        ("$(id; rm -rf /)", "$(id; rm -rf /)"),
    ],
)
def test_references_expand_as_in_kubernetes(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expected


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (variable("V", "plain"), "plain"),
        (variable("V", "$(BEFORE)/x"), "b/x"),
        ({"name": "V", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, "rollout-0"),
        ({"name": "V", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}, "ns"),
        ({"name": "V", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}, "127.0.0.1"),
        ({"name": "V", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['miles.dev/job-name']"}}}, "j"),
        ({"name": "V", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}, "secret"),
        ({"name": "W", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}, None),
        (variable("V", "http://j-reward.ns.svc.cluster.local:80/score"), "http://127.0.0.1:8000/score"),
        (variable("V", "http://j-reward:80"), "http://127.0.0.1:8000"),
        (variable("V", "j-trainer-0-0.j-reward"), "127.0.0.1"),
        (variable("V", "j-reward"), "j-reward"),
        (variable("V", "http://j-reward-other:80"), "http://j-reward-other:80"),
        (variable("V", "/data/model/x"), f"{RUN}/volumes/rollout-0/model/x"),
        (variable("V", "--model=/data/model"), f"--model={RUN}/volumes/rollout-0/model"),
        (variable("V", "/data/modelled"), "/data/modelled"),
        (variable("V", "/mnt/data/model"), "/mnt/data/model"),
        (variable("V", "/dev/shm"), "/scratch/rollout-0"),
        (variable("V", "/tmp/mine"), "/tmp/mine"),
    ],
)
def test_a_variable_means_here_what_it_means_in_a_pod(entry: Dict, expected: str | None) -> None:
    mounts = [{"name": "model", "mountPath": "/data/model"}, {"name": "tmp", "mountPath": "/tmp"}]
    main = container(env=[variable("BEFORE", "b"), entry], volumeMounts=mounts)
    reward = deployment(container(ports=[{"name": "http", "containerPort": 8000}]), name="j-reward")
    found = place(
        deployment(main, volumes=[{"name": "model", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]),
        reward,
        service("j-reward", "reward", 80, "http"),
        environment={"V": "secret"},
        scratch="/scratch",
    )
    assert found.pods[0].containers[0].environment.get(entry["name"]) == expected


def test_only_the_caller_s_harmless_variables_are_inherited() -> None:
    caller = {
        "PATH": "/bin",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "x",
        "PET_NNODES": "9",
        "MILES_CONFIG": "y",
    }
    environment = only(place(deployment(container()), environment=caller)).environment
    assert environment["PATH"] == "/bin"
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES", "MILES_CONFIG"} & set(environment)


@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        ({"HOME": "/home/u"}, "/home/u/.cache/miles/torchinductor"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/c"}, "/c/miles/torchinductor"),
        ({"HOME": "/home/u", "TORCHINDUCTOR_CACHE_DIR": "/t"}, "/t"),
        ({}, None),
    ],
)
def test_what_pytorch_compiles_outlives_the_run_s_temporary_folder(
    caller: dict[str, str], expected: str | None
) -> None:
    environment = only(place(deployment(container()), environment=caller, scratch="/scratch")).environment
    assert environment["TMPDIR"] == "/scratch/rollout-0"
    assert environment.get("TORCHINDUCTOR_CACHE_DIR") == expected


def test_command_arguments_and_python_are_those_of_this_machine() -> None:
    main = container(command=["python", "-m", "x"], args=["--port", "$(X_PORT)"], env=[variable("X_PORT", "8000")])
    assert only(place(deployment(main))).command == (sys.executable, "-m", "x", "--port", "8000")


def test_a_user_s_text_stays_one_argument() -> None:
    main = container(args=["m; touch /tmp/pwn", "$(id)", "a\nb"])
    assert only(place(deployment(main))).command == ("program", "m; touch /tmp/pwn", "$(id)", "a\nb")


def test_ports_move_in_variables_urls_and_probes_alike() -> None:
    worker = container(
        "worker",
        env=[
            variable("STATUS_PORT", "8001"),
            variable("VLLM_PORT", "8000"),
            variable("URL", "http://127.0.0.1:$(VLLM_PORT)"),
            variable("OTHER", "http://127.0.0.1:8001/status"),
            variable("COUNT", "8000"),
        ],
        ports=[{"name": "status", "containerPort": 8001}],
        readinessProbe={"httpGet": {"path": "/readyz", "port": "status"}, "timeoutSeconds": 5},
        livenessProbe={"tcpSocket": {"port": 8001}, "periodSeconds": 3, "failureThreshold": 7},
        startupProbe={"exec": {"command": ["python", "check.py"]}},
    )
    first, second = place(deployment(worker, replicas=2), ports=moved_ports()).pods
    (process,) = first.containers
    assert process.environment["STATUS_PORT"] == "9001"
    assert process.environment["URL"] == "http://127.0.0.1:9000"
    assert process.environment["OTHER"] == "http://127.0.0.1:9001/status"
    assert process.environment["COUNT"] == "8000"
    assert process.readiness == Probe(port=9001, path="/readyz", timeout_s=5)
    assert process.liveness == Probe(port=9001, period_s=3, failure_threshold=7)
    assert process.startup == Probe(command=(sys.executable, "check.py"))
    assert second.containers[0].environment["STATUS_PORT"] == "9003"


def test_ports_that_move_onto_each_other_move_once() -> None:
    variables = [variable("A_PORT", "8000"), variable("B_PORT", "8001"), variable("URL", "http://127.0.0.1:$(A_PORT)")]
    process = only(place(deployment(container(env=variables)), ports=lambda pod, wanted: wanted + 1))
    assert [process.environment[name] for name in ("A_PORT", "B_PORT", "URL")] == [
        "8001",
        "8002",
        "http://127.0.0.1:8001",
    ]


def test_the_pods_of_a_job_meet_at_one_port_and_know_their_index() -> None:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    agent = container(
        env=[
            variable("PET_MASTER_PORT", "29500"),
            variable("PET_MASTER_ADDR", "j-trainer-0-0.j-trainer.ns.svc"),
            {"name": "PET_NODE_RANK", "valueFrom": index},
        ]
    )
    placed = place(
        indexed_job(agent, completions=3), service("j-trainer", "trainer", 29500, 29500), ports=moved_ports()
    )
    assert [pod.name for pod in placed.pods] == ["trainer-0", "trainer-1", "trainer-2"]
    assert not any(pod.restart for pod in placed.pods)
    agents = [pod.containers[0].environment for pod in placed.pods]
    assert [agent["PET_NODE_RANK"] for agent in agents] == ["0", "1", "2"]
    assert {(agent["PET_MASTER_ADDR"], agent["PET_MASTER_PORT"]) for agent in agents} == {("127.0.0.1", "9000")}


def test_init_containers_that_do_the_same_are_one_and_share_what_they_fill() -> None:
    mount = [{"name": "model", "mountPath": "/model"}]
    fetch = container("fetch", env=[{"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}])
    fetch["volumeMounts"] = mount
    pod: Dict = {"initContainers": [fetch], "volumes": [{"name": "model", "emptyDir": {}}]}
    main = container(args=["/model"], volumeMounts=mount)
    other = pod | {"initContainers": [fetch | {"args": ["another"]}]}
    same = place(deployment(main, replicas=2, **pod), indexed_job(main, **pod))
    assert {init.name for found in same.pods for init in found.init} == {"fetch"}
    assert {found.containers[0].command[1] for found in same.pods} == {f"{RUN}/volumes/fetch/model"}
    different = place(deployment(main, **pod), indexed_job(main, **other))
    assert [found.init[0].name for found in different.pods] == ["rollout-0-fetch", "trainer-0-fetch"]
    assert len({found.containers[0].command[1] for found in different.pods}) == 2


def test_config_maps_are_written_for_each_pod_with_its_own_paths_and_ports() -> None:
    text = json.dumps({"path": "/model", "url": "http://127.0.0.1:8000", "nested": [{"path": "/model/x"}], "n": 1})
    config = {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"run.json": text, "code.py": 'open("/model")'}}
    volumes = [{"name": "config", "configMap": {"name": "c"}}, {"name": "model", "emptyDir": {}}]
    mounts = [{"name": "config", "mountPath": "/etc/miles"}, {"name": "model", "mountPath": "/model"}]
    main = container(
        env=[variable("CONFIG", "/etc/miles/run.json")], volumeMounts=mounts, ports=[{"containerPort": 8000}]
    )
    placed = place(config, deployment(main, volumes=volumes, replicas=2), ports=moved_ports())
    path = placed.pods[1].containers[0].environment["CONFIG"]
    assert path == f"{RUN}/volumes/rollout-1/config/run.json"
    folder = f"{RUN}/volumes/rollout-1/model"
    assert json.loads(placed.files[path]) == {
        "path": folder,
        "url": "http://127.0.0.1:8000",  # a reward endpoint of the user's own
        "nested": [{"path": f"{folder}/x"}],
        "n": 1,
    }
    assert placed.files[f"{RUN}/volumes/rollout-1/config/code.py"] == 'open("/model")'
    assert set(placed.folders) >= {folder, f"{RUN}/volumes/rollout-1/config"}


def test_missing_secrets_are_named_all_at_once() -> None:
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": "team", "key": name}}}
        for name in ("KEY", "SECRET", "SET")
    ]
    with pytest.raises(
        ValueError, match=r"KEY \(from secret team\), SECRET \(from secret team\); export them"
    ) as caught:
        place(deployment(container(env=secrets)), environment={"SET": "x"})
    assert "SET (" not in str(caught.value)


@pytest.mark.parametrize(
    ("child", "message"),
    [
        (deployment({"name": "main"}), "rollout-0: container main has no command"),
        (deployment(container(envFrom=[{"secretRef": {"name": "s"}}])), "no counterpart of envFrom"),
        (deployment(container(), volumes=[{"name": "v", "hostPath": {}}]), "no counterpart of hostPath"),
        (deployment(container(env=[{"name": "V", "valueFrom": {"resourceFieldRef": {}}}])), "of resourceFieldRef"),
        (deployment(container(), volumes=[{"name": "v", "configMap": {"name": "c"}}]), "ConfigMap c is not known"),
    ],
)
def test_what_has_no_counterpart_is_refused(child: Dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(child)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((), [None, None, None]),
        (("0", "1", "2", "3"), ["0", "1", "2,3"]),
        (("4", "5"), ["4", "5", "4,5"]),
        (("0",), ["0", "0", "0"]),
    ],
)
def test_gpus_are_distinct_as_long_as_they_last(gpus: tuple[str, ...], expected: list[str | None]) -> None:
    def with_gpus(count: int) -> Dict:
        return container(resources={"limits": {"nvidia.com/gpu": count}})

    placed = place(deployment(with_gpus(1), replicas=2), indexed_job(with_gpus(2)), gpus=gpus)
    assert [pod.containers[0].environment.get("CUDA_VISIBLE_DEVICES") for pod in placed.pods] == expected


def test_a_pod_without_gpus_sees_none_where_there_are_some() -> None:
    assert only(place(deployment(container()), gpus=("0",))).environment["CUDA_VISIBLE_DEVICES"] == ""


def test_grace_and_pre_stop_are_kept() -> None:
    slow = container("vllm", lifecycle={"preStop": {"sleep": {"seconds": 15}}})
    process = only(place(deployment(slow, terminationGracePeriodSeconds=60)))
    assert (process.grace_s, process.stop_delay_s, process.name) == (60.0, 15.0, "rollout-0")


def test_the_real_children_have_their_place(tmp_path: pathlib.Path) -> None:
    job = RLJob.model_validate(
        {
            "apiVersion": "miles.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "full"},
            "spec": {
                "model": {"uri": "hf://org/model"},
                "data": {"sets": [{"generator": "reasoning-gym/chain_sum"}]},
                "rewards": [
                    {"name": "mine", "function": "rewards.py:score", "from": {"configMap": "rewards"}},
                    {"name": "helpful", "model": {"uri": "s3://models/rm"}},
                ],
                "algorithm": {"type": "grpo", "totalSteps": 3},
                "rollout": {"replicas": 2},
                "trainer": {"nodes": 2, "lora": {}},
                "store": {"uri": "s3://bucket/prefix", "secretRef": {"name": "team"}},
            },
        }
    )
    platform = Platform(local=True, cpus=2, folder=str(tmp_path))
    caller = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "MILES_STATUS_TOKEN": "t"}
    placed = place(*children(job, run_id="r1", platform=platform), environment=caller, ports=moved_ports())
    names = [pod.name for pod in placed.pods]
    assert names == ["reward-helpful-0", "rollout-0", "rollout-1", "trainer-0", "trainer-1"]
    pods = dict(zip(names, placed.pods, strict=True))
    vllm, worker = pods["rollout-1"].containers
    port = vllm.command[vllm.command.index("--port") + 1]
    assert worker.environment["VLLM_URL"] == f"http://127.0.0.1:{port}"
    assert worker.environment["MILES_INSTANCE"] == "rollout-1"
    assert worker.environment["AWS_ACCESS_KEY_ID"] == "a"
    (agent,) = pods["trainer-1"].containers
    assert agent.environment["PET_NODE_RANK"] == "1"
    assert agent.environment["PET_MASTER_ADDR"] == "127.0.0.1"
    assert agent.environment["MILES_STATUS_TOKEN"] == "t"
    config = json.loads(placed.files[agent.environment["MILES_CONFIG"]])
    assert config["model"]["path"] == vllm.command[vllm.command.index("--model") + 1]
    (reward,) = pods["reward-helpful-0"].containers
    assert f":{reward.command[reward.command.index('--port') + 1]}" in config["rewards"][1]["model"]
    assert config["rewards"][1]["model"].startswith("http://127.0.0.1:")
    assert config["rewards"][0]["folder"] == str(tmp_path)
    everything = json.dumps([[pod.init, pod.containers] for pod in placed.pods], default=vars)
    assert "/var/lib/miles" not in everything.replace(RUN, "")
    assert "/etc/miles" not in everything
