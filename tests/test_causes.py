"""From pods, Jobs and events to a reason and one line; and the table of reasons."""

import pathlib

import pytest

from operators import causes, conditions
from operators.conditions import REASONS, Fact
from operators.spec.status import CONDITION_TYPES
from tests.situations import NOW, after, ended, pod, waits

README = (pathlib.Path(__file__).parent.parent / "operators" / "README.md").read_text()
OWNER = {
    "kind": "Job",
    "metadata": {"name": "a-trainer-0", "uid": "job-1"},
    "spec": {"suspend": False, "parallelism": 2, "completions": 2, "template": {"metadata": {"labels": {}}}},
}
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def failed(reason: str = "BackoffLimitExceeded") -> dict:
    return OWNER | {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": reason}]}}


def crashed(finished: str, code: int = 1, message: str = "", name: str = "p0", **more) -> dict:
    status = ended(code, message, **more)
    status["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = finished
    return pod(OWNER, name, **status)


def test_pods_that_only_need_time_have_no_cause():
    fresh = {"phase": "Pending", "containerStatuses": []}
    creating = waits("ContainerCreating")
    assert causes.trouble([pod(OWNER, "a", **READY), pod(OWNER, "b", **fresh), pod(OWNER, "c", **creating)]) is None


def test_a_pod_that_is_going_or_gone_has_no_cause():
    going = pod(OWNER, "a", **waits("ErrImagePull"))
    going["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    assert causes.trouble([going, crashed("1")]) is None


def test_the_worst_cause_of_several_pods_is_told_whatever_their_order():
    oom = waits("CrashLoopBackOff", lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    pods = [pod(OWNER, "a", **waits("ErrImagePull")), pod(OWNER, "b", **oom)]
    for order in (pods, pods[::-1]):
        found = causes.trouble(order)
        assert (found.reason, "container vllm of pod b" in found.message) == ("OOMKilled", True)


def test_an_image_that_cannot_be_pulled_is_told_the_same_in_back_off():
    text = "failed to pull: not found"
    one = causes.trouble([pod(OWNER, "a", **waits("ErrImagePull", text))])
    other = causes.trouble(
        [pod(OWNER, "a", **waits("ImagePullBackOff", f'Back-off pulling "m": ErrImagePull: {text}'))]
    )
    assert one == other
    assert "miles:1" in one.message and "not found" in one.message


def test_init_containers_count():
    status = {
        "phase": "Pending",
        "initContainerStatuses": waits("ErrImagePull", container="fetch")["containerStatuses"],
    }
    assert "container fetch" in causes.trouble([pod(OWNER, "a", **status)]).message


def test_a_crash_is_told_with_its_last_lines_and_a_refusal_with_its_first():
    lines = "\n".join(f"line {number}" for number in range(9))
    assert causes.end(failed(), [crashed("1", 1, lines)], NOW).cause.message.endswith("line 6 | line 7 | line 8")
    assert causes.end(failed(), [crashed("1", 3, lines)], NOW).cause.message.endswith("exit 3: line 0")


def test_a_container_that_recovered_is_no_trouble():
    fine = {"name": "vllm", "ready": True, "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}}}
    assert causes.trouble([pod(OWNER, "a", phase="Running", containerStatuses=[fine])]) is None


def test_messages_are_bounded():
    assert len(causes.end(failed(), [crashed("1", 1, "x" * 5000)], NOW).cause.message) <= causes.LONGEST_MESSAGE


# Ends


def test_a_job_that_runs_has_no_end():
    assert causes.end(OWNER, [pod(OWNER, **READY)], NOW) is None


def test_the_pod_that_failed_first_is_to_blame():
    pods = [
        crashed("2026-01-01T12:00:05Z", 1, "peer is gone", "p0"),
        crashed("2026-01-01T12:00:01Z", 1, "broken", "p1"),
    ]
    assert "pod p1" in causes.end(failed(), pods, NOW).cause.message


CLOSED = "[rank 1] RuntimeError: [gloo] Connection closed by peer [10.0.0.4]:9"


def removed(found: dict, seconds: int) -> dict:
    """Somebody asked the pod to go at this second; it had 40 s."""
    later = {"deletionTimestamp": f"2026-01-01T12:00:{40 + seconds}Z", "deletionGracePeriodSeconds": 40}
    return found | {"metadata": found["metadata"] | later}


def test_what_ranks_say_of_a_peer_that_is_gone_is_no_cause_where_there_is_another():
    peer = crashed("2026-01-01T12:00:01Z", 1, CLOSED, "p0")
    killed = crashed("2026-01-01T12:00:02Z", 137, "", "p1", reason="OOMKilled")
    assert causes.end(failed(), [peer, killed], NOW).cause.reason == "OOMKilled"
    assert CLOSED in causes.end(failed(), [peer], NOW).cause.message


def test_a_pod_that_ends_because_its_job_has_failed_is_not_to_blame():
    first = crashed("2026-01-01T12:00:05Z", 1, "broken", "p1")
    peer = removed(crashed("2026-01-01T12:00:05Z", 143, "", "p0"), 5)
    assert "pod p1, exit 1: broken" in causes.end(failed(), [peer, first], NOW).cause.message


@pytest.mark.parametrize("peer", [None, crashed("2026-01-01T12:00:05Z", 1, CLOSED, "p0")], ids=["alone", "with a peer"])
def test_a_pod_that_somebody_removed_has_not_failed(peer):
    gone = removed(crashed("2026-01-01T12:00:05Z", 143, "", "p1"), 3)
    found = causes.end(failed(), [gone, *filter(None, [peer])], NOW)
    assert (found.kind, found.cause.message) == ("disruption", "pod p1 was removed")


def test_a_pod_that_was_removed_after_it_had_failed_has_failed():
    assert causes.end(failed(), [removed(crashed("2026-01-01T12:00:02Z"), 3)], NOW).kind == "failure"


ENDS = {
    "refused before a crash of its peers": (["3", "1"], [], "refused"),
    "refused although another was evicted": (["3"], ["evicted"], "refused"),
    "evicted although others crashed first": (["1"], ["evicted"], "disruption"),
    "fenced": (["5", "1"], [], "disruption"),
    "stopped": (["4", "1"], [], "stopped"),
    "stopped too late": (["late"], [], "stopped"),
    "failed": (["1"], [], "failure"),
    "killed": (["137"], [], "failure"),
    "gone": ([], [], "disruption"),
}


@pytest.mark.parametrize(("codes", "others", "kind"), ENDS.values(), ids=ENDS.keys())
def test_how_it_ended(codes, others, kind):
    pods = [
        crashed(f"2026-01-01T12:00:0{number}Z", 1 if code == "late" else int(code), "asked to stop, but", f"p{number}")
        if code == "late"
        else crashed(f"2026-01-01T12:00:0{number}Z", int(code), "text", f"p{number}")
        for number, code in enumerate(reversed(codes))
    ]
    if others:
        evicted = pod(OWNER, "z", phase="Failed", conditions=[{"type": "DisruptionTarget", "status": "True"}])
        pods.append(evicted)
    assert causes.end(failed(), pods, NOW).kind == kind


def test_out_of_memory_names_the_container():
    found = causes.end(failed(), [crashed("1", 137, reason="OOMKilled")], NOW).cause
    assert found.reason == "OOMKilled"
    assert "container trainer of pod p0" in found.message


def test_a_pod_is_lost_a_minute_after_its_grace():
    gone = pod(OWNER, **READY)
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    assert causes.end(OWNER, [gone], after(59)) is None
    assert causes.end(OWNER, [gone], after(61)).kind == "disruption"


@pytest.mark.parametrize("change", [{"suspend": True}, {"parallelism": 0}])
def test_a_job_that_somebody_changed_has_ended(change):
    assert causes.end(OWNER | {"spec": OWNER["spec"] | change}, [], NOW).kind == "disruption"


def test_a_deployment_tells_its_own_refusal():
    text = 'pods "x-1" is forbidden: exceeded quota: q, requested: a=1,b=2, used: a=3,b=4, limited: a=3,b=5'
    owner = {"metadata": {"uid": "d"}, "status": {"conditions": [{"type": "ReplicaFailure", "status": "True"}]}}
    owner["status"]["conditions"][0]["message"] = text
    found = causes.refusal(owner, [])
    assert found == causes.Cause("QuotaExceeded", "exceeded quota: q, requested: a=1,b=2, limited: a=3,b=5")


def test_the_newest_refusal_of_that_very_owner_counts():
    def event(uid, message):
        return {"reason": "FailedCreate", "message": message, "involvedObject": {"uid": uid}}

    said = [event("job-1", "old"), event("other", "not ours"), event("job-1", "new")]
    assert causes.refusal(OWNER, said).message == "new"
    assert causes.refusal(OWNER, said[1:2]) is None


# Conditions and reasons


def test_the_documentation_has_every_reason():
    for name, reason in REASONS.items():
        assert f"| {name} | {reason.meaning} | {reason.remedy} |" in README


def test_warnings_tell_what_to_do():
    assert all(reason.remedy != "nothing" for reason in REASONS.values() if reason.type == "Warning")


def test_every_cause_is_a_known_reason():
    assert set(causes.TROUBLES) <= set(REASONS)


def test_conditions_keep_their_transition_time_and_their_order():
    facts = dict.fromkeys(reversed(CONDITION_TYPES), Fact("False", "Starting"))
    first = conditions.assemble([], facts, 1, NOW)
    later = conditions.assemble(first, facts | {"Ready": Fact("False", "OOMKilled")}, 2, after(60))
    assert [entry.type for entry in later] == list(CONDITION_TYPES)
    assert {entry.last_transition_time for entry in later} == {"2026-01-01T12:00:00Z"}
    assert {entry.observed_generation for entry in later} == {2}
    turned = conditions.assemble(later, facts | {"Ready": Fact("True", "Training")}, 2, after(90))
    assert turned[0].last_transition_time == "2026-01-01T12:01:30Z"
