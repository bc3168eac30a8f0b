"""How a job's parts are, as facts for its conditions. Pure."""

from collections.abc import Sequence

from operators import causes
from operators.attempts import Decision
from operators.causes import Cause
from operators.conditions import Fact, Facts, find
from operators.deadlines import has_stepped
from operators.names import child_name, selector
from operators.observed import Key, Object
from operators.situation import Situation
from operators.spec.status import RLJobStatus, TrainerStatus

NORMAL = Cause("AsSpecified", "")
UNFINISHED = "the first step of this attempt is not finished yet"


def counted(here: Situation, status: RLJobStatus) -> RLJobStatus:
    """`status` with the numbers of pods."""
    spec = here.job.spec
    wanted = 0 if spec.suspend else spec.workers
    ready = _ready(here, child_name(here.job, "rollout"))
    pods = ",".join(f"{name}={value}" for name, value in selector(here.job, "rollout").items())
    running = sum(causes.is_ready(pod) for pod in here.pods_of(here.current)) if here.current else 0
    told = {"desired": wanted, "ready": ready, "summary": f"{ready}/{wanted}", "selector": pods, "spot": _on_spot(here)}
    return status.model_copy(
        update={
            "rollout": status.rollout.model_copy(update=told),
            "trainer": TrainerStatus(desired=0 if spec.suspend else spec.trainer.nodes, ready=running),
        }
    )


def _on_spot(here: Situation) -> int | None:
    nodes = here.observed.spot_nodes
    if nodes is None:
        return None
    return sum(causes.is_ready(pod) and pod["spec"].get("nodeName") in nodes for pod in here.component("rollout"))


def facts(
    here: Situation, decision: Decision, status: RLJobStatus, conflicts: Sequence[Key], refused: Sequence[Key]
) -> Facts:
    """Of a job that is neither finished nor invalid. Children that it should have: `conflicts` have names that others
    hold, `refused` the API server does not take."""
    refusal = causes.refused(here.observed.refused[refused[0]]) if refused else None
    trainer, rollout = _trainer(here, decision), _rollout(here, status)
    if refusal is not None:
        trainer, rollout = (each if each.status == "True" else Fact.of(False, refusal) for each in (trainer, rollout))
    gone = here.job.spec.suspend and here.current is None and not here.has_pods
    suspended = Cause("Suspended", "no pod is left; set spec.suspend to false to go on")
    if conflicts:
        summary = Fact("False", "NameConflict", _conflict(conflicts))
    elif refusal is not None:
        summary = Fact.of(False, refusal)
    elif gone:
        summary = Fact.of(False, suspended)
    else:
        summary = _summary(here, decision, status, trainer, rollout)
    moving = not gone and (summary.status != "True" or rollout.reason == "RollingOut")
    return {
        "Ready": summary,
        "Reconciling": Fact("True", summary.reason if summary.status != "True" else rollout.reason, summary.message)
        if moving
        else Fact.of(False, NORMAL),
        "Stalled": Fact("True", "NameConflict", summary.message) if conflicts else Fact.of(False, NORMAL),
        "StoreReady": _store(here, status),
        "RolloutReady": Fact.of(False, suspended) if gone else rollout,
        "TrainerReady": Fact.of(False, suspended) if gone else trainer,
        "Suspended": Fact.of(True, suspended) if gone else _not_suspended(here),
        "Complete": Fact.of(False, NORMAL),
        "Failed": Fact.of(False, NORMAL),
    }


def _summary(here: Situation, decision: Decision, status: RLJobStatus, trainer: Fact, rollout: Fact) -> Fact:
    if decision.cause is not None and trainer.reason == decision.cause.reason:
        return trainer
    soft = ("WaitingForPods", "Starting", "RollingOut")
    if trainer.status != "True" and trainer.reason not in soft:
        return trainer
    if not _generating(here):
        return rollout
    if trainer.status != "True":
        return trainer
    if not has_stepped(status):
        losses = (here.observed.report or {}).get("losses")
        dropped = f"; dropped groups are {losses}" if losses else ""
        return Fact("False", "Starting", causes.shortened(f"{UNFINISHED}{dropped}"))
    return Fact("True", "Training")


def _not_suspended(here: Situation) -> Fact:
    if here.is_suspending():
        return Fact("False", "Suspending", "pods are still there")
    return Fact("False", "NotSuspended")


def _trainer(here: Situation, decision: Decision) -> Fact:
    job = here.current
    if decision.cause is not None and not decision.begin:
        return Fact.of(False, decision.cause)
    if job is None:
        return Fact("False", "Starting", "the trainer's pods are being created")
    pods, nodes = here.pods_of(job), here.job.spec.trainer.nodes
    if sum(causes.is_ready(pod) for pod in pods) >= nodes:
        return Fact("True", "PodsReady")
    refusal = causes.refusal(job, here.observed.events) if len(pods) < nodes else None
    cause = causes.trouble(pods) or refusal
    return Fact.of(False, cause or Cause("WaitingForPods", f"not all {nodes} pods of the trainer are ready yet"))


