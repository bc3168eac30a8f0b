"""The children of a job: what each must have, whatever the job; and what follows from single fields."""

import json
import re

import pytest

from operators import resolve
from operators.children import children
from operators.names import child_name
from operators.resolve import Platform
from operators.spec import RLJob
from pipeline.config import ReplayConfig, RunConfig
from pipeline.rollout import LEAVE_S
from tests.test_spec import EVERYTHING, job

CLUSTER = Platform()
CPU = Platform(local=True, cpus=4, folder="/home/me/jobs")
ONE_GPU = Platform(local=True, gpus=1, cpus=16)
LORA_ON_GPUS = {
    "rollout": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
    "trainer": {"lora": {"rank": 32}, "resources": {"limits": {"nvidia.com/gpu": 8}}},
}
VARIED = {
    "minimal": job(),
    "everything": job(EVERYTHING),
    "lora on GPUs": job(**LORA_ON_GPUS),
    "longest name": RLJob.model_validate(
        job(EVERYTHING).model_dump(by_alias=True) | {"metadata": {"name": "a" * 45, "uid": "5b2e-1"}}
    ),
}


def built(job: RLJob, platform: Platform = CLUSTER, attempt: int = 0) -> dict:
    """(kind, name) → child."""
    found = children(job, run_id="run-1", platform=platform, attempt=attempt)
    return {(child["kind"], child["metadata"]["name"]): child for child in found}


def only(job: RLJob, kind: str, component: str, platform: Platform = CLUSTER) -> dict:
    (child,) = (
        child
        for child in children(job, run_id="run-1", platform=platform)
        if child["kind"] == kind and child["metadata"]["labels"]["miles.dev/component"] == component
    )
    return child


def container(job: RLJob, kind: str, component: str, name: str, platform: Platform = CLUSTER) -> dict:
    pod = only(job, kind, component, platform)["spec"]["template"]["spec"]
    return next(entry for entry in [*pod["initContainers"], *pod["containers"]] if entry["name"] == name)


STORED = {"data": {"replayFrom": {"uri": "s3://team-a/miles/default/a/1", "where": "reward > 0.5"}}}


def test_a_job_that_trains_stored_samples_has_no_workers():
    found = built(job(**STORED))
    assert {kind for kind, _ in found} == {"NetworkPolicy", "ConfigMap", "Service", "Job"}
    read = RunConfig.model_validate_json(found["ConfigMap", "arithmetic-config"]["data"]["run.json"])
    assert read.data.replay_from == ReplayConfig(uri="s3://team-a/miles/default/a/1", where="reward > 0.5")
    assert (read.data.sets, read.rewards) == ([], [])


def test_on_one_machine_such_a_job_has_all_cores_for_its_trainer():
    stored = job(data={"replayFrom": {"uri": "file://./a"}}, model={"uri": "file:///m"})
    assert env(trainer(stored, CPU))["OMP_NUM_THREADS"] == "4"
    assert config(stored, CPU).data.replay_from == ReplayConfig(uri="file:///home/me/jobs/a")


def vllm(job: RLJob, platform: Platform = CLUSTER) -> dict:
    return container(job, "Deployment", "rollout", "vllm", platform)


def trainer(job: RLJob, platform: Platform = CLUSTER) -> dict:
    return container(job, "Job", "trainer", "trainer", platform)


def env(container: dict) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def option(container: dict, name: str) -> str | None:
    arguments = container["args"]
    return arguments[arguments.index(name) + 1] if name in arguments else None


def config(job: RLJob, platform: Platform = CLUSTER) -> RunConfig:
    return RunConfig.model_validate_json(only(job, "ConfigMap", "config", platform)["data"]["run.json"])


@pytest.fixture(params=VARIED.values(), ids=VARIED.keys())
def any_job(request) -> RLJob:
    return request.param


@pytest.fixture
def pods(any_job) -> list[dict]:
    found = children(any_job, run_id="run-1")
    return [child["spec"]["template"]["spec"] for child in found if child["kind"] in ("Deployment", "Job")]


def all_containers(pods: list[dict]) -> list[dict]:
    return [container for pod in pods for container in [*pod["initContainers"], *pod["containers"]]]


def test_a_job_has_one_configuration_workers_and_a_trainer_with_a_service():
    children = [key for key in built(job()) if key[0] not in ("NetworkPolicy", "PodDisruptionBudget")]
    assert children == [
        ("ConfigMap", "arithmetic-config"),
        ("Deployment", "arithmetic-rollout"),
        ("Service", "arithmetic-trainer"),
        ("Job", "arithmetic-trainer-0"),
    ]


