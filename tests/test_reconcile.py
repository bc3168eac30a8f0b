"""What the reconciler decides, state by state; `tests.test_reconcile_chaos` has all of them in any order."""

import copy

import pytest

from operators.conditions import CONDITION_TYPES, timestamp
from operators.observed import Key, Plan
from operators.reconcile import STANDS
from operators.spec.status import RLJobStatus
from tests.situations import NOW, Story, after, at, pod, rljob, waits

DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drain"}
LIMITS = {"maxRestarts": 2}


@pytest.fixture
def story() -> Story:
    """A job that trains: one step is done."""
    return training()


def training(**spec) -> Story:
    story = Story(**spec)
    story.look()
    story.train()
    return story


def names(plan: Plan) -> set[tuple[str, str]]:
    return {(child["kind"], child["metadata"]["name"]) for child in plan.apply}


def is_empty(plan: Plan) -> bool:
    done = (plan.apply, plan.delete, plan.events)
    return not any(done) and (plan.pause, plan.delete_job, plan.status, plan.again) == (False, False, None, None)


# How long a plan stands


def test_a_plan_stands_for_a_minute_at_most_and_until_a_limit_of_the_policy_passes():
    story = training(runPolicy={"progressDeadlineSeconds": 100})
    first = story.look()
    assert first.stands == STANDS
    assert story.look(75).stands.total_seconds() == pytest.approx(25, abs=1)
    assert story.look(25).stands.total_seconds() == 0


def leaves(story):
    story.pods[0]["metadata"]["deletionTimestamp"] = timestamp(story.now)


@pytest.mark.parametrize(
    "unsettle",
    [
        leaves,
        lambda story: story.report.update(step=2),
        lambda story: story.edit(suspend=True),
        lambda story: story.refused.update({Key("Service", "x"): "quota"}),
        lambda story: story.children.pop(("Job", "arithmetic-trainer-0")),
    ],
    ids=["a pod leaves", "a step waits to be told", "suspended", "a child is refused", "the trainer's Job is gone"],
)
def test_a_plan_does_not_stand_where_time_or_the_server_itself_may_tell_more(unsettle):
    story = training()
    assert story.look().stands
    unsettle(story)
    for _ in range(2):
        assert not story.look().stands


# Creation


def test_a_new_job_gets_all_children_and_all_conditions_in_the_first_pass():
    story = Story()
    plan = story.look()
    assert {kind for kind, _ in names(plan)} == {
        *("NetworkPolicy", "PodDisruptionBudget", "ConfigMap", "Deployment", "Service", "Job"),
    }
    assert plan.apply[-1]["kind"] == "Job"
    assert [entry["type"] for entry in story.status["conditions"]] == list(CONDITION_TYPES)
    assert story.condition("Ready") == ("False", "Starting")
    assert story.status["phase"] == "Pending"
    assert story.told == [("Normal", "Starting")]


def test_a_job_that_trains_stored_samples_is_ready_without_workers_and_its_limits_run():
    story = training(data={"replayFrom": {"uri": "s3://team-a/miles/default/a/1"}})
    assert {kind for kind, _ in story.children} == {"NetworkPolicy", "ConfigMap", "Service", "Job"}
    assert story.condition("RolloutReady") == ("True", "NothingGenerated")
    assert story.condition("Ready") == ("True", "Training")
    assert story.status["rollout"]["summary"] == "0/0"
    story.look(4000)
    assert story.condition("Failed") == ("True", "NoProgress")


def test_the_first_step_makes_it_ready(story):
    assert story.condition("Ready") == ("True", "Training")
    assert story.condition("Reconciling") == ("False", "AsSpecified")
    assert story.status["phase"] == "Running"
    assert story.status["training"]["progress"] == "1/200"
    assert story.told[-1] == ("Normal", "Training")


def test_an_unchanged_job_gets_no_writes_and_no_events_in_ten_passes(story):
    for _ in range(10):
        plan = story.look(1)
        assert (plan.apply, plan.delete, plan.status, plan.events, plan.pause) == ([], [], None, [], False)


def test_why_groups_are_dropped_is_told_while_no_step_is_finished():
    story = Story()
    story.look()
    story.run_trainer()
    story.run_workers(1)
    story.report = {"phase": "waiting", "step": 0, "losses": "invalid: reward a: KeyError: 'answer'"}
    story.look(20)
    assert story.condition("Ready") == ("False", "Starting")
    assert story.entry("Ready")["message"].endswith("dropped groups are invalid: reward a: KeyError: 'answer'")


