import collections
import dataclasses
import io
import json
import pydoc_data.topics
import random
import re
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.codec import decode, encode
from pipeline.experience import (
    SCHEMA,
    Damaged,
    Rollout,
    RolloutGroup,
    Step,
    Turn,
    ragged,
    response_mask,
    rows,
    token_rewards,
)
from pipeline.versions import Version

V3, V4 = Version(1, 3), Version(1, 4)


def rollout(**changes) -> Rollout:
    sample = Rollout(
        completion_ids=[7, 2],
        logprobs=[-0.5, -0.25],
        completion="ok",
        finish_reason="stop",
        reward=1.0,
        rewards={"correct": 1.0, "brief": 0.5},
        invalid=None,
        spans=[(0, V3), (1, V4)],
    )
    return dataclasses.replace(sample, **changes)


def group(index: int = 4, *rollouts: Rollout, **changes) -> RolloutGroup:
    samples = list(rollouts) or [rollout(), rollout(completion_ids=[9], logprobs=[-1.0], spans=[(0, V4)])]
    made = RolloutGroup(index, "math", "1+1=", "2", [5, 9, 11], samples, 1.7e9)
    return dataclasses.replace(made, **changes)


def table(**columns) -> pa.Table:
    """A shard of one group of two, with some columns replaced."""
    plain = pq.read_table(io.BytesIO(encode([group()])))
    for name, values in columns.items():
        plain = plain.set_column(plain.column_names.index(name), name, [values])
    return plain


def shard(**columns) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table(**columns), sink)
    return sink.getvalue()


def test_groups_come_back_as_they_went_with_ids_logprobs_and_spans_exact():
    groups = [group(4), group(9, rollout(reward=None, rewards={}, invalid="timed out"), answer=None, prompt="")]
    groups += [group(0, rollout(completion="naïve 日本 \U0001f600\n\x00"), set="code")]
    shard = decode(encode(groups))
    assert rows(shard, 0, shard.num_rows) == groups
    assert rows(shard, 2, 3) == groups[1:2]


def test_the_oldest_version_of_any_token_is_the_rows_version():
    shard = decode(encode([group(4, rollout(spans=[(0, V4), (1, V3)]))]))
    assert (shard["version_term"][0].as_py(), shard["version_step"][0].as_py()) == V3


def test_logprobs_keep_every_bit_of_float32():
    exact = np.array([-1 / 3, -1e-30, -0.0, -123.456], np.float32)
    back = decode(encode([group(4, rollout(completion_ids=[1, 2, 3, 4], logprobs=exact.tolist()))]))
    assert ragged(back, "logprobs").values.tobytes() == exact.tobytes()


def test_a_logprob_that_rounding_made_positive_is_written_as_zero():
    back = decode(encode([group(4, rollout(logprobs=[6e-8, -1.0]))]))
    assert ragged(back, "logprobs").values.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("text", "read"), [("ok\ud83d", "ok�"), ("\ude00x", "�x"), ("\ud83d\ude00", "\U0001f600"), ("plain", "plain")]
)
def test_lone_surrogates_are_replaced_before_they_reach_arrow(text, read):
    back = decode(encode([group(4, rollout(completion=text), prompt=text, answer=text)]))
    assert [back[name][0].as_py() for name in ("completion", "prompt", "answer")] == [read] * 3


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1PAR1", b"garbage" * 100, b"\0" * 5000, json.dumps({}).encode()])
def test_what_is_no_parquet_file_is_damaged_and_nothing_else(data):
    with pytest.raises(Damaged, match="not a Parquet shard"):
        decode(data)


def test_torn_and_flipped_shards_are_damaged_or_intact_and_never_crash():
    good = encode([group(number, *[rollout()] * 8) for number in range(8)])
    expected, dice, found = decode(good), random.Random(0), collections.Counter()
    for _ in range(400):
        bad = bytearray(good)
        if dice.random() < 0.3:
            del bad[dice.randrange(len(bad)) :]
        else:
            bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        try:
            found["same" if decode(bytes(bad)).equals(expected) else "changed"] += 1
        except Damaged:
            found["damaged"] += 1
    # Flips in the footer's free text or statistics change nothing that is read; page checksums find the others.
    assert found["damaged"] > 250
    assert found["changed"] <= 40


INT_LISTS, FLOAT_LISTS = pa.large_list(pa.int32()), pa.large_list(pa.float32())
SPANS = SCHEMA.field("spans").type


