"""Capacity that its cloud takes away at short notice, for rollout workers alone: what their pods say of it. Pure.

Each cloud and Karpenter mark such nodes by a label, and AKS (elsewhere whoever set them up) by a taint of the same key
and value. The labels are preferred, not required: workers run on other nodes where there is no such one, or no room on
it. Whoever wants no other nodes says so in rollout.template.nodeSelector.
"""

from typing import Any

Dict = dict[str, Any]

MARKS = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
NOTICE_S = 30
"""The shortest notice, that of GKE and AKS. A worker has given back its leases and delivered what is finished before
(pipeline.rollout.LEAVE_S)."""
TOLERATIONS: list[Dict] = [
    {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in MARKS.items()
]
AFFINITY: Dict = {
    "nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 100,
                "preference": {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]},
            }
            for key, value in MARKS.items()
        ]
    }
}


def placed(pod: Dict) -> Dict:
    """The spec of a worker's pod, as one that may run there."""
    return pod | {
        "affinity": AFFINITY,
        "tolerations": [*pod.get("tolerations", ()), *TOLERATIONS],
        "terminationGracePeriodSeconds": NOTICE_S,
    }
