"""What Oncebox tells the outside about itself. Costs nothing when no SDK is installed.

A metric's name is written once, here. Whoever has set up OpenTelemetry's metrics gets them; the log has the rest.
"""

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How a metric adds up."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name as it is exported, its unit, what it tells."""

    name: str
    kind: Kind
    unit: str
    tells: str


CLAIMED = Metric("relay.claimed.count", Kind.COUNTER, "{event}", "events claimed")
PUBLISHED = Metric("relay.published.count", Kind.COUNTER, "{event}", "events finalized as PUBLISHED")
FAILED = Metric("relay.failed.count", Kind.COUNTER, "{event}", "failed publishes, by scope")
RELEASED = Metric("relay.released.count", Kind.COUNTER, "{event}", "events given back untried")
DIED = Metric("relay.dead.count", Kind.COUNTER, "{event}", "events finalized as DEAD")
REFUSED = Metric(
    "relay.refused.count", Kind.COUNTER, "{event}", "events whose finalize was refused: the lease was lost"
)
ABANDONED = Metric("relay.abandoned.count", Kind.COUNTER, "{event}", "events dropped unfinalized: the heartbeat failed")
HEARTBEAT_FAILED = Metric(
    "relay.heartbeat.failed.count", Kind.COUNTER, "{failure}", "renewals that failed or were refused"
)
WORKER_DIED = Metric("relay.worker.died.count", Kind.COUNTER, "{worker}", "workers found dead (LR-052)")
PAUSED = Metric("relay.destination.paused.count", Kind.COUNTER, "{pause}", "times a destination was left alone")
BATCH = Metric("relay.batch.duration", Kind.HISTOGRAM, "s", "from claim to finalize")
REAPER_RECOVERED = Metric("reaper.recovered.count", Kind.COUNTER, "{event}", "events recovered (LR-023)")
REAPER_STALE = Metric(
    "reaper.stale.duration", Kind.HISTOGRAM, "s", "how long past locked_until each was stuck (LR-023)"
)
REAPER_RUNS = Metric("reaper.runs.total", Kind.COUNTER, "{run}", "executions of the reaper (LR-023)")

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

_instruments: dict[str, Any] = {}


def count(metric: Metric, number: int = 1, **tags: str) -> None:
    """Add to a counter."""
    if number and "opentelemetry.metrics" in sys.modules:
        _instrument(metric).add(number, tags)


def measure(metric: Metric, value: float, **tags: str) -> None:
    """Enter one value into a histogram."""
    if "opentelemetry.metrics" in sys.modules:
        _instrument(metric).record(value, tags)


def _instrument(metric: Metric) -> Any:
    if metric.name not in _instruments:
        from opentelemetry import metrics

        meter = metrics.get_meter("oncebox")
        make = meter.create_counter if metric.kind is Kind.COUNTER else meter.create_histogram
        _instruments[metric.name] = make(metric.name, unit=metric.unit, description=metric.tells)
    return _instruments[metric.name]


def current_trace() -> dict[str, str]:
    """The trace context of the span that is open now, as propagation headers; empty without OpenTelemetry (EM-15)."""
    if "opentelemetry" not in sys.modules:  # who has opened a span has imported it; a failing import is slow each time
        return {}
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier
