"""operators.overrides: --set, as typed on a command line."""

from typing import Any

import pytest

from operators.overrides import apply


def job() -> dict[str, Any]:
    sets = [{"generator": "reasoning-gym/chain_sum"}]
    return {"metadata": {"name": "sums"}, "spec": {"algorithm": {"type": "grpo"}, "data": {"sets": sets}}}


@pytest.mark.parametrize(
    ("setting", "path", "expected"),
    [
        ("spec.algorithm.totalSteps=20", ("spec", "algorithm", "totalSteps"), 20),
        ("spec.algorithm.learningRate=1e-6", ("spec", "algorithm", "learningRate"), "1e-6"),
        ("spec.algorithm.clip.low=1", ("spec", "algorithm", "clip", "low"), "1"),
        ("spec.trainer.compile=true", ("spec", "trainer", "compile"), True),
        ("spec.trainer.lora={}", ("spec", "trainer", "lora"), {}),
        ("spec.data.sets[0].weight=2", ("spec", "data", "sets", 0, "weight"), "2"),
        ("spec.data.sets.0.limit=5", ("spec", "data", "sets", 0, "limit"), 5),
        ("spec.data.sets.0.parameters.max_terms=2", ("spec", "data", "sets", 0, "parameters", "max_terms"), 2),
        ("spec.data.systemPrompt=a=b: c", ("spec", "data", "systemPrompt"), "a=b: c"),
        ("spec.data.sets[0].parameters={max_terms: 4}", ("spec", "data", "sets", 0, "parameters"), {"max_terms": 4}),
        ("spec.trainer.lora={rank: 8}", ("spec", "trainer", "lora"), {"rank": 8}),
        ("spec.trainer.nodes=2\n", ("spec", "trainer", "nodes"), 2),
        ("metadata.name=other", ("metadata", "name"), "other"),
        ("spec.trainer=", ("spec", "trainer"), ""),
    ],
)
def test_a_field_is_set_with_the_type_it_has(setting: str, path: tuple[str | int, ...], expected: Any) -> None:
    before = job()
    value = apply(before, setting)
    for step in path:
        value = value[step]
    assert value == expected
    assert before == job(), "the given object is left alone"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("spec.algorithm.totalSteps", "write spec.field=value"),
        ("algorithm.totalSteps=3", "write spec.field=value"),
        ("spec=3", "write spec.field=value"),
        ("=3", "write spec.field=value"),
        ("spec.data.sets[3].weight=2", r"there is no item 3, the list has 1"),
        ("spec.data.sets.name.x=2", "sets is a list; name an item by its position"),
        ("spec.algorithm.type.x=2", "type has no parts"),
        ("spec.algorithm[0]=2", "algorithm has no parts"),
        ("spec.trainer.nodes=[1", "not YAML"),
        (
            "spec.trainer.nodes=1\n---\n2",
            "^--set spec.trainer.nodes=1 --- 2: there are 2 YAML documents; write one value",
        ),
        ("spec.data.sets[²].x=1", r"^--set spec.data.sets\[²\].x=1: sets is a list; name an item by its position"),
    ],
)
def test_what_cannot_be_set_is_refused_in_words(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply(job(), setting)
