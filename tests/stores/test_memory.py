"""What a process needs is bounded in bytes, not in events: large payloads are read only where they fit or are shown."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from oncebox.event import State
from oncebox.stores.base import OutboxStore, Query
from oncebox.testing.conformance import given
from oncebox.wiring import open_store

MIB = 1024 * 1024
EVENTS, SIZE = 120, 4 * MIB  # 480 MiB
PEAK_MAX = 150 * MIB  # of a whole process, of which Python and the driver take a third

ASK = """
import sys
from datetime import timedelta
from oncebox.event import State
from oncebox.stores.base import Query
from oncebox.wiring import open_store

store = open_store(sys.argv[1])
limit, mib = 1_000, 1024 * 1024
print(len({call}))
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
"""
COMMAND = """
import sys
from oncebox.cli import main

main(sys.argv[1:])
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_url"))
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def full(url: str) -> Iterator[OutboxStore]:
    """A store with more payload than a process may take."""
    store = open_store(url, check_schema=False)
    store.migrate()
    if url.startswith("sqlite"):
        for _ in range(EVENTS):
            given.append(store, payload=b"x" * SIZE)
    else:
        with psycopg.connect(url) as connection:  # compressed on its disk, whole on its way
            connection.execute(
                "insert into oncebox.event (event_type, payload) "
                "select 'large', convert_to(repeat('x', %s), 'utf8') from generate_series(1, %s)",
                (SIZE, EVENTS),
            )
    yield store
    store.close()


def peak(*words: str, script: str) -> tuple[str, int]:
    """What a process of its own wrote, and the most memory that it had."""
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, check=True)
    told = done.stdout.decode(), done.stderr.decode()
    return told[0], int("".join(told).split()[-1] if script is COMMAND else told[0].split()[-1]) * 1024


@pytest.mark.requirement("LR-041")
def test_no_call_reads_much_more_than_the_bytes_that_it_was_given(full: OutboxStore, url: str) -> None:
    calls = {
        "store.claim(worker='w', limit=limit, lease=timedelta(hours=1), bytes_max=mib)": 1,
        "store.claim(worker='w', limit=limit, lease=timedelta(hours=1), bytes_max=13 * mib)": 3,
        "store.read_log(after=0, until=10**9, limit=limit, bytes_max=13 * mib)": 3,
        "store.find(limit=limit, bytes_max=13 * mib)": 3,
        "store.find(limit=limit, payloads=False)": EVENTS,
    }
    for call, number in calls.items():
        told, most = peak(url, script=ASK.format(call=call))
        assert told.split()[0] == str(number), call
        assert most < PEAK_MAX, (call, most)


def test_commands_hold_no_payload_that_they_do_not_show_and_few_that_they_do(full: OutboxStore, url: str) -> None:
    given.publish(full, full.claim(worker="w", limit=2, lease=given.LEASE))
    ids = [str(one.event.event_id) for one in full.find(Query(states=[State.PENDING]), payloads=False, limit=EVENTS)]
    commands = (
        ("list", "--limit", "all"),
        ("list", "--json"),
        ("reschedule", *ids, "--now"),
        ("replay", "--all", "--yes"),
        ("kill", *ids, "--yes"),
        ("replay", "--state", "DEAD", "--yes"),
    )
    for words in commands:
        _, most = peak(*words, "--store", url, script=COMMAND)
        assert most < PEAK_MAX, (words, most)
    assert full.stats().states[State.PENDING] == EVENTS
