"""Reads the metrics as an operator's monitoring would: through OpenTelemetry."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

from opentelemetry import metrics
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, HistogramDataPoint, InMemoryMetricReader

from oncebox.telemetry import Metric


@cache
def _reader() -> InMemoryMetricReader:
    """One for the whole process: a provider can be set once."""
    since_last = {Counter: AggregationTemporality.DELTA, Histogram: AggregationTemporality.DELTA}
    reader = InMemoryMetricReader(preferred_temporality=since_last)  # type: ignore[arg-type]
    metrics.set_meter_provider(MeterProvider([reader]))
    return reader


class Meter:
    """What was measured since this one was made."""

    def __init__(self) -> None:
        self._points: dict[str, list[Any]] = defaultdict(list)
        self.units: dict[str, str] = {}
        _reader().get_metrics_data()  # what others left

    def _read(self) -> None:
        for name, unit, point in _exported():
            self._points[name].append(point)
            self.units[name] = unit

    def points(self, metric: Metric) -> list[Any]:
        """All data points of this metric, by its exported name."""
        self._read()
        return self._points[metric.name]

    def total(self, metric: Metric, **tags: str) -> float:
        """The sum of a counter, or the number of values in a histogram, over the points that bear these tags."""
        chosen = [point for point in self.points(metric) if tags.items() <= dict(point.attributes).items()]
        return sum(point.count if isinstance(point, HistogramDataPoint) else point.value for point in chosen)

    def names(self) -> set[str]:
        """Of all that was measured."""
        self._read()
        return set(self._points)


def _exported() -> Iterator[tuple[str, str, Any]]:
    exported = _reader().get_metrics_data()
    for resource in exported.resource_metrics if exported else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    yield metric.name, metric.unit or "", point
