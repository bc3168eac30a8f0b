"""An upgrade of the operator, or other settings of it, restarts nothing that runs."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from operators import rendition, schema
from tests import situations
from tests.situations import Story


@pytest.fixture
def upgrade(monkeypatch: pytest.MonkeyPatch):
    """The next look is that of an operator with another default image."""

    def upgrade() -> None:
        other = dataclasses.replace(situations.PLATFORM, image="miles:2", gpu_image="miles:2-gpu")
        monkeypatch.setattr(situations, "PLATFORM", other)

    return upgrade


def running(**spec) -> Story:
    story = Story(**spec)
    story.look()
    story.train()
    return story


def image(child: dict) -> str:
    return child["spec"]["template"]["spec"]["containers"][0]["image"]


SERVED = {"rewards": [{"name": "helpful", "model": {"uri": "s3://models/rm"}}]}


def test_another_default_image_changes_nothing_of_a_running_job(upgrade):
    story = running(**SERVED)
    upgrade()
    for _ in range(3):
        plan = story.look()
        assert (list(plan.apply), list(plan.delete), plan.status, plan.pause) == ([], [], None, False)


def test_another_rendering_of_the_configuration_waits_too(monkeypatch):
    story = running()
    before = story.children["ConfigMap", "arithmetic-config"]
    before["data"]["run.json"] = "{}"  # as another release had written it
    before["metadata"]["annotations"][rendition.MADE] = "another"
    assert not story.look().apply


def test_workers_that_are_added_after_an_upgrade_are_like_the_others(upgrade):
    story = running()
    upgrade()
    story.edit(rollout={"replicas": 3})
    (applied,) = story.look().apply
    assert (applied["spec"]["replicas"], image(applied)) == (3, "miles:0.1.0")
    assert not story.look().apply


@pytest.mark.parametrize("spec", [{"runPolicy": {"maxRestarts": 9}}, {"rollout": {"autoscale": {"min": 1, "max": 2}}}])
def test_an_edit_of_numbers_keeps_what_there_is(upgrade, spec):
    story = running()
    upgrade()
    story.edit(**spec)
    assert not story.look().apply


def test_trainer_and_workers_take_the_new_image_together_with_the_next_attempt(upgrade):
    story = running()
    upgrade()
    story.end_trainer()
    for seconds in (0, 0, 11, 0):
        story.look(seconds)
    assert (image(story.trainer(1)), image(story.workers())) == ("miles:2", "miles:2")


def test_an_edit_of_what_workers_are_brings_the_new_image(upgrade):
    story = running()
    upgrade()
    story.edit(rollout={"compile": True})
    story.look()
    assert image(story.workers()) == "miles:2"


def test_a_child_that_is_gone_is_made_as_the_new_operator_makes_it(upgrade):
    story = running()
    upgrade()
    del story.children["Deployment", "arithmetic-rollout"]
    story.look()
    assert image(story.workers()) == "miles:2"


def test_pods_that_somebody_else_changed_are_repaired_by_the_operator_that_made_them():
    story = running()
    story.workers()["spec"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
    story.look()
    assert image(story.workers()) == "miles:0.1.0"


def test_children_of_a_release_without_digests_are_made_anew_once(upgrade):
    story = running()
    for child in story.children.values():
        for name in (rendition.ASKED, rendition.MADE):
            child["metadata"].get("annotations", {}).pop(name, None)
    upgrade()
    story.look()
    assert image(story.workers()) == "miles:2"
    assert not story.look().apply


def test_fields_of_a_later_release_change_nothing_of_a_running_job():
    """Its definition is applied before its operator is, and an operator may be taken back."""
    story = running()
    story.job["spec"]["newField"] = {"deep": 1}
    story.job["spec"]["trainer"] = {"newField": 1}
    story.job["spec"]["data"]["sets"][0]["newField"] = "x"
    plan = story.look()
    assert (list(plan.apply), plan.status, plan.pause) == ([], None, False)


DEFAULTS = pathlib.Path(__file__).parent / "stored/defaults.json"


def defaults(node: schema.Node, path: str = "spec") -> Iterator[tuple[str, Any]]:
    for name, child in schema.fields(node).items():
        if not schema.fields(child) and "default" in child:
            yield f"{path}.{name}", child["default"]
        yield from defaults(child, f"{path}.{name}")


def test_no_default_has_changed_since_the_release():
    """The API server stores a job with the defaults of its day: one that has changed looks like an edit, so that each
    running job would begin a new attempt. Where that is wanted, say so in manifests/README.md, and renew the file."""
    now = json.loads(json.dumps(dict(defaults(schema.fields(schema.tree())["spec"]))))
    released = json.loads(DEFAULTS.read_text())
    assert released == {field: now[field] for field in released if field in now}
