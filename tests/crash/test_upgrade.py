"""Two versions on one store: old code goes on while the new code migrates, beside the new code, and after a rollback.

The versions are real trees on the disk, each run with its own source and its own test processes. Two pairs are always
there: this source beside a copy of it with one more migration, and that copy beside one with two more. In the third
pair the old code comes from history: the newest commit of the schema before this one, beside this source. While no such
commit runs on the next schema, it is the first commit of this schema, beside the copy with one more migration. What is
proven: no call fails, no event is lost, each key stays in order, and a processor handles each event once.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import pytest

from oncebox import clock
from oncebox.event import State
from oncebox.stores.base import OutboxStore
from oncebox.testing.scripted import sent
from oncebox.wiring import open_store
from tests.crash.relay_process import Orders
from tests.crash.upgrade_process import KEYS

ROOT = Path(__file__).parent.parent.parent
MIGRATIONS = "src/oncebox/stores/migrations"
RULE = (MIGRATIONS, "src/oncebox/stores/sql.py")  # which schemas there are, and on which of them code runs
NEXT = {
    "postgresql": "alter table oncebox.event add column note{0} text;\ncreate table oncebox.next{0} (one integer);\n",
    "sqlite": "ALTER TABLE oncebox_event ADD COLUMN note{0} TEXT;\nCREATE TABLE oncebox_next{0} (one INTEGER);\n",
}
PATIENCE_SECONDS = 60.0
SOME = 40  # events that show that a process is at work
PROCESS = "tests/crash/upgrade_process.py"


def newest(tree: Path) -> int:
    return len(list((tree / MIGRATIONS / "postgresql").glob("*.sql")))


def later(tree: Path, versions: int) -> Path:
    """This source as a later version would be: with so many more migrations."""
    copied(tree)
    for dialect, script in NEXT.items():
        for number in range(newest(ROOT) + 1, newest(ROOT) + 1 + versions):
            (tree / MIGRATIONS / dialect / f"{number:04}_next.sql").write_text(script.format(number))
    return tree


def copied(tree: Path) -> Path:
    leave = shutil.ignore_patterns("__pycache__")
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=leave)
    return tree


def from_history(old: Path, new: Path) -> tuple[Path, Path]:
    """An older version as it was committed, and a version of the schema after it."""
    schemas = {commit: schema for commit in commits() if (schema := runs_on_the_next(commit))}
    before = [commit for commit, schema in schemas.items() if schema == newest(ROOT) - 1]
    same = [commit for commit, schema in schemas.items() if schema == newest(ROOT)]
    if before:
        return extracted(before[0], old), copied(new)
    if same:
        return extracted(same[-1], old), later(new, 1)
    pytest.skip("no commit in this clone has code that runs on the next schema")


def commits() -> list[str]:
    """Those that changed which schemas there are, or on which of them code runs; the newest first."""
    return git("log", "--full-history", "--format=%H", "--", *RULE).decode().split()


def runs_on_the_next(commit: str) -> int | None:
    """The schema of the commit, if its code also runs on the next one."""
    names = git("ls-tree", "--name-only", commit, f"{MIGRATIONS}/postgresql/").split()
    return len(names) if b"newest + 1" in git("show", f"{commit}:{RULE[1]}", may_fail=True) else None


def extracted(commit: str, tree: Path) -> Path:
    tree.mkdir()
    with tarfile.open(fileobj=BytesIO(git("archive", commit, "src", "tests"))) as archive:
        archive.extractall(tree, filter="data")
    if not (tree / PROCESS).exists():
        shutil.copy(ROOT / PROCESS, tree / PROCESS)
    return tree


def git(*words: str, may_fail: bool = False) -> bytes:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, so there is no older version to run")
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=not may_fail)
    return done.stdout


@dataclass
class Running:
    """A process of one version."""

    process: "subprocess.Popen[bytes]"
    output: Path
    stop: Path
    answer: Path

    def lines(self) -> int:
        return self.output.read_bytes().count(b"\n")

    def works(self) -> None:
        """Return when it has done something from now on."""
        seen, deadline = self.lines(), clock.monotonic() + PATIENCE_SECONDS
        while self.lines() < seen + SOME:
            assert self.process.poll() is None, self.said()
            assert clock.monotonic() < deadline, f"{self.output.name} does nothing\n{self.said()}"
            clock.sleep(0.02)

    def end(self) -> dict[str, float]:
        """Ask it to end, and return what it counted."""
        self.stop.touch()
        assert self.process.wait(PATIENCE_SECONDS) == 0, self.said()
        found: dict[str, float] = json.loads(self.answer.read_text())
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self.output.with_suffix(".log").read_text()[-4_000:]


@dataclass
class Place:
    """A store, two versions of the code, and what they do there."""

    url: str
    folder: Path
    old: Path
    new: Path
    running: list[Running] = field(default_factory=list)

    def cli(self, tree: Path, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "oncebox", *words, "--store", self.url]
        return subprocess.run(command, env=environment(tree), cwd=tree, capture_output=True, text=True, check=False)

    def start(self, tree: Path, role: str, name: str) -> Running:
        stop, answer = (self.folder / f"{kind}-{len(self.running)}" for kind in ("stop", "answer"))
        return self._start(
            tree,
            f"{role}-{name}",
            stop,
            answer,
            "tests.crash.upgrade_process",
            role,
            name,
            self.url,
            str(stop),
            str(answer),
        )

    def relay(self, tree: Path, name: str) -> Running:
        orders = Orders(store=self.url, to=f"scripted://{self.folder}/sent", lease=3.0, goal=1_000_000_000)
        nothing = self.folder / "nothing"
        return self._start(tree, f"relay-{name}", nothing, nothing, "tests.crash.relay_process", orders.argument())

    def reap(self, tree: Path) -> Running:
        nothing = self.folder / "nothing"
        return self._start(tree, "reaper", nothing, nothing, "oncebox", "reap", "--interval", "1s", "--store", self.url)

    def _start(self, tree: Path, name: str, stop: Path, answer: Path, module: str, *words: str) -> Running:
        output = self.folder / f"{len(self.running)}-{name}"
        with output.open("wb") as out, output.with_suffix(".log").open("wb") as log:
            command = [sys.executable, "-m", module, *words]
            process = subprocess.Popen(
                command, env=environment(tree), cwd=tree, stdin=subprocess.DEVNULL, stdout=out, stderr=log
            )
        self.running.append(Running(process, output, stop, answer))
        return self.running[-1]

    def drained(self, relay: Running, store: OutboxStore, events: int) -> None:
        """Return when all events are PUBLISHED; the reaper frees what a relay that was killed has left."""
        deadline = clock.monotonic() + PATIENCE_SECONDS
        while store.stats().states[State.PUBLISHED] < events:
            assert relay.process.poll() is None, relay.said()
            assert clock.monotonic() < deadline, f"{store.stats()}\n{relay.said()}"
            clock.sleep(0.1)


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}


@pytest.fixture(params=["sqlite", "postgresql"])
def place_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url: str = (
        request.getfixturevalue("postgresql_url") if request.param == "postgresql" else f"sqlite:///{tmp_path}/o.db"
    )
    return url


@pytest.fixture(params=["this and the next", "the next two", "one from history and the next"])
def place(request: pytest.FixtureRequest, place_url: str, tmp_path: Path) -> Iterator[Place]:
    if request.param == "this and the next":
        old, new = copied(tmp_path / "old"), later(tmp_path / "new", 1)
    elif request.param == "the next two":
        old, new = later(tmp_path / "old", 1), later(tmp_path / "new", 2)
    else:
        old, new = from_history(tmp_path / "old", tmp_path / "new")
    made = Place(place_url, tmp_path, old, new)
    yield made
    for one in made.running:
        one.kill()


@pytest.mark.requirement("LC-19", "LC-16", "EM-13", "SC-11")
@pytest.mark.timeout(600)
def test_old_and_new_code_share_a_store_through_a_migration_and_a_rollback(place: Place) -> None:
    assert newest(place.new) == newest(place.old) + 1
    assert place.cli(place.old, "init").returncode == 0
    refused = place.cli(place.new, "stats")
    assert (refused.returncode, "oncebox migrate" in refused.stderr) == (1, True)

    # 1. The old code produces, relays, reaps and processes while the new code migrates.
    reaper = place.reap(place.old)
    producer, relay = place.start(place.old, "produce", "old"), place.relay(place.old, "old")
    processor = first_processor = place.start(place.old, "process", "reader")
    for one in (producer, relay, processor):
        one.works()
    migrated = place.cli(place.new, "migrate")
    assert (migrated.returncode, "ran" in migrated.stdout) == (0, True), migrated.stderr
    for one in (producer, relay, processor):
        one.works()

    # 2. Both versions at once, as a rolling deployment has them.
    newer = [
        place.start(place.new, "produce", "new"),
        place.relay(place.new, "new"),
        place.start(place.new, "process", "new-reader"),
    ]
    for one in (*newer, producer, processor):
        one.works()

    # 3. The new code is rolled back; the old code starts anew, on the new schema.
    new_producer, new_relay, new_processor = newer
    added = {"new": new_producer.end()["added"]}
    new_relay.kill()
    relay.kill()
    ended = producer.end()
    added["old"] = ended["added"]
    processor.end()
    seen_by_new = new_processor.end()
    refused = place.cli(place.old, "migrate")
    assert (refused.returncode, "and this version knows the migrations up to" in refused.stderr) == (1, True)
    assert place.cli(place.old, "stats").returncode == 0
    again = place.start(place.old, "produce", "again")
    relay, processor = place.relay(place.old, "old"), place.start(place.old, "process", "reader")
    again.works()
    added["again"] = again.end()["added"]

    # Nothing is lost, each key is in order, each processor has handled every event once.
    store = open_store(place.url, check_schema=False)
    place.drained(relay, store, int(sum(added.values())))
    assert store.verify() == []
    store.close()
    last = processor.end()
    first = json.loads(first_processor.answer.read_text())
    assert reaper.process.poll() is None, reaper.said()
    assert (first["handled"] + last["handled"], first["dead"] + last["dead"]) == (sum(added.values()), 0)
    assert (seen_by_new["handled"], seen_by_new["dead"]) == (added["new"] + added["old"], 0)
    in_order(place.folder / "sent", added)


def in_order(log: Path, added: dict[str, float]) -> None:
    """Every event arrived, and each key is in order; a relay that was killed has sent some of them twice."""
    arrived: dict[str, list[int]] = {}
    for one in sent(log):
        number = json.loads(one.payload)["number"]
        numbers = arrived.setdefault(one.key or "", [])
        if number not in numbers[-200:]:
            numbers.append(number)
    expected = {
        f"{name}-{key}": list(range(key, int(count), KEYS)) for name, count in added.items() for key in range(KEYS)
    }
    assert arrived == expected
