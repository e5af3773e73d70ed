"""The launcher: real servers that can be killed, and that outlive nobody."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
import redis

from oncebox.testing import guard, servers
from oncebox.testing.servers import MissingProgram, PgBouncer, PostgreSQL, Server, ServerError, Valkey
from oncebox.testing.skew import skewed_clock

KINDS = [PostgreSQL, Valkey]


@contextlib.contextmanager
def valkey_client(server: Valkey) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(server.url)
    try:
        yield client
    finally:
        client.close()


def wait_until(condition: object, *arguments: object) -> None:
    """Bounded by the test's own timeout alone."""
    assert callable(condition)
    while not condition(*arguments):
        time.sleep(0.01)


def segments() -> set[str]:
    """The System V shared memory of this machine, by id."""
    return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}


def segment_of(server: PostgreSQL) -> str:
    return (server.directory / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1]


def write_and_kill_postgresql(server: PostgreSQL) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("create table kept as select generate_series(1, 1000) as n")
        server.kill()


def test_a_killed_postgresql_comes_back_with_every_row_on_the_same_port() -> None:
    with PostgreSQL() as server:
        port, pid = server.port, server.pid
        write_and_kill_postgresql(server)
        assert not guard.living_in(server.directory)
        server.start()
        assert (server.port, server.pid == pid) == (port, False)
        assert server.psql("select count(*) from kept") == "1000"


def test_a_postgresql_whose_postmaster_alone_was_killed_starts_again() -> None:
    with PostgreSQL() as server, psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("create table kept as select 1 as n")
        connection.execute("select pg_stat_clear_snapshot()")
        os.kill(server.pid, signal.SIGKILL)
        server.kill()
        server.start()
        assert server.psql("select count(*) from kept") == "1"


def test_a_killed_valkey_comes_back_with_what_it_acknowledged() -> None:
    with Valkey() as server, valkey_client(server) as client:
        client.set("kept", "yes")
        server.kill()
        server.start()
        assert client.get("kept") == b"yes"


@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_server_answers_on_the_same_port(kind: type[Server]) -> None:
    with kind() as server:
        url = server.url
        server.restart()
        assert server.url == url
        assert guard.living_in(server.directory)


def test_a_paused_postgresql_answers_nobody_until_it_is_resumed() -> None:
    with PostgreSQL() as server, psycopg.connect(server.url, autocommit=True) as connection:
        server.pause()
        assert guard.all_stopped(server.directory)
        server.resume()
        assert connection.execute("select 1").fetchone() == (1,)
        assert not guard.all_stopped(server.directory)


def test_a_paused_server_can_be_stopped() -> None:
    with Valkey() as server:
        server.pause()
        server.stop()
        with pytest.raises(ServerError, match="not running"):
            _ = server.pid


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_server_leaves_no_process_and_no_directory(kind: type[Server]) -> None:
    with kind() as server:
        directory = server.directory
    assert not guard.living_in(directory)
    assert not directory.exists()


def test_a_killed_and_closed_postgresql_leaves_no_shared_memory() -> None:
    with PostgreSQL() as server:
        segment = segment_of(server)
        assert segment in segments()
        server.kill()
    assert segment not in segments()


def fail_beside_a_server(directories: list[Path]) -> None:
    with Valkey() as server:
        directories.append(server.directory)
        _ = 1 / 0


def test_a_failed_body_leaves_no_server_behind() -> None:
    directories: list[Path] = []
    with pytest.raises(ZeroDivisionError):
        fail_beside_a_server(directories)
    assert not directories[0].exists()


def test_a_server_that_cannot_start_shows_its_log_and_leaves_nothing() -> None:
    server = PostgreSQL(settings={"shared_buffers": "many"})
    with pytest.raises(ServerError, match='invalid value for parameter "shared_buffers": "many"'):
        server.start()
    with pytest.raises(ServerError, match="no directory"):
        _ = server.directory


def test_a_port_taken_in_the_last_moment_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], servers.free_port()])
        monkeypatch.setattr(servers, "free_port", lambda: next(ports))
        with PostgreSQL() as server:
            assert server.psql("select 1") == "1"


def test_settings_reach_postgresql_and_fsync_is_on() -> None:
    with PostgreSQL(settings={"work_mem": "7MB"}) as server:
        assert server.psql("show work_mem") == "7MB"
        assert server.psql("show fsync") == "on"


def test_a_server_started_twice_says_so(valkey: Valkey) -> None:
    with pytest.raises(ServerError, match="running already"):
        valkey.start()


