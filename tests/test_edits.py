"""The table of edits: it covers the spec, the documentation has it, and the digest follows it."""

import pathlib

import pytest

from operators import edits, schema
from tests.test_spec import EVERYTHING, job

README = (pathlib.Path(__file__).parent.parent / "operators" / "README.md").read_text()


def leaves(node: schema.Node, path: schema.Path):
    fields = schema.fields(node)
    if not fields:
        yield path
    for name, child in fields.items():
        yield from leaves(child, (*path, name))


LEAVES = list(leaves(schema.tree()["properties"]["spec"], ("spec",)))


@pytest.mark.parametrize("path", LEAVES, ids=map(schema.dotted, LEAVES))
def test_every_field_has_an_effect(path):
    assert edits.effect(path) in ("live", "new attempt", "while suspended", "refused")


@pytest.mark.parametrize("name", edits.TABLE)
def test_every_row_names_a_field(name):
    assert schema.at(tuple(name.split("."))) is not None


def test_the_longest_row_counts():
    assert edits.effect(("spec", "trainer", "image")) == "new attempt"
    assert edits.effect(("spec", "trainer", "lora", "rank")) == "while suspended"
    assert edits.effect(("spec", "rewards", 0, "model", "replicas")) == "live"
    assert edits.effect(("metadata", "name")) is None


def test_the_documentation_has_the_table():
    for name, (effect, why) in edits.TABLE.items():
        assert f"| `{name.removeprefix('spec.')}` | {effect} | {why} |" in README
    assert README.count("| new attempt |") == sum(row[0] == "new attempt" for row in edits.TABLE.values())


CHANGES = [
    ("live", {"rollout": {"replicas": 7}}),
    ("live", {"rollout": {"image": "other:1"}}),
    ("live", {"runPolicy": {"maxRestarts": 9}}),
    ("live", {"suspend": True}),
    ("new attempt", {"algorithm": {"type": "grpo", "totalSteps": 300}}),
    ("new attempt", {"rollout": {"maxModelLen": 8192}}),
    ("new attempt", {"trainer": {"image": "other:1"}}),
    ("new attempt", {"trainer": {"template": {"env": [{"name": "A", "value": "1"}]}}}),
    ("new attempt", {"evaluation": {"everySteps": 5}}),
    ("new attempt", {"scheduling": {"nodeSelector": {"zone": "a"}}}),
    ("while suspended", {"trainer": {"nodes": 2}}),
    ("while suspended", {"trainer": {"lora": {}}}),
    ("refused", {"data": {"sets": [{"generator": "reasoning-gym/chain_sum"}], "seed": 1}}),
]


@pytest.mark.parametrize(("effect", "change"), CHANGES)
def test_the_digest_changes_with_what_needs_a_new_attempt_and_with_nothing_else(effect, change):
    counts = effect in ("new attempt", "while suspended")
    assert (edits.digest(job(**change)) != edits.digest(job())) == counts


def test_a_default_that_is_written_out_is_no_edit():
    assert edits.digest(job(trainer={"nodes": 1, "compile": False})) == edits.digest(job())


def test_the_number_of_reward_servers_is_live_and_their_model_is_not():
    def digest(**model):
        return edits.digest(job(rewards=[{"name": "a", "model": {"uri": "s3://models/rm"} | model}]))

    assert digest(replicas=2) == digest()
    assert digest(uri="s3://models/other") != digest()


def test_the_digest_of_a_large_job_is_stable():
    assert edits.digest(job(EVERYTHING)) == edits.digest(job(EVERYTHING))