def spans(*rows):
    return pa.array([[dict(zip(("start", "term", "step"), span, strict=True)) for span in row] for row in rows], SPANS)


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"logprobs": pa.array([[-1.0], [-1.0]], FLOAT_LISTS)}, "row 0: completion_ids and logprobs differ in length"),
        ({"logprobs": pa.array([[-1.0, -1.0], [float("nan")]], FLOAT_LISTS)}, "row 1: a logprob is not finite"),
        ({"logprobs": pa.array([[float("-inf"), -1], [-1.0]], FLOAT_LISTS)}, "row 0: a logprob is not finite"),
        ({"logprobs": pa.array([[float("inf"), -1], [-1.0]], FLOAT_LISTS)}, "row 0: a logprob is not finite"),
        ({"logprobs": pa.array([[-1.0, 0.001], [-1.0]], FLOAT_LISTS)}, "row 0: a logprob is positive"),
        ({"logprobs": pa.array([[-1.0, -9999.0], [-1.0]], FLOAT_LISTS)}, "row 0: a logprob is -9999"),
        ({"logprobs": pa.array([[-1.0, None], [-1.0]], FLOAT_LISTS)}, "holds nulls inside its lists"),
        ({"completion_ids": pa.array([[7, 100], [9]], INT_LISTS)}, r"row 0: a token id is not in \[0, 100\)"),
        ({"completion_ids": pa.array([[7, 2], [-1]], INT_LISTS)}, r"row 1: a token id is not in \[0, 100\)"),
        ({"prompt_ids": pa.array([[100], [100]], INT_LISTS)}, r"row 0: a token id is not in \[0, 100\)"),
        ({"prompt_ids": pa.array([[], []], INT_LISTS)}, "row 0: no prompt token"),
        (
            {"prompt_ids": pa.array([[5, 9], [5, 8]], INT_LISTS)},
            "row 0: samples of one group have different prompt_ids",
        ),
        ({"prompt_ids": pa.array([[5, 5, 5], [5]], INT_LISTS)}, "samples of one group have different prompt_ids"),
        ({"prompt_ids": pa.array([[5, 9], None], INT_LISTS)}, "column prompt_ids holds nulls"),
        ({"reward": pa.array([1.0, None], pa.float64())}, "row 1: no finite reward, and not marked invalid"),
        ({"reward": pa.array([1.0, float("nan")], pa.float64())}, "row 1: no finite reward"),
        ({"finish_reason": pa.array(["stop", "abort"], pa.large_string())}, "row 1: finish_reason is neither"),
        ({"index": pa.array([-1, -1], pa.int64())}, "row 0: index is negative"),
        ({"index": pa.array([4, 5], pa.int64())}, "row 1: samples of a group are not numbered"),
        ({"sample": pa.array([0, 2], pa.int32())}, "row 1: samples of a group are not numbered"),
        ({"sample": pa.array([1, 2], pa.int32())}, "row 0: samples of a group are not numbered"),
        ({"version_step": pa.array([3, 3], pa.int64())}, r"row 1: version \(1, 3\) is not the oldest"),
        ({"spans": spans([(1, 1, 3)], [(0, 1, 4)])}, "row 0: spans .* do not cover"),
        ({"spans": spans([], [(0, 1, 4)])}, "row 0: spans .* do not cover"),
        ({"spans": spans([(0, 1, 3), (2, 1, 4)], [(0, 1, 4)])}, "row 0: spans .* do not cover"),
        ({"logprobs": pa.array(["a", "b"])}, "not a Parquet shard of schema 1"),
        ({"index": pa.array(["x", "y"])}, "not a Parquet shard of schema 1"),
    ],
)
def test_a_shard_that_breaks_a_rule_is_damaged_and_the_rule_is_named(columns, rule):
    with pytest.raises(Damaged, match=rule):
        decode(shard(**columns), vocabulary=100, group_size=2)


def test_incomplete_groups_and_shards_without_rows_are_damaged():
    with pytest.raises(Damaged, match="a group has 1 samples, not 2"):
        decode(encode([group(4), group(5, rollout())]), group_size=2)
    with pytest.raises(Damaged, match="samples of one index lie apart"):
        decode(encode([group(4), group(5), group(4)]))
    with pytest.raises(Damaged, match="no rows"):
        decode(encode([]))


