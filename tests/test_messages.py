import json

import pytest

from pipeline.messages import ControlState, EvaluationRequest, Heartbeat, WriterEntry, evaluation_key, shard_key
from pipeline.versions import Version


def test_control_survives_its_encoding():
    state = ControlState(
        term=2,
        step=7,
        version=Version(2, 7),
        writers={"A": WriterEntry("rollout-0", {4: 6, 12: 7}, acknowledged=3, final=None)},
        evaluation=EvaluationRequest(7, Version(2, 7), "A"),
        stop="complete",
        replaying=True,
    )
    assert ControlState.decode(state.encode()) == state


def test_control_without_policy_evaluation_and_writers_survives_too():
    state = ControlState(term=1, step=0, version=None, writers={})
    assert ControlState.decode(state.encode()) == state


def test_a_heartbeat_survives_its_encoding():
    heartbeat = Heartbeat(
        "A", "rollout-0", Version(1, 2), 5, True, (3, 4), {7: "the engine answered 500"}, {"running": 2.0}, 17.5
    )
    assert Heartbeat.decode(heartbeat.encode()) == heartbeat


@pytest.mark.parametrize("text", ["ok\ud83d", "\udc80", "über"])
def test_whatever_text_comes_with_an_error_is_read_by_the_other_side(text):
    said = Heartbeat.decode(Heartbeat("A", "rollout-0", failures={3: text}).encode()).failures[3]
    told = ControlState.decode(ControlState(1, 0, None, {}, stop=text).encode()).stop
    assert said == told == text.encode(errors="replace").decode()


def test_keys_of_one_folder_sort_like_their_numbers():
    assert sorted([shard_key("A", 10), shard_key("A", 9)]) == [shard_key("A", 9), shard_key("A", 10)]
    assert sorted([evaluation_key(10), evaluation_key(9)]) == [evaluation_key(9), evaluation_key(10)]


DAMAGED = [b"", b"{", b"{}", b"[1]", b"null", b'"x"', b"NaN", b"[" * 100_000, b'{"version": 3}']


@pytest.mark.parametrize("data", DAMAGED, ids=lambda data: data[:8].decode())
def test_what_is_damaged_is_one_kind_of_error_and_the_trainers_file_comes_with_its_remedy(data: bytes):
    with pytest.raises(ValueError):  # noqa: PT011 (its readers name the key)
        Heartbeat.decode(data)
    with pytest.raises(ValueError, match=r"control/state.json is damaged \(.*\); while nothing .* delete it"):
        ControlState.decode(data)


CONTROL = ControlState(
    1, 2, Version(1, 2), {"A": WriterEntry("rollout-0", {4: 1}, 0)}, EvaluationRequest(2, (1, 2), "A")
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"term": "1"}, "term: Input should be a valid integer"),
        ({"step": True}, "step: Input should be a valid integer"),
        ({"version": [1, "2"]}, "version.1: Input should be a valid integer"),
        ({"writers": []}, "writers: Input should be an object"),
        ({"writers": {"A": {"instance": 1, "leases": [], "acknowledged": 0, "final": None}}}, "writers.A.instance: "),
        ({"writers": {"A": {"instance": "", "leases": [[1, []]], "acknowledged": 0}}}, "writers.A.leases: .* pairs"),
        ({"evaluation": {"step": 1, "version": [1, 1], "writer": 3}}, "evaluation.writer: "),
        ({"replaying": 1}, "replaying: Input should be a valid boolean"),
    ],
)
def test_a_value_of_the_wrong_type_in_the_trainers_file_is_refused_by_name(change, named):
    content = json.loads(CONTROL.encode()) | change
    with pytest.raises(ValueError, match=rf"control/state.json is damaged \({named}"):
        ControlState.decode(json.dumps(content).encode())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ulid": 5}, "ulid"),
        ({"sequence": "5"}, "sequence"),
        ({"draining": 0}, "draining"),
        ({"handed_back": [1, None]}, "handed_back.1"),
        ({"failures": {"x": "reason"}}, "failures.x.*"),
        ({"failures": {"7": 1}}, "failures.7"),
        ({"statistics": {"running": "2"}}, "statistics.running"),
        ({"refreshed": None}, "refreshed"),
    ],
)
def test_a_value_of_the_wrong_type_in_a_heartbeat_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=rf"^{named}: Input should be"):
        Heartbeat.decode(json.dumps(json.loads(Heartbeat("A", "rollout-0").encode()) | change).encode())
