"""What the operator remembers of its jobs' objects: by job, without what it does not need, and never a ghost."""

import copy
import sys
from typing import Any

from operators import drift
from operators.cache import LONGEST_WARNING, MOST_WARNINGS, Cache, JobKey, Name

KEY = JobKey("team", "sums")


def child(name: str = "sums-config", version: int = 10, job: str = "u-1", kind: str = "ConfigMap") -> dict[str, Any]:
    owner = {"apiVersion": "miles.dev/v1alpha1", "kind": "RLJob", "name": "sums", "uid": job, "controller": True}
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}-{job}",
            "resourceVersion": str(version),
            "ownerReferences": [owner],
            "managedFields": [{"manager": "miles"}],
        },
        "data": {"run.json": "{}"},
    }


def pod(name: str = "sums-trainer-0-0-abcde", version: int = 11) -> dict[str, Any]:
    labels = {"miles.dev/job-uid": "u-1", "miles.dev/job-name": "sums", "miles.dev/attempt": "0"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": labels,
            "ownerReferences": [{"kind": "Job", "name": "sums-trainer-0", "uid": "j", "controller": True}],
        },
        "spec": {"nodeName": "n", "containers": [{"name": "trainer", "env": [{"name": "SECRET", "value": "x"}]}]},
        "status": {"phase": "Running"},
    }


def warning(about: str, name: str = "w", version: int = 12) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": str(version)},
        "involvedObject": {"kind": "Job", "uid": about},
        "reason": "FailedCreate",
        "message": "exceeded quota",
        "type": "Warning",
    }


def names(found: list[Any]) -> list[str]:
    return [each["metadata"]["name"] for each in found]


def test_children_are_found_by_the_uid_of_their_controller_and_pods_by_their_label() -> None:
    cache = Cache()
    assert cache.put("ConfigMap", child()) == KEY
    assert cache.put("Pod", pod()) == KEY
    cache.put("ConfigMap", child("other-config", job="u-2"))
    assert names(cache.of("u-1", ["ConfigMap", "Pod"], "team")) == ["sums-config", "sums-trainer-0-0-abcde"]
    assert names(cache.of("u-1", ["Pod"], "team")) == ["sums-trainer-0-0-abcde"]


def test_a_child_whose_labels_were_edited_is_still_a_child() -> None:
    cache, edited = Cache(), child()
    edited["metadata"]["labels"] = {"miles.dev/job-uid": "u-7"}
    assert cache.put("ConfigMap", edited) == KEY
    assert cache.of("u-7", ["ConfigMap"], "team") == []


def test_a_same_named_object_of_another_owner_is_nobodys_child() -> None:
    cache, theirs = Cache(), child()
    theirs["metadata"]["ownerReferences"][0] |= {"kind": "Deployment"}
    assert cache.put("ConfigMap", theirs) is None
    assert cache.of("u-1", ["ConfigMap"], "team") == []
    assert cache.find("ConfigMap", "team", "sums-config") is not None


def test_what_is_not_needed_is_not_kept() -> None:
    cache = Cache()
    cache.put("ConfigMap", child())
    cache.put("Pod", pod())
    (config, trainer) = cache.of("u-1", ["ConfigMap", "Pod"], "team")
    assert "managedFields" not in config["metadata"]
    assert config["data"] == {"run.json": "{}"}
    assert trainer["spec"] == {"nodeName": "n", "containers": [{"name": "trainer"}]}
    assert trainer["status"] == {"phase": "Running"}


def test_an_object_that_is_looked_at_can_be_changed_without_changing_what_is_remembered() -> None:
    cache = Cache()
    cache.put("ConfigMap", child())
    cache.of("u-1", ["ConfigMap"], "team")[0]["data"].clear()
    assert cache.of("u-1", ["ConfigMap"], "team")[0]["data"] == {"run.json": "{}"}


def test_the_answer_to_a_write_is_seen_before_the_watch_tells_of_it() -> None:
    cache = Cache()
    cache.put("ConfigMap", child("other", version=5))
    cache.put_answer("ConfigMap", child(version=20))
    assert names(cache.of("u-1", ["ConfigMap"], "team")) == ["other", "sums-config"]


def test_an_answer_that_the_watch_has_overtaken_brings_nothing_back() -> None:
    cache, old = Cache(), child(version=20)
    gone = copy.deepcopy(old)
    gone["metadata"]["resourceVersion"] = "21"
    cache.put("ConfigMap", old)
    cache.remove("ConfigMap", gone)
    cache.put_answer("ConfigMap", old)
    assert cache.of("u-1", ["ConfigMap"], "team") == []