@pytest.mark.parametrize(
    "changes",
    [
        {"completion_ids": [], "logprobs": [], "completion": "", "spans": [(0, V3)]},
        {"logprobs": [float("nan"), -9999.0]},
        {"completion_ids": [7, 5000]},
        {"reward": float("nan")},
        {"finish_reason": "abort"},
    ],
)
def test_one_bad_sample_is_no_damage_once_it_is_marked_invalid(changes):
    with pytest.raises(Damaged):
        decode(encode([group(4, rollout(), rollout(**changes))]), 100, 2)
    back = decode(encode([group(4, rollout(), rollout(**changes, invalid="not finite"))]), 100, 2)
    assert back["invalid"].to_pylist() == [None, "not finite"]


def test_a_column_of_a_later_writer_is_ignored_and_a_nullable_one_of_an_earlier_is_null():
    plain = table().drop_columns(["answer"]).append_column("future", pa.array([1, 2]))
    sink = io.BytesIO()
    pq.write_table(plain, sink)
    back = decode(sink.getvalue())
    assert back.schema == SCHEMA
    assert back["answer"].to_pylist() == [None, None]
    sink = io.BytesIO()
    pq.write_table(plain.drop_columns(["completion_ids"]), sink)
    with pytest.raises(Damaged, match="column completion_ids is missing"):
        decode(sink.getvalue())


def test_ragged_views_share_the_tables_memory_and_follow_a_slice():
    back = decode(encode([group(4), group(5)]))
    view = ragged(back, "completion_ids")
    assert (view.values.tolist(), view.offsets.tolist()) == ([7, 2, 9, 7, 2, 9], [0, 2, 3, 5, 6])
    assert np.shares_memory(view.values, ragged(back, "completion_ids").values)
    part = ragged(back.slice(1, 2), "completion_ids")
    assert (part.values.tolist(), part.offsets.tolist()) == ([9, 7, 2], [0, 1, 3])
    assert np.shares_memory(view.values, part.values)


def test_pandas_reads_a_shard_as_an_ordinary_table(tmp_path):
    import pandas

    (tmp_path / "0.parquet").write_bytes(encode([group()]))
    frame = pandas.read_parquet(tmp_path / "0.parquet")
    assert frame["completion_ids"].tolist()[0].tolist() == [7, 2]
    assert frame["reward"].tolist() == [1.0, 1.0]


def english(seed: int = 0, groups: int = 8, samples: int = 8) -> list[RolloutGroup]:
    """Groups of about 1000 tokens of English each, with logprobs like a language model's."""
    pieces = re.findall(r" ?[A-Za-z]{1,6}|\s+|.", " ".join(pydoc_data.topics.topics.values()))
    order = np.random.default_rng(seed).permutation(49152)
    ids = {piece: int(order[rank]) for rank, (piece, _) in enumerate(collections.Counter(pieces).most_common())}
    dice = np.random.default_rng(seed)

    def sample():
        start, length = int(dice.integers(len(pieces) - 1500)), int(dice.integers(500, 1500))
        words = pieces[start : start + length]
        logprobs = -np.log1p(np.exp(-dice.normal(3, 2.5, length)))
        tokens = [ids[word] for word in words]
        return rollout(completion_ids=tokens, logprobs=logprobs.tolist(), completion="".join(words), spans=[(0, V3)])

    return [group(index, *[sample() for _ in range(samples)]) for index in range(groups)]


def test_a_shard_of_64_rows_takes_at_most_6_2_bytes_a_token():
    groups = english()
    tokens = sum(len(sample.completion_ids) for made in groups for sample in made.rollouts)
    assert len(encode(groups)) / tokens <= 6.2


def test_reading_columns_is_fast_enough_to_feed_a_trainer():
    data = encode(english())
    started = time.process_time()
    for _ in range(10):
        back = decode(data, 49152, 8)
        ragged(back, "completion_ids"), ragged(back, "logprobs")
    # Some 6 ms a shard of 64,000 tokens on a core: 10M tokens/s; the limit leaves room for a slower one.
    assert (time.process_time() - started) / 10 < 0.1


# Several turns

NAN = float("nan")


def episode(**changes) -> Rollout:
    """Two turns of the policy, of 2 tokens and 1, and an observation of 3 between them."""
    return rollout(
        **{
            "completion_ids": [7, 2, 4, 4, 4, 9],
            "logprobs": [-0.5, -0.25, NAN, NAN, NAN, -1.0],
            "spans": [(0, V3)],
            "turns": [Turn(0, False, "go", 0.5), Turn(2, True, "wall"), Turn(5, False, "!", -2.0)],
        }
        | changes
    )


