"""The embedded store: one SQLite file that several processes and threads may share.

How an event lies there is told in `migrations/sqlite/0001_outbox.sql`; why each statement is shaped as it is, in
`sqlite.sql`. Every change runs under BEGIN IMMEDIATE, so there is one writer at a time and what it read still holds
when it writes; WAL with synchronous=FULL makes a commit durable before it returns.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final, Self, cast
from uuid import UUID

from .. import clock
from ..config import Budget, Control
from ..errors import DuplicateEvent, ForbiddenWrite, InvalidSetting, OnceboxError, StoreError
from ..event import Claim, Event, NewEvent, Record, State, Verdict
from . import sql
from .base import (
    HISTORY_LOOK_MAX,
    REPORT_EVERY,
    WAITING_LOOK_MAX,
    AuditEntry,
    Capabilities,
    Extent,
    FailingDestination,
    Killed,
    LogEnd,
    LogIdentity,
    Migration,
    Order,
    OutboxStore,
    Past,
    Query,
    Reaped,
    Receipt,
    Stats,
    Step,
    Worker,
    Writable,
    check_log,
    storable_error,
    storable_reason,
)
from .living import RELAY_KIND, ControlSnapshot, first_id
from .places import in_the_way, places_of
from .polls import Polls
from .sqlite_delivery import SEQ, Expired, Lock, Stale, choose, claims_of, hold, parted, reap, within, write_verdicts
from .sqlite_file import NEVER, SQL, Database, Location, Quiet, Row, Session, Transaction
from .sqlite_rows import (
    MILLISECOND,
    event_of,
    json_texts,
    milliseconds,
    receipt_of,
    record_of,
    row_of,
    stamp_of,
    time_of,
)
from .sqlite_stats import stats_of

DIALECT: Final = "sqlite"
SQLITE_MIN: Final = (3, 37, 0)  # STRICT tables
APPEND_ROWS: Final = 100  # events in one INSERT
LINES_MAX: Final = 1_000  # findings of `verify`
WAIT: Final = 0.005  # seconds between looks of an idle relay, at first
WAIT_LONGEST: Final = 0.05  # and at last
_APPEND_MANY = SQL["append"] + ", (?, ?, ?, ?, ?, ?, ?, ?, ?)" * (APPEND_ROWS - 1)
_BEYOND_ALL_SEQS = 2**63 - 1


class SQLiteStore(OutboxStore):
    """An outbox in a SQLite file, for URLs like `sqlite:///outbox.db`."""

    capabilities: ClassVar[Capabilities] = Capabilities(ordering=True, server=False, kill_safe=True)

    def __init__(self, location: Location) -> None:
        self._database = Database(location)
        self._look, self._change = self._database.look, self._database.change
        self._polls = Polls(WAIT, WAIT_LONGEST)
        self._quiet = Quiet()

    # --- life of the store itself --------------------------------------------------------------------------------

    @classmethod
    def open(cls, url: str, *, check_schema: bool = True) -> Self:
        """See `OutboxStore.open`. A file that does not exist is not made here: that is for `migrate`."""
        if sqlite3.sqlite_version_info < SQLITE_MIN:
            needed = ".".join(map(str, SQLITE_MIN))
            raise StoreError(f"Python is linked with SQLite {sqlite3.sqlite_version}; Oncebox needs {needed} or newer")
        store = cls(Location.parse(url))
        try:
            if check_schema:
                sql.check_version(DIALECT, store._version(), str(store._database.location))
        except OnceboxError:
            store.close()
            raise
        return store

    def close(self) -> None:
        """See `OutboxStore.close`."""
        self._database.close()

    def pending_migrations(self) -> list[Migration]:
        """See `OutboxStore.pending_migrations`."""
        version = self._version()
        sql.check_migratable(DIALECT, version, str(self._database.location))
        return list(sql.migrations(DIALECT)[version or 0 :])

    def migrate(self) -> list[Migration]:
        """See `OutboxStore.migrate`. Each migration is one transaction, and makes sure first that nobody was faster."""
        sql.check_migratable(DIALECT, self._version(), str(self._database.location))
        return [migration for migration in sql.migrations(DIALECT) if self._apply(migration)]

    def _apply(self, migration: Migration) -> bool:
        with self._change(create=True) as tx:
            version = _version(tx)
            if version is None:
                self._refuse_other_encodings(tx)
                self._refuse_foreign_names(tx)
            if version is not None and version >= migration.number:
                return False
            for statement in _statements(migration.sql):
                tx.connection.execute(statement)
            tx.run("migrated", number=migration.number, name=migration.name)
        return True

    def _refuse_other_encodings(self, tx: Transaction) -> None:
        (encoding,) = tx.connection.execute("PRAGMA encoding").fetchone()
        if encoding != "UTF-8":
            raise InvalidSetting(
                f"{self._database.location} has the encoding {encoding}, in which limits of bytes mean something else; "
                "give Oncebox a file in UTF-8, which is what SQLite makes unless told otherwise"
            )

    def _refuse_foreign_names(self, tx: Transaction) -> None:
        for kind, name in tx.all("foreign_names"):
            raise StoreError(
                f"{self._database.location} has a {kind} {name!r} of its own, and Oncebox needs that name; "
                "rename it, or give Oncebox another file"
            )

    def _version(self) -> int | None:
        """The number of the newest migration that the file has."""
        if self._database.location.is_missing:
            return None
        with self._look() as look:
            return _version(look)

    def try_write(self) -> Writable:
        """See `OutboxStore.try_write`. The folder takes the write-ahead log, so a file beside the store shows it."""
        return self._database.location.try_write()

    # --- delivery ------------------------------------------------------------------------------------------------

    def append(self, events: Sequence[NewEvent], *, audit_id: int | None = None) -> None:
        """See `OutboxStore.append`."""
        try:
            with self._change() as tx:
                rows = [row_of(event, tx.now) for event in events]
                whole = len(rows) - len(rows) % APPEND_ROWS
                for start in range(0, whole, APPEND_ROWS):
                    many = [value for row in rows[start : start + APPEND_ROWS] for value in row]
                    tx.connection.execute(_APPEND_MANY, many)
                tx.connection.executemany(SQL["append"], rows[whole:])
                if audit_id is not None:
                    tx.count(audit_id, len(rows))
        except ForbiddenWrite as error:
            self._refuse_duplicates(events, error)
            raise

    def _refuse_duplicates(self, events: Sequence[NewEvent], error: ForbiddenWrite) -> None:
        """Name the ids that were given twice, or that the store has already; return if there are none."""
        ids = Counter(str(event.event_id) for event in events)
        if twice := [event_id for event_id, count in ids.items() if count > 1]:
            raise DuplicateEvent(f"event_id given twice: {_some(twice)}; nothing was written") from error
        with self._look() as look:
            known = [event_id for (event_id,) in look.run("known", event_ids=json.dumps(list(ids)))]
        if known:
            raise DuplicateEvent(f"event_id in the store already: {_some(known)}; nothing was written") from error

    def claim(
        self,
        *,
        worker: str,
        limit: int,
        lease: timedelta,
        budget: Budget | None = None,
        bytes_max: int | None = None,
    ) -> list[Claim]:
        """See `OutboxStore.claim`."""
        length = _lease(lease)
        with self._database.peek() as peek:  # an idle relay disturbs nobody
            if limit < 1 or self._nothing_ready(peek):
                return []
        self._polls.found()
        with self._change() as tx:
            batch_max, detour = tx.run("survey", now=tx.now).fetchone()
            if detour or batch_max is not None:
                events = tx.run("events", seqs=json.dumps(choose(tx, limit, batch_max)))
            else:
                events = tx.run("next_events", room=limit)
            rows = list(within(tx, events, bytes_max))
            events.close()
            if not rows:
                return []
            rows.sort(key=SEQ)
            lock = Lock(clock.uuid7(), worker, tx.now, length, batch_max, budget)
            hold(tx, [row[9] for row in rows], lock)
            return claims_of(rows, lock)  # before the commit: what cannot be handed over is not claimed

    def wait(self, seconds: float) -> bool:
        """See `OutboxStore.wait`. While nobody commits and nothing is due, it asks only whether anybody has."""
        until = clock.monotonic() + seconds
        quiet = True
        while quiet and (left := until - clock.monotonic()) > 0:
            clock.sleep(min(left, self._polls.next()))
            with self._database.peek() as peek:
                quiet = self._quiet.lasts(self._database.commits(peek))
        return False

    def _nothing_ready(self, peek: Session) -> bool:
        """Whether a claim would find nothing; what was so before any query is so until somebody commits."""
        commits = self._database.commits(peek)
        if self._quiet.lasts(commits):
            return True
        if peek.value("anything_ready"):
            return False
        self._quiet.begin(commits, peek.value("next_due"))
        return True

    def renew(self, *, worker: str, tokens: Collection[UUID], lease: timedelta) -> frozenset[UUID]:
        """See `OutboxStore.renew`."""
        length = _lease(lease)
        with self._change() as tx:
            asked = json.dumps([str(token) for token in tokens])
            renewed = tx.all("renew", tokens=asked, now=tx.now, locked_until=tx.now + length)
            tx.run("worker_seen", worker_id=worker, now=tx.now)
        return frozenset(tokens) - {UUID(token) for (token,) in renewed}

    def finalize(self, verdicts: Sequence[tuple[Claim, Verdict]]) -> list[Claim]:
        """See `OutboxStore.finalize`. All tokens of a call go into one transaction.

        It trusts first that every event is still held, and counts; only when the count is wrong does it start anew
        and look at each.
        """
        if not verdicts:
            return []
        try:
            with self._change() as tx:
                write_verdicts(tx, verdicts)
        except Stale:
            with self._change() as tx:
                held, refused = parted(tx, verdicts)
                write_verdicts(tx, held)
            return refused
        return []

    def reap(self, *, limit: int = 100, worker: str | None = None) -> list[Reaped]:
        """See `OutboxStore.reap`."""
        with self._database.peek() as peek:
            if not peek.value("anything_expired", worker=worker):
                return []
        with self._change() as tx:
            rows = tx.all("expired", worker=worker, now=tx.now, limit=max(limit, 0) if worker is None else -1)
            return [reap(tx, Expired(*row)) for row in rows]

    def delivered(self, claims: Sequence[Claim]) -> frozenset[int]:
        """See `OutboxStore.delivered`."""
        named = json.dumps([[claim.seq, claim.attempts, claim.claimed_by] for claim in claims])
        with self._look() as look:
            return frozenset(seq for (seq,) in look.all("delivered", claims=named))

    def receipts(self, worker: str, *, after: Receipt | None = None, limit: int = 1_000) -> list[Receipt]:
        """See `OutboxStore.receipts`."""
        seq, replays = (after.seq, after.replays) if after else (0, 0)
        with self._look() as look:
            rows = look.all("receipts", worker=worker, seq=seq, replays=replays, limit=limit)
        return [receipt_of(row) for row in rows]

    def published_by(
        self,
        worker: str,
        *,
        after: int,
        order: Order = Order.OLDEST,
        limit: int = 1_000,
        look_max: int = HISTORY_LOOK_MAX,
    ) -> list[Receipt]:
        """See `OutboxStore.published_by`."""
        block = "published_by" if order is Order.OLDEST else "newest_published_by"
        with self._look() as look:
            rows = look.all(block, worker=worker, after=after, limit=limit, look_max=look_max)
        return [receipt_of(row) for row in rows]

    def count_published_by(self, worker: str, *, after: int) -> Extent | None:
        """See `OutboxStore.count_published_by`."""
        with self._look() as look:
            count, last = look.run("count_published_by", worker=worker, after=after).fetchone()
        return Extent(events=count, last=last) if count else None

    # --- operations ------------------------------------------------------------------------------------------------

    def find(
        self,
        query: Query | None = None,
        *,
        limit: int = 100,
        order: Order = Order.OLDEST,
        after: int | None = None,
        payloads: bool = True,
        bytes_max: int | None = None,
    ) -> list[Record]:
        """See `OutboxStore.find`."""
        conditions, values = _conditions(query or Query())
        oldest = order is Order.OLDEST
        if after is None:
            after = NEVER if oldest else _BEYOND_ALL_SEQS
        ending = "oldest_first" if oldest else "newest_first"
        record = SQL["record"].format(carried="true" if payloads else "false")
        text = "\n".join((record, *(SQL[block] for block in (*conditions, ending))))
        with self._look() as look:
            look.connection.execute("BEGIN")  # large payloads are read by themselves, at the same moment
            try:
                found = look.connection.execute(text, values | {"after": after, "limit": max(limit, 0)})
                return [record_of(row) for row in within(look, found, bytes_max)]
            finally:
                look.connection.execute("COMMIT")

    def count(self, query: Query, *, after: int = 0) -> int:
        """See `OutboxStore.count`."""
        conditions, values = _conditions(query)
        text = "\n".join(SQL[block] for block in ("counted", *conditions))
        with self._look() as look:
            return int(look.connection.execute(text, values | {"after": after}).fetchone()[0])

    def history(self, event_id: UUID) -> list[Past]:
        """See `OutboxStore.history`."""
        with self._look() as look:
            rows = look.all("history", event_id=str(event_id))
        return [
            Past(replay=replay, state=State(state), at=time_of(at), attempts=attempts, published_by=by)
            for replay, state, at, attempts, by in rows
        ]

    def stats(self) -> Stats:
        """See `OutboxStore.stats`."""
        with self._look() as look:
            look.connection.execute("BEGIN")
            try:
                return stats_of(look)
            finally:
                look.connection.execute("COMMIT")

    def begin_audit(self, *, who: str, action: str, why: str | None, what: Mapping[str, Any], affected: int = 0) -> int:
        """See `OutboxStore.begin_audit`."""
        with self._change() as tx:
            text = json.dumps(what, default=str)
            entry = {"who": who, "action": action, "why": why, "what": text, "affected": affected}
            return tx.run("begin_audit", now=tx.now, **entry).lastrowid or 0

    def audit(self, *, limit: int = 100) -> list[AuditEntry]:
        """See `OutboxStore.audit`."""
        with self._look() as look:
            rows = look.all("audit", limit=max(limit, 0))
        return [
            AuditEntry(
                audit_id=number,
                at=time_of(at),
                who=who,
                action=action,
                why=why,
                what=json.loads(what),
                affected=affected,
            )
            for number, at, who, action, why, what, affected in rows
        ]

    def replay(self, query: Query, *, limit: int, after: int, audit_id: int) -> Step:
        """See `OutboxStore.replay`."""
        conditions, values = _conditions(query)
        text = "\n".join(SQL[block] for block in ("terminal", *conditions, "oldest_first"))
        with self._change() as tx:
            values |= {"after": after, "limit": _positive(limit)}
            rows: list[Row] = tx.connection.execute(text, values).fetchall()
            seqs = [seq for seq, _ in rows]
            lanes = {key for _, key in rows if key is not None}
            tx.run("step_back", lanes=json.dumps(list(lanes)))
            tx.run("replay", now=tx.now, seqs=json.dumps(seqs))
            tx.settle(lanes)
            tx.count(audit_id, len(rows))
        return Step(count=len(rows), last_seq=seqs[-1] if seqs else after, done=len(rows) < limit)

    def kill(self, event_ids: Sequence[UUID], *, reason: str, audit_id: int) -> list[Killed]:
        """See `OutboxStore.kill`. What is PENDING is claimed and given up in the one transaction (Reconciled 13)."""
        with self._change() as tx:
            rows = tx.all("doomed", event_ids=json_texts(event_ids))
            holders = {token for *_, token, _ in rows if token is not None}
            if pending := [seq for _, seq, state, *_ in rows if state == State.PENDING]:
                lock = Lock(clock.uuid7(), "oncebox kill", tx.now, 0, None, None)
                hold(tx, pending, lock)
                holders.add(str(lock.token))
            claims = [claim for token in holders for claim in tx.all("show_token", token=token)]
            tx.run("kill", now=tx.now, reason=storable_error(reason), seqs=json.dumps([row[1] for row in rows]))
            for claim_id, *_ in claims:
                tx.end_claim(claim_id)
            tx.settle({lane for *_, lane in rows if lane is not None})
            tx.count(audit_id, len(rows))
        return [Killed(event_id=UUID(event_id), was=State(state)) for event_id, _, state, *_ in rows]

    def reschedule(self, event_ids: Sequence[UUID], *, delay: timedelta, audit_id: int) -> list[UUID]:
        """See `OutboxStore.reschedule`."""
        with self._change() as tx:
            available_at = tx.now + milliseconds(delay)
            rows = tx.all("reschedule", available_at=available_at, event_ids=json_texts(event_ids))
            tx.count(audit_id, len(rows))
        return [UUID(event_id) for (event_id,) in rows]

    def unblock(self, ordering_key: str, *, audit_id: int) -> bool:
        """See `OutboxStore.unblock`."""
        with self._change() as tx:
            freed = tx.run("unblock", ordering_key=ordering_key).rowcount
            tx.settle([ordering_key])
            tx.count(audit_id, freed)
        return freed > 0

    def prune(
        self,
        *,
        published_after: timedelta | None,
        dead_after: timedelta | None,
        limit: int,
        audit_id: int,
        after: int = 0,
        look_max: int | None = None,
    ) -> Step:
        """See `OutboxStore.prune`."""
        with self._look() as look:
            until = _until(look.value("now"), published_after, dead_after)
            seen, last = look.run("prune_page", after=after, look_max=-1 if look_max is None else look_max).fetchone()
            page = {"after": after, "page_end": after if last is None else last}
            seqs = [seq for (seq,) in look.run("prunable", limit=_positive(limit), **page, **until)]
        with self._change() as tx:
            count = tx.run("prune", seqs=json.dumps(seqs), **until).rowcount
            tx.count(audit_id, count)
        whole = len(seqs) < limit  # the page was looked through
        done = whole and (look_max is None or seen < look_max)
        return Step(count=count, last_seq=page["page_end"] if whole else seqs[-1], done=done)

    def count_prunable(self, *, published_after: timedelta | None, dead_after: timedelta | None) -> int:
        """See `OutboxStore.count_prunable`."""
        with self._look() as look:
            return int(look.value("count_prunable", **_until(look.value("now"), published_after, dead_after)))

    # --- control ---------------------------------------------------------------------------------------------------

    def control(self) -> Control:
        """See `OutboxStore.control`."""
        with self._look() as look:
            return look.control()

    def control_snapshot(self, relay: str | None) -> ControlSnapshot:
        """See `OutboxStore.control_snapshot`."""
        with self._look() as look:
            rows, present, stopping, reaper = look.run("control_snapshot", relay=relay).fetchone()
        control = Control.from_rows(json.loads(rows))
        return ControlSnapshot(control=control, relay=bool(present), stopping=bool(stopping), reaper=bool(reaper))

    def change_control(self, changes: Mapping[str, Any], *, audit_id: int) -> None:
        """See `OutboxStore.change_control`."""
        rows = Control.changed_rows(changes)
        with self._change() as tx:
            for name, value in rows.items():
                if value is None:
                    tx.run("unset_setting", name=name)
                else:
                    tx.run("set_setting", name=name, value=json.dumps(value))
            tx.count(audit_id, 1)

    def sign_on(self, worker: Worker) -> None:
        """See `OutboxStore.sign_on`."""
        row = {"worker_id": worker.worker_id, "kind": worker.kind, "host": worker.host, "pid": worker.pid}
        with self._change() as tx:
            self._make_place(tx, worker)
            entered = tx.run("sign_on", now=tx.now, details=json.dumps(worker.details, default=str), **row).rowcount
        if not entered:
            raise InvalidSetting(f"worker {worker.worker_id!r} is alive already; give each an id of its own (LR-032)")

    def _make_place(self, tx: Transaction, relay: Worker) -> None:
        """Remove silent relays if this one needs their places."""
        if not places_of(relay) or (workers_max := tx.control().workers_max) is None:
            return
        workers = _workers(tx)
        silent = in_the_way(relay, workers_max, workers)
        for worker in workers:
            if worker.kind == RELAY_KIND and first_id(worker) in silent:
                tx.run("sign_off", worker_id=worker.worker_id)

    def sign_off(self, worker_id: str) -> None:
        """See `OutboxStore.sign_off`."""
        with self._change() as tx:
            tx.run("sign_off", worker_id=worker_id)

    def workers(self) -> list[Worker]:
        """See `OutboxStore.workers`."""
        with self._look() as look:
            return _workers(look)

    def report_failing(
        self,
        *,
        relay: str,
        destination: str,
        reason: str,
        worker: str,
        event_types: Collection[str] | None,
        valid_for: timedelta,
        look_max: int = WAITING_LOOK_MAX,
    ) -> FailingDestination | None:
        """See `OutboxStore.report_failing`."""
        types = None if event_types is None else json_texts(event_types)
        with self._look() as look:  # before the lock that keeps others from writing
            waiting, seen = look.one("waiting_for", types=types, limit=look_max) or (0, 0)
        with self._change() as tx:
            tx.run("expire_failing", now=tx.now)
            row = tx.one(
                "report_failing",
                now=tx.now,
                relay=relay,
                destination=storable_reason(destination),
                reason=storable_reason(reason),
                worker=worker,
                waiting=waiting,
                more=seen == look_max,
                same_until=tx.now - milliseconds(REPORT_EVERY),
                expires_at=tx.now + milliseconds(valid_for),
            )
            return None if row is None else _failing(row, tx.now)

    def remove_failing(self, *, relay: str, destinations: Collection[str]) -> list[FailingDestination]:
        """See `OutboxStore.remove_failing`."""
        names = json_texts(map(storable_reason, destinations))
        with self._change() as tx:
            return [_failing(row, tx.now) for row in tx.all("remove_failing", relay=relay, destinations=names)]

    def failing_destinations(self) -> list[FailingDestination]:
        """See `OutboxStore.failing_destinations`."""
        with self._look() as look:
            now = look.value("now")
            return [_failing(row, now) for row in look.run("failing_destinations", now=now)]

    def register_reader(self, name: str, *, last_read: int | None) -> None:
        """See `OutboxStore.register_reader`."""
        with self._change() as tx:
            tx.run("register_reader", name=name, last_read=last_read)

    def set_reader(self, name: str, position: str | None = None, *, kept: int | None = None) -> str:
        """See `OutboxStore.set_reader`. A position is the `seq` of the last event that the reader has passed.

        What it keeps is not passed: so it is kept by every version of this code.
        """
        with self._change() as tx:
            last_seq = tx.value("last_seq")
            position = "0" if position == "" else position
            if position is not None and not (position.isdecimal() and int(position) <= last_seq):
                raise InvalidSetting(f"{position!r} is no position of this store; give one that set_reader returned")
            passed = last_seq if position is None else int(position)
            if kept is not None:
                passed = max(0, min(passed, kept - 1))
            tx.run("set_reader", name=name, position=passed, kept=kept)
        return str(passed)

    def forget_reader(self, name: str) -> bool:
        """See `OutboxStore.forget_reader`."""
        with self._change() as tx:
            return tx.run("forget_reader", name=name).rowcount > 0

    def readers(self) -> Mapping[str, str]:
        """See `OutboxStore.readers`."""
        with self._look() as look:
            return {name: str(position) for name, position in look.run("readers")}

    def passed_by(self, reader: str, *, after: int, look_max: int = HISTORY_LOOK_MAX) -> Extent | None:  # noqa: ARG002
        """See `OutboxStore.passed_by`. The position says it: nothing is looked for."""
        with self._look() as look:
            found = look.run("passed_by", name=reader, after=after).fetchone()
        return None if found is None else Extent(events=found[0], last=found[1])

    def log_end(self) -> LogEnd:
        """See `OutboxStore.log_end`."""
        with self._look() as look:
            mark, pruned_until, last = look.run("log_end").fetchone()
        return LogEnd(mark=mark, last=last, pruned=pruned_until, writers=frozenset(), passed=str(last))

    def log_identity(self) -> LogIdentity:
        """See `OutboxStore.log_identity`."""
        with self._look() as look:
            return LogIdentity(epoch=look.value("epoch"))

    def raise_epoch(self, *, audit_id: int) -> int:
        """See `OutboxStore.raise_epoch`. Positions go by `seq` alone, so they mean the same in every copy."""
        with self._change() as tx:
            tx.run("raise_epoch")
            tx.count(audit_id, 1)
            return int(tx.value("epoch"))

    def read_log(
        self,
        *,
        after: int,
        until: int,
        limit: int,
        bytes_max: int,
        reader: str | None = None,
        base: int = 0,
        proof: tuple[int, UUID] | None = None,
    ) -> list[tuple[int, Event]]:
        """See `OutboxStore.read_log`."""
        with self._look() as look:
            look.connection.execute("BEGIN")  # all statements see one moment
            try:
                self._check_log(look, after, reader, base, proof)
                events = look.run("read_log", after=after, until=until, limit=_positive(limit))
                rows = list(within(look, events, bytes_max))
            finally:
                look.connection.execute("COMMIT")
        return [(row[9], event_of(row)) for row in rows]

    def _check_log(
        self, look: Session, after: int, reader: str | None, base: int, proof: tuple[int, UUID] | None
    ) -> None:
        _, pruned, _ = look.run("log_end").fetchone()
        own, gone = look.one("reader_gaps", reader=reader) or (0, 0)
        gap = pruned if pruned > max(after, own, base) else gone if gone > after else None
        (found,) = (None,) if proof is None else look.one("event_at", seq=proof[0]) or (None,)
        found = None if found is None else UUID(found)
        place = str(self._database.location)
        check_log(place, after=after, gap=gap, pruned_until=pruned, proof=proof, found=found)

    def verify(self) -> list[str]:
        """See `OutboxStore.verify`."""
        with self._look() as look:
            return [line for (line,) in look.run("verify").fetchmany(LINES_MAX)]


# --- the schema -------------------------------------------------------------------------------------------------------


def _version(session: Session) -> int | None:
    """The newest migration that was applied; none without a schema."""
    if session.one("has_schema") is None:
        return None
    return cast("int | None", session.value("version"))


def _statements(script: str) -> Iterator[str]:
    """The statements of a migration one by one: Python's `executescript` would commit before it starts."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


