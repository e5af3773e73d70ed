"""The broker or the database dies in the middle and comes back; or the disk is full."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from oncebox.errors import StoreUnavailable
from oncebox.event import State
from oncebox.publishers.valkey import ValkeyPublisher
from oncebox.testing.servers import MissingProgram, PostgreSQL, Valkey
from tests.relay.conftest import staging
from tests.relay.stage import BRIEF, Stage, patiently

EVENTS = 2_000
CLAIM_MAX = 50


@pytest.fixture
def own_valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.mark.requirement("LC-19", "LC-21", "LR-042")
def test_a_broker_that_dies_and_returns_gets_every_event_and_nobody_is_charged(
    stage: Stage, own_valkey: Valkey
) -> None:
    ids = stage.append(EVENTS)
    publisher = ValkeyPublisher.open(own_valkey.url)
    with stage.reaping(), stage.working(publisher, claim_max=CLAIM_MAX) as work:
        patiently(lambda: sum(len(batch.published) for batch in work.batches) >= 3 * CLAIM_MAX)
        own_valkey.kill()
        patiently(lambda: work.worker._parts.breaker.open)
        own_valkey.start()
        stage.until_states(PUBLISHED=EVENTS)
    publisher.close()
    with redis.Redis.from_url(own_valkey.url) as client:
        arrived = [fields[b"event_id"].decode() for _, fields in client.xrange("order.created")]
    assert sorted(arrived) == sorted(map(str, ids))
    assert all(record.failures == 0 for record in stage.store.find(limit=EVENTS))


@pytest.mark.requirement("LC-19", "LC-21")
def test_a_database_that_dies_and_returns_loses_no_event(own_server: PostgreSQL, tmp_path: Path) -> None:
    with staging(own_server.url, tmp_path) as stage:
        ids = stage.append(EVENTS)
        publisher = stage.publisher()
        with stage.reaping(), stage.working(publisher, claim_max=CLAIM_MAX, timing=BRIEF) as work:
            for _ in range(2):
                work.batches.clear()
                patiently(lambda: work.batches)
                own_server.kill()
                own_server.start()
            patiently(lambda: _published(stage) == EVENTS)
        assert {one.event_id for one in publisher.sent()} == set(map(str, ids))
        assert len(publisher.sent()) - EVENTS <= 2 * CLAIM_MAX
        stage.sound()


def _published(stage: Stage) -> int:
    try:
        return stage.states().get(State.PUBLISHED, 0)
    except StoreUnavailable:
        return 0


FILLING = """
import sys
from pathlib import Path
from tests.relay.conftest import staging
from tests.relay.stage import patiently
from oncebox.event import State
from oncebox.publishers.file import FilePublisher, read

url, disk, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
hog = disk / "hog"
hog.write_bytes(b"x" * 1_500_000)
with staging(url, folder) as stage:
    ids = stage.append(30, payload=b"x" * 20_000)
    publisher = FilePublisher.open(f"file://{disk}/events")
    with stage.reaping(), stage.working(publisher) as work:
        patiently(lambda: work.worker._parts.breaker.open)
        assert State.DEAD not in stage.states()
        hog.unlink()
        stage.until_states(PUBLISHED=30)
    assert all(record.failures == 0 for record in stage.store.find())
    arrived = [one.headers["event_id"] for one in read(disk / "events")]
    assert sorted(arrived) == sorted(map(str, ids))
print("all of it")
"""


@pytest.mark.requirement("LC-19", "LR-042")
def test_a_full_disk_pauses_the_relay_and_costs_no_event(store_url: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=2m none "$0" && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(disk)]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        raise MissingProgram("this user may not mount a small disk in a namespace: run the test as root")
    done = subprocess.run(
        [*command, sys.executable, "-c", FILLING, store_url, str(disk), str(tmp_path)],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.stdout == "all of it\n", done.stderr
