"""What trainer rank 0 says of itself → the job's status. Pure.

Numbers move when a step has finished, and at most every REFRESH_S: a status write costs every watcher something.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from operators.conditions import timestamp
from operators.resolve import Platform, run_config
from operators.situation import Situation
from operators.spec.status import CheckpointStatus, Metric, RLJobStatus, StoreStatus, TrainingStatus

REFRESH_S = 10
MOST_METRICS = 16
MOST_REWARDS = 16

COUNTING = ("phase", "step", "checkpoint_step", "losses", "waits")

Report = Mapping[str, Any]


def counting(report: Report | None) -> Report | None:
    """What of a report means something at once; the rest is told with the next step, or when a limit has passed."""
    return report and {name: report.get(name) for name in COUNTING}


def is_told(status: RLJobStatus, report: Report | None) -> bool:
    """Whether the status has the step of the report, which may wait for REFRESH_S."""
    return report is None or report.get("phase") == "starting" or int(report.get("step") or 0) == status.training.step


def updated(here: Situation, status: RLJobStatus, platform: Platform) -> RLJobStatus:
    """`status` with what the report adds to it."""
    report, before = here.observed.report, here.status.training
    total = here.job.spec.algorithm.total_steps
    if report is None or report.get("phase") == "starting":  # which has no step to tell yet
        progress = f"{before.step}/{total}"
        training = before.model_copy(update={"total_steps": total, "progress": progress})
        return status.model_copy(update={"training": training})
    step = int(report.get("step") or 0)
    fresh = before.last_progress_time is not None and here.seconds_since(before.last_progress_time) < REFRESH_S
    if before.progress and (step == before.step or (step > before.step and fresh)):
        return _checkpointed(here, status, platform)
    return _told(here, status, report, platform)


def concluded(here: Situation, status: RLJobStatus, platform: Platform) -> RLJobStatus:
    """`status` of a job that is complete, with the last report, however short ago the one before was."""
    report, total = here.observed.report, here.job.spec.algorithm.total_steps
    if report is None or report.get("step") != total:
        return status
    return _told(here, status, report, platform)


def _told(here: Situation, status: RLJobStatus, report: Report, platform: Platform) -> RLJobStatus:
    before, total = here.status.training, here.job.spec.algorithm.total_steps
    step, version, eta = int(report.get("step") or 0), report.get("version"), report.get("eta_s")
    training = TrainingStatus(
        step=step,
        total_steps=total,
        progress=f"{step}/{total}",
        policy_version=f"t{version[0]}-s{version[1]}" if version else before.policy_version,
        last_progress_time=timestamp(here.now) if step > before.step else before.last_progress_time,
        eta_seconds=None if eta is None else max(0, int(eta)),
        rewards=_rewards(before, step, total, report.get("reward_mean")),
    )
    told = {"training": training, "metrics": list(_metrics(report)), "store": _stored(report) or status.store}
    status = status.model_copy(update=told)
    return _checkpointed(here, status, platform)


def _rewards(before: TrainingStatus, step: int, total: int, mean: Any) -> list[str]:
    """A new entry for each part of the run; within one the newest stands."""
    if not isinstance(mean, int | float):
        return before.rewards
    within = before.rewards and step * MOST_REWARDS // total == before.step * MOST_REWARDS // total
    kept = before.rewards[:-1] if within else before.rewards
    return [*kept, f"{mean:.6g}"][-MOST_REWARDS:]


def _checkpointed(here: Situation, status: RLJobStatus, platform: Platform) -> RLJobStatus:
    step = (here.observed.report or {}).get("checkpoint_step")
    known = status.last_checkpoint
    if step is None or (known is not None and known.step == step):
        return status
    run = run_config(here.job, here.job.metadata.uid or "", platform).store.uri
    found = CheckpointStatus(uri=f"{run}/checkpoints", step=step, time=timestamp(here.now))
    return status.model_copy(update={"last_checkpoint": found})


def _stored(report: Report) -> StoreStatus | None:
    found = report.get("store") or {}
    size, objects = found.get("bytes"), found.get("objects")
    if size is None or objects is None:
        return None
    return StoreStatus(bytes=size, objects=objects)


def _metrics(report: Report) -> Iterator[Metric]:
    """The few numbers that tell most; parts of the reward and evaluations fill the rest."""
    speed, waits = report.get("tokens_per_s") or {}, report.get("waits") or {}
    named: dict[str, Any] = {
        "reward/mean": report.get("reward_mean"),
        "tokens_per_s/trained": speed.get("trained"),
        "tokens_per_s/generated": speed.get("generated"),
        "samples_per_s": report.get("samples_per_s"),
        "staleness/mean": report.get("staleness_mean"),
        "staleness/max": report.get("staleness_max"),
        "queue/groups": report.get("queue_groups"),
        "response_length/mean": report.get("response_length_mean"),
        "waits/trainer": waits.get("trainer"),
        "waits/rollout": waits.get("rollout"),
    }
    named |= {f"reward/{part}": value for part, value in (report.get("reward") or {}).items()}
    for name, results in (report.get("evaluation") or {}).items():
        named |= {f"evaluation/{name}/{metric}": value for metric, value in results.items() if metric != "step"}
    told = [(name, value) for name, value in named.items() if isinstance(value, int | float)]
    for name, value in told[:MOST_METRICS]:
        yield Metric(name=name[:128], value=f"{value:.6g}")
