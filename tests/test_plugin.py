"""`kubectl miles`: what it prints about made-up jobs, and how it treats the kubectl it runs."""

import datetime
import json
import re
import socket
import stat

import pytest

from operators import causes, conditions, figures, kubectl
from operators.plugin import command, pods, reports, status, tables, trouble
from tests.test_report import configuration

NOW = datetime.datetime(2026, 3, 1, 12, 0, tzinfo=datetime.UTC)


def ago(**span) -> str:
    return (NOW - datetime.timedelta(**span)).isoformat().replace("+00:00", "Z")


def job(conditions: dict[str, tuple[str, ...]] | None = None, spec: dict | None = None, **told) -> dict:
    """conditions: type → (status, reason, message)."""
    found = {
        "metadata": {
            "name": "math-7b",
            "namespace": "team-a",
            "uid": "3f0c",
            "generation": 1,
            "creationTimestamp": ago(hours=7, minutes=12),
        },
        "spec": {
            "algorithm": {"totalSteps": 1000},
            "store": {"uri": "s3://team-a/miles/"},
            "runPolicy": {"maxRestarts": 3},
        }
        | (spec or {}),
    }
    if conditions is None:
        return found
    listed = [
        {"type": kind, **dict(zip(("status", "reason", "message"), entry, strict=False))}
        for kind, entry in conditions.items()
    ]
    return found | {"status": {"observedGeneration": 1, "conditions": listed, **told}}


RUNNING = job(
    {"Ready": ("True", "Training", ""), "RolloutReady": ("True", "Ready", "")},
    phase="Running",
    startTime=ago(hours=7),
    training={"step": 412, "totalSteps": 1000, "policyVersion": "t2-s412", "etaSeconds": 36_000}
    | {"rewards": ["0.1", "0.3", "0.41"]},
    rollout={"desired": 4, "ready": 4, "spot": 2},
    trainer={"desired": 2, "ready": 2},
    lastCheckpoint={"step": 400, "uri": "s3://…", "time": ago(minutes=6)},
    store={"bytes": 44_000_000_000, "objects": 1204},
    restarts=0,
    disruptions=1,
    attempt={"number": 1, "cause": "Disruption", "time": ago(hours=5), "message": "node lost"},
    metrics=[
        {"name": "reward/mean", "value": "0.41"},
        {"name": "reward/correct", "value": "0.52"},
        {"name": "staleness/mean", "value": "0.8"},
        {"name": "staleness/max", "value": "2"},
        {"name": "queue/groups", "value": "96"},
        {"name": "tokens_per_s/generated", "value": "11200"},
        {"name": "waits/trainer", "value": "0.034"},
        {"name": "waits/rollout", "value": "0.12"},
        {"name": "response_length/mean", "value": "311.4"},
        {"name": "evaluation/aime/avg@16", "value": "0.21"},
        {"name": "odd", "value": "NaN?"},
    ],
)


def pod(part: str = "rollout", number: int = 0, **told) -> dict:
    labels = {"miles.dev/component": part, "miles.dev/attempt": "0"}
    if part == "trainer":
        labels["batch.kubernetes.io/job-completion-index"] = str(number)
    return {
        "metadata": {"name": f"math-7b-{part}-{number}", "uid": f"{part}-{number}", "labels": labels},
        "spec": {
            "containers": [{"name": "vllm", "resources": {"limits": {"nvidia.com/gpu": "2"}}}, {"name": "worker"}]
        },
        "status": told,
    }


def container(name: str, restarts: int = 0, **state) -> dict:
    return {"name": name, "restartCount": restarts, "state": state}


def ended(name: str, code: int, reason: str = "Error") -> dict:
    return container(name, terminated={"exitCode": code, "reason": reason})


READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def test_a_running_job_on_one_screen():
    shown = status.screen(RUNNING, [pod("rollout", 0, **READY), pod("trainer", 0, **READY)], NOW)
    assert shown.splitlines() == [
        "math-7b  Running for 7h 0m · step 412 of 1000 · ETA 10h 0m · policy t2-s412 · staleness mean 0.8 max 2",
        "reward   0.410 ▁▆█  (correct 0.520) · response 311 tokens · eval aime avg@16 0.210",
        "speed    11.2k tok/s generated · trainer waits 3% · rollouts wait 12%",
        "rollout  4/4 ready (2 on spot) · queue 96 groups",
        "trainer  2/2 ready · checkpoint s400, 6m 0s ago · restarts 0 of 3 (+1 disruption)",
        "last     attempt 1: disruption 5h 0m ago (node lost)",
        "store    s3://team-a/miles/team-a/math-7b/3f0c · 41.0 GiB in 1204 objects",
    ]


