"""The commands that keep running: `relay` and `reap`."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..config import Timing
from ..processor.app import load
from ..relay.file import read_settings, timing_from
from ..relay.reaper import Reaper
from ..relay.settings import RelaySettings
from ..stores.base import hidden_password
from ..wiring import open_publisher, open_source, open_store, store_url
from .call import OK, Call, Refused

if TYPE_CHECKING:
    from ..spark.driver import Plan

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_TIMES = ("lease", "heartbeat", "reaper_interval", "shutdown_timeout")
_OWN = ("name", "claim_max", "claim_bytes_max", "in_flight", "rate_max")


def relay(call: Call) -> int:
    """`relay`: what is wrong with the settings, the store or the URL is said before Spark is started."""
    settings, plan = _settings(call), _plan(call)
    _log(call)
    open_publisher(call.args.to).close()
    open_store(call.args.store).close()
    with _signals() as stop:
        published = _run(call, settings, plan, stop)
    document = {"store": call.store, "to": hidden_password(call.args.to), "published": published}
    call.answer(document, [f"published {published:,} events"])
    return OK


def _run(call: Call, settings: RelaySettings, plan: "Plan", stop: threading.Event) -> int:
    from ..spark import driver
    from ..spark.session import session

    call.note(f"{call.store} → {hidden_password(call.args.to)}: starting Spark; Ctrl-C stops")
    spark = session(
        call.args.master or driver.master_for(plan), app=f"oncebox relay {settings.name}", archive_classes=True
    )
    if stop.is_set():
        return 0
    running = driver.relay(spark, to=call.args.to, store=store_url(call.args.store), settings=settings, plan=plan)
    running.run(stop)
    return running.published


def _settings(call: Call) -> RelaySettings:
    """Of the file, then of the command line; together they are checked once more."""
    args = call.args
    settings = read_settings(args.config) if args.config else RelaySettings()
    given = {name: getattr(args, name) for name in _OWN if getattr(args, name) is not None}
    times = {name: getattr(args, name) for name in _TIMES if getattr(args, name) is not None}
    if "lease" in times:
        settings = replace(settings, timing=timing_from(times))
    elif times:
        settings = replace(settings, timing=replace(settings.timing, **times))
    if args.failures_max is not None:
        default = replace(settings.policies.default, failures_max=args.failures_max)
        given["policies"] = replace(settings.policies, default=default)
    return replace(settings, **given)


def _plan(call: Call) -> "Plan":
    try:
        from ..spark.driver import Plan
        from ..spark.receipts import Receipts
    except ModuleNotFoundError as error:
        raise Refused(
            f"the relay runs on Spark, and {error.name!r} is not there: pip install 'oncebox[spark]'"
        ) from error
    args = call.args
    given: dict[str, Any] = {name: getattr(args, name) for name in ("queries", "tasks", "shift", "checkpoint")}
    if args.receipts:
        given["receipts"] = Receipts.parse(args.receipts)
    chosen = {name: value for name, value in given.items() if value is not None}
    return Plan(**chosen, drain=args.drain, reaper=not args.no_reaper)


def process(call: Call) -> int:
    """`process`: what is wrong is said before Spark is started, as far as it can be seen without it."""
    try:
        from ..spark import process_driver as host
        from ..spark.session import session
    except ModuleNotFoundError as error:
        raise Refused(f"it runs on Spark, and {error.name!r} is not there: pip install 'oncebox[spark]'") from error
    args = call.args
    host.find_modules_here()
    app = load(args.app)
    open_source(args.source, consumer=app.name).close()
    _log(call)
    given = {name: getattr(args, name) for name in ("tasks", "shift") if getattr(args, name) is not None}
    with _signals() as stop:
        call.note(f"{app.name}: {hidden_password(args.source)} → {hidden_password(args.state)}: starting Spark")
        spark = session(args.master, app=f"oncebox process {app.name}", archive_classes=True)
        if stop.is_set():
            return OK
        options = {"source": args.source, "state": args.state, "emit": args.emit, "drain": args.drain, **given}
        running = host.process(spark, args.app, **options)
        running.run(stop)
    document = {"processor": app.name, "handled": running.handled}
    call.answer(document, [f"handled {running.handled:,} events"])
    return OK


def reap(call: Call) -> int:
    """`reap`."""
    interval = Timing().reaper_interval if call.args.interval is None else call.args.interval
    Timing(lease=max(interval * 2, timedelta(seconds=30)), reaper_interval=interval)  # above 0
    _log(call)
    store = open_store(call.args.store)
    try:
        reaper = Reaper(store, interval=interval)
        if call.args.once:
            swept = reaper.sweep()
            document = {"recovered": swept.recovered, "died": swept.died}
            call.answer(document, [f"{swept.recovered:,} events are eligible again, {swept.died:,} are DEAD"])
            return OK
        call.note(f"{call.store}: reaping every {interval.total_seconds():g} s; Ctrl-C stops")
        with _signals() as stop:
            reaper.run(stop)
    finally:
        store.close()
    return OK


def _log(call: Call) -> None:
    """What a relay has to say goes to standard error; Spark's own words only when they matter."""
    level = logging.DEBUG if call.args.debug else logging.INFO
    logging.basicConfig(stream=sys.stderr, format=LOG_FORMAT, level=logging.WARNING)
    logging.getLogger("oncebox").setLevel(level)


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that the first SIGTERM or SIGINT sets; a second one ends the process at once."""
    stop = threading.Event()

    def told(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
