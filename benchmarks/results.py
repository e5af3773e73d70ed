"""What a benchmark found, beside what it had to reach."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True, slots=True)
class Bar:
    """What a ratio must reach, or must not exceed."""

    limit: float
    at_most: bool = False

    def met_by(self, ratio: float) -> bool:
        return ratio <= self.limit if self.at_most else ratio >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table. `figures` and `baseline` have one entry for each round, in the same order.

    A rate is ours over the baseline, so more is better; a cost likewise, so less is better: the bar says which.
    """

    name: str
    what: str
    unit: str
    figures: Sequence[float]
    baseline: Sequence[float] = ()
    baseline_is: str = ""
    bar: Bar | None = None
    shortfall: str = ""  # why, if the bar is not met
    notes: Sequence[str] = field(default=())

    @property
    def figure(self) -> float:
        return median(self.figures)

    @property
    def ratios(self) -> list[float]:
        """Round by round: what a busy moment of the machine did to both goes out of the quotient."""
        return [ours / theirs for ours, theirs in zip(self.figures, self.baseline, strict=bool(self.baseline))]

    @property
    def ratio(self) -> float | None:
        return median(self.ratios) if self.baseline else None

    @property
    def baseline_figure(self) -> float | None:
        return median(self.baseline) if self.baseline else None

    @property
    def spread(self) -> tuple[float, float]:
        """Between which the middle half of the ratios lies."""
        ratios = self.ratios
        if len(ratios) < 2:
            return (0.0, 0.0)
        lower, _, upper = quantiles(ratios, n=4, method="inclusive")
        return lower, upper

    @property
    def met(self) -> bool | None:
        return None if self.bar is None or self.ratio is None else self.bar.met_by(self.ratio)

    def document(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "figure": self.figure,
            "figures": list(self.figures),
            "baseline": self.baseline_figure,
            "baselines": list(self.baseline),
            "baseline_is": self.baseline_is,
            "ratio": self.ratio,
            "ratios": self.ratios,
            "bar": None if self.bar is None else str(self.bar),
            "met": self.met,
            "notes": list(self.notes),
        }
