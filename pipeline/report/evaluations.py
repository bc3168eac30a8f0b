"""Evaluations in a report: a curve for each set, and the change from the first to the last."""

import math
import statistics
from typing import Any

from pipeline.evaluation import NORMAL_95, compare
from pipeline.report.history import Document, History

Interval = tuple[float, float]


def charts(past: History) -> list[dict[str, Any]]:
    return [_chart(past, name) for name in names(past)]


def changes(past: History) -> list[dict[str, Any]]:
    """For each set the score of the first and of the last evaluation, compared prompt by prompt."""
    return [_change(past, name) for name in names(past)]


def failures(past: History) -> list[str]:
    return [
        f"The evaluation at step {step} failed: {each['error']}"
        for step, each in past.evaluations.items()
        if each.get("error")
    ]


def names(past: History) -> list[str]:
    return list(dict.fromkeys(name for each in past.evaluations.values() for name in each["sets"]))


def _chart(past: History, name: str) -> dict[str, Any]:
    results = _results(past, name)
    newest = results[max(results)]
    return {
        "title": f"Evaluation: {name}",
        "unit": _unit(list(results.values())),
        "kind": "line",
        "plain": True,
        "note": "Held-out prompts; the band is the 95 % interval over prompts",
        "x": list(results),
        "series": [_series(metric, list(results.values())) for metric in _metrics(newest)],
    }


def _series(metric: str, results: list[Document]) -> dict[str, Any]:
    intervals = [interval(metric, result) for result in results]
    return {
        "name": metric,
        "values": [result.get(metric) for result in results],
        "low": [each and each[0] for each in intervals],
        "high": [each and each[1] for each in intervals],
    }


def _change(past: History, name: str) -> dict[str, Any]:
    results = _results(past, name)
    first, last = results[min(results)], results[max(results)]
    metric = _metrics(last)[0]
    tile = {"name": f"{name} · {metric}", "unit": _unit([first, last]), "after": last[metric], "prompts": last["count"]}
    if first is last or first.get(metric) is None or last[metric] is None:
        return tile | {"before": None}
    try:
        change, low, _ = compare(first["per_prompt"], last["per_prompt"])
    except ValueError:
        return tile | {"before": None}
    return tile | {"before": first[metric], "change": change, "error": change - low}


def interval(metric: str, result: Document) -> Interval | None:
    """95 % over prompts: normal for the mean score, Wilson's for the share of solved prompts."""
    scores = [score for score in result["per_prompt"] if score is not None]
    value, count = result.get(metric), len(scores)
    if value is None or count < 2:
        return None
    if metric.startswith("pass@"):
        return wilson(value, count)
    margin = NORMAL_95 * statistics.stdev(scores) / math.sqrt(count)
    return value - margin, value + margin


def wilson(share: float, count: int) -> Interval:
    """Of a share seen in `count` trials; inside [0, 1]. Example: 0.5 of 10 lies between 0.24 and 0.76."""
    square = NORMAL_95**2 / count
    centre, width = share + square / 2, NORMAL_95 * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, (centre - width) / (1 + square)), min(1.0, (centre + width) / (1 + square))


def _results(past: History, name: str) -> dict[int, Document]:
    """Step → the set's result, ascending."""
    return {step: each["sets"][name] for step, each in past.evaluations.items() if name in each["sets"]}


def _metrics(result: Document) -> list[str]:
    """avg@k, and pass@k where it says more."""
    k = result["samples"]
    return [f"avg@{k}", f"pass@{k}"] if k > 1 else [f"avg@{k}"]


def _unit(results: list[Document]) -> str:
    """Scores between 0 and 1 are read as shares."""
    scores = [score for result in results for score in result["per_prompt"] if score is not None]
    return "%" if all(0 <= score <= 1 for score in scores) else ""
