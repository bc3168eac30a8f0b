"""What keeps a job's pods apart from others, and alive: NetworkPolicies and the workers' PodDisruptionBudget. Pure.

Every pod of the job is closed but for what it needs: DNS, the store and the hub, the operator's look at the status
port; trainers reach each other, workers the reward models. A NetworkPolicy cannot name a host, so the store is
allowed by port (and, if the operator's configuration says so, by address).
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from operators.containers import STATUS_PORT
from operators.names import selector
from operators.resolve import REWARD_PORT, Platform
from operators.spec import RLJob

Dict = dict[str, Any]
LINK_LOCAL = {"0.0.0.0/0": ["169.254.0.0/16"], "::/0": ["fe80::/10", "fd00:ec2::/32"]}
"""Where a cloud's machines answer with their own credentials: never open, whatever port a tenant's endpoint names."""
OPERATOR = {"app.kubernetes.io/name": "miles", "app.kubernetes.io/component": "operator"}


def policies(job: RLJob, platform: Platform) -> Dict:
    """Suffix of the NetworkPolicy's name → its spec."""
    everyone = {"matchLabels": {"miles.dev/job-name": job.metadata.name}}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": platform.operator_namespace}},
        "podSelector": {"matchLabels": OPERATOR},
    }
    outside = [{"ipBlock": _block(cidr)} for cidr in platform.egress_cidrs]
    ports = [_port(number) for number in sorted({*platform.egress_ports, *_ports(job)})]
    found: Dict = {
        "pods": {
            "podSelector": everyone,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [operator], "ports": [_port(STATUS_PORT)]}],
            "egress": [{"ports": [_port(53, "UDP"), _port(53)]}, {"to": outside, "ports": ports}],
        },
        "trainer": {
            "podSelector": _component(job, "trainer"),
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": _component(job, "trainer")}]}],
            "egress": [{"to": [{"podSelector": _component(job, "trainer")}]}],
        },
    }
    models = [f"reward-{reward.name}" for reward in job.spec.rewards if reward.model is not None]
    if models:
        found |= _rewards(job, models)
    return found


def _rewards(job: RLJob, models: list[str]) -> Dict:
    servers = _labelled(job, models)
    return {
        "reward-servers": {
            "podSelector": servers,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": _component(job, "rollout")}], "ports": [_port(REWARD_PORT)]}],
        },
        "reward-clients": {
            "podSelector": _component(job, "rollout"),
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"podSelector": servers}], "ports": [_port(REWARD_PORT)]}],
        },
    }


def disruption_budget(job: RLJob) -> Dict:
    """One worker at a time is drained; one that is not ready never holds up a drain. The trainer has no budget: it
    goes on from its checkpoint."""
    return {
        "maxUnavailable": 1,
        "selector": _component(job, "rollout"),
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def _block(cidr: str) -> Dict:
    return {"cidr": cidr} | ({"except": LINK_LOCAL[cidr]} if cidr in LINK_LOCAL else {})


def _ports(job: RLJob) -> Iterator[int]:
    """Ports of the addresses that the spec itself names."""
    spec = job.spec
    addresses = [spec.store.endpoint, *(reward.endpoint for reward in spec.rewards)]
    addresses += [entry.uri for entry in (*spec.data.sets, *spec.evaluation.sets)]
    for address in addresses:
        parts = urlsplit(address or "")
        if parts.scheme in ("http", "https"):
            yield parts.port or {"http": 80, "https": 443}[parts.scheme]


def _component(job: RLJob, component: str) -> Dict:
    return {"matchLabels": selector(job, component)}


def _labelled(job: RLJob, components: list[str]) -> Dict:
    return {
        "matchLabels": {"miles.dev/job-name": job.metadata.name},
        "matchExpressions": [{"key": "miles.dev/component", "operator": "In", "values": components}],
    }


def _port(number: int, protocol: str = "TCP") -> Dict:
    return {"protocol": protocol, "port": number}