def test_the_same_job_always_has_the_same_children(any_job):
    assert json.dumps(children(any_job, run_id="r")) == json.dumps(children(any_job, run_id="r"))


def test_a_new_attempt_changes_the_trainer_and_leaves_the_workers_as_they_are(any_job):
    first, second = built(any_job), built(any_job, attempt=1)
    same = {key for key in first if first[key] == second.get(key)}
    changed = {kind for kind, name in first.keys() - same}
    assert changed == {"ConfigMap", "Job"}


def test_names_fit_a_dns_label_and_differ(any_job):
    names = [(kind, name) for kind, name in built(any_job)]
    assert len(set(names)) == len(names)
    for _, name in names:
        assert re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)
    indexed = only(any_job, "Job", "trainer")["metadata"]["name"]
    assert len(f"{indexed}-{any_job.spec.trainer.nodes}") <= 63


def test_a_name_that_is_cut_stays_unique():
    long = VARIED["longest name"]
    one, other = child_name(long, "reward-" + "x" * 31 + "1"), child_name(long, "reward-" + "x" * 31 + "2")
    assert one != other
    assert len(one) <= 63


def test_selectors_pick_the_pods_and_labels_are_valid(any_job):
    for child in children(any_job, run_id="r"):
        assert all(len(value) <= 63 for value in child["metadata"]["labels"].values())
        if child["kind"] == "Deployment":
            labels = child["spec"]["template"]["metadata"]["labels"]
            assert child["spec"]["selector"]["matchLabels"].items() <= labels.items()
        if child["kind"] == "Service":
            component = child["metadata"]["labels"]["miles.dev/component"]
            workload = only(any_job, "Job" if component == "trainer" else "Deployment", component)
            assert child["spec"]["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_children_are_owned_by_the_job_once_it_has_a_uid(any_job):
    for child in children(any_job, run_id="r"):
        owners = child["metadata"].get("ownerReferences", [])
        assert [owner["uid"] for owner in owners] == ([any_job.metadata.uid] if any_job.metadata.uid else [])


def test_pods_meet_the_restricted_security_standard_and_have_no_api_token(pods):
    for pod in pods:
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(next(iter(volume.keys() - {"name"})) in {"configMap", "emptyDir"} for volume in pod["volumes"])
    for container in all_containers(pods):
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security["allowPrivilegeEscalation"]
        assert security["readOnlyRootFilesystem"]


def test_every_path_in_commands_and_variables_lies_below_a_mount(pods):
    for container in all_containers(pods):
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        texts = [*container.get("args", []), *env(container).values()]
        for text in texts:
            if text.startswith("/"):
                assert any(f"{text}/".startswith(f"{mount}/") for mount in mounts), text


def test_mounts_are_declared_and_none_lies_inside_a_read_only_one(pods):
    for pod in pods:
        declared = {volume["name"] for volume in pod["volumes"]}
        for container in [*pod["initContainers"], *pod["containers"]]:
            mounts = container["volumeMounts"]
            assert {mount["name"] for mount in mounts} <= declared
            paths = [mount["mountPath"] for mount in mounts]
            assert not any(one.startswith(f"{other}/") for one in paths for other in paths)


def test_arguments_are_single_words_and_their_variables_are_set(pods):
    for container in all_containers(pods):
        names = [entry["name"] for entry in container["env"]]
        assert len(set(names)) == len(names)
        for text in [*container["command"], *container.get("args", []), *env(container).values()]:
            assert isinstance(text, str)
            for used in re.findall(r"\$\((\w+)\)", text):
                assert used in names
        assert all(re.fullmatch(r"[-\w./:$()]+", part) for part in [*container["command"], *container.get("args", [])])
        assert not {"sh", "bash", "-c"} & {*container["command"], *container.get("args", [])}


def test_no_word_of_the_user_reaches_a_command_line():
    odd = "$(id); `id` && echo"
    spec = json.loads(job(EVERYTHING).model_dump_json(by_alias=True))
    spec["spec"]["data"]["systemPrompt"] = odd
    spec["spec"]["algorithm"]["sampling"]["stop"] = [odd]
    spec["spec"]["data"]["sets"][1]["parameters"] = {"x": odd}
    for child in children(RLJob.model_validate(spec), run_id="r"):
        if child["kind"] != "ConfigMap":
            assert "id" not in re.findall(r"\$\((\w+)\)", json.dumps(child))
            assert "echo" not in json.dumps(child)


def test_the_policy_server_is_reachable_from_its_own_pod_only():
    server = vllm(job())
    assert option(server, "--host") == "127.0.0.1"
    assert "ports" not in server
    assert env(container(job(), "Deployment", "rollout", "worker"))["VLLM_URL"] == "http://127.0.0.1:$(MILES_VLLM_PORT)"


def test_the_worker_and_its_server_share_a_folder_for_new_weights():
    worker = container(job(), "Deployment", "rollout", "worker")
    scratch = env(worker)["MILES_SCRATCH"]
    for each in (worker, vllm(job())):
        (mount,) = (mount for mount in each["volumeMounts"] if mount["mountPath"] == scratch)
        assert not mount.get("readOnly")


def test_the_worker_answers_the_probes_of_its_pod():
    worker = container(job(), "Deployment", "rollout", "worker")
    assert worker["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "status"}
    assert worker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "status"}
    assert worker["ports"] == [{"name": "status", "containerPort": int(env(worker)["MILES_STATUS_PORT"])}]


def test_the_server_samples_what_the_trainer_can_compute_again():
    server = vllm(job())
    assert option(server, "--logprobs-mode") == "processed_logprobs"
    assert option(server, "--generation-config") == "vllm"
    assert option(server, "--served-model-name") == "policy"
    assert 0 < int(option(server, "--shutdown-timeout")) < 10, "without, its engine's shared memory is left behind"
    assert option(server, "--max-model-len") == str(config(job()).rollout.max_model_len)


def test_on_a_cpu_the_server_computes_in_float32_and_adapters_are_merged():
    lora = job(trainer={"lora": {}})
    server = vllm(lora)
    assert (option(server, "--dtype"), "--enforce-eager" in server["args"], "--enable-lora" in server["args"]) == (
        "float32",
        True,
        False,
    )
    assert env(server)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert config(lora).rollout.adapter_loading == "merge"


def test_on_gpus_the_server_computes_in_bfloat16_and_adapters_are_loaded_hot():
    server = vllm(VARIED["lora on GPUs"])
    assert (option(server, "--dtype"), option(server, "--max-lora-rank")) == ("bfloat16", "32")
    assert "--enforce-eager" not in server["args"]
    assert env(server)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in env(server)
    assert config(VARIED["lora on GPUs"]).rollout.adapter_loading == "hot"


def test_full_fine_tuning_never_enables_adapters():
    full = job(rollout={"resources": {"limits": {"nvidia.com/gpu": 1}}})
    assert "--enable-lora" not in vllm(full)["args"]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in env(vllm(full))


def test_a_trainer_node_runs_one_process_a_gpu_unless_told_otherwise():
    assert env(trainer(job()))["PET_NPROC_PER_NODE"] == "1"
    assert env(trainer(VARIED["lora on GPUs"]))["PET_NPROC_PER_NODE"] == "8"
    assert env(trainer(job(trainer={"processesPerNode": 2})))["PET_NPROC_PER_NODE"] == "2"


def test_the_trainers_nodes_find_each_other_through_the_headless_service():
    large = job(EVERYTHING)
    workload, service = only(large, "Job", "trainer"), only(large, "Service", "trainer")
    variables = env(trainer(large))
    assert (variables["PET_NNODES"], variables["PET_RDZV_ID"]) == ("2", "run-1-0")
    assert variables["PET_MASTER_ADDR"] == f"{workload['metadata']['name']}-0.{service['metadata']['name']}"
    assert workload["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    rank = next(entry for entry in trainer(large)["env"] if entry["name"] == "PET_NODE_RANK")
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]


def test_the_trainer_is_never_retried_by_its_job_and_an_eviction_is_remembered():
    spec = only(job(EVERYTHING), "Job", "trainer")["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onPodConditions"][0]["type"]) == ("FailJob", "DisruptionTarget")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert "ttlSecondsAfterFinished" not in spec


