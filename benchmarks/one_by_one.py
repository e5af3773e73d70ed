"""A consumer as it is written by hand: one message, one transaction, one acknowledgement.

Poll one, BEGIN, read, write, checkpoint, COMMIT, commit the offset. Durable as ours is, and nothing more: no inbox, no
fence, no retries, no dead letters. Databases are as they come; SQLite is tried with a write-ahead log, too.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Consumer, TopicPartition

Apply = Callable[[bytes, int], None]  # a key, and the offset of the message that counts it


@contextmanager
def in_sqlite(place: str, journal: str = "DELETE") -> Iterator[Apply]:
    with closing(sqlite3.connect(Path(place) / f"bare-{journal}.db", isolation_level=None)) as database:
        database.execute(f"PRAGMA journal_mode = {journal}")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("CREATE TABLE state (key BLOB PRIMARY KEY, value INTEGER) WITHOUT ROWID")
        database.execute("CREATE TABLE checkpoint (at INTEGER)")
        database.execute("INSERT INTO checkpoint VALUES (-1)")

        def apply(key: bytes, offset: int) -> None:
            database.execute("BEGIN IMMEDIATE")
            row = database.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
            database.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, (row[0] if row else 0) + 1))
            database.execute("UPDATE checkpoint SET at = ?", (offset,))
            database.execute("COMMIT")

        yield apply


@contextmanager
def in_rocksdb(place: str) -> Iterator[Apply]:
    from rocksdict import Options, Rdict, WriteBatch, WriteOptions

    options, synced = Options(raw_mode=True), WriteOptions()
    options.create_if_missing(True)
    synced.sync = True
    with closing(Rdict(str(Path(place) / "bare.rocksdb"), options)) as database:

        def apply(key: bytes, offset: int) -> None:
            batch = WriteBatch(raw_mode=True)
            batch.put(key, b"%d" % (int(database.get(key) or 0) + 1))
            batch.put(b"\0checkpoint", b"%d" % offset)
            database.write(batch, synced)

        yield apply


@contextmanager
def in_postgresql(place: str) -> Iterator[Apply]:
    with psycopg.connect(place) as connection:
        connection.execute("create table bare_state (key bytea primary key, value bigint) with (fillfactor = 60)")
        connection.execute("create table bare_checkpoint (at bigint)")
        connection.execute("insert into bare_checkpoint values (-1)")
        connection.commit()

        def apply(key: bytes, offset: int) -> None:
            row = connection.execute("select value from bare_state where key = %b", [key]).fetchone()
            connection.execute(
                "insert into bare_state values (%b, %b) on conflict (key) do update set value = excluded.value",
                [key, (row[0] if row else 0) + 1],
                prepare=True,
            )
            connection.execute("update bare_checkpoint set at = %b", [offset], prepare=True)
            connection.commit()

        yield apply


SQLITE_WAL = "sqlite-wal"
LOOPS: dict[str, Callable[[str], AbstractContextManager[Apply]]] = {
    "sqlite": in_sqlite,
    SQLITE_WAL: partial(in_sqlite, journal="WAL"),
    "rocksdb": in_rocksdb,
    "postgresql": in_postgresql,
}


def rate(kind: str, client: dict[str, Any], topic: str, place: str, events: int) -> float:
    """Messages a second of one such loop, over one partition, from its second on."""
    settings = {**client, "group.id": f"bare-{kind}", "enable.auto.commit": False, "enable.auto.offset.store": False}
    with closing(Consumer(settings)) as consumer, LOOPS[kind](place) as apply:
        consumer.assign([TopicPartition(topic, 0, 0)])
        began = 0.0
        for number in range(events + 1):
            message = consumer.poll(60)
            assert message is not None, "the broker had no more"
            assert message.error() is None, message.error()
            apply(message.key() or b"", message.offset() or 0)
            consumer.commit(message=message, asynchronous=True)
            began = began or time.monotonic()
            assert number == message.offset()
        return events / (time.monotonic() - began)
