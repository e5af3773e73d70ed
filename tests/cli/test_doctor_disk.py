"""`oncebox doctor` on a disk that is nearly full, and on one that is full."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncebox.cli import main
from oncebox.stores.base import OutboxStore
from oncebox.testing.servers import PostgreSQL
from oncebox.wiring import open_store
from tests.cli.steps import Cli, Outcome

MEGABYTE = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", place], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        while file.write(b"x" * MEGABYTE) == MEGABYTE:
            pass
    with contextlib.suppress(OSError), (disk / "rest").open("wb", buffering=0) as file:
        while file.write(b"x"):
            pass


def finding(outcome: Outcome) -> dict[str, object]:
    (found,) = [one for one in outcome.json["findings"] if one["about"] == "disk"]
    return dict(found)


@pytest.fixture
def on_disk(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OutboxStore]:
    url = f"sqlite:///{disk}/oncebox.db"
    monkeypatch.setenv("ONCEBOX_STORE", url)
    store = open_store(url, check_schema=False)
    store.migrate()
    yield store
    store.close()


def test_a_disk_that_has_little_room_left_is_a_finding(process: Cli, on_disk: OutboxStore) -> None:
    found = finding(process("doctor", "--no-spark", "--json", ONCEBOX_STORE=os.environ["ONCEBOX_STORE"]))
    assert found["well"] is False
    assert str(found["says"]).endswith(" MB free")


def test_a_full_disk_is_a_finding_and_the_rest_is_shown(process: Cli, on_disk: OutboxStore, disk: Path) -> None:
    fill(disk)
    done = process("doctor", "--no-spark", "--json", ONCEBOX_STORE=os.environ["ONCEBOX_STORE"])
    assert done.code == 1
    assert finding(done)["says"] == f"{disk} takes no writes: No space left on device"
    assert "free disk space" in str(finding(done)["advice"])
    assert {"store", "workers"} <= {one["about"] for one in done.json["findings"] if one["well"]}
    assert not list(disk.glob("tmp*"))


def test_a_store_that_a_full_disk_keeps_closed_is_a_finding(process: Cli, on_disk: OutboxStore, disk: Path) -> None:
    """The last connection has removed the files that SQLite needs beside the store's, and there is no room for them."""
    on_disk.close()
    fill(disk)
    done = process("doctor", "--no-spark", "--json", ONCEBOX_STORE=os.environ["ONCEBOX_STORE"])
    (found,) = done.json["findings"]
    assert (done.code, found["about"]) == (1, "store")
    assert "fails or is full" in found["says"]


def test_a_disk_with_room_is_well(cli: Cli, store: OutboxStore) -> None:
    found = finding(cli("doctor", "--no-spark", "--json"))
    assert found["well"] is True


def test_a_full_disk_of_postgresql_is_a_finding(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with PostgreSQL() as server:
        owner = server.directory.stat()
        os.chown(disk, owner.st_uid, owner.st_gid)
        for parent in (disk.parent, *disk.parents[1:3]):
            parent.chmod(0o755)
        server.psql(f"create tablespace small location '{disk}'")
        server.psql("create database small tablespace small")
        url = server.database_url("small")
        store = open_store(url, check_schema=False)
        store.migrate()
        store.close()
        monkeypatch.setenv("ONCEBOX_STORE", url)
        main(["doctor", "--no-spark", "--json"])
        well = finding(Outcome(0, capsys.readouterr().out, ""))
        assert well["says"] == "the database takes writes; how much disk space it has left is not known"
        assert well["well"] is True
        fill(disk)
        assert main(["doctor", "--no-spark", "--json"]) == 1
        full = finding(Outcome(0, capsys.readouterr().out, ""))
        assert full["well"] is False
        assert "No space left on device" in str(full["says"])
        assert server.password not in str(full)
