"""The commands that keep running: `relay` and `reap`."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from .. import logs
from ..config import Timing
from ..errors import (
    PublisherRefused,
    PublisherUnavailable,
    SourceUnavailable,
    StateInUse,
    StateRefused,
    StoreRefused,
    StoreUnavailable,
)
from ..logs import LogSettings
from ..outage import outlast
from ..processor.app import load
from ..processor.unhandled import listed
from ..relay.file import read_settings, timing_from
from ..relay.reaper import Reaper
from ..relay.settings import RelaySettings
from ..stores.base import hidden_password
from ..wiring import open_publisher, open_source, open_store, store_url
from .call import LEFT, OK, Call, Refused

if TYPE_CHECKING:
    from ..spark.driver import Left, Plan, SparkRelay

AWAY = (StoreUnavailable, PublisherUnavailable, SourceUnavailable)  # the same call may pass later
REFUSED = (StoreRefused, PublisherRefused, StateRefused)  # it answers, and an operator must correct the login
_LEFT = {  # what a processor's drain leaves, by reason
    "unread": "{:,} partitions have events that were not read",
    "retries": "{:,} events wait for a retry, or behind one of their key",
    "redrives": "{:,} dead letters wait to be redriven or purged",
    "emits": "{:,} emitted events wait for their outbox",
    "held": "{:,} partitions are held by another run; stop it first",
    "failing": "{:,} partitions meet an error; the log says which",
}
_TIMES = ("lease", "heartbeat", "reaper_interval", "shutdown_timeout", "silence_max")
_OWN = ("name", "claim_max", "claim_bytes_max", "in_flight", "rate_max")


def relay(call: Call) -> int:
    """`relay`: what is wrong with the settings, the store or the URL is said before Spark is started."""
    settings, plan = _settings(call), _plan(call)
    _log(call)
    with _signals() as stop:
        running = _run(call, settings, plan, stop) if _all_answer(call, stop) else None
    published, left = (running.published, running.left) if running else (0, None)
    if plan.drain and left is None:
        raise Refused(f"stopped before it could count what is left; published {published:,} events")
    document: dict[str, Any] = {"store": call.store, "to": hidden_password(call.args.to), "published": published}
    if left is not None:
        document["left"] = asdict(left)
    call.answer(document, [f"published {published:,} events", *([] if left is None else _left_lines(left))])
    return LEFT if left is not None and left.number else OK


def _left_lines(left: "Left") -> Iterator[str]:
    """What a drain leaves, for people."""
    reasons = {name: number for name, number in asdict(left).items() if number}
    no_work: dict[str, int] = {name: reasons.pop(name) for name in ("delayed", "blocked") if name in reasons}
    if reasons:
        yield f"{left.number:,} events are left: {_listed(reasons)}; `oncebox list --state PENDING` shows why"
    if no_work:
        yield f"not due, or behind a DEAD event: {_listed(no_work)}"


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in reasons.items())


def _all_answer(call: Call, stop: threading.Event) -> bool:
    """Wait until broker and store answer; false if told to stop first. A drain does not wait: it fails."""
    with closing(open_publisher(call.args.to)) as publisher:
        broker = _answers(call, stop, publisher.check)
    return broker and _answers(call, stop, lambda: open_store(call.args.store).close())


def _answers(call: Call, stop: threading.Event, ask: Callable[[], object]) -> bool:
    if getattr(call.args, "drain", False):
        ask()
        return not stop.is_set()
    try:
        outlast(ask, errors=AWAY, never=REFUSED, who=call.args.command, ends=stop.is_set, sleep=stop.wait)
    except AWAY:
        if not stop.is_set():
            raise
    return not stop.is_set()


def _run(call: Call, settings: RelaySettings, plan: "Plan", stop: threading.Event) -> "SparkRelay | None":
    from ..spark import driver
    from ..spark.session import session

    call.note(f"{call.store} → {hidden_password(call.args.to)}: starting Spark; Ctrl-C stops")
    spark = session(
        call.args.master or driver.master_for(plan), app=f"oncebox relay {settings.name}", archive_classes=True
    )
    if stop.is_set():
        return None
    running = driver.relay(
        spark,
        to=call.args.to,
        store=store_url(call.args.store),
        settings=settings,
        plan=plan,
        gives_up=lambda: stop.is_set() or plan.drain,
    )
    running.run(stop)
    return running


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
    names = ("queries", "tasks", "shift", "checkpoint", "drain_wait")
    given: dict[str, Any] = {name: getattr(args, name) for name in names}
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
    _log(call)
    names = ("tasks", "shift", "drain_wait")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    with _signals() as stop:
        if not _answers(call, stop, lambda: open_source(args.source, consumer=app.name).close()):
            return OK
        call.note(f"{app.name}: {hidden_password(args.source)} → {hidden_password(args.state)}: starting Spark")
        spark = session(args.master, app=f"oncebox process {app.name}", archive_classes=True)
        if stop.is_set():
            return OK
        options = {"source": args.source, "state": args.state, "emit": args.emit, "drain": args.drain, **given}
        try:
            running = host.process(spark, args.app, gives_up=lambda: stop.is_set() or args.drain, **options)
        except StateInUse:  # it stood by until it was told to stop
            if not stop.is_set():
                raise
            return OK
        running.run(stop)
    handled, left = running.handled, running.left
    if args.drain and left is None:
        raise Refused(f"stopped before it could count what is left; handled {handled:,} events")
    document: dict[str, Any] = {"processor": app.name, "handled": handled, "unhandled": running.unhandled}
    lines = [f"handled {handled:,} events"]
    if running.unhandled:
        lines.append(f"no handler: {listed(running.unhandled)}")
    if left is not None:
        document["left"] = {name: left.get(name, 0) for name in _LEFT}
        lines += [_LEFT[name].format(left[name]) for name in _LEFT if left.get(name)]
    call.answer(document, lines)
    return LEFT if left else OK


def reap(call: Call) -> int:
    """`reap`."""
    interval = Timing().reaper_interval if call.args.interval is None else call.args.interval
    Timing(lease=max(interval * 2, timedelta(seconds=30)), reaper_interval=interval)  # above 0
    _log(call)
    if call.args.once:
        with closing(open_store(call.args.store)) as store:
            swept = Reaper(store, interval=interval).sweep()
        document = {"recovered": swept.recovered, "died": swept.died}
        call.answer(document, [f"{swept.recovered:,} events are eligible again, {swept.died:,} are DEAD"])
        return OK
    call.note(f"{call.store}: reaping every {interval.total_seconds():g} s; Ctrl-C stops")
    with _signals() as stop:
        if _answers(call, stop, lambda: open_store(call.args.store).close()):
            with closing(open_store(call.args.store)) as store:
                Reaper(store, interval=interval).run(stop)
    return OK


def _log(call: Call) -> None:
    """What a relay has to say goes to standard error; Spark's own words only when they matter."""
    logs.configure(LogSettings(level=logging.DEBUG if call.args.debug else logging.INFO, command=True))
    if not call.args.debug:
        for handler in logging.getLogger().handlers:
            handler.addFilter(_is_not_of_py4j)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """When the JVM dies, py4j logs a stack as the root logger; the command names that end by itself."""
    return record.module != "java_gateway"


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