def test_turns_come_back_and_mask_what_was_not_sampled_whatever_else_is_in_the_shard():
    back = decode(encode([group(4, rollout(), episode()), group(5, episode(invalid="x", reward=None), rollout())]))
    mask = [True, True, False, False, False, True]
    assert response_mask(back).tolist() == [True, True, *mask, *[True] * 6, True, True]
    assert response_mask(back.slice(1, 1)).tolist() == mask
    assert token_rewards(back).tolist() == [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, -2.0, *[0.0] * 8]
    assert token_rewards(back.slice(0, 1)) is None
    (first, second) = rows(back, 0, 2)[0].rollouts
    assert (first.turns, second.turns) == ([], episode().turns)
    assert (first.mask.tolist(), second.mask.tolist()) == ([True, True], mask)


def test_a_shard_from_before_there_were_turns_reads_as_one_turn_each():
    sink = io.BytesIO()
    pq.write_table(table().drop_columns(["turns"]), sink)
    back = decode(sink.getvalue())
    assert rows(back, 0, 2) == [group()]
    assert response_mask(back).all()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"logprobs": [-0.5, NAN, NAN, NAN, NAN, -1.0]}, "a logprob is not finite"),
        ({"logprobs": [-0.5, -0.5, NAN, -0.1, NAN, -1.0]}, "an observation has a logprob"),
        ({"turns": []}, "a logprob is not finite"),
        ({"turns": [Turn(0, True, ""), Turn(5, False, "")]}, "an observation without a sampled turn before and after"),
        ({"turns": [Turn(0, False, ""), Turn(2, True, "")]}, "an observation without a sampled turn before and after"),
        ({"turns": [Turn(0, False, ""), Turn(2, True, ""), Turn(6, False, "")]}, "turns .* do not cover"),
        ({"turns": [Turn(0, False, ""), Turn(2, True, ""), Turn(5, False, "", NAN)]}, "a turn's reward is not finite"),
        ({"turns": [Turn(1, False, "")]}, "turns .* do not cover"),
        ({"turns": [Turn(0, False, ""), Turn(2, True, ""), Turn(2, False, "")]}, "turns .* do not cover"),
        ({"turns": [Turn(0, False, ""), Turn(None, True, ""), Turn(5, False, "")]}, "a turn holds nulls"),
    ],
)
def test_turns_that_do_not_fit_their_tokens_are_damaged(changes, rule):
    with pytest.raises(Damaged, match=f"row 0: {rule}"):
        decode(encode([group(4, episode(**changes))]))


# Process rewards


def test_steps_come_back_and_count_at_their_tokens_beside_what_turns_gave():
    steps = [Step(0, 0.25), Step(5, 1.0)]
    groups = [group(4, rollout(steps=[Step(1, -0.5)]), episode(steps=steps)), group(5)]
    back = decode(encode(groups))
    assert token_rewards(back).tolist() == [0.0, -0.5, 0.25, 0.5, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0]
    (first, second) = rows(back, 0, 2)[0].rollouts
    assert (first.steps, second.steps) == ([Step(1, -0.5)], steps)
    assert second.credits.tolist() == [0.25, 0.5, 0.0, 0.0, 0.0, -1.0]
    invalid = decode(encode([group(4, rollout(steps=[Step(9, 1.0)], invalid="x"))]))
    assert token_rewards(invalid) is None


def test_a_shard_from_before_there_were_steps_has_none():
    sink = io.BytesIO()
    pq.write_table(table().drop_columns(["steps"]), sink)
    assert rows(decode(sink.getvalue()), 0, 2) == [group()]


@pytest.mark.parametrize(
    ("steps", "rule"),
    [
        ([Step(6, 1.0)], r"steps \[6\] are not tokens of the completion in order"),
        ([Step(-1, 1.0)], r"steps \[-1\] are not tokens"),
        ([Step(1, 1.0), Step(0, 1.0)], r"steps \[1, 0\] are not tokens"),
        ([Step(1, 1.0), Step(1, 1.0)], r"steps \[1, 1\] are not tokens"),
        ([Step(2, 1.0)], "a step rewards an observation"),
        ([Step(1, NAN)], "a step is not a token and a finite reward"),
        ([Step(None, 1.0)], "a step is not a token and a finite reward"),
        ([Step(1, None)], "a step is not a token and a finite reward"),
    ],
)
def test_steps_that_do_not_fit_their_tokens_are_damaged(steps, rule):
    with pytest.raises(Damaged, match=f"row 0: {rule}"):
        decode(encode([group(4, episode(steps=steps))]))