def _rollout(here: Situation, status: RLJobStatus) -> Fact:
    """Of the workers and of the reward models that they need."""
    if here.job.spec.suspend:
        return Fact("False", "Suspending", "workers are removed")
    if here.job.spec.data.replay_from:
        return Fact("True", "NothingGenerated", "stored samples are trained again: there are no workers")
    if here.job.spec.rollout.replicas == 0:
        return Fact("False", "ScaledToZero", "spec.rollout.replicas is 0: nothing is generated")
    lacking = [found for found in _workloads(here) if found is None or not _complete(found)]
    if not lacking and not _is_growing(here):
        return Fact("True", "PodsReady")
    cause = _missing(here, [found for found in lacking if found is not None])
    if not _generating(here):
        lost = _was_generating(here, status)
        return Fact.of(False, cause or Cause("RolloutUnavailable" if lost else "WaitingForPods", "no worker is ready"))
    if cause is None and _moving(here, status, lacking):
        return Fact("False", "RollingOut", "workers are being replaced or added")
    text = f"{status.rollout.ready} of {status.rollout.desired} workers are ready"
    if cause is None and not _was_generating(here, status):
        return Fact("False", "WaitingForPods", f"{text}, enough to begin with")
    text += "; training goes on" if has_stepped(status) else ", enough to begin with"
    return Fact("False", "RolloutUnavailable", f"{text}: {cause.message}" if cause else text)


def _workloads(here: Situation) -> list[Object | None]:
    """The Deployments that generating needs; None: it is not there. None at all for stored samples."""
    if here.job.spec.data.replay_from:
        return []
    found = {causes.name(deployment): deployment for deployment in here.deployments()}
    models = [f"reward-{reward.name}" for reward in here.job.spec.rewards if reward.model is not None]
    return [found.get(child_name(here.job, suffix)) for suffix in ("rollout", *models)]


def _missing(here: Situation, lacking: Sequence[Object]) -> Cause | None:
    for deployment in lacking:
        pods = here.component(deployment["metadata"]["labels"]["miles.dev/component"])
        cause = causes.trouble(pods) or causes.refusal(deployment, here.observed.events)
        if cause is not None:
            return cause
    return None


def _generating(here: Situation) -> bool:
    """Whether at least one pod of every kind is ready."""
    return all(found is not None and _ready(here, causes.name(found)) > 0 for found in _workloads(here))


def _was_generating(here: Situation, status: RLJobStatus) -> bool:
    return has_stepped(status) or _was(here, "RolloutUnavailable")


def _moving(here: Situation, status: RLJobStatus, lacking: Sequence[Object | None]) -> bool:
    """Workers are added, or replace others: until all are ready, or one of them is in trouble."""
    begun = _is_growing(here) or any(found is not None and _rolling(found) for found in lacking)
    return begun or (_was(here, "RollingOut") and _was_generating(here, status))


def _was(here: Situation, reason: str) -> bool:
    """Whether that was the reason of RolloutReady."""
    before = find(here.status.conditions, "RolloutReady")
    return before is not None and before.reason == reason


def _is_growing(here: Situation) -> bool:
    """More workers are wanted than the Deployment, as observed, knows of."""
    found, *_ = _workloads(here)
    return found is not None and found["spec"].get("replicas", 1) < here.job.spec.rollout.replicas


def _ready(here: Situation, name: str) -> int:
    found = next((deployment for deployment in here.deployments() if causes.name(deployment) == name), {})
    return int(found.get("status", {}).get("readyReplicas", 0))


def _complete(deployment: Object) -> bool:
    wanted, status = deployment["spec"].get("replicas", 1), deployment.get("status", {})
    seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return seen and status.get("readyReplicas", 0) >= wanted and status.get("updatedReplicas", wanted) >= wanted


def _rolling(deployment: Object) -> bool:
    wanted, status = deployment["spec"].get("replicas", 1), deployment.get("status", {})
    seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return not seen or status.get("updatedReplicas", 0) < wanted or status.get("replicas", 0) < wanted


def _store(here: Situation, status: RLJobStatus) -> Fact:
    said = status.attempt.message
    if said.startswith("StoreUnavailable: ") and not has_stepped(status):
        return Fact("False", "StoreUnavailable", said.partition(": ")[2])
    report = here.observed.report
    before = find(here.status.conditions, "StoreReady")
    if has_stepped(status) or (report is not None and report.get("phase") != "starting"):
        return Fact("True", "StoreAnswers")
    if before is not None and before.status == "True":
        return Fact("True", before.reason, before.message)
    return Fact("Unknown", "Starting", "the trainer has not used the store yet")


def _conflict(conflicts: Sequence[Key]) -> str:
    first = conflicts[0]
    more = f" (and {len(conflicts) - 1} more)" if len(conflicts) > 1 else ""
    return f"{first.kind} {first.name} belongs to somebody else{more}: delete it, or give the job another name"
