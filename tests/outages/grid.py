"""One fault of the outage grid, of one length."""

import json
import os
import time
from pathlib import Path

from tests.outages.stage import Fault, Stage


def outlasts(stage: Stage, name: str, fault: Fault, seconds: float) -> None:
    """Work resumes after the fault, within twice the bound; nothing is lost or done twice, and order per key holds."""
    stage.write()
    with fault(stage):
        time.sleep(seconds)
    healed = time.monotonic()
    stage.write()
    limit = 2 * stage.times.bound
    stage.until(stage.all_published, f"{name} for {seconds:g} s: the relay did not resume", limit)
    published = time.monotonic() - healed
    stage.until(stage.all_processed, f"{name} for {seconds:g} s: the processor did not resume", limit)
    processed = time.monotonic() - healed
    stage.sound()
    note(name, seconds, stage.times.bound, published, processed)


def note(name: str, seconds: float, bound: float, published: float, processed: float) -> None:
    """Keep the figures for docs/reference/outages.md, if somebody asks for them."""
    if file := os.environ.get("ONCEBOX_OUTAGES"):
        row = {"fault": name, "seconds": seconds, "bound": bound, "published": published, "processed": processed}
        with Path(file).open("a") as rows:
            rows.write(json.dumps(row) + "\n")