def test_progress_is_written_at_most_every_ten_seconds(story):
    story.report = {"phase": "training", "step": 2}
    assert story.look(3).status is None
    assert story.look(8).status["training"]["step"] == 2


def test_a_trainer_that_loads_its_checkpoint_does_not_take_progress_back(story):
    story.report = {"phase": "starting", "step": 0}
    story.look(20)
    assert story.status["training"]["step"] == 1


def test_numbers_of_the_report_become_metrics_and_a_checkpoint(story):
    story.report = {
        "phase": "training",
        "step": 2,
        "version": [3, 2],
        "eta_s": 61.7,
        "checkpoint_step": 2,
        "store": {"bytes": 5 << 30, "objects": 12},
        "reward_mean": 0.25,
        "reward": {"correct": 0.5},
        "tokens_per_s": {"trained": 13000.0, "generated": None},
        "waits": {"trainer": 0.03, "rollout": 0.125, "steps": 5},
        "evaluation": {"aime": {"avg@16": 0.21, "step": 2}},
    }
    story.look(20)
    told = {metric["name"]: metric["value"] for metric in story.status["metrics"]}
    assert told == {
        "reward/mean": "0.25",
        "tokens_per_s/trained": "13000",
        "waits/trainer": "0.03",
        "waits/rollout": "0.125",
        "reward/correct": "0.5",
        "evaluation/aime/avg@16": "0.21",
    }
    assert story.status["training"]["policyVersion"] == "t3-s2"
    assert story.status["training"]["etaSeconds"] == 61
    assert story.status["store"] == {"bytes": 5 << 30, "objects": 12}
    assert story.status["lastCheckpoint"]["step"] == 2
    assert story.status["lastCheckpoint"]["uri"].startswith("s3://team-a/miles/default/arithmetic/")


@pytest.mark.parametrize("told", [None, {}, {"bytes": 9}])
def test_what_the_store_held_stands_until_the_trainer_has_counted_again(story, told):
    story.report = {"phase": "training", "step": 2, "store": {"bytes": 300, "objects": 3}}
    story.look(20)
    story.report = {"phase": "training", "step": 3, "store": told}
    story.look(20)
    assert (story.status["training"]["step"], story.status["store"]) == (3, {"bytes": 300, "objects": 3})


def test_the_course_of_the_reward_has_one_entry_for_each_part_of_the_run(story):
    for step in range(1, 201):
        story.report = {"phase": "training", "step": step, "reward_mean": step / 200}
        story.look(20)
    rewards = [float(value) for value in story.status["training"]["rewards"]]
    assert len(rewards) == 16
    assert rewards == sorted(rewards)
    assert rewards[-1] == 1.0
    story.report = {"phase": "training", "step": 200}
    story.look(20)
    assert len(story.status["training"]["rewards"]) == 16


def test_every_status_key_is_in_the_schema(story):
    RLJobStatus.model_validate(story.status)


def test_the_observed_generation_follows_every_edit(story):
    story.edit(rollout={"replicas": 3})
    story.look()
    assert story.status["observedGeneration"] == 2
    assert {entry["observedGeneration"] for entry in story.status["conditions"]} == {2}


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"),
        lambda job: job["spec"].update(managedBy="example.org/other"),
    ],
    ids=["being deleted", "managed by another controller"],
)
def test_a_job_that_is_not_ours_gets_an_empty_plan(change):
    job = rljob()
    change(job)
    assert at(NOW, job) == Plan()


def test_a_job_that_names_us_as_its_manager_is_ours():
    assert at(NOW, rljob(managedBy="miles.dev/operator")).apply


# Drift


@pytest.mark.parametrize("kind", ["NetworkPolicy", "PodDisruptionBudget", "ConfigMap", "Deployment", "Service"])
def test_a_child_that_was_deleted_comes_back(story, kind):
    gone = {key for key in story.children if key[0] == kind}
    for key in gone:
        del story.children[key]
    assert names(story.look()) == gone