def test_each_test_has_a_database_of_its_own(postgresql: PostgreSQL, postgresql_url: str) -> None:
    with postgresql.database() as other:
        postgresql.psql("create table here (n int)", postgresql_url)
        with pytest.raises(ServerError, match='relation "here" does not exist'):
            postgresql.psql("select * from here", other)
    assert postgresql.psql(f"select count(*) from pg_database where datname = '{other.rpartition('/')[2]}'") == "0"


def test_a_database_can_copy_a_template(postgresql: PostgreSQL, postgresql_url: str) -> None:
    postgresql.psql("create table here (n int)", postgresql_url)
    with postgresql.database(template=postgresql_url.rpartition("/")[2]) as copy:
        assert postgresql.psql("select count(*) from here", copy) == "0"


def test_a_wrong_password_is_refused(postgresql: PostgreSQL) -> None:
    with pytest.raises(ServerError, match="password authentication failed"):
        postgresql.psql("select 1", postgresql.url.replace(postgresql.password, "wrong"))


def test_pgbouncer_gives_the_connection_back_after_each_transaction(
    postgresql_url: str, postgresql: PostgreSQL
) -> None:
    database = postgresql_url.rpartition("/")[2]
    with PgBouncer(postgresql, settings={"default_pool_size": "1"}) as pooler:
        url = pooler.database_url(database)
        with psycopg.connect(url, autocommit=True) as one, psycopg.connect(url, autocommit=True) as two:
            pids = [client.execute("select pg_backend_pid()").fetchone() for client in (one, two, one)]
        assert len(set(pids)) == 1


def test_a_killed_pgbouncer_comes_back(postgresql: PostgreSQL) -> None:
    with PgBouncer(postgresql) as pooler:
        pooler.kill()
        pooler.start()
        with psycopg.connect(pooler.url) as connection:
            assert connection.execute("select 1").fetchone() == (1,)


def test_a_missing_program_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, postgresql: PostgreSQL) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(MissingProgram, match="apt-get install pgbouncer"):
        PgBouncer(postgresql).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become nobody")
def test_root_without_namespaces_runs_the_server_as_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "namespaces_work", lambda: False)
    with PostgreSQL() as server:
        assert Path(f"/proc/{server.pid}").stat().st_uid == 65534
        write_and_kill_postgresql(server)
        server.start()
        assert server.psql("select count(*) from kept") == "1000"


STARTER = """
import sys, time
from oncebox.testing import servers
server = getattr(servers, sys.argv[1])()
server.start()
print(server.pid, server.directory, flush=True)
if sys.argv[2] == "forked":
    import os
    if os.fork() == 0:
        time.sleep(1000)
time.sleep(1000)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_does_not_outlive_a_starter_that_was_killed(kind: type[Server]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, kind.__name__, "alone"], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pid, name = starter.stdout.readline().split()
        directory = Path(name)
        assert int(pid) in guard.living_in(directory)
        starter.kill()
    wait_until(lambda: not directory.exists())
    assert not guard.living_in(directory)


def test_a_forked_child_of_the_starter_does_not_keep_the_server_alive() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, "Valkey", "forked"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as starter:
        assert starter.stdout is not None
        directory = Path(starter.stdout.readline().split()[1])
        starter.kill()
        try:
            wait_until(lambda: not directory.exists())
        finally:
            os.killpg(starter.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_program_prints_urls_and_stops_its_servers_on_a_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "oncebox.testing.servers"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        urls = dict(program.stdout.readline().split() for _ in range(2))
        with psycopg.connect(urls["PostgreSQL"]) as connection:
            home = connection.execute("show data_directory").fetchone()
        assert home is not None
        assert redis.Redis.from_url(urls["Valkey"]).ping()
        program.send_signal(number)
        assert program.wait() == 0
    assert not Path(home[0]).parent.exists()


@pytest.mark.parametrize("hours", [2, -2])
def test_a_skewed_clock_is_wrong_by_the_hours_asked_for_and_its_monotonic_time_is_true(hours: int) -> None:
    by = timedelta(hours=hours)
    before = time.monotonic()
    printed = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time(), time.monotonic())"],
        env=skewed_clock(by),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    skew = datetime.fromtimestamp(float(printed[0]), UTC) - datetime.now(UTC)
    assert abs(skew - by) < timedelta(minutes=30)
    assert before < float(printed[1]) < time.monotonic()
