"""The curves of a report: which metrics stand together, under which title."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from pipeline.config import RunConfig
from pipeline.report import evaluations
from pipeline.report.history import History

Chart = dict[str, Any]
"""{title, unit, kind, plain, note, series: [{name, values [steps]}], gaps?, bound?} as page.js draws it."""


@dataclasses.dataclass(frozen=True)
class Curve:
    title: str
    metrics: dict[str, str]
    """Metric → its name in the legend; `reward/*/mean` stands for every reward function."""
    unit: str = ""
    """%: a share."""
    plain: bool = False
    """Never smoothed."""
    note: str | None = None


SECTIONS: dict[str, tuple[Curve, ...]] = {
    "Learning": (
        Curve("Reward", {"reward/mean": "mean", "reward/*/mean": "*"}, note="Mean over the samples trained in a step"),
        Curve("Spread of rewards", {"reward/std": "standard deviation"}),
        Curve(
            "Groups without a signal",
            {"reward/frac_zero_std": "all samples alike", "reward/frac_invalid": "samples without a score"},
            "%",
            note="All samples of a group scored alike: their advantage is 0",
        ),
        Curve("Response length", {"response_length/mean": "mean", "response_length/max": "longest"}, "tokens"),
        Curve("Turns of an episode", {"episode/turns_mean": "mean", "episode/turns_max": "most"}, "turns"),
        Curve(
            "What the environment says",
            {"episode/observation_length_mean": "mean of an episode"},
            "tokens",
            note="Observations: input to the policy, not trained on",
        ),
        Curve("Responses cut off", {"response_length/clip_ratio": "at the length limit"}, "%"),
        Curve("Entropy", {"loss/entropy": "of the policy"}, "nats"),
    ),
    "Optimisation": (
        Curve("Loss", {"loss/policy": "policy", "loss/value": "value", "loss/kl": "KL"}),
        Curve("Gradient norm", {"actor/grad_norm": "before clipping"}),
        Curve("Clipped tokens", {"actor/clip_frac": "all", "actor/clip_frac_high": "above"}, "%"),
        Curve("KL to the previous policy", {"actor/ppo_kl": "mean"}, "nats"),
        Curve("KL to the base", {"actor/reference_kl": "per token", "actor/kl_coefficient": "coefficient"}),
        Curve("Advantage", {"advantage/mean": "mean", "advantage/std": "standard deviation"}),
        Curve("Learning rate", {"actor/lr": "learning rate"}, plain=True),
        Curve("Critic", {"critic/explained_var": "explained variance", "critic/clip_frac": "clipped"}),
    ),
    "Sampler and trainer": (
        Curve(
            "Mismatch of log-probabilities",
            {"mismatch/logprob_abs_diff": "mean |log μ − log π_old|"},
            "nats",
            note="μ: the policy that sampled, in vLLM; π_old: the trainer's before the step. On the sampled tokens; "
            "includes staleness",
        ),
        Curve("KL of sampler and trainer", {"mismatch/kl": "KL(μ‖π_old)"}, "nats"),
        Curve("Importance weights", {"mismatch/is_mean": "mean", "mismatch/is_max": "largest"}),
        Curve("Effective samples", {"mismatch/ess": "effective sample size"}, "%"),
        Curve("Corrected tokens", {"mismatch/tis_clip_frac": "weight capped", "mismatch/masked_frac": "masked"}, "%"),
        Curve("Staleness", {"async/staleness_mean": "mean", "async/staleness_max": "largest"}, "versions", True),
        Curve("Queue", {"async/queue_size": "waiting", "async/running_groups": "being generated"}, "groups"),
    ),
    "Speed": (
        Curve("Samples trained", {"perf/samples_per_s": "samples"}, "per second"),
        Curve(
            "Tokens",
            {"perf/tokens_per_s": "trained, prompts counted", "perf/generated_tokens_per_s": "generated"},
            "per second",
        ),
        Curve("Memory", {"perf/peak_memory_gib": "peak of the largest trainer process"}, "GiB"),
        Curve("Model FLOPs utilisation", {"perf/mfu": "MFU"}, "%"),
    ),
}
STEP_TIME = {
    "async/wait_for_batch_s": "wait for rollouts",
    "perf/forward_backward_s": "forward and backward",
    "perf/weight_publish_s": "publish weights",
    "perf/checkpoint_s": "checkpoint",
}
"""Parts of perf/step_s; what is left of it is `other`."""


def sections(config: RunConfig, past: History) -> list[dict[str, Any]]:
    """The charts that have data, by section."""
    found = {title: [_chart(curve, past) for curve in curves] for title, curves in SECTIONS.items()}
    found["Learning"] = [*evaluations.charts(past), *found["Learning"]]
    found["Speed"] = [step_time(past), *found["Speed"]]
    for chart in found["Sampler and trainer"]:
        if chart["title"] == "Staleness":
            chart["bound"] = {
                "name": f"bound {config.algorithm.max_staleness}",
                "value": config.algorithm.max_staleness,
            }
    shown = [
        {"title": title, "charts": [chart for chart in charts if chart["series"]]} for title, charts in found.items()
    ]
    return [section for section in shown if section["charts"]]


def others(past: History) -> list[Chart]:
    """Every metric that no section names, a chart each."""
    named = {name for curves in SECTIONS.values() for curve in curves for name in _expanded(curve, past)}
    named |= set(STEP_TIME) | {"perf/step_s", "step", "term", "time"}
    return [_chart(Curve(name, {name: "value"}), past) for name in names(past) if name not in named]


def names(past: History) -> list[str]:
    return sorted({name for row in past.metrics.values() for name, value in row.items() if not isinstance(value, str)})


def series(past: History, name: str) -> list[float | None]:
    return [row.get(name) for row in past.metrics.values()]


def step_time(past: History) -> Chart:
    parts = {label: series(past, name) for name, label in STEP_TIME.items() if name in names(past)}
    whole = series(past, "perf/step_s")
    sums = [sum(value or 0.0 for value in values) for values in zip(*parts.values(), strict=True)] or [0.0] * len(whole)
    other = [None if step is None else max(0.0, step - known) for step, known in zip(whole, sums, strict=True)]
    if any(other):
        parts["other"] = other
    return {
        "title": "Where a step's time goes",
        "unit": "seconds",
        "kind": "stack",
        "plain": True,
        "series": [{"name": name, "values": values} for name, values in parts.items()],
    }


def _chart(curve: Curve, past: History) -> Chart:
    found = {label: series(past, name) for name, label in _expanded(curve, past).items()}
    return {
        "title": curve.title,
        "unit": curve.unit,
        "kind": "line",
        "plain": curve.plain,
        "note": curve.note,
        "series": [
            {"name": label, "values": values}
            for label, values in found.items()
            if any(value is not None for value in values)
        ],
        "gaps": _gaps(found.values()),
    }


def _gaps(found: Iterable[list[float | None]]) -> int:
    """Steps in which a curve has no value, though it has one in others."""
    drawn = [values for values in found if any(value is not None for value in values)]
    return sum(any(value is None for value in values) for values in zip(*drawn, strict=True))


def _expanded(curve: Curve, past: History) -> dict[str, str]:
    """`curve.metrics` with reward/*/mean spelled out; a single reward function is the mean itself."""
    found: dict[str, str] = {}
    for name, label in curve.metrics.items():
        if "*" not in name:
            found[name] = label
            continue
        before, after = name.split("*")
        each = [
            other
            for other in names(past)
            if other.startswith(before) and other.endswith(after) and len(other) > len(before + after)
        ]
        if len(each) > 1:
            found |= {other: other[len(before) : -len(after)] for other in each}
    return found
