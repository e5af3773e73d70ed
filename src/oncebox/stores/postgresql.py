"""The PostgreSQL store: batch claims, with lanes and holds for ordered keys (docs/decisions/0002).

Every write is a function of schema `oncebox`, so one call is one statement, one round trip and one transaction. The
store keeps no session state and prepares nothing on the server: it works through PgBouncer in transaction mode.
"""

import json
import random
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Self
from uuid import UUID

import psycopg
from psycopg.rows import TupleRow, dict_row
from psycopg.types.json import Json, Jsonb

from .. import clock
from ..clock import uuid7
from ..config import Budget, Control
from ..errors import (
    DuplicateEvent,
    ForbiddenWrite,
    InvalidSetting,
    OnceboxError,
    SchemaMissing,
    StoreError,
    StoreUnavailable,
)
from ..event import (
    NOTHING,
    TERMINAL,
    Claim,
    Dead,
    Event,
    NewEvent,
    Published,
    Record,
    Released,
    Retry,
    State,
    Verdict,
    json_text,
)
from . import postgresql_stats as stats
from . import sql
from .base import (
    HISTORY_LOOK_MAX,
    REPORT_EVERY,
    WAITING_LOOK_MAX,
    Announcing,
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
    hidden_password,
    storable_error,
    storable_reason,
)
from .living import ControlSnapshot
from .places import Holder, no_place, places_of
from .postgresql_bell import Bell, Wish, announcing, pooled
from .postgresql_pool import Connection, ConnectionPool, split_url

DIALECT = "postgresql"
ONLINE = "-- online"  # the first line of a migration that must not run in a transaction
MIGRATION_TRIES = 10  # each waits for a lock for less than a second
MIGRATION_PAUSE = 0.5  # seconds between them, in which those that waited go on
SWEEP_EVERY = 1.0  # seconds: how long a late commit may wait under overload
SWEEP_SHARE = 20  # a look below the cursor is not repeated within this many times its own length
SHARDS = 16  # of lanes, by their top bits
LANE_BITS = 59
TURNS = 1 << 30
NO_BOUND = 2**63 - 1  # of bytes
_NOTHING_CARRIED = "''::bytea as payload, null::json as headers, null::json as metadata"
NOTHING_PASSED = "3:3:"  # the snapshot in which no transaction that writes is to be seen
_REFUSED = "OB001"  # raised by the guards of the schema
_CONTENT = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.RaiseException,
    psycopg.errors.ProgramLimitExceeded,
)  # what it says of a row that it can't have


