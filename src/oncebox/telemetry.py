"""What Oncebox tells the outside about itself. Costs nothing when no SDK is installed."""


def current_trace() -> dict[str, str]:
    """The trace context of the span that is open now, as propagation headers; empty without OpenTelemetry (EM-15)."""
    try:
        from opentelemetry import propagate
    except ImportError:
        return {}
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier
