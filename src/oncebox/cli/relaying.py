"""The commands that keep running: `relay` and `reap`."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .. import logs
from ..config import Timing
from ..errors import (
    PublisherRefused,
    PublisherUnavailable,
    SourceRefused,
    SourceUnavailable,
    StateInUse,
    StateRefused,
    StateUnavailable,
    StoreRefused,
    StoreUnavailable,
)
from ..logs import LogSettings
from ..outage import LAST_MAX, outlast
from ..processor.app import load
from ..processor.unhandled import listed
from ..relay.file import read_settings, timing_from
from ..relay.presence import check_places
from ..relay.reaper import Reaper
from ..relay.settings import RelaySettings
from ..stores.base import OutboxStore, hidden_password
from ..wiring import open_publisher, open_source, open_state, open_store, store_url
from .call import LEFT, OK, Call, Refused
from .signals import stop_on_signals

if TYPE_CHECKING:
    from ..spark.driver import Left, Plan, SparkRelay

log = logging.getLogger(__name__)

LOOK = 0.2  # seconds between looks at a reaper's thread
AWAY = (StoreUnavailable, PublisherUnavailable, SourceUnavailable, StateUnavailable)  # the same call may pass later
# It answers, and an operator must correct the login.
REFUSED = (StoreRefused, PublisherRefused, SourceRefused, StateRefused)
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
    with stop_on_signals() as stop:
        running = _run(call, settings, plan, stop) if _all_answer(call, stop, plan) else None
    published, left = (running.published, running.left) if running else (0, None)
    if plan.drain and left is None:
        raise Refused(f"stopped before it could count what is left; published {published:,} events")
    document: dict[str, Any] = {"store": call.store, "to": hidden_password(call.args.to), "published": published}
    if left is not None:
        document["left"] = asdict(left)
    call.answer(document, [f"published {published:,} events", *([] if left is None else _left_lines(left))])
    return exit_code(left)


def exit_code(left: "Left | None") -> int:
    """What a relay ends with: `LEFT` if a drain leaves work that a relay could have done."""
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


def _all_answer(call: Call, stop: threading.Event, plan: "Plan") -> bool:
    """Wait until broker and store answer; false if told to stop first. A drain does not wait: it fails.

    `NoPlace` if other relays hold the places that this one would take: Spark is then not started for nothing.
    """

    def look() -> None:
        with closing(open_store(call.args.store)) as store:
            check_places(store, plan.places)

    with closing(open_publisher(call.args.to)) as publisher:
        broker = _answers(call, stop, publisher.check)
    return broker and _answers(call, stop, look)


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
    with stop_on_signals() as stop:
        if not _all_answer_processor(call, stop, app.name):
            return _stopped(call)
        call.note(f"{app.name}: {hidden_password(args.source)} → {hidden_password(args.state)}: starting Spark")
        spark = session(args.master, app=f"oncebox process {app.name}", archive_classes=True)
        if stop.is_set():
            return _stopped(call)
        options = {"source": args.source, "state": args.state, "emit": args.emit, "drain": args.drain, **given}
        try:
            running = host.process(spark, args.app, gives_up=lambda: stop.is_set() or args.drain, **options)
        except StateInUse:  # it stood by until it was told to stop
            if not stop.is_set():
                raise
            return _stopped(call)
        running.run(stop)
    return _processed(call, app.name, running.handled, running.unhandled, running.left)


def _processed(
    call: Call, name: str, handled: int, unhandled: Mapping[str, int], left: Mapping[str, int] | None
) -> int:
    """What a processor that has ended tells, and its exit code: `LEFT` if its drain leaves anything."""
    if call.args.drain and left is None:
        raise Refused(f"stopped before it could count what is left; handled {handled:,} events")
    document: dict[str, Any] = {"processor": name, "handled": handled, "unhandled": dict(unhandled)}
    lines = [f"handled {handled:,} events"]
    if unhandled:
        lines.append(f"no handler: {listed(unhandled)}")
    if left is not None:
        document["left"] = {reason: left.get(reason, 0) for reason in _LEFT}
        lines += [_LEFT[reason].format(left[reason]) for reason in _LEFT if left.get(reason)]
    call.answer(document, lines)
    return LEFT if left else OK


def _stopped(call: Call) -> int:
    """The end of a processor that was told to stop before it began; a drain has then not done what it was for."""
    if call.args.drain:
        raise Refused("stopped before it could count what is left; handled 0 events")
    return OK


def _all_answer_processor(call: Call, stop: threading.Event, name: str) -> bool:
    """Wait until source, state store and outbox answer; false if told to stop first. A drain fails instead."""
    args = call.args

    def read() -> None:
        with closing(open_source(args.source, consumer=name)) as source:
            source.partitions()

    asks: list[Callable[[], object]] = [read, lambda: open_state(args.state).close()]
    if args.emit:
        asks.append(lambda: open_store(args.emit).close())
    return all(_answers(call, stop, ask) for ask in asks)


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
    with stop_on_signals() as stop:
        found: list[OutboxStore] = []
        if _answers(call, stop, lambda: found.append(open_store(call.args.store))):
            _reap(found[0], interval, stop)
    return OK


def _reap(store: OutboxStore, interval: timedelta, stop: threading.Event) -> None:
    """Reap until told to stop, in a thread that can be left alone if the store stands still then."""
    reaper = Reaper(store, interval=interval)
    thread = threading.Thread(target=reaper.run, args=(stop,), name="reaper", daemon=True)
    thread.start()
    while thread.is_alive() and not stop.wait(LOOK):
        pass
    thread.join(LAST_MAX)
    if thread.is_alive():
        log.warning("%s could not sign off, and will be found silent: the store stands still", reaper.worker_id)
    else:
        store.close()


def _log(call: Call) -> None:
    """What a relay has to say goes to standard error; Spark's own words only when they matter."""
    logs.configure(LogSettings(level=logging.DEBUG if call.args.debug else logging.INFO, command=True))
    if not call.args.debug:
        for handler in logging.getLogger().handlers:
            handler.addFilter(_is_not_of_py4j)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """When the JVM dies, py4j logs a stack as the root logger; the command names that end by itself."""
    return record.module != "java_gateway"