def test_the_trainer_has_time_for_a_checkpoint_when_it_is_told_to_stop():
    pod = only(job(trainer={"stopGraceSeconds": 300}), "Job", "trainer")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > config(job(trainer={"stopGraceSeconds": 300})).trainer.stop_grace_s


def test_an_update_of_the_workers_never_needs_more_gpus():
    strategy = only(job(), "Deployment", "rollout")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def annotation(job):
    return only(job, "Deployment", "rollout")["spec"]["template"]["metadata"]["annotations"]["miles.dev/config"]


def test_a_changed_setting_replaces_the_workers():
    assert annotation(job()) != annotation(job(data={"sets": [{"generator": "reasoning-gym/chain_sum"}], "seed": 1}))


def test_a_setting_that_workers_do_not_read_leaves_them_alone():
    kept = {annotation(each) for each in (job(), job(runPolicy={"maxRestarts": 7}))}
    assert len(kept) == 1


def test_a_suspended_job_has_children_but_no_pods():
    suspended = job(EVERYTHING, suspend=True)
    for child in children(suspended, run_id="r"):
        if child["kind"] == "Deployment":
            assert child["spec"]["replicas"] == 0
        if child["kind"] == "Job":
            assert child["spec"]["suspend"]


def test_credentials_are_references_and_vllm_has_none():
    large = job(EVERYTHING)
    for name, component, kind in (
        ("worker", "rollout", "Deployment"),
        ("trainer", "trainer", "Job"),
        ("fetch", "trainer", "Job"),
    ):
        entries = {entry["name"]: entry for entry in container(large, kind, component, name)["env"]}
        reference = entries["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "team-a-s3", "key": "AWS_SECRET_ACCESS_KEY"}
        assert entries["AWS_SESSION_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"]
    assert not [entry for entry in vllm(large)["env"] if "valueFrom" in entry]


def test_the_models_own_secret_is_seen_by_the_fetch_container_only():
    private = job(model={"uri": "hf://org/private", "secretRef": {"name": "hub"}})
    fetch = container(private, "Job", "trainer", "fetch")
    (token,) = (entry for entry in fetch["env"] if entry["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "HF_TOKEN", "optional": True}
    assert "HF_TOKEN" not in [entry["name"] for entry in trainer(private)["env"]]
    assert env(trainer(private))["HF_HUB_OFFLINE"] == "1"


def test_a_reward_function_is_mounted_from_its_config_map_not_copied():
    large = job(EVERYTHING)
    worker = container(large, "Deployment", "rollout", "worker")
    (reward,) = (reward for reward in config(large).rewards if reward.name == "brief")
    assert reward.folder in [mount["mountPath"] for mount in worker["volumeMounts"]]
    volumes = only(large, "Deployment", "rollout")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "reward-brief", "configMap": {"name": "math-rewards"}} in volumes


def test_an_environment_is_mounted_from_its_config_map_into_the_worker_alone():
    played = job(environment={"class": "tools.py:Tools", "from": {"configMap": "tools"}, "maxTurns": 3})
    settings = config(played).environment
    assert settings is not None
    assert (settings.code, settings.max_turns) == ("tools.py:Tools", 3)
    mounts = {
        name: [mount["mountPath"] for mount in container(played, "Deployment", "rollout", name)["volumeMounts"]]
        for name in ("worker", "vllm")
    }
    assert settings.folder in mounts["worker"]
    assert settings.folder not in mounts["vllm"]
    volumes = only(played, "Deployment", "rollout")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "environment", "configMap": {"name": "tools"}} in volumes


def test_a_reward_model_is_a_server_of_its_own_behind_a_service():
    large = job(EVERYTHING)
    service = only(large, "Service", "reward-helpful")
    server = container(large, "Deployment", "reward-helpful", "vllm")
    (reward,) = (reward for reward in config(large).rewards if reward.name == "helpful")
    assert reward.model == f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert (option(server, "--runner"), option(server, "--convert")) == ("pooling", "classify")
    assert "VLLM_SERVER_DEV_MODE" not in env(server)


def test_a_reward_models_fetch_container_fetches_that_model():
    large = job(EVERYTHING)
    fetch = container(large, "Deployment", "reward-helpful", "fetch")
    text = only(large, "ConfigMap", "config")["data"][env(fetch)["MILES_CONFIG"].rpartition("/")[2]]
    assert RunConfig.model_validate_json(text).model.uri == "s3://models/rm-1b"


def test_template_overrides_reach_the_pods_and_replace_variables_of_the_same_name():
    template = {
        "env": [
            {"name": "OMP_NUM_THREADS", "value": "7"},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ],
        "annotations": {"example.com/a": "b"},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
    }
    changed = job(
        trainer={"template": template}, scheduling={"nodeSelector": {"zone": "a"}, "priorityClassName": "high"}
    )
    workload = only(changed, "Job", "trainer")["spec"]["template"]
    assert env(trainer(changed))["OMP_NUM_THREADS"] == "7"
    assert {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}} in trainer(changed)["env"]
    assert workload["metadata"]["annotations"] == {"example.com/a": "b"}
    assert workload["spec"]["nodeSelector"] == {"zone": "a", "pool": "cpu"}
    assert workload["spec"]["priorityClassName"] == "high"
    assert workload["spec"]["tolerations"] == [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}]


