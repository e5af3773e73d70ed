"""`oncebox doctor`: everything that a relay needs, looked at in one go."""

from collections.abc import Iterator

from ..admin.doctor import WAITING_MAX, Expectation, Finding, examine, examine_publisher
from ..errors import OnceboxError
from ..relay.file import read_settings
from ..spark.health import java_version, spark_fits, spark_version
from ..wiring import open_publisher, open_store
from . import tables
from .call import FAILED, OK, Call


def doctor(call: Call) -> int:
    """`doctor`."""
    findings = list(_findings(call))
    document = [
        {"about": one.about, "well": one.well, "says": one.says, "advice": one.advice or None} for one in findings
    ]
    lines = [line for one in findings for line in _lines(one)]
    wrong = sum(not one.well for one in findings)
    summary = f"{wrong} to look at" if wrong else "all is well"
    call.answer({"store": call.store, "well": not wrong, "findings": document}, [*lines, summary])
    return FAILED if wrong else OK


def _lines(finding: Finding) -> Iterator[str]:
    yield f"{'ok  ' if finding.well else 'LOOK'}  {finding.about}: {tables.printable(finding.says)}"
    if finding.advice:
        yield f"      → {finding.advice}"


def _findings(call: Call) -> Iterator[Finding]:
    yield from _store(call)
    if call.args.to:
        yield _broker(call.args.to)
    if not call.args.no_spark:
        yield from _spark()


def _store(call: Call) -> Iterator[Finding]:
    try:
        settings = read_settings(call.args.config) if call.args.config else None
        store = open_store(call.args.store)
    except OnceboxError as error:
        yield Finding("store", str(error), "fix this first; nothing else about the store could be looked at")
        return
    try:
        yield from examine(
            store, settings, Expectation(cron=call.args.cron, waiting_max=call.args.waiting_max or WAITING_MAX)
        )
    finally:
        store.close()


def _broker(url: str) -> Finding:
    try:
        publisher = open_publisher(url)
    except OnceboxError as error:
        return Finding("broker", str(error), "correct the URL given with --to")
    try:
        return examine_publisher(publisher)
    finally:
        publisher.close()


def _spark() -> Iterator[Finding]:
    installed = spark_version()
    if installed is None:
        yield Finding("spark", "is not installed", "pip install 'oncebox[spark]', or --no-spark if no relay runs here")
    elif not spark_fits(installed):
        yield Finding("spark", f"is {installed}", "install 4.2 or newer, below 5: pip install 'oncebox[spark]'")
    else:
        yield Finding("spark", installed)
    java, where = java_version()
    yield Finding("java", f"{java} ({where})") if java else Finding("java", "none fits", where)
