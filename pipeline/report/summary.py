"""The head of a report: what was run, how it went, what came out of it."""

import statistics
from typing import Any

from pipeline import metrics
from pipeline.config import RunConfig
from pipeline.report import configuration, curves
from pipeline.report.configuration import redacted
from pipeline.report.history import History


def of(config: RunConfig, past: History, delivery: dict[str, Any] | None) -> dict[str, Any]:
    """All of the page's data but curves and rollouts."""
    return {
        "name": config.name,
        "run_id": config.run_id,
        "subtitle": subtitle(config),
        "status": status(config, past),
        "step": last_step(past),
        "total_steps": config.algorithm.total_steps,
        "duration_s": duration(past),
        "summary": {"reward": reward(past), "speed": speed(past), "staleness": staleness(config, past)},
        "drops": past.drops.most_common(),
        "delivered": delivered(config, delivery),
        "given": configuration.given(config),
        "configuration": configuration.cards(config),
        "attempts": configuration.changes(past.attempts),
    }


def subtitle(config: RunConfig) -> str:
    algorithm, lora, stored = config.algorithm, config.trainer.lora, config.data.replay_from
    parts = [
        redacted(config.model.uri).removeprefix("hf://").rstrip("/").rsplit("/", 1)[-1],
        algorithm.type,
        f"LoRA rank {lora.rank}" if lora else "full fine-tuning",
        f"{algorithm.prompts_per_step} prompts × {algorithm.group_size} samples a step",
        f"learning rate {algorithm.learning_rate:g}",
        f"stored samples of {redacted(stored.uri)}" if stored else f"staleness ≤ {algorithm.max_staleness}",
    ]
    return " · ".join(parts)


def status(config: RunConfig, past: History) -> dict[str, str]:
    notes = []
    if past.takeovers > 1:
        times = "once" if past.takeovers == 2 else f"{past.takeovers - 1} times"
        notes.append(f"The trainer was restarted {times}; a step done again is shown once.")
    if past.quarantined:
        notes.append(f"Damaged shards set aside: {past.quarantined}; their prompts were generated again.")
    ended = past.stop.reason if past.stop else ""
    if past.why_invalid and past.why_invalid not in ended:
        notes.append(f"The dropped groups have no sample that could be trained: {past.why_invalid}")
    if past.stop is None:
        done = last_step(past)
        label, tone = ("Running or interrupted" if done else "Starting"), ""
        notes.insert(0, "The run has written no stop record: it goes on, or was interrupted.")
    elif past.stop.reason == "complete":
        label, tone = "Complete", "good"
    else:
        label, tone = "Failed", "bad"
        notes.insert(0, past.stop.reason)
    return {"label": label, "tone": tone, "detail": " ".join(notes)}


def last_step(past: History) -> int:
    return max([0, *past.metrics, *([past.stop.step] if past.stop else [])])


def duration(past: History) -> float | None:
    """Seconds from the start of the run to its last trained step."""
    rows = [row for row in past.metrics.values() if row.get("time")]
    if not rows:
        return None
    started = past.started or rows[0]["time"] - (rows[0].get("perf/step_s") or 0.0)
    return max(0.0, max(row["time"] for row in rows) - started)


def reward(past: History) -> dict[str, Any] | None:
    values = _known(past, "reward/mean")
    if not values:
        return None
    count = max(1, len(values) // 10)
    detail = f"mean of the first and the last {count} steps" if count > 1 else "first and last step"
    return {"first": statistics.fmean(values[:count]), "last": statistics.fmean(values[-count:]), "detail": detail}


def speed(past: History) -> dict[str, Any] | None:
    """Over all steps but the first two, in which caches fill and code compiles; as the run's summary.json has it."""
    rows = [
        row
        for row in past.metrics.values()
        if row.get("perf/step_s") and "perf/samples" in row and "perf/tokens" in row
    ]
    if not rows:
        return None
    tokens = metrics.steady_rate(rows, "tokens")
    details = [
        f"{tokens:,.0f} tokens/s with their prompts",
        f"trainer waits {metrics.waiting_share(rows):.0%} of the time",
    ]
    return {"samples_per_s": metrics.steady_rate(rows, "samples"), "detail": ", ".join(details)}


def staleness(config: RunConfig, past: History) -> dict[str, Any] | None:
    mean, highest = _known(past, "async/staleness_mean"), _known(past, "async/staleness_max")
    if not mean:
        return None
    detail = f"mean; at most {max(highest or mean):g} of {config.algorithm.max_staleness} allowed"
    return {"mean": statistics.fmean(mean), "detail": detail}


def delivered(config: RunConfig, delivery: dict[str, Any] | None) -> dict[str, str] | None:
    if config.output is None:
        return None
    detail = f"step {delivery['version'][1]} ({config.output.what})" if delivery else "not delivered yet"
    return {"uri": redacted(config.output.uri), "detail": detail}


def _known(past: History, name: str) -> list[float]:
    return [value for value in curves.series(past, name) if value is not None]
