"""rollout.autoscale: the rule in tables, and what a job that follows it goes through."""

import pytest

from operators import autoscale
from tests.situations import Story

RULE = [
    # workers, trainer waited, workers waited → workers wanted
    (1, 0.0, 0.0, 1),
    (1, 0.19, 0.0, 1),
    (1, 0.2, 0.0, 2),
    (4, 0.2, 0.0, 5),
    (4, 0.4, 0.0, 7),
    (4, 0.9, 0.0, 8),
    (100, 0.25, 0.0, 134),
    (4, 0.0, 0.39, 4),
    (4, 0.0, 0.4, 3),
    (100, 0.0, 0.9, 90),
    (1, 0.0, 0.9, 0),
    # They take turns: the balance counts.
    (4, 0.5, 0.5, 4),
    (4, 0.65, 0.35, 8),
    (4, 0.45, 0.55, 4),
    (4, 0.25, 0.75, 3),
]


@pytest.mark.parametrize(("replicas", "trainer", "rollout", "wanted"), RULE)
def test_the_side_that_is_waited_for_gets_more_and_the_one_that_waits_fewer(replicas, trainer, rollout, wanted):
    assert autoscale.rule(replicas, trainer, rollout)[0] == wanted


@pytest.mark.parametrize("turns", [False, True], ids=["side by side", "in turns"])
@pytest.mark.parametrize("work", [0.1, 0.5, 0.9, 1.0, 1.3, 2.0, 3.7, 10.0, 33.0])
@pytest.mark.parametrize("start", [1, 7, 64])
def test_it_comes_to_rest_from_any_start_at_any_load(start, work, turns):
    """`work`: time that one worker needs for a step's completions, by the trainer's time for the step."""
    replicas, seen = start, []
    for _ in range(60):
        generating = work / replicas
        length = generating + 1 if turns else max(generating, 1)
        waited = generating if turns else length - 1
        idle = 1 if turns else length - generating
        replicas = max(1, autoscale.rule(replicas, waited / length, idle / length)[0])
        seen.append(replicas)
    assert len(set(seen[-10:])) == 1, seen


def job(start=2, low=1, high=6):
    story = Story(rollout={"replicas": start, "autoscale": {"min": low, "max": high}})
    story.look()
    story.train()
    return story


def train(story, step, trainer=0.0, rollout=0.0, steps=5):
    """Until `step`, with what is waited for in the last few steps."""
    story.run_workers(story.workers()["spec"]["replicas"])
    story.look(10)
    waits = {"trainer": trainer, "rollout": rollout, "steps": steps}
    story.report = {"phase": "training", "step": step, "version": [1, step], "waits": waits}
    story.look(30)
    story.look(10)


def workers(story):
    return story.workers()["spec"]["replicas"]


def test_workers_follow_the_demand_within_the_bounds_and_the_status_says_why():
    story = job()
    train(story, 10, trainer=0.6)
    assert workers(story) == story.status["rollout"]["desired"] == 4
    told = story.status["rollout"]["autoscaled"]
    assert told["message"] == "2 to 4 at step 10: the trainer waited 60% of the time for completions"
    assert told["start"] == story.job["spec"]["rollout"]["replicas"] == 2  # the spec is the user's
    train(story, 20, trainer=0.6)
    assert workers(story) == 6
    for step, wanted in zip(range(30, 100, 10), (5, 4, 3, 2, 1, 1, 1), strict=True):
        train(story, step, rollout=0.9)
        assert workers(story) == wanted
    assert "had nothing to do 90%" in story.status["rollout"]["autoscaled"]["message"]


def test_after_a_change_only_steps_that_begin_with_all_workers_count():
    story = job()
    train(story, 10, trainer=0.6)
    train(story, 15, trainer=0.6)  # the five steps before it are not all after the change
    assert workers(story) == 4
    train(story, 16, trainer=0.6)
    assert workers(story) == 6


def test_nothing_is_decided_while_workers_are_missing():
    story = job()
    for step in (10, 20, 30):
        story.run_workers(1)
        story.report = {"phase": "training", "step": step, "waits": {"trainer": 0.9, "rollout": 0.0, "steps": 5}}
        story.look(30)
        story.look(10)
    assert workers(story) == 2
    train(story, 35, trainer=0.9)
    assert workers(story) == 2
    train(story, 36, trainer=0.9)
    assert workers(story) == 4


@pytest.mark.parametrize(
    "waits",
    [
        None,
        {},
        [],
        {"trainer": 0.9, "rollout": 0.0, "steps": 4},
        {"trainer": "much", "rollout": 0.0, "steps": 5},
        {"trainer": 0.9, "rollout": None, "steps": 5},
    ],
)
def test_a_report_that_says_too_little_changes_nothing(waits):
    story = job()
    story.report = {"phase": "training", "step": 50, "waits": waits}
    story.look(30)
    story.look(10)
    assert workers(story) == 2


def test_what_was_decided_outlives_a_suspension_and_holds_no_writes_when_nothing_changes():
    story = job()
    train(story, 10, trainer=0.6)
    train(story, 11)
    assert story.look(20).status is None
    story.edit(suspend=True)
    story.look()
    assert workers(story) == 0
    story.edit(suspend=False)
    story.look(10)
    story.look(10)
    assert workers(story) == 4


def test_an_edit_of_replicas_starts_anew_and_one_of_the_bounds_holds_at_once():
    story = job()
    train(story, 10, trainer=0.6)
    story.edit(rollout={"replicas": 2, "autoscale": {"min": 1, "max": 3}})
    story.look()
    assert workers(story) == 3
    story.edit(rollout={"replicas": 1, "autoscale": {"min": 1, "max": 3}})
    story.look()
    assert workers(story) == 1
    story.look(10)
    assert story.status["rollout"]["autoscaled"] == {"start": 1, "replicas": 1, "step": 10, "message": ""}
    story.edit(rollout={"replicas": 5})
    story.look()
    assert workers(story) == 5
    assert "autoscaled" not in story.status["rollout"]


def test_none_by_the_users_wish_are_none_and_the_rule_leaves_at_least_one():
    story = job(start=1, low=0)
    train(story, 10, rollout=0.9)
    assert workers(story) == 1
    story.edit(rollout={"replicas": 0, "autoscale": {"min": 0, "max": 6}})
    story.look()
    train(story, 20, trainer=0.9)
    assert workers(story) == 0
    assert story.condition("RolloutReady") == ("False", "ScaledToZero")