class PostgreSQLStore(OutboxStore):
    """A store in a PostgreSQL database, for `postgresql://user@host/database`.

    The URL takes every option of libpq (`sslmode`, `sslrootcert`, `target_session_attrs`, several hosts, …), and
    `pool_max`. Password and TLS may come from the environment or `~/.pgpass`, as for psql.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(ordering=True, server=True, kill_safe=True, joins=True)

    def __init__(self, url: str) -> None:
        self._place = hidden_password(url)
        self._pool = ConnectionPool(*split_url(url), place=self._place)
        self._sql = sql.blocks("postgresql.sql")
        self._aims = _Aims()
        self._bell = Bell(self._pool)

    @classmethod
    def open(cls, url: str, *, check_schema: bool = True) -> Self:
        store = cls(url)
        try:
            version = store._version()
            if check_schema:
                sql.check_version(DIALECT, version, store._place)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        self._bell.close()
        self._pool.close()

    # --- schema ----------------------------------------------------------------------------------------------------

    def _version(self) -> int | None:
        """The number of the newest migration that ran here; None without a schema."""
        ((installed, isolation),) = self._run("installed")
        if not installed:
            self._check_encoding()
        if isolation != "read committed":
            raise InvalidSetting(
                f"{self._place} runs at {isolation}; claims need read committed: "
                "`alter role … set default_transaction_isolation to 'read committed'`"
            )
        version: int | None = self._one("version") if installed else None
        return version

    def _check_encoding(self) -> None:
        """Not asked by a statement: in SQL_ASCII, text comes as bytes."""
        with self._connection() as connection:
            encoding = connection.info.parameter_status("server_encoding")
        if encoding not in ("UTF8", None):
            raise InvalidSetting(
                f"{self._place} has the encoding {encoding}, which cannot hold every event; create the database with "
                "`create database NAME encoding 'UTF8' template template0`, and run `oncebox init` on that"
            )

    def pending_migrations(self) -> list[Migration]:
        version = self._version()
        sql.check_migratable(DIALECT, version, self._place)
        return list(sql.migrations(DIALECT)[version or 0 :])

    def migrate(self) -> list[Migration]:
        """Two who migrate at once take turns: one connection holds the lock while another runs what is missing."""
        if not self.pending_migrations():
            return []
        ran: list[Migration] = []
        with self._translating(), self._pool.connect() as turn, turn.transaction(force_rollback=True):
            while turn.execute(self._sql["former_migration"].encode()).fetchone() == (True,):
                clock.sleep(MIGRATION_PAUSE)
            while missing := self._missing(turn):
                self._apply(missing[0])
                ran.append(missing[0])
        return ran

    def _missing(self, turn: Connection) -> list[Migration]:
        """Take the turn, and say what is missing now. Again after each migration: the first one makes the lock."""
        # The simple protocol: a portal of the other one would keep its snapshot, and an online index waits for it.
        turn.execute(self._sql["migration_lock"].encode())
        return self.pending_migrations()

    def _apply(self, migration: Migration) -> None:
        """In one transaction, which gives up rather than queue behind a long lock and make all writers wait.

        A migration marked online (CREATE INDEX CONCURRENTLY and its like) runs statement by statement instead; each
        can be run again, so a migration that was cut short is simply repeated.
        """
        done = {"number": migration.number, "name": migration.name}
        with self._connection() as connection:
            if migration.sql.startswith(ONLINE):
                for statement in migration.sql.split(";\n"):
                    _fetch(connection, statement)
                _fetch(connection, self._sql["migration_done"], done)
                return
            for tries_left in reversed(range(MIGRATION_TRIES)):
                try:
                    self._run_migration(connection, migration.sql, done)
                    break
                except psycopg.errors.LockNotAvailable:
                    if not tries_left:
                        raise
                    clock.sleep(MIGRATION_PAUSE)

    def _run_migration(self, connection: Connection, script: str, done: Mapping[str, Any]) -> None:
        with connection.transaction():
            _fetch(connection, self._sql["migration_patience"])
            connection.execute(script.encode())
            _fetch(connection, self._sql["migration_done"], done)

    def try_write(self) -> Writable:
        """See `OutboxStore.try_write`: a temporary table, in a transaction that is rolled back.

        It takes room on the disk of the database's tablespace; how much is left there the server does not tell.
        """
        with self._translating():
            try:
                with self._pool.connection() as connection, connection.transaction(force_rollback=True):
                    _fetch(connection, self._sql["try_write"])
            except psycopg.errors.InsufficientPrivilege:
                return Writable(says="no write was tried: this role may not make temporary tables in the database")
            except psycopg.errors.DiskFull as error:
                raise StoreUnavailable(f"{self._place} takes no writes: {str(error).strip()}") from error
        return Writable(says="the database takes writes; how much disk space it has left is not known")

    # --- delivery --------------------------------------------------------------------------------------------------

    def append(self, events: Sequence[NewEvent], *, audit_id: int | None = None) -> None:
        if not events:
            return
        _refuse_twins(events)
        with self._connection() as connection:
            now = _fetch(connection, self._sql["clock"])[0][0] if any(event.delay for event in events) else None
            try:
                # COPY is one statement, and so a transaction by itself; only an audited one needs another around it.
                with nullcontext() if audit_id is None else connection.transaction():
                    self._copy(connection, events, now)
                    if audit_id is not None:
                        _fetch(connection, self._sql["add_to_audit"], {"audit_id": audit_id, "number": len(events)})
            except psycopg.errors.UniqueViolation as error:
                raise self._duplicates(connection, events) from error

    def _copy(self, connection: Connection, events: Sequence[NewEvent], now: datetime | None) -> None:
        with connection.cursor() as cursor, cursor.copy(self._sql["copy_events"].encode()) as copy:
            copy.set_types(["uuid", "text", "bytea", "text", "text", "text", "json", "json", "timestamptz"])
            for event in events:
                copy.write_row(_row(event, now))

    def _duplicates(self, connection: Connection, events: Sequence[NewEvent]) -> DuplicateEvent:
        ((known,),) = _fetch(connection, self._sql["known"], {"ids": [event.event_id for event in events]})
        return DuplicateEvent(f"already in the outbox: {', '.join(map(str, known))}; nothing was written (EM-02)")

    def claim(
        self,
        *,
        worker: str,
        limit: int,
        lease: timedelta,
        budget: Budget | None = None,
        bytes_max: int | None = None,
    ) -> list[Claim]:
        if limit < 1 or lease <= timedelta(0):
            raise InvalidSetting(f"a claim of {limit} events for {lease}: both must be above 0")
        budget = budget or Budget()
        token = uuid7()
        asked = {
            "token": token,
            "worker": worker,
            "lease": lease,
            "limit": limit,
            "bytes": bytes_max,
            "budget": budget.default,
            "budgets": Jsonb(dict(budget.by_type)) if budget.by_type else None,
        }
        with self._aims.taken() as aim, self._released_on_failure(token):
            rows = self._run("claim", **asked, **aim.parameters())
            if not rows and aim.above:
                rows = self._run("claim", **asked, **aim.parameters(sweep=True))
            claims = _claims(rows, token, worker, lease)
            aim.hit(claims, limit, _first(rows, 14) or ())
        if claims:
            self._bell.polls.found()
        if len(claims) == limit and self._bell.wanted:
            with suppress(StoreError):  # costs notifications that are not needed; the next claim tries it again
                self._run("hush")
                self._bell.wanted = False
        return claims

    @contextmanager
    def _released_on_failure(self, token: UUID) -> Iterator[None]:
        """A claim that is committed and cannot be handed over is given back at once, not when its lease expires.

        Not when the store is away: then it would only be asked in vain, once more.
        """
        try:
            yield
        except StoreUnavailable:
            raise
        except BaseException:
            with suppress(StoreError):
                self._run("release", token=token)
            raise

    def wait(self, seconds: float) -> bool:
        return self._bell.wait(seconds, lambda: Wish(*self._run("want_notify")[0]))

    @property
    def announces(self) -> bool:
        return self._bell.listens

    def announcing(self) -> Announcing:
        ((chosen, prepared),) = self._run("may_notify")
        with self._connection() as connection:
            behind = pooled(connection)
        return announcing(chosen, prepared=prepared, pooled=behind)

    def renew(self, *, worker: str, tokens: Collection[UUID], lease: timedelta) -> frozenset[UUID]:
        return frozenset(self._one("renew", worker=worker, tokens=list(tokens), lease=lease))

    def finalize(self, verdicts: Sequence[tuple[Claim, Verdict]]) -> list[Claim]:
        refused: list[Claim] = []
        for token, settled in _by_token(verdicts).items():
            refused += _refused(settled, self._one("finalize", token=token, **_arrays(settled)))
        return refused

    def reap(self, *, limit: int = 100, worker: str | None = None) -> list[Reaped]:
        rows = self._run("reap", limit=limit, worker=worker)
        return [
            Reaped(token=token, claimed_by=by, recovered=recovered, died=died, overdue=overdue)
            for token, by, recovered, died, overdue in rows
        ]

    def delivered(self, claims: Sequence[Claim]) -> frozenset[int]:
        columns = {
            "seqs": [claim.seq for claim in claims],
            "attempts": [claim.attempts for claim in claims],
            "workers": [claim.claimed_by for claim in claims],
        }
        return frozenset(seq for (seq,) in self._run("delivered", **columns))

    def receipts(self, worker: str, *, after: Receipt | None = None, limit: int = 1_000) -> list[Receipt]:
        seq, replays = (after.seq, after.replays) if after else (0, 0)
        return list(map(_receipt, self._run("receipts", worker=worker, seq=seq, replays=replays, limit=limit)))

    def published_by(
        self,
        worker: str,
        *,
        after: int,
        order: Order = Order.OLDEST,
        limit: int = 1_000,
        look_max: int = HISTORY_LOOK_MAX,
    ) -> list[Receipt]:
        statement = self._sql["published_by"].format(direction="asc" if order is Order.OLDEST else "desc")
        return list(map(_receipt, self._execute(statement, worker=worker, after=after, limit=limit, look_max=look_max)))

    def count_published_by(self, worker: str, *, after: int) -> Extent | None:
        ((count, last),) = self._run("count_published_by", worker=worker, after=after)
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
        query = query or Query()
        newest = order is Order.NEWEST
        beyond, direction = ("<", "desc") if newest else (">", "asc")
        carried = "payload, headers, metadata" if payloads else _NOTHING_CARRIED
        parts = {"matching": self._matching(query), "beyond": beyond, "direction": direction, "carried": carried}
        statement = self._sql["find"].format(**parts)
        bound = NO_BOUND if bytes_max is None else bytes_max
        rows = self._execute(statement, after=after, limit=limit, bytes=bound, **_matching(query))
        return [_record(row) for row in rows]

    def count(self, query: Query, *, after: int = 0) -> int:
        statement = self._sql["count"].format(matching=self._matching(query))
        ((number,),) = self._execute(statement, after=after, **_matching(query))
        return int(number)

    def _matching(self, query: Query) -> str:
        """The part of `find` and `count` that says which events are meant."""
        return self._sql["matching"] + ("\n" + self._sql["if_eligible"] if query.eligible else "")

    def history(self, event_id: UUID) -> list[Past]:
        rows = self._run("history", event_id=event_id)
        return [
            Past(replay=replay, state=State(state), at=_utc(at), attempts=attempts, published_by=by)
            for replay, state, at, attempts, by in rows
        ]

    def stats(self) -> Stats:
        ((many_keyed, many_waiting, percent),) = self._execute(stats.ways(self._sql), **stats.parameters(0))
        form = {"keyed_sample": many_keyed, "waiting_sample": many_waiting}
        statement = stats.statement(self._sql, **form)
        (row,) = self._execute_dicts(statement, **stats.parameters(float(percent)))
        return stats.stats_of(row, **form)

    def begin_audit(self, *, who: str, action: str, why: str | None, what: Mapping[str, Any], affected: int = 0) -> int:
        given = {"who": who, "action": action, "why": why, "what": Jsonb(dict(what)), "affected": affected}
        entry: int = self._one("begin_audit", **given)
        return entry

    def audit(self, *, limit: int = 100) -> list[AuditEntry]:
        return [AuditEntry(**row) for row in self._dicts("audit", limit=limit)]

    def replay(self, query: Query, *, limit: int, after: int, audit_id: int) -> Step:
        terminal = tuple(TERMINAL & set(query.states or TERMINAL))
        if not terminal:
            return Step(count=0, last_seq=after, done=True)
        chosen = self.find(replace(query, states=terminal), limit=limit, after=after, payloads=False)
        seqs = [record.seq for record in chosen]
        count = self._one("replay", seqs=seqs, audit_id=audit_id)
        return Step(count=count, last_seq=max(seqs, default=after), done=len(seqs) < limit)

    def kill(self, event_ids: Sequence[UUID], *, reason: str, audit_id: int) -> list[Killed]:
        rows = self._run("kill", ids=list(event_ids), reason=storable_error(reason), audit_id=audit_id)
        return [Killed(event_id=event_id, was=State(was)) for event_id, was in rows]

    def reschedule(self, event_ids: Sequence[UUID], *, delay: timedelta, audit_id: int) -> list[UUID]:
        moved: list[UUID] = self._one("reschedule", ids=list(event_ids), delay=delay, audit_id=audit_id)
        return moved

    def unblock(self, ordering_key: str, *, audit_id: int) -> bool:
        freed: bool = self._one("unblock", key=ordering_key, audit_id=audit_id)
        return freed

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
        ages = {"published_after": published_after, "dead_after": dead_after}
        rows = self._run("prune", **ages, limit=limit, audit_id=audit_id, after=after, look_max=look_max)
        ((count, last_seq, done),) = rows
        return Step(count=count, last_seq=last_seq, done=done)

    def count_prunable(self, *, published_after: timedelta | None, dead_after: timedelta | None) -> int:
        number: int = self._one("count_prunable", published_after=published_after, dead_after=dead_after)
        return number

    # --- control ---------------------------------------------------------------------------------------------------

    def control(self) -> Control:
        return Control.from_rows(dict(self._run("control")))

    def control_snapshot(self, relay: str | None) -> ControlSnapshot:
        ((rows, present, stopping, reaper),) = self._run("control_snapshot", relay=relay)
        control = Control.from_rows(rows or {})
        return ControlSnapshot(control=control, relay=present, stopping=stopping, reaper=reaper)

    def change_control(self, changes: Mapping[str, Any], *, audit_id: int) -> None:
        self._run("change_control", changes=Jsonb(Control.changed_rows(changes)), audit_id=audit_id)

    def sign_on(self, worker: Worker) -> None:
        refusal = self._one(
            "sign_on",
            worker_id=worker.worker_id,
            kind=worker.kind,
            host=worker.host,
            pid=worker.pid,
            details=Jsonb(dict(worker.details)),
        )
        if refusal is None:
            return
        if "workers_max" in refusal:
            raise no_place(places_of(worker), refusal["workers_max"], [Holder(**one) for one in refusal["holders"]])
        raise InvalidSetting(f"worker {worker.worker_id} is signed on already; each needs a name of its own (LR-032)")

    def sign_off(self, worker_id: str) -> None:
        self._run("sign_off", worker_id=worker_id)

    def workers(self) -> list[Worker]:
        return [Worker(**row) for row in self._dicts("workers")]

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
        self._run("expire_failing")
        rows = self._dicts(
            "report_failing",
            relay=relay,
            destination=storable_reason(destination),
            reason=storable_reason(reason),
            worker=worker,
            types=None if event_types is None else list(event_types),
            limit=look_max,
            every=REPORT_EVERY,
            valid_for=valid_for,
        )
        return FailingDestination(**rows[0]) if rows else None

    def remove_failing(self, *, relay: str, destinations: Collection[str]) -> list[FailingDestination]:
        names = [storable_reason(name) for name in destinations]
        return [FailingDestination(**row) for row in self._dicts("remove_failing", relay=relay, destinations=names)]

    def failing_destinations(self) -> list[FailingDestination]:
        return [FailingDestination(**row) for row in self._dicts("failing_destinations")]

    def register_reader(self, name: str, *, last_read: int | None) -> None:
        self._run("register_reader", name=name, last_read=last_read, nothing=NOTHING_PASSED)

    def set_reader(self, name: str, position: str | None = None, *, kept: int | None = None) -> str:
        passed = NOTHING_PASSED if position == "" else position
        place: str = self._one("set_reader", name=name, position=passed, kept=kept)
        return place

    def forget_reader(self, name: str) -> bool:
        return bool(self._run("forget_reader", name=name))

    def readers(self) -> Mapping[str, str]:
        return dict(self._run("readers"))

    def passed_by(self, reader: str, *, after: int, look_max: int = HISTORY_LOOK_MAX) -> Extent | None:
        asked = {"name": reader, "after": after}
        if not any(passed for (passed,) in self._run("has_passed", **asked, nothing=NOTHING_PASSED, look_max=look_max)):
            return None
        ((count, last),) = self._run("passed_by", **asked)
        return Extent(events=count, last=last)

    # --- in a transaction that is not its own ------------------------------------------------------------------------

    def joins(self, connection: Any) -> bool:
        if not isinstance(connection, psycopg.Connection):
            return False
        key = secrets.randbits(62)
        with self._translating():
            _fetch(connection, self._sql["same_database_lock"], {"key": key})
            if self._one("same_database_try", key=key):
                return False
            ((rights,),) = _fetch(connection, self._sql["may_join"])
        return bool(rights)

    def append_on(self, connection: Any, events: Sequence[NewEvent]) -> None:
        with self._translating():
            ((known,),) = _fetch(connection, self._sql["known"], {"ids": [event.event_id for event in events]})
            fresh = [event for event in events if event.event_id not in frozenset(known or ())]
            if fresh:
                self._copy(connection, fresh, _fetch(connection, self._sql["clock"])[0][0])

    def finalize_on(self, connection: Any, verdicts: Sequence[tuple[Claim, Verdict]]) -> list[Claim]:
        refused: list[Claim] = []
        with self._translating():
            for token, settled in sorted(_by_token(verdicts).items()):  # one order of locks, as for renew and kill
                rows = _fetch(connection, self._sql["finalize"], {"token": token, **_arrays(settled)})
                refused += _refused(settled, rows[0][0])
        return refused

    # --- the log ---------------------------------------------------------------------------------------------------

    def log_end(self) -> LogEnd:
        with self._connection() as connection:  # one, so that both looks are at one server
            ((mark, last, pruned, passed, standby, server),) = _fetch(connection, self._sql["log_end"])
            writers = frozenset(writer for (writer,) in _fetch(connection, self._sql["log_writers"]))
        if standby:
            raise InvalidSetting(
                f"{self._place} is a standby: it does not know who is writing, so a reader would skip events; give the "
                "primary"
            )
        return LogEnd(mark=mark, last=last, pruned=pruned, writers=writers, passed=passed, server=server)

    def log_identity(self) -> LogIdentity:
        ((system, epoch, file),) = self._run("log_identity")
        return LogIdentity(system=int(system or 0), epoch=epoch, timeline=int(file[:8], 16))

    def raise_epoch(self, *, audit_id: int) -> int:
        epoch: int = self._one("raise_epoch", audit_id=audit_id)
        return epoch

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
        asked = {"after": after, "until": until, "limit": limit, "bytes": bytes_max, "reader": reader, "base": base}
        rows = self._run("read_log", **asked, proof=proof and proof[0])
        gap, pruned_until, found = rows[0][:3]
        check_log(self._place, after=after, gap=gap, pruned_until=pruned_until, proof=proof, found=found)
        return [(row[3], _event(row[4:])) for row in rows if row[3] is not None]

    def verify(self) -> list[str]:
        return [line for (line,) in self._run("verify")]

    # --- one door to the database ----------------------------------------------------------------------------------

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection for one call."""
        with self._translating(), self._pool.connection() as connection:
            yield connection

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """What the driver raises is translated here, once, with its cause."""
        try:
            yield
        except psycopg.Error as error:
            raise self._translated(error) from error

    def _translated(self, error: psycopg.Error) -> OnceboxError:
        text = str(error).strip()
        if error.sqlstate == _REFUSED or isinstance(error, _CONTENT):
            return ForbiddenWrite(text)
        if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedFunction):
            return SchemaMissing(f"{self._place}: {text}; run `oncebox init --store URL` first")
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return StoreError(
                f"{self._place}: {text}; grant this role its part with `select oncebox.admit(role, part)`"
            )
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):  # the pool has dropped its connections
            words = error.diag.message_primary or text  # without the functions and lines that led to it
            return StoreUnavailable(
                f"{self._place} takes no writes: {words}; give the primary, or wait for the failover"
            )
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return StoreUnavailable(f"{self._place} does not answer: {' '.join(text.split())}")
        return StoreError(f"{self._place}: {text}")

    def _run(self, name: str, /, **parameters: Any) -> list[TupleRow]:
        return self._execute(self._sql[name], **parameters)

    def _execute(self, statement: str, /, **parameters: Any) -> list[TupleRow]:
        with self._connection() as connection:
            return _fetch(connection, statement, parameters)

    def _one(self, name: str, /, **parameters: Any) -> Any:
        return self._run(name, **parameters)[0][0]

    def _dicts(self, name: str, /, **parameters: Any) -> list[dict[str, Any]]:
        return self._execute_dicts(self._sql[name], **parameters)

    def _execute_dicts(self, statement: str, /, **parameters: Any) -> list[dict[str, Any]]:
        with self._connection() as connection, connection.cursor(binary=True, row_factory=dict_row) as cursor:
            cursor.execute(statement.encode(), parameters)
            return [{key: _utc(value) for key, value in row.items()} for row in cursor.fetchall()]