def test_workers_prefer_spot_nodes_where_that_is_asked_for_and_nobody_else_does():
    taint = {"key": "own", "operator": "Exists"}
    served = {"name": "helpful", "model": {"uri": "s3://models/rm"}}
    asked = job(rollout={"spot": True, "template": {"tolerations": [taint]}}, rewards=[served])
    worker = only(asked, "Deployment", "rollout")["spec"]["template"]["spec"]
    preferred = worker["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    labels = {
        (expression["key"], *expression["values"])
        for term in preferred
        for expression in term["preference"]["matchExpressions"]
    }
    assert labels == {
        ("karpenter.sh/capacity-type", "spot"),
        ("eks.amazonaws.com/capacityType", "SPOT"),
        ("cloud.google.com/gke-spot", "true"),
        ("kubernetes.azure.com/scalesetpriority", "spot"),
    }
    assert worker["tolerations"][0] == taint
    assert {(each["key"], each["value"]) for each in worker["tolerations"][1:]} == labels
    assert all(each["effect"] == "NoSchedule" for each in worker["tolerations"][1:])
    assert LEAVE_S < worker["terminationGracePeriodSeconds"] <= 30  # the shortest notice
    for kind, suffix in (("Job", "trainer"), ("Deployment", "reward-helpful")):
        pod = only(asked, kind, suffix)["spec"]["template"]["spec"]
        assert not {"affinity", "tolerations"} & pod.keys()
    assert "affinity" not in only(asked, "Deployment", "rollout", CPU)["spec"]["template"]["spec"]


