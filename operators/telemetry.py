"""What the operator tells of itself: Prometheus metrics, /healthz and /readyz on one port, and logs as JSON lines."""

import collections
import contextlib
import datetime
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import NamedTuple

from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from operators.liveness import Health

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


OVER = ("Complete", "Failed", "Suspended")
"""Phases of jobs that are not expected to be Ready."""


class JobState(NamedTuple):
    """What the last status of an RLJob says in short."""

    namespace: str
    name: str
    phase: str
    ready: bool
    reason: str
    """Of the condition Ready; empty: nothing is told yet."""


class Telemetry(Collector):
    """The metrics, in a registry of their own."""

    def __init__(self, health: Health) -> None:
        self.registry = CollectorRegistry()
        self.health = health
        self.jobs: Callable[[], Iterable[JobState]] = lambda: ()
        """All that are known, where this replica acts."""
        self.depth: Callable[[], int] = lambda: 0
        """Keys that are due."""
        self.reconciles = Counter(
            "miles_reconciles", "Passes over an RLJob, by how they ended", ["result"], registry=self.registry
        )
        self.duration = Histogram(
            "miles_reconcile_seconds", "Duration of a pass", buckets=SECONDS, registry=self.registry
        )
        self.waited = Histogram(
            "miles_queue_wait_seconds",
            "Time that an RLJob waited for its pass",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.requests = Counter(
            "miles_api_requests", "Answers of the API server; code 0: none", ["verb", "code"], registry=self.registry
        )
        self.leading = Gauge("miles_leading", "1 where this replica acts", registry=self.registry)
        for result in ("ok", "conflict", "error"):
            self.reconciles.labels(result)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(self)

    def counted(self, verb: str, status: int) -> None:
        self.requests.labels(verb, str(status)).inc()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("miles_queue_depth", "RLJobs that wait for a pass", value=self.depth())
        ages = GaugeMetricFamily("miles_watch_age_seconds", "Time since a watch gave a sign of life", labels=["kind"])
        for source, age in self.health.ages().items():
            ages.add_metric([source], age)
        yield ages
        known = list(self.jobs())
        jobs = GaugeMetricFamily("miles_jobs", "RLJobs by phase", labels=["phase"])
        for phase, count in collections.Counter(job.phase for job in known).items():
            jobs.add_metric([phase or "Unknown"], count)
        yield jobs
        ready = GaugeMetricFamily(
            "miles_job_ready",
            "1 where the condition Ready of an RLJob is True; of those that are neither over nor suspended",
            labels=["namespace", "name", "reason"],
        )
        for job in known:
            if job.phase not in OVER:
                ready.add_metric([job.namespace, job.name, job.reason], job.ready)
        yield ready


@contextlib.asynccontextmanager
async def serving(telemetry: Telemetry, port: int) -> AsyncIterator[None]:
    """GET /healthz, /readyz and /metrics. Raises OSError where the port is taken."""

    async def healthz(request: web.Request) -> web.Response:
        return _answer(telemetry.health.faults())

    async def readyz(request: web.Request) -> web.Response:
        waiting_for = telemetry.health.waits_for()
        return _answer([f"waits for {waiting_for}"] if waiting_for else telemetry.health.faults())

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(telemetry.registry), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, None, port).start()
        yield
    finally:
        await runner.cleanup()


def _answer(faults: list[str]) -> web.Response:
    return web.Response(text="\n".join(faults or ["ok"]) + "\n", status=503 if faults else 200)


class JsonLines(logging.Formatter):
    """One JSON object a line; what a record carries as `extra={"fields": {…}}` stands in it by name."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line: dict[str, object] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(fields if isinstance(fields, Mapping) else {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def log_json(level: str) -> None:
    """All logs of this process to stderr from `level` on; those of libraries from warning on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("operators").setLevel(level.upper())