def _fetch(connection: Connection, statement: str, parameters: Mapping[str, Any] | None = None) -> list[TupleRow]:
    with connection.cursor(binary=True) as cursor:
        cursor.execute(statement.encode(), parameters)
        return cursor.fetchall() if cursor.description else []


class _Aim:
    """Where one worker's next claim looks first.

    The cursor spares walking over what is gone, which matters while an old transaction keeps the dead rows in the
    index. A transaction that commits late shows events below the cursor, so a claim looks from the start again after
    a short batch, and once a second under load; but never for more than a twentieth of the time, should that walk be
    long. `turn` counts the claims, so that rooms and shards come first in turn; `hands` are the lanes at which the last
    search of each shard ended, so that keys take turns too.
    """

    def __init__(self) -> None:
        self.above = 0
        self._turn = random.randrange(TURNS)  # noqa: S311 - no secret
        self._hands = [(shard << LANE_BITS) + random.getrandbits(LANE_BITS) for shard in range(SHARDS)]
        self._began = self._sweep_due = self._sweep_allowed = 0.0

    def parameters(self, *, sweep: bool = False) -> dict[str, Any]:
        self._began = clock.monotonic()
        if sweep or self._began >= self._sweep_due:
            self.above = 0
        self._turn = (self._turn + 1) % TURNS
        return {"above": self.above, "turn": self._turn, "hands": self._hands}

    def hit(self, claims: Sequence[Claim], limit: int, hands: Sequence[int]) -> None:
        """Note what came of it."""
        for lane in hands:
            self._hands[lane >> LANE_BITS] = lane
        ended = clock.monotonic()
        if self.above == 0:
            self._sweep_due = ended + max(SWEEP_EVERY, SWEEP_SHARE * (ended - self._began))
            self._sweep_allowed = ended + SWEEP_SHARE * (ended - self._began)
        if len(claims) < limit:
            self._sweep_due = min(self._sweep_due, self._sweep_allowed)
        fresh = (claim.seq for claim in reversed(claims) if claim.attempts == 1 and claim.event.ordering_key is None)
        self.above = max(self.above, next(fresh, 0))


