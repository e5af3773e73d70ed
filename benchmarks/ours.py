"""The same work through our own stores, fencing and guards on."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from oncebox.event import Published
from oncebox.stores.base import OutboxStore
from oncebox.stores.postgresql import PostgreSQLStore

from .drain import Step
from .scale import BATCH
from .yardstick import fill_by

LEASE = timedelta(seconds=30)
PUBLISHED = Published()
FILL = """
insert into oncebox.event (event_id, event_type, payload, content_type, ordering_key)
select uuidv7(), %(type)s, %(payload)s, %(content)s, 'key-' || n %% %(keys)s::bigint
from generate_series(%(first)s::bigint, %(last)s::bigint) n
"""


def create(url: str) -> None:
    """Our schema, empty."""
    store = PostgreSQLStore.open(url, check_schema=False)
    store.migrate()
    store.close()


def fill(url: str, events: int, keys: int | None = None) -> None:
    """Events with payloads of 200 bytes, in their order of as many `keys`, or of none."""
    fill_by(url, FILL, events, keys)


@contextmanager
def loop(url: str, worker: str) -> Iterator[Step]:
    """Claim 1,000, finalize 1,000."""
    with opened(PostgreSQLStore, url) as store:
        yield partial(deliver, store, worker)


@contextmanager
def opened(kind: type[OutboxStore], url: str) -> Iterator[OutboxStore]:
    """A store, closed at the end."""
    store = kind.open(url)
    try:
        yield store
    finally:
        store.close()


def deliver(store: OutboxStore, worker: str) -> int:
    """One batch, as a relay whose broker acknowledges everything; how many events it had."""
    claims = store.claim(worker=worker, limit=BATCH, lease=LEASE)
    if claims:
        refused = store.finalize([(claim, PUBLISHED) for claim in claims])
        assert not refused, f"{len(refused)} claims were lost"
    return len(claims)