def test_a_child_that_was_changed_is_repaired(story):
    story.workers()["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    assert names(story.look()) == {("Deployment", "arithmetic-rollout")}


def test_fields_of_others_are_left_alone(story):
    story.workers()["metadata"]["annotations"]["example.org/cost"] = "42"
    story.workers()["spec"]["paused"] = False
    assert not story.look().apply


def test_a_trainer_job_that_was_deleted_is_made_again_when_its_pods_are_gone(story):
    del story.children["Job", "arithmetic-trainer-0"]
    assert not story.look().apply
    story.pods = []
    assert names(story.look()) == {("Job", "arithmetic-trainer-0")}
    assert story.status["restarts"] == 0


def test_orphaned_pods_of_the_trainer_are_removed(story):
    del story.children["Job", "arithmetic-trainer-0"]
    story.pods[0]["metadata"]["ownerReferences"] = []
    story.look()
    assert story.deleted == [("Pod", "arithmetic-trainer-0-0")]


def test_a_trainer_job_that_somebody_suspended_is_replaced(story):
    story.trainer()["spec"]["suspend"] = True
    story.look()
    assert (story.status["attempt"]["number"], story.status["attempt"]["cause"]) == (1, "Disruption")


def test_the_server_of_a_removed_reward_is_deleted():
    model = {"name": "helpful", "model": {"uri": "s3://models/rm"}}
    story = training(rewards=[model, {"name": "sums", "library": "generator"}])
    story.edit(rewards=[{"name": "sums", "library": "generator"}])
    story.look()
    gone = {("Deployment", "arithmetic-reward-helpful"), ("Service", "arithmetic-reward-helpful")}
    assert gone <= set(story.deleted)


# Names that others hold


def test_a_name_held_by_another_is_told_and_nothing_is_applied():
    story = Story()
    story.foreign = frozenset({Key("Service", "arithmetic-trainer")})
    plan = story.look()
    assert not plan.apply
    assert story.condition("Ready") == ("False", "NameConflict")
    assert story.condition("Stalled") == ("True", "NameConflict")
    assert "Service arithmetic-trainer" in story.entry("Ready")["message"]
    story.foreign = frozenset()
    assert len(story.look().apply) == 7
    assert story.condition("Stalled")[0] == "False"


# Children that the API server refuses


QUOTA = 'jobs.batch "j" is forbidden: exceeded quota: q, requested: count/jobs.batch=1, used: count/jobs.batch=2'


def test_a_trainers_job_that_is_refused_is_told_and_tried_again_until_the_start_up_deadline():
    story = Story(runPolicy={"startupDeadlineSeconds": 300})
    story.refused = {Key("Job", "arithmetic-trainer-0"): QUOTA}
    story.look()
    story.look(1)
    assert story.condition("Ready") == ("False", "QuotaExceeded")
    assert story.condition("TrainerReady") == ("False", "QuotaExceeded")
    assert "exceeded quota: q" in story.entry("Ready")["message"]
    assert [child["kind"] for child in story.look(10).apply] == ["Job"]
    assert story.told.count(("Warning", "QuotaExceeded")) == 1
    story.look(300)
    assert story.condition("Failed") == ("True", "StartupDeadlineExceeded")
    assert "exceeded quota: q" in story.entry("Failed")["message"]


def test_an_edit_that_the_api_server_refuses_is_told_while_training_goes_on():
    story = training()
    story.edit(rollout={"resources": {"limits": {"memory": "1Gi"}}})
    story.refused = {Key("Deployment", "arithmetic-rollout"): "Deployment is invalid: spec.x: Invalid value"}
    story.look()
    assert story.condition("Ready") == ("False", "CreateFailed")
    assert story.condition("TrainerReady") == ("True", "PodsReady")
    assert story.condition("Failed")[0] == "False"
    story.refused = {}
    story.look()
    story.look()
    assert story.condition("Ready")[1] != "CreateFailed"


def test_a_label_of_the_trainers_job_that_is_no_number_costs_that_job_and_not_the_attempt():
    story = training()
    (job,) = (child for child in story.children.values() if child["kind"] == "Job")
    job["metadata"]["labels"] = job["metadata"]["labels"] | {"miles.dev/attempt": "boom"}
    plan = story.look()
    assert plan.status is None or plan.status["attempt"]["number"] == 0


# Invalid specs


INVALID = {
    "a rule": ({"algorithm": {"type": "grpo", "totalSteps": 2, "groupSize": 1}}, "groupSize"),
    "a condition": (
        {"data": {"replayFrom": {"uri": "s3://team-a/miles/a", "where": "reword > 1"}}},
        "no column reword",
    ),
    "no cluster": ({"store": {"uri": "file:///tmp/store"}}, "pods share no folder"),
}


@pytest.mark.parametrize(("spec", "text"), INVALID.values(), ids=INVALID.keys())
def test_an_invalid_spec_is_told_and_starts_nothing(spec, text):
    story = Story(**spec)
    plan = story.look()
    assert not plan.apply
    assert story.condition("Stalled") == ("True", "InvalidSpec")
    assert text in story.entry("Ready")["message"]
    assert story.told == [("Warning", "InvalidSpec")]
    assert is_empty(story.look())


def test_a_running_job_whose_spec_became_invalid_is_left_alone_and_goes_on_once_mended(story):
    good = copy.deepcopy(story.job["spec"])
    story.edit(algorithm={"type": "grpo", "totalSteps": 200, "groupSize": 1})
    plan = story.look()
    assert (plan.apply, plan.delete) == ((), ())
    assert story.status["phase"] == "Running"
    story.edit(**good)
    story.look()
    assert story.condition("Stalled")[0] == "False"
    assert story.condition("Ready") == ("True", "Training")


# The trainer fails


def test_a_failure_is_counted_before_anything_is_deleted(story):
    story.end_trainer(message="RuntimeError: broken")
    plan = story.look()
    assert (plan.apply, plan.delete) == ((), ())
    assert plan.status["attempt"] | {"time": 0, "config": 0} == {
        "number": 1,
        "cause": "Failure",
        "message": "TrainerFailed: container trainer of pod arithmetic-trainer-0-0, exit 1: RuntimeError: broken",
        "notBefore": "2026-01-01T12:00:40Z",
        "time": 0,
        "config": 0,
    }
    assert plan.status["restarts"] == 1
    assert story.condition("Ready") == ("False", "BackOff")
    assert story.status["phase"] == "Restarting"
    assert story.told[-1] == ("Warning", "BackOff")


def test_the_next_attempt_waits_for_the_pods_of_the_last_and_for_its_back_off(story):
    story.end_trainer()
    story.look()
    story.pods = [pod(story.trainer(), phase="Running", conditions=[])]
    story.look(1)
    assert story.deleted == [("Job", "arithmetic-trainer-0")]
    assert not any(kind == "Job" for kind, _ in names(story.look(60)))
    story.pods = []
    assert ("Job", "arithmetic-trainer-1") in names(story.look())


def test_the_back_off_is_waited_out(story):
    story.end_trainer()
    story.look()
    story.pods = []
    plan = story.look(4)
    assert not any(kind == "Job" for kind, _ in names(plan))
    assert story.look().again.total_seconds() == 6
    assert ("Job", "arithmetic-trainer-1") in names(story.look(6))


def test_pods_of_a_lost_node_do_not_hold_up_the_next_attempt(story):
    story.end_trainer()
    story.look()
    left = story.run_trainer()
    left["metadata"]["deletionTimestamp"] = "2026-01-01T12:01:00Z"
    story.look(60)
    assert not any(kind == "Job" for kind, _ in names(story.look(20)))
    assert ("Job", "arithmetic-trainer-1") in names(story.look(60))


@pytest.mark.parametrize(("failures", "pause"), [(1, 10), (2, 20), (3, 40), (6, 300), (20, 300)])
def test_pauses_double_up_to_five_minutes(failures, pause):
    story = training(runPolicy={"maxRestarts": 100})
    story.status["restarts"] = failures - 1
    story.end_trainer()
    assert story.look().status["attempt"]["notBefore"] == after(30 + pause).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_more_failures_than_max_restarts_end_the_job():
    story = training(runPolicy=LIMITS)
    for attempt in range(3):
        story.end_trainer(attempt, message="broken")
        story.look(1000)
        story.pods = []
        story.look()
        story.look(1000)
    assert story.status["restarts"] == 2
    assert story.condition("Failed") == ("True", "MaxRestartsExceeded")
    assert "broken" in story.entry("Failed")["message"]
    assert story.workers()["spec"]["replicas"] == 0


@pytest.mark.parametrize("reason", ["evicted", "policy", "fenced", "gone"])
def test_a_disruption_is_not_counted_as_a_failure(story, reason):
    story.end_trainer(code=5 if reason == "fenced" else 143, message="a higher term has taken over")
    if reason == "evicted":
        story.pods[0]["status"]["conditions"] = [DISRUPTED]
    elif reason == "policy":
        story.trainer()["status"]["conditions"][0]["reason"] = "PodFailurePolicy"
    elif reason == "gone":
        story.pods = []
    story.look()
    assert (story.status["restarts"], story.status["disruptions"]) == (0, 1)
    assert story.status["attempt"]["cause"] == "Disruption"
    assert story.told[-1] == ("Warning", "Preempted")


def test_a_pod_lost_with_its_node_starts_a_new_attempt_although_its_job_has_not_failed(story):
    story.pods[0]["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:30Z"
    assert story.look(50).status is None or story.status["attempt"]["number"] == 0
    story.look(60)
    assert story.status["attempt"]["cause"] == "Disruption"
    assert "node-1" in story.status["attempt"]["message"]


REFUSALS = {
    "InvalidConfiguration": "model.uri: there is no such model",
    "TrainerFailed": "[rank 0] the gradient was not finite in 5 steps",
    "CheckpointNotFound": "checkpoint.resumeFrom: s3://b/run holds no checkpoint",
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_trying_again_cannot_mend_fails_the_job_at_once(story, reason):
    story.end_trainer(code=3, message=REFUSALS[reason])
    story.look()
    assert story.condition("Failed") == ("True", reason)
    assert REFUSALS[reason] in story.entry("Failed")["message"]
    assert story.told[-1] == ("Warning", reason)
    assert story.status["restarts"] == 0


def test_a_store_that_does_not_answer_is_tried_again(story):
    story.end_trainer(code=1, message="PUT s3://team-a/miles/run.json failed for 30 s: 503")
    story.look()
    assert story.condition("StoreReady") == ("False", "StoreUnavailable")
    assert story.status["attempt"]["cause"] == "Failure"


def test_the_status_knows_no_attempt_but_a_job_does(story):
    story.end_trainer()
    story.look()
    story.pods = []
    story.look(60)
    story.look()
    del story.job["status"]
    story.look()
    assert story.status["attempt"]["number"] == 1


# The end


def complete(story: Story) -> None:
    story.trainer()["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    story.run_trainer(phase="Succeeded", conditions=[])


def test_a_complete_job_tells_of_its_last_step_even_if_nobody_asked_in_time() -> None:
    story = Story()
    story.look()
    story.train(step=198)
    story.report = {"phase": "complete", "step": 200, "version": [1, 200], "reward_mean": 0.9, "checkpoint_step": 200}
    complete(story)
    story.look(1)
    training = story.status["training"]
    assert (training["progress"], training["policyVersion"]) == ("200/200", "t1-s200")
    assert story.status["lastCheckpoint"]["step"] == 200
    assert {"name": "reward/mean", "value": "0.9"} in story.status["metrics"]


def test_completion_is_written_first_then_workers_go(story):
    complete(story)
    plan = story.look()
    assert (plan.apply, plan.delete) == ((), ())
    assert story.condition("Complete") == ("True", "Completed")
    assert story.status["training"]["step"] == 200
    assert story.status["phase"] == "Complete"
    assert names(story.look()) == {("Deployment", "arithmetic-rollout")}
    assert story.workers()["spec"]["replicas"] == 0
    story.run_workers(0)
    story.look()
    assert is_empty(story.look())


def test_a_finished_job_makes_nothing_again_and_stays_finished(story):
    complete(story)
    story.look()
    story.look()
    story.children.clear()
    story.run_trainer = None
    story.pods = []
    story.edit(algorithm={"type": "grpo", "totalSteps": 300}, suspend=True)
    plan = story.look()
    assert (plan.apply, plan.delete) == ([], [])
    assert story.condition("Complete") == ("True", "Completed")


def test_cleanup_none_leaves_the_workers():
    story = training(runPolicy={"cleanup": "None"})
    complete(story)
    story.look()
    assert not story.look().apply


def test_a_finished_job_is_deleted_after_its_time_to_live():
    story = training(runPolicy={"ttlSecondsAfterFinished": 3600})
    complete(story)
    story.look()
    story.look()
    story.run_workers(0)
    story.look()
    assert story.look().again.total_seconds() == 3600
    assert story.look(3600) == Plan(delete_job=True)


# Deadlines


DEADLINES = {
    "DeadlineExceeded": ({"activeDeadlineSeconds": 100}, 75, True),
    "NoProgress": ({"progressDeadlineSeconds": 60}, 61, True),
    "StartupDeadlineExceeded": ({"startupDeadlineSeconds": 60}, 61, False),
}


@pytest.mark.parametrize("reason", DEADLINES)
def test_a_deadline_fails_the_job_and_stops_the_trainer(reason):
    policy, seconds, stepped = DEADLINES[reason]
    story = training(runPolicy=policy) if stepped else Story(runPolicy=policy)
    if not stepped:
        story.look()
        story.run_trainer()
    story.look(seconds - 5)
    assert story.condition("Failed")[0] == "False"
    story.look(5)
    assert story.condition("Failed") == ("True", reason)
    assert story.told[-1] == ("Warning", reason)
    story.look()
    assert ("Job", "arithmetic-trainer-0") in story.deleted
    assert story.workers()["spec"]["replicas"] == 0


def test_time_spent_suspended_counts_towards_no_deadline():
    story = training(runPolicy={"activeDeadlineSeconds": 100, "progressDeadlineSeconds": 60})
    story.edit(suspend=True)
    story.look()
    story.look(100)
    story.pods = []
    story.look(1000)
    story.edit(suspend=False)
    story.look()
    story.look()
    assert story.condition("Failed")[0] == "False"
    assert story.status["suspendedSeconds"] == 1100


@pytest.mark.parametrize("stepped", [True, False])
def test_the_limits_of_progress_do_not_run_while_there_are_to_be_no_workers(stepped):
    limits = {"startupDeadlineSeconds": 60, "progressDeadlineSeconds": 60}
    story = training(runPolicy=limits) if stepped else Story(runPolicy=limits)
    story.look()
    story.edit(rollout={"replicas": 0})
    story.run_workers(0)
    for _ in range(3):
        story.look(1000)
    assert story.condition("Ready") == ("False", "ScaledToZero")
    assert story.condition("RolloutReady") == ("False", "ScaledToZero")
    assert story.look(1).status is None
    story.edit(rollout={"replicas": 2})
    story.look(1000)
    story.look(55)
    assert story.condition("Failed")[0] == "False"
    story.look(10)
    assert story.condition("Failed") == ("True", "NoProgress" if stepped else "StartupDeadlineExceeded")


def test_the_limit_of_the_whole_job_runs_without_workers_too():
    story = training(runPolicy={"activeDeadlineSeconds": 100})
    story.edit(rollout={"replicas": 0})
    story.look(101)
    assert story.condition("Failed") == ("True", "DeadlineExceeded")


# Suspension


def test_a_suspended_job_checkpoints_first_then_loses_all_pods(story):
    story.edit(suspend=True)
    plan = story.look()
    assert plan.pause
    assert story.workers()["spec"]["replicas"] == 0
    assert not story.deleted
    assert story.condition("Ready") == ("False", "Suspending")
    story.end_trainer(code=4, message="[rank 0] stopped on request: checkpoint t1-s1 is written")
    plan = story.look(5)
    assert not plan.pause
    assert story.deleted == [("Job", "arithmetic-trainer-0")]
    story.pods = []
    story.run_workers(0)
    story.look()
    assert story.condition("Suspended") == ("True", "Suspended")
    assert story.condition("Ready") == ("False", "Suspended")
    assert story.status["phase"] == "Suspended"
    assert story.status["restarts"] == 0
    assert is_empty(story.look())


def test_a_trainer_that_does_not_stop_is_deleted_after_its_grace(story):
    story.edit(suspend=True)
    story.look()
    story.look(54)
    assert not story.deleted
    story.look(2)
    assert story.deleted == [("Job", "arithmetic-trainer-0")]


def test_suspended_means_that_every_pod_is_gone(story):
    story.edit(suspend=True)
    story.look()
    worker = pod(story.workers(), "worker", phase="Running")
    story.look(60)
    story.pods = [worker]
    story.look()
    assert story.condition("Suspended") == ("False", "Suspending")


def test_suspended_waits_for_pods_of_the_trainer_that_have_ended(story):
    story.edit(suspend=True)
    story.look()
    story.end_trainer(code=4, message="[rank 0] stopped on request")
    story.look(5)
    story.look()
    assert story.condition("Suspended") == ("False", "Suspending")
    evicted = pod(story.workers(), "worker", phase="Failed")
    story.pods = [evicted]
    story.look()
    assert story.condition("Suspended") == ("True", "Suspended")


def test_a_resumed_job_begins_a_new_attempt_that_is_not_counted(story):
    test_a_suspended_job_checkpoints_first_then_loses_all_pods(story)
    story.edit(suspend=False)
    story.look()
    assert (story.status["attempt"]["number"], story.status["attempt"]["cause"]) == (1, "Resumed")
    assert ("Job", "arithmetic-trainer-1") in names(story.look())
    assert story.workers()["spec"]["replicas"] == 1
    assert story.condition("Suspended") == ("False", "NotSuspended")


def test_a_job_created_suspended_has_no_pods_and_starts_with_attempt_0():
    story = Story(suspend=True)
    plan = story.look()
    assert "Job" not in {kind for kind, _ in names(plan)}
    assert story.workers()["spec"]["replicas"] == 0
    assert story.condition("Suspended") == ("False", "Suspending") or story.condition("Suspended")[0] == "True"
    story.look()
    assert story.condition("Suspended")[0] == "True"
    story.edit(suspend=False)
    story.look(10)
    assert ("Job", "arithmetic-trainer-0") in names(story.look())


def test_a_failure_before_the_suspension_is_still_counted(story):
    story.end_trainer(message="broken")
    story.edit(suspend=True)
    story.look()
    assert (story.status["restarts"], story.status["attempt"]["cause"]) == (1, "Failure")


# Edits


def test_a_live_edit_changes_the_deployment_only(story):
    story.edit(rollout={"replicas": 3})
    plan = story.look()
    assert names(plan) == {("Deployment", "arithmetic-rollout")}
    assert not plan.pause
    assert story.status["attempt"]["number"] == 0
    assert story.status["rollout"]["summary"] == "1/3"


def test_an_edit_of_the_trainer_checkpoints_then_begins_a_new_attempt(story):
    story.edit(algorithm={"type": "grpo", "totalSteps": 200, "learningRate": "2e-6"})
    plan = story.look()
    assert plan.pause
    assert not plan.delete
    assert story.condition("Ready") == ("False", "Editing")
    story.end_trainer(code=4, message="[rank 0] stopped on request")
    story.look()
    assert (story.status["attempt"]["number"], story.status["attempt"]["cause"]) == (1, "Edit")
    assert story.status["restarts"] == 0
    story.look()
    story.pods = []
    assert ("Job", "arithmetic-trainer-1") in names(story.look())
    story.run_trainer(1)
    assert not story.look(1).pause


def test_an_edit_that_is_taken_back_ends_the_pause(story):
    story.edit(algorithm={"type": "grpo", "totalSteps": 300})
    story.look()
    story.edit(algorithm={"type": "grpo", "totalSteps": 200})
    assert not story.look().pause
    assert "pauseTime" not in story.status["attempt"]


def test_a_trainer_that_does_not_run_yet_is_replaced_at_once_by_an_edit():
    story = Story()
    story.look()
    story.run_trainer(**waits("ImagePullBackOff", container="trainer"))
    story.edit(trainer={"image": "registry/right:1"})
    assert not story.look().pause
    assert story.status["attempt"]["cause"] == "Edit"


# Pods that do not run


TROUBLES = {
    "ImagePullFailed": waits("ErrImagePull", "not found"),
    "ConfigError": waits("CreateContainerConfigError", 'secret "s3" not found'),
    "OOMKilled": waits(
        "CrashLoopBackOff", lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, restartCount=2
    ),
    "CrashLoop": waits("CrashLoopBackOff", lastState={"terminated": {"exitCode": 1, "message": "no device"}}),
    "Unschedulable": {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no gpu"}
        ],
    },
}


@pytest.mark.parametrize("reason", TROUBLES)
@pytest.mark.parametrize("part", ["workers", "trainer"])
def test_the_cause_is_the_reason_of_ready_and_of_its_part(reason, part):
    story = Story()
    story.look()
    if part == "workers":
        story.run_trainer()
        story.pods.append(pod(story.workers(), "worker-0", **TROUBLES[reason]))
    else:
        story.run_trainer(**TROUBLES[reason])
        story.run_workers(1)
    story.look()
    assert story.condition("Ready") == ("False", reason)
    assert story.condition("RolloutReady" if part == "workers" else "TrainerReady") == ("False", reason)
    assert story.told[-1] == ("Warning", reason)
    assert story.entry("Ready")["message"]
    assert story.condition("Failed")[0] == "False"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('Error creating: pods "a-x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4',
         "QuotaExceeded"),
        ('Error creating: pods "a-y" is forbidden: violates PodSecurity "restricted"', "CreateFailed"),
    ],
)  # fmt: skip
def test_pods_that_cannot_be_created_are_told(message, reason):
    story = Story()
    story.look()
    story.run_workers(1)
    uid = story.trainer()["metadata"]["uid"]
    story.events = [{"reason": "FailedCreate", "message": message, "involvedObject": {"uid": uid}}]
    story.look()
    assert story.condition("TrainerReady") == ("False", reason)
    assert "a-x" not in story.entry("TrainerReady")["message"]
    story.run_trainer()
    story.look()
    assert story.condition("TrainerReady")[0] == "True"


@pytest.mark.parametrize(
    ("state", "told", "message"),
    [
        ({}, "WaitingForPods", "1 of 4 workers are ready, enough to begin with"),
        (TROUBLES["CrashLoop"], "RolloutUnavailable", "1 of 4 workers are ready, enough to begin with: "),
    ],
)
def test_before_the_first_step_nothing_is_said_of_training_that_goes_on(state, told, message):
    story = Story(rollout={"replicas": 4})
    story.look()
    story.run_trainer()
    story.run_workers(1)
    story.workers()["status"]["updatedReplicas"] = 4
    story.pods.append(pod(story.workers(), "worker-1", **state))
    story.look()
    assert story.condition("RolloutReady") == ("False", told)
    assert story.entry("RolloutReady")["message"].startswith(message)
    assert (("Warning", "RolloutUnavailable") in story.told) == (told == "RolloutUnavailable")
    story.report = {"phase": "training", "step": 1, "version": [0, 1]}
    story.look(30)
    story.look()
    assert story.entry("RolloutReady")["message"].startswith("1 of 4 workers are ready; training goes on")


def test_workers_that_are_lost_while_training_goes_on_leave_it_ready():
    story = training(rollout={"replicas": 3})
    story.run_workers(2)
    story.pods.append(pod(story.workers(), "worker-2", **TROUBLES["CrashLoop"]))
    story.look()
    assert story.condition("Ready") == ("True", "Training")
    assert story.condition("RolloutReady") == ("False", "RolloutUnavailable")
    assert "no device" in story.entry("RolloutReady")["message"]
    assert story.told[-1] == ("Warning", "RolloutUnavailable")
    story.run_workers(0)
    story.look()
    assert story.condition("Ready")[0] == "False"
    assert story.condition("Failed")[0] == "False"


def test_workers_that_are_added_are_no_trouble_before_they_are_ready(story):
    story.edit(rollout={"replicas": 3})
    story.look()
    assert story.condition("RolloutReady") == ("False", "RollingOut")
    story.run_workers(1)
    story.workers()["status"] |= {"updatedReplicas": 3}
    for _ in range(3):
        story.look(10)
        assert story.condition("RolloutReady") == ("False", "RollingOut")
        assert story.condition("Ready")[0] == "True"
    story.run_workers(3)
    story.look(10)
    assert story.condition("RolloutReady") == ("True", "PodsReady")
    story.run_workers(2)
    story.workers()["status"] |= {"updatedReplicas": 3}
    story.look(10)
    assert story.condition("RolloutReady") == ("False", "RolloutUnavailable")
    assert [reason for kind, reason in story.told if kind == "Warning"] == ["RolloutUnavailable"]


def test_workers_on_nodes_that_the_cloud_may_take_away_are_counted_where_such_nodes_are_known():
    story = training(rollout={"replicas": 3})
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    workers = [pod(story.workers(), f"worker-{number}", **ready) for number in range(4)]
    for number, (node, status) in enumerate([("a", ready), ("b", ready), ("c", ready), ("a", {"phase": "Pending"})]):
        workers[number] |= {"spec": {"nodeName": node}, "status": status}
    story.pods += [*workers, pod(story.trainer()) | {"spec": {"nodeName": "a"}, "status": ready}]
    story.look()
    assert "spot" not in story.status["rollout"]
    story.spot_nodes = frozenset("ab")
    story.look()
    assert story.status["rollout"]["spot"] == 2
    story.spot_nodes = None
    story.look()
    assert "spot" not in story.status["rollout"]


def test_a_transition_time_moves_with_the_status_only(story):
    before = story.entry("TrainerReady")["lastTransitionTime"]
    story.run_trainer(**waits("ErrImagePull"))
    story.look(40)
    moved = story.entry("TrainerReady")["lastTransitionTime"]
    story.run_trainer(**TROUBLES["Unschedulable"])
    story.look(30)
    assert before < moved == story.entry("TrainerReady")["lastTransitionTime"]


def test_a_container_that_crashes_again_and_again_is_told_the_same_between_its_crashes():
    story = Story()
    story.look()
    end = {"terminated": {"exitCode": 1, "message": "no device"}}
    waiting = waits("CrashLoopBackOff", lastState=end)
    running = {"phase": "Running", "containerStatuses": [
        {"name": "vllm", "image": "miles:1", "ready": False, "state": {"running": {}}, "lastState": end}
    ]}  # fmt: skip
    story.run_trainer()
    story.pods.append(pod(story.workers(), "worker-0", **waiting))
    story.look()
    story.pods[1] = pod(story.workers(), "worker-0", **running)
    assert story.look(1).status is None