class _Aims:
    """An aim for each claim that is under way, so that concurrent workers of one store do not share a cursor."""

    def __init__(self) -> None:
        self._free: list[_Aim] = []

    @contextmanager
    def taken(self) -> Iterator[_Aim]:
        aim = self._free.pop() if self._free else _Aim()
        try:
            yield aim
        finally:
            self._free.append(aim)


def _row(event: NewEvent, now: datetime | None) -> tuple[Any, ...]:
    available_at = now + event.delay if now is not None and event.delay else event.available_at
    return (
        event.event_id,
        event.event_type,
        event.payload,
        event.content_type,
        event.ordering_key,
        event.partition_key,
        Json(dict(event.headers), dumps=json_text) if event.headers else None,
        Json(dict(event.metadata), dumps=json_text) if event.metadata else None,
        available_at,
    )


def _refuse_twins(events: Sequence[NewEvent]) -> None:
    ids = [event.event_id for event in events]
    if len(set(ids)) < len(ids):
        twins = {str(one) for one in ids if ids.count(one) > 1} if len(ids) <= 10_000 else {"(many)"}
        raise DuplicateEvent(f"given twice: {', '.join(sorted(twins))}; nothing was written (EM-02)")


def _claims(rows: Sequence[TupleRow], token: UUID, worker: str, lease: timedelta) -> list[Claim]:
    """The rows of `oncebox.claim`, the first of which says when; written flat, since it runs for every event."""
    if not rows:
        return []
    claimed_at = _utc(_first(rows, 13))
    locked_until = claimed_at + lease
    claims = []
    for seq, *event, headers, metadata, attempts, failures, replays, _, _ in rows:
        if event[3].tzinfo is not UTC:
            event[3] = event[3].astimezone(UTC)
        event.append(json.loads(headers) if headers else NOTHING)
        event.append(json.loads(metadata) if metadata else NOTHING)
        held = Event._make(event), seq, token, worker, claimed_at, locked_until, attempts, failures, replays
        claims.append(Claim._make(held))
    claims.sort(key=_by_seq)
    return claims