def test_trainer_pods_share_a_topology_domain_where_that_is_asked_for():
    workload = only(job(scheduling={"topologyKey": "rack"}), "Job", "trainer")["spec"]["template"]
    (term,) = workload["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "rack"
    assert term["labelSelector"]["matchLabels"].items() <= workload["metadata"]["labels"].items()


def test_threads_follow_the_pods_cores():
    cores = {"resources": {"limits": {"cpu": 8}}}
    sized = job(rollout=cores, trainer={**cores, "processesPerNode": 2})
    assert env(vllm(sized))["OMP_NUM_THREADS"] == "8"
    assert env(trainer(sized))["OMP_NUM_THREADS"] == "4"


def test_on_one_machine_files_are_found_beside_the_spec_and_models_used_where_they_lie():
    local = job(
        model={"uri": "file://../models/tiny"},
        data={"sets": [{"uri": "file://./train.jsonl"}]},
        rewards=[{"name": "own", "function": "rewards.py:score"}],
        store={"uri": "file:///srv/miles"},
        checkpoint={"resumeFrom": "file://./runs/store/default/a/1"},
    )
    resolved = config(local, CPU)
    assert resolved.checkpoint.resume_from == "file:///home/me/jobs/runs/store/default/a/1"
    assert (resolved.model.uri, resolved.model.path) == ("file:///home/me/models/tiny", "/home/me/models/tiny")
    assert (resolved.data.sets[0].uri, resolved.data.sets[0].name) == ("file:///home/me/jobs/train.jsonl", "train")
    assert resolved.rewards[0].folder == "/home/me/jobs"
    assert resolved.store.uri == "file:///srv/miles/default/arithmetic/run-1"
    assert option(vllm(local, CPU), "--model") == "/home/me/models/tiny"


def test_a_folder_that_gets_another_tokenizer_is_put_together_elsewhere():
    local = job(model={"uri": "file:///models/a", "tokenizer": "file:///models/b"})
    assert config(local, CPU).model.path == option(vllm(local, CPU), "--model") == "/var/lib/miles/model"
    assert config(local, CPU).model.tokenizer == "file:///models/b"


def test_on_one_machine_the_cores_are_shared():
    local = job(rollout={"replicas": 2}, trainer={"processesPerNode": 2})
    assert env(vllm(local, CPU))["OMP_NUM_THREADS"] == "2"
    assert env(trainer(local, CPU))["OMP_NUM_THREADS"] == "1"


def test_on_one_machine_with_one_gpu_server_and_trainer_share_it():
    server = vllm(job(trainer={"lora": {}}), ONE_GPU)
    assert option(server, "--gpu-memory-utilization") == "0.4"
    assert server["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert trainer(job(), ONE_GPU)["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert option(vllm(job(), Platform(local=True, gpus=2)), "--gpu-memory-utilization") is None


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"store": {"uri": "file:///srv/miles"}}, 'spec.store.uri: got "file:///srv/miles": pods share no folder'),
        ({"model": {"uri": "file://./tiny"}}, 'spec.model.uri: got "file://./tiny": pods share no folder'),
        ({"rewards": [{"name": "own", "function": "rewards.py:score"}]}, r"spec.rewards\[0\].from: missing"),
        ({"environment": {"class": "tools.py:Tools"}}, r"spec.environment.from: missing"),
        (
            {"checkpoint": {"resumeFrom": "file:///a"}},
            'spec.checkpoint.resumeFrom: got "file:///a": pods share no folder',
        ),
    ],
)
def test_what_only_one_machine_can_serve_is_refused_for_a_cluster(spec, problem):
    with pytest.raises(ValueError, match=problem):
        children(job(**spec), run_id="r")


