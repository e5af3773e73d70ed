"""What is particular to files: crashes at every step, several processes, a full disk, folders and names."""

import json
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import example
from hypothesis import given as examples
from hypothesis import strategies as st

from oncebox.errors import InvalidSetting, PublisherUnavailable
from oncebox.publishers import file
from oncebox.publishers.base import NOT_TRIED, Deadline
from oncebox.publishers.file import FilePublisher, destination_of, folder_name, read
from oncebox.publishers.lines import delivered, line
from oncebox.retry import Failure, Scope
from oncebox.testing.publishing import given
from oncebox.testing.servers import MissingProgram

DYING = """
import json, os, signal, sys
from pathlib import Path
from uuid import UUID
from oncebox.publishers import file
from oncebox.publishers.base import Deadline
from oncebox.testing.publishing import given

folder, step, moment, ids = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
original = getattr(file, step)

def dying(*arguments):
    if moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    original(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(file, step, dying)
claims = [given.claimed("a" if number % 2 else "b", str(number).encode()) for number in range(len(ids))]
claims = [claim._replace(event=claim.event._replace(event_id=UUID(own))) for claim, own in zip(claims, ids)]
file.FilePublisher.open(f"file://{folder}").publish(claims, Deadline(60))
print("alive")
"""

CROWDED = """
import json, sys
from uuid import UUID
from oncebox.publishers.file import FilePublisher
from oncebox.testing.publishing import given

folder, ids = sys.argv[1], json.loads(sys.stdin.readline())
publisher = FilePublisher.open(f"file://{folder}")
claims = [given.claimed("order.created", own.encode()) for own in ids]
claims = [claim._replace(event=claim.event._replace(event_id=UUID(own))) for claim, own in zip(claims, ids)]
for start in range(0, len(claims), 50):
    given.publish(publisher, claims[start : start + 50])
    print(start, flush=True)
"""


def arrived(folder: Path) -> Counter[str]:
    return Counter(one.headers["event_id"] for one in read(folder))


def url_of(folder: Path) -> str:
    return f"file://{folder}"


@pytest.mark.requirement("LC-16")
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["_write", "_sync_file", "_sync_folder", "_put_in_place"])
def test_a_kill_at_any_step_leaves_each_event_once(step: str, moment: str, tmp_path: Path) -> None:
    """The dying process sends to two folders; another one tries again, in other company."""
    (tmp_path / ".oncebox").mkdir()  # so that the first sync is that of a step
    claims = [given.claimed("a" if number % 2 else "b") for number in range(20)]
    ids = json.dumps([given.id_of(claim) for claim in claims])
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path), step, moment, ids], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, ""), done.stderr
    company = [given.claimed("a"), *claims[:7]]
    publisher = FilePublisher.open(url_of(tmp_path))
    given.publish(publisher, company)
    given.publish(publisher, claims)
    publisher.close()
    assert arrived(tmp_path) == Counter(given.id_of(claim) for claim in [company[0], *claims])
    assert list((tmp_path / ".oncebox").glob("*.tmp")) == []


@pytest.mark.requirement("LC-12", "LC-16")
def test_processes_that_publish_the_same_events_and_die_leave_one_of_each(tmp_path: Path) -> None:
    ids = [given.id_of(given.claimed("order.created")) for _ in range(1500)]
    for number in range(2):
        killed, other = (start_crowded(tmp_path, part) for part in (ids, ids[::-1]))
        assert killed.stdout is not None
        for _ in range(3 + 4 * number):
            killed.stdout.readline()
        killed.kill()
        killed.wait()
        assert other.wait(given.PATIENCE_SECONDS) == 0
        for process in (killed, other):
            process.communicate()
    assert arrived(tmp_path) == Counter(ids)


def start_crowded(folder: Path, ids: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CROWDED, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(ids) + "\n")
    process.stdin.flush()
    return process


FILLING = """
import sys
from pathlib import Path
from oncebox.publishers.base import Deadline
from oncebox.publishers.file import FilePublisher, read
from oncebox.retry import Scope
from oncebox.testing.publishing import given

folder = Path(sys.argv[1]) / "events"
publisher = FilePublisher.open(f"file://{folder}")
given.publish(publisher, given.several("order.created", 10))
claims = [given.claimed("order.created", b"x" * 100_000) for _ in range(40)]
outcomes = publisher.publish(claims, Deadline(60))
assert len(given.failures(outcomes)) == 40, outcomes
assert {failure.scope for failure in given.failures(outcomes)} == {Scope.BROKER}
assert "No space left" in given.failures(outcomes)[0].error or "full" in given.failures(outcomes)[0].error, outcomes
assert sorted(given.numbers(read(folder))) == list(range(10))
assert not list(folder.rglob("*.tmp"))
given.publish(publisher, claims[:3])
assert len(list(read(folder))) == 13
print("all of it")
"""