def _record(row: TupleRow) -> Record:
    seq, state, attempts, failures, replays, last_error, *rest = row[9:]
    names = ("available_at", "claimed_at", "claimed_by", "locked_until", "lock_token", "published_at", "died_at")
    return Record(
        event=_event(row[:9]),
        seq=seq,
        state=State(state),
        attempts=attempts,
        failures=failures,
        replays=replays,
        last_error=last_error,
        **{name: _utc(value) for name, value in zip(names, rest, strict=True)},
    )


def _event(row: Sequence[Any]) -> Event:
    *event, headers, metadata = row
    return Event._make([*map(_utc, event), _mapping(headers), _mapping(metadata)])


def _first(rows: Sequence[TupleRow], column: int) -> Any:
    """What only one of the rows says, the first as a rule."""
    return next((row[column] for row in rows if row[column] is not None), None)


def _mapping(text: str | None) -> Mapping[str, Any]:
    return json.loads(text) if text else NOTHING


def _receipt(row: TupleRow) -> Receipt:
    names = [field.name for field in fields(Receipt)]
    return Receipt(**dict(zip(names, map(_utc, row), strict=True)))


def _utc(value: Any) -> Any:
    """A time in UTC, whatever the server's time zone is; anything else as it is."""
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def _by_seq(claim: Claim) -> int:
    return claim.seq