def test_generated_prompts_are_scored_by_their_generator_unless_rewards_are_given():
    assert [(reward.name, reward.library) for reward in config(job()).rewards] == [("generator", "generator")]


def test_an_environment_gives_the_reward_unless_rewards_are_given():
    played = config(job(environment={"library": "reasoning-gym"}))
    assert [(reward.name, reward.library) for reward in played.rewards] == [("environment", "environment")]


def test_defaults_that_depend_on_other_fields():
    plain, adapter = config(job()), config(job(trainer={"lora": {"rank": 8}}))
    assert (plain.algorithm.learning_rate, adapter.algorithm.learning_rate) == (1e-6, 1e-5)
    assert (plain.algorithm.clip_low, plain.algorithm.clip_high) == (0.2, 0.28)
    assert adapter.trainer.lora is not None
    assert (adapter.trainer.lora.alpha, adapter.trainer.lora.targets) == (16.0, "all-linear")
    assert plain.trainer.max_tokens_per_micro_batch == plain.rollout.max_model_len


def test_what_the_user_set_wins_over_the_algorithms_defaults():
    given = job(
        algorithm={
            "type": "grpo",
            "totalSteps": 1,
            "clip": {"high": "0.3"},
            "aggregation": "constant",
            "parameters": {"dualClip": "3"},
        }
    )
    algorithm = config(given).algorithm
    assert (algorithm.clip_high, algorithm.aggregation, algorithm.parameters) == (
        0.3,
        "constant",
        {"dual_clip": 3.0, "dynamic_sampling": False},
    )


def test_the_runs_prefix_names_namespace_job_and_run():
    assert config(job()).store.uri == "s3://team-a/miles/default/arithmetic/run-1"


def test_the_run_configuration_keeps_what_the_user_wrote_for_people():
    variables = [{"name": "TOKEN", "value": "concealed"}]
    written = job(trainer={"nodes": 1, "processesPerNode": 2, "template": {"env": variables}})
    local = resolve.run_config(written, "r", Platform(local=True)).given
    assert (local["trainer.nodes"], local["trainer.processesPerNode"]) == (1, 2)
    assert local["trainer.template.env[0].name"] == "TOKEN"
    assert "concealed" not in str(local)
    assert "data.seed" not in local
    in_a_cluster = resolve.run_config(RLJob.model_validate(filled_in(written)), "r", Platform()).given
    assert {"trainer.nodes": 1}.items() - in_a_cluster.items(), "there a default is one"
    assert in_a_cluster["trainer.processesPerNode"] == 2
    assert "data.seed" not in in_a_cluster


def filled_in(job):
    """As an API server keeps it: with all defaults."""
    return job.model_dump(mode="json", by_alias=True, exclude_none=True)


def test_every_field_of_the_run_configuration_is_decided_by_the_spec_or_left_at_its_default_on_purpose():
    left = {"flush_s", "shard_groups", "poll_s", "heartbeat_s", "lease_timeout_s", "group_timeout_s", "max_failures"}
    resolved = resolve.run_config(job(EVERYTHING), "r", Platform())
    for name in RunConfig.model_fields:
        section = getattr(resolved, name)
        if hasattr(section, "model_fields_set"):
            assert type(section).model_fields.keys() - section.model_fields_set <= left, name