def test_the_answer_about_an_object_that_is_here_counts_whatever_the_watch_has_told_of_others() -> None:
    cache = Cache()
    cache.put("ConfigMap", child(version=20))
    cache.put("ConfigMap", child("other", version=30))
    cache.put_answer("ConfigMap", child(version=25) | {"data": {"run.json": "new"}})
    assert cache.of("u-1", ["ConfigMap"], "team")[1]["data"] == {"run.json": "new"}
    cache.put_answer("ConfigMap", child(version=19))
    assert cache.of("u-1", ["ConfigMap"], "team")[1]["data"] == {"run.json": "new"}


def test_after_a_list_what_it_did_not_name_is_gone_and_its_job_is_told() -> None:
    cache = Cache()
    cache.put("ConfigMap", child("one"))
    cache.put("ConfigMap", child("two"))
    cache.put("Pod", pod())
    assert cache.keep_only("ConfigMap", "", [Name("team", "two")]) == {KEY}
    assert names(cache.of("u-1", ["ConfigMap", "Pod"], "team")) == ["two", "sums-trainer-0-0-abcde"]


def test_a_list_of_one_namespace_says_nothing_about_others() -> None:
    cache = Cache()
    cache.put("ConfigMap", child())
    assert cache.keep_only("ConfigMap", "elsewhere", []) == set()
    assert names(cache.of("u-1", ["ConfigMap"], "team")) == ["sums-config"]


def test_a_warning_belongs_to_the_job_of_the_object_that_it_is_about_and_goes_with_it() -> None:
    cache, job = Cache(), child("sums-trainer-0", kind="Job")
    cache.put("Job", job)
    uid = job["metadata"]["uid"]
    assert cache.put("Event", warning(uid)) == KEY
    assert [each["message"] for each in cache.of(uid, ["Event"], "team")] == ["exceeded quota"]
    cache.remove("Job", job)
    assert cache.of(uid, ["Event"], "team") == []
    assert cache.count() == 0


def test_warnings_about_objects_of_others_are_not_kept() -> None:
    cache = Cache()
    assert cache.put("Event", warning("somebody")) is None
    assert cache.count() == 0


def test_nothing_is_left_of_jobs_that_are_gone() -> None:
    cache = Cache()
    for number in range(100):
        for found, kind in ((child(f"c-{number}", job=f"u-{number}"), "ConfigMap"), (pod(f"p-{number}"), "Pod")):
            cache.put(kind, found)
            cache.remove(kind, found)
    assert cache.count() == 0
    assert not cache._by_owner
    assert not cache._keys
    assert not cache.changed


def test_a_thousand_jobs_fit_into_a_fraction_of_the_memory_of_their_objects() -> None:
    cache = Cache()
    for number in range(1000):
        found = child(f"c-{number}", job=f"u-{number}")
        found["data"] = {"run.json": "x" * 4000}
        cache.put("ConfigMap", found)
    size = sum(sys.getsizeof(entry.data) for held in cache._objects.values() for entry in held.values())
    assert size < 5_000_000


def test_what_another_namespace_holds_is_never_a_jobs_whatever_it_says() -> None:
    """Labels, owners and uids are at the will of whoever may write there."""
    cache = Cache()
    for kind, found in (("Pod", pod()), ("ConfigMap", child())):
        cache.put(kind, found | {"metadata": found["metadata"] | {"namespace": "others"}})
    assert cache.of("u-1", ["ConfigMap", "Pod"], "team") == []


def test_of_an_object_that_is_no_jobs_only_its_name_and_owner_are_kept() -> None:
    cache = Cache()
    found = child("stray") | {"data": {"a": "x" * 1_000_000}}
    del found["metadata"]["ownerReferences"]
    cache.put("ConfigMap", found)
    assert set(cache.find("ConfigMap", "team", "stray")) == {"metadata"}


def test_of_long_texts_of_a_config_map_only_the_digest_is_kept_and_no_drift_is_seen() -> None:
    cache, text = Cache(), "{" + " " * 1_000_000 + "}"
    live = child() | {"data": {"run.json": text, "added": "y" * 1_000_000}, "binaryData": {"z": "AAAA"}}
    cache.put("ConfigMap", live)
    (seen,) = cache.of("u-1", ["ConfigMap"], "team")
    assert len(str(seen)) < 2_000
    assert not drift.differs(seen, {"data": {"run.json": text}})
    assert drift.differs(seen, {"data": {"run.json": text[1:]}})


def test_of_any_number_of_warnings_about_an_object_the_newest_few_are_kept_and_cut() -> None:
    cache = Cache()
    cache.put("ConfigMap", child())
    about = child()["metadata"]["uid"]
    for number in range(100):
        cache.put(
            "Event", warning(about, name=f"w{number}", version=100 + number) | {"message": f"{number} " + "x" * 9000}
        )
    kept = cache.of(about, ["Event"], "team")
    assert {int(each["message"].split()[0]) for each in kept} == set(range(100 - MOST_WARNINGS, 100))
    assert max(len(each["message"]) for each in kept) == LONGEST_WARNING
