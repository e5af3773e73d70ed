"""What Oncebox tells the outside about itself. Costs nothing when no SDK is installed."""

import sys


def current_trace() -> dict[str, str]:
    """The trace context of the span that is open now, as propagation headers; empty without OpenTelemetry (EM-15)."""
    if "opentelemetry" not in sys.modules:  # who has opened a span has imported it; a failing import is slow each time
        return {}
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier
