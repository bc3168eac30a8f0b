"""Who may reach a job's pods, and whom they may reach; how many workers may be drained."""

import dataclasses

import pytest

from operators.children import children
from operators.names import labels
from operators.resolve import Platform
from tests.test_spec import job

REWARDED = {"rewards": [{"name": "helpful", "model": {"uri": "s3://models/rm"}}]}
CLUSTER = Platform(operator_namespace="miles-system")
PARTS = ("trainer", "rollout", "reward-helpful")


def policies(job, platform: Platform = CLUSTER) -> list[dict]:
    found = children(job, run_id="r", platform=platform)
    return [child["spec"] for child in found if child["kind"] == "NetworkPolicy"]


def picks(selector: dict, pod: dict[str, str]) -> bool:
    exact = selector.get("matchLabels", {}).items() <= pod.items()
    return exact and all(
        pod.get(term["key"]) in term["values"]
        for term in selector.get("matchExpressions", [])
        if term["operator"] == "In"
    )


def allows(job, direction: str, own: str, other: dict[str, str], port: int) -> bool:
    """Whether the policies of `own`'s pods let pods with labels `other`, in the same namespace, through."""
    side = {"ingress": "from", "egress": "to"}[direction]
    mine = [p for p in policies(job) if picks(p["podSelector"], labels(job, own))]
    assert any(direction.capitalize() in policy["policyTypes"] for policy in mine), "the pod is open"
    rules = [rule for policy in mine for rule in policy.get(direction, []) if "podSelector" in str(rule.get(side))]
    return any(
        picks(peer["podSelector"], other) and "namespaceSelector" not in peer
        for rule in rules
        if "ports" not in rule or port in [entry["port"] for entry in rule["ports"]]
        for peer in rule[side]
    )


FLOWS = [("trainer", "trainer", 29500), ("trainer", "trainer", 41234), ("rollout", "reward-helpful", 8000)]


@pytest.mark.parametrize("source", PARTS)
@pytest.mark.parametrize("target", PARTS)
@pytest.mark.parametrize("port", [8000, 29500, 41234])
def test_only_trainers_among_themselves_and_workers_to_reward_models(source, target, port):
    this = job(**REWARDED)
    wanted = (source, target, port) in FLOWS or source == target == "trainer"
    assert allows(this, "egress", source, labels(this, target), port) == wanted
    assert allows(this, "ingress", target, labels(this, source), port) == wanted


def test_another_job_of_the_namespace_is_kept_out():
    this = job(**REWARDED)
    other = labels(this, "trainer") | {"miles.dev/job-name": "other"}
    assert not any(allows(this, direction, "trainer", other, 29500) for direction in ("ingress", "egress"))


def test_the_operator_alone_reaches_the_status_port():
    (first, *_) = policies(job())
    (rule,) = first["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8001}]
    (peer,) = rule["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "miles-system"}
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"


def outside(job, platform: Platform = CLUSTER) -> tuple[list[str], list[int]]:
    rule = next(rule for rule in policies(job, platform)[0]["egress"] if "to" in rule)
    return [peer["ipBlock"]["cidr"] for peer in rule["to"]], [entry["port"] for entry in rule["ports"]]


def test_ports_of_addresses_in_the_spec_are_open():
    store = {"uri": "s3://team-a/miles", "endpoint": "http://minio.storage:9000"}
    rewards = [{"name": "judge", "endpoint": "http://judge/score"}]
    assert outside(job(store=store, rewards=rewards))[1] == [80, 443, 9000]
    assert outside(job())[1] == [443]


def test_the_operators_configuration_narrows_the_outside():
    narrow = dataclasses.replace(CLUSTER, egress_cidrs=("10.1.0.0/16",), egress_ports=(8333,))
    assert outside(job(), narrow) == (["10.1.0.0/16"], [8333])


def test_names_are_asked_for_by_both_protocols():
    rule = next(rule for rule in policies(job())[0]["egress"] if "to" not in rule)
    assert rule["ports"] == [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]


def test_one_worker_at_a_time_is_drained_and_a_sick_one_always():
    (budget,) = (child for child in children(job(), run_id="r") if child["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert picks(budget["spec"]["selector"], labels(job(), "rollout"))
    assert not picks(budget["spec"]["selector"], labels(job(), "trainer"))


def test_a_run_on_one_machine_has_none_of_it():
    kinds = {child["kind"] for child in children(job(), run_id="r", platform=Platform(local=True))}
    assert kinds == {"ConfigMap", "Deployment", "Service", "Job"}