def _by_token(verdicts: Sequence[tuple[Claim, Verdict]]) -> dict[UUID, list[tuple[Claim, Verdict]]]:
    groups: dict[UUID, list[tuple[Claim, Verdict]]] = {}
    for settled in verdicts:
        groups.setdefault(settled[0].token, []).append(settled)
    return groups


def _refused(settled: Sequence[tuple[Claim, Verdict]], seqs: Sequence[int] | None) -> list[Claim]:
    lost = frozenset(seqs or ())
    return [claim for claim, _ in settled if claim.seq in lost] if lost else []


def _arrays(settled: Sequence[tuple[Claim, Verdict]]) -> dict[str, Any]:
    """The arguments of `oncebox.finalize`: those that were published, and side by side what became of the others."""
    acked = sorted([claim.seq for claim, verdict in settled if type(verdict) is Published])
    others = [(claim.seq, *_other(verdict)) for claim, verdict in settled if type(verdict) is not Published]
    seqs, kinds, delays, errors, charges = zip(*others, strict=True) if others else ((), (), (), (), ())
    columns = {"kinds": kinds, "delays": delays, "errors": errors, "charges": charges}
    return {"acked": _literal(acked), "others": _literal(seqs)} | {name: list(part) for name, part in columns.items()}


def _literal(seqs: Sequence[int]) -> str:
    """An array of numbers as PostgreSQL reads it: a tenth of what the driver takes to adapt a list."""
    return "{" + ",".join(map(str, seqs)) + "}"


def _other(verdict: Verdict) -> tuple[str, timedelta | None, str | None, int]:
    match verdict:
        case Retry(error, delay, charged):
            return "R", delay, storable_error(error), int(charged)
        case Released(delay):
            return "L", delay or None, None, 0
        case Dead(error, charged):
            return "D", None, storable_error(error), int(charged)
        case Published():
            raise AssertionError("published events have an array of their own")


def _matching(query: Query) -> dict[str, Any]:
    return {
        "ids": list(query.event_ids) or None,
        "states": [state.value for state in query.states] or None,
        "types": list(query.event_types) or None,
        "key": query.ordering_key,
        "created_from": query.created_from,
        "created_to": query.created_to,
    }