def test_a_full_disk_is_a_failure_of_the_broker_and_leaves_no_half_segment(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=2m none "$0" && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(tmp_path)]
    try:
        probe = subprocess.run([*command, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        raise MissingProgram("unshare is not on this machine: apt-get install util-linux") from None
    if probe.returncode != 0:
        raise MissingProgram("this user may not mount a small disk in a namespace: run the test as root")
    done = subprocess.run(
        [*command, sys.executable, "-c", FILLING, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "all of it\n", done.stderr


def test_a_segment_is_seen_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Path]] = []
    original = file._write

    def looking(path: Path, lines: list[bytes]) -> None:
        original(path, lines)
        seen.append(list(tmp_path.glob("*/*.jsonl")))

    monkeypatch.setattr(file, "_write", looking)
    publisher = FilePublisher.open(url_of(tmp_path))
    given.publish(publisher, given.several("order.created", 3))
    publisher.close()
    assert seen == [[]]
    (segment,) = tmp_path.glob("*/*.jsonl")
    assert segment == tmp_path / "order.created" / "000000000001.jsonl"
    assert len(segment.read_bytes().splitlines()) == 3


@pytest.mark.requirement("LR-012")
def test_a_lease_lost_while_a_segment_is_written_takes_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = given.long()
    original = file._write

    def losing(path: Path, lines: list[bytes]) -> None:
        original(path, lines)
        deadline.lose()

    publisher = FilePublisher.open(url_of(tmp_path))
    claims = given.several("order.created", 3)
    with monkeypatch.context() as patch:
        patch.setattr(file, "_write", losing)
        assert publisher.publish(claims, deadline) == [NOT_TRIED] * 3
    assert list(read(tmp_path)) == []
    assert list((tmp_path / ".oncebox").glob("*.tmp")) == []
    given.publish(publisher, claims)
    publisher.close()
    assert arrived(tmp_path) == Counter(map(given.id_of, claims))


@pytest.mark.requirement("LC-19")
def test_a_commit_that_fails_is_decided_by_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the transaction is gone before its commit, as after an error of the disk."""
    publisher = FilePublisher.open(url_of(tmp_path))
    given.publish(publisher, [given.claimed("order.created")])
    claims = given.several("order.created", 3)
    with monkeypatch.context() as patch:
        patch.setattr(file._Index, "_forget", lambda index: index._connection.execute("rollback"))
        outcomes = publisher.publish(claims, given.long())
    assert [failure.scope for failure in given.failures(outcomes)] == [Scope.BROKER] * 3
    given.publish(publisher, claims)
    publisher.close()
    assert len(list(read(tmp_path))) == 4
    assert list((tmp_path / ".oncebox").glob("*.tmp")) == []


def test_segments_are_numbered_without_gaps_and_no_number_comes_twice(tmp_path: Path) -> None:
    for _ in range(3):
        publisher = FilePublisher.open(url_of(tmp_path))
        given.publish(publisher, given.several("order.created", 2))
        publisher.close()
    folder = tmp_path / "order.created"
    assert sorted(path.name for path in folder.iterdir()) == [f"00000000000{number}.jsonl" for number in (1, 2, 3)]
    for path in folder.iterdir():
        path.unlink()
    publisher = FilePublisher.open(url_of(tmp_path))
    given.publish(publisher, given.several("order.created", 2))
    publisher.close()
    assert [path.name for path in folder.iterdir()] == ["000000000004.jsonl"]


def test_a_lost_index_overwrites_no_segment(tmp_path: Path) -> None:
    for number in range(2):
        publisher = FilePublisher.open(url_of(tmp_path))
        given.publish(publisher, [given.claimed("order.created", b"%d" % number)])
        publisher.close()
        for path in (tmp_path / ".oncebox").iterdir():
            path.unlink()
    assert [one.payload for one in read(tmp_path)] == [b"0", b"1"]


@pytest.mark.requirement("LC-16")
def test_what_a_consumer_took_away_is_not_written_again(tmp_path: Path) -> None:
    claims = given.several("order.created", 3)
    publisher = FilePublisher.open(url_of(tmp_path))
    given.publish(publisher, claims)
    for path in tmp_path.glob("*/*.jsonl"):
        path.unlink()
    given.publish(publisher, claims)
    publisher.close()
    assert list(read(tmp_path)) == []


def test_the_same_event_may_go_to_another_destination(tmp_path: Path) -> None:
    claim = given.claimed("order.created")
    for template in ("one", "two", "one"):
        publisher = FilePublisher.open(f"{url_of(tmp_path)}?destination={template}")
        given.publish(publisher, [claim])
        publisher.close()
    assert [one.destination for one in read(tmp_path)] == ["one", "two"]


def test_events_older_than_the_window_are_forgotten(tmp_path: Path) -> None:
    claim = given.claimed("order.created")
    publisher = FilePublisher.open(f"{url_of(tmp_path)}?dedup=1m")
    given.publish(publisher, [claim])
    with closing(sqlite3.connect(tmp_path / ".oncebox" / "index.db")) as index, index:
        index.execute("update event set at = at - 61")
    given.publish(publisher, [given.claimed("order.created")])
    given.publish(publisher, [claim])
    publisher.close()
    assert arrived(tmp_path)[given.id_of(claim)] == 2


def test_one_that_holds_the_index_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    publisher = FilePublisher.open(url_of(tmp_path))
    given.publish(publisher, given.several("order.created", 1))
    with closing(sqlite3.connect(tmp_path / ".oncebox" / "index.db", isolation_level=None)) as holder:
        holder.execute("begin immediate")
        outcomes = publisher.publish(given.several("order.created", 2), Deadline(given.BRIEF_SECONDS))
        assert [failure.scope for failure in given.failures(outcomes)] == [Scope.BROKER] * 2
        deadline = given.long()
        running = given.Running(publisher, given.several("order.created", 2), deadline)
        deadline.lose()
        assert running.outcomes() == [NOT_TRIED] * 2
    publisher.close()
    assert len(list(read(tmp_path))) == 1


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    publisher = FilePublisher.open(url_of(tmp_path / "events"))
    given.publish(publisher, given.several("order.created", 1))
    subprocess.run(["rm", "-r", str(tmp_path / "events")], check=True)
    claims = given.several("order.created", 2)
    given.patiently(lambda: publisher.publish(claims, given.long()) == [None, None])
    publisher.close()
    assert len(list(read(tmp_path / "events"))) == 2


def test_a_folder_that_cannot_be_made_is_a_failure_of_the_broker(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    publisher = FilePublisher.open(url_of(tmp_path / "file" / "events"))
    outcomes = publisher.publish(given.several("order.created", 2), given.long())
    assert [failure.scope for failure in given.failures(outcomes)] == [Scope.BROKER] * 2
    with pytest.raises(PublisherUnavailable, match="events"):
        publisher.check()


def test_a_destination_too_long_for_a_folder_fails_alone(tmp_path: Path) -> None:
    publisher = FilePublisher.open(url_of(tmp_path))
    outcomes = publisher.publish([given.claimed("ü" * 200), given.claimed("order.created")], given.long())
    publisher.close()
    assert isinstance(outcomes[0], Failure)
    assert outcomes[0].scope is Scope.DESTINATION
    assert outcomes[1] is None


@pytest.mark.requirement("LC-19")
def test_a_folder_that_was_removed_before_its_segment_came_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = given.several("order.created", 2)
    publisher = FilePublisher.open(url_of(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(file, "_put_in_place", failing)
        outcomes = publisher.publish(claims, given.long())
    assert [failure.scope for failure in given.failures(outcomes)] == [Scope.BROKER] * 2
    (tmp_path / "order.created").rmdir()
    given.publish(publisher, [given.claimed("order.paid")])
    assert [one.payload for one in read(tmp_path, "order.created")] == [b"0", b"1"]
    publisher.close()


def failing(_temporary: Path, _final: Path) -> None:
    raise OSError("the cable was pulled")


@examples(st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable()))
@example("..")
@example(".oncebox")
@example("a/b")
@example("%2E")
def test_every_destination_has_a_folder_of_its_own(destination: str) -> None:
    name = folder_name(destination)
    assert destination_of(name) == destination
    assert "/" not in name
    assert not name.startswith(".")


@pytest.mark.requirement("EM-08")
@examples(st.binary(max_size=200), st.text(max_size=20).filter(lambda text: text.isprintable() and text))
def test_a_line_gives_back_the_very_bytes(payload: bytes, key: str) -> None:
    claim = given.claimed("order.created", payload, ordering_key=key, headers={"a": key}, replays=2)
    text = line(claim, "orders")
    assert text.count(b"\n") == 1
    found = delivered(text)
    assert (found.destination, found.key, found.payload, found.headers["a"]) == ("orders", key, payload, key)
    assert found.headers["oncebox-replay"] == "2"


def test_a_line_names_its_parts() -> None:
    claim = given.claimed("order.created", b'{"a": 1}', content_type="application/json", headers={"h": "1"})
    assert json.loads(line(claim, "orders")) == {
        "event_id": given.id_of(claim),
        "event_type": "order.created",
        "destination": "orders",
        "content_type": "application/json",
        "headers": {"h": "1"},
        "payload": '{"a": 1}',
    }


@pytest.mark.parametrize("url", ["file:", "file:///", "file://host/folder", "file:///x?dedup=1s", "file:///x?dedup=2"])
def test_a_url_without_a_folder_or_with_a_wrong_option_is_refused(url: str) -> None:
    with pytest.raises(InvalidSetting):
        FilePublisher.open(url)


def test_a_check_names_the_room_that_is_left(tmp_path: Path) -> None:
    assert "bytes free" in FilePublisher.open(url_of(tmp_path)).check()