# --- looking ----------------------------------------------------------------------------------------------------------


def _until(now: int, published_after: timedelta | None, dead_after: timedelta | None) -> dict[str, int | None]:
    """Up to when an event must have ended to be old enough; None: such events are kept."""
    return {
        "published_until": None if published_after is None else now - milliseconds(published_after),
        "dead_until": None if dead_after is None else now - milliseconds(dead_after),
    }


def _conditions(query: Query) -> tuple[list[str], dict[str, object]]:
    """The blocks that a query adds, and their values."""
    values: dict[str, object] = {}
    if query.event_ids:
        values["event_ids"] = json_texts(query.event_ids)
    if query.states:
        values["states"] = json_texts(query.states)
    if query.event_types:
        values["event_types"] = json_texts(query.event_types)
    if query.ordering_key is not None:
        values["ordering_key"] = query.ordering_key
    for name in ("created_from", "created_to"):
        if (moment := getattr(query, name)) is not None:
            values[name] = stamp_of(name, moment)
    blocks = [f"if_{name}" for name in values]
    if set(query.states) == {State.DEAD}:
        blocks.append("if_dead")
    if query.eligible:
        blocks.append("if_eligible")
    return blocks, values


def _failing(row: Row, now: int) -> FailingDestination:
    relay, destination, reason, worker, failing_since, reported_at, waiting, more = row
    return FailingDestination(
        relay=relay,
        destination=destination,
        reason=reason,
        reported_by=worker,
        failing_for=max(now - failing_since, 0) * MILLISECOND,
        reported_ago=max(now - reported_at, 0) * MILLISECOND,
        waiting=waiting,
        waiting_more=bool(more),
    )


def _workers(look: Session) -> list[Worker]:
    return [
        Worker(
            worker_id=worker_id,
            kind=kind,
            host=host,
            pid=pid,
            started_at=time_of(started_at),
            seen_at=time_of(seen_at),
            silent_for=max(silent_for, 0) * MILLISECOND,
            details=json.loads(details),
        )
        for worker_id, kind, host, pid, started_at, seen_at, details, silent_for in look.all("workers")
    ]


# --- what callers give ------------------------------------------------------------------------------------------------


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (" and others" if len(ids) > 3 else "")


def _positive(limit: int) -> int:
    if limit < 1:
        raise InvalidSetting(f"limit is {limit}; give 1 or more")
    return limit


def _lease(lease: timedelta) -> int:
    if lease < timedelta(0):
        raise InvalidSetting(f"lease is {lease}; give a time above 0")
    return milliseconds(lease)
