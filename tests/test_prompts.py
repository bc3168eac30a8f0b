import collections
import json
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import DataConfig, PromptSetConfig, StoreConfig
from pipeline.prompts import PromptSource, generated, open_set, permute


def file(path: pathlib.Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def refusal(*sets: PromptSetConfig) -> str:
    """Why `sets` cannot be used; empty where they can."""
    try:
        source(*sets)
    except ValueError as error:
        return str(error)
    return ""


def numbered(path: pathlib.Path, count: int) -> str:
    return file(path, [{"prompt": f"{path.stem}{n}", "answer": n} for n in range(count)])


def source(*sets: PromptSetConfig, seed: int = 0) -> PromptSource:
    return PromptSource(DataConfig(seed=seed, sets=list(sets)))


@settings(deadline=None)
@given(st.integers(1, 300), st.text(max_size=8))
def test_permute_is_a_permutation_of_any_size(size: int, key: str) -> None:
    assert sorted(permute(position, size, key) for position in range(size)) == list(range(size))


def test_permutations_never_change_with_python_or_numpy() -> None:
    assert [permute(position, 10, "7/gsm8k/0") for position in range(10)] == [0, 5, 1, 9, 8, 7, 6, 2, 3, 4]


def test_each_pass_holds_every_prompt_once_in_an_order_of_its_own(tmp_path: pathlib.Path) -> None:
    prompts = source(PromptSetConfig(name="a", uri=numbered(tmp_path / "a.jsonl", 50)))
    passes = [[prompts.at(n).content for n in range(start, start + 50)] for start in (0, 50, 100)]
    assert [sorted(of_pass) for of_pass in passes] == [sorted(passes[0])] * 3  # type: ignore[type-var]
    assert len({tuple(of_pass) for of_pass in passes}) == 3  # type: ignore[arg-type]


def test_a_prompt_is_a_pure_function_of_seed_and_index(tmp_path: pathlib.Path) -> None:
    configs = (
        PromptSetConfig(name="a", uri=numbered(tmp_path / "a.jsonl", 7), weight=0.5),
        PromptSetConfig(name="b", generator="reasoning-gym/chain_sum"),
    )
    backwards, forwards = source(*configs, seed=3), source(*configs, seed=3)
    expected = [backwards.at(n) for n in reversed(range(40))][::-1]
    assert [forwards.at(n) for n in range(40)] == expected
    assert [source(*configs, seed=4).at(n).content for n in range(40)] != [prompt.content for prompt in expected]


def test_every_cycle_holds_each_set_in_proportion_to_its_weight(tmp_path: pathlib.Path) -> None:
    prompts = source(
        PromptSetConfig(name="a", uri=numbered(tmp_path / "a.jsonl", 4), weight=1.0),
        PromptSetConfig(name="b", uri=numbered(tmp_path / "b.jsonl", 9), weight=0.2),
        PromptSetConfig(name="c", uri=numbered(tmp_path / "c.jsonl", 9), weight=0.3),
    )
    orders = set()
    for cycle in range(20):
        names = [prompts.at(n).set for n in range(15 * cycle, 15 * cycle + 15)]
        assert collections.Counter(names) == {"a": 10, "b": 2, "c": 3}
        orders.add(tuple(names))
    assert len(orders) > 10


def test_sets_drawn_in_turns_each_walk_whole_passes(tmp_path: pathlib.Path) -> None:
    prompts = source(
        PromptSetConfig(name="a", uri=numbered(tmp_path / "a.jsonl", 4), weight=3),
        PromptSetConfig(name="b", uri=numbered(tmp_path / "b.jsonl", 9), weight=2),
    )
    drawn = collections.defaultdict(list)
    for n in range(5 * 36):
        drawn[prompts.at(n).set].append(prompts.at(n).content)
    for name, size in (("a", 4), ("b", 9)):
        assert all(len(set(drawn[name][k : k + size])) == size for k in range(0, len(drawn[name]), size))


@pytest.mark.parametrize(("weights", "message"), [([1.0, 0.0], "must be above 0"), ([1.0, 0.123457], "round them")])
def test_unusable_weights_are_refused(tmp_path: pathlib.Path, weights: list[float], message: str) -> None:
    sets = [
        PromptSetConfig(name=f"s{n}", uri=numbered(tmp_path / f"{n}.jsonl", 2), weight=weight)
        for n, weight in enumerate(weights)
    ]
    with pytest.raises(ValueError, match=message):
        source(*sets)


def test_two_sets_of_one_name_are_refused(tmp_path: pathlib.Path) -> None:
    one = PromptSetConfig(name="a", uri=numbered(tmp_path / "a.jsonl", 2))
    with pytest.raises(ValueError, match="distinct"):
        source(one, one)


def test_parquet_and_jsonl_give_the_same_prompts_and_other_columns(tmp_path: pathlib.Path) -> None:
    rows = [{"question": [{"role": "user", "content": f"q{n}"}], "gold": f"{n}", "level": n} for n in range(5)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    uris = [file(tmp_path / "a.jsonl", rows), (tmp_path / "a.parquet").as_uri()]
    one, other = (
        source(PromptSetConfig(name="a", uri=uri, prompt_field="question", answer_field="gold")) for uri in uris
    )
    assert [one.at(n) for n in range(5)] == [other.at(n) for n in range(5)]
    prompt = next(one.at(n) for n in range(5) if one.at(n).answer == "3")
    assert (prompt.content, prompt.text, prompt.row) == ([{"role": "user", "content": "q3"}], "q3", {"level": 3})


def test_answers_that_are_no_text_are_written_as_json(tmp_path: pathlib.Path) -> None:
    rows = [{"prompt": "a", "answer": 4}, {"prompt": "b", "answer": ["x"]}, {"prompt": "c"}]
    prompts = open_set(PromptSetConfig(name="a", uri=file(tmp_path / "a.jsonl", rows)), 0)
    assert [prompts.item(n, n).answer for n in range(3)] == ["4", '["x"]', None]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "1"}, "without the field 'prompt'"),
        ({"prompt": "  \n"}, "blank"),
        ({"prompt": []}, "blank"),
        ({"prompt": "good"}, "repeated"),
        ({"prompt": 7}, "neither text nor messages"),
        ({"prompt": ["hi"]}, "messages without role and content"),
        ({"prompt": [{"role": "assistant", "content": "hi"}]}, "ends with an assistant's message"),
        ({"prompt": "ok\ud83d"}, "not valid Unicode"),
        ({"prompt": [{"role": "user", "content": "ok\ud83d"}]}, "not valid Unicode"),
    ],
)
def test_a_row_without_a_usable_prompt_is_left_out_with_a_reason(
    tmp_path: pathlib.Path, row: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    uri = file(tmp_path / "a.jsonl", [{"prompt": "good"}, row, {"prompt": "better"}])
    prompts = open_set(PromptSetConfig(name="a", uri=uri), 0)
    assert [prompts.item(n, n).content for n in range(prompts.size or 0)] == ["good", "better"]
    assert prompts.left_out == f"1 {reason} of its 3 rows, first row 2: {reason}"
    assert f"left out {prompts.left_out}" in caplog.text


def test_the_same_prompt_with_another_answer_is_another_prompt(tmp_path: pathlib.Path) -> None:
    rows = [{"prompt": "capital?", "answer": "Rome"}, {"prompt": "capital?", "answer": "Oslo"}]
    assert open_set(PromptSetConfig(name="a", uri=file(tmp_path / "a.jsonl", rows)), 0).size == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"question": "q", "a": 1}\n',
            "'prompt'; its first row has a, question. Name the right one in fields.prompt",
        ),
        (b'{"prompt": "q"}\n{"prompt": \n', "line 2, is not JSON"),
        (b'{"prompt": "q"}\n[1]\n', "line 2, is not an object"),
        (b"", "it is empty"),
        (b'{"prompt": " "}\n', "none of its 1 rows can be used"),
        (b'{"prompt": null}\n{"prompt": null}\n', "the field 'prompt' is empty in every row; fill it"),
        (b'{"prompt": "q"}\n' + b"[" * 100_000, "line 2, is not JSON: maximum recursion depth"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_naming_set_and_remedy(
    tmp_path: pathlib.Path, content: bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="data set sums") as caught:
        source(PromptSetConfig(name="sums", uri=str(path)))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.parquet", "data.csv"])
def test_a_missing_file_or_an_unknown_format_is_refused_in_one_line(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        source(PromptSetConfig(name="a", uri=str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match="is not Parquet"):
        source(PromptSetConfig(name="a", uri=str(tmp_path / "a.parquet")))


def test_a_damaged_parquet_file_is_refused_in_one_line_or_read(tmp_path: pathlib.Path) -> None:
    path, chance = tmp_path / "a.parquet", random.Random(0)
    rows = [{"prompt": f"what is {n}?", "answer": str(n), "level": n} for n in range(500)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    whole, refusals = path.read_bytes(), []
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(8):
            damaged[chance.randrange(len(whole))] = chance.randrange(256)
        path.write_bytes(damaged)
        refusals.append(refusal(PromptSetConfig(name="a", uri=str(path))))
    refusals = [text for text in refusals if text]
    assert len(refusals) > 20
    assert all(str(path) in text and "\n" not in text for text in refusals)


def test_a_date_that_python_does_not_have_is_refused_naming_the_row(tmp_path: pathlib.Path) -> None:
    when = pa.array([0, 1 << 62], pa.timestamp("us"))
    pyarrow.parquet.write_table(pa.table({"prompt": ["a", "b"], "when": when}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, row 2, cannot be read"):
        source(PromptSetConfig(name="a", uri=str(tmp_path / "a.parquet")))


def test_a_parquet_column_without_any_value_is_told_as_empty(tmp_path: pathlib.Path) -> None:
    table = pa.table({"prompt": pa.array([None, None], pa.string()), "answer": ["1", "2"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="the field 'prompt' is empty in every row"):
        source(PromptSetConfig(name="a", uri=str(tmp_path / "a.parquet")))


def test_a_row_nested_almost_too_deeply_costs_at_most_itself(tmp_path: pathlib.Path) -> None:
    for depth in range(850, 1000):
        (tmp_path / "a.jsonl").write_text(
            '{"prompt": "q"}\n{"prompt": "r", "answer": ' + "[" * depth + "]" * depth + "}\n"
        )
        text = refusal(PromptSetConfig(name="a", uri=str(tmp_path / "a.jsonl")))
        assert not text or "line 2, is not JSON" in text


def test_an_address_that_does_not_answer_is_refused_with_the_cause() -> None:
    with pytest.raises(ValueError, match="127") as caught:
        source(PromptSetConfig(name="a", uri="http://127.0.0.1:9/a.jsonl"))
    assert "Cannot connect to host" in str(caught.value)


def test_an_exception_without_a_text_is_told_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> bytes:
        raise TimeoutError

    monkeypatch.setattr("pipeline.prompts.file._fetch", refuse)
    with pytest.raises(ValueError, match=r"cannot read a\.jsonl: TimeoutError"):
        source(PromptSetConfig(name="a", uri="a.jsonl"))


def test_limit_keeps_the_first_usable_rows(tmp_path: pathlib.Path) -> None:
    uri = file(tmp_path / "a.jsonl", [{"prompt": ""}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    prompts = open_set(PromptSetConfig(name="a", uri=uri, limit=2), 0)
    assert [prompts.item(n, n).content for n in range(prompts.size or 0)] == ["a", "b"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"generator": "reasoning-gym/chain_sums"}, "did you mean chain_sum"),
        ({"generator": "reasoning-gym/chain_sum", "parameters": {"max_term": 3}}, "max_term"),
        ({"generator": "reasoning-gym/chain_sum", "parameters": {"max_terms": 1}}, "max_terms must be >= min_terms"),
        ({"generator": "reasoning-gym/chain_sum", "parameters": {"seed": 1}}, "set data.seed"),
        *(
            ({"generator": "reasoning-gym/chain_sum", "parameters": {"size": size}}, f"size is {size!r}; give a whole")
            for size in (0, -3, 10**12, True, 2.5, "20")
        ),
        ({"generator": "reasoning-gym/chain_sum", "limit": 0}, "limit is 0; give 1 or more"),
        ({"generator": "gym/chain_sum"}, "use reasoning-gym/<task>"),
        ({}, "exactly one of uri and generator"),
        ({"generator": "reasoning-gym/chain_sum", "uri": "a.jsonl"}, "exactly one of uri and generator"),
    ],
)
def test_a_generator_that_cannot_be_used_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="data set sums") as caught:
        source(PromptSetConfig(name="sums", **config))
    assert message in str(caught.value)


def test_an_endless_generator_does_not_repeat_and_a_sized_one_walks_passes() -> None:
    endless = PromptSetConfig(name="a", generator="reasoning-gym/chain_sum", parameters={"min_digits": 3})
    sized = PromptSetConfig(name="a", generator="reasoning-gym/chain_sum", parameters={"min_digits": 3, "size": 20})
    assert len({source(endless).at(n).text for n in range(100)}) > 95
    prompts = source(sized)
    texts = [prompts.at(n).text for n in range(40)]
    assert set(texts[:20]) == set(texts[20:])
    assert texts[:20] != texts[20:]


def test_an_item_does_not_depend_on_which_others_were_drawn_or_on_global_randomness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """list_functions draws from the global generator, pool_matrix from numpy's, acre prepares all items at once."""
    monkeypatch.setattr(generated, "CHUNK", 64)
    for task in ("list_functions", "pool_matrix", "acre"):
        config = PromptSetConfig(name="a", generator=f"reasoning-gym/{task}")
        random.seed(1)
        one = source(config)
        far = one.at(500)
        random.seed(2)
        assert source(config).at(500).entry == far.entry


@pytest.mark.slow
def test_generated_prompts_are_the_same_in_every_process() -> None:
    """These tasks iterate over sets of strings, whose order is Python's hash seed's."""
    code = """
from pipeline.config import PromptSetConfig
from pipeline.prompts import open_set
for task in ("isomorphic_strings", "ransom_note", "word_ladder", "polynomial_multiplication"):
    chosen = open_set(PromptSetConfig(name="a", generator="reasoning-gym/" + task), 0)
    print([chosen.item(n, n).text for n in range(5)])
"""
    command = [sys.executable, "-c", code]
    one, other = (
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, check=True).stdout
        for _ in range(2)
    )
    assert one == other


def test_evaluation_draws_from_seeds_that_training_never_uses() -> None:
    config = PromptSetConfig(name="a", generator="reasoning-gym/chain_sum", parameters={"min_digits": 4}, limit=100)
    trained = {open_set(config, 0).item(n, n).text for n in range(100)}
    held_out = {open_set(config, 0, held_out=True).item(n, n).text for n in range(100)}
    assert not trained & held_out


@pytest.mark.slow
def test_prompts_are_read_from_s3(s3_server: Any, tmp_path: pathlib.Path) -> None:
    import asyncio

    from pipeline.storage import open_storage

    storage = open_storage("s3://miles/prompts", s3_server.endpoint, s3_server.region)
    asyncio.run(storage.put("a.jsonl", b'{"prompt": "from afar"}\n'))
    store = StoreConfig(uri="s3://miles/run", endpoint=s3_server.endpoint, region=s3_server.region)
    config = PromptSetConfig(name="a", uri="s3://miles/prompts/a.jsonl")
    assert PromptSource(DataConfig(sets=[config]), store).at(0).content == "from afar"
    with pytest.raises(ValueError, match="no such object"):
        open_set(PromptSetConfig(name="a", uri="s3://miles/prompts/b.jsonl"), 0, store)