@pytest.mark.parametrize(
    ("bytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 19, "1.5 MiB"), (1 << 60, "1024.0 PiB")],
)
def test_sizes_as_people_read_them(bytes, words):
    assert figures.size(bytes) == words


def test_what_a_job_that_starts_waits_for_is_told():
    message = "the first step of this attempt is not finished yet; dropped groups are invalid: reward a: KeyError"
    given = job({"Ready": ("False", "Starting", message)}, phase="Starting")
    assert f"waits    {message}" in status.screen(given, [], NOW).splitlines()


def test_the_last_decision_of_the_autoscaler_is_told_with_its_cause():
    why = "2 to 4 at step 40: the trainer waited 60% of the time for completions"
    decided = {"desired": 4, "ready": 3, "autoscaled": {"start": 2, "replicas": 4, "step": 40, "message": why}}
    given = job({"Ready": ("True", "Training", "")}, phase="Running", rollout=decided)
    assert f"rollout  3/4 ready · autoscaled from {why}" in status.screen(given, [], NOW).splitlines()


def test_in_trouble_the_first_three_lines_say_what_why_and_what_to_do():
    message = "rollout pod math-7b-rollout-0: image nowhere/miles:1: not found"
    given = job({"Ready": ("False", "ImagePullFailed", message)}, phase="Pending", rollout={"desired": 1, "ready": 0})
    stuck = pod(phase="Pending", containerStatuses=[container("vllm", waiting={"reason": "ImagePullBackOff"})])
    first, second, third, *rest = status.screen(given, [stuck], NOW).splitlines()
    assert first == "math-7b  Pending for 7h 12m: an image cannot be pulled"
    assert second == f"why      {message}"
    assert third.startswith("do       correct rollout.image or trainer.image")
    assert "rollout  0/1 ready · math-7b-rollout-0 ImagePullBackOff (vllm)" in rest


FINE = {
    "running": RUNNING,
    "starting": job({"Ready": ("False", "Starting", "waits for pods")}, phase="Starting"),
    "suspended": job(
        {
            "Ready": ("False", "Suspended", ""),
            "RolloutReady": ("False", "X", ""),
            "Suspended": ("True", "Suspended", ""),
        }
    ),
    "complete": job(
        {"Complete": ("True", "Complete", ""), "Ready": ("False", "Odd", ""), "RolloutReady": ("False", "Odd", "")}
    ),
    "an unknown condition": job({"Weather": ("False", "Rain", "")}),
}


@pytest.mark.parametrize("given", FINE.values(), ids=FINE.keys())
def test_no_trouble_is_told_of_a_job_that_is_well(given):
    assert trouble.of(given, NOW) is None
    assert "why" not in status.screen(given, [], NOW)


TROUBLES = {
    "failed": (
        job({"Failed": ("True", "MaxRestartsExceeded", "exit 1: CUDA"), "Ready": ("False", "Failed", "")}),
        "the trainer failed more often than runPolicy.maxRestarts",
        "exit 1: CUDA",
        "delete the job and apply it again",
    ),
    "failed while suspended, for a reason that mends itself elsewhere": (
        job({"Failed": ("True", "Preempted", "gone"), "Suspended": ("True", "Suspended", "")}),
        "pods were evicted",
        "gone",
        "kubectl miles events math-7b",
    ),
    "stalled": (
        job({"Stalled": ("True", "InvalidSpec", "spec.store: gone"), "Ready": ("False", "InvalidSpec", "")}),
        "the spec breaks a rule",
        "spec.store: gone",
        "kubectl edit",
    ),
    "degraded": (
        job({"Ready": ("True", "Training", ""), "RolloutReady": ("False", "RolloutUnavailable", "1 of 4 lost")}),
        "workers are missing",
        "1 of 4 lost",
        "read the cause",
    ),
    "a reason that this release does not know": (
        job({"Ready": ("False", "Eclipse", "the sun is gone")}),
        "Eclipse",
        "the sun is gone",
        "kubectl miles events math-7b",
    ),
    "a reason without a message": (job({"Ready": ("False", "Unschedulable")}), "no node", "Unschedulable", "resources"),
    "never seen by an operator": (job(), "no operator has looked at it for 7h 12m", "empty", "miles-system"),
}


@pytest.mark.parametrize(("given", "what", "why", "remedy"), TROUBLES.values(), ids=TROUBLES.keys())
def test_trouble(given, what, why, remedy):
    found = trouble.of(given, NOW)
    assert what in found.what
    assert why in found.why
    assert remedy in found.remedy


def test_a_job_of_a_few_seconds_is_not_yet_in_trouble():
    young = job()
    young["metadata"]["creationTimestamp"] = ago(seconds=5)
    assert trouble.of(young, NOW) is None
    assert status.screen(young, [], NOW).splitlines()[0] == "math-7b  Pending for 5s"


def test_an_edit_that_nobody_acted_on_is_told():
    edited = job({"Ready": ("True", "Training", "")}, phase="Running")
    edited["metadata"]["generation"] = 2
    assert "the last edit is not acted on yet" in status.screen(edited, [], NOW)


def test_a_finished_job_shows_how_long_it_took_and_no_eta():
    done = job(
        {"Complete": ("True", "Complete", "")},
        phase="Complete",
        startTime=ago(hours=3),
        completionTime=ago(hours=1),
        training={"step": 1000, "totalSteps": 1000, "etaSeconds": 4},
    )
    assert status.screen(done, [], NOW).splitlines()[0] == "math-7b  Complete after 2h 0m · step 1000 of 1000"


def test_a_suspended_job_shows_how_long_it_has_been_so_and_not_since_when_it_runs():
    suspended = job({"Suspended": ("True", "Suspended", "")}, phase="Suspended", startTime=ago(hours=7))
    suspended["status"]["conditions"][0]["lastTransitionTime"] = ago(minutes=2)
    assert status.screen(suspended, [], NOW).splitlines()[0] == "math-7b  Suspended for 2m 0s"
    passing = job({"Suspended": ("False", "NotSuspended", "")}, phase="Suspending", startTime=ago(hours=7))
    assert status.screen(passing, [], NOW).splitlines()[0] == "math-7b  Suspending"


@pytest.mark.parametrize("phase", ["Starting", "Pending"])
def test_a_job_that_starts_again_shows_how_long_this_attempt_has(phase):
    given = job({"Ready": ("False", "Starting", "")}, phase=phase, startTime=ago(hours=7))
    assert status.screen(given, [], NOW).startswith(f"math-7b  {phase} for 7h 0m")
    given["status"]["attempt"] = {"number": 1, "cause": "Resumed", "time": ago(minutes=2)}
    assert status.screen(given, [], NOW).startswith(f"math-7b  {phase} for 2m 0s")


@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_of_a_job_that_is_over_no_trainer_is_missed(end):
    told = {"trainer": {"desired": 2, "ready": 0}, "lastCheckpoint": {"step": 9, "time": ago(minutes=6)}}
    given = job({end: ("True", end, "")}, phase=end, completionTime=ago(minutes=1), **told)
    assert "trainer  checkpoint s9, 6m 0s ago · restarts 0 of 3" in status.screen(given, [], NOW).splitlines()


def test_a_job_that_is_deleted_says_so():
    given = job({"Ready": ("True", "Training", "")}, phase="Running")
    given["metadata"]["deletionTimestamp"] = ago(seconds=3)
    assert status.screen(given, [], NOW).startswith("math-7b  Deleting")


def test_the_end_of_a_back_off_is_told():
    waiting = (NOW + datetime.timedelta(seconds=40)).isoformat()
    given = job(
        {"Ready": ("False", "Restarting", "")},
        attempt={"number": 2, "cause": "Failure", "message": "exit 1", "time": ago(seconds=5), "notBefore": waiting},
    )
    assert "attempt 2: failure 5s ago, starts in 40s (exit 1)" in status.screen(given, [], NOW)


def test_someone_who_may_not_list_pods_still_sees_the_job():
    assert "you may not list them" in status.screen(RUNNING, None, NOW)


def test_a_message_of_many_lines_stays_one_line_of_bounded_length():
    given = job({"Failed": ("True", "TrainerFailed", "Traceback\n" * 500)})
    why = status.screen(given, [], NOW).splitlines()[1]
    assert why.startswith("why      Traceback Traceback")
    assert len(why) <= 9 + status.LONGEST


def test_of_many_busy_pods_a_few_are_named():
    given = job({"Ready": ("False", "Starting", "")}, rollout={"desired": 5, "ready": 0})
    shown = status.component(given, "rollout", [pod(number=number, phase="Pending") for number in range(5)])
    assert shown.endswith("math-7b-rollout-2 starting · and 2 more")


PODS = {
    "ready": (pod(**READY), "ready"),
    "not scheduled": (
        pod(
            phase="Pending",
            conditions=[{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}],
        ),
        "not scheduled: 0/1 nodes are available",
    ),
    "just created": (pod(phase="Pending"), "starting"),
    "creating": (
        pod(phase="Pending", containerStatuses=[container("vllm", waiting={"reason": "ContainerCreating"})]),
        "starting",
    ),
    "fetching": (pod(phase="Pending", initContainerStatuses=[container("fetch", running={})]), "fetching the model"),
    "crashing": (
        pod(phase="Running", containerStatuses=[container("vllm", waiting={"reason": "CrashLoopBackOff"})]),
        "CrashLoopBackOff (vllm)",
    ),
    "running": (pod(phase="Running", containerStatuses=[container("vllm", running={})]), "running vllm"),
    "out of memory": (
        pod("trainer", phase="Failed", containerStatuses=[ended("trainer", 137, "OOMKilled")]),
        "failed: OOMKilled (trainer)",
    ),
    "exit code": (
        pod("trainer", phase="Failed", containerStatuses=[ended("trainer", 3)]),
        "failed: exit 3 (trainer)",
    ),
    "evicted": (pod(phase="Failed", reason="Evicted"), "failed: Evicted"),
    "finished": (pod("trainer", phase="Succeeded"), "finished"),
    "without a status": (pod(), "starting"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "words"), PODS.values(), ids=PODS.keys())
def test_words_for_a_pod(given, words):
    assert pods.words(given) == words


def test_a_pod_that_is_being_deleted_is_stopping():
    given = pod(**READY)
    given["metadata"]["deletionTimestamp"] = ago(seconds=1)
    assert pods.words(given) == "stopping"


@pytest.mark.parametrize(
    ("given", "speaks"),
    [
        (pod(phase="Pending", initContainerStatuses=[container("fetch", running={})]), "fetch"),
        (
            pod(
                initContainerStatuses=[container("fetch", terminated={"exitCode": 0})],
                containerStatuses=[container("vllm", running={}), container("worker", running={})],
            ),
            "worker",
        ),
        (
            pod(containerStatuses=[container("worker", running={}), container("vllm", terminated={"exitCode": 1})]),
            "vllm",
        ),
        (pod("trainer"), "trainer"),
        (pod("reward-helpful"), "vllm"),
    ],
    ids=["init", "worker", "failed", "trainer", "reward model"],
)
def test_the_container_that_is_listened_to(given, speaks):
    assert pods.speaking(given) == speaks


def test_of_several_pods_the_one_that_failed_speaks_then_rank_0():
    ranks = [pod("trainer", number) for number in range(3)]
    assert max(ranks, key=pods.loudness)["metadata"]["name"] == "math-7b-trainer-0"
    ranks[2]["status"] = {"phase": "Failed"}
    assert max(ranks, key=pods.loudness)["metadata"]["name"] == "math-7b-trainer-2"


def test_the_list_names_the_trouble_of_each_job():
    failed = job({"Failed": ("True", "TrainerFailed", "")}, phase="Failed", restarts=3)
    failed["metadata"] |= {"name": "another", "namespace": "team-b"}
    assert tables.jobs([failed, RUNNING], NOW, with_namespace=True).splitlines() == [
        "NAMESPACE   NAME      PHASE     STEP       REWARD   ROLLOUTS   RESTARTS   AGE      TROUBLE",
        "team-a      math-7b   Running   412/1000   0.410    4/4        0          7h 12m",
        "team-b      another   Failed    0/1000              0/0        3          7h 12m   TrainerFailed",
    ]


def event(kind: str, name: str, uid: str = "?", when: str | None = None, **more) -> dict:
    return {
        "metadata": {"name": "e"},
        "involvedObject": {"kind": kind, "name": name, "uid": uid},
        "lastTimestamp": when or ago(minutes=1),
        "type": "Warning",
        "reason": "Any",
        "message": "text",
    } | more


def test_events_of_the_job_its_children_and_pods_are_found_and_no_others():
    mine = [
        event("RLJob", "math-7b", "3f0c", when=ago(hours=1)),
        event("Pod", "math-7b-rollout-0", "rollout-0"),
        event("Job", "math-7b-trainer-0", "gone"),
        event("Pod", "math-7b-trainer-0-0-x2x4z", "gone"),
        event("Deployment", "math-7b-rollout"),
    ]
    others = [
        event("RLJob", "math-7b", "an-earlier-one"),
        event("Pod", "math-7b-trainer-0-0-old", when=ago(days=1)),
        event("Pod", "math-7bb-trainer-0"),
        event("Pod", "other"),
    ]
    assert tables.concerning(RUNNING, [pod()], [*others, *mine]) == mine


def test_events_are_told_oldest_first_with_how_often_they_happened():
    found = [event("Pod", "p", message="a\nb", count=7), event("Pod", "p", when=ago(hours=2))]
    shown = tables.events(sorted(found, key=tables.moment), NOW).splitlines()
    assert shown[1].startswith("2h 0m ago")
    assert shown[2] == "1m 0s ago   Warning   Pod/p    Any      a b (×7)"


def test_top_shows_use_gpus_and_state_of_each_pod_and_the_speed():
    used = tables.usage("math-7b-rollout-0   1500m   2Gi\n\n")
    shown = tables.top(RUNNING, [pod("trainer"), pod(**READY)], used).splitlines()
    assert shown[1].split() == ["math-7b-rollout-0", "rollout", "1500m", "2Gi", "2", "0", "ready"]
    assert shown[2].split() == ["math-7b-trainer-0", "trainer", "?", "?", "2", "0", "starting"]
    assert shown[-1] == "11.2k tok/s generated · trainer waits 3% · rollouts wait 12%"


SAID = {
    "not found": (
        'Error from server (NotFound): rljobs.miles.dev "x" not found',
        'rljobs.miles.dev "x" not found',
        None,
    ),
    "no CRD": ('error: the server doesn\'t have a resource type "rljobs"', "the server doesn't", "manifests/overlays"),
    "forbidden": ("Error from server (Forbidden): rljobs is forbidden: User x cannot", "rljobs is forbidden", "role"),
    "no server": (
        "E0301 12:00:00.1 1 memcache.go:265] couldn't get\nThe connection to the server 127.0.0.1:1 was refused",
        "The connection to the server 127.0.0.1:1 was refused",
        "--context",
    ),
    "no context": ('error: context "x" does not exist', 'context "x" does not exist', "get-contexts"),
    "a warning before": ("Warning: old API\nError from server (Forbidden): no", "(Forbidden): no", "role"),
    "nothing": ("", "kubectl failed without a word", None),
}


@pytest.mark.parametrize(("stderr", "said", "remedy"), SAID.values(), ids=SAID.keys())
def test_what_kubectl_refuses_becomes_one_line_with_a_remedy(stderr, said, remedy):
    text = str(kubectl.refusal(stderr))
    assert "Warning" not in text
    assert said in text
    assert "\n" not in text
    assert (remedy in text) if remedy else text == said


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A kubectl that records its arguments, one list a line, and answers from files named after its first one."""
    script = tmp_path / "kubectl"
    script.write_text(
        "#!/bin/sh\n"
        f'cd {tmp_path}; printf "%s\\037" "$@" >> calls; echo >> calls\n'
        'for word in "$@"; do file=answer-$(echo "$word" | tr / _); [ -f "$file" ] && exec cat "$file"; done\n'
        'echo "Error from server (NotFound): nothing like that" >&2; exit 1\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("KUBECTL", str(script))

    class Fake:
        def answer(self, word: str, value) -> None:
            (tmp_path / f"answer-{word.replace('/', '_')}").write_text(
                value if isinstance(value, str) else json.dumps(value)
            )

        def calls(self) -> list[list[str]]:
            lines = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
            return [line.split("\037")[:-1] for line in lines]

    return Fake()


def test_flags_of_kubectl_are_handed_on_as_single_arguments(fake):
    fake.answer("get", {"items": []})
    assert command.main(["list", "-n", "team a; rm", "--context=c", "--kubeconfig", "f"]) == 0
    assert fake.calls()[0][:3] == ["--namespace=team a; rm", "--context=c", "--kubeconfig=f"]


@pytest.mark.parametrize("name", ["-o", "--all", "$(id)", "a b", "../x", "", "A"])
def test_what_cannot_be_a_name_never_reaches_kubectl(fake, name, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["status", "--", name])
    assert ended.value.code == 2
    assert fake.calls() == []


def test_a_job_that_is_not_there_is_one_line_and_exit_code_2(fake, capsys):
    assert command.main(["status", "gone"]) == 2
    assert capsys.readouterr() == ("", "kubectl miles: status: nothing like that\n")


def test_a_misspelt_command_gets_a_suggestion(capsys):
    assert command.main(["statsu", "x"]) == 2
    assert 'did you mean "status"?' in capsys.readouterr().err


def test_an_option_before_the_command_is_told_its_place(capsys):
    assert command.main(["-n", "team-a", "status", "x"]) == 2
    assert "options follow the command" in capsys.readouterr().err


def test_commands_that_need_no_cluster_work_without_kubectl(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert command.main(["explain", "spec.suspend"]) == 0
    assert command.main([]) == 0


def test_usage_names_every_command():
    assert all(f"\n  {name} " in command.USAGE for name in command.COMMANDS)


def test_without_kubectl_the_user_is_told_to_install_it(monkeypatch, capsys):
    monkeypatch.delenv("KUBECTL", raising=False)
    monkeypatch.setenv("PATH", "")
    assert command.main(["status", "x"]) == 2
    assert "there is no kubectl on the PATH" in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "suspended"), [("suspend", False), ("resume", True)])
def test_suspend_and_resume_patch_that_field_only(fake, verb, suspended, capsys):
    fake.answer("get", job({"Ready": ("True", "Training", "")}, spec={"suspend": suspended}))
    fake.answer("patch", "patched")
    assert command.main([verb, "math-7b"]) == 0
    assert f'--patch={{"spec":{{"suspend":{str(not suspended).lower()}}}}}' in fake.calls()[-1]


@pytest.mark.parametrize(("verb", "suspended"), [("suspend", True), ("resume", False)])
def test_what_is_so_already_is_not_asked_for_again(fake, verb, suspended, capsys):
    fake.answer("get", job({"Ready": ("False", "Suspended", "")}, spec={"suspend": suspended}))
    assert command.main([verb, "math-7b"]) == 0
    assert len(fake.calls()) == 1


@pytest.mark.parametrize("verb", ["suspend", "resume"])
@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_a_job_that_is_over_is_neither_suspended_nor_resumed(fake, verb, end, capsys):
    fake.answer("get", job({end: ("True", "X", "")}))
    assert command.main([verb, "math-7b"]) == 2
    assert f"is over ({end})" in capsys.readouterr().err
    assert len(fake.calls()) == 1


@pytest.mark.parametrize("replicas", ["-1", "two", "1025", "1.5"])
def test_a_number_of_workers_that_cannot_be_is_refused(fake, replicas, capsys):
    with pytest.raises(SystemExit):
        command.main(["scale", "math-7b", "--", replicas])
    assert fake.calls() == []


def test_logs_of_a_part_that_is_not_there_names_those_that_are(fake, capsys):
    fake.answer("rljobs.miles.dev/math-7b", RUNNING)
    fake.answer("pods", {"items": [pod(), pod("trainer")]})
    assert command.main(["logs", "math-7b", "critic"]) == 2
    assert 'no pod or part "critic"; it has rollout, trainer' in capsys.readouterr().err


def test_a_report_takes_place_and_keys_of_the_store_from_the_job(fake):
    given = job(
        spec={"store": {"uri": "s3://b", "endpoint": "http://s3:1", "region": "eu", "secretRef": {"name": "k"}}}
    )
    fake.answer("get", {"data": {"AWS_ACCESS_KEY_ID": "aWQ=", "AWS_SECRET_ACCESS_KEY": "a2V5", "OTHER": "eA=="}})
    found = reports.environment(given, kubectl.Kubectl(), {"HOME": "/h"}, None)
    assert found == {
        "HOME": "/h",
        "AWS_ENDPOINT_URL": "http://s3:1",
        "AWS_ENDPOINT_URL_S3": "http://s3:1",
        "AWS_REGION": "eu",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
    }


def test_the_users_own_keys_and_endpoint_come_first(fake):
    given = job(spec={"store": {"uri": "s3://b", "endpoint": "http://s3:1", "secretRef": {"name": "k"}}})
    own = {"AWS_ACCESS_KEY_ID": "mine"}
    found = reports.environment(given, kubectl.Kubectl(), own, "http://localhost:9")
    assert (found["AWS_ACCESS_KEY_ID"], found["AWS_ENDPOINT_URL"]) == ("mine", "http://localhost:9")
    assert fake.calls() == []


def test_keys_that_may_not_be_read_are_asked_for(fake):
    given = job(spec={"store": {"uri": "s3://b", "secretRef": {"name": "k"}}})
    with pytest.raises(kubectl.Refused, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        reports.environment(given, kubectl.Kubectl(), {}, None)


UNREACHED = {
    "http://s3.storage:8333": "kubectl port-forward -n storage service/s3 8333, and beside that --endpoint http://localhost:8333",
    "http://s3.storage.svc.cluster.local": "port-forward -n storage service/s3 80,",
    "https://s3": "port-forward -n team-a service/s3 443, and beside that --endpoint https://localhost:443",
    "https://s3.eu.example.org": "give --endpoint URL",
    "http://a:b": "is no address",
}  # fmt: skip


@pytest.mark.parametrize(("url", "remedy"), UNREACHED.items(), ids=UNREACHED)
def test_a_store_that_does_not_answer_is_told_at_once_with_what_to_do(url, remedy, monkeypatch):
    def refuse(address, limit_s):
        assert 0 < limit_s <= 5
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(kubectl.Refused, match=re.escape(remedy)):
        reports.reach({"AWS_ENDPOINT_URL_S3": url}, "team-a")


def test_behind_a_proxy_and_without_an_endpoint_the_store_is_asked_by_its_own_client_alone(monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("it was asked"))
    reports.reach({}, "team-a")
    reports.reach({"AWS_ENDPOINT_URL_S3": "https://s3.example.org", "HTTPS_PROXY": "http://proxy:3128"}, "team-a")


def test_a_store_that_takes_connections_is_read():
    with socket.create_server(("127.0.0.1", 0)) as server:
        reports.reach({"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.getsockname()[1]}"}, "team-a")


def test_a_report_waits_for_no_store_that_is_not_there(fake, capsys):
    fake.answer("get", job({}, spec={"store": {"uri": "s3://b", "endpoint": "http://127.0.0.1:1"}}))
    assert command.main(["report", "math-7b"]) == 2
    said = capsys.readouterr().err
    assert "the store does not answer at http://127.0.0.1:1 (Connection refused); " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("reason", conditions.REASONS)
def test_every_reason_of_the_operator_is_trouble_exactly_if_it_warns(reason):
    found = trouble.of(job({"Ready": ("False", reason, "cause")}), NOW)
    assert (found is not None) == (conditions.REASONS[reason].type == "Warning")
    assert found is None or "nothing" not in found.remedy


def test_a_report_is_made_from_the_runs_prefix_in_the_store(fake, tmp_path, monkeypatch, capfd):
    given = job({"Complete": ("True", "Completed", "")}, spec={"store": {"uri": f"file://{tmp_path}/store"}})
    config = configuration(tmp_path).model_dump_json()
    prefix = tmp_path / "store" / "team-a" / "math-7b" / "3f0c" / "attempts"
    prefix.mkdir(parents=True)
    (prefix / "0.json").write_text(config)
    fake.answer("get", given)
    assert command.main(["report", "math-7b", "--output", str(tmp_path / "page.html")]) == 0
    assert "open it in a browser" in capfd.readouterr().out
    assert "sums" in (tmp_path / "page.html").read_text()


def test_a_report_of_a_run_that_has_written_nothing_yet_is_refused_in_one_line(fake, tmp_path, capfd):
    fake.answer("get", job({}, spec={"store": {"uri": f"file://{tmp_path}/store"}}))
    assert command.main(["report", "math-7b"]) == 2
    said = capfd.readouterr().err
    assert "there is no such folder" in said
    assert said.count("\n") == 1


HOSTILE = "\x1b[2J\x1b]0;title\x07 a\u202eb \x9b31m\x01c"


def test_what_others_wrote_moves_no_cursor():
    assert not [
        letter for letter in tables.table([("NAME",), (HOSTILE,)]) if not letter.isprintable() and letter != "\n"
    ]
    assert status.shortened(HOSTILE).isprintable()
    assert causes.shortened(HOSTILE).isprintable()
    assert "a?b" in status.shortened(HOSTILE)
